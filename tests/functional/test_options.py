"""Options, controls, coefficients, state: every bad value, and the numbers that good ones give."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import re
import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch

import ruda_optim
from ruda_optim import fused_adamw
from ruda_optim.fused_adamw import (
    AdamWOptions,
    AdamWState,
    AdamWUpdate,
    DifferentDevice,
    FusedAdamWError,
    InvalidOption,
    InvalidState,
    InvalidTensor,
    NonFiniteGradients,
    ShapeMismatch,
    StepControl,
    StepOverflow,
)
from ruda_optim.fused_adamw.options import round_to_fp32, seed_of_step

ONES = torch.ones(3)
NUMBER = "pass a Python number"
FINITE = "NaN and infinity are not accepted"

ERRORS = [
    (lambda: AdamWOptions(learning_rate=-1.0), InvalidOption, "learning_rate must be a finite number >= 0, got -1.0"),
    (lambda: AdamWOptions(learning_rate=math.nan), InvalidOption, f"learning_rate must be .* got nan; {FINITE}"),
    (lambda: AdamWOptions(learning_rate=math.inf), InvalidOption, f"learning_rate must be .* got inf; {FINITE}"),
    (lambda: AdamWOptions(learning_rate="1e-3"), InvalidOption, f"learning_rate .* got '1e-3' of type str; {NUMBER}"),
    (lambda: AdamWOptions(learning_rate=True), InvalidOption, f"learning_rate .* got True of type bool; {NUMBER}"),
    (lambda: AdamWOptions(learning_rate=None), InvalidOption, f"learning_rate .* of type NoneType; {NUMBER}"),
    (lambda: AdamWOptions(learning_rate=1e-3 + 0j), InvalidOption, f"learning_rate .* of type complex; {NUMBER}"),
    (lambda: AdamWOptions(learning_rate=torch.tensor(1e-3)), InvalidOption, f"of type Tensor; {NUMBER}"),
    (lambda: AdamWOptions(learning_rate=10**400), InvalidOption, f"learning_rate must be .* got inf; {FINITE}"),
    (lambda: AdamWOptions(learning_rate=3.5e38), InvalidOption, "learning_rate must be finite in FP32 .* got 3.5e"),
    (lambda: AdamWOptions(beta1=1.0), InvalidOption, r"beta1 must be a number in \[0, 1\), got 1.0"),
    (lambda: AdamWOptions(beta1=1), InvalidOption, r"beta1 must be a number in \[0, 1\), got 1.0"),
    (lambda: AdamWOptions(beta1=-0.1), InvalidOption, r"beta1 must be a number in \[0, 1\), got -0.1"),
    (lambda: AdamWOptions(beta1=math.nan), InvalidOption, f"beta1 must be .* got nan; {FINITE}"),
    (lambda: AdamWOptions(beta1=False), InvalidOption, f"beta1 must be .* got False of type bool; {NUMBER}"),
    (lambda: AdamWOptions(beta2=1.0), InvalidOption, r"beta2 must be a number in \[0, 1\), got 1.0"),
    (lambda: AdamWOptions(beta2=-1e-9), InvalidOption, r"beta2 must be a number in \[0, 1\), got -1e-09"),
    (lambda: AdamWOptions(beta2=(0.9,)), InvalidOption, f"beta2 must be .* of type tuple; {NUMBER}"),
    (lambda: AdamWOptions(epsilon=0.0), InvalidOption, "epsilon must be a finite number > 0, got 0.0"),
    (lambda: AdamWOptions(epsilon=-1e-8), InvalidOption, "epsilon must be a finite number > 0, got -1e-08"),
    (lambda: AdamWOptions(epsilon=math.inf), InvalidOption, f"epsilon must be .* got inf; {FINITE}"),
    (lambda: AdamWOptions(epsilon=7e-46), InvalidOption, r"epsilon must be > 0 and finite in FP32 .* got 7e-46"),
    (lambda: AdamWOptions(epsilon=1e39), InvalidOption, r"epsilon must be > 0 and finite in FP32 .* got 1e\+39"),
    (lambda: AdamWOptions(weight_decay=-0.01), InvalidOption, "weight_decay must be a finite number >= 0, got -0.01"),
    (lambda: AdamWOptions(weight_decay=math.nan), InvalidOption, f"weight_decay must be .* got nan; {FINITE}"),
    (lambda: AdamWOptions(weight_decay="0"), InvalidOption, f"weight_decay must be .* got '0' of type str; {NUMBER}"),
    (
        lambda: AdamWOptions(learning_rate=1e30, weight_decay=1e10),
        InvalidOption,
        r"learning_rate \* weight_decay must be finite in FP32 .* got 1e\+30 \* 1.*; lower one of them",
    ),
    (
        lambda: AdamWOptions(learning_rate=1e30, weight_decay=1e300),
        InvalidOption,
        r"learning_rate \* weight_decay must be finite in FP32",
    ),
    (lambda: AdamWOptions(amsgrad=1), InvalidOption, "amsgrad must be True or False, got 1 of type int"),
    (lambda: AdamWOptions(maximize=None), InvalidOption, "maximize must be True or False, got None of type NoneType"),
    (lambda: AdamWOptions(eps=1e-8), TypeError, "unexpected keyword argument 'eps'"),
    (lambda: dataclasses.replace(AdamWOptions(), beta1=2.0), InvalidOption, r"beta1 must be .*, got 2.0"),
    (lambda: StepControl(0.0), InvalidOption, "gradient_scale must be a finite number > 0, got 0.0"),
    (lambda: StepControl(-2.0), InvalidOption, "gradient_scale must be a finite number > 0, got -2.0"),
    (lambda: StepControl(math.inf), InvalidOption, f"gradient_scale must be .* got inf; {FINITE}"),
    (lambda: StepControl(math.nan), InvalidOption, f"gradient_scale must be .* got nan; {FINITE}"),
    (lambda: StepControl("1024"), InvalidOption, f"gradient_scale must be .* got '1024' of type str; {NUMBER}"),
    (lambda: StepControl(True), InvalidOption, f"gradient_scale must be .* of type bool; {NUMBER}"),
    (
        lambda: StepControl(1e-39),
        InvalidOption,
        "gradient_scale must have a reciprocal .* FP32, got 1e-39; use a scale",
    ),
    (lambda: StepControl(5e-324), InvalidOption, "gradient_scale must have a reciprocal .* got 5e-324"),
    (lambda: StepControl(1e46), InvalidOption, r"gradient_scale must have a reciprocal .* got 1e\+46"),
    (lambda: StepControl(skip_update=0.0), InvalidOption, "skip_update must be True or False, got 0.0 of type float"),
    (lambda: AdamWOptions().prepare_step(-1), InvalidState, "completed_steps must be an int >= 0, got -1"),
    (lambda: AdamWOptions().prepare_step(1.0), InvalidState, "completed_steps must be an int >= 0, got 1.0"),
    (lambda: AdamWOptions().prepare_step(True), InvalidState, "completed_steps must be an int >= 0, got True"),
    (lambda: AdamWOptions().prepare_step(2**64 - 1), StepOverflow, r"at most 2\^64 - 2 .*, got 18446744073709551615"),
    (lambda: AdamWOptions().prepare_step(2**70), StepOverflow, r"at most 2\^64 - 2 .*, got 1180591620717411303424"),
    (
        lambda: AdamWState(0, ONES, ONES),
        InvalidState,
        "step must be an int >= 1, got 0; before the first update pass no",
    ),
    (lambda: AdamWState.from_parts(0, ONES, ONES, None), InvalidState, "step must be an int >= 1, got 0"),
    (lambda: AdamWState(-3, ONES, ONES), InvalidState, "step must be an int >= 1, got -3"),
    (lambda: AdamWState(1.0, ONES, ONES), InvalidState, "step must be an int >= 1, got 1.0"),
    (lambda: AdamWState(2**64, ONES, ONES), StepOverflow, r"step must be at most 2\^64 - 1, got 18446744073709551616"),
    (lambda: AdamWState(1, None, ONES), InvalidTensor, "first_moment must be an FP32 or BF16 tensor, got NoneType"),
    (lambda: AdamWState(1, ONES, [1.0]), InvalidTensor, "second_moment must be an FP32 or BF16 tensor, got list"),
    (
        lambda: AdamWState(1, ONES.half(), ONES),
        InvalidTensor,
        r"first_moment .* got torch.float16; convert it with .float",
    ),
    (
        lambda: AdamWState(1, ONES, ONES.double()),
        InvalidTensor,
        "second_moment must be an FP32 or BF16 tensor, got torch.float64",
    ),
    (lambda: AdamWState(1, ONES, ONES, ONES.int()), InvalidTensor, "max_second_moment must be .* got torch.int32"),
    (
        lambda: AdamWState(1, ONES, torch.ones(4)),
        ShapeMismatch,
        r"second_moment must have the shape of first_moment \(3,\), got \(4,\)",
    ),
    (lambda: AdamWState(1, ONES, ONES, ONES[None]), ShapeMismatch, r"max_second_moment must have .* got \(1, 3\)"),
    (
        lambda: AdamWState(1, ONES, ONES.to("meta")),
        DifferentDevice,
        "second_moment must be on the device of first_moment, cpu, got meta; move it first",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_values_are_refused(call, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert caught.type is error


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InvalidOption, ValueError),
        (InvalidTensor, TypeError),
        (ShapeMismatch, ValueError),
        (DifferentDevice, ValueError),
        (InvalidState, ValueError),
        (StepOverflow, OverflowError),
        (NonFiniteGradients, ArithmeticError),
    ],
)
def test_errors_are_caught_by_their_own_base_and_by_a_builtin(kind, builtin) -> None:
    assert issubclass(kind, FusedAdamWError)
    assert issubclass(kind, builtin)


def test_defaults_are_rudas() -> None:
    assert AdamWOptions() == AdamWOptions(1e-3, 0.9, 0.999, 1e-5, 1e-4, False, False)
    assert StepControl() == StepControl(1.0, False)


@pytest.mark.parametrize("zero", [0, -0.0, np.float32(0), Fraction(0)])
def test_any_real_number_is_taken_as_a_float(zero) -> None:
    """C28 (apex#577 and others): integer beta 0 is 0.0."""
    options = AdamWOptions(learning_rate=1, beta1=zero, beta2=zero, weight_decay=zero)
    for name in ("learning_rate", "beta1", "beta2", "weight_decay"):
        assert type(getattr(options, name)) is float
    coefficients = options.prepare_step(0)
    assert coefficients.one_minus_beta1 == coefficients.inv_bias1 == coefficients.inv_bias2 == 1.0


def test_values_at_the_edges_are_accepted() -> None:
    last = math.nextafter(1.0, 0.0)
    row = AdamWOptions(0, last, last, 1.4e-45, 1e300).prepare_step(0).row
    assert all(math.isfinite(value) for value in row)
    assert row[2] == row[3] == 2.0**-53
    assert row[4] == row[5] == 2.0**53
    assert StepControl(3e-39).inverse_scale < math.inf
    assert StepControl(1.4e45).inverse_scale > 0.0
    assert AdamWOptions().prepare_step(2**64 - 2).step == 2**64 - 1


def test_options_are_frozen_and_pickle() -> None:
    options, control = AdamWOptions(beta1=0.5, amsgrad=True), StepControl(1024.0, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.beta1 = 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        control.gradient_scale = 2.0
    assert pickle.loads(pickle.dumps((options, control))) == (options, control)


def test_rounding_to_fp32_is_numpys() -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(2000) * 10.0 ** random.uniform(-46, 39, 2000)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal([round_to_fp32(x) for x in values.tolist()], values.astype(np.float32))
    assert round_to_fp32(-1e39) == -math.inf
    assert round_to_fp32(1.0 + 2.0**-24) == 1.0  # tie, to even
    assert round_to_fp32(1.0 + 3 * 2.0**-24) == 1.0 + 2.0**-22


def test_the_seed_of_a_step_is_a_hash_of_its_low_32_bits() -> None:
    known = {1: 0x514E28B7, 2: 0x30F4C306, 1000: 0x66692658, 2**24: 0x47BA7B95}
    assert {step: seed_of_step(step) for step in known} == known
    assert seed_of_step(2**32 + 1000) == seed_of_step(1000)
    # Two steps in a row share half of their bits, give or take; each bit of the seed is set in half of the steps.
    seeds = [seed_of_step(step) for step in range(1, 10_001)]
    assert len(set(seeds)) == 10_000
    for bit in range(32):
        # Binomial: four standard deviations are 0.02.
        assert abs(sum(seed >> bit & 1 for seed in seeds) / 10_000 - 0.5) < 0.02
        changed = sum((a ^ b) >> bit & 1 for a, b in itertools.pairwise(seeds))
        assert abs(changed / 9_999 - 0.5) < 0.02


@pytest.mark.parametrize("completed", [0, 1, 2, 9, 999, 2**24, 2**32, 2**53, 2**64 - 2])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.5), (0.9999, 0.9999999)])
def test_coefficients_are_exact_values_rounded_once(completed, beta1, beta2) -> None:
    options = AdamWOptions(3e-4, beta1, beta2, 1e-8, 0.1, maximize=True)
    got = options.prepare_step(completed, StepControl(3000.0))
    exact = [Fraction(3e-4), Fraction(3e-4 * 0.1), 1 - Fraction(beta1), 1 - Fraction(beta2)]
    assert got.row[:4] == tuple(float(np.float32(float(value))) for value in exact)
    t = completed + 1
    for inverse, beta in ((got.inv_bias1, beta1), (got.inv_bias2, beta2)):
        # In FP64 the power errs by 1 ulp, 2^-52 of itself; the difference and the quotient by 2^-53 each; 1 / (1 - x)
        # multiplies an error of x by the square of its value. Then one rounding to FP32.
        with localcontext() as context:
            context.prec = 60
            power = Decimal(beta) ** t
            true = float(1 / (1 - power))
        assert abs(inverse - true) <= true * (2.0**-24 + 2.0**-52) + true**2 * float(power) * 2.0**-52
    assert got.row[6:8] == (float(np.float32(1e-8)), -1.0)
    assert got.row[8:] == (seed_of_step(t) & 0xFFFF, seed_of_step(t) >> 16)
    assert got.step == t
    assert got.inverse_scale == float(np.float32(1 / 3000.0))


