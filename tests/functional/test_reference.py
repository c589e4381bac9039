"""The FP64 reference against the PyTorch fixtures, torch in FP64, and values worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from cases import CASES, FIXTURE_CASES, Case, compare, expected, initial_parameter, stored_gradient

from fused_adamw import oracle
from ruda_optim.fused_adamw import (
    AdamWOptions,
    GradientGuardOptions,
    InvalidOption,
    InvalidState,
    NonFiniteGradients,
    NonFinitePolicy,
    ShapeMismatch,
    StepControl,
    StepOverflow,
)
from ruda_optim.fused_adamw.reference import ReferenceEntry, ReferenceState, adamw, gradient_stats, guarded_adamw

PLAIN, AMSGRAD = AdamWOptions(), AdamWOptions(amsgrad=True)
ONE = np.ones(3)


def moments(step: int = 1, shape: int = 3, maximum: bool = False) -> ReferenceState:
    return ReferenceState(step, np.zeros(shape), np.zeros(shape), np.zeros(shape) if maximum else None)


# ----------------------------------------------------------------------------------------------------------- bad values

ERRORS = [
    (lambda: adamw(ONE, np.ones(4), None, PLAIN), ShapeMismatch, r"gradient must have .* shape \(3,\), got \(4,\)"),
    (lambda: adamw(ONE, np.ones(1), None, PLAIN), ShapeMismatch, r"gradient must have .* shape \(3,\), got \(1,\)"),
    (lambda: adamw(ONE, ONE, moments(shape=4), PLAIN), ShapeMismatch, r"first_moment must have .*\(3,\), got \(4,\)"),
    (
        lambda: adamw(ONE, ONE, moments(maximum=True)._replace(max_second_moment=np.zeros(2)), AMSGRAD),
        ShapeMismatch,
        r"max_second_moment must have the parameter's shape \(3,\), got \(2,\)",
    ),
    (lambda: adamw(ONE, ONE, moments(), AMSGRAD), InvalidState, "max_second_moment must .* got amsgrad=True"),
    (lambda: adamw(ONE, ONE, moments(maximum=True), PLAIN), InvalidState, "max_second_moment .* got amsgrad=False"),
    (lambda: adamw(ONE, ONE, moments(0), PLAIN), InvalidState, "state.step must be at least 1, got 0"),
    (lambda: adamw(ONE, ONE, moments(2**64 - 1), PLAIN), StepOverflow, "got state.step 18446744073709551615"),
    (lambda: adamw([], [], moments(2**64, shape=0), PLAIN), StepOverflow, "got state.step 18446744073709551616"),
    (
        lambda: guarded_adamw([ReferenceEntry(ONE, np.full(3, np.nan), moments(2**64 - 1))], PLAIN),
        StepOverflow,
        "at most 2",
    ),
    (lambda: gradient_stats([ONE], 0.0), InvalidOption, "gradient_scale must be a finite number > 0, got 0.0"),
    (
        lambda: guarded_adamw([ReferenceEntry(ONE, ONE), ReferenceEntry(ONE, np.full(4, np.nan))], PLAIN),
        ShapeMismatch,
        r"gradient must have the parameter's shape \(3,\), got \(4,\)",
    ),
    (
        lambda: guarded_adamw(
            [ReferenceEntry(ONE, np.full(3, np.inf))],
            PLAIN,
            guard=GradientGuardOptions(nonfinite=NonFinitePolicy.ERROR),
        ),
        NonFiniteGradients,
        "got NaN or infinity among 3 elements of 1 tensors",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_values_are_refused(call, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert caught.type is error


# ------------------------------------------------------------------------------------------- fixtures and torch in FP64


@pytest.mark.parametrize("index", range(len(FIXTURE_CASES)), ids=[case.name for case in FIXTURE_CASES])
def test_reference_agrees_with_the_pytorch_fixtures(index) -> None:
    oracle.check_against_reference(FIXTURE_CASES[index], oracle.load()[index])


def test_fixtures_cover_every_combination() -> None:
    covered = {(case.gradient_dtype, case.options.amsgrad, case.options.maximize) for case in FIXTURE_CASES}
    assert len(FIXTURE_CASES) == len(covered) == 12
    assert all(case.steps == 5 for case in FIXTURE_CASES)
    scaled = [case for case in FIXTURE_CASES if case.gradient_scale == 128]
    assert len(scaled) == 4
    assert {case.gradient_dtype for case in scaled} == {"float32", "float16", "bfloat16"}
    assert len({(case.options.amsgrad, case.options.maximize) for case in scaled}) == 4


@pytest.mark.parametrize(
    ("changes", "version", "message"),
    [
        ({"format": 1}, None, "must have format 2, got 1; regenerate it: python tools/fused_adamw/oracle.py --write"),
        ({"format": None}, None, "must have format 2, got None; regenerate it"),
        ({}, "1.0.0", "was made with torch '.*', this is torch '1.0.0'; install that version, or regenerate it"),
        ({"cases": []}, None, "does not hold the cases of tests/support/cases.py; regenerate it"),
    ],
)
def test_fixture_file_that_does_not_fit_says_how_to_regenerate(tmp_path, changes, version, message) -> None:
    path = tmp_path / "fixtures.json"
    path.write_text(json.dumps({**json.loads(oracle.FIXTURES.read_text(encoding="utf-8")), **changes}))
    with pytest.raises(oracle.FixtureError, match=message):
        oracle.load(path, torch_version=version)


@pytest.mark.parametrize(("text", "message"), [(None, "is missing; regenerate"), ("{", r"is not JSON .*; regenerate")])
def test_fixture_file_that_cannot_be_read_says_how_to_regenerate(tmp_path, text, message) -> None:
    path = tmp_path / "fixtures.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(oracle.FixtureError, match=message):
        oracle.load(path)


def test_a_changed_fixture_is_noticed() -> None:
    entry = json.loads(json.dumps(oracle.load()[0]))
    words = entry["results"][3]["exp_avg"].split()
    words[2] = (float.fromhex(words[2]) * (1 + 2.0**-18)).hex()
    entry["results"][3]["exp_avg"] = " ".join(words)
    with pytest.raises(AssertionError, match="step 4, exp_avg: 1 of 19 elements out of bounds"):
        oracle.check_against_reference(FIXTURE_CASES[0], entry)


def torch_steps(case: Case, dtype: torch.dtype) -> list[dict[str, np.ndarray]]:
    """Parameters and moments of torch.optim.AdamW after each step, fed the unscaled gradients."""
    options = case.options
    parameter = torch.nn.Parameter(torch.from_numpy(initial_parameter(case)).to(dtype))
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        amsgrad=options.amsgrad,
        maximize=options.maximize,
        foreach=False,
    )
    steps = []
    for step in range(1, case.steps + 1):
        parameter.grad = torch.from_numpy(stored_gradient(case, step)).to(dtype) / case.gradient_scale
        optimizer.step()
        state = optimizer.state[parameter]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options.amsgrad
        values = {"parameter": parameter.detach(), **{name: state[name] for name in names}}
        steps.append({name: value.numpy().copy() for name, value in values.items()})
    return steps


UNCLIPPED = [case for case in CASES if case.max_norm is None and case.parameter_dtype == "float32"]


@pytest.mark.parametrize("case", UNCLIPPED, ids=str)
def test_reference_agrees_with_torch_in_fp64(case) -> None:
    # The bounds of cases.py are linear in the unit roundoff, except for TINY; FP64's is 2^-29 of FP32's. torch gets
    # gradients divided by the scale where the reference multiplies by a reciprocal: the bounds count two roundings.
    for want, got in zip(expected(case, literal=True), torch_steps(case, torch.float64), strict=True):
        for name, value in got.items():
            # Both sides are FP64 here and both err, hence twice.
            bound = 2.0 * 2.0**-29 * want.bounds[name] + 1e-300
            compare(f"{case}, step {want.step}, {name}", value, want.values[name], bound)


# ----------------------------------------------------------------------------------------------------- hand-made values


def run(parameter, gradients, options, **kwargs):
    state, path = None, []
    for gradient in gradients:
        parameter, state = adamw(parameter, np.full(np.shape(parameter), gradient), state, options, **kwargs)
        path.append(parameter)
    return path, state


def test_c23_amsgrad_takes_the_maximum_before_the_correction() -> None:
    """C23 (pytorch#142323, optax PR 1423): FP64, lr 1e-2, betas (0.9, 0.5), gradients 10, 0.1, 0.1, 0.1, 0.1."""
    options = AdamWOptions(1e-2, 0.9, 0.5, epsilon=1e-8, weight_decay=0.0, amsgrad=True)
    path, state = run(np.zeros(1), [10.0, 0.1, 0.1, 0.1, 0.1], options)
    # The values are given to nine decimals: half a unit of the ninth.
    right = [-0.01, -0.015865883, -0.019912614, -0.022923176, -0.025270180]
    np.testing.assert_allclose(np.ravel(path), right, rtol=0, atol=5e-10)
    assert state.max_second_moment[0] == 50.0  # 0.5 * 10^2, uncorrected

    plain = AdamWOptions(1e-2, 0.9, 0.5, epsilon=1e-8, weight_decay=0.0)
    path, state = run(np.zeros(1), [10.0, 0.1, 0.1, 0.1, 0.1], plain)
    assert abs(path[-1][0] - -0.044268983) <= 5e-10
    assert state.max_second_moment is None


def test_first_step_is_lr_times_sign_and_decay_is_decoupled() -> None:
    """Moments and corrections cancel at t = 1: p * (1 - lr*wd) - lr * g / (|g| + eps)."""
    options = AdamWOptions(0.1, epsilon=1e-2, weight_decay=0.5)
    g = np.array([3.0, -0.25, 0.0, 1e-3])
    got, state = adamw(np.full(4, 2.0), g, None, options)
    np.testing.assert_allclose(got, 2.0 * 0.95 - 0.1 * g / (np.abs(g) + 1e-2), rtol=8 * 2.0**-53, atol=0)
    np.testing.assert_allclose(state.first_moment, 0.1 * g, rtol=4 * 2.0**-53, atol=0)
    np.testing.assert_allclose(state.second_moment, 0.001 * g * g, rtol=4 * 2.0**-53 / 0.001, atol=0)


def test_maximize_negates_the_gradient_and_not_the_decay() -> None:
    options = {"learning_rate": 0.1, "weight_decay": 0.5}
    up, up_state = adamw([2.0], [3.0], None, AdamWOptions(**options, maximize=True))
    down, down_state = adamw([2.0], [-3.0], None, AdamWOptions(**options))
    assert up == down
    assert up_state == down_state
    assert up > 1.9  # 2 * (1 - 0.05), then up


def test_zero_gradient_decays_the_parameter_only() -> None:
    """C24 (DeepSpeed#8614, #5223): norm 0, factor 1, parameter 0.95, moments 0, step 1."""
    entry = ReferenceEntry(np.ones(4), np.zeros(4))
    ((parameter, state),) = guarded_adamw([entry], AdamWOptions(0.1, weight_decay=0.5))
    np.testing.assert_array_equal(parameter, np.full(4, 0.95))
    assert state.step == 1
    assert not state.first_moment.any()
    assert not state.second_moment.any()


def test_scale_and_clip_enter_as_factors() -> None:
    """A scale of 8 and a clip factor of 1/4 turn a stored gradient of 64 into 2."""
    scaled, _ = adamw(ONE, np.full(3, 64.0), None, PLAIN, StepControl(8.0), 0.25)
    plain, _ = adamw(ONE, np.full(3, 2.0), None, PLAIN)
    np.testing.assert_array_equal(scaled, plain)


def test_skip_changes_nothing() -> None:
    state = moments(7)
    parameter = np.array([1.0, -0.0, np.nan])
    got, kept = adamw(parameter, ONE, state, PLAIN, StepControl(skip_update=True))
    np.testing.assert_array_equal(got.view(np.int64), parameter.view(np.int64))
    assert kept is state


@pytest.mark.parametrize("state", [None, moments(7, shape=0), moments(2**64 - 1, shape=0)], ids=str)
def test_an_empty_tensor_counts_no_step(state) -> None:
    got, kept = adamw(np.zeros(0), np.zeros(0), state, PLAIN)
    assert got.size == 0
    assert kept is state
    (_, kept), (_, other) = guarded_adamw(
        [ReferenceEntry(np.zeros(0), np.zeros(0), state), ReferenceEntry(ONE, ONE)], PLAIN
    )
    assert kept is state
    assert other.step == 1


def test_a_skipped_step_overflows_nothing() -> None:
    state = moments(2**64 - 1)
    assert adamw(ONE, ONE, state, PLAIN, StepControl(skip_update=True))[1] is state
    assert guarded_adamw([ReferenceEntry(ONE, ONE, state)], PLAIN, StepControl(skip_update=True))[0][1] is state


def test_inputs_are_not_written() -> None:
    parameter, gradient, state = np.ones(3), np.full(3, 0.5), moments(3, maximum=True)
    adamw(parameter, gradient, state, AMSGRAD)
    for value, original in ((parameter, 1.0), (gradient, 0.5), *((moment, 0.0) for moment in state[1:])):
        np.testing.assert_array_equal(value, np.full(3, original))


@pytest.mark.parametrize("options", [PLAIN, AMSGRAD], ids=["plain", "amsgrad"])
def test_nan_and_infinity_propagate(options) -> None:
    """AMSGrad's maximum must not swallow NaN, whether it is in the new value or in the old maximum."""
    parameter, state = adamw(ONE, np.array([np.nan, np.inf, 1.0]), None, options)
    np.testing.assert_array_equal(np.isnan(parameter), [True, True, False])
    _, later = adamw(parameter, ONE, state, options)
    assert np.isnan(later.second_moment[0])
    assert later.second_moment[1] == np.inf
    if options.amsgrad:
        assert np.isnan(later.max_second_moment[0])


def test_steps_beyond_2_to_the_32_count_on() -> None:
    _, state = adamw(ONE, ONE, moments(2**40), PLAIN)
    assert state.step == 2**40 + 1


# ----------------------------------------------------------------------------------------------------------- statistics


def test_norm_is_global_and_over_the_unscaled_gradient() -> None:
    stats = gradient_stats([np.array([3.0, 0.0]) * 8, np.array([[-4.0]]) * 8, np.zeros(0)], 8.0)
    assert (stats.total_norm, stats.max_finite_abs, stats.all_finite) == (5.0, 4.0, True)
    assert (stats.elements, stats.tensors, stats.gradient_scale) == (3, 3, 8.0)


@pytest.mark.parametrize(
    ("gradient", "norm"),
    [
        (np.full(100, 1e20, np.float32), 1e21),  # C1 (pytorch#46849): squares overflow FP32
        (np.full(1, 300, np.float16), 300.0),  # C3 (burn#5699): the square overflows FP16
        (np.full(4096, 2000, np.float16), 128_000.0),  # C3: the norm overflows FP16
        (np.ones(1096, np.float32), math.sqrt(1096)),  # C3: BF16 would give 33.0
        (np.full(4, 2.0**-149, np.float32), 2.0**-148),  # subnormal
        (np.full(4, np.finfo(np.float32).max, np.float32), 2.0 * float(np.finfo(np.float32).max)),
        (np.zeros(0, np.float32), 0.0),
    ],
)
def test_norms_no_half_or_single_sum_could_hold(gradient, norm) -> None:
    stats = gradient_stats([gradient])
    # 1e20 is no FP32 value: half an ulp of FP32. A sum of n equal squares errs by less than log2(n) + 3 ulps of FP64.
    assert abs(stats.total_norm - norm) <= norm * (2.0**-24 + 16 * 2.0**-53)
    assert stats.all_finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_bad_element_is_enough(bad, position, dtype) -> None:
    gradient = np.arange(5, dtype=dtype)
    gradient[position] = bad
    stats = gradient_stats([np.ones(2, dtype), gradient])
    assert not stats.all_finite
    assert stats.total_norm == math.inf
    assert stats.max_finite_abs == (3.0 if position == 4 else 4.0)


def test_a_finite_gradient_that_overflows_when_unscaled_is_bad() -> None:
    stats = gradient_stats([np.array([1e38, 2.0], np.float32)], 0.01)
    assert not stats.all_finite
    assert gradient_stats([np.array([1e38, 2.0])], 0.01).all_finite  # FP64 has the room


def test_guard_clips_all_entries_by_one_norm_and_skips_them_together() -> None:
    entries = [ReferenceEntry(np.ones(1), np.array([3.0])), ReferenceEntry(np.ones(1), np.array([4.0]))]
    guarded = guarded_adamw(entries, PLAIN, guard=GradientGuardOptions(max_norm=2.5, epsilon=0.0))
    for (got, _), entry in zip(guarded, entries, strict=True):
        np.testing.assert_array_equal(got, adamw(entry.parameter, entry.gradient / 2, None, PLAIN)[0])

    spoiled = [entries[0], ReferenceEntry(np.ones(1), np.array([np.nan]))]
    for got, state in guarded_adamw(spoiled, PLAIN):
        np.testing.assert_array_equal(got, 1.0)
        assert state is None


def test_guard_with_max_norm_zero_still_decays_and_counts() -> None:
    entry = ReferenceEntry(np.ones(2), np.full(2, 5.0))
    options = AdamWOptions(0.1, weight_decay=0.5)
    ((got, state),) = guarded_adamw([entry], options, guard=GradientGuardOptions(max_norm=0.0))
    np.testing.assert_array_equal(got, 0.95)
    assert state.step == 1
    assert not state.first_moment.any()
