// The CPU operator: registration on LibTorch's stable ABI, the choice of an instruction-set level, and one parallel
// region over the elements of all tensors. No arithmetic of its own.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu_loops.h"

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

// Whether the loops ask for memory ahead of time. An Intel server core gains by it; an AMD Zen 4 loses against its own
// hardware prefetcher. RUDA_CPU_PREFETCH=0 or 1 overrides.
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

// A tensor costs about as much as this many elements before its first element moves.
constexpr int64_t kTensorCost = 128;
// Work below which a second thread costs more than it brings.
constexpr int64_t kGrain = 32768;
// A piece begins on a cache line of every array, so that no two threads write one line of a flat tensor.
constexpr int64_t kPieceStep = 64;

// Cuts all elements of all tensors into one contiguous piece per thread. run(tensor, begin, end) sees each element once.
template <class Run>
void for_each_piece(const TableView& table, const Run& run) {
  std::vector<int64_t> starts(static_cast<size_t>(table.count) + 1);
  for (int64_t i = 0; i < table.count; ++i) starts[i + 1] = starts[i] + table.at(kNumel, i) + kTensorCost;
  const int64_t total = starts.back();
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t pieces = std::max<int64_t>(1, std::min<int64_t>(threads, total / kGrain));

  // An element position inside tensor i for a position in the common line.
  const auto inside = [&](int64_t i, int64_t position) {
    const int64_t numel = table.at(kNumel, i);
    const int64_t element = std::clamp<int64_t>(position - starts[i] - kTensorCost, 0, numel);
    return element == numel ? numel : element / kPieceStep * kPieceStep;
  };
  const auto body = [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t from_position = total / pieces * piece;
      const int64_t to_position = piece + 1 == pieces ? total : total / pieces * (piece + 1);
      int64_t i = std::upper_bound(starts.begin(), starts.end(), from_position) - starts.begin() - 1;
      for (; i < table.count && starts[i] < to_position; ++i) {
        const int64_t begin = inside(i, from_position);
        const int64_t end = inside(i, to_position);
        if (begin < end) run(i, begin, end);
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

// ---- kernels ---------------------------------------------------------------------------------------------------------

void adamw_scaled(Tensor fields, Tensor layouts, Tensor coefficients, double inverse_scale, double clip_factor) {
  const TableView table = view(fields, layouts);
  const UpdateArguments arguments{reinterpret_cast<const Coefficients*>(data<const float>(coefficients)),
                                  static_cast<float>(inverse_scale), static_cast<float>(clip_factor), prefetch()};
  const CpuLoops& kernels = loops();
  for_each_piece(table, [&](int64_t i, int64_t begin, int64_t end) {
    if (i + 1 < table.count) {
      for (const Field field : {kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) ask_for_start(table, i + 1, field);
    }
    kernels.update(table, i, begin, end, arguments);
  });
}

// One row per `chunk` elements of each tensor, in table order.
void analyze_gradient(Tensor fields, Tensor layouts, Tensor rows, int64_t chunk, double inverse_scale) {
  const TableView table = view(fields, layouts);
  std::vector<int64_t> first_row(static_cast<size_t>(table.count) + 1);
  int64_t elements = 0;
  for (int64_t i = 0; i < table.count; ++i) {
    first_row[i + 1] = first_row[i] + (table.at(kNumel, i) + chunk - 1) / chunk;
    elements += table.at(kNumel, i);
  }
  const int64_t count = first_row.back();
  STD_TORCH_CHECK(rows.numel() == count * kStatsRow, "analyze_gradient needs ", count, " statistics rows");
  StatsRow* out = reinterpret_cast<StatsRow*>(data<float>(rows));
  const StatisticsArguments arguments{static_cast<float>(inverse_scale), prefetch()};
  const CpuLoops& kernels = loops();
  const auto body = [&](int64_t first, int64_t last) {
    int64_t i = std::upper_bound(first_row.begin(), first_row.end(), first) - first_row.begin() - 1;
    for (int64_t row = first; row < last; ++row) {
      while (row >= first_row[i + 1]) ++i;
      if (row == first_row[i] && i + 1 < table.count) ask_for_start(table, i + 1, kGrad);
      const int64_t begin = (row - first_row[i]) * chunk;
      const int64_t end = std::min(begin + chunk, table.at(kNumel, i));
      out[row] = kernels.analyze(table, i, begin, end, arguments);
    }
  };
  if (count == 0) return;
  if (elements + count * kTensorCost < 2 * kGrain) {
    body(0, count);
  } else {
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, count * kGrain / (elements + count * kTensorCost)),
                                body);
  }
}

// Merges in a fixed order, in FP64: the rows of one report give the same bits however many threads filled them.
StatsRow merged(const StatsRow* rows, int64_t count) {
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

void merge_gradient_stats_chunks(Tensor rows, Tensor merged_rows, int64_t fan_in) {
  const int64_t count = rows.numel() / kStatsRow;
  const int64_t groups = (count + fan_in - 1) / fan_in;
  STD_TORCH_CHECK(merged_rows.numel() == groups * kStatsRow, "merging ", count, " rows by ", fan_in, " needs room for ",
                  groups, " rows");
  const StatsRow* in = reinterpret_cast<const StatsRow*>(data<const float>(rows));
  StatsRow* out = reinterpret_cast<StatsRow*>(data<float>(merged_rows));
  for (int64_t g = 0; g < groups; ++g) out[g] = merged(in + g * fan_in, std::min(fan_in, count - g * fan_in));
}

// The report of a whole step: (bad, scale, sumsq).
void merge_gradient_stats(Tensor rows, Tensor report) {
  STD_TORCH_CHECK(report.numel() == kStatsRow, "the report holds three numbers: bad, scale, sumsq");
  const StatsRow row = merged(reinterpret_cast<const StatsRow*>(data<const float>(rows)), rows.numel() / kStatsRow);
  float* out = data<float>(report);
  out[0] = row.bad;
  out[1] = row.scale;
  out[2] = row.sumsq;
}

int64_t cpu_level(Tensor /*any tensor: an operator without one has no dispatch key*/) { return loops().level; }

}  // namespace
}  // namespace ruda

STABLE_TORCH_LIBRARY(ruda_optim, m) {
  m.def(
      "adamw_scaled(Tensor fields, Tensor layouts, Tensor coefficients, float inverse_scale, float clip_factor) -> ()");
  m.def("analyze_gradient(Tensor fields, Tensor layouts, Tensor rows, int chunk, float inverse_scale) -> ()");
  m.def("merge_gradient_stats_chunks(Tensor rows, Tensor merged_rows, int fan_in) -> ()");
  m.def("merge_gradient_stats(Tensor rows, Tensor report) -> ()");
  m.def("cpu_level(Tensor any) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, CompositeExplicitAutograd, m) {
  m.impl("adamw_scaled", TORCH_BOX(&ruda::adamw_scaled));
  m.impl("analyze_gradient", TORCH_BOX(&ruda::analyze_gradient));
  m.impl("merge_gradient_stats_chunks", TORCH_BOX(&ruda::merge_gradient_stats_chunks));
  m.impl("merge_gradient_stats", TORCH_BOX(&ruda::merge_gradient_stats));
  m.impl("cpu_level", TORCH_BOX(&ruda::cpu_level));
}
