// How plan.cpp looks at Python objects: a few functions of Python's stable ABI, and torch's DLPack exchange, which
// describes a tensor in place. A list of tensors that goes through the dispatcher costs more than the update of small
// tensors. Everything here needs the interpreter lock.
#pragma once

// Torch's copy of DLPack's header: plain C with an ABI of its own, but closed to code that asks for torch's stable ABI.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <ATen/dlpack.h>
#pragma pop_macro("TORCH_TARGET_VERSION")

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "table.h"

// Part of Python's stable ABI. Declared here, so that building needs no Python headers; weak, because the interpreter
// that loads this library defines them.
extern "C" {
struct _object;
using PyObject = struct _object;
#define RUDA_PYTHON __attribute__((weak))
RUDA_PYTHON extern char _Py_NoneStruct;
RUDA_PYTHON extern char _Py_TrueStruct;
RUDA_PYTHON PyObject* PyList_New(intptr_t size);
RUDA_PYTHON intptr_t PyList_Size(PyObject* list);
RUDA_PYTHON PyObject* PyList_GetItem(PyObject* list, intptr_t index);            // borrowed
RUDA_PYTHON int PyList_SetItem(PyObject* list, intptr_t index, PyObject* item);  // takes the item over
RUDA_PYTHON int PyDict_Next(PyObject* dict, intptr_t* position, PyObject** key, PyObject** value);  // borrowed
RUDA_PYTHON PyObject* PyDict_GetItem(PyObject* dict, PyObject* key);                                // borrowed
RUDA_PYTHON intptr_t PyDict_Size(PyObject* dict);
RUDA_PYTHON PyObject* PyTuple_GetItem(PyObject* tuple, intptr_t index);  // borrowed
RUDA_PYTHON PyObject* PyLong_FromVoidPtr(void* pointer);
RUDA_PYTHON void* PyLong_AsVoidPtr(PyObject* number);
RUDA_PYTHON PyObject* PyLong_FromLongLong(long long number);
RUDA_PYTHON long long PyLong_AsLongLong(PyObject* number);
RUDA_PYTHON double PyFloat_AsDouble(PyObject* number);
RUDA_PYTHON PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
RUDA_PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
RUDA_PYTHON int PyObject_IsTrue(PyObject* object);
RUDA_PYTHON void Py_IncRef(PyObject* object);
RUDA_PYTHON void Py_DecRef(PyObject* object);
RUDA_PYTHON PyObject* PyErr_Occurred();  // borrowed
RUDA_PYTHON void PyErr_Clear();
RUDA_PYTHON void* PyEval_SaveThread();
RUDA_PYTHON void PyEval_RestoreThread(void* thread);

// A function that Python calls without ctypes on the way: METH_FASTCALL.
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, intptr_t count);
  int flags;
  const char* doc;
};
constexpr int kFastCall = 0x0080;
RUDA_PYTHON PyObject* PyCFunction_NewEx(PyMethodDef* method, PyObject* self, PyObject* module);
#undef RUDA_PYTHON
}

namespace ruda {

inline bool is_none(const PyObject* object) { return reinterpret_cast<const char*>(object) == &_Py_NoneStruct; }
inline bool is_true(const PyObject* object) { return reinterpret_cast<const char*>(object) == &_Py_TrueStruct; }

// A reference that is given back.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// References to many objects that are given back.
class OwnedAll {
 public:
  explicit OwnedAll(std::vector<PyObject*> objects) : objects_(std::move(objects)) {
    for (PyObject* object : objects_) Py_IncRef(object);
  }
  OwnedAll(const OwnedAll&) = delete;
  OwnedAll& operator=(const OwnedAll&) = delete;
  ~OwnedAll() {
    for (PyObject* object : objects_) Py_DecRef(object);
  }

 private:
  const std::vector<PyObject*> objects_;
};

// Lets other threads have the interpreter while it lives.
class WithoutInterpreter {
 public:
  explicit WithoutInterpreter(bool enabled) : thread_(enabled ? PyEval_SaveThread() : nullptr) {}
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;
  ~WithoutInterpreter() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
  }

 private:
  void* thread_;
};

inline int64_t dtype_of(const DLTensor& tensor) { return int64_t{tensor.dtype.code} << 8 | tensor.dtype.bits; }

inline int64_t device_of(const DLTensor& tensor) {
  return static_cast<int64_t>(tensor.device.device_type) << 32 | static_cast<uint32_t>(tensor.device.device_id);
}

inline int64_t address_of(const DLTensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.data) + static_cast<int64_t>(tensor.byte_offset);
}

inline int64_t numel_of(const DLTensor& tensor) {
  int64_t numel = 1;
  for (int32_t d = 0; d < tensor.ndim; ++d) numel *= tensor.shape[d];
  return numel;
}

inline int64_t end_of(const DLTensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.ndim; ++d) last += (tensor.shape[d] - 1) * tensor.strides[d];
  return address_of(tensor) + (last + 1) * (tensor.dtype.bits / 8);
}

inline int64_t gradient_flag(const DLTensor& tensor) {
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

// A group's parameters, and what else of it a step reads.
constexpr int kGroupKeys = 7;

// What the functions need of Python; binding.py fills it once.
struct Reader {
  const DLPackExchangeAPI* torch;
  PyObject* grad;                    // the attribute's name
  PyObject* local;                   // the attribute of a DTensor that holds this rank's part
  PyObject* is_neg;                  // the method of torch's tensor class
  PyObject* increment_version;       // of torch.autograd.graph
  PyObject* group_keys[kGroupKeys];  // "params" first

  // False for a tensor without strided memory, or without any description.
  bool describe(PyObject* tensor, DLTensor* out) const {
    if (torch->dltensor_from_py_object_no_sync(tensor, out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // As above, for this rank's part of a sharded tensor. The part belongs to the tensor, so it outlives the call.
  bool describe(PyObject* tensor, bool sharded, DLTensor* out) const {
    if (!sharded) return describe(tensor, out);
    const Owned part(PyObject_GetAttr(tensor, local));
    if (part.get() != nullptr) return describe(part.get(), out);
    PyErr_Clear();
    return false;
  }

  // Whether a tensor is lazily negated: its memory then holds the values with the other sign.
  bool negated(PyObject* tensor) const {
    const Owned answer(PyObject_CallFunctionObjArgs(is_neg, tensor, nullptr));
    if (answer.get() != nullptr) return PyObject_IsTrue(answer.get()) != 0;
    PyErr_Clear();
    return true;  // the caller settles it in Python, where it fails again
  }
};

}  // namespace ruda
