// The CPU step: measure, decide, update, as one parallel region over the elements of all tensors each; the choice of an
// instruction-set level; registration on LibTorch's stable ABI. No arithmetic of its own.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cpu_step.h"
#include "float_mode.h"

namespace ruda {
namespace {

using torch::stable::Tensor;

// ---- instruction-set level -------------------------------------------------------------------------------------------

std::vector<const CpuLoops*> available_loops() {
  std::vector<const CpuLoops*> found;
#if defined(RUDA_PLAIN)
  found.push_back(plain::loops());
#else
  __builtin_cpu_init();
#if defined(RUDA_HAVE_V4)
  if (__builtin_cpu_supports("x86-64-v4")) found.push_back(v4::loops());
#endif
#if defined(RUDA_HAVE_V3)
  if (__builtin_cpu_supports("x86-64-v3")) found.push_back(v3::loops());
#endif
#if defined(RUDA_HAVE_V2)
  if (__builtin_cpu_supports("x86-64-v2")) found.push_back(v2::loops());
#endif
#endif
  return found;
}

// The best level of this machine, or the one that RUDA_CPU_LEVEL names: 4, 3, 2 (x86-64-v4 ...) or 0 (plain).
const CpuLoops& loops() {
  static const CpuLoops* const kChosen = [] {
    const std::vector<const CpuLoops*> found = available_loops();
    STD_TORCH_CHECK(!found.empty(),
                    "ruda_optim: this processor lacks x86-64-v2 (SSE4.2), the least the CPU kernel needs");
    const char* wanted = std::getenv("RUDA_CPU_LEVEL");
    if (wanted == nullptr || *wanted == '\0') return found.front();
    std::string known;
    for (const CpuLoops* level : found) {
      const std::string name = std::to_string(level->level);
      if (name == wanted) return level;
      known += (known.empty() ? "" : ", ") + name;
    }
    STD_TORCH_CHECK(false, "RUDA_CPU_LEVEL must be one of ", known, " on this machine; got '", wanted, "'");
  }();
  return *kChosen;
}

}  // namespace

// An Intel server core gains by prefetching; an AMD Zen 4 loses against its own hardware prefetcher.
// RUDA_CPU_PREFETCH=0 or 1 overrides.
bool prefetch() {
  static const bool kChosen = [] {
    const char* wanted = std::getenv("RUDA_CPU_PREFETCH");
    if (wanted != nullptr && *wanted != '\0') {
      STD_TORCH_CHECK(std::strcmp(wanted, "0") == 0 || std::strcmp(wanted, "1") == 0,
                      "RUDA_CPU_PREFETCH must be 0 or 1; got '", wanted, "'");
      return *wanted == '1';
    }
#if defined(RUDA_PLAIN)
    return false;
#else
    return __builtin_cpu_is("intel") != 0;
#endif
  }();
  return kChosen;
}

namespace {

// ---- arguments -------------------------------------------------------------------------------------------------------

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

TableView view(const Tensor& fields, const Tensor& layouts) {
  STD_TORCH_CHECK(fields.dim() == 2 && fields.size(0) == kFields, "the launch table needs ", int64_t{kFields}, " rows");
  return {data<int64_t>(fields), fields.size(1), data<const int64_t>(layouts)};
}

// ---- one parallel region ---------------------------------------------------------------------------------------------

// A piece begins on a cache line of every array, so that no two threads write one line of a flat tensor.
constexpr int64_t kPieceStep = 64;

// Cuts all elements of all columns into one contiguous piece per thread. run(k, begin, end) sees each element of the
// column columns[k] once.
template <class Run>
void for_each_piece(const TableView& table, const Columns& columns, const Run& run) {
  std::vector<int64_t> starts(static_cast<size_t>(columns.count) + 1);
  for (int64_t k = 0; k < columns.count; ++k) starts[k + 1] = starts[k] + table.at(kNumel, columns[k]) + kTensorCost;
  const int64_t total = starts.back();
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t pieces = std::max<int64_t>(1, std::min<int64_t>(threads, total / kGrain));

  // An element position inside column k for a position in the common line.
  const auto inside = [&](int64_t k, int64_t position) {
    const int64_t numel = table.at(kNumel, columns[k]);
    const int64_t element = std::clamp<int64_t>(position - starts[k] - kTensorCost, 0, numel);
    return element == numel ? numel : element / kPieceStep * kPieceStep;
  };
  const auto body = [&](int64_t first, int64_t last) {
    const FloatMode mode;
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t from_position = total / pieces * piece;
      const int64_t to_position = piece + 1 == pieces ? total : total / pieces * (piece + 1);
      int64_t k = std::upper_bound(starts.begin(), starts.end(), from_position) - starts.begin() - 1;
      for (; k < columns.count && starts[k] < to_position; ++k) {
        const int64_t begin = inside(k, from_position);
        const int64_t end = inside(k, to_position);
        if (begin < end) run(k, begin, end);
      }
    }
  };
  if (pieces == 1) {
    body(0, 1);
  } else {
    torch::stable::parallel_for(0, pieces, 1, body);
  }
}

// Asks for the beginning of a tensor's array while the tensor before it is worked on. A hardware prefetcher starts anew
// at every array, so where arrays are short the loops would wait for each of them. Always inlined, because GCC takes a
// function that only prefetches for one without effect.
[[gnu::always_inline]] inline void ask_for_start(const TableView& table, int64_t i, Field field) {
  constexpr int64_t kLine = 64, kMost = 1024;  // bytes
  const char* start = reinterpret_cast<const char*>(table.at(field, i));
  if (start == nullptr) return;
  const int64_t bytes = std::min(kMost, table.at(kNumel, i) * static_cast<int64_t>(sizeof(float)));
  for (int64_t offset = 0; offset < bytes; offset += kLine) __builtin_prefetch(start + offset, 0, 2);
}

// Merges in a fixed order, in FP64: the rows of one report give the same bits however many threads filled them.
StatsRow merged(const StatsRow* rows, int64_t count) {
  const FloatMode mode;
  StatsRow all{0.0f, 0.0f, 0.0f};
  for (int64_t i = 0; i < count; ++i) {
    all.scale = std::max(all.scale, rows[i].scale);
    all.bad = std::max(all.bad, rows[i].bad);
  }
  double sumsq = 0;
  for (int64_t i = 0; i < count; ++i) sumsq += rescaled_sumsq(rows[i], all.scale);
  all.sumsq = static_cast<float>(sumsq);
  return all;
}

void merge_runs(const StatsRow* rows, int64_t count, int64_t fan_in, StatsRow* out) {
  for (int64_t at = 0; at < count; at += fan_in) *out++ = merged(rows + at, std::min(fan_in, count - at));
}

constexpr int64_t kFanIn = 1024;  // stats_plan.FAN_IN

}  // namespace

