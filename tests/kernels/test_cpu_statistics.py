"""Statistics of the C++ operator against the FP64 reference: any size, layout, magnitude; what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    U,
    compare,
    norm_relative_bound,
    round_to,
    stored_gradient,
    to_torch,
)
from kernel_runs import (
    CHAIN,
    gradient_rows,
    same_bits,
)

from ruda_optim.fused_adamw import StepControl, reference
from ruda_optim.fused_adamw.stats_plan import ROW_ELEMENTS
from ruda_optim.fused_adamw.storage import (
    merge_gradient_stats,
)


def report(rows: torch.Tensor) -> list[float]:
    out = torch.empty(ROW_ELEMENTS)
    merge_gradient_stats(rows, out)
    return out.tolist()


def check_statistics(gradients: list[np.ndarray], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    control = StepControl(gradient_scale=scale)
    want = reference.gradient_stats(gradients, scale)
    bad, largest, sumsq = report(gradient_rows(tensors, control.inverse_scale))
    assert bool(bad) != want.all_finite
    # Unscaling: the reciprocal and the product. A product below FP32's normal range errs by half of 2^-149.
    compare("largest", largest, want.max_finite_abs, 2 * U * want.max_finite_abs + 2.0**-150)
    if want.all_finite:
        norm = largest * np.sqrt(sumsq)
        bound = norm_relative_bound(chain=CHAIN, levels=1) * want.total_norm + 2.0**-150 * np.sqrt(want.elements)
        compare("norm", norm, want.total_norm, bound)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_of_every_case(case) -> None:
    gradient = stored_gradient(case, 1)
    check_statistics([gradient], [to_torch(gradient, case.gradient_dtype, case.gradient_layout)], case.gradient_scale)


@pytest.mark.parametrize("exponent", [-44, -38, -30, -20, -12.5, 0, 12.5, 18, 30, 38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_any_magnitude(dtype, exponent) -> None:
    """Sums of squares relative to the largest magnitude: 1e-44 does not vanish and 3e38 does not overflow."""
    random = np.random.default_rng(7)
    gradients = []
    for count in (1, 63, 64, 65, 1023, 1025, 70_001):
        values = np.clip(random.uniform(-3.4, 3.4, count) * 10.0**exponent, -3.4e38, 3.4e38)
        if dtype == "float16":
            values = np.clip(values, -65504, 65504)
        gradients.append(round_to(values, dtype))
    check_statistics(gradients, [to_torch(gradient, dtype) for gradient in gradients])


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_mixed_magnitudes(dtype) -> None:
    random = np.random.default_rng(8)
    count = 5000
    for spread in (5, 20, 37):
        values = random.standard_normal(count) * 10.0 ** random.uniform(-spread, min(spread, 37), count)
        limit = 65504 if dtype == "float16" else 3e38
        gradient = round_to(np.clip(values, -limit, limit), dtype)
        check_statistics([gradient], [to_torch(gradient, dtype)])


@pytest.mark.parametrize("place", [0, 15, 63, 64, 1023, 1024, 65535, 65536, 70_000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_element_anywhere_is_seen(value, place) -> None:
    gradient = np.ones(70_001, dtype=np.float32)
    gradient[place] = value
    gradient[place - 1] = 5.0
    for dtype in DTYPES:
        bad, largest, sumsq = report(gradient_rows([to_torch(gradient, dtype)]))
        assert (bad, largest) == (1.0, 5.0)
        compare("sum over the finite", sumsq * 25, 69_999 + 25, 69_999 * (CHAIN + 3) * U)


def test_a_finite_gradient_that_overflows_in_unscaling_is_bad() -> None:
    gradient = torch.tensor([1.0, 3e38])
    assert report(gradient_rows([gradient], 1.0))[0] == 0.0
    assert report(gradient_rows([gradient], 2.0)) == [1.0, 2.0, 1.0]


def test_zero_gradients_have_norm_zero() -> None:
    assert report(gradient_rows([torch.zeros(3), -torch.zeros(70_000)])) == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------------------- the order of additions

BLOCK, SUMS, ROW = 1024, 64, 65536


def row_in_order(stored: np.ndarray, inverse_scale: float) -> list[np.float32]:
    """One statistics row, addition by addition: 64 FP32 sums per block, folded in FP64, block after block."""
    gradient = stored.astype(np.float32) * np.float32(inverse_scale)
    largest, squares, bad = np.float32(0), 0.0, False
    for start in range(0, gradient.size, BLOCK):
        block = gradient[start : start + BLOCK]
        finite = np.isfinite(block)
        bad |= not finite.all()
        block = np.where(finite, block, np.float32(0))
        most = np.abs(block).max()
        largest = max(largest, most)
        rescale = np.float32(1)
        if most != 0 and not 2.0**-40 <= most < 2.0**40:
            exponent = int(most.view(np.uint32)) >> 23
            rescale = np.uint32(max(254 - exponent, 1) << 23).view(np.float32)
        square = np.zeros(-(-block.size // SUMS) * SUMS, dtype=np.float32)
        square[: block.size] = (block * rescale) ** 2
        partial = np.zeros(SUMS, dtype=np.float32)
        for group in square.reshape(-1, SUMS):
            partial += group
        wide = partial.astype(np.float64)
        while wide.size > 1:
            wide = wide[: wide.size // 2] + wide[wide.size // 2 :]
        squares += wide[0] / float(rescale) ** 2
    sumsq = np.float32(0) if largest == 0 else np.float32(squares / float(largest) ** 2)
    return [largest, sumsq, np.float32(bad)]


@pytest.mark.parametrize("kind", ["ordinary", "every magnitude", "one magnitude a block", "subnormal", "not finite"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse_scale", [1.0, 1 / 3])
def test_every_row_adds_in_one_order(kind, dtype, inverse_scale) -> None:
    """How many places of a row a thread reads in turn, and how wide its vectors are, changes no bit."""
    random = np.random.default_rng(5)
    limit = 65504 if dtype == "float16" else 3e38
    for count in (1, 65, 1023, 1024, 4 * 1024, 5 * 1024 + 7, 11 * 1024, 63 * 1024 + 1, ROW, ROW + 9 * 1024 + 100):
        values = random.standard_normal(count)
        if kind == "every magnitude":
            values *= 10.0 ** random.uniform(-45, 37, count)
        elif kind == "one magnitude a block":
            values *= np.repeat(10.0 ** random.uniform(-45, 37, count // BLOCK + 1), BLOCK)[:count]
        elif kind == "subnormal":
            values *= 1e-40 if dtype != "float16" else 1e-7
        stored = round_to(np.clip(values, -limit, limit), dtype)
        if kind == "not finite":
            stored[random.integers(0, count, 1 + count // 3000)] = random.choice([np.nan, np.inf, -np.inf])
        twice = np.repeat(stored, 2)
        tensor, strided = to_torch(stored, dtype), to_torch(twice, dtype)[::2]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            wanted = np.array([row_in_order(stored[at : at + ROW], inverse_scale) for at in range(0, count, ROW)])
        for found in (gradient_rows([tensor], inverse_scale), gradient_rows([strided], inverse_scale)):
            assert same_bits(found, torch.from_numpy(wanted)), f"{count} elements"
