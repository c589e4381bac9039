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