// ---- measure, decide, update -----------------------------------------------------------------------------------------

int64_t rows_of(const TableView& table, const Columns& columns, int64_t chunk) {
  int64_t rows = 0;
  for (int64_t k = 0; k < columns.count; ++k) rows += (table.at(kNumel, columns[k]) + chunk - 1) / chunk;
  return rows;
}

void measure(const TableView& table, const Columns& columns, int64_t chunk, float inverse_scale, StatsRow* rows) {
  std::vector<int64_t> first_row(static_cast<size_t>(columns.count) + 1);
  int64_t elements = 0;
  for (int64_t k = 0; k < columns.count; ++k) {
    const int64_t numel = table.at(kNumel, columns[k]);
    first_row[k + 1] = first_row[k] + (numel + chunk - 1) / chunk;
    elements += numel;
  }
  const int64_t count = first_row.back();
  if (count == 0) return;
  const StatisticsArguments arguments{inverse_scale, prefetch()};
  const CpuLoops& kernels = loops();
  const auto body = [&](int64_t first, int64_t last) {
    const FloatMode mode;
    int64_t k = std::upper_bound(first_row.begin(), first_row.end(), first) - first_row.begin() - 1;
    for (int64_t row = first; row < last; ++row) {
      while (row >= first_row[k + 1]) ++k;
      if (row == first_row[k] && k + 1 < columns.count) ask_for_start(table, columns[k + 1], kGrad);
      const int64_t begin = (row - first_row[k]) * chunk;
      const int64_t end = std::min(begin + chunk, table.at(kNumel, columns[k]));
      rows[row] = kernels.analyze(table, columns[k], begin, end, arguments);
    }
  };
  const int64_t work = elements + count * kTensorCost;
  if (work < 2 * kGrain) {
    body(0, count);
  } else {
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, count * kGrain / work), body);
  }
}

