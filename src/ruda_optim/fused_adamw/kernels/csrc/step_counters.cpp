// The step counters of a launch table, for every device. Called by kernels/host.py through ctypes: a step spends less
// time here than the dispatcher would take to get here.
#include "cpu_loops.h"
#include "export.h"

// Gives every tensor its row of the coefficient table: tensors of one group and one step count share a row. Fills
// `pairs` (count, 2) with (group, completed steps) per row and returns how many rows there are.
RUDA_EXPORT int64_t ruda_assign_coefficients(int64_t* fields, int64_t count, const int64_t* groups, int64_t* pairs) {
  using namespace ruda;
  const TableView table{fields, count, nullptr};
  int64_t rows = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t completed = static_cast<int64_t>(*reinterpret_cast<const float*>(table.at(kStep, i)));
    const auto matches = [&](int64_t row) { return pairs[2 * row] == groups[i] && pairs[2 * row + 1] == completed; };
    if (rows == 0 || !matches(last)) {
      for (last = 0; last < rows && !matches(last); ++last) {
      }
      if (last == rows) {
        pairs[2 * rows] = groups[i];
        pairs[2 * rows + 1] = completed;
        ++rows;
      }
    }
    table.at(kCoefficientRow, i) = last;
  }
  return rows;
}

// Counts the step that was just launched, and clears FIRST: from now on the moments hold values.
RUDA_EXPORT void ruda_advance_steps(int64_t* fields, int64_t count) {
  using namespace ruda;
  const TableView table{fields, count, nullptr};
  for (int64_t i = 0; i < count; ++i) {
    if (float* step = reinterpret_cast<float*>(table.at(kStep, i))) *step += 1.0f;
    table.at(kFlags, i) &= ~static_cast<int64_t>(kFirst);
  }
}
