"""Triton kernels for CUDA and ROCm devices: the formula, the statistics and the capturable decision.

The update is ``csrc/adamw_update.h`` and the loops of ``csrc/cpu_loops.cpp``, operation by operation: contraction is off
(``enable_fp_fusion=False``), division and square root round correctly (``div_rn``, ``sqrt_rn``), so a parameter has the
same bits on every backend. Only the payload of a NaN may differ.

Reading notes. Every pointer comes out of the launch table. An access becomes a 128-bit one only if the scalar pointer is
declared a multiple of 16 bytes and the access has no elementwise mask; so a flat tensor is walked by two loops: whole
blocks without a mask while all of its pointers are aligned, then the rest with one. The two loops differ in block
size on purpose: equal shapes would share a layout, and stores would pass through shared memory. BF16 is read and written as int16:
the interpreter truncates BF16 stores, and the integer form costs less than the memory it waits for.

Source of the formula: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad; PyTorch's AdamW for
the order.
"""

from __future__ import annotations

import torch

from . import Kernels, ptx_launch
from .tables import Field, Flag

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the 'ptx' kernels need Triton, which is not installed: pip install 'ruda-optim[fused-adamw-device]'"
    ) from error

# Rows of LaunchTable.fields and bits of its flags, as the kernels want them. tests/test_ptx.py compares nothing here:
# they are the enums themselves.
_PARAM = tl.constexpr(int(Field.PARAM))
_PARAM_OUT = tl.constexpr(int(Field.PARAM_OUT))
_GRAD = tl.constexpr(int(Field.GRAD))
_EXP_AVG = tl.constexpr(int(Field.EXP_AVG))
_EXP_AVG_OUT = tl.constexpr(int(Field.EXP_AVG_OUT))
_EXP_AVG_SQ = tl.constexpr(int(Field.EXP_AVG_SQ))
_EXP_AVG_SQ_OUT = tl.constexpr(int(Field.EXP_AVG_SQ_OUT))
_MAX_EXP_AVG_SQ = tl.constexpr(int(Field.MAX_EXP_AVG_SQ))
_MAX_EXP_AVG_SQ_OUT = tl.constexpr(int(Field.MAX_EXP_AVG_SQ_OUT))
_COPY = tl.constexpr(int(Field.COPY))
_REMAINDER = tl.constexpr(int(Field.REMAINDER))
_NUMEL = tl.constexpr(int(Field.NUMEL))
_FLAGS = tl.constexpr(int(Field.FLAGS))
_COEFFICIENTS = tl.constexpr(int(Field.COEFFICIENTS))
_LAYOUT = tl.constexpr(int(Field.LAYOUT))
_STEP = tl.constexpr(int(Field.STEP))

_GRAD_FP16 = tl.constexpr(int(Flag.GRAD_FP16))
_GRAD_BF16 = tl.constexpr(int(Flag.GRAD_BF16))
_COPY_FP16 = tl.constexpr(int(Flag.COPY_FP16))
_COPY_BF16 = tl.constexpr(int(Flag.COPY_BF16))
_AMSGRAD = tl.constexpr(int(Flag.AMSGRAD))
_FIRST = tl.constexpr(int(Flag.FIRST))
_SPLIT = tl.constexpr(int(Flag.SPLIT))
_STRIDED = tl.constexpr(int(Flag.STRIDED))
_ALIGNED = tl.constexpr(int(Flag.ALIGNED))

_INFINITY = tl.constexpr(float("inf"))
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)  # NaN > infinity > every finite magnitude, compared as integers


# ---- memory ----------------------------------------------------------------------------------------------------------


@triton.jit
def _entry(fields, row: tl.constexpr, n, tensor):
    return tl.load(fields + n * row + tensor)


