// What one instruction-set level offers to cpu.cpp: cpu_loops.cpp is compiled once per level and fills one of these.
#pragma once

#include <cstdint>

#include "adamw_update.h"
#include "gradient_stats.h"
#include "table.h"

namespace ruda {

// A borrowed view of LaunchTable.fields and LaunchTable.layouts.
struct TableView {
  int64_t* fields;
  int64_t count;
  const int64_t* layouts;

  int64_t& at(Field field, int64_t tensor) const { return fields[static_cast<int64_t>(field) * count + tensor]; }
};

struct UpdateArguments {
  const Coefficients* coefficients;
  float inverse_scale;
  float clip_factor;
  bool prefetch;        // ask for memory ahead of the loops; changes no result
  bool row_per_tensor;  // the row of a tensor's coefficients is its column, not what the table says
};

struct StatisticsArguments {
  float inverse_scale;
  bool prefetch;
};

struct CpuLoops {
  int level;  // 4, 3, 2 for x86-64-v4, v3, v2; 0 for the plain build
  // Updates the elements [begin, end) of one tensor.
  void (*update)(const TableView&, int64_t tensor, int64_t begin, int64_t end, const UpdateArguments&);
  // Describes the gradient elements [begin, end) of one tensor.
  StatsRow (*analyze)(const TableView&, int64_t tensor, int64_t begin, int64_t end, const StatisticsArguments&);
};

namespace v4 {
const CpuLoops* loops();
}
namespace v3 {
const CpuLoops* loops();
}
namespace v2 {
const CpuLoops* loops();
}
namespace plain {
const CpuLoops* loops();
}

}  // namespace ruda
