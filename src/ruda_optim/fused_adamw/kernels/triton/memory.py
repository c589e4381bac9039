"""What the Triton kernels share: table entries, loads and stores, half types, strided walks. No arithmetic of a step.

Every pointer comes out of the launch table. An access becomes a 128-bit one only if the scalar pointer is declared a
multiple of 16 bytes and the access has no elementwise mask. BF16 is read and written as int16: the interpreter
truncates BF16 stores, and the integer form costs less than the memory it waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import tables
from ..tables import Field, Flag

# Rows of LaunchTable.fields and bits of its flags: Triton reads a global only if it is a constexpr.
PARAM = tl.constexpr(int(Field.PARAM))
PARAM_OUT = tl.constexpr(int(Field.PARAM_OUT))
GRAD = tl.constexpr(int(Field.GRAD))
EXP_AVG = tl.constexpr(int(Field.EXP_AVG))
EXP_AVG_OUT = tl.constexpr(int(Field.EXP_AVG_OUT))
EXP_AVG_SQ = tl.constexpr(int(Field.EXP_AVG_SQ))
EXP_AVG_SQ_OUT = tl.constexpr(int(Field.EXP_AVG_SQ_OUT))
MAX_EXP_AVG_SQ = tl.constexpr(int(Field.MAX_EXP_AVG_SQ))
MAX_EXP_AVG_SQ_OUT = tl.constexpr(int(Field.MAX_EXP_AVG_SQ_OUT))
COPY = tl.constexpr(int(Field.COPY))
REMAINDER = tl.constexpr(int(Field.REMAINDER))
NUMEL = tl.constexpr(int(Field.NUMEL))
FLAGS = tl.constexpr(int(Field.FLAGS))
COEFFICIENTS = tl.constexpr(int(Field.COEFFICIENTS))
LAYOUT = tl.constexpr(int(Field.LAYOUT))
STEP = tl.constexpr(int(Field.STEP))

ROW_SIZE = tl.constexpr(tables.COEFFICIENTS)  # of the coefficient table

GRAD_FP16 = tl.constexpr(int(Flag.GRAD_FP16))
GRAD_BF16 = tl.constexpr(int(Flag.GRAD_BF16))
COPY_FP16 = tl.constexpr(int(Flag.COPY_FP16))
COPY_BF16 = tl.constexpr(int(Flag.COPY_BF16))
AMSGRAD = tl.constexpr(int(Flag.AMSGRAD))
FIRST = tl.constexpr(int(Flag.FIRST))
SPLIT = tl.constexpr(int(Flag.SPLIT))
STRIDED = tl.constexpr(int(Flag.STRIDED))
ALIGNED = tl.constexpr(int(Flag.ALIGNED))
MOMENTS_BF16 = tl.constexpr(int(Flag.MOMENTS_BF16))
MOMENTS_PACKED = tl.constexpr(int(Flag.MOMENTS_PACKED))

# Instead of a kind: a kernel reads each tensor's kind from its flags while it runs. For tables of mixed kinds; the form
# of the moments, which all tensors of a table share, comes with it.
GENERAL_KIND = 1 << 20
GENERAL = tl.constexpr(GENERAL_KIND)

INFINITY = tl.constexpr(float("inf"))
ABS_MASK = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)  # NaN > infinity > every finite magnitude, compared as integers


@triton.jit
def read_entry(fields, row: tl.constexpr, n, tensor):
    """One number of the launch table."""
    return tl.load(fields + n * row + tensor)


@triton.jit
def typed_pointer(address, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """VECTOR promises that the address is a multiple of 16 bytes. Triton forgets the promise if it is made about an
    integer, or about an argument of a function."""
    pointer = address.to(tl.pointer_type(TYPE))
    if VECTOR:
        return tl.multiple_of(pointer, 16)
    else:
        return pointer


@triton.jit
def gradient_pointer(address, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """The gradient's typed pointer; BF16 as int16."""
    if GRAD_FP16 & KIND:
        return typed_pointer(address, tl.float16, VECTOR)
    elif GRAD_BF16 & KIND:
        return typed_pointer(address, tl.int16, VECTOR)
    else:
        return typed_pointer(address, tl.float32, VECTOR)


