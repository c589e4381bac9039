// What binding.py asks of a plan; see plan.h.
#include "plan.h"

#include <algorithm>
#include <iterator>

#include "export.h"

namespace ruda {
namespace {

bool single(const DLTensor& tensor) {
  return std::all_of(tensor.shape, tensor.shape + tensor.ndim, [](int64_t size) { return size == 1; });
}

// Torch's tensors of a model lie all over memory, and most of the time goes into waiting for them. What is asked for
// here may be gone: a prefetch of any address is harmless. Always inlined, because GCC takes a function that only
// prefetches for one without effect.
constexpr int64_t kAhead = 20;
[[gnu::always_inline]] inline void ask_around(int64_t address) {
  for (int64_t line = -64; line <= 128; line += 64) __builtin_prefetch(reinterpret_cast<const void*>(address + line));
}
[[gnu::always_inline]] inline void ask_for(const Record& record, const PyObject* parameter) {
  __builtin_prefetch(parameter);
  __builtin_prefetch(reinterpret_cast<const void*>(record.gradient_object));
  __builtin_prefetch(reinterpret_cast<const void*>(record.storage));
  ask_around(record.sizes);
  ask_around(record.gradient_sizes);
}

// False if a step writes nothing between the addresses.
bool near_written(const Plan& plan, int64_t start, int64_t end) {
  const auto after = std::lower_bound(plan.written.begin(), plan.written.end(), end,
                                      [](const Range& range, int64_t address) { return range.start < address; });
  return after != plan.written.begin() && std::prev(after)->reached > start;
}

// Binds the gradient of one column. False if the caller has to settle it.
bool bind_gradient(const Plan& plan, int64_t i, Record& record, PyObject* gradient) {
  const TableView table = plan.view();
  int64_t& flags = table.at(kFlags, i);
  DLTensor g;
  if (!plan.reader.describe(gradient, &g) || gradient_flag(g) != (flags & (kGradFp16 | kGradBf16)) ||
      (flags & kStrided) || g.data == nullptr || !same_layout(g, record, plan.shapes.data() + record.shape)) {
    return false;
  }
  // Asking whether a gradient is negated costs as much as all the rest, so it is asked once for each gradient: object,
  // tensor and memory. Its successor may have the three addresses of a dead one; to be negated and flat as well, with
  // more than one element, it must have been made by as_strided over a conjugate.
  const int64_t pointer = address_of(g);
  const int64_t object = reinterpret_cast<int64_t>(gradient);
  const int64_t inside = reinterpret_cast<int64_t>(g.shape);
  const bool known = table.at(kGrad, i) == pointer && record.gradient_object == object &&
                     record.gradient_sizes == inside && !single(g);
  if (known) return true;
  if (table.at(kGrad, i) != pointer && near_written(plan, pointer, end_of(g))) return false;
  if (plan.reader.negated(gradient)) return false;
  record.gradient_object = object;
  record.gradient_sizes = inside;
  table.at(kGrad, i) = pointer;
  int64_t all = 0;
  for (int64_t field = kParam; field <= kRemainder; ++field) all |= table.at(static_cast<Field>(field), i);
  flags = (all & 15) == 0 ? flags | kAligned : flags & ~static_cast<int64_t>(kAligned);
  return true;
}

// True if the lists hold the very parameters of the plan. Their == compares values.
bool same_parameters(const Plan& plan, PyObject* groups) {
  if (PyList_Size(groups) != static_cast<intptr_t>(plan.group_sizes.size())) return false;
  size_t position = 0;
  for (size_t g = 0; g < plan.group_sizes.size(); ++g) {
    PyObject* const group = PyList_GetItem(groups, static_cast<intptr_t>(g));
    if (PyList_Size(group) != plan.group_sizes[g]) return false;
    for (int64_t i = 0; i < plan.group_sizes[g]; ++i) {
      if (PyList_GetItem(group, i) != plan.parameters[position++]) return false;
    }
  }
  return true;
}

// True if the state consists of the very objects of the plan.
bool same_entries(const Plan& plan, PyObject* state) {
  size_t seen = 0;
  const auto next_is = [&](PyObject* object) { return seen < plan.entries.size() && plan.entries[seen++] == object; };
  PyObject *key, *entry, *name, *value;
  for (intptr_t at = 0; PyDict_Next(state, &at, &key, &entry) != 0;) {
    if (!next_is(key) || !next_is(entry)) return false;
    for (intptr_t inside = 0; PyDict_Next(entry, &inside, &name, &value) != 0;) {
      if (!next_is(value)) return false;
    }
  }
  return seen == plan.entries.size();
}

// True if the state tensors have the memory that they had.
bool same_memory(const Plan& plan) {
  for (size_t i = 0; i < plan.held.size(); ++i) {
    const Held& ahead = plan.held[std::min(i + kAhead, plan.held.size() - 1)];
    __builtin_prefetch(ahead.object);
    ask_around(ahead.record.sizes);
    if (!still_is(plan.reader, plan.held[i].object, plan.held[i].record, plan.held_shapes)) return false;
  }
  return true;
}

// True while an empty parameter is empty.
bool still_empty(const Plan& plan, int64_t position, PyObject* parameter) {
  DLTensor tensor;
  return !plan.reader.describe(parameter, plan.sharded[position], &tensor) || numel_of(tensor) == 0;
}

// Finds the gradients of the parameters from `start` on; see ruda_plan_bind. A position is one among all parameters.
int64_t bind_positions(Plan& plan, PyObject* groups, PyObject* gradients, PyObject* held, int64_t start) {
  const bool own = is_none(gradients);
  int64_t position = 0;
  for (size_t g = 0; g < plan.group_sizes.size(); ++g) {
    const int64_t size = plan.group_sizes[g];
    if (position + size <= start) {
      position += size;
      continue;
    }
    PyObject* const group = PyList_GetItem(groups, static_cast<intptr_t>(g));
    for (int64_t i = std::max<int64_t>(0, start - position); i < size; ++i) {
      const int64_t at = position + i;
      if (i + kAhead < size && plan.column_of[at + kAhead] >= 0) {
        ask_for(plan.records[plan.column_of[at + kAhead]], plan.parameters[at + kAhead]);
      }
      PyObject* const parameter = PyList_GetItem(group, i);
      if (parameter == nullptr) return at;  // an exception is set: the list has become shorter
      const Owned kept(parameter);          // `grad` may be a property, and may change the list
      Py_IncRef(parameter);
      PyObject* gradient = own ? PyObject_GetAttr(parameter, plan.reader.grad) : PyList_GetItem(gradients, at);
      if (gradient == nullptr) return at;  // an exception is set
      if (!own) Py_IncRef(gradient);
      const bool present = !is_none(gradient);
      if (PyList_SetItem(held, at, gradient) != 0) return at;
      if (!present) continue;
      const int64_t column = plan.column_of[at];
      if (column == kUnknown) return kChanged;
      plan.next_updated.push_back(at);
      if (column == kEmpty) {
        if (!still_empty(plan, at, parameter)) return kChanged;
        continue;
      }
      Record& record = plan.records[column];
      if (!still_is(plan.reader, parameter, record, plan.shapes)) return kChanged;
      plan.next_active.push_back(column);
      if (!bind_gradient(plan, column, record, gradient)) return at;
    }
    position += size;
  }
  return kBound;
}

}  // namespace

int64_t bind(Plan* plan, PyObject* groups, PyObject* gradients, PyObject* state, PyObject* held, int64_t start) {
  if (start == 0) {
    plan->next_active.clear();
    plan->next_updated.clear();
    if (!same_parameters(*plan, groups)) return kChanged;
    if (!is_none(state) && !is_true(state) && !same_entries(*plan, state)) return kChanged;
    if (!is_none(state) && !same_memory(*plan)) return kChanged;
  }
  const int64_t found = bind_positions(*plan, groups, gradients, held, start);
  if (found != kBound) return found;
  plan->active.swap(plan->next_active);
  plan->updated.swap(plan->next_updated);
  return kBound;
}

}  // namespace ruda