StatsRow merge(const StatsRow* rows, int64_t count, bool stages) {
  if (!stages || count <= kFanIn) return merged(rows, count);
  std::vector<StatsRow> fewer(static_cast<size_t>((count + kFanIn - 1) / kFanIn));
  merge_runs(rows, count, kFanIn, fewer.data());
  return merge(fewer.data(), static_cast<int64_t>(fewer.size()), stages);
}

void decide(const TableView& table, const Columns& columns, const int64_t* groups, const DecisionInputs& inputs,
            const DecisionMemory& memory, Coefficients* coefficients) {
  const FloatMode mode;
  const Hyperparameters& first = *memory.hyperparameters;
  double* const report = memory.report;
  if (!inputs.measured) {
    report[0] = 0.0;
    report[1] = report[2] = std::nan("");
  }
  if (inputs.found_inf > 0.0) report[0] = 1.0;
  const Decision decision = decide_step(report[0], report[1], report[2], inputs.measured, inputs.check_finite,
                                        inputs.found_inf, first.max_norm, first.guard_epsilon);
  memory.decision[0] = decision.skip ? 1.0f : 0.0f;
  memory.decision[1] = decision.clip_factor;
  memory.decision[2] = inputs.inverse_scale;
  memory.decision[3] = 0.0f;
  memory.counts[0] += decision.skip;
  memory.counts[1] = decision.skip ? memory.counts[1] + 1 : 0;
  if (decision.skip) return;
  int64_t last = -1;  // the column whose row was computed last: most of them have the same one
  int64_t last_completed = -1;
  for (int64_t k = 0; k < columns.count; ++k) {
    const int64_t i = columns[k];
    float* const step = reinterpret_cast<float*>(table.at(kStep, i));
    const int64_t completed = static_cast<int64_t>(*step);
    if (last >= 0 && groups[last] == groups[i] && last_completed == completed) {
      coefficients[i] = coefficients[last];
    } else {
      coefficients[i] = coefficients_of_step(memory.hyperparameters[groups[i]], static_cast<double>(completed + 1));
    }
    last = i;
    last_completed = completed;
    *step += 1.0f;
  }
}

