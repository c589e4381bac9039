// What the tensors of a step look like, read from their Python objects. A list of tensors that goes through the
// dispatcher costs more than the update of small tensors; torch's DLPack exchange describes a tensor in place, without
// a new reference. Called by kernels/host.py through ctypes with the interpreter lock held; an exception that
// is set on return is raised there.

// Torch's copy of DLPack's header: plain C with an ABI of its own, but closed to code that asks for torch's stable ABI.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <ATen/dlpack.h>
#pragma pop_macro("TORCH_TARGET_VERSION")
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "cpu_loops.h"
#include "export.h"
#include "watch.h"

// Part of Python's stable ABI. Declared here, so that building needs no Python headers; weak, because the interpreter
// that loads this library defines them.
extern "C" {
struct _object;
using PyObject = struct _object;
#define RUDA_PYTHON __attribute__((weak))
RUDA_PYTHON extern char _Py_NoneStruct;
RUDA_PYTHON intptr_t PyList_Size(PyObject* list);
RUDA_PYTHON PyObject* PyList_GetItem(PyObject* list, intptr_t index);            // borrowed
RUDA_PYTHON int PyList_SetItem(PyObject* list, intptr_t index, PyObject* item);  // takes the item over
RUDA_PYTHON int PyDict_Next(PyObject* dict, intptr_t* position, PyObject** key, PyObject** value);  // borrowed
RUDA_PYTHON PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
RUDA_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
RUDA_PYTHON int PyObject_IsTrue(PyObject* object);
RUDA_PYTHON void Py_IncRef(PyObject* object);
RUDA_PYTHON void Py_DecRef(PyObject* object);
RUDA_PYTHON void PyErr_Clear();
#undef RUDA_PYTHON
}

namespace ruda {
namespace {

bool is_none(const PyObject* object) { return reinterpret_cast<const char*>(object) == &_Py_NoneStruct; }

// How the functions read tensors.
struct Reader {
  const DLPackExchangeAPI* torch;
  PyObject* grad;    // the attribute's name
  PyObject* is_neg;  // the method of torch's tensor class