using ruda::Plan;

// A plan for the parameters of `groups`, a list of lists. kinds[i] is the column of the i-th parameter, or kUnknown, or
// kEmpty; sharded[i] says whether it is a DTensor; storages[i] is where torch's storage object lies, only ever prefetched.
// Null if a parameter with a column has no strided memory.
RUDA_EXPORT Plan* ruda_plan_new(const ruda::Reader* reader, int64_t* fields, int64_t columns, PyObject* groups,
                                const int64_t* kinds, const int64_t* sharded, const int64_t* storages) {
  using namespace ruda;
  Plan* const plan = new Plan{};
  plan->reader = *reader;
  plan->fields = fields;
  plan->columns = columns;
  plan->records.resize(columns);
  for (int64_t g = 0, count = PyList_Size(groups); g < count; ++g) {
    PyObject* const group = PyList_GetItem(groups, g);
    plan->group_sizes.push_back(PyList_Size(group));
    for (int64_t i = 0; i < plan->group_sizes.back(); ++i) {
      const size_t position = plan->parameters.size();
      PyObject* const parameter = PyList_GetItem(group, i);
      plan->parameters.push_back(parameter);
      plan->column_of.push_back(kinds[position]);
      plan->sharded.push_back(sharded[position] != 0);
      if (kinds[position] < 0) continue;
      Record& record = plan->records[kinds[position]];
      if (!describe(plan->reader, parameter, sharded[position] != 0, &record, &plan->shapes)) {
        delete plan;
        return nullptr;
      }
      record.storage = storages[position];
    }
  }
  return plan;
}