void update(const TableView& table, const Columns& columns, const UpdateArguments& arguments) {
  const CpuLoops& kernels = loops();
  for_each_piece(table, columns, [&](int64_t k, int64_t begin, int64_t end) {
    if (k + 1 < columns.count) {
      for (const Field field : {kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
        ask_for_start(table, columns[k + 1], field);
      }
    }
    kernels.update(table, columns[k], begin, end, arguments);
  });
}

// ---- operators -------------------------------------------------------------------------------------------------------

namespace {

// Every column of a table.
struct Whole {
  std::vector<int64_t> index;

  explicit Whole(const TableView& table) : index(static_cast<size_t>(table.count)) {
    std::iota(index.begin(), index.end(), 0);
  }
  operator Columns() const { return {index.data(), static_cast<int64_t>(index.size())}; }
};

const Coefficients* coefficient_rows(const Tensor& tensor) {
  return reinterpret_cast<const Coefficients*>(data<const float>(tensor));
}

void adamw_scaled_op(Tensor fields, Tensor layouts, Tensor coefficients, double inverse_scale, double clip_factor,
                     bool row_per_tensor) {
  const FloatMode mode;
  const TableView table = view(fields, layouts);
  update(table, Whole(table),
         {coefficient_rows(coefficients), static_cast<float>(inverse_scale), static_cast<float>(clip_factor),
          prefetch(), row_per_tensor});
}

void analyze_gradient_op(Tensor fields, Tensor layouts, Tensor rows, int64_t chunk, double inverse_scale) {
  const FloatMode mode;
  const TableView table = view(fields, layouts);
  const Whole columns(table);
  const int64_t count = rows_of(table, columns, chunk);
  STD_TORCH_CHECK(rows.numel() == count * kStatsRow, "analyze_gradient needs ", count, " statistics rows");
  measure(table, columns, chunk, static_cast<float>(inverse_scale), reinterpret_cast<StatsRow*>(data<float>(rows)));
}

void merge_gradient_stats_chunks_op(Tensor rows, Tensor merged_rows, int64_t fan_in) {
  const int64_t count = rows.numel() / kStatsRow;
  const int64_t groups = (count + fan_in - 1) / fan_in;
  STD_TORCH_CHECK(merged_rows.numel() == groups * kStatsRow, "merging ", count, " rows by ", fan_in, " needs room for ",
                  groups, " rows");
  merge_runs(reinterpret_cast<const StatsRow*>(data<const float>(rows)), count, fan_in,
             reinterpret_cast<StatsRow*>(data<float>(merged_rows)));
}

// The report of a whole step: (bad, scale, sumsq).
void merge_gradient_stats_op(Tensor rows, Tensor report) {
  STD_TORCH_CHECK(report.numel() == kStatsRow, "the report holds three numbers: bad, scale, sumsq");
  const StatsRow row = merged(reinterpret_cast<const StatsRow*>(data<const float>(rows)), rows.numel() / kStatsRow);
  float* out = data<float>(report);
  out[0] = row.bad;
  out[1] = row.scale;
  out[2] = row.sumsq;
}

// The table's kCoefficientRow holds each column's group. `rows` may be empty: then the report is there already, or
// nothing was measured.
void decide_op(Tensor fields, Tensor hyperparameters, Tensor report, Tensor decision, Tensor counts,
               Tensor coefficients, Tensor rows, bool has_rows, bool stages, bool measured, bool check_finite,
               double inverse_scale, double found_inf) {
  const TableView table = view(fields, fields);
  double* const out = data<double>(report);
  if (has_rows) {
    const StatsRow row =
        merge(reinterpret_cast<const StatsRow*>(data<const float>(rows)), rows.numel() / kStatsRow, stages);
    out[0] = row.bad;
    out[1] = row.scale;
    out[2] = row.sumsq;
  }
  const DecisionMemory memory{reinterpret_cast<const Hyperparameters*>(data<const double>(hyperparameters)), out,
                              data<float>(decision), data<int64_t>(counts)};
  decide(table, Whole(table), table.fields + kCoefficientRow * table.count,
         {measured, check_finite, static_cast<float>(inverse_scale), found_inf}, memory,
         reinterpret_cast<Coefficients*>(data<float>(coefficients)));
}

// Also reads the environment, which the functions that plan.cpp calls must not be the first to do: they cannot raise.
int64_t cpu_level(Tensor /*any tensor: an operator without one has no dispatch key*/) {
  prefetch();
  return loops().level;
}

}  // namespace
}  // namespace ruda

STABLE_TORCH_LIBRARY(ruda_optim, m) {
  m.def(
      "adamw_scaled(Tensor fields, Tensor layouts, Tensor coefficients, float inverse_scale, float clip_factor, "
      "bool row_per_tensor) -> ()");
  m.def(
      "decide(Tensor fields, Tensor hyperparameters, Tensor report, Tensor decision, Tensor counts, Tensor "
      "coefficients, "
      "Tensor rows, bool has_rows, bool stages, bool measured, bool check_finite, float inverse_scale, "
      "float found_inf) -> ()");
  m.def("analyze_gradient(Tensor fields, Tensor layouts, Tensor rows, int chunk, float inverse_scale) -> ()");
  m.def("merge_gradient_stats_chunks(Tensor rows, Tensor merged_rows, int fan_in) -> ()");
  m.def("merge_gradient_stats(Tensor rows, Tensor report) -> ()");
  m.def("cpu_level(Tensor any) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, CompositeExplicitAutograd, m) {
  m.impl("adamw_scaled", TORCH_BOX(&ruda::adamw_scaled_op));
  m.impl("analyze_gradient", TORCH_BOX(&ruda::analyze_gradient_op));
  m.impl("merge_gradient_stats_chunks", TORCH_BOX(&ruda::merge_gradient_stats_chunks_op));
  m.impl("merge_gradient_stats", TORCH_BOX(&ruda::merge_gradient_stats_op));
  m.impl("decide", TORCH_BOX(&ruda::decide_op));
  m.impl("cpu_level", TORCH_BOX(&ruda::cpu_level));
}
