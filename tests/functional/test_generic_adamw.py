"""The generic AdamW of plain tensor operations: against torch and the FP64 reference, and its own contract."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import CASES, Case, check, compare, expected, initial_parameter, stored_gradient

from ruda_optim.fused_adamw import AdamWOptions
from ruda_optim.generic import AdamW, AdamWConfig, Moments

ONE = torch.ones(3)
START = Moments(1, torch.zeros(3), torch.zeros(3), None)

ERRORS = [
    (lambda: AdamWConfig(learning_rate=-1.0), ValueError, "learning_rate must be finite and >= 0, got -1.0"),
    (lambda: AdamWConfig(learning_rate=math.nan), ValueError, "learning_rate must be finite and >= 0, got nan"),
    (lambda: AdamWConfig(learning_rate=math.inf), ValueError, "learning_rate must be finite and >= 0, got inf"),
    (lambda: AdamWConfig(learning_rate="1"), TypeError, "learning_rate must be a number, got '1' of type str"),
    (lambda: AdamWConfig(learning_rate=True), TypeError, "learning_rate must be a number, got True of type bool"),
    (lambda: AdamWConfig(beta1=1.0), ValueError, r"beta1 must be in \[0, 1\), got 1.0"),
    (lambda: AdamWConfig(beta1=-0.5), ValueError, "beta1 must be finite and >= 0, got -0.5"),
    (lambda: AdamWConfig(beta2=1), ValueError, r"beta2 must be in \[0, 1\), got 1"),
    (lambda: AdamWConfig(beta2=None), TypeError, "beta2 must be a number, got None of type NoneType"),
    (lambda: AdamWConfig(epsilon=0), ValueError, "epsilon must be > 0, got 0.0"),
    (lambda: AdamWConfig(epsilon=-1e-8), ValueError, "epsilon must be finite and >= 0, got -1e-08"),
    (lambda: AdamWConfig(weight_decay=-1), ValueError, "weight_decay must be finite and >= 0, got -1"),
    (lambda: AdamWConfig(amsgrad=1), TypeError, "amsgrad must be True or False, got 1"),
    (lambda: AdamWConfig(maximize="no"), TypeError, "maximize must be True or False, got 'no'"),
    (lambda: AdamWConfig(eps=1e-8), TypeError, "unexpected keyword argument 'eps'"),
    (
        lambda: AdamW().step(ONE, torch.ones(1)),
        ValueError,
        r"gradient must have the parameter's shape \(3,\), got \(1,\); nothing is broadcast",
    ),
    (
        lambda: AdamW().step(ONE.int(), ONE),
        TypeError,
        "parameter must have a real floating-point dtype, got torch.int32",
    ),
    (lambda: AdamW().step(ONE, ONE.cfloat()), TypeError, "gradient must have a real .* dtype, got torch.complex64"),
    (
        lambda: AdamW(AdamWConfig(amsgrad=True)).step(ONE, ONE, START),
        ValueError,
        "moments must hold max_second_moment exactly if amsgrad, got amsgrad=True; start without moments",
    ),
    (lambda: AdamW().step(ONE, ONE, START._replace(max_second_moment=ONE)), ValueError, "got amsgrad=False"),
    (
        lambda: AdamW().step(ONE, ONE, START._replace(second_moment=torch.ones(4))),
        ValueError,
        r"second_moment must have the parameter's shape \(3,\), got \(4,\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_bad_values_are_refused(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def arithmetic(options: AdamWOptions) -> dict[str, object]:
    """What of the options changes the numbers of an exact step: not the form in which moments are kept."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name != "moments"}


def test_defaults_are_those_of_the_fused_options() -> None:
    assert dataclasses.asdict(AdamWConfig()) == arithmetic(AdamWOptions())
    assert AdamW().config == AdamWConfig()


def generic(case: Case) -> AdamW:
    return AdamW(AdamWConfig(**arithmetic(case.options)))


