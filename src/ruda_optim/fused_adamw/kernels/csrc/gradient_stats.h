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

// What a step does with its gradients.
struct Decision {
  bool skip;
  float clip_factor;  // 1 when skipped: nothing is multiplied then
};

// The whole decision of a step, as GradientStats.decision takes it on the host: FP64, the factor rounded once.
//
// bad, scale, sumsq: the report, looked at only if the gradients were `measured`. found_inf: above 0 if somebody else found
// something that is not finite. max_norm: negative or infinite never clips. epsilon: added to the norm.
RUDA_HD Decision decide_step(double bad, double scale, double sumsq, bool measured, bool check_finite, double found_inf,
                             double max_norm, double epsilon) {
  const bool finite = !measured || bad == 0.0;
  if (found_inf > 0.0 || (check_finite && !finite)) return {true, 1.0f};
  if (!measured || max_norm < 0.0 || max_norm == infinity()) return {false, 1.0f};
  if (max_norm == 0.0 || !finite) return {false, 0.0f};  // the norm of what is not finite is infinite
#if defined(__CUDA_ARCH__)
  const double norm = scale * __dsqrt_rn(sumsq);
#else
  const double norm = scale * __builtin_sqrt(sumsq);
#endif
  const double factor = max_norm / (norm + epsilon);
  return {false, norm == 0.0 || factor > 1.0 ? 1.0f : static_cast<float>(factor)};
}

}  // namespace ruda
