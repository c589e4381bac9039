// The three parts of a step on the CPU, measure, decide, update, over some of the columns of a launch table. cpu.cpp
// registers each as an operator; plan.cpp runs them in one call.
#pragma once

#include <cstdint>

#include "cpu_loops.h"

namespace ruda {

// Which columns of a table take part, in the order of their statistics rows.
struct Columns {
  const int64_t* index;
  int64_t count;

  int64_t operator[](int64_t k) const { return index[k]; }
};

// Writes one row per `chunk` gradient elements of each column.
void measure(const TableView& table, const Columns& columns, int64_t chunk, float inverse_scale, StatsRow* rows);
int64_t rows_of(const TableView& table, const Columns& columns, int64_t chunk);

// Merges rows in a fixed order; `stages` merges runs of 1024 first.
StatsRow merge(const StatsRow* rows, int64_t count, bool stages);

// The memory of a decision: kernels/decision.py describes it.
struct DecisionMemory {
  const Hyperparameters* hyperparameters;
  double* report;
  float* decision;
  int64_t* counts;
};

// What a decision is made from, beside the report that lies in its memory.
struct DecisionInputs {
  bool measured, check_finite;
  float inverse_scale;
  double found_inf;
};

// Decides, and writes row i of `coefficients` for each column i. groups[i] is its row of the hyperparameters.
void decide(const TableView& table, const Columns& columns, const int64_t* groups, const DecisionInputs& inputs,
            const DecisionMemory& memory, Coefficients* coefficients);

void update(const TableView& table, const Columns& columns, const UpdateArguments& arguments);

// Whether the loops ask for memory ahead of time.
bool prefetch();

// Work, in elements, below which a second thread costs more than it brings.
constexpr int64_t kGrain = 32768;
// A tensor costs about as much as this many elements before its first element moves.
constexpr int64_t kTensorCost = 128;

}  // namespace ruda
