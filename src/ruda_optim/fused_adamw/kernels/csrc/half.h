// FP16 and BF16 against FP32 in blocks, rounded to nearest even, and the split master (BF16 plus 16 bits).
//
// Hardware conversions where the level has them, integer arithmetic elsewhere: both give the same numbers, and only the
// payload of a NaN may differ. Included by cpu_loops.cpp alone; everything has internal linkage.
#pragma once

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "gradient_stats.h"

namespace ruda {
namespace {

inline float float_from_bf16(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

inline uint16_t bf16_from_float(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & kAbsMask) > kInfinityBits ? 0x7fc0u : rounded);
}

inline float float_from_fp16(uint16_t h) {
  const uint32_t magnitude = h & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t normal = (magnitude << 13) + (112u << 23);
  normal += magnitude >= 0x7c00u ? 112u << 23 : 0u;  // infinity and NaN: exponent 255
  // A subnormal is its mantissa times 2^-24, exactly.
  const uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return bits_float(sign | (magnitude < 0x400u ? subnormal : normal));
}

inline uint16_t fp16_from_float(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & kAbsMask;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14 the steps of FP16 are 2^-24: the steps of FP32 just above one half, so the addition rounds.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > kInfinityBits ? 0x7e00u : half;
  return static_cast<uint16_t>(sign | half);
}

inline void bf16_to_float(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = float_from_bf16(in[i]);
}

inline void float_to_bf16(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_from_float(in[i]);
}

inline void fp16_to_float(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  // The maskz forms start from zero; GCC 12 warns of an uninitialized value inside the plain ones.
  for (; i + 16 <= n; i += 16) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    _mm512_storeu_ps(out + i, _mm512_maskz_cvtph_ps(0xffff, half));
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
#endif
  for (; i < n; ++i) out[i] = float_from_fp16(in[i]);
}

inline void float_to_fp16(const float* in, uint16_t* out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i half = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(in + i), kNearest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), half);
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
#endif
  for (; i < n; ++i) out[i] = fp16_from_float(in[i]);
}

// A split master keeps all 32 bits: `remainder` is the low half, `high` the value rounded to BF16 with ties away from
// zero. Away, not to even: an even BF16 value would otherwise stand for both of its ties, one more than 16 bits can tell.
inline void split_master(const float* in, uint16_t* high, uint16_t* remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = float_bits(in[i]);
    bits = (bits & kAbsMask) > kInfinityBits ? 0x7fc00000u : bits;  // a NaN must not round up into another number
    high[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder[i] = static_cast<uint16_t>(bits);
  }
}

inline void join_master(const uint16_t* high, const uint16_t* remainder, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = (static_cast<uint32_t>(high[i]) << 16) | remainder[i];
    out[i] = bits_float(bits - ((bits & 0x8000u) << 1));
  }
}

}  // namespace
}  // namespace ruda
