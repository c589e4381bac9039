"""How moments are stored, for the Triton kernels: ``csrc/moments.h``, operation by operation.

``KIND`` has ``MOMENTS_BF16``, ``MOMENTS_PACKED`` or neither, which is FP32. Words are int16, BF16 numbers too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .memory import (
    ABS_MASK,
    EXP_AVG,
    EXP_AVG_OUT,
    EXP_AVG_SQ,
    EXP_AVG_SQ_OUT,
    INFINITY,
    INFINITY_BITS,
    MOMENTS_BF16,
    MOMENTS_PACKED,
    bits_float,
    float_bits,
    float_from_bf16,
    read_if,
    typed_pointer,
    write,
)

_V_SHIFT = tl.constexpr(21)
_M_SHIFT = tl.constexpr(20)
_V_FIRST = tl.constexpr(139 << 21)  # FP32 bits with code 0
_V_LAST = tl.constexpr(((139 + 512) << 21) - 1)
_M_FIRST = tl.constexpr(0x3D800000)  # 2^-4
_M_LAST = tl.constexpr(0x3D800000 + (64 << 20) - 1)


@triton.jit
def seed_of(c):
    """The seed in a row of coefficients."""
    return (c[9].to(tl.int32).to(tl.uint32) << 16) | c[8].to(tl.int32).to(tl.uint32)


@triton.jit
def dither(p, g, seed):
    """32 bits for each element: the low half rounds v, the high half rounds m."""
    value = tl.where(p != p, 0x7FC00000, float_bits(p)).to(tl.uint32)
    x = (float_bits(g).to(tl.uint32) ^ seed) * 0x9E3779B1
    x = ((x ^ (x >> 15)) + value) * 0x85EBCA6B
    return x ^ (x >> 16)


@triton.jit
def _low(r):
    return (r & 0xFFFF).to(tl.int32)


@triton.jit
def _high(r):
    return (r >> 16).to(tl.int32)


@triton.jit
def _dithered_bf16(x, low):
    return tl.where(x != x, 0x7FC0, (float_bits(x) + low) >> 16).to(tl.int16)


@triton.jit
def _scale(v):
    """The bits of 2^floor(log2(v) / 2), from those of v."""
    return ((v >> 1) + (127 << 22)) & INFINITY_BITS


@triton.jit
def _unpack_v(word):
    return bits_float(((word.to(tl.int32) & 511) << _V_SHIFT) + _V_FIRST)


@triton.jit
def _unpack_moments(word):
    v = _unpack_v(word)
    wide = word.to(tl.int32)
    u = bits_float((((wide >> 9) & 63) << _M_SHIFT) + _M_FIRST) - 0.0625
    magnitude = u * bits_float(_scale(float_bits(v)))
    return bits_float(float_bits(magnitude) | ((wide & 0x8000) << 16)), v


@triton.jit
def _pack_moments(m, v, r):
    m = tl.where(m != m, INFINITY, m)
    v = tl.where(v != v, INFINITY, v)
    t = float_bits(v) + (_low(r) << 5)
    t = tl.minimum(tl.maximum(t, _V_FIRST), _V_LAST)
    magnitude = bits_float(float_bits(m) & ABS_MASK)
    u = magnitude * bits_float((254 << 23) - _scale(t)) + 0.0625
    y = tl.minimum(float_bits(u) + (_high(r) << 4), _M_LAST)
    code = ((t - _V_FIRST) >> _V_SHIFT) | (((y - _M_FIRST) >> _M_SHIFT) << 9)
    return (code | ((float_bits(m) >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def read_moments(a, start, at_m, at_v, mask, present, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """(m, v) as FP32; zeros, or what words of 0 mean, unless ``present``."""
    if MOMENTS_PACKED & KIND:
        word = read_if(typed_pointer(a[EXP_AVG], tl.int16, VECTOR) + start, at_m, mask, present, VECTOR)
        m, v = _unpack_moments(word)
    elif MOMENTS_BF16 & KIND:
        m = float_from_bf16(read_if(typed_pointer(a[EXP_AVG], tl.int16, VECTOR) + start, at_m, mask, present, VECTOR))
        second = typed_pointer(a[EXP_AVG_SQ], tl.int16, VECTOR) + start
        v = float_from_bf16(read_if(second, at_v, mask, present, VECTOR))
    else:
        m = read_if(typed_pointer(a[EXP_AVG], tl.float32, VECTOR) + start, at_m, mask, present, VECTOR)
        v = read_if(typed_pointer(a[EXP_AVG_SQ], tl.float32, VECTOR) + start, at_v, mask, present, VECTOR)
    return m, v


@triton.jit
def maximum_pointer(address, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """AMSGrad's maximum, typed."""
    if (MOMENTS_BF16 | MOMENTS_PACKED) & KIND:
        return typed_pointer(address, tl.int16, VECTOR)
    else:
        return typed_pointer(address, tl.float32, VECTOR)


@triton.jit
def decode_maximum(stored, KIND: tl.constexpr):
    """AMSGrad's maximum as FP32."""
    if (MOMENTS_BF16 | MOMENTS_PACKED) & KIND:
        return float_from_bf16(stored)
    else:
        return stored


@triton.jit
def larger_maximum(stored_v, old, KIND: tl.constexpr):
    """The larger of the old maximum and of v as it is stored, in the maximum's type: exact in 16 bits."""
    larger = tl.where((stored_v > old) | (stored_v != stored_v), stored_v, old)
    if (MOMENTS_BF16 | MOMENTS_PACKED) & KIND:
        return (float_bits(larger) >> 16).to(tl.int16)
    else:
        return larger


@triton.jit
def write_moments(a, start, at_m, at_v, m, v, r, mask, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """Stores both, rounded with the dither ``r``; returns v as it is stored."""
    if MOMENTS_PACKED & KIND:
        word = _pack_moments(m, v, r)
        write(typed_pointer(a[EXP_AVG_OUT], tl.int16, VECTOR) + start, at_m, word, mask, VECTOR)
        return _unpack_v(word)
    elif MOMENTS_BF16 & KIND:
        first = typed_pointer(a[EXP_AVG_OUT], tl.int16, VECTOR) + start
        write(first, at_m, _dithered_bf16(m, _high(r)), mask, VECTOR)
        rounded = _dithered_bf16(v, _low(r))
        write(typed_pointer(a[EXP_AVG_SQ_OUT], tl.int16, VECTOR) + start, at_v, rounded, mask, VECTOR)
        return float_from_bf16(rounded)
    else:
        write(typed_pointer(a[EXP_AVG_OUT], tl.float32, VECTOR) + start, at_m, m, mask, VECTOR)
        write(typed_pointer(a[EXP_AVG_SQ_OUT], tl.float32, VECTOR) + start, at_v, v, mask, VECTOR)
        return v
