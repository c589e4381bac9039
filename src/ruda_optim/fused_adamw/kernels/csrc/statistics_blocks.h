// Sums of squares of gradients, block by block. Included by cpu_loops.cpp alone; everything has internal linkage.
//
// A block has 64 partial sums whatever the vector width: the order of the additions, and so the last bit, does not depend
// on the level. Each adds at most 16 squares in FP32; between partial sums and between blocks the sums are FP64.
#pragma once

#include "cpu_loops.h"
#include "half.h"

#if defined(__SSE4_1__)
#include <immintrin.h>
#endif

namespace ruda {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int kGroup = 64;
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kSums = kGroup / kLanes;

// How many places of a row are read in turn. A core that follows one place waits for memory at every new page; where
// memory is slow, four at once bring more (measured on Zen 3 and Zen 4). At AVX-512 two-byte gradients cost more in
// arithmetic than in memory: one place leaves all registers to them.
template <class T>
constexpr int kPlaces = kLanes == 16 && sizeof(T) == 2 ? 1 : 4;

typedef float FloatLanes __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntLanes __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * sizeof(uint16_t))));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline FloatLanes load(const float* in) {
  FloatLanes x;
  __builtin_memcpy(&x, in, sizeof x);
  return x;
}

inline IntLanes load_bits(const void* in) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(in)));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(in)));
#elif defined(__SSE4_1__)
  return (IntLanes)_mm_cvtepu16_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(in)));
#else
  HalfLanes half;
  __builtin_memcpy(&half, in, sizeof half);
  return __builtin_convertvector(half, IntLanes);
#endif
}

inline FloatLanes load(const Bf16* in) { return (FloatLanes)(load_bits(in) << 16); }

inline FloatLanes load(const Fp16* in) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
#elif defined(__F16C__)
  return (FloatLanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
#else
  // float_from_fp16, lane by lane.
  const IntLanes bits = load_bits(in);
  const IntLanes magnitude = bits & 0x7fff;
  const IntLanes normal = (magnitude << 13) + (112 << 23) + ((magnitude >= 0x7c00) & (112 << 23));
  const IntLanes subnormal = (IntLanes)(__builtin_convertvector(magnitude, FloatLanes) * 0x1p-24f);
  return (FloatLanes)(((bits & 0x8000) << 16) | (magnitude < 0x400 ? subnormal : normal));
#endif
}

// A block as FP32: itself, or converted into scratch.
inline const float* as_float(const float* in, float*) { return in; }

template <class T>
const float* as_float(const T* in, float* scratch) {
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const FloatLanes x = load(in + i);
    __builtin_memcpy(scratch + i, &x, sizeof x);
  }
  return scratch;
}

struct BlockSums {
  FloatLanes squares[kSums];
  IntLanes largest;  // bits of the largest magnitudes, as integers: NaN > infinity > finite
};

// The squares of (g * inverse_scale) * rescale over n elements (a whole number of groups) at each of several places, and
// the largest |g * inverse_scale|.
template <int PLACES, bool SCALED, bool RESCALED, class T>
[[gnu::always_inline]] inline void sum_groups(const T* g, int64_t distance, int64_t n, float inverse_scale,
                                              float rescale, bool prefetch, BlockSums* out) {
  constexpr int64_t kAhead = 2048;  // bytes; asking beyond the end of an array is harmless
  BlockSums sums[PLACES] = {};
  for (int64_t i = 0; i < n; i += kGroup) {
    for (int place = 0; place < PLACES; ++place) {
      const T* const at = g + place * distance + i;
      if (prefetch) {
        const char* const ahead = reinterpret_cast<const char*>(at) + kAhead;
        for (int64_t line = 0; line < kGroup * int64_t{sizeof(T)}; line += 64) __builtin_prefetch(ahead + line);
      }
      for (int s = 0; s < kSums; ++s) {
        FloatLanes x = load(at + s * kLanes);
        if (SCALED) x *= inverse_scale;
        const IntLanes bits = (IntLanes)x & static_cast<int32_t>(kAbsMask);  // the same bits, not a conversion
        sums[place].largest = bits > sums[place].largest ? bits : sums[place].largest;
        if (RESCALED) x *= rescale;
        sums[place].squares[s] += x * x;
      }
    }
  }
  for (int place = 0; place < PLACES; ++place) out[place] = sums[place];
}