@triton.jit
def read(pointer, offsets, mask, VECTOR: tl.constexpr):
    """Elements at ``offsets``. VECTOR: nothing is masked off."""
    if VECTOR:
        return tl.load(pointer + offsets)
    else:
        return tl.load(pointer + offsets, mask=mask, other=0)


@triton.jit
def read_if(pointer, offsets, mask, condition, VECTOR: tl.constexpr):
    """As read; zeros, without a look at the memory, unless ``condition`` (int32, one for the whole block) is not 0."""
    # Compared after the broadcast: the interpreter takes no broadcast truth value for a mask.
    wanted = tl.broadcast_to(condition, offsets.shape) != 0
    if VECTOR:
        return tl.load(pointer + offsets, mask=wanted, other=0)
    else:
        return tl.load(pointer + offsets, mask=mask & wanted, other=0)


@triton.jit
def write_if(pointer, offsets, value, mask, condition, VECTOR: tl.constexpr):
    """As write, if ``condition`` (int32, one for the whole block) is not 0."""
    wanted = tl.broadcast_to(condition, offsets.shape) != 0
    if VECTOR:
        tl.store(pointer + offsets, value, mask=wanted)
    else:
        tl.store(pointer + offsets, value, mask=mask & wanted)


@triton.jit
def has(flags, bits: tl.constexpr):
    """int32, not 0 if one of ``bits`` is set."""
    return (flags & bits).to(tl.int32)


@triton.jit
def write(pointer, offsets, value, mask, VECTOR: tl.constexpr):
    """Stores at ``offsets``. VECTOR: nothing is masked off."""
    if VECTOR:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def float_bits(x):
    """The bits of FP32 numbers."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    """The FP32 numbers of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def float_from_bf16(half):
    """Exact."""
    return bits_float(half.to(tl.int32) << 16)


@triton.jit
def bf16_from_float(x):
    """To nearest, ties to even; a NaN becomes 0x7fc0."""
    bits = float_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & ABS_MASK) > INFINITY_BITS, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def follow_fp16(master, parameter):
    """csrc/half_bits.h: the master, or the FP16 parameter (int16 bits) where the master does not round to it."""
    behind = master.to(tl.float16).to(tl.int16, bitcast=True) != parameter
    return tl.where(behind, parameter.to(tl.float16, bitcast=True).to(tl.float32), master)


@triton.jit
def follow_bf16(master, parameter):
    """csrc/half_bits.h: the master, or the BF16 parameter (int16 bits) where the master does not round to it."""
    return tl.where(bf16_from_float(master) != parameter, float_from_bf16(parameter), master)


@triton.jit
def join_master(high, low):
    """The FP32 value of a split master: csrc/half_bits.h says how it was split, and what a zero is."""
    bits = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    return bits_float(tl.where((bits & 0x7FFF0000) == 0, bits, bits - ((bits & 0x8000) << 1)))


@triton.jit
def split_master(x):
    """An FP32 master as csrc/half.h splits it: BF16 with ties away from zero, and the low 16 bits."""
    bits = float_bits(x)
    bits = tl.where((bits & ABS_MASK) > INFINITY_BITS, 0x7FC00000, bits)
    return ((bits + 0x8000) >> 16).to(tl.int16), bits.to(tl.int16)


@triton.jit
def read_gradient(pointer, offsets, mask, KIND: tl.constexpr, VECTOR: tl.constexpr):
    """Stored gradient values as FP32, exact."""
    stored = read(pointer, offsets, mask, VECTOR)
    if GRAD_BF16 & KIND:
        return float_from_bf16(stored)
    else:
        return stored.to(tl.float32)


