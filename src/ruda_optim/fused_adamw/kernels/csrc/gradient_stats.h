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

}  // namespace ruda