@triton.jit
def _pointer(address, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """VECTOR promises that the address is a multiple of 16 bytes. Triton forgets the promise if it is made about an
    integer, or about an argument of a function."""
    pointer = address.to(tl.pointer_type(TYPE))
    if VECTOR:
        return tl.multiple_of(pointer, 16)
    else:
        return pointer


@triton.jit
def _gradient_pointer(address, KIND: tl.constexpr, VECTOR: tl.constexpr):
    if _GRAD_FP16 & KIND:
        return _pointer(address, tl.float16, VECTOR)
    elif _GRAD_BF16 & KIND:
        return _pointer(address, tl.int16, VECTOR)
    else:
        return _pointer(address, tl.float32, VECTOR)


@triton.jit
def _read(pointer, offsets, mask, VECTOR: tl.constexpr):
    """Elements at ``offsets``. VECTOR: nothing is masked off."""
    if VECTOR:
        return tl.load(pointer + offsets)
    else:
        return tl.load(pointer + offsets, mask=mask, other=0)


@triton.jit
def _read_moment(pointer, offsets, mask, present, VECTOR: tl.constexpr):
    """As _read; zeros, without a look at the memory, unless ``present`` (one answer for the whole block)."""
    if VECTOR:
        return tl.load(pointer + offsets, mask=tl.broadcast_to(present, offsets.shape), other=0.0)
    else:
        return tl.load(pointer + offsets, mask=mask & present, other=0.0)


@triton.jit
def _write(pointer, offsets, value, mask, VECTOR: tl.constexpr):
    if VECTOR:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def _float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float_from_bf16(half):
    return _bits_float(half.to(tl.int32) << 16)


@triton.jit
def _bf16_from_float(x):
    """To nearest, ties to even; a NaN becomes 0x7fc0."""
    bits = _float_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & _ABS_MASK) > _INFINITY_BITS, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def _join_master(high, low):
    """The FP32 value of a split master: csrc/half.h says how it was split."""
    bits = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return _bits_float(bits - ((bits & 0x8000) << 1))


@triton.jit
def _read_gradient(pointer, offsets, mask, KIND: tl.constexpr, VECTOR: tl.constexpr):
    stored = _read(pointer, offsets, mask, VECTOR)
    if _GRAD_BF16 & KIND:
        return _float_from_bf16(stored)
    else:
        return stored.to(tl.float32)


@triton.jit
def _strided_offset(layout, index, ROLE: tl.constexpr):
    """Element offsets of one role for flat element numbers: tables.describe_layout says what a record holds."""
    dimensions = tl.load(layout).to(tl.int32)
    rest = index
    offset = tl.zeros_like(index)
    for k in range(dimensions):
        d = dimensions - 1 - k
        size = tl.load(layout + 1 + d)
        stride = tl.load(layout + 1 + dimensions * (1 + ROLE) + d)
        offset += rest % size * stride
        rest = rest // size
    return offset


@triton.jit
def _addresses(fields, n, tensor):
    return (
        _entry(fields, _PARAM, n, tensor),
        _entry(fields, _PARAM_OUT, n, tensor),
        _entry(fields, _GRAD, n, tensor),
        _entry(fields, _EXP_AVG, n, tensor),
        _entry(fields, _EXP_AVG_OUT, n, tensor),
        _entry(fields, _EXP_AVG_SQ, n, tensor),
        _entry(fields, _EXP_AVG_SQ_OUT, n, tensor),
        _entry(fields, _MAX_EXP_AVG_SQ, n, tensor),
        _entry(fields, _MAX_EXP_AVG_SQ_OUT, n, tensor),
        _entry(fields, _COPY, n, tensor),
        _entry(fields, _REMAINDER, n, tensor),
    )


@triton.jit
def _coefficients(c):
    return (
        tl.load(c),
        tl.load(c + 1),
        tl.load(c + 2),
        tl.load(c + 3),
        tl.load(c + 4),
        tl.load(c + 5),
        tl.load(c + 6),
        tl.load(c + 7),
    )


