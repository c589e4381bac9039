// FP16 and BF16 against FP32 in blocks, rounded to nearest even, and the split master (BF16 plus 16 bits).
//
// Hardware conversions where the level has them, integer arithmetic elsewhere: both give the same numbers, and only the
// payload of a NaN may differ. Included by cpu_loops.cpp alone; everything has internal linkage.
#pragma once

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "half_bits.h"

namespace ruda {
namespace {

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

inline void split_master(const float* in, uint16_t* high, uint16_t* remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const SplitMaster master = ruda::split_master(in[i]);
    high[i] = master.high;
    remainder[i] = master.remainder;
  }
}

inline void join_master(const uint16_t* high, const uint16_t* remainder, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = ruda::join_master({high[i], remainder[i]});
}

}  // namespace
}  // namespace ruda
