// The CPU step of a plan: one call from Python for all of it.
#include "plan.h"

#include "export.h"
#include "float_mode.h"

namespace ruda {
namespace {

// What a gradient scaler says of one step.
struct StepScale {
  float inverse;
  double found_inf;
};

// The parameters of the step that was bound, as a new list.
PyObject* updated_parameters(const Plan& plan, PyObject* groups) {
  PyObject* const list = PyList_New(static_cast<intptr_t>(plan.updated.size()));
  if (list == nullptr) return nullptr;
  size_t group = 0;
  int64_t first = 0;
  for (size_t k = 0; k < plan.updated.size(); ++k) {
    while (plan.updated[k] >= first + plan.group_sizes[group]) first += plan.group_sizes[group++];
    PyObject* const parameter =
        PyList_GetItem(PyList_GetItem(groups, static_cast<intptr_t>(group)), plan.updated[k] - first);
    Py_IncRef(parameter);
    PyList_SetItem(list, static_cast<intptr_t>(k), parameter);
  }
  return list;
}

// Getting the interpreter back can take a switch interval, a hundred times a small step.
bool worth_releasing(const TableView& table, const Columns& columns) {
  int64_t elements = 0;
  for (int64_t k = 0; k < columns.count; ++k) elements += table.at(kNumel, columns[k]) + kTensorCost;
  return elements >= 2 * kGrain;
}

// True if the groups, a list of dicts, hold the very objects that they held when their hyperparameters were read.
bool same_groups(const Plan& plan, PyObject* groups) {
  const intptr_t count = PyList_Size(groups);
  if (count != static_cast<intptr_t>(plan.groups.size())) return false;
  for (intptr_t g = 0; g < count; ++g) {
    PyObject* const group = PyList_GetItem(groups, g);
    const Group& known = plan.groups[g];
    if (PyDict_Size(group) != known.length) return false;
    for (int k = 1; k < kGroupKeys; ++k) {
      if (PyDict_GetItem(group, plan.reader.group_keys[k]) != known.values[k - 1]) return false;
    }
  }
  return true;
}

// The groups' lists of parameters, as a new list. Null if one is no list, or if an exception is set.
PyObject* parameter_lists(const Plan& plan, PyObject* groups) {
  const intptr_t count = PyList_Size(groups);
  PyObject* const lists = PyList_New(count);
  for (intptr_t g = 0; lists != nullptr && g < count; ++g) {
    PyObject* const list = PyDict_GetItem(PyList_GetItem(groups, g), plan.reader.group_keys[0]);
    if (list == nullptr || PyList_Size(list) < 0) {
      PyErr_Clear();
      Py_DecRef(lists);
      return nullptr;
    }
    Py_IncRef(list);
    PyList_SetItem(lists, g, list);
  }
  return lists;
}

// Measures and decides; true if the step is to be taken.
bool run_decision(const Plan& plan, const Step& step, const StepScale& scale, bool release) {
  const TableView table{step.fields, plan.columns, step.layouts};
  const Columns columns = plan.active_columns();
  const FloatMode mode;
  const float inverse_scale = scale.inverse;
  const WithoutInterpreter released(release);
  if (step.measured) {
    measure(table, columns, step.chunk, inverse_scale, step.rows);
    const StatsRow all = merge(step.rows, rows_of(table, columns, step.chunk), step.stages != 0);
    step.memory.report[0] = all.bad;
    step.memory.report[1] = all.scale;
    step.memory.report[2] = all.sumsq;
  }
  decide(table, columns, step.groups, {step.measured != 0, step.check_finite != 0, inverse_scale, scale.found_inf},
         step.memory, step.coefficients);
  return step.memory.decision[0] == 0.0f;
}

void run_update(const Plan& plan, const Step& step, const StepScale& scale, bool release) {
  const FloatMode mode;
  const TableView table{step.fields, plan.columns, step.layouts};
  const WithoutInterpreter released(release);
  update(table, plan.active_columns(), {step.coefficients, scale.inverse, step.memory.decision[1], prefetch(), true});
}

// Takes the step of a plan that is bound: measure, decide, version counters, update. kSkipped if it was decided to do
// nothing.
int64_t take_step(const Plan& plan, PyObject* groups, const StepScale& scale) {
  Step& step = *plan.step;
  step.updated = static_cast<int64_t>(plan.updated.size());
  const Owned parameters(updated_parameters(plan, groups));
  if (parameters.get() == nullptr) return kBound;  // an exception is set
  const bool release = worth_releasing(plan.view(), plan.active_columns());
  std::vector<PyObject*> state_tensors;  // other threads may replace them meanwhile
  if (release) {
    for (const Held& one : plan.held) state_tensors.push_back(one.object);
  }
  const OwnedAll state_lives(state_tensors);
  if (!run_decision(plan, step, scale, release)) return kSkipped;
  // A function of C: no signal handler runs on the way to the update, so nothing can fail after the decision.
  const Owned none(PyObject_CallFunctionObjArgs(plan.reader.increment_version, parameters.get(), nullptr));
  if (none.get() != nullptr) run_update(plan, step, scale, release);
  return kBound;
}

// The CPU step as a function of Python: (groups, gradients, state, held, start, inverse_scale, found_inf, read). As
// ruda_plan_bind, but `groups` are the optimizer's, a list of dicts. Unless `read`, returns kUnread if they hold other
// objects than those of ruda_plan_note. A plan that is bound takes the step.
PyObject* step_function(PyObject* self, PyObject* const* arguments, intptr_t /*always eight*/) {
  Plan* const plan = static_cast<Plan*>(PyLong_AsVoidPtr(self));
  PyObject* const groups = arguments[0];
  const int64_t start = PyLong_AsLongLong(arguments[4]);
  const StepScale scale{static_cast<float>(PyFloat_AsDouble(arguments[5])), PyFloat_AsDouble(arguments[6])};
  if (start == 0 && PyObject_IsTrue(arguments[7]) == 0 && !same_groups(*plan, groups)) {
    PyErr_Clear();  // something is no dict
    return PyLong_FromLongLong(kUnread);
  }
  const Owned lists(parameter_lists(*plan, groups));
  int64_t found = kChanged;
  if (lists.get() != nullptr) {
    found = bind(plan, lists.get(), arguments[1], arguments[2], arguments[3], start);
    if (found == kBound) found = take_step(*plan, lists.get(), scale);
  }
  return PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLongLong(found);
}

}  // namespace
}  // namespace ruda

