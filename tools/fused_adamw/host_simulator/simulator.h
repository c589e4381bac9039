// The part of the CUDA language that csrc/cuda.cu uses, for one thread of a CPU. For correctness only: it says nothing about
// speed, and it is no race detector, although an unfavourable schedule makes a missing barrier show.
//
// Each CUDA thread is a fiber with a stack of its own. The fibers of a warp run in turn until all of them wait for a shuffle,
// so a warp runs as far ahead of the others as its barriers allow; which warp goes first changes with every block.
#pragma once

#include <cstdio>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __launch_bounds__(...)
// Blocks run one after another, so one copy will do. It keeps what the previous block left, as a GPU's may.
#define __shared__ static
#if !defined(__clang__)
#define __builtin_assume(condition) static_cast<void>(0)
#endif

inline bool __isGlobal(const void*) { return true; }

struct Index {
  unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;

namespace simulator {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

void wait_for_block();
// Posts one value of `size` bytes, waits for the other lanes, and returns the value of lane `source` in `out`.
void exchange(const void* value, void* out, unsigned long size, int source);

using Kernel = void (*)(void** arguments);

template <class... Arguments, unsigned long... I>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Arguments*>(arguments[I])...);
}

// Takes its arguments as cuLaunchKernel does.
template <auto KERNEL, class... Arguments>
void call(void (*)(Arguments...), void** arguments) {
  call(KERNEL, arguments, std::index_sequence_for<Arguments...>());
}

struct Instance {
  const char* name;
  Kernel kernel;
  bool has_barriers;
};

}  // namespace simulator

inline void __syncthreads() { simulator::wait_for_block(); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  T out;
  simulator::exchange(&value, &out, sizeof(T), static_cast<int>(threadIdx.x % simulator::kWarp) ^ distance);
  return out;
}
