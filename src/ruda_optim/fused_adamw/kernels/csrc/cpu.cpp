// The CPU operator: registration on LibTorch's stable ABI, the choice of an instruction-set level, and one parallel
// region over the elements of all tensors. No arithmetic of its own.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
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

// Whether the loops ask for memory ahead of time. Measured: on Intel server cores the update gains a tenth and statistics
// a third; on AMD Zen 4 explicit prefetching loses against the hardware's own. RUDA_CPU_PREFETCH=0 or 1 overrides.
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

// ---- kernels ---------------------------------------------------------------------------------------------------------

void adamw_scaled(Tensor fields, Tensor layouts, Tensor coefficients, double inverse_scale, double clip_factor) {
  const TableView table = view(fields, layouts);
  const UpdateArguments arguments{reinterpret_cast<const Coefficients*>(data<const float>(coefficients)),
                                  static_cast<float>(inverse_scale), static_cast<float>(clip_factor), prefetch()};
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
  const StatisticsArguments arguments{static_cast<float>(inverse_scale), prefetch()};
  const CpuLoops& kernels = loops();
  const auto body = [&](int64_t first, int64_t last) {
    int64_t i = std::upper_bound(first_row.begin(), first_row.end(), last - 1) - first_row.begin() - 1;
    for (int64_t row = last - 1; row >= first; --row) {
      while (row < first_row[i]) --i;
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

// ---- tensors under watch ---------------------------------------------------------------------------------------------

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

bool same_memory(const Metadata& a, const Metadata& b) {
  return a.pointer == b.pointer && a.dtype == b.dtype && same_layout(a, b);
}

// One tensor of a list, owned while it is looked at.
class Item {
 public:
  explicit Item(StableIValue value) : handle_(to<AtenTensorHandle>(value)) {}
  Item(const Item&) = delete;
  Item& operator=(const Item&) = delete;
  ~Item() { aoti_torch_delete_tensor_object(handle_); }
  AtenTensorHandle get() const { return handle_; }

 private:
  AtenTensorHandle handle_;
};

struct ListOwner {
  StableListHandle list;
  ~ListOwner() { torch_delete_list(list); }

  size_t size() const {
    size_t count;
    TORCH_ERROR_CODE_CHECK(torch_list_size(list, &count));
    return count;
  }

  StableIValue at(size_t i) const {
    StableIValue value;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &value));
    return value;
  }
};

// What tensors looked like: assigning to `.data` or transposing in place changes a tensor that is the same object at the
// same place in every list, and checking that from Python would cost more than the step. State is held here, which makes
// looking at it cheap. Parameters are not, because torch.utils.swap_tensors refuses tensors that somebody else holds.
class Watch {
 public:
  void describe_only(AtenTensorHandle tensor) {
    Metadata seen;
    STD_TORCH_CHECK(describe(tensor, &seen), "only strided tensors can be watched");
    offsets_.push_back(shapes_.size());
    shapes_.insert(shapes_.end(), seen.sizes, seen.sizes + seen.dim);
    shapes_.insert(shapes_.end(), seen.strides, seen.strides + seen.dim);
    seen_.push_back(seen);
  }

  void hold(Tensor tensor) {
    describe_only(tensor.get());
    held_.push_back(std::move(tensor));
  }

  // Tensors that are described but not held; they come first.
  int64_t described() const { return static_cast<int64_t>(seen_.size() - held_.size()); }

  // What tensor i looked like when it was added.
  Metadata seen(int64_t i) const {
    Metadata metadata = seen_[i];
    metadata.sizes = shapes_.data() + offsets_[i];
    metadata.strides = metadata.sizes + metadata.dim;
    return metadata;
  }

  bool holds() const {
    const int64_t first = described();
    for (size_t i = 0; i < held_.size(); ++i) {
      Metadata now;
      if (!describe(held_[i].get(), &now) || !same_memory(now, seen(first + static_cast<int64_t>(i)))) return false;
    }
    return true;
  }

 private:
  std::vector<Tensor> held_;
  std::vector<Metadata> seen_;
  std::vector<size_t> offsets_;
  std::vector<int64_t> shapes_;
};

// Never destroyed: the tensors must not be freed while the process winds down.
struct Watches {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Watch>> by_number;
  int64_t last = 0;

  static Watches& get() {
    static Watches* const kWatches = new Watches;
    return *kWatches;
  }

  std::shared_ptr<const Watch> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = by_number.find(number);
    STD_TORCH_CHECK(found != by_number.end(), "there is no watch with number ", number);
    return found->second;
  }
};

void watch_tensors_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const ListOwner parameters{to<StableListHandle>(stack[0])};
  const ListOwner state{to<StableListHandle>(stack[1])};
  auto watch = std::make_shared<Watch>();
  for (size_t i = 0; i < parameters.size(); ++i) watch->describe_only(Item(parameters.at(i)).get());
  for (size_t i = 0; i < state.size(); ++i) watch->hold(to<Tensor>(state.at(i)));
  Watches& all = Watches::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_number.emplace(++all.last, std::move(watch));
  stack[0] = from(all.last);
}

bool watch_holds(Tensor /*any*/, int64_t number) { return Watches::get().find(number)->holds(); }

void unwatch(Tensor /*any*/, int64_t number) {
  std::shared_ptr<const Watch> last;  // dies after the lock: freeing a tensor may run any code
  Watches& all = Watches::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(number);
  if (found == all.by_number.end()) return;
  last = std::move(found->second);
  all.by_number.erase(found);
}