@triton.jit
def read_general_gradient(address, start, offsets, mask, flags, VECTOR: tl.constexpr):
    """Stored gradient values as FP32, of the type that the flags name: of three loads two do nothing."""
    is_fp16 = has(flags, GRAD_FP16)
    is_bf16 = has(flags, GRAD_BF16)
    is_fp32 = 1 - tl.where(is_fp16 + is_bf16 != 0, 1, 0)
    wide = read_if(typed_pointer(address, tl.float32, VECTOR) + start, offsets, mask, is_fp32, VECTOR)
    fp16 = read_if(typed_pointer(address, tl.float16, VECTOR) + start, offsets, mask, is_fp16, VECTOR)
    bf16 = read_if(typed_pointer(address, tl.int16, VECTOR) + start, offsets, mask, is_bf16, VECTOR)
    half = tl.where(is_fp16 != 0, fp16.to(tl.float32), float_from_bf16(bf16))
    return tl.where(is_fp32 != 0, wide, half)


@triton.jit
def strided_offsets(layout, index, KIND: tl.constexpr):
    """Element offsets of every role (tables.LAYOUT_ROLES) for flat element numbers; zeros for a role that KIND lacks.

    ``layout`` is a record as tables.describe_layout builds it.
    """
    dimensions = tl.load(layout).to(tl.int32)
    strides = layout + 1 + dimensions
    rest = index
    parameter = tl.zeros_like(index)
    gradient = tl.zeros_like(index)
    exp_avg = tl.zeros_like(index)
    exp_avg_sq = tl.zeros_like(index)
    max_exp_avg_sq = tl.zeros_like(index)
    copy = tl.zeros_like(index)
    remainder = tl.zeros_like(index)
    for k in range(dimensions):
        d = dimensions - 1 - k
        size = tl.load(layout + 1 + d)
        outer = rest // size
        column = rest - outer * size
        rest = outer
        gradient += column * tl.load(strides + dimensions + d)
        exp_avg += column * tl.load(strides + dimensions * 2 + d)
        exp_avg_sq += column * tl.load(strides + dimensions * 3 + d)
        if (AMSGRAD | GENERAL) & KIND:
            max_exp_avg_sq += column * tl.load(strides + dimensions * 4 + d)
        if (COPY_FP16 | COPY_BF16 | GENERAL) & KIND:
            copy += column * tl.load(strides + dimensions * 5 + d)
        if (SPLIT | GENERAL) & KIND:
            remainder += column * tl.load(strides + dimensions * 6 + d)
        if (SPLIT & KIND) == 0:
            parameter += column * tl.load(strides + d)
    return parameter, gradient, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, remainder


@triton.jit
def read_addresses(fields, n, tensor):
    """The addresses of a tensor's memory, indexed by Field."""
    return (
        read_entry(fields, PARAM, n, tensor),
        read_entry(fields, PARAM_OUT, n, tensor),
        read_entry(fields, GRAD, n, tensor),
        read_entry(fields, EXP_AVG, n, tensor),
        read_entry(fields, EXP_AVG_OUT, n, tensor),
        read_entry(fields, EXP_AVG_SQ, n, tensor),
        read_entry(fields, EXP_AVG_SQ_OUT, n, tensor),
        read_entry(fields, MAX_EXP_AVG_SQ, n, tensor),
        read_entry(fields, MAX_EXP_AVG_SQ_OUT, n, tensor),
        read_entry(fields, COPY, n, tensor),
        read_entry(fields, REMAINDER, n, tensor),
    )


@triton.jit
def seed_of_step(t):
    """csrc/adamw_update.h, seed_of_step: two FP32 numbers for its low and high 16 bits. ``t``: int64."""
    x = (t & 0xFFFFFFFF).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return (x & 0xFFFF).to(tl.int32).to(tl.float32), (x >> 16).to(tl.int32).to(tl.float32)


@triton.jit
def read_coefficients(c):
    """A row of the coefficient table."""
    return (
        tl.load(c),
        tl.load(c + 1),
        tl.load(c + 2),
        tl.load(c + 3),
        tl.load(c + 4),
        tl.load(c + 5),
        tl.load(c + 6),
        tl.load(c + 7),
        tl.load(c + 8),
        tl.load(c + 9),
    )


@triton.jit
def block_of_program(blocks):
    """(tensor, chunk) of this program."""
    entry = tl.load(blocks + tl.program_id(0))
    tensor = entry >> 32
    return tensor, entry - (tensor << 32)