using ruda::Plan;

// Remembers what the groups held when their hyperparameters were read: a list of tuples, each the number of a group's
// entries and the values of Reader::group_keys without the parameters. The caller keeps the tuples. None: every step asks.
RUDA_EXPORT void ruda_plan_note(Plan* plan, PyObject* groups) {
  using namespace ruda;
  plan->groups.clear();
  for (intptr_t g = 0, count = is_none(groups) ? 0 : PyList_Size(groups); g < count; ++g) {
    PyObject* const values = PyList_GetItem(groups, g);
    Group group{static_cast<intptr_t>(PyLong_AsLongLong(PyTuple_GetItem(values, 0))), {}};
    for (int k = 1; k < kGroupKeys; ++k) group.values[k - 1] = PyTuple_GetItem(values, k);
    plan->groups.push_back(group);
  }
}

// The function that takes a CPU step with the memory of `step`. Neither may outlive the plan.
RUDA_EXPORT PyObject* ruda_plan_stepper(Plan* plan, ruda::Step* step) {
  using namespace ruda;
  static PyMethodDef method{"step", step_function, kFastCall, nullptr};
  plan->step = step;
  const Owned self(PyLong_FromVoidPtr(plan));
  return self.get() == nullptr ? nullptr : PyCFunction_NewEx(&method, self.get(), nullptr);
}