  // False for a tensor without strided memory, or without any description.
  bool describe(PyObject* tensor, DLTensor* out) const {
    if (torch->dltensor_from_py_object_no_sync(tensor, out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // Whether a tensor is lazily negated: its memory then holds the values with the other sign.
  bool negated(PyObject* tensor) const {
    PyObject* answer = PyObject_CallFunctionObjArgs(is_neg, tensor, nullptr);
    if (answer == nullptr) {
      PyErr_Clear();
      return true;  // the caller settles it in Python, where it fails again
    }
    const bool found = PyObject_IsTrue(answer) != 0;
    Py_DecRef(answer);
    return found;
  }
};

// What a parameter looked like, and which gradient it had last. Sizes and strides follow all records, at `shape`.
struct Record {
  int64_t data, dtype, device, dims, shape;
  int64_t parameter_sizes, parameter_storage;  // inside torch's objects: addresses to ask for ahead of time
  int64_t gradient_object, gradient_sizes;     // the last gradient: its Python object, and an address in torch's
};
constexpr int64_t kRecordNumbers = sizeof(Record) / sizeof(int64_t);

int64_t dtype_of(const DLTensor& tensor) { return int64_t{tensor.dtype.code} << 8 | tensor.dtype.bits; }

int64_t device_of(const DLTensor& tensor) {
  return static_cast<int64_t>(tensor.device.device_type) << 32 | static_cast<uint32_t>(tensor.device.device_id);
}

int64_t address_of(const DLTensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.data) + static_cast<int64_t>(tensor.byte_offset);
}

int64_t gradient_flag(const DLTensor& tensor) {
  switch (dtype_of(tensor)) {
    case kDLFloat << 8 | 32:
      return 0;
    case kDLFloat << 8 | 16:
      return kGradFp16;
    case kDLBfloat << 8 | 16:
      return kGradBf16;
    default:
      return -1;
  }
}

bool same_layout(const DLTensor& tensor, const Record& record, const int64_t* sizes) {
  if (tensor.ndim != record.dims || device_of(tensor) != record.device) return false;
  const int64_t* strides = sizes + record.dims;
  for (int64_t d = 0; d < record.dims; ++d) {
    if (tensor.shape[d] != sizes[d] || (sizes[d] != 1 && tensor.strides[d] != strides[d])) return false;
  }
  return true;
}

bool single(const DLTensor& tensor) {
  return std::all_of(tensor.shape, tensor.shape + tensor.ndim, [](int64_t size) { return size == 1; });
}

// Torch's tensors of a model lie all over memory, and most of the time goes into waiting for them. What is asked for
// here may be gone: a prefetch of any address is harmless. Always inlined, because GCC takes a function that only
// prefetches for one without effect.
constexpr int64_t kAhead = 20;
[[gnu::always_inline]] inline void ask_for(const Record& record, const PyObject* parameter) {
  const auto around = [](int64_t address) {
    for (int64_t line = -64; line <= 128; line += 64) __builtin_prefetch(reinterpret_cast<const void*>(address + line));
  };
  __builtin_prefetch(parameter);
  __builtin_prefetch(reinterpret_cast<const void*>(record.gradient_object));
  __builtin_prefetch(reinterpret_cast<const void*>(record.parameter_storage));
  around(record.parameter_sizes);
  around(record.gradient_sizes);
}

constexpr int64_t kBound = -1;
constexpr int64_t kChanged = -2;

// Binds the gradient of one column. False if the caller has to settle it.
bool bind(const Reader& reader, const TableView& table, int64_t i, Record& record, const int64_t* sizes,
          PyObject* gradient) {
  int64_t& flags = table.at(kFlags, i);
  DLTensor g;
  if (is_none(gradient) || !reader.describe(gradient, &g) || gradient_flag(g) != (flags & (kGradFp16 | kGradBf16)) ||
      (flags & kStrided) || g.data == nullptr || !same_layout(g, record, sizes)) {
    return false;
  }
  // Asking whether a gradient is negated costs as much as all the rest, so it is asked once for each gradient: object,
  // tensor and memory. Its successor may have the three addresses of a dead one; to be negated and flat as well, with
  // more than one element, it must have been made by as_strided over a conjugate.
  const int64_t pointer = address_of(g);
  const int64_t object = reinterpret_cast<int64_t>(gradient);
  const int64_t inside = reinterpret_cast<int64_t>(g.shape);
  const bool known = table.at(kGrad, i) == pointer && record.gradient_object == object &&
                     record.gradient_sizes == inside && !single(g);
  if (known) return true;
  if (reader.negated(gradient)) return false;
  record.gradient_object = object;
  record.gradient_sizes = inside;
  table.at(kGrad, i) = pointer;
  int64_t all = 0;
  for (int64_t field = kParam; field <= kRemainder; ++field) all |= table.at(static_cast<Field>(field), i);
  flags = (all & 15) == 0 ? flags | kAligned : flags & ~static_cast<int64_t>(kAligned);
  return true;
}

// Binds the columns from `start` on; see ruda_bind_gradients.
int64_t bind_columns(const Reader& reader, const TableView& table, int64_t* memory, PyObject* parameters,
                     PyObject* gradients, PyObject* held, int64_t start) {
  Record* const records = reinterpret_cast<Record*>(memory);
  const bool own = is_none(gradients);
  for (int64_t i = start; i < table.count; ++i) {
    if (i + kAhead < table.count) ask_for(records[i + kAhead], PyList_GetItem(parameters, i + kAhead));
    Record& record = records[i];
    const int64_t* const sizes = memory + record.shape;
    PyObject* const parameter = PyList_GetItem(parameters, i);
    if (parameter == nullptr) return i;  // an exception is set: the list has become shorter
    DLTensor p;
    if (!reader.describe(parameter, &p) || address_of(p) != record.data || dtype_of(p) != record.dtype ||
        !same_layout(p, record, sizes)) {
      return kChanged;
    }
    PyObject* const gradient = own ? PyObject_GetAttr(parameter, reader.grad) : PyList_GetItem(gradients, i);
    if (gradient == nullptr) return i;  // an exception is set
    if (!own) Py_IncRef(gradient);
    const bool bound = bind(reader, table, i, record, sizes, gradient);
    if (PyList_SetItem(held, i, gradient) != 0 || !bound) return i;
  }
  return kBound;
}

// True if every tensor of the watch is as it was. `own_work` runs on this thread, which has the interpreter; the other
// threads look at the state meanwhile, and all wait for memory most of the time.
template <class Work>
bool holds_beside(const Watch& watch, const Work& own_work) {
  constexpr int64_t kBlock = 256, kPerThread = 1024;
  std::atomic<int64_t> next{0};
  std::atomic<bool> holds{true};
  bool worked = false;
  const auto this_thread = std::this_thread::get_id();
  const auto body = [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == this_thread && !worked) {
      worked = true;
      own_work();
    }
    for (int64_t first; (first = next.fetch_add(kBlock)) < watch.size();) {
      if (!watch.holds(first, std::min(first + kBlock, watch.size()))) holds = false;
    }
  };
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), 1 + watch.size() / kPerThread);
  if (threads > 1) {
    torch::stable::parallel_for(0, threads, 1, body);
  } else {
    body(0, 1);
  }
  if (!worked) own_work();
  return holds;
}

}  // namespace
}  // namespace ruda

