// How a CUDA kernel finds its elements in the launch table and moves several of them in one access.
#pragma once

#include "table.h"

namespace ruda {

using u16 = unsigned short;

// Elements of one tensor that one block takes, and that one statistics row describes. nvrtc/launch.py repeats the number.
constexpr int kChunk = 8192;

// ---- the launch table ------------------------------------------------------------------------------------------------

// Device copies of LaunchTable.fields and .layouts, and a BlockMap's entries from the launch's first block on: blocks[b] =
// tensor << 32 | chunk within the tensor; as many numbers further as the map has blocks, the statistics row of each block.
struct Table {
  const long long* fields;
  const long long* layouts;
  const long long* blocks;
  long long count;
};

// What one block works on: elements [begin, begin + size) of one tensor.
struct Piece {
  const long long* fields;  // the tensor's column: row `f` lies at fields[f * count]
  const long long* layout;
  long long count, tensor, begin;
  int size;

  __device__ Piece(const Table& table, long long block) : count(table.count) {
    const long long entry = table.blocks[block];
    tensor = entry >> 32;
    begin = (entry & 0xffffffffll) * kChunk;
    fields = table.fields + tensor;
    layout = table.layouts + at(kLayout);
    const long long left = at(kNumel) - begin;
    size = static_cast<int>(left < kChunk ? left : kChunk);
  }

  __device__ long long at(Field field) const { return fields[field * count]; }

  template <class T>
  __device__ T* pointer(Field field) const {
    return reinterpret_cast<T*>(at(field));
  }
};

// Where an element stands in each tensor of the update, in elements. Flat memory needs one number for all of them.
struct Flat {
  long long index;
  __device__ long long operator[](Role) const { return index; }
};

struct Strided {
  long long offsets[kRoles];

  // `layout` is [dimensions, sizes..., strides of role 0..., strides of role 1..., ...], outermost dimension first.
  __device__ Strided(const long long* layout, long long index) : offsets() {
    const long long dimensions = layout[0];
    for (long long d = dimensions - 1; d >= 0; --d) {
      const long long size = layout[1 + d];
      const long long rest = index / size;
      const long long coordinate = index - rest * size;
      index = rest;
#pragma unroll
      for (int role = 0; role < kRoles; ++role) {
        offsets[role] += coordinate * layout[1 + (1 + role) * dimensions + d];
      }
    }
  }
  __device__ long long operator[](Role role) const { return offsets[role]; }
};

// ---- W elements in one access ----------------------------------------------------------------------------------------

template <class T, int W>
struct alignas(sizeof(T) * W) Pack {
  T x[W];
};

// A pointer that was read from memory is generic to the compiler; saying that it is global gives LDG and STG.
template <int W, class T>
__device__ Pack<T, W> load(const T* p) {
  __builtin_assume(__isGlobal(p));
  return *reinterpret_cast<const Pack<T, W>*>(p);
}

template <int W, class T>
__device__ void store(T* p, const Pack<T, W>& pack) {
  __builtin_assume(__isGlobal(p));
  *reinterpret_cast<Pack<T, W>*>(p) = pack;
}

// Elements before the first boundary of W elements, if every array of the tensor agrees on it; otherwise all of them. A view
// of one flat buffer may begin anywhere, but its arrays mostly lie alike. Not counted in bytes: types differ in size.
template <int W>
__device__ int elements_before_boundary(const Piece& piece, int gradient_bytes, int moment_bytes) {
  int before = -1;
#pragma unroll
  for (int field = kParam; field <= kRemainder; ++field) {
    const long long address = piece.at(static_cast<Field>(field));
    const int bytes = field == kGrad ? gradient_bytes : field < kExpAvg ? 4 : field < kCopy ? moment_bytes : 2;
    const int found = static_cast<int>(-(address / bytes) & (W - 1));
    if (address == 0) continue;  // absent
    if (before >= 0 && found != before) return piece.size;
    before = found;
  }
  return before < piece.size ? before : piece.size;
}

}  // namespace ruda
