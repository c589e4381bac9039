#include "watch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "export.h"

namespace ruda {
namespace {

using torch::stable::Tensor;

// False if the tensor has no memory of its own any more.
bool memory_of(const Tensor& tensor, void** pointer, int64_t* numel) {
  return aoti_torch_get_data_ptr(tensor.get(), pointer) == AOTI_TORCH_SUCCESS &&
         aoti_torch_get_numel(tensor.get(), numel) == AOTI_TORCH_SUCCESS;
}

// Never destroyed: the tensors must not be freed while the process winds down.
struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Watch>> by_number;
  int64_t last = 0;

  static Registry& get() {
    static Registry* const kRegistry = new Registry;
    return *kRegistry;
  }
};

int64_t watch_tensors(std::vector<Tensor> tensors, Tensor objects) {
  STD_TORCH_CHECK(objects.numel() == 2 * static_cast<int64_t>(tensors.size()),
                  "watch_tensors needs two addresses each");
  auto watch = std::make_shared<const Watch>(std::move(tensors), static_cast<const int64_t*>(objects.data_ptr()));
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_number.emplace(++all.last, std::move(watch));
  return all.last;
}

}  // namespace

Watch::Watch(std::vector<Tensor> tensors, const int64_t* objects) {
  held_.reserve(tensors.size());
  for (Tensor& tensor : tensors) {
    const char* object = reinterpret_cast<const char*>(*objects++);
    Held held{std::move(tensor), nullptr, 0, object, reinterpret_cast<const char*>(*objects++)};
    STD_TORCH_CHECK(memory_of(held.tensor, &held.pointer, &held.numel), "only tensors with memory can be watched");
    held_.push_back(std::move(held));
  }
}

bool Watch::holds(int64_t first, int64_t last) const {
  constexpr int64_t kAhead = 8;
  for (int64_t i = first; i < last; ++i) {
    if (i + kAhead < last) {
      const Held& later = held_[i + kAhead];
      __builtin_prefetch(later.tensor.get());
      for (int64_t line = 0; line < 192; line += 64) __builtin_prefetch(later.object + line);
      __builtin_prefetch(later.storage);
    }
    void* pointer;
    int64_t numel;
    if (!memory_of(held_[i].tensor, &pointer, &numel) || pointer != held_[i].pointer || numel != held_[i].numel) {
      return false;
    }
  }
  return true;
}

std::shared_ptr<const Watch> Watch::find(int64_t number) {
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(number);
  return found == all.by_number.end() ? nullptr : found->second;
}

}  // namespace ruda

// Lets the tensors of a watch go. Not an operator: a watch may end at any moment, such as while a mode of torch is on that
// refuses operators on real tensors.
RUDA_EXPORT void ruda_unwatch(int64_t number) {
  using namespace ruda;
  std::shared_ptr<const Watch> last;  // dies after the lock: freeing a tensor may run any code
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_number.find(number);
  if (found == all.by_number.end()) return;
  last = std::move(found->second);
  all.by_number.erase(found);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ruda_optim, m) { m.def("watch_tensors(Tensor[] tensors, Tensor objects) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(ruda_optim, CompositeExplicitAutograd, m) {
  m.impl("watch_tensors", TORCH_BOX(&ruda::watch_tensors));
}