// True if list[first], list[first + 1], ... are the objects of `part`, all of them. Their == compares values.
RUDA_EXPORT bool ruda_same_objects(PyObject* list, int64_t first, PyObject* part) {
  const int64_t count = PyList_Size(part);
  if (PyList_Size(list) < first + count) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (PyList_GetItem(list, first + i) != PyList_GetItem(part, i)) return false;
  }
  return true;
}

// True if the values of all `dicts`, one dict after the other, are the objects of `values`, all of them.
RUDA_EXPORT bool ruda_same_values(PyObject* dicts, PyObject* values) {
  const int64_t known = PyList_Size(values);
  int64_t seen = 0;
  for (int64_t i = 0, count = PyList_Size(dicts); i < count; ++i) {
    PyObject* const dict = PyList_GetItem(dicts, i);
    PyObject *key, *value;
    for (intptr_t position = 0; PyDict_Next(dict, &position, &key, &value) != 0; ++seen) {
      if (seen == known || PyList_GetItem(values, seen) != value) return false;
    }
  }
  return seen == known;
}

// How many of the tensors have a gradient; -1 with an exception set.
RUDA_EXPORT int64_t ruda_count_gradients(const ruda::Reader* reader, PyObject* tensors) {
  int64_t found = 0;
  for (int64_t i = 0, count = PyList_Size(tensors); i < count; ++i) {
    PyObject* const gradient = PyObject_GetAttr(PyList_GetItem(tensors, i), reader->grad);
    if (gradient == nullptr) return -1;
    found += !ruda::is_none(gradient);
    Py_DecRef(gradient);
  }
  return found;
}

// Writes one record per tensor of the list, then their sizes and strides: the caller has made room for that, and notes
// where each storage lies itself. Returns how many tensors it described; fewer than all if one has no strided memory.
RUDA_EXPORT int64_t ruda_record_tensors(const ruda::Reader* reader, PyObject* tensors, int64_t* memory) {
  using namespace ruda;
  const int64_t count = PyList_Size(tensors);
  int64_t shape = kRecordNumbers * count;
  for (int64_t i = 0; i < count; ++i) {
    DLTensor tensor;
    if (!reader->describe(PyList_GetItem(tensors, i), &tensor)) return i;
    Record& record = reinterpret_cast<Record*>(memory)[i];
    record.data = address_of(tensor);
    record.dtype = dtype_of(tensor);
    record.device = device_of(tensor);
    record.dims = tensor.ndim;
    record.shape = shape;
    record.parameter_sizes = reinterpret_cast<int64_t>(tensor.shape);
    std::copy_n(tensor.shape, tensor.ndim, memory + shape);
    std::copy_n(tensor.strides, tensor.ndim, memory + shape + tensor.ndim);
    shape += 2 * int64_t{tensor.ndim};
  }
  return count;
}

// Writes the gradient pointers of the columns `start`... into the table of `count` columns. `gradients` is a list, or
// None for the parameters' own; `held` receives them, so that they live until the caller drops it. Watched state is
// looked at when `start` is 0. Returns kBound, or kChanged if parameters or watched state have other memory than the
// table, or the first column whose gradient is absent, or not laid out like its parameter, or not of the table's dtype:
// the caller settles that one and calls again.
RUDA_EXPORT int64_t ruda_bind_gradients(const ruda::Reader* reader, int64_t* fields, int64_t* memory, int64_t count,
                                        int64_t watch, PyObject* parameters, PyObject* gradients, PyObject* held,
                                        int64_t start) {
  using namespace ruda;
  const TableView table{fields, count, nullptr};
  int64_t found = kBound;
  const auto bind_all = [&] { found = bind_columns(*reader, table, memory, parameters, gradients, held, start); };
  if (watch == 0 || start > 0) {
    bind_all();
    return found;
  }
  const std::shared_ptr<const Watch> state = Watch::find(watch);
  if (state == nullptr) return kChanged;
  return holds_beside(*state, bind_all) ? found : kChanged;
}