RUDA_EXPORT void ruda_plan_free(Plan* plan) { delete plan; }

// Remembers the state: its objects, and the memory of `tensors`, a list of those that the table points into. sharded[i]
// says whether the i-th of them is a DTensor. Returns whether all of them have strided memory.
RUDA_EXPORT bool ruda_plan_watch(Plan* plan, PyObject* state, PyObject* tensors, const int64_t* sharded) {
  using namespace ruda;
  plan->entries.clear();
  plan->held.clear();
  plan->held_shapes.clear();
  plan->written.clear();
  PyObject *key, *entry, *name, *value;
  for (intptr_t at = 0; PyDict_Next(state, &at, &key, &entry) != 0;) {
    plan->entries.push_back(key);
    plan->entries.push_back(entry);
    for (intptr_t inside = 0; PyDict_Next(entry, &inside, &name, &value) != 0;) plan->entries.push_back(value);
  }
  for (int64_t i = 0, count = PyList_Size(tensors); i < count; ++i) {
    PyObject* const object = PyList_GetItem(tensors, i);
    DLTensor tensor;
    if (!plan->reader.describe(object, sharded[i] != 0, &tensor)) return false;
    plan->held.push_back({object, {}});
    describe(plan->reader, object, sharded[i] != 0, &plan->held.back().record, &plan->held_shapes);
    plan->written.push_back({address_of(tensor), end_of(tensor)});
  }
  for (size_t i = 0; i < plan->parameters.size(); ++i) {
    DLTensor tensor;
    if (plan->column_of[i] < 0 || !plan->reader.describe(plan->parameters[i], plan->sharded[i], &tensor)) continue;
    plan->written.push_back({address_of(tensor), end_of(tensor)});
  }
  std::sort(plan->written.begin(), plan->written.end(), [](auto& a, auto& b) { return a.start < b.start; });
  int64_t reached = 0;
  for (Range& range : plan->written) range.reached = reached = std::max(reached, range.reached);
  return true;
}

// True if the plan's steps may write memory between two addresses: what lies there has to be looked at closely.
RUDA_EXPORT bool ruda_plan_near_written(const Plan* plan, int64_t start, int64_t end) {
  return ruda::near_written(*plan, start, end);
}

// True if the lists of parameters are those of the plan.
RUDA_EXPORT bool ruda_plan_fits(const Plan* plan, PyObject* groups) { return ruda::same_parameters(*plan, groups); }

// Finds the gradients of a step and writes their addresses into the table. `groups` is a list of lists of parameters,
// `gradients` a list with one entry per parameter, or None for the parameters' own `.grad`; `state` is the optimizer's, or
// True where only the memory of its tensors can have changed, or None where nothing can. `held` has one entry per parameter and receives the gradients, so that they live
// until the caller drops it: a computed `.grad` has no other owner.
//
// Returns kBound, or kChanged if parameters or state are no longer what the plan was built for, or the position of a
// gradient that is not laid out like its parameter, or not of the table's dtype, or lazily negated: the caller settles
// that one and calls again with the position after it. Parameters and state are looked at when `start` is 0.
RUDA_EXPORT int64_t ruda_plan_bind(Plan* plan, PyObject* groups, PyObject* gradients, PyObject* state, PyObject* held,
                                   int64_t start) {
  return ruda::bind(plan, groups, gradients, state, held, start);
}

// The columns of the step that was bound last, and then the positions of its parameters. Both arrays are large enough.
RUDA_EXPORT int64_t ruda_plan_active(const Plan* plan, int64_t* columns, int64_t* positions, int64_t* updated) {
  std::copy(plan->active.begin(), plan->active.end(), columns);
  std::copy(plan->updated.begin(), plan->updated.end(), positions);
  *updated = static_cast<int64_t>(plan->updated.size());
  return static_cast<int64_t>(plan->active.size());
}
