"""GradientGuardOptions, GradientStats and the decision, without any tensor."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from ruda_optim.fused_adamw import (
    GradientDecision,
    GradientGuardOptions,
    GradientStats,
    InvalidOption,
    InvalidState,
    NonFiniteGradients,
    NonFinitePolicy,
)


def stats(norm: float, *, finite: bool = True) -> GradientStats:
    return GradientStats(norm if finite else math.inf, norm, finite, elements=10, tensors=2, gradient_scale=8.0)


def report(bad: float, scale: float, sumsq: float) -> GradientStats:
    return GradientStats.from_report(bad, scale, sumsq, elements=10, tensors=2, gradient_scale=8.0)


ERRORS = [
    (lambda: GradientGuardOptions(max_norm=-1.0), InvalidOption, r"max_norm must be None .* >= 0, got -1.0"),
    (
        lambda: GradientGuardOptions(max_norm=math.nan),
        InvalidOption,
        r"max_norm must be None \(finite check only\).*nan",
    ),
    (lambda: GradientGuardOptions(max_norm=math.nan), InvalidOption, "max_norm must be None .* got nan"),
    (lambda: GradientGuardOptions(max_norm="1"), InvalidOption, "max_norm must be None .* got '1' of type str"),
    (lambda: GradientGuardOptions(max_norm=True), InvalidOption, "max_norm must be None .* got True of type bool"),
    (lambda: GradientGuardOptions(epsilon=-1e-6), InvalidOption, "epsilon must be a finite number >= 0, got -1e-06"),
    (lambda: GradientGuardOptions(epsilon=math.nan), InvalidOption, "epsilon must be a finite number >= 0, got nan"),
    (lambda: GradientGuardOptions(epsilon=None), InvalidOption, "epsilon must be .* of type NoneType"),
    (
        lambda: GradientGuardOptions(nonfinite="skip"),
        InvalidOption,
        "nonfinite must be NonFinitePolicy.SKIP or NonFinitePolicy.ERROR, got 'skip'",
    ),
    (lambda: report(math.nan, 1.0, 1.0), InvalidState, r"statistics report must be .* got \(nan, 1.0, 1.0\)"),
    (lambda: report(0.5, 1.0, 1.0), InvalidState, r"statistics report must be .* got \(0.5, 1.0, 1.0\)"),
    (lambda: report(0.0, math.inf, 1.0), InvalidState, r"statistics report must be .* got \(0.0, inf, 1.0\)"),
    (lambda: report(0.0, -1.0, 1.0), InvalidState, r"statistics report must be .* got \(0.0, -1.0, 1.0\)"),
    (lambda: report(0.0, 1.0, math.nan), InvalidState, r"statistics report must be .* got \(0.0, 1.0, nan\)"),
    (lambda: report(0.0, 1.0, -1.0), InvalidState, r"statistics report must be .* got \(0.0, 1.0, -1.0\)"),
    (
        lambda: stats(1.0, finite=False).decision(GradientGuardOptions(nonfinite=NonFinitePolicy.ERROR)),
        NonFiniteGradients,
        "got NaN or infinity among 10 elements of 2 tensors at gradient_scale 8.0; nothing was updated. Lower",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_values_are_refused(call, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert caught.type is error


def test_defaults() -> None:
    assert GradientGuardOptions() == GradientGuardOptions(1.0, 1e-6, NonFinitePolicy.SKIP)
    assert type(GradientGuardOptions(max_norm=2).max_norm) is float


@pytest.mark.parametrize(
    ("norm", "options", "factor"),
    [
        (10.0, GradientGuardOptions(), 1.0 / (10.0 + 1e-6)),
        (10.0, GradientGuardOptions(epsilon=0), 0.1),
        (0.5, GradientGuardOptions(), 1.0),
        (1.0, GradientGuardOptions(), 1.0 / (1.0 + 1e-6)),
        (1.0, GradientGuardOptions(max_norm=None), 1.0),
        (1e30, GradientGuardOptions(max_norm=None), 1.0),
        (1e30, GradientGuardOptions(max_norm=math.inf), 1.0),
        (0.0, GradientGuardOptions(max_norm=math.inf), 1.0),
        (0.0, GradientGuardOptions(), 1.0),
        (0.0, GradientGuardOptions(max_norm=1e-9), 1.0),
        (0.0, GradientGuardOptions(epsilon=0), 1.0),
        (0.0, GradientGuardOptions(max_norm=0), 0.0),
        (5.0, GradientGuardOptions(max_norm=0), 0.0),
        (5e-324, GradientGuardOptions(max_norm=1e300, epsilon=0), 1.0),
        (1e21, GradientGuardOptions(), 1e-21),
        (3.4e38, GradientGuardOptions(), 1.0 / 3.4e38),
    ],
)
def test_clip_factor_is_rounded_once_to_fp32(norm, options, factor) -> None:
    decision = stats(norm).decision(options)
    assert decision == GradientDecision(clip_factor=float(np.float32(factor)), skip_update=False)


@pytest.mark.parametrize("max_norm", [None, 0.0, 1.0, math.inf])
def test_nonfinite_gradients_skip_the_group(max_norm) -> None:
    decision = stats(3.0, finite=False).decision(GradientGuardOptions(max_norm=max_norm))
    assert decision == GradientDecision(clip_factor=1.0, skip_update=True)


@pytest.mark.parametrize(
    ("numbers", "norm"),
    [
        ((0.0, 0.0, 0.0), 0.0),
        ((0.0, 3.0, 1.0), 3.0),
        ((0.0, 2.0, 4.0), 4.0),
        ((0.0, float(np.float32(1e20)), 100.0), 10 * float(np.float32(1e20))),
        ((0.0, float(np.finfo(np.float32).max), 1.0), float(np.finfo(np.float32).max)),
        ((0.0, 2.0**-149, 4.0), 2.0**-148),
        # More elements than FP32 could square: the norm leaves FP32's range and is still finite in FP64.
        ((0.0, 2.0**127, 2.0**40), 2.0**147),
    ],
)
def test_report_gives_the_norm_in_fp64(numbers, norm) -> None:
    got = report(*numbers)
    assert got == GradientStats(norm, numbers[1], True, 10, 2, 8.0)


def test_report_of_nonfinite_gradients() -> None:
    got = report(1.0, 3.0, 2.0)
    assert (got.total_norm, got.max_finite_abs, got.all_finite) == (math.inf, 3.0, False)


def test_values_are_frozen() -> None:
    for value, name in ((stats(1.0), "total_norm"), (GradientGuardOptions(), "max_norm")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 2.0)
