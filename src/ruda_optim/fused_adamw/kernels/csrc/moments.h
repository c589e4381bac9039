// How the moments of an element are stored: FP32, BF16, or both in one 16-bit word ("packed"). Freestanding, like
// adamw_update.h; moment_codes.py specifies the codes, bit for bit.
//
// A slow average that is rounded to nearest stands still: what a step adds to it is less than half of its last place. So 16
// bits are rounded with a dither, and the dither is a hash of the element and of the step number. The update remains a
// function of one element alone, whatever the layout, the shard, the number of threads and the backend.
#pragma once

#include "half_bits.h"

namespace ruda {

RUDA_HD unsigned seed_of(const Coefficients& c) {
  return static_cast<unsigned>(c.seed_high) << 16 | static_cast<unsigned>(c.seed_low);
}

// The low half rounds v, the high half rounds m. `p` is the FP32 value before the step, `g` the gradient of the formula.
RUDA_HD unsigned dither(float p, float g, unsigned seed) {
  const unsigned value = p != p ? 0x7fc00000u : float_bits(p);  // the payload of a NaN is the processor's own
  unsigned x = (float_bits(g) ^ seed) * 0x9e3779b1u;
  x = ((x ^ (x >> 15)) + value) * 0x85ebca6bu;
  return x ^ (x >> 16);
}

// `low`: 16 random bits.
RUDA_HD unsigned dithered_bf16(float x, unsigned low) { return x != x ? 0x7fc0u : (float_bits(x) + low) >> 16; }

// ---- both moments in 16 bits: sign of m, 6 bits of m, 9 bits of v -----------------------------------------------------
//
// v: 7 bits of exponent and 2 of mantissa, cut out of FP32. Code 0 counts as zero. |m|: in units of 2^floor(log2(v) / 2),
// linear up to 2^-4 and logarithmic above. So no word, not even a corrupted one, holds an m that is large beside sqrt(v).

constexpr unsigned kVShift = 21, kMShift = 20;
constexpr unsigned kVBase = (35u << 2) - 1u;                   // of code 0, which is 1.75 * 2^-93
constexpr unsigned kVTop = ((kVBase + 512u) << kVShift) - 1u;  // the last FP32 bits with code 511
constexpr unsigned kMBase = 0x3d800000u;                       // 2^-4
constexpr unsigned kMTop = kMBase + (64u << kMShift) - 1u;     // the last FP32 bits with code 63
constexpr unsigned kNearest = 0x80008000u;                     // instead of a dither: rounds to the nearer code

struct Moments {
  float m, v;
};

// The bits of 2^floor(log2(v) / 2), from those of v.
RUDA_HD unsigned moment_scale(unsigned v) { return ((v >> 1) + (127u << 22)) & kInfinityBits; }

RUDA_HD float packed_v(unsigned code) { return bits_float((code + kVBase) << kVShift); }

// Exact.
RUDA_HD Moments unpack_moments(unsigned word) {
  const float v = packed_v(word & 511u);
  const float u = bits_float((((word >> 9) & 63u) << kMShift) + kMBase) - 0x1p-4f;
  const float magnitude = u * bits_float(moment_scale(float_bits(v)));
  return {bits_float(float_bits(magnitude) | (word & 0x8000u) << 16), v};
}

// What does not fit saturates, infinity and NaN too; a NaN counts as positive, since its sign is the processor's own.
RUDA_HD unsigned pack_moments(float m, float v, unsigned r) {
  m = m != m ? infinity() : m;
  v = v != v ? infinity() : v;
  int t = static_cast<int>(float_bits(v) + ((r & 0xffffu) << 5));
  t = t < static_cast<int>(kVBase << kVShift) ? static_cast<int>(kVBase << kVShift) : t;
  t = t > static_cast<int>(kVTop) ? static_cast<int>(kVTop) : t;
  const unsigned v_bits = static_cast<unsigned>(t);
  const unsigned magnitude = float_bits(m) & kAbsMask;
  const float u = bits_float(magnitude) * bits_float((254u << 23) - moment_scale(v_bits)) + 0x1p-4f;
  unsigned y = float_bits(u) + ((r >> 16) << 4);
  y = y > kMTop ? kMTop : y;
  return ((v_bits >> kVShift) - kVBase) | ((y - kMBase) >> kMShift) << 9 | (float_bits(m) & ~kAbsMask) >> 16;
}

// ---- the three forms ---------------------------------------------------------------------------------------------------

// What lies in memory. The packed form has its word in `m`, and no `v`. AMSGrad's maximum is that of the stored v, so that
// 16 bits hold it exactly; the step itself uses the unrounded v.
template <class T>
struct Words {
  T m, v, v_max;
};

struct Fp32Moments {
  using Word = float;
  static constexpr bool kDithered = false, kPacked = false;

  static RUDA_HD Element read(float p, const Words<float>& w) { return {p, w.m, w.v, w.v_max}; }
  static RUDA_HD Words<float> write(const Element& e, float, unsigned) { return {e.m, e.v, e.v_max}; }
};

RUDA_HD unsigned short larger_bf16(float v, float v_max) {
  return static_cast<unsigned short>(float_bits(v > v_max || v != v ? v : v_max) >> 16);
}

struct Bf16Moments {
  using Word = unsigned short;
  static constexpr bool kDithered = true, kPacked = false;

  static RUDA_HD Element read(float p, const Words<Word>& w) {
    return {p, float_from_bf16(w.m), float_from_bf16(w.v), float_from_bf16(w.v_max)};
  }
  static RUDA_HD Words<Word> write(const Element& e, float v_max, unsigned r) {
    const unsigned m = dithered_bf16(e.m, r >> 16), v = dithered_bf16(e.v, r & 0xffffu);
    return {static_cast<Word>(m), static_cast<Word>(v), larger_bf16(bits_float(v << 16), v_max)};
  }
};

struct PackedMoments {
  using Word = unsigned short;
  static constexpr bool kDithered = true, kPacked = true;

  static RUDA_HD Element read(float p, const Words<Word>& w) {
    const Moments moments = unpack_moments(w.m);
    return {p, moments.m, moments.v, float_from_bf16(w.v_max)};
  }
  static RUDA_HD Words<Word> write(const Element& e, float v_max, unsigned r) {
    const unsigned word = pack_moments(e.m, e.v, r);
    return {static_cast<Word>(word), 0, larger_bf16(packed_v(word & 511u), v_max)};
  }
};

// One element: its stored moments are replaced, its new value is returned.
template <class Form, bool AMSGRAD>
RUDA_HD float update_element(const Coefficients& c, const GradientFactors& f, unsigned seed, float stored_gradient,
                             float p, Words<typename Form::Word>& words) {
  const Element old = Form::read(p, words);
  const Element e = adamw_element<AMSGRAD>(c, f, stored_gradient, old);
  const unsigned r = Form::kDithered ? dither(p, scaled_gradient(f, stored_gradient), seed) : 0u;
  words = Form::write(e, old.v_max, r);
  return e.p;
}

}  // namespace ruda
