// The AdamW / AMSGrad formula for one element. Everything that moves data (loops, conversions, layouts) lives elsewhere.
//
// Freestanding on purpose: g++, clang++, NVRTC and the host simulator compile this file unchanged, so it includes nothing.
// Build it with contraction off (-ffp-contract=off, --fmad=false): each operation below rounds once, and every backend
// returns the same bits.
//
// Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad; PyTorch's AdamW for the order
// (the maximum is taken over the uncorrected second moment, and epsilon is added outside the root).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define RUDA_HD __host__ __device__ __forceinline__
#else
#define RUDA_HD inline __attribute__((always_inline))
#endif

namespace ruda {

#if defined(__CUDA_ARCH__)
RUDA_HD float sqrt_rn(float x) { return __fsqrt_rn(x); }
RUDA_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
RUDA_HD double power(double base, double exponent) { return pow(base, exponent); }
RUDA_HD float infinity() { return __int_as_float(0x7f800000); }
#else
RUDA_HD float sqrt_rn(float x) { return __builtin_sqrtf(x); }
RUDA_HD float div_rn(float a, float b) { return a / b; }
RUDA_HD double power(double base, double exponent) { return __builtin_pow(base, exponent); }
RUDA_HD float infinity() { return __builtin_inff(); }
#endif

// One row of the coefficient table: computed on the host in FP64, once per distinct (parameter group, step), then rounded.
struct Coefficients {
  float lr;               // >= 0
  float lr_weight_decay;  // lr * weight_decay
  float one_minus_beta1;  // in (0, 1]
  float one_minus_beta2;  // in (0, 1]
  float inv_bias1;        // 1 / (1 - beta1^t)
  float inv_bias2;        // 1 / (1 - beta2^t)
  float epsilon;          // > 0
  float gradient_sign;    // +1, or -1 to maximize
  float seed_low;         // seed_of_step, the low 16 bits as a number: FP32 holds it exactly, and no copy changes it
  float seed_high;        // the high 16 bits
};
constexpr int kCoefficients = 10;

// One row of the hyperparameter table of a capturable step, whose coefficients the device computes: one per group.
struct Hyperparameters {
  double lr, beta1, beta2, epsilon, weight_decay, gradient_sign;
  double max_norm;       // of the whole step, read from the first row; negative: no clipping
  double guard_epsilon;  // of the whole step, read from the first row
};

// What the dither of moments.h takes from the step number `t`: MurmurHash3's finalizer, of t modulo 2^32.
RUDA_HD unsigned seed_of_step(unsigned long long t) {
  unsigned x = static_cast<unsigned>(t);
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// The coefficients of the one-based update number `t`: FP64, rounded once, like AdamWOptions.prepare_step on the host.
RUDA_HD Coefficients coefficients_of_step(const Hyperparameters& h, double t) {
  const unsigned seed = seed_of_step(static_cast<unsigned long long>(t));
  return {static_cast<float>(h.lr),
          static_cast<float>(h.lr * h.weight_decay),
          static_cast<float>(1.0 - h.beta1),
          static_cast<float>(1.0 - h.beta2),
          static_cast<float>(1.0 / (1.0 - power(h.beta1, t))),
          static_cast<float>(1.0 / (1.0 - power(h.beta2, t))),
          static_cast<float>(h.epsilon),
          static_cast<float>(h.gradient_sign),
          static_cast<float>(seed & 0xffffu),
          static_cast<float>(seed >> 16)};
}

// The two factors every gradient is multiplied by, in this order: folding them into one would hide an overflow.
struct GradientFactors {
  float inverse_scale;  // 1 / gradient_scale
  float signed_clip;    // clip_factor * gradient_sign; the sign is exact, so it may ride on the second factor
};

RUDA_HD GradientFactors gradient_factors(const Coefficients& c, float inverse_scale, float clip_factor) {
  return {inverse_scale, clip_factor * c.gradient_sign};
}

// g of the formula.
RUDA_HD float scaled_gradient(const GradientFactors& f, float stored_gradient) {
  return stored_gradient * f.inverse_scale * f.signed_clip;
}

struct Element {
  float p, m, v, v_max;  // parameter, exp_avg, exp_avg_sq, max_exp_avg_sq (AMSGrad only)
};

// Which end a lerp starts from.
RUDA_HD bool near_old(float weight) { return weight < 0.5f; }

// old + weight * (x - old), from whichever end is nearer: with a weight near 1 the old value, however large, cancels.
RUDA_HD float lerp(float old, float x, float weight) {
  const float difference = x - old;
  return near_old(weight) ? old + weight * difference : x - (1.0f - weight) * difference;  // 1 - weight is exact here
}

template <bool AMSGRAD>
RUDA_HD Element adamw_element(const Coefficients& c, const GradientFactors& f, float stored_gradient, Element e) {
  const float g = scaled_gradient(f, stored_gradient);
  const float gg = g * g;
  e.m = lerp(e.m, g, c.one_minus_beta1);
  // A square that overflows makes the second moment infinite, and there it stays, instead of turning into inf - inf: the
  // element stops moving, as it does in the literal form beta2 * v + (1 - beta2) * g * g.
  e.v = e.v == infinity() || gg == infinity() ? e.v + gg : lerp(e.v, gg, c.one_minus_beta2);
  float v_used = e.v;
  if (AMSGRAD) {
    // Not fmaxf: a NaN on either side must come through.
    e.v_max = (e.v > e.v_max || e.v != e.v) ? e.v : e.v_max;
    v_used = e.v_max;
  }
  const float denominator = sqrt_rn(v_used * c.inv_bias2) + c.epsilon;
  e.p -= c.lr_weight_decay * e.p + div_rn(c.lr * (e.m * c.inv_bias1), denominator);
  return e;
}

}  // namespace ruda
