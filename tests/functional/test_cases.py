"""The table of cases and its tolerances: a correct FP32 implementation passes, classical mistakes do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import (
    CASES,
    DTYPES,
    FIXTURE_CASES,
    LAYOUTS,
    Case,
    as_array,
    check,
    compare,
    expected,
    initial_parameter,
    norm_relative_bound,
    round_to,
    stored_gradient,
    to_torch,
)

from ruda_optim.fused_adamw.reference import gradient_stats


def test_case_names_are_unique_and_inputs_are_values_of_their_dtypes() -> None:
    for table in (CASES, FIXTURE_CASES):
        assert len({case.name for case in table}) == len(table)
    for case in CASES:
        for values, dtype in (
            (initial_parameter(case), case.parameter_dtype),
            (stored_gradient(case, 1), case.gradient_dtype),
        ):
            assert np.isfinite(values).all()
            np.testing.assert_array_equal(values, as_array(to_torch(values, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_torchs(dtype) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(5000) * 10.0 ** random.uniform(-9, 4, 5000)).astype(np.float32)
    np.testing.assert_array_equal(round_to(values, dtype), torch.from_numpy(values).to(getattr(torch, dtype)).float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_values(layout) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    tensor = to_torch(values, "bfloat16", layout)
    np.testing.assert_array_equal(as_array(tensor), values)
    assert tensor.is_contiguous() == (layout in ("contiguous", "misaligned"))
    assert (tensor.data_ptr() % 16 == 0) == (layout != "misaligned")
    with pytest.raises(ValueError, match="layout must be one of"):
        to_torch(values, "float32", "spiral")


F = np.float32


def lerp(old: np.ndarray, x: np.ndarray, weight: np.float32) -> np.ndarray:
    return old + weight * (x - old) if weight < 0.5 else x - (F(1) - weight) * (x - old)


def single_precision(case: Case, mistake: str = "", step_of=lambda t: t) -> list[dict[str, np.ndarray]]:
    """A straightforward FP32 implementation in the kernels' order of operations, with one classical mistake or none."""
    o = case.options
    p = initial_parameter(case).copy()
    m, v, v_max = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    steps = []
    for want in expected(case):
        lr, decay, c1, c2, inv1, inv2, eps, sign, *_ = map(F, o.prepare_step(step_of(want.step) - 1, case.control).row)
        g = stored_gradient(case, want.step) * F(1 / case.gradient_scale) * (F(want.clip_factor) * sign)
        if mistake == "coupled decay":
            g = g + F(o.weight_decay) * p
        if mistake == "decay negated by maximize":
            decay = decay * sign
        m, v = lerp(m, g, c1), lerp(v, g * g, c2)
        v_max = np.maximum(v_max, v * inv2 if mistake == "maximum of the corrected moment" else v)
        used = v_max if o.amsgrad and mistake != "no amsgrad" else v
        corrected = used if mistake == "maximum of the corrected moment" else used * inv2
        root = np.sqrt(corrected + eps) if mistake == "epsilon inside the root" else np.sqrt(corrected) + eps
        base = p - lr * (m * inv1) / root if mistake == "decay after the update" else p
        p = p - (decay * base + lr * (m * inv1) / root)
        steps.append({"parameter": p, "exp_avg": m, "exp_avg_sq": v})
        if o.amsgrad:
            steps[-1]["max_exp_avg_sq"] = v_max
        if case.parameter_dtype != "float32":
            steps[-1]["copy"] = round_to(p, case.parameter_dtype)
    return steps


def check_all(case: Case, steps: list[dict[str, np.ndarray]]) -> None:
    for want, got in zip(expected(case), steps, strict=True):
        check(case, want, got)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_admit_a_correct_fp32_implementation(case) -> None:
    check_all(case, single_precision(case))


@pytest.mark.parametrize(
    "mistake",
    [
        "coupled decay",
        "decay negated by maximize",
        "decay after the update",
        "maximum of the corrected moment",
        "no amsgrad",
        "epsilon inside the root",
    ],
)
def test_bounds_refuse_classical_mistakes(mistake) -> None:
    case = next(c for c in CASES if c.name == "float32 gradient, amsgrad, maximize, 1025")
    with pytest.raises(AssertionError, match="elements out of bounds"):
        check_all(case, single_precision(case, mistake))


def test_bounds_refuse_a_step_count_off_by_one() -> None:
    case = next(c for c in CASES if c.name == "float32 gradient, 1025")
    late = single_precision(case, step_of=lambda t: t + 1)
    with pytest.raises(AssertionError, match=r"step 1, parameter: .* elements out of bounds"):
        check(case, expected(case)[0], late[0])


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ([1.0, math.nan], "1 of 2 elements out of bounds; worst at .1,.: got np.float64.nan."),
        ([1.0, math.inf], "1 of 2 elements out of bounds"),
        ([1.0, 2.1], "off by 1.0"),
        ([1.0], r"shape \(1,\), expected \(2,\)"),
    ],
)
def test_compare_refuses(actual, message) -> None:
    with pytest.raises(AssertionError, match=message):
        compare("x", np.array(actual), np.array([1.0, 2.0]), 0.05)


def test_check_wants_exactly_the_fields() -> None:
    case = CASES[0]
    values = {name: value for name, value in expected(case)[0].values.items() if name != "exp_avg"}
    with pytest.raises(AssertionError, match="fields"):
        check(case, expected(case)[0], values)


def test_norm_bound_grows_with_the_longest_chain() -> None:
    """An FP32 sum of n terms in one chain errs by more than a tree: the bound follows, a naive sum stays inside it."""
    g = np.abs(np.random.default_rng(0).standard_normal(4096)).astype(F)
    scale = g.max()
    total = F(0)
    for x in (g / scale) ** 2:
        total = F(total + x)
    norm = float(scale) * math.sqrt(float(total))
    true = gradient_stats([g]).total_norm
    assert abs(norm - true) <= true * norm_relative_bound(chain=4096, levels=0)
    assert norm_relative_bound(chain=1, levels=0) < norm_relative_bound(chain=4096, levels=0)
