"""Triton kernels for CUDA and ROCm devices: the formula.

The update is ``csrc/adamw_update.h`` and the loops of ``csrc/cpu_loops.cpp``, operation by operation: contraction is
off (``enable_fp_fusion=False``), division and square root round correctly (``div_rn``, ``sqrt_rn``), so a parameter has
the same bits on every backend. Only the payload of a NaN may differ.

A flat tensor is walked by two loops: whole blocks without a mask while all of its pointers are aligned, then the rest
with one. The loops differ in block size on purpose: equal shapes would share a layout, and stores would pass through
shared memory.

Source of the formula: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad; PyTorch's AdamW for
the order.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the 'ptx' kernels need Triton, which is not installed. It comes with torch for CUDA and for ROCm on Linux, "
        "in the version that fits: reinstall torch (pytorch.org), or set RUDA_CUDA_COMPILER=nvrtc on NVIDIA"
    ) from error

from .. import Kernels
from . import launch
from .decide import decide_kernel
from .memory import (
    ALIGNED,
    AMSGRAD,
    COEFFICIENTS,
    COPY,
    COPY_BF16,
    COPY_FP16,
    FIRST,
    FLAGS,
    GENERAL,
    GRAD,
    INFINITY,
    LAYOUT,
    MAX_EXP_AVG_SQ,
    MAX_EXP_AVG_SQ_OUT,
    NUMEL,
    PARAM,
    PARAM_OUT,
    REMAINDER,
    ROW_SIZE,
    SPLIT,
    STRIDED,
    bf16_from_float,
    block_of_program,
    follow_bf16,
    follow_fp16,
    gradient_pointer,
    has,
    join_master,
    read,
    read_addresses,
    read_coefficients,
    read_entry,
    read_general_gradient,
    read_gradient,
    read_if,
    split_master,
    strided_offsets,
    typed_pointer,
    write,
    write_if,
)
from .moments import (
    decode_maximum,
    dither,
    larger_maximum,
    maximum_pointer,
    read_moments,
    seed_of,
    write_moments,
)
from .statistics import analyze_kernel, merge_kernel

# ---- update ----------------------------------------------------------------------------------------------------------


@triton.jit
def lerp(old, x, weight):
    """csrc/adamw_update.h, lerp: old + weight * (x - old) from whichever end is nearer. A subtraction is the addition
    of the negated product, bit for bit; the product with -1 keeps the sign of a zero, which a difference would not."""
    from_old = weight < 0.5
    return tl.where(from_old, old, x) + tl.where(from_old, weight, -1.0 * (1.0 - weight)) * (x - old)


@triton.jit
def _adamw_element(c, g, p, m, v, v_max, AMSGRAD: tl.constexpr):
    """csrc/adamw_update.h, adamw_element, from the scaled gradient on. ``c`` is a row of coefficients: lr,
    lr * weight_decay, 1 - beta1, 1 - beta2, 1 / (1 - beta1^t), 1 / (1 - beta2^t), epsilon, gradient sign, seed."""
    gg = g * g
    m = lerp(m, g, c[2])
    # A square that overflows makes v infinite, and there it stays, instead of turning into inf - inf.
    v = tl.where((v == INFINITY) | (gg == INFINITY), v + gg, lerp(v, gg, c[3]))
    if AMSGRAD:
        # Not a maximum instruction: a NaN on either side must come through.
        v_max = tl.where((v > v_max) | (v != v), v, v_max)
        v_used = v_max
    else:
        v_used = v
    denominator = tl.sqrt_rn(v_used * c[5]) + c[6]
    p -= c[1] * p + tl.div_rn(c[0] * (m * c[4]), denominator)
    return p, m, v


@triton.jit
def _update_block(
    a, base, offsets, mask, layout, flags, c, inverse_scale, signed_clip, KIND: tl.constexpr, VECTOR: tl.constexpr
):
    """Loads, updates and stores the elements ``base + offsets`` of one tensor; ``a``: its addresses by Field."""
    if STRIDED & KIND:
        at_p, at_g, at_m, at_v, at_x, at_copy, at_low = strided_offsets(layout, base + offsets, KIND)
        start = base * 0
    else:
        at_p, at_g, at_m, at_v, at_x, at_copy, at_low = offsets, offsets, offsets, offsets, offsets, offsets, offsets
        start = base
    present = 1 - tl.where(has(flags, FIRST) != 0, 1, 0)
    g = read_gradient(gradient_pointer(a[GRAD], KIND, VECTOR) + start, at_g, mask, KIND, VECTOR)
    g = g * inverse_scale * signed_clip
    m, v = read_moments(a, start, at_m, at_v, mask, present, KIND, VECTOR)
    if AMSGRAD & KIND:
        maximum = maximum_pointer(a[MAX_EXP_AVG_SQ], KIND, VECTOR) + start
        v_max = decode_maximum(read_if(maximum, at_x, mask, present, VECTOR), KIND)
    else:
        v_max = v
    if SPLIT & KIND:
        high = typed_pointer(a[COPY], tl.int16, VECTOR) + start
        low = typed_pointer(a[REMAINDER], tl.int16, VECTOR) + start
        p = join_master(read(high, at_copy, mask, VECTOR), read(low, at_low, mask, VECTOR))
    else:
        p = read(typed_pointer(a[PARAM], tl.float32, VECTOR) + start, at_p, mask, VECTOR)
        if (COPY_FP16 | COPY_BF16) & KIND:
            parameter = read(typed_pointer(a[COPY], tl.int16, VECTOR) + start, at_copy, mask, VECTOR)
            p = follow_fp16(p, parameter) if COPY_FP16 & KIND else follow_bf16(p, parameter)

    r = dither(p, g, seed_of(c))
    p, m, v = _adamw_element(c, g, p, m, v, v_max, (AMSGRAD & KIND) != 0)

    stored_v = write_moments(a, start, at_m, at_v, m, v, r, mask, KIND, VECTOR)
    if AMSGRAD & KIND:
        maximum_out = maximum_pointer(a[MAX_EXP_AVG_SQ_OUT], KIND, VECTOR) + start
        write(maximum_out, at_x, larger_maximum(stored_v, v_max, KIND), mask, VECTOR)
    if SPLIT & KIND:
        high_half, low_half = split_master(p)
        write(high, at_copy, high_half, mask, VECTOR)
        write(low, at_low, low_half, mask, VECTOR)
    else:
        write(typed_pointer(a[PARAM_OUT], tl.float32, VECTOR) + start, at_p, p, mask, VECTOR)
        if COPY_FP16 & KIND:
            half = typed_pointer(a[COPY], tl.float16, VECTOR) + start
            write(half, at_copy, p.to(tl.float16), mask, VECTOR)
        elif COPY_BF16 & KIND:
            write(typed_pointer(a[COPY], tl.int16, VECTOR) + start, at_copy, bf16_from_float(p), mask, VECTOR)


@triton.jit
def _update_general_block(
    a,
    base,
    offsets,
    mask,
    layout,
    flags,
    c,
    inverse_scale,
    signed_clip,
    WALK: tl.constexpr,
    KIND: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """_update_block for tensors of any kind: accesses that a tensor does not have are masked off. WALK: by layout."""
    if WALK:
        at_p, at_g, at_m, at_v, at_x, at_copy, at_low = strided_offsets(layout, base + offsets, GENERAL)
        start = base * 0
    else:
        at_p, at_g, at_m, at_v, at_x, at_copy, at_low = offsets, offsets, offsets, offsets, offsets, offsets, offsets
        start = base
    present = 1 - tl.where(has(flags, FIRST) != 0, 1, 0)
    amsgrad = has(flags, AMSGRAD)
    split = has(flags, SPLIT)
    whole = 1 - tl.where(split != 0, 1, 0)
    half = typed_pointer(a[COPY], tl.int16, VECTOR) + start
    low = typed_pointer(a[REMAINDER], tl.int16, VECTOR) + start
    g = read_general_gradient(a[GRAD], start, at_g, mask, flags, VECTOR)
    g = g * inverse_scale * signed_clip
    m, v = read_moments(a, start, at_m, at_v, mask, present, KIND, VECTOR)
    maximum = maximum_pointer(a[MAX_EXP_AVG_SQ], KIND, VECTOR) + start
    v_max = decode_maximum(read_if(maximum, at_x, mask, amsgrad * present, VECTOR), KIND)
    v_max = tl.where(amsgrad != 0, v_max, -INFINITY)  # below every second moment, so that the maximum is the new one
    parameter = read_if(half, at_copy, mask, has(flags, COPY_FP16 | COPY_BF16), VECTOR)
    joined = join_master(parameter, read_if(low, at_low, mask, split, VECTOR))
    p = read_if(typed_pointer(a[PARAM], tl.float32, VECTOR) + start, at_p, mask, whole, VECTOR)
    p = tl.where(has(flags, COPY_FP16) != 0, follow_fp16(p, parameter), p)
    p = tl.where(has(flags, COPY_BF16) != 0, follow_bf16(p, parameter), p)
    p = tl.where(split != 0, joined, p)

    r = dither(p, g, seed_of(c))
    p, m, v = _adamw_element(c, g, p, m, v, v_max, True)

    stored_v = write_moments(a, start, at_m, at_v, m, v, r, mask, KIND, VECTOR)
    maximum_out = maximum_pointer(a[MAX_EXP_AVG_SQ_OUT], KIND, VECTOR) + start
    write_if(maximum_out, at_x, larger_maximum(stored_v, v_max, KIND), mask, amsgrad, VECTOR)
    write_if(typed_pointer(a[PARAM_OUT], tl.float32, VECTOR) + start, at_p, p, mask, whole, VECTOR)
    high_half, low_half = split_master(p)
    write_if(low, at_low, low_half, mask, split, VECTOR)
    rounded = tl.where(split != 0, high_half, bf16_from_float(p))
    write_if(half, at_copy, rounded, mask, has(flags, COPY_BF16), VECTOR)
    fp16 = typed_pointer(a[COPY], tl.float16, VECTOR) + start
    write_if(fp16, at_copy, p.to(tl.float16), mask, has(flags, COPY_FP16), VECTOR)


_UPDATE_ARGUMENTS = ["fields", "layouts", "blocks", "coefficients", "decision"]
_UPDATE_ARGUMENTS += ["n", "row_per_tensor"]


@triton.jit(do_not_specialize=_UPDATE_ARGUMENTS)
def update_kernel(
    fields,
    layouts,
    blocks,
    coefficients,
    decision,
    n,
    row_per_tensor,
    KIND: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One chunk of one tensor per program."""
    if tl.load(decision) != 0.0:
        return
    tensor, chunk = block_of_program(blocks)
    flags = read_entry(fields, FLAGS, n, tensor)
    base = chunk * CHUNK
    count = tl.minimum(read_entry(fields, NUMEL, n, tensor) - base, CHUNK).to(tl.int32)
    row = read_entry(fields, COEFFICIENTS, n, tensor)
    row = tl.where(row_per_tensor != 0, tensor, row)
    # Read here, once: Triton would read them again for every block, as the stores of a block might change them.
    c = read_coefficients(coefficients + row * ROW_SIZE)
    a = read_addresses(fields, n, tensor)
    signed_clip = tl.load(decision + 1) * c[7]
    inverse_scale = tl.load(decision + 2)
    layout = layouts + read_entry(fields, LAYOUT, n, tensor)
    done = 0
    if (STRIDED & KIND) == 0:
        whole = tl.where((flags & ALIGNED) != 0, count // BLOCK, 0)
        for b in range(whole):
            at = b * BLOCK + tl.arange(0, BLOCK)
            if GENERAL & KIND:
                _update_general_block(
                    a, base, at, at < count, layout, flags, c, inverse_scale, signed_clip, False, KIND, True
                )
            else:
                _update_block(a, base, at, at < count, layout, flags, c, inverse_scale, signed_clip, KIND, True)
        done = whole * BLOCK
    if GENERAL & KIND:
        flat_end = tl.where((flags & STRIDED) != 0, done, count)
        for b in range(done, flat_end, TAIL):
            at = b + tl.arange(0, TAIL)
            _update_general_block(
                a, base, at, at < count, layout, flags, c, inverse_scale, signed_clip, False, KIND, False
            )
        for b in range(flat_end, count, TAIL):
            at = b + tl.arange(0, TAIL)
            _update_general_block(
                a, base, at, at < count, layout, flags, c, inverse_scale, signed_clip, True, KIND, False
            )
    else:
        for b in range(done, count, TAIL):
            at = b + tl.arange(0, TAIL)
            _update_block(a, base, at, at < count, layout, flags, c, inverse_scale, signed_clip, KIND, False)


# ---- the backend -----------------------------------------------------------------------------------------------------

FUNCTIONS = launch.Functions(update_kernel, analyze_kernel, merge_kernel, decide_kernel)


def unavailable() -> str | None:
    """Why the Triton kernels cannot run here, or ``None``."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this PyTorch was built without CUDA and without ROCm; install one for your GPU (pytorch.org)"
    if torch.cuda.device_count() == 0:
        return "no CUDA or ROCm device is visible; check the driver and CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES"
    if launch.interpreted(FUNCTIONS):
        return "TRITON_INTERPRET is set, and the interpreter is for tests; unset it to run on the device"
    return None


def kernels(simulate: bool = False) -> Kernels:
    """The record of Triton kernels.

    Args:
        simulate: run the kernels on CPU tensors in Triton's interpreter, for tests and the ``simulate`` suite. The
            record is then named ``"ptx-simulated"``; :func:`~ruda_optim.fused_adamw.kernels.select` never returns it.

    Raises:
        RuntimeError: ``simulate`` does not fit what ``TRITON_INTERPRET`` was when Triton was imported.
    """
    return launch.kernels(FUNCTIONS, simulate)