def test_coefficient_row_has_the_order_of_the_kernels_struct() -> None:
    from pathlib import Path

    header = Path(fused_adamw.__file__).parent / "kernels" / "csrc" / "adamw_update.h"
    struct = re.search(r"struct Coefficients \{(.*?)\};", header.read_text(encoding="utf-8"), re.DOTALL)
    assert struct is not None
    fields = re.findall(r"^\s*float (\w+);", struct.group(1), re.MULTILINE)
    assert tuple(fields) == AdamWOptions().prepare_step(0)._fields[: len(fields)]
    assert len(AdamWOptions().prepare_step(0).row) == len(fields) == 10


@pytest.mark.parametrize("maximum", [None, torch.full((3,), 2.0)])
def test_state_gives_back_its_parts(maximum) -> None:
    first, second = torch.zeros(3), torch.ones(3)
    state = AdamWState.from_parts(7, first, second, maximum)
    step, *moments = state.into_parts()
    assert step == 7
    assert all(moment is part for moment, part in zip(moments, (first, second, maximum), strict=True))
    assert AdamWState(2**64 - 1, first, second).step == 2**64 - 1


def test_update_is_frozen() -> None:
    update = AdamWUpdate(ONES, None, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.updated = True


PURE = ("options", "errors", "stats_plan", "gradient_norm", "state")


@pytest.mark.parametrize(
    ("module", "absent"),
    [(f"ruda_optim.fused_adamw.{name}", "torch numpy") for name in PURE]
    + [("ruda_optim", "torch numpy"), ("ruda_optim.fused_adamw", "torch numpy")]
    + [("ruda_optim.fused_adamw.reference", "torch"), ("cases", "torch")],
)
def test_importing_leaves_heavy_packages_out(module, absent) -> None:
    script = f"import sys, {module}; print([name for name in {absent.split()} if name in sys.modules])"
    paths = [str(p) for p in sys.path if p]
    environment = {"PYTHONPATH": ":".join(paths)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("package", [ruda_optim, fused_adamw])
def test_public_names_resolve_and_unknown_ones_do_not(package) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = package.no_such_name
