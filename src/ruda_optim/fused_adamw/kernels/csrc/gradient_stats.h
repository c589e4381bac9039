// Gradient statistics: one element in, two rows merged. Freestanding, like adamw_update.h.
//
// A row describes a run of unscaled gradients: the largest finite magnitude, the sum of squares relative to it, and
// whether anything was not finite. Relative to its own maximum a sum of squares lies in [1, count], so neither 1e-44
// nor 3e38 can underflow or overflow it.
//
// Only the unscaled value is looked at. The inverse scale is finite and positive, so an infinite or NaN stored gradient
// stays infinite or NaN after the multiplication, and a finite one that overflows in it is caught as well.
#pragma once

#include "adamw_update.h"

namespace ruda {

constexpr unsigned kAbsMask = 0x7fffffffu;
constexpr unsigned kInfinityBits = 0x7f800000u;  // NaN > infinity > every finite magnitude, compared as integers

struct StatsRow {
  float scale;  // max |g| over the finite elements
  float sumsq;  // sum of (g / scale)^2 over the finite elements; 0 when scale is 0
  float bad;    // 1 when an element was not finite, else 0
};
constexpr int kStatsRow = 3;

RUDA_HD unsigned float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

RUDA_HD float bits_float(unsigned bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// A row's sum of squares, re-expressed relative to a scale at least as large as its own.
RUDA_HD float rescaled_sumsq(const StatsRow& row, float scale) {
  if (row.scale == 0.0f) return 0.0f;
  const float ratio = div_rn(row.scale, scale);
  return row.sumsq * ratio * ratio;
}

// FP32 sums of squares that can neither overflow nor lose the largest element: every element is multiplied by a power of
// two that brings the largest finite magnitude, whose bits are `largest`, into [1, 4) (a subnormal one: above 2^-23).
RUDA_HD float power_of_two_rescale(unsigned largest) {
  const unsigned exponent = largest >> 23;
  return bits_float((exponent < 1u ? 253u : exponent > 253u ? 1u : 254u - exponent) << 23);
}

RUDA_HD float rescaled_square(float g, float rescale) {
  const float x = g * rescale;
  return x * x;
}

// The row of a run whose rescaled squares add up to `sum`.
RUDA_HD StatsRow stats_row(unsigned largest, float sum, float rescale, bool bad) {
  const float scale = bits_float(largest);
  const float unit = scale * rescale;
  return {scale, largest == 0u ? 0.0f : div_rn(sum, unit * unit), bad ? 1.0f : 0.0f};
}

// The clip factor of a finite report, as GradientStats.decision computes it on the host: FP64, rounded once.
RUDA_HD float clip_factor_of(const StatsRow& report, double max_norm, double epsilon) {
  if (max_norm < 0.0) return 1.0f;
  if (max_norm == 0.0) return 0.0f;
#if defined(__CUDA_ARCH__)
  const double norm = report.scale * __dsqrt_rn(report.sumsq);
#else
  const double norm = report.scale * __builtin_sqrt(report.sumsq);
#endif
  const double factor = max_norm / (norm + epsilon);
  return norm == 0.0 || factor > 1.0 ? 1.0f : static_cast<float>(factor);
}

}  // namespace ruda
