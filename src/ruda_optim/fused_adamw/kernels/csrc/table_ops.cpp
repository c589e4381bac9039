// The books of a launch table, for every device: step counters, what tensors looked like, the gradients of this step.
// Host code only; it runs no kernel.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu_loops.h"

namespace ruda {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// ---- step counters ---------------------------------------------------------------------------------------------------

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
// same place in every list, and checking that from Python would cost more than the step.
class Watch {
 public:
  // A parameter, described but not held: torch.utils.swap_tensors refuses tensors that somebody else holds.
  void describe_parameter(AtenTensorHandle tensor) {
    Metadata seen;
    STD_TORCH_CHECK(describe(tensor, &seen), "only strided tensors can be watched");
    Described described{seen, std::unique_ptr<int64_t[]>(new int64_t[2 * seen.dim])};
    std::copy(seen.sizes, seen.sizes + seen.dim, described.shape.get());
    std::copy(seen.strides, seen.strides + seen.dim, described.shape.get() + seen.dim);
    described.seen.sizes = described.shape.get();
    described.seen.strides = described.shape.get() + seen.dim;
    parameters_.push_back(std::move(described));
  }

  // A state tensor, held, which makes looking at it cheap.
  void hold(Tensor tensor) {
    held_.push_back({std::move(tensor), nullptr, 0});
    memory_of(held_.back().tensor, &held_.back().pointer, &held_.back().numel);
  }

  int64_t parameters() const { return static_cast<int64_t>(parameters_.size()); }

  // What parameter i looked like.
  const Metadata& parameter(int64_t i) const { return parameters_[i].seen; }

  // True while every held tensor has the memory that it had.
  bool holds() const {
    for (const Held& held : held_) {
      void* pointer;
      int64_t numel;
      memory_of(held.tensor, &pointer, &numel);
      if (pointer != held.pointer || numel != held.numel) return false;
    }
    return true;
  }

 private:
  struct Described {
    Metadata seen;
    std::unique_ptr<int64_t[]> shape;
  };

  struct Held {
    Tensor tensor;
    void* pointer;
    int64_t numel;
  };

  static void memory_of(const Tensor& tensor, void** pointer, int64_t* numel) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), pointer));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(tensor.get(), numel));
  }

  std::vector<Held> held_;
  std::vector<Described> parameters_;
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
  for (size_t i = 0; i < parameters.size(); ++i) watch->describe_parameter(Item(parameters.at(i)).get());
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
// Python and calls again. (Several threads make this slower: what it costs is the handles, which they share.)
int64_t bind_gradients(const TableView& table, const Watch& watch, const ListOwner& parameters,
                       const ListOwner& gradients, int64_t start) {
  for (int64_t i = start; i < table.count; ++i) {
    const Item parameter(parameters.at(static_cast<size_t>(i)));
    const Item gradient(gradients.at(static_cast<size_t>(i)));
    int64_t& flags = table.at(kFlags, i);
    Metadata p, g;
    if (!describe(parameter.get(), &p) || !same_memory(p, watch.parameter(i))) return kParameterChanged;
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
  const bool fits = fields.dim() == 2 && fields.size(0) == kFields && watch->parameters() == fields.size(1) &&
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

STABLE_TORCH_LIBRARY_FRAGMENT(ruda_optim, m) {
  m.def("assign_coefficients(Tensor fields, Tensor groups, Tensor pairs) -> int");
  m.def("advance_steps(Tensor fields) -> ()");
  m.def("watch_tensors(Tensor[] parameters, Tensor[] state) -> int");
  m.def("watch_holds(Tensor any, int watch) -> bool");
  m.def("unwatch(Tensor any, int watch) -> ()");
  m.def("bind_gradients(Tensor fields, int watch, Tensor[] parameters, Tensor[] gradients, int start) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, CompositeExplicitAutograd, m) {
  m.impl("assign_coefficients", TORCH_BOX(&ruda::assign_coefficients));
  m.impl("advance_steps", TORCH_BOX(&ruda::advance_steps));
  m.impl("watch_tensors", &ruda::watch_tensors_boxed);
  m.impl("watch_holds", TORCH_BOX(&ruda::watch_holds));
  m.impl("unwatch", TORCH_BOX(&ruda::unwatch));
  m.impl("bind_gradients", &ruda::bind_gradients_boxed);
}

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, Negative, m) { m.impl("bind_gradients", &ruda::bind_no_gradients_boxed); }

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, ZeroTensor, m) { m.impl("bind_gradients", &ruda::bind_no_gradients_boxed); }