@triton.jit
def _block(blocks, first):
    """(tensor, chunk) of this program."""
    entry = tl.load(blocks + first + tl.program_id(0))
    tensor = entry >> 32
    return tensor, entry - (tensor << 32)


# ---- update ----------------------------------------------------------------------------------------------------------


@triton.jit
def _adamw_element(c, inverse_scale, signed_clip, g, p, m, v, v_max, AMSGRAD: tl.constexpr):
    """csrc/adamw_update.h, adamw_element. ``c`` is a row of coefficients: lr, lr * weight_decay, 1 - beta1,
    1 - beta2, 1 / (1 - beta1^t), 1 / (1 - beta2^t), epsilon, gradient sign."""
    g = g * inverse_scale * signed_clip
    gg = g * g
    m += c[2] * (g - m)
    # An overflowed second moment stays infinite instead of turning into inf - inf.
    v_next = v + c[3] * (gg - v)
    v = tl.where(v == _INFINITY, v + gg, v_next)
    if AMSGRAD:
        # Not a maximum instruction: a NaN on either side must come through.
        v_max = tl.where((v > v_max) | (v != v), v, v_max)
        v_used = v_max
    else:
        v_used = v
    denominator = tl.sqrt_rn(v_used * c[5]) + c[6]
    p -= c[1] * p + tl.div_rn(c[0] * (m * c[4]), denominator)
    return p, m, v, v_max


@triton.jit
def _update_block(
    a, base, offsets, mask, layout, present, c, inverse_scale, signed_clip, KIND: tl.constexpr, VECTOR: tl.constexpr
):
    """Loads, updates and stores the elements ``base + offsets`` of one tensor; ``a``: its addresses by Field."""
    if _STRIDED & KIND:
        index = base + offsets
        at_g = _strided_offset(layout, index, 1)
        at_m = _strided_offset(layout, index, 2)
        at_v = _strided_offset(layout, index, 3)
        first = base * 0
    else:
        at_g = offsets
        at_m = offsets
        at_v = offsets
        first = base
    g = _read_gradient(_gradient_pointer(a[_GRAD], KIND, VECTOR) + first, at_g, mask, KIND, VECTOR)
    m = _read_moment(_pointer(a[_EXP_AVG], tl.float32, VECTOR) + first, at_m, mask, present, VECTOR)
    v = _read_moment(_pointer(a[_EXP_AVG_SQ], tl.float32, VECTOR) + first, at_v, mask, present, VECTOR)
    if _AMSGRAD & KIND:
        if _STRIDED & KIND:
            at_x = _strided_offset(layout, index, 4)
        else:
            at_x = offsets
        v_max = _read_moment(_pointer(a[_MAX_EXP_AVG_SQ], tl.float32, VECTOR) + first, at_x, mask, present, VECTOR)
    else:
        v_max = v
    if (_COPY_FP16 | _COPY_BF16) & KIND:
        if _STRIDED & KIND:
            at_c = _strided_offset(layout, index, 5)
        else:
            at_c = offsets
    if _SPLIT & KIND:
        if _STRIDED & KIND:
            at_low = _strided_offset(layout, index, 6)
        else:
            at_low = offsets
        high = _pointer(a[_COPY], tl.int16, VECTOR) + first
        low = _pointer(a[_REMAINDER], tl.int16, VECTOR) + first
        p = _join_master(_read(high, at_c, mask, VECTOR), _read(low, at_low, mask, VECTOR))
    else:
        if _STRIDED & KIND:
            at_p = _strided_offset(layout, index, 0)
        else:
            at_p = offsets
        p = _read(_pointer(a[_PARAM], tl.float32, VECTOR) + first, at_p, mask, VECTOR)

    p, m, v, v_max = _adamw_element(c, inverse_scale, signed_clip, g, p, m, v, v_max, (_AMSGRAD & KIND) != 0)

    _write(_pointer(a[_EXP_AVG_OUT], tl.float32, VECTOR) + first, at_m, m, mask, VECTOR)
    _write(_pointer(a[_EXP_AVG_SQ_OUT], tl.float32, VECTOR) + first, at_v, v, mask, VECTOR)
    if _AMSGRAD & KIND:
        _write(_pointer(a[_MAX_EXP_AVG_SQ_OUT], tl.float32, VECTOR) + first, at_x, v_max, mask, VECTOR)
    if _SPLIT & KIND:
        bits = _float_bits(p)
        bits = tl.where((bits & _ABS_MASK) > _INFINITY_BITS, 0x7FC00000, bits)
        _write(high, at_c, ((bits + 0x8000) >> 16).to(tl.int16), mask, VECTOR)
        _write(low, at_low, bits.to(tl.int16), mask, VECTOR)
    else:
        _write(_pointer(a[_PARAM_OUT], tl.float32, VECTOR) + first, at_p, p, mask, VECTOR)
        if _COPY_FP16 & KIND:
            half = _pointer(a[_COPY], tl.float16, VECTOR) + first
            _write(half, at_c, p.to(tl.float16), mask, VECTOR)
        elif _COPY_BF16 & KIND:
            _write(_pointer(a[_COPY], tl.int16, VECTOR) + first, at_c, _bf16_from_float(p), mask, VECTOR)


