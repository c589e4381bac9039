// One FP16 or BF16 number against FP32, rounded to nearest even, and the split master. Freestanding, like adamw_update.h.
//
// Integer arithmetic, but for FP16 on a GPU, where the hardware converts in one instruction. Every backend returns the same
// numbers; only the payload of an FP16 NaN may differ.
#pragma once

#include "gradient_stats.h"

namespace ruda {

RUDA_HD float float_from_bf16(unsigned short h) { return bits_float(static_cast<unsigned>(h) << 16); }

RUDA_HD unsigned short bf16_from_float(float x) {
  const unsigned bits = float_bits(x);
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<unsigned short>((bits & kAbsMask) > kInfinityBits ? 0x7fc0u : rounded);
}

RUDA_HD float float_from_fp16(unsigned short h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  const unsigned magnitude = h & 0x7fffu;
  const unsigned sign = static_cast<unsigned>(h & 0x8000u) << 16;
  unsigned normal = (magnitude << 13) + (112u << 23);
  normal += magnitude >= 0x7c00u ? 112u << 23 : 0u;  // infinity and NaN: exponent 255
  // A subnormal is its mantissa times 2^-24, exactly.
  const unsigned subnormal = float_bits(static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f);
  return bits_float(sign | (magnitude < 0x400u ? subnormal : normal));
#endif
}

RUDA_HD unsigned short fp16_from_float(float x) {
#if defined(__CUDA_ARCH__)
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#else
  const unsigned bits = float_bits(x);
  const unsigned magnitude = bits & kAbsMask;
  const unsigned sign = (bits >> 16) & 0x8000u;
  const unsigned normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14 the steps of FP16 are 2^-24: the steps of FP32 just above one half, so the addition rounds.
  const unsigned subnormal = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  unsigned half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > kInfinityBits ? 0x7e00u : half;
  return static_cast<unsigned short>(sign | half);
#endif
}

// The half parameter is the truth. A master that does not round to it was left behind when somebody wrote the parameter (a
// clamp, a swapped average, a loaded value), and the parameter's value takes its place. A NaN beside another stays a NaN.
RUDA_HD float follow_fp16(float master, unsigned short parameter) {
  return fp16_from_float(master) == parameter ? master : float_from_fp16(parameter);
}

RUDA_HD float follow_bf16(float master, unsigned short parameter) {
  return bf16_from_float(master) == parameter ? master : float_from_bf16(parameter);
}

// A split master keeps all 32 bits: `remainder` is the low half, `high` the value rounded to BF16 with ties away from
// zero. Away, not to even: an even BF16 value would otherwise stand for both of its ties, one more than 16 bits can tell.
struct SplitMaster {
  unsigned short high, remainder;
};

RUDA_HD SplitMaster split_master(float x) {
  unsigned bits = float_bits(x);
  bits = (bits & kAbsMask) > kInfinityBits ? 0x7fc00000u : bits;  // a NaN must not round up into another number
  return {static_cast<unsigned short>((bits + 0x8000u) >> 16), static_cast<unsigned short>(bits)};
}

// Somebody else may have written `high` since: no number lies below a zero, and borrowing from one would make a NaN.
RUDA_HD float join_master(SplitMaster master) {
  const unsigned bits = (static_cast<unsigned>(master.high) << 16) | master.remainder;
  return bits_float((bits & 0x7fff0000u) == 0u ? bits : bits - ((bits & 0x8000u) << 1));
}

}  // namespace ruda
