"""Triton kernels of the gradient statistics: one row per chunk of a gradient, rows merged, the final report.

csrc/gradient_stats.h says what a row holds. Sums run in a fixed order, so a device repeats its bits; other backends add
in another order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .memory import (
    ABS_MASK,
    FLAGS,
    GENERAL,
    GRAD,
    INFINITY_BITS,
    LAYOUT,
    NUMEL,
    STRIDED,
    bits_float,
    block_of_program,
    float_bits,
    gradient_pointer,
    read_entry,
    read_general_gradient,
    read_gradient,
    strided_offsets,
)


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 127) for exponent in [1, 254]; 0 below."""
    return bits_float(tl.maximum(exponent, 0) << 23)


@triton.jit
def _add_block(largest, bad, frame, total, x):
    """Adds one block of unscaled gradients to a running description of the finite elements.

    largest: bits of the largest magnitude. total: the sum of (x * 2^(frame - 127))^2, where the frame brings the
    largest element near 1, so that neither 1e-44 nor 3e38 underflows or overflows. A change of the frame is exact.
    """
    magnitude = float_bits(x) & ABS_MASK
    most = tl.max(magnitude)
    if most >= INFINITY_BITS:
        # Rare: the finite elements are described all the same, so that a skipped step can say how large they were.
        finite = magnitude < INFINITY_BITS
        x = tl.where(finite, x, 0.0)
        most = tl.max(tl.where(finite, magnitude, 0))
        bad = 1.0
    largest = tl.maximum(largest, most)
    next_frame = tl.maximum(tl.minimum(254 - (largest >> 23), 253), 1)
    shrink = _power_of_two(127 + next_frame - frame)
    x = x * _power_of_two(next_frame)
    return largest, bad, next_frame, total * shrink * shrink + tl.sum(x * x)


@triton.jit
def _stored(address, start, offsets, mask, flags, KIND: tl.constexpr, VECTOR: tl.constexpr):
    if GENERAL & KIND:
        return read_general_gradient(address, start, offsets, mask, flags, VECTOR)
    else:
        return read_gradient(gradient_pointer(address, KIND, VECTOR) + start, offsets, mask, KIND, VECTOR)


@triton.jit
def inverse_of(scale, has_scale, inverse_scale):
    """1 / ``scale``, a loss scale on the device, if there is one; else ``inverse_scale``."""
    stored = tl.load(scale, mask=has_scale != 0, other=1.0)
    return tl.where(has_scale != 0, tl.div_rn(1.0, stored), inverse_scale)


_ANALYZE_ARGUMENTS = ["fields", "layouts", "blocks", "rows", "scale", "n", "block_count", "has_scale", "inverse_scale"]


@triton.jit(do_not_specialize=_ANALYZE_ARGUMENTS)
def analyze_kernel(
    fields,
    layouts,
    blocks,
    rows,
    scale,
    n,
    block_count,
    has_scale,
    inverse_scale,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One statistics row per program: (scale, sumsq, bad) of one chunk of one gradient."""
    tensor, chunk = block_of_program(blocks)
    row = tl.load(blocks + block_count + tl.program_id(0))
    base = chunk * CHUNK
    count = tl.minimum(read_entry(fields, NUMEL, n, tensor) - base, CHUNK).to(tl.int32)
    address = read_entry(fields, GRAD, n, tensor)
    flags = read_entry(fields, FLAGS, n, tensor)
    layout = layouts + read_entry(fields, LAYOUT, n, tensor)
    inverse_scale = inverse_of(scale, has_scale, inverse_scale)
    largest = count * 0
    frame = largest + 253
    bad = inverse_scale * 0.0
    total = inverse_scale * 0.0
    done = 0
    if (STRIDED & KIND) == 0:
        whole = tl.where((flags & STRIDED) + (address & 15) == 0, count // BLOCK, 0)
        for b in range(whole):
            at = b * BLOCK + tl.arange(0, BLOCK)
            x = _stored(address, base, at, at < count, flags, KIND, True)
            largest, bad, frame, total = _add_block(largest, bad, frame, total, x * inverse_scale)
        done = whole * BLOCK
    walked = done
    if GENERAL & KIND:
        walked = tl.where((flags & STRIDED) != 0, count, done)
    if (STRIDED | GENERAL) & KIND:
        # A general kernel walks a strided tensor from its start, and anything else not at all.
        for b in range(0, tl.where((flags & STRIDED) != 0, count, 0), TAIL):
            at = b + tl.arange(0, TAIL)
            offsets = strided_offsets(layout, base + at, KIND)[1]
            x = _stored(address, base * 0, offsets, at < count, flags, KIND, False)
            largest, bad, frame, total = _add_block(largest, bad, frame, total, x * inverse_scale)
    if (STRIDED & KIND) == 0:
        for b in range(walked, count, TAIL):
            at = b + tl.arange(0, TAIL)
            x = _stored(address, base, at, at < count, flags, KIND, False)
            largest, bad, frame, total = _add_block(largest, bad, frame, total, x * inverse_scale)
    greatest = bits_float(largest)
    framed = tl.where(largest == 0, 1.0, greatest * _power_of_two(frame))
    tl.store(rows + row * 3, greatest)
    tl.store(rows + row * 3 + 1, tl.div_rn(total, framed * framed))
    tl.store(rows + row * 3 + 2, bad)


@triton.jit
def merge_rows(rows, begin, end, BLOCK: tl.constexpr):
    """Rows ``[begin, end)`` as one: scale, sumsq, bad. Sums in FP64, the sum rounded to FP32."""
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)
    for at in range(begin, end, BLOCK):
        i = at + lanes
        largest = tl.maximum(largest, tl.load(rows + i * 3, mask=i < end, other=0.0))
        bad = tl.maximum(bad, tl.load(rows + i * 3 + 2, mask=i < end, other=0.0))
    scale = tl.max(largest)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    total = tl.zeros((BLOCK,), tl.float64)
    for at in range(begin, end, BLOCK):
        i = at + lanes
        row_scale = tl.load(rows + i * 3, mask=i < end, other=0.0)
        ratio = tl.div_rn(row_scale, tl.broadcast_to(divisor, (BLOCK,)))
        total += (tl.load(rows + i * 3 + 1, mask=i < end, other=0.0) * ratio * ratio).to(tl.float64)
    return scale, tl.sum(total).to(tl.float32), tl.max(bad)


@triton.jit(do_not_specialize=["rows", "merged", "count", "fan_in"])
def merge_kernel(rows, merged, count, fan_in, REPORT: tl.constexpr, BLOCK: tl.constexpr):
    """Merges ``fan_in`` rows per program. REPORT: writes (bad, scale, sumsq) instead of a row."""
    begin = tl.program_id(0) * fan_in
    scale, sumsq, bad = merge_rows(rows, begin, tl.minimum(begin + fan_in, count), BLOCK)
    out = merged + tl.program_id(0) * 3
    if REPORT:
        tl.store(out, bad)
        tl.store(out + 1, scale)
        tl.store(out + 2, sumsq)
    else:
        tl.store(out, scale)
        tl.store(out + 1, sumsq)
        tl.store(out + 2, bad)
