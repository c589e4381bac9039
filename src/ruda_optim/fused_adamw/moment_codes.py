"""The codes of moments in 16 bits, in NumPy integers: the specification that every kernel follows bit for bit.

A step computes new moments in FP32, uses them unrounded, and stores them rounded with a dither: 32 bits that are a hash
of the element (its value before the step, its gradient) and of the step number. Rounded to nearest, a slow average
would stand still.

``bfloat16``: each moment is the upper half of its FP32 bits.

``packed16``: both moments in one word, ``sign(m) << 15 | code of |m| << 9 | code of v``. The 9 bits of v are cut out of
its FP32 bits: 7 of exponent, 2 of mantissa. The 6 bits of |m| count in units of 2^floor(log2(v) / 2), linearly up to
2^-4 and logarithmically above, so that no word can hold an m that is large beside the root of its v. Both moments of
every word are BF16 numbers, and a word that is unpacked and packed again to nearest is the same word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Bits = NDArray[np.uint32]
    Words = NDArray[np.uint16]
    Floats = NDArray[np.float32]

NEAREST = 0x80008000
"""In place of a dither: rounds to the nearer code."""

_ABS, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)
_V_SHIFT, _M_SHIFT = np.uint32(21), np.uint32(20)
_V_BASE = np.uint32((35 << 2) - 1)  # of code 0
_V_FIRST, _V_LAST = np.uint32(139 << 21), np.uint32(((139 + 512) << 21) - 1)  # FP32 bits with code 0, with code 511
_M_BASE = np.uint32(0x3D800000)  # 2^-4
_M_LAST = np.uint32(0x3D800000 + (64 << 20) - 1)
_OFFSET = np.float32(2.0**-4)
_modulo = np.errstate(over="ignore")  # of 0-d arrays NumPy would say that integers wrap around


@_modulo
def dither(parameter: ArrayLike, gradient: ArrayLike, seed: int) -> Bits:
    """32 bits for each element: the low half rounds v, the high half rounds m.

    Args:
        parameter: the FP32 value before the step; every NaN counts as the same NaN.
        gradient: the gradient of the formula: unscaled, clipped, negated to maximize.
        seed: ``options.seed_of_step`` of the one-based step number.
    """
    parameter = np.asarray(parameter, np.float32)
    value = np.where(np.isnan(parameter), _NAN, _bits(parameter))
    x = (_bits(gradient) ^ np.uint32(seed)) * np.uint32(0x9E3779B1)
    x = ((x ^ (x >> np.uint32(15))) + value) * np.uint32(0x85EBCA6B)
    return np.asarray(x ^ (x >> np.uint32(16)))


@_modulo
def encode_bf16(m: ArrayLike, v: ArrayLike, dithers: ArrayLike) -> tuple[Words, Words]:
    """Both moments as BF16 bits. A NaN becomes 0x7fc0."""
    r = np.asarray(dithers, np.uint32)

    def rounded(x: ArrayLike, low: Bits) -> Words:
        return np.where(np.isnan(x), np.uint32(0x7FC0), (_bits(x) + low) >> np.uint32(16)).astype(np.uint16)

    return rounded(m, r >> np.uint32(16)), rounded(v, r & np.uint32(0xFFFF))


def decode_bf16(words: ArrayLike) -> Floats:
    """The FP32 numbers of BF16 bits."""
    return _floats(np.asarray(words, np.uint16).astype(np.uint32) << np.uint32(16))


@_modulo
def encode_packed(m: ArrayLike, v: ArrayLike, dithers: ArrayLike = NEAREST) -> Words:
    """One word for both moments. What does not fit saturates, infinity and NaN too; a NaN in m counts as positive."""
    r = np.asarray(dithers, np.uint32)
    m, v = (_bits(np.where(np.isnan(x), np.inf, x)) for x in (m, v))
    # Negative v, which no step makes, is code 0: its sign bit makes it the least of the signed integers.
    dithered = (v + ((r & np.uint32(0xFFFF)) << np.uint32(5))).view(np.int32)
    t = np.clip(dithered, _V_FIRST.view(np.int32), _V_LAST.view(np.int32)).view(np.uint32)
    units = np.add(_floats(m & _ABS) * _floats(np.uint32(254 << 23) - _scale(t)), _OFFSET)
    y = np.minimum(_bits(units) + ((r >> np.uint32(16)) << np.uint32(4)), _M_LAST)
    code = (t >> _V_SHIFT) - _V_BASE | (y - _M_BASE) >> _M_SHIFT << np.uint32(9)
    return (code | (m & ~_ABS) >> np.uint32(16)).astype(np.uint16)


def decode_packed(words: ArrayLike) -> tuple[Floats, Floats]:
    """``(m, v)`` of each word, exact. Code 0 of v, which counts as zero, is 1.75 * 2^-93 here."""
    w = np.asarray(words, np.uint16).astype(np.uint32)
    v = ((w & np.uint32(511)) + _V_BASE) << _V_SHIFT
    units = _floats(((w >> np.uint32(9) & np.uint32(63)) << _M_SHIFT) + _M_BASE) - _OFFSET
    magnitude = units * _floats(_scale(v))
    return _floats(_bits(magnitude) | (w & np.uint32(0x8000)) << np.uint32(16)), _floats(v)


def _scale(v: Bits) -> Bits:
    """The bits of 2^floor(log2(v) / 2), from those of v."""
    return np.asarray((v >> np.uint32(1)) + np.uint32(127 << 22) & _INFINITY)


def _bits(x: ArrayLike) -> Bits:
    return np.asarray(x, np.float32, order="C").view(np.uint32)


def _floats(bits: Bits) -> Floats:
    return np.asarray(bits, order="C").view(np.float32)