template <class T, int N>
struct Vector {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

// Folds the upper half of N numbers onto the lower one, until one is left. Spelled out in vectors of half the size, because
// GCC makes a hundred scalar instructions of the plain loop.
template <class T, int N, class Fold>
[[gnu::always_inline]] inline T fold(typename Vector<T, N>::type all, const Fold& both) {
  if constexpr (N == 2) {
    return both(all[0], all[1]);
  } else {
    typename Vector<T, N / 2>::type halves[2];
    __builtin_memcpy(halves, &all, sizeof all);
    return fold<T, N / 2>(both(halves[0], halves[1]), both);
  }
}

inline uint32_t largest(const BlockSums& sums) {
  return static_cast<uint32_t>(fold<int32_t, kLanes>(sums.largest, [](auto a, auto b) { return b > a ? b : a; }));
}

template <int N>
[[gnu::always_inline]] inline double sum_of(double* all) {
  if constexpr (N > kLanes / 2) {
    for (int i = 0; i < N / 2; ++i) all[i] += all[i + N / 2];
    return sum_of<N / 2>(all);
  } else {
    typename Vector<double, N>::type last;
    __builtin_memcpy(&last, all, sizeof last);
    return fold<double, N>(last, [](auto a, auto b) { return a + b; });
  }
}

inline double total(const BlockSums& sums) {
  float partial[kGroup];
  __builtin_memcpy(partial, sums.squares, sizeof partial);
  double all[kGroup];
  for (int i = 0; i < kGroup; ++i) all[i] = partial[i];
  return sum_of<kGroup>(all);
}

// Between these magnitudes FP32 squares neither overflow nor lose what counts: an element whose square underflows is
// 2^-23 of the largest or less. Outside, the block is summed again, multiplied by a power of two.
constexpr uint32_t kPlainFrom = (127u - 40u) << 23;
constexpr uint32_t kPlainTo = (127u + 40u) << 23;

// What the blocks of a row add up to.
struct RowSums {
  double squares = 0;
  uint32_t largest = 0;  // the bits of a finite magnitude
  bool bad = false;
};

// The sum of squares of any block of n gradients, a whole number of groups.
double any_block(const float* g, int64_t n, float inverse_scale, RowSums* row) {
  BlockSums sums;
  alignas(64) float patched[kBlock];
  sum_groups<1, true, false>(g, 0, n, inverse_scale, 1.0f, false, &sums);
  uint32_t most = largest(sums);
  if (most >= kInfinityBits) {
    // The finite elements are described all the same, so that the report of a skipped step can say how large they are.
    row->bad = true;
    for (int64_t i = 0; i < n; ++i) {
      const bool finite = (float_bits(g[i] * inverse_scale) & kAbsMask) < kInfinityBits;
      patched[i] = finite ? g[i] : 0.0f;
    }
    g = patched;
    sum_groups<1, true, false>(g, 0, n, inverse_scale, 1.0f, false, &sums);
    most = largest(sums);
  }
  row->largest = most > row->largest ? most : row->largest;
  if ((most >= kPlainFrom && most < kPlainTo) || most == 0) return total(sums);
  const uint32_t exponent = most >> 23;
  const uint32_t inverse = 254u - exponent;  // the biased exponent of 2^-e; the largest magnitudes have none
  const float rescale = bits_float((inverse < 1u ? 1u : inverse) << 23);
  sum_groups<1, true, true>(g, 0, n, inverse_scale, rescale, false, &sums);
  const double wide = rescale;
  return total(sums) / (wide * wide);
}

// Adds whole blocks of flat memory to a row. They are summed place by place, and added in their own order.
template <bool SCALED, class T>
void add_blocks(const T* g, int64_t blocks, float inverse_scale, bool prefetch, RowSums* row) {
  constexpr int64_t kMost = 64;  // blocks of a full row
  constexpr int kTurns = kPlaces<T>;
  double squares[kMost];
  alignas(64) float scratch[kBlock];
  for (int64_t first = 0; first < blocks; first += kMost) {
    const T* const from = g + first * kBlock;
    const int64_t count = blocks - first < kMost ? blocks - first : kMost;
    const int64_t apart = count / kTurns;
    BlockSums sums[kTurns];
    const auto note = [&](int64_t block, const BlockSums& found) {
      const uint32_t most = largest(found);
      if (most >= kPlainFrom && most < kPlainTo) {
        row->largest = most > row->largest ? most : row->largest;
        squares[block] = total(found);
      } else {
        squares[block] = any_block(as_float(from + block * kBlock, scratch), kBlock, inverse_scale, row);
      }
    };
    for (int64_t block = 0; block < apart; ++block) {
      sum_groups<kTurns, SCALED, false>(from + block * kBlock, apart * kBlock, kBlock, inverse_scale, 1.0f, prefetch,
                                        sums);
      for (int turn = 0; turn < kTurns; ++turn) note(turn * apart + block, sums[turn]);
    }
    for (int64_t block = apart * kTurns; block < count; ++block) {
      sum_groups<1, SCALED, false>(from + block * kBlock, 0, kBlock, inverse_scale, 1.0f, prefetch, sums);
      note(block, sums[0]);
    }
    for (int64_t block = 0; block < count; ++block) row->squares += squares[block];
  }
}

template <class T>
void add_blocks(const T* g, int64_t blocks, const StatisticsArguments& arguments, RowSums* row) {
  const auto add = arguments.inverse_scale == 1.0f ? add_blocks<false, T> : add_blocks<true, T>;
  add(g, blocks, arguments.inverse_scale, arguments.prefetch, row);
}

}  // namespace
}  // namespace ruda