// ---- gradients of this step ------------------------------------------------------------------------------------------

int64_t gradient_flag(int32_t dtype) {
  static const int32_t kFloat = aoti_torch_dtype_float32();
  static const int32_t kHalf = aoti_torch_dtype_float16();
  static const int32_t kBfloat = aoti_torch_dtype_bfloat16();
  if (dtype == kFloat) return 0;
  if (dtype == kHalf) return kGradFp16;
  if (dtype == kBfloat) return kGradBf16;
  return -1;
}

constexpr int64_t kBound = -1;
constexpr int64_t kParameterChanged = -2;

// Writes the gradient pointers of the tensors `start`... into the table. Returns kBound, or kParameterChanged, or the
// first gradient that is not laid out like its parameter or not of the table's dtype: the caller settles that one in
// Python and calls again.
int64_t bind_gradients(const TableView& table, const Watch& watch, const ListOwner& parameters,
                       const ListOwner& gradients, int64_t start) {
  for (int64_t i = start; i < table.count; ++i) {
    const Item parameter(parameters.at(static_cast<size_t>(i)));
    const Item gradient(gradients.at(static_cast<size_t>(i)));
    int64_t& flags = table.at(kFlags, i);
    Metadata p, g;
    if (!describe(parameter.get(), &p) || !same_memory(p, watch.seen(i))) return kParameterChanged;
    if (!describe(gradient.get(), &g) || gradient_flag(g.dtype) != (flags & (kGradFp16 | kGradBf16)) ||
        (flags & kStrided) || !same_layout(p, g)) {
      return i;
    }
    const int64_t pointer = reinterpret_cast<int64_t>(g.pointer);
    if (table.at(kGrad, i) == pointer) continue;
    table.at(kGrad, i) = pointer;
    int64_t all = 0;
    for (int64_t field = kParam; field <= kRemainder; ++field) all |= table.at(static_cast<Field>(field), i);
    flags = (all & 15) == 0 ? flags | kAligned : flags & ~static_cast<int64_t>(kAligned);
  }
  return kBound;
}

// Boxed by hand: the generated boxing copies the lists into vectors of owning handles first.
void bind_gradients_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor fields = to<Tensor>(stack[0]);
  const int64_t number = to<int64_t>(stack[1]);
  const ListOwner parameters{to<StableListHandle>(stack[2])};
  const ListOwner gradients{to<StableListHandle>(stack[3])};
  const int64_t start = to<int64_t>(stack[4]);
  const std::shared_ptr<const Watch> watch = Watches::get().find(number);
  const bool fits = fields.dim() == 2 && fields.size(0) == kFields && watch->described() == fields.size(1) &&
                    static_cast<int64_t>(parameters.size()) == fields.size(1) &&
                    static_cast<int64_t>(gradients.size()) == fields.size(1);
  STD_TORCH_CHECK(fits, "bind_gradients needs one watched parameter and one gradient per table column");
  const TableView table{data<int64_t>(fields), fields.size(1), nullptr};
  stack[0] = from(bind_gradients(table, *watch, parameters, gradients, start));
}

// A gradient without memory of its own (lazily negated, or all zeros without storage): the dispatcher would hand over
// temporary copies, whose addresses are worth nothing after the call. The caller settles every tensor in Python.
void bind_no_gradients_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor fields = to<Tensor>(stack[0]);
  torch_delete_list(to<StableListHandle>(stack[2]));
  torch_delete_list(to<StableListHandle>(stack[3]));
  const int64_t start = to<int64_t>(stack[4]);
  stack[0] = from(start < fields.size(1) ? start : kBound);
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
  m.def("watch_tensors(Tensor[] parameters, Tensor[] state) -> int");
  m.def("watch_holds(Tensor any, int watch) -> bool");
  m.def("unwatch(Tensor any, int watch) -> ()");
  m.def("bind_gradients(Tensor fields, int watch, Tensor[] parameters, Tensor[] gradients, int start) -> int");
  m.def("cpu_level(Tensor any) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, CompositeExplicitAutograd, m) {
  m.impl("adamw_scaled", TORCH_BOX(&ruda::adamw_scaled));
  m.impl("analyze_gradient", TORCH_BOX(&ruda::analyze_gradient));
  m.impl("merge_gradient_stats_chunks", TORCH_BOX(&ruda::merge_gradient_stats_chunks));
  m.impl("merge_gradient_stats", TORCH_BOX(&ruda::merge_gradient_stats));
  m.impl("assign_coefficients", TORCH_BOX(&ruda::assign_coefficients));
  m.impl("advance_steps", TORCH_BOX(&ruda::advance_steps));
  m.impl("watch_tensors", &ruda::watch_tensors_boxed);
  m.impl("watch_holds", TORCH_BOX(&ruda::watch_holds));
  m.impl("unwatch", TORCH_BOX(&ruda::unwatch));
  m.impl("bind_gradients", &ruda::bind_gradients_boxed);
  m.impl("cpu_level", TORCH_BOX(&ruda::cpu_level));
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, Negative, m) { m.impl("bind_gradients", &ruda::bind_no_gradients_boxed); }

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, ZeroTensor, m) { m.impl("bind_gradients", &ruda::bind_no_gradients_boxed); }
