"""Hypothesis strategies for the property tests: tensors of any values and layouts, options, wrong arguments."""

from __future__ import annotations

import math

import numpy as np
import torch
from cases import to_torch
from hypothesis import strategies as st

DTYPES = ("float32", "float16", "bfloat16")
TORCH = {name: getattr(torch, name) for name in DTYPES}
# Scalars, empty tensors, dimensions of size 1, tails of every vector width, more than one block of 1024.
SHAPES = ((), (0,), (1,), (2, 0, 3), (7,), (17,), (3, 5), (1, 4, 1), (2, 3, 4, 2), (1025,), (33, 32))
SPECIAL_BITS = (
    0x7FC00001,  # NaN with a payload
    0xFFC12345,  # negative NaN
    0x7F800001,  # signalling NaN
    0x7F800000,  # infinity
    0xFF800000,
    0x00000001,  # smallest subnormal
    0x80000001,
    0x007FFFFF,  # largest subnormal
    0x7F7FFFFF,  # largest finite
    0xFF7FFFFF,
    0x80000000,  # -0
)
FINITE_BITS = tuple(bits for bits in SPECIAL_BITS if bits & 0x7F800000 != 0x7F800000)


@st.composite
def arrays(draw, shape, *, finite=False, magnitudes=(-45, 38)):
    """FP32 values: random ones of one magnitude, zeros, or all magnitudes; and a few special ones among them."""
    seed = draw(st.integers(0, 2**16), label="seed")
    low, high = magnitudes
    spread = draw(st.sampled_from(("ones", "zeros", "one magnitude", "all magnitudes")), label="spread")
    random = np.random.default_rng(seed)
    exponents = {
        "ones": 0.0,
        "zeros": 0.0,
        "one magnitude": draw(st.integers(low, high), label="exponent") if spread == "one magnitude" else 0.0,
        "all magnitudes": random.uniform(low, high, shape),
    }[spread]
    values = np.clip(random.standard_normal(shape) * 10.0**exponents, -3.4e38, 3.4e38).astype(np.float32)
    values = np.asarray(values * np.float32(spread != "zeros"), dtype=np.float32)
    if values.size:
        flat = values.reshape(-1)
        bits = FINITE_BITS if finite else SPECIAL_BITS
        for position, pattern in draw(
            st.lists(st.tuples(st.integers(0, values.size - 1), st.sampled_from(bits)), max_size=2), label="special"
        ):
            flat[position : position + 1] = np.array([pattern], dtype=np.uint32).view(np.float32)
    return values


def layouts(shape):
    """Layouts of :func:`cases.to_torch` that a tensor of this shape can have."""
    possible = ["contiguous", "misaligned"]
    if len(shape) >= 1 and math.prod(shape) > 0:
        possible.append("every second")
    if len(shape) >= 2:
        possible.append("transposed")
    if len(shape) == 4:
        possible.append("channels_last")
    return st.sampled_from(possible)


@st.composite
def tensors(draw, shape, dtype, **kinds):
    """A tensor of :func:`arrays` values in some layout. A value that overflows ``dtype`` becomes infinite."""
    return to_torch(draw(arrays(shape, **kinds)), dtype, draw(layouts(shape), label="layout"))


def floats(low, high):
    return st.floats(low, high, allow_nan=False, width=64)


# A second moment that falls by more than 1 / U in one step cannot be compared (see cases._propagate): beta2 >= 0.1.
hyperparameters = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((0.0, 1e-3, 0.1)) | floats(0.0, 1.0),
        "betas": st.tuples(
            st.sampled_from((0, 0.0, 0.9)) | floats(0.0, 0.9999), st.sampled_from((0.5, 0.999)) | floats(0.1, 0.99999)
        ),
        "eps": st.sampled_from((1e-8, 1.0)) | floats(1e-12, 1.0),
        "weight_decay": st.sampled_from((0.0, 1e-2)) | floats(0.0, 2.0),
        "maximize": st.booleans(),
    }
)
# Powers of two and others; a product with the reciprocal may overflow or vanish.
gradient_scales = st.none() | st.sampled_from((1.0, 1024.0, 2.0**-24, 2.0**24)) | floats(2.0**-24, 2.0**24)
max_grad_norms = st.none() | st.sampled_from((0.0, 1.0)) | floats(1e-6, 1e6)