def fields(parameter: torch.Tensor, moments: Moments) -> dict[str, torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    found = {name: value for name, value in zip(names, moments[1:], strict=True) if value is not None}
    return {"parameter": parameter, **found}


PLAIN_CASES = [c for c in CASES if c.max_norm is None and c.gradient_scale == 1.0 and c.parameter_dtype == "float32"]


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_agrees_with_torch_and_the_reference_in_fp64(case) -> None:
    optimizer, moments = generic(case), None
    o = case.options
    parameter = torch.from_numpy(initial_parameter(case)).double()
    theirs = torch.nn.Parameter(parameter.clone())
    torch_optimizer = torch.optim.AdamW(
        [theirs],
        lr=o.learning_rate,
        betas=(o.beta1, o.beta2),
        eps=o.epsilon,
        weight_decay=o.weight_decay,
        amsgrad=o.amsgrad,
        maximize=o.maximize,
        foreach=False,
    )
    for want in expected(case, literal=True):
        theirs.grad = torch.from_numpy(stored_gradient(case, want.step)).double()
        torch_optimizer.step()
        parameter, moments = optimizer.step(parameter, theirs.grad, moments)
        assert moments.step == want.step
        state = torch_optimizer.state[theirs]
        for name, value in fields(parameter, moments).items():
            # The bounds of cases.py are linear in the unit roundoff and FP64's is 2^-29 of FP32's; either side errs.
            bound = 2.0 * 2.0**-29 * want.bounds[name] + 1e-300
            what = f"{case}, step {want.step}, {name}"
            compare(f"{what}, reference", value, want.values[name], bound)
            compare(f"{what}, torch", value, theirs if name == "parameter" else state[name], bound)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_agrees_with_the_reference_in_fp32(case) -> None:
    optimizer, moments = generic(case), None
    parameter = torch.from_numpy(initial_parameter(case))
    for want in expected(case, literal=True):
        gradient = torch.from_numpy(stored_gradient(case, want.step)).to(getattr(torch, case.gradient_dtype))
        parameter, moments = optimizer.step(parameter, gradient, moments)
        check(case, want, fields(parameter, moments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_compute_in_fp32_and_round_once(dtype) -> None:
    optimizer = AdamW(AdamWConfig(learning_rate=0.1, epsilon=1e-8))
    parameter = torch.linspace(-2, 2, 33).to(dtype)
    gradient = torch.linspace(1e-4, 1, 33).to(dtype)
    half, moments = optimizer.step(parameter, gradient)
    full, full_moments = optimizer.step(parameter.float(), gradient.float())
    assert half.dtype is dtype
    assert torch.equal(half, full.to(dtype))
    assert moments.second_moment.dtype is torch.float32
    assert torch.equal(moments.second_moment, full_moments.second_moment)


def test_inputs_are_not_written_and_autograd_sees_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    gradient = torch.full((3,), 0.5, requires_grad=True)
    optimizer = AdamW(AdamWConfig(amsgrad=True, weight_decay=0.1))
    _, moments = optimizer.step(parameter, gradient)
    saved = [moment.clone() for moment in moments[1:]]
    new, later = optimizer.step(parameter, gradient, moments)
    assert torch.equal(parameter, torch.ones(3))
    assert torch.equal(gradient, torch.full((3,), 0.5))
    assert all(torch.equal(now, then) for now, then in zip(moments[1:], saved, strict=True))
    assert not any(tensor.requires_grad for tensor in (new, *later[1:]))
    assert parameter.grad is None


def test_amsgrad_lets_nan_through() -> None:
    optimizer = AdamW(AdamWConfig(amsgrad=True))
    parameter, moments = optimizer.step(torch.ones(2), torch.tensor([math.nan, 1.0]))
    parameter, moments = optimizer.step(parameter, torch.ones(2), moments)
    assert parameter.isnan().tolist() == moments.max_second_moment.isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_tensors(shape) -> None:
    new, moments = AdamW().step(torch.ones(shape), torch.ones(shape))
    assert new.shape == moments.first_moment.shape == shape
    assert moments.step == 1


@pytest.mark.parametrize("name", ["AdamW", "AdamWConfig"])
def test_the_first_line_a_newcomer_types_says_where_the_classes_are(name: str) -> None:
    with pytest.raises(ImportError, match=r"from ruda_torch import AdamW.*from ruda_optim\.generic import AdamW"):
        exec(f"from ruda_optim import {name}")
