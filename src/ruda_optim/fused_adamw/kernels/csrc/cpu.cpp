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
using torch::stable::detail::from;
using torch::stable::detail::to;

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

// ---- kernels ---------------------------------------------------------------------------------------------------------

void adamw_scaled(Tensor fields, Tensor layouts, Tensor coefficients, double inverse_scale, double clip_factor) {
  const TableView table = view(fields, layouts);
  const UpdateArguments arguments{reinterpret_cast<const Coefficients*>(data<const float>(coefficients)),
                                  static_cast<float>(inverse_scale), static_cast<float>(clip_factor)};
  const CpuLoops& kernels = loops();
  for_each_piece(table,
                 [&](int64_t i, int64_t begin, int64_t end) { kernels.update(table, i, begin, end, arguments); });
}

// One row per `chunk` elements of each tensor, in table order. Each thread walks its rows backwards, so that the update,
// which walks forwards, starts on gradients that are still in cache.
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
  const CpuLoops& kernels = loops();
  const auto body = [&](int64_t first, int64_t last) {
    int64_t i = std::upper_bound(first_row.begin(), first_row.end(), last - 1) - first_row.begin() - 1;
    for (int64_t row = last - 1; row >= first; --row) {
      while (row < first_row[i]) --i;
      const int64_t begin = (row - first_row[i]) * chunk;
      const int64_t end = std::min(begin + chunk, table.at(kNumel, i));
      out[row] = kernels.analyze(table, i, begin, end, static_cast<float>(inverse_scale));
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

// ---- per-step bookkeeping of a table, for every device ---------------------------------------------------------------

// Gives every tensor its row of the coefficient table: tensors of one group and one step count share a row. Fills
// `pairs` (n, 2) with (group, completed steps) per row and returns how many rows there are.
int64_t assign_coefficients(Tensor fields, Tensor groups, Tensor pairs) {
  STD_TORCH_CHECK(fields.dim() == 2 && fields.size(0) == kFields && groups.numel() == fields.size(1) &&
                      pairs.numel() == 2 * fields.size(1),
                  "assign_coefficients needs one group and one pair per table column");
  const TableView table{data<int64_t>(fields), fields.size(1), nullptr};
  const int64_t* group = data<const int64_t>(groups);
  int64_t* pair = data<int64_t>(pairs);
  int64_t count = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < table.count; ++i) {
    const int64_t completed = static_cast<int64_t>(*reinterpret_cast<const float*>(table.at(kStep, i)));
    const auto matches = [&](int64_t row) { return pair[2 * row] == group[i] && pair[2 * row + 1] == completed; };
    if (count == 0 || !matches(last)) {
      for (last = 0; last < count && !matches(last); ++last) {
      }
      if (last == count) {
        pair[2 * count] = group[i];
        pair[2 * count + 1] = completed;
        ++count;
      }
    }
    table.at(kCoefficientRow, i) = last;
  }
  return count;
}

// Counts the step that was just launched, and clears FIRST: from now on the moments hold values.
void advance_steps(Tensor fields) {
  STD_TORCH_CHECK(fields.dim() == 2 && fields.size(0) == kFields, "the launch table needs ", int64_t{kFields}, " rows");
  const TableView table{data<int64_t>(fields), fields.size(1), nullptr};
  for (int64_t i = 0; i < table.count; ++i) {
    if (float* step = reinterpret_cast<float*>(table.at(kStep, i))) *step += 1.0f;
    table.at(kFlags, i) &= ~static_cast<int64_t>(kFirst);
  }
}

int64_t cpu_level(Tensor /*any tensor: an operator without one has no dispatch key*/) { return loops().level; }

// ---- gradients of this step ------------------------------------------------------------------------------------------

struct Metadata {
  void* pointer;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype, device_type, device_index;
};

// False for a tensor without strides (sparse): the caller looks at it in Python.
bool describe(AtenTensorHandle tensor, Metadata* out) {
  int32_t layout;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
  if (layout != aoti_torch_layout_strided()) return false;
  int64_t *sizes, *strides;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &out->pointer));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &out->dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &out->dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &out->device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &out->device_index));
  out->sizes = sizes;
  out->strides = strides;
  return true;
}

bool same_layout(const Metadata& a, const Metadata& b) {
  if (a.dim != b.dim || a.device_type != b.device_type || a.device_index != b.device_index) return false;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.sizes[d] != b.sizes[d] || (a.sizes[d] != 1 && a.strides[d] != b.strides[d])) return false;
  }
  return true;
}

int64_t elements(const Metadata& tensor) {
  int64_t count = 1;
  for (int64_t d = 0; d < tensor.dim; ++d) count *= tensor.sizes[d];
  return count;
}

// The mark of tables.py, flat_layout_mark.
int64_t flat_layout_mark(const Metadata& tensor) {
  bool contiguous = true;
  int64_t next = 1;
  int64_t mark = 0;
  for (int64_t d = tensor.dim - 1; d >= 0; --d) {
    if (tensor.sizes[d] == 1) continue;
    contiguous = contiguous && tensor.strides[d] == next;
    next *= tensor.sizes[d];
  }
  if (contiguous) return -1;
  for (int64_t d = 0; d < tensor.dim; ++d) {
    if (tensor.sizes[d] != 1) mark = (mark * 1000003 + tensor.strides[d]) % (int64_t{1} << 30);
  }
  return -2 - mark;
}

