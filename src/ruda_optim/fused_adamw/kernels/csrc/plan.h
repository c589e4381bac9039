// A plan: what the tensors of one optimizer looked like when its launch table was built. It notices when they look
// different and finds the gradients of a step (plan.cpp), and on the CPU runs the whole step in the same call
// (plan_step.cpp). It holds no tensor: objects are known by address, and by what they describe. Called by binding.py with
// the interpreter lock held; an exception that is set on return is raised there.
#pragma once

#include <vector>

#include "cpu_step.h"
#include "tensor_record.h"

namespace ruda {

// A state tensor of the plan. The object is only compared, and described while the state's dict holds it.
struct Held {
  PyObject* object;
  Record record;
};

// Everything that binding.py decides about a CPU step; a ctypes.Structure there.
struct Step {
  int64_t* fields;
  const int64_t* layouts;
  const int64_t* groups;  // per column
  DecisionMemory memory;
  Coefficients* coefficients;
  StatsRow* rows;
  int64_t chunk;
  int64_t updated;  // out: the number of parameters
  int32_t measured, check_finite, stages;
};

// What a parameter group holds besides its parameters, in the order of Reader::group_keys; the caller keeps the objects.
struct Group {
  intptr_t length;
  PyObject* values[kGroupKeys - 1];
};

// Written memory in order of its addresses. `reached` is where this range or one before it ends, whichever is farther.
struct Range {
  int64_t start, reached;
};

struct Plan {
  Reader reader;
  int64_t* fields;
  int64_t columns;
  std::vector<int64_t> group_sizes;
  std::vector<PyObject*> parameters;         // of all groups; only compared
  std::vector<int64_t> column_of;            // of each parameter: its column, or kUnknown, or kEmpty
  std::vector<bool> sharded;                 // of each parameter: whether it is a DTensor
  std::vector<Record> records;               // per column
  std::vector<int64_t> shapes, held_shapes;  // sizes and strides of the records
  std::vector<PyObject*> entries;            // keys, dicts and values of the state, in order; only compared
  std::vector<Held> held;
  std::vector<Range> written;                      // all memory that a step may write, by address
  std::vector<int64_t> active;                     // columns of the step that was bound last
  std::vector<int64_t> updated;                    // positions of its parameters, empty ones included
  std::vector<int64_t> next_active, next_updated;  // the same of a step that is being bound
  std::vector<Group> groups;                       // as their hyperparameters were read last; empty if unknown
  Step* step = nullptr;                            // of ruda_plan_stepper

  TableView view() const { return {fields, columns, nullptr}; }
  Columns active_columns() const { return {active.data(), static_cast<int64_t>(active.size())}; }
};

constexpr int64_t kUnknown = -1;  // a parameter that had no gradient yet
constexpr int64_t kEmpty = -2;    // a parameter without elements

constexpr int64_t kBound = -1;
constexpr int64_t kChanged = -2;
constexpr int64_t kSkipped = -3;
constexpr int64_t kUnread = -4;

// Finds the gradients of a step; see ruda_plan_bind.
int64_t bind(Plan* plan, PyObject* groups, PyObject* gradients, PyObject* state, PyObject* held, int64_t start);

}  // namespace ruda