_UPDATE_ARGUMENTS = ["fields", "layouts", "blocks", "coefficients", "decision"]
_UPDATE_ARGUMENTS += ["n", "first_block", "row_per_tensor", "inverse_scale"]


@triton.jit(do_not_specialize=_UPDATE_ARGUMENTS)
def update_kernel(
    fields,
    layouts,
    blocks,
    coefficients,
    decision,
    n,
    first_block,
    row_per_tensor,
    inverse_scale,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One chunk of one tensor per program."""
    if tl.load(decision) != 0.0:
        return
    tensor, chunk = _block(blocks, first_block)
    flags = _entry(fields, _FLAGS, n, tensor)
    base = chunk * CHUNK
    count = tl.minimum(_entry(fields, _NUMEL, n, tensor) - base, CHUNK).to(tl.int32)
    row = _entry(fields, _COEFFICIENTS, n, tensor)
    row = tl.where(row_per_tensor != 0, tensor, row)
    # Read here, once: Triton would read them again for every block, as the stores of a block might change them.
    c = _coefficients(coefficients + row * 8)
    a = _addresses(fields, n, tensor)
    signed_clip = tl.load(decision + 1) * c[7]
    present = (flags & _FIRST) == 0
    layout = layouts + _entry(fields, _LAYOUT, n, tensor)
    done = 0
    if (_STRIDED & KIND) == 0:
        whole = tl.where((flags & _ALIGNED) != 0, count // BLOCK, 0)
        for b in range(whole):
            at = b * BLOCK + tl.arange(0, BLOCK)
            _update_block(a, base, at, at < count, layout, present, c, inverse_scale, signed_clip, KIND, True)
        done = whole * BLOCK
    for b in range(done, count, TAIL):
        at = b + tl.arange(0, TAIL)
        _update_block(a, base, at, at < count, layout, present, c, inverse_scale, signed_clip, KIND, False)


# ---- statistics ------------------------------------------------------------------------------------------------------


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 127) for exponent in [1, 254]; 0 below."""
    return _bits_float(tl.maximum(exponent, 0) << 23)


@triton.jit
def _add_block(largest, bad, frame, total, x):
    """Adds one block of unscaled gradients to a running description of the finite elements.

    largest: bits of the largest magnitude. total: the sum of (x * 2^(frame - 127))^2, where the frame brings the largest
    element near 1, so that neither 1e-44 nor 3e38 underflows or overflows. A change of the frame is exact.
    """
    magnitude = _float_bits(x) & _ABS_MASK
    most = tl.max(magnitude)
    if most >= _INFINITY_BITS:
        # Rare: the finite elements are described all the same, so that a skipped step can say how large they were.
        finite = magnitude < _INFINITY_BITS
        x = tl.where(finite, x, 0.0)
        most = tl.max(tl.where(finite, magnitude, 0))
        bad = 1.0
    largest = tl.maximum(largest, most)
    next_frame = tl.maximum(tl.minimum(254 - (largest >> 23), 253), 1)
    shrink = _power_of_two(127 + next_frame - frame)
    x = x * _power_of_two(next_frame)
    return largest, bad, next_frame, total * shrink * shrink + tl.sum(x * x)


_ANALYZE_ARGUMENTS = ["fields", "layouts", "blocks", "rows", "n", "first_block", "block_count", "inverse_scale"]


@triton.jit(do_not_specialize=_ANALYZE_ARGUMENTS)
def analyze_kernel(
    fields,
    layouts,
    blocks,
    rows,
    n,
    first_block,
    block_count,
    inverse_scale,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One statistics row per program: (scale, sumsq, bad) of one chunk of one gradient."""
    tensor, chunk = _block(blocks, first_block)
    row = tl.load(blocks + block_count + first_block + tl.program_id(0))
    base = chunk * CHUNK
    count = tl.minimum(_entry(fields, _NUMEL, n, tensor) - base, CHUNK).to(tl.int32)
    address = _entry(fields, _GRAD, n, tensor)
    gradient = _gradient_pointer(address, KIND, False)
    largest = count * 0
    frame = largest + 253
    bad = inverse_scale * 0.0
    total = inverse_scale * 0.0
    done = 0
    if _STRIDED & KIND:
        layout = layouts + _entry(fields, _LAYOUT, n, tensor)
    else:
        vectors = _gradient_pointer(address, KIND, True)
        aligned = (address & 15) == 0
        whole = tl.where(aligned, count // BLOCK, 0)
        for b in range(whole):
            at = b * BLOCK + tl.arange(0, BLOCK)
            x = _read_gradient(vectors + base, at, at < count, KIND, True) * inverse_scale
            largest, bad, frame, total = _add_block(largest, bad, frame, total, x)
        done = whole * BLOCK
    for b in range(done, count, TAIL):
        at = b + tl.arange(0, TAIL)
        if _STRIDED & KIND:
            x = _read_gradient(gradient, _strided_offset(layout, base + at, 1), at < count, KIND, False)
        else:
            x = _read_gradient(gradient + base, at, at < count, KIND, False)
        largest, bad, frame, total = _add_block(largest, bad, frame, total, x * inverse_scale)
    scale = _bits_float(largest)
    framed = tl.where(largest == 0, 1.0, scale * _power_of_two(frame))
    tl.store(rows + row * 3, scale)
    tl.store(rows + row * 3 + 1, tl.div_rn(total, framed * framed))
    tl.store(rows + row * 3 + 2, bad)


@triton.jit(do_not_specialize=["rows", "merged", "count", "fan_in"])
def merge_kernel(rows, merged, count, fan_in, REPORT: tl.constexpr, BLOCK: tl.constexpr):
    """Merges ``fan_in`` rows per program, in FP64. REPORT: writes (bad, scale, sumsq) instead of a row."""
    begin = tl.program_id(0) * fan_in
    end = tl.minimum(begin + fan_in, count)
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
    sumsq = tl.sum(total).to(tl.float32)
    out = merged + tl.program_id(0) * 3
    if REPORT:
        tl.store(out, tl.max(bad))
        tl.store(out + 1, scale)
        tl.store(out + 2, sumsq)
    else:
        tl.store(out, scale)
        tl.store(out + 1, sumsq)
        tl.store(out + 2, tl.max(bad))


# ---- the capturable decision -----------------------------------------------------------------------------------------


@triton.jit
def _power(base, exponent):
    """base^exponent in FP64 by repeated squaring; exponent: int64 >= 0."""
    result = tl.full(base.shape, 1.0, tl.float64)
    for _ in range(63):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


_DECIDE_ARGUMENTS = ["fields", "hyperparameters", "report", "coefficients", "decision", "n", "has_report"]


@triton.jit(do_not_specialize=_DECIDE_ARGUMENTS)
def decide_kernel(fields, hyperparameters, report, coefficients, decision, n, has_report, BLOCK: tl.constexpr):
    """Skip and clip, step counters and coefficients without the host: ptx_launch.decide says what goes in and out.

    Every program comes to the same decision; the first one writes it.
    """
    checked = has_report != 0
    bad = tl.load(report, mask=checked, other=0.0) != 0.0
    scale = tl.load(report + 1, mask=checked, other=0.0).to(tl.float64)
    sumsq = tl.load(report + 2, mask=checked, other=0.0).to(tl.float64)
    max_norm = tl.load(hyperparameters + 6)
    norm = scale * tl.sqrt(sumsq)
    factor = tl.minimum(max_norm / (norm + tl.load(hyperparameters + 7)), 1.0)
    factor = tl.where(norm == 0.0, 1.0, factor)
    factor = tl.where(max_norm == 0.0, 0.0, factor)
    clip = tl.where(checked & (max_norm >= 0.0) & (bad == 0), factor, 1.0).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(decision, bad.to(tl.float32))
        tl.store(decision + 1, clip)

    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    counter = tl.load(fields + n * _STEP + i, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    h = hyperparameters + tl.load(fields + n * _COEFFICIENTS + i, mask=mask, other=0) * 8
    t = tl.load(counter, mask=mask, other=0.0) + 1.0
    lr = tl.load(h, mask=mask, other=0.0)
    beta1 = tl.load(h + 1, mask=mask, other=0.0)
    beta2 = tl.load(h + 2, mask=mask, other=0.0)
    c = coefficients + i * 8
    tl.store(c, lr.to(tl.float32), mask=mask)
    tl.store(c + 1, (lr * tl.load(h + 4, mask=mask, other=0.0)).to(tl.float32), mask=mask)
    tl.store(c + 2, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(c + 3, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(c + 4, (1.0 / (1.0 - _power(beta1, t.to(tl.int64)))).to(tl.float32), mask=mask)
    tl.store(c + 5, (1.0 / (1.0 - _power(beta2, t.to(tl.int64)))).to(tl.float32), mask=mask)
    tl.store(c + 6, tl.load(h + 3, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(c + 7, tl.load(h + 5, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(counter, t, mask=mask & (bad == 0))


# ---- the backend -----------------------------------------------------------------------------------------------------

_FUNCTIONS = ptx_launch.Functions(update_kernel, analyze_kernel, merge_kernel, decide_kernel)


def unavailable() -> str | None:
    """Why the Triton kernels cannot run here, or ``None``."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch was built without CUDA and without ROCm; install one for your GPU (pytorch.org)"
    if torch.cuda.device_count() == 0:
        return "no CUDA or ROCm device is visible; check the driver and CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES"
    if ptx_launch.interpreted(_FUNCTIONS):
        return "TRITON_INTERPRET is set, and the interpreter is for tests; unset it to run on the device"
    return None


def kernels(simulate: bool = False) -> Kernels:
    """The record of Triton kernels.

    Args:
        simulate: run the kernels on CPU tensors in Triton's interpreter, for tests and the ``simulate`` suite. The record
            is then named ``"ptx-simulated"``; :func:`~ruda_optim.fused_adamw.kernels.select` never returns it.

    Raises:
        RuntimeError: ``simulate`` does not fit what ``TRITON_INTERPRET`` was when Triton was imported.
    """
    return ptx_launch.kernels(_FUNCTIONS, simulate)
