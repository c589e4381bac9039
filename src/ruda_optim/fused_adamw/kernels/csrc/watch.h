// What the state tensors of a table looked like. Assigning to `.data` or resizing in place changes a tensor that is the
// same object at the same place in every dict, and looking for that from Python would cost more than the step.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ruda {

class Watch {
 public:
  // Holds the tensors, which makes looking at them cheap. (Not for parameters: torch.utils.swap_tensors refuses tensors
  // that somebody else holds.) `objects` are the addresses of torch's two objects behind each tensor, tensor and storage:
  // what to ask for ahead of time.
  Watch(std::vector<torch::stable::Tensor> tensors, const int64_t* objects);

  int64_t size() const { return static_cast<int64_t>(held_.size()); }

  // True while the tensors [first, last) have the memory and the size that they had. For any thread.
  bool holds(int64_t first, int64_t last) const;

  // The watch of that number, which the operator watch_tensors gave out; null if there is none.
  static std::shared_ptr<const Watch> find(int64_t number);

 private:
  struct Held {
    torch::stable::Tensor tensor;
    void* pointer;
    int64_t numel;
    const char* object;
    const char* storage;
  };

  std::vector<Held> held_;
};

}  // namespace ruda
