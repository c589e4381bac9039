// What a tensor looked like: its memory, dtype, device and layout, without a hold on it.
#pragma once

#include <vector>

#include "python_api.h"

namespace ruda {

// What a parameter looked like, and which gradient it had last. Sizes and strides lie at `shape` of Plan::shapes.
struct Record {
  int64_t data = 0, dtype = 0, device = 0, dims = 0, shape = 0;
  bool sharded = false;
  int64_t sizes = 0, storage = 0;                   // inside torch's objects: addresses to ask for ahead of time
  int64_t gradient_object = 0, gradient_sizes = 0;  // the last gradient: its Python object, and an address in torch's
};

inline bool same_layout(const DLTensor& tensor, const Record& record, const int64_t* sizes) {
  if (tensor.ndim != record.dims || device_of(tensor) != record.device) return false;
  const int64_t* strides = sizes + record.dims;
  for (int64_t d = 0; d < record.dims; ++d) {
    if (tensor.shape[d] != sizes[d] || (sizes[d] != 1 && tensor.strides[d] != strides[d])) return false;
  }
  return true;
}

// True if a tensor has the memory, layout and dtype of its record.
inline bool still_is(const Reader& reader, PyObject* object, const Record& record, const std::vector<int64_t>& shapes) {
  DLTensor tensor;
  return reader.describe(object, record.sharded, &tensor) && address_of(tensor) == record.data &&
         dtype_of(tensor) == record.dtype && same_layout(tensor, record, shapes.data() + record.shape);
}

// Notes what a tensor looks like; its sizes and strides go to the end of `shapes`. False if it has no strided memory.
inline bool describe(const Reader& reader, PyObject* object, bool sharded, Record* record,
                     std::vector<int64_t>* shapes) {
  DLTensor tensor;
  if (!reader.describe(object, sharded, &tensor)) return false;
  *record = Record{};
  record->data = address_of(tensor);
  record->dtype = dtype_of(tensor);
  record->device = device_of(tensor);
  record->dims = tensor.ndim;
  record->shape = static_cast<int64_t>(shapes->size());
  record->sharded = sharded;
  record->sizes = reinterpret_cast<int64_t>(tensor.shape);
  shapes->insert(shapes->end(), tensor.shape, tensor.shape + tensor.ndim);
  shapes->insert(shapes->end(), tensor.strides, tensor.strides + tensor.ndim);
  return true;
}

}  // namespace ruda