int64_t gradient_flag(int32_t dtype) {
  static const int32_t kFloat = aoti_torch_dtype_float32();
  static const int32_t kHalf = aoti_torch_dtype_float16();
  static const int32_t kBfloat = aoti_torch_dtype_bfloat16();
  if (dtype == kFloat) return 0;
  if (dtype == kHalf) return kGradFp16;
  if (dtype == kBfloat) return kGradBf16;
  return -1;
}

// Writes the gradient pointers of the tensors `start`... into the table and returns the first tensor that the table does
// not describe any more (or cannot describe flat), or -1. The caller settles that one in Python and calls again.
int64_t bind_gradients(const TableView& table, StableListHandle parameters, StableListHandle gradients, int64_t start) {
  for (int64_t i = start; i < table.count; ++i) {
    StableIValue parameter_value, gradient_value;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(parameters, static_cast<size_t>(i), &parameter_value));
    const Tensor parameter = to<Tensor>(parameter_value);
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(gradients, static_cast<size_t>(i), &gradient_value));
    const Tensor gradient = to<Tensor>(gradient_value);
    Metadata p, g;
    if (!describe(parameter.get(), &p) || !describe(gradient.get(), &g)) return i;
    int64_t& flags = table.at(kFlags, i);
    const int64_t written = table.at(kCopy, i) != 0 ? table.at(kCopy, i) : table.at(kParamOut, i);
    const bool known = reinterpret_cast<int64_t>(p.pointer) == written &&
                       gradient_flag(g.dtype) == (flags & (kGradFp16 | kGradBf16)) && !(flags & kStrided) &&
                       same_layout(p, g) && elements(p) == table.at(kNumel, i) &&
                       flat_layout_mark(p) == table.at(kLayout, i);
    if (!known) return i;
    table.at(kGrad, i) = reinterpret_cast<int64_t>(g.pointer);
    int64_t all = 0;
    for (int64_t field = kParam; field <= kRemainder; ++field) all |= table.at(static_cast<Field>(field), i);
    flags = (all & 15) == 0 ? flags | kAligned : flags & ~static_cast<int64_t>(kAligned);
  }
  return -1;
}

// Boxed by hand: the generated boxing copies both lists into vectors of owning handles first.
void bind_gradients_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor fields = to<Tensor>(stack[0]);
  const StableListHandle parameters = to<StableListHandle>(stack[1]);
  const StableListHandle gradients = to<StableListHandle>(stack[2]);
  const int64_t start = to<int64_t>(stack[3]);
  struct Owner {
    StableListHandle list;
    ~Owner() { torch_delete_list(list); }
  };
  const Owner owners[] = {{parameters}, {gradients}};
  size_t parameter_count, gradient_count;
  TORCH_ERROR_CODE_CHECK(torch_list_size(parameters, &parameter_count));
  TORCH_ERROR_CODE_CHECK(torch_list_size(gradients, &gradient_count));
  const bool fits = fields.dim() == 2 && fields.size(0) == kFields &&
                    static_cast<int64_t>(parameter_count) == fields.size(1) && gradient_count == parameter_count;
  STD_TORCH_CHECK(fits, "bind_gradients needs one parameter and one gradient per table column");
  const TableView table{data<int64_t>(fields), fields.size(1), nullptr};
  stack[0] = from(bind_gradients(table, parameters, gradients, start));
}

// A gradient without memory of its own (lazily negated, or all zeros without storage): the dispatcher would hand over
// temporary copies, whose addresses are worth nothing after the call. The caller settles every tensor in Python.
void bind_no_gradients_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor fields = to<Tensor>(stack[0]);
  torch_delete_list(to<StableListHandle>(stack[1]));
  torch_delete_list(to<StableListHandle>(stack[2]));
  const int64_t start = to<int64_t>(stack[3]);
  stack[0] = from(start < fields.size(1) ? start : int64_t{-1});
}

}  // namespace
}  // namespace ruda

STABLE_TORCH_LIBRARY(ruda_optim, m) {
  m.def(
      "adamw_scaled(Tensor fields, Tensor layouts, Tensor coefficients, float inverse_scale, float clip_factor) -> ()");
  m.def("analyze_gradient(Tensor fields, Tensor layouts, Tensor rows, int chunk, float inverse_scale) -> ()");
  m.def("merge_gradient_stats_chunks(Tensor rows, Tensor merged_rows, int fan_in) -> ()");
  m.def("merge_gradient_stats(Tensor rows, Tensor report) -> ()");
  m.def("assign_coefficients(Tensor fields, Tensor groups, Tensor pairs) -> int");
  m.def("advance_steps(Tensor fields) -> ()");
  m.def("bind_gradients(Tensor fields, Tensor[] parameters, Tensor[] gradients, int start) -> int");
  m.def("cpu_level(Tensor any) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, CompositeExplicitAutograd, m) {
  m.impl("adamw_scaled", TORCH_BOX(&ruda::adamw_scaled));
  m.impl("analyze_gradient", TORCH_BOX(&ruda::analyze_gradient));
  m.impl("merge_gradient_stats_chunks", TORCH_BOX(&ruda::merge_gradient_stats_chunks));
  m.impl("merge_gradient_stats", TORCH_BOX(&ruda::merge_gradient_stats));
  m.impl("assign_coefficients", TORCH_BOX(&ruda::assign_coefficients));
  m.impl("advance_steps", TORCH_BOX(&ruda::advance_steps));
  m.impl("bind_gradients", &ruda::bind_gradients_boxed);
  m.impl("cpu_level", TORCH_BOX(&ruda::cpu_level));
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, Negative, m) { m.impl("bind_gradients", &ruda::bind_no_gradients_boxed); }

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, ZeroTensor, m) { m.impl("bind_gradients", &ruda::bind_no_gradients_boxed); }
