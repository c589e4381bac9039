"""Checkpoints that do not fit, and failures in the middle of a step or a load: nothing changes, and the run goes on."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from small_runs import adamw, clones, contents, model, run

from ruda_optim.fused_adamw import FusedAdamWError, InvalidState, ShapeMismatch, storage
from ruda_torch import checkpoint, engine


@pytest.mark.parametrize("step", [-1, 2.5, float("nan"), torch.ones(2), "three", None, True], ids=repr)
def test_a_step_count_that_is_none_is_refused(step):
    optimizer = adamw(model())
    run(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["step"] = step
    before = contents(optimizer)
    with pytest.raises(InvalidState, match="step of parameter 2 of group 0 must be"):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before


def broken_checkpoints():
    """(id, what to do to a good checkpoint, error, message)."""

    def entry(name, value):
        return lambda saved: saved["state"][1].update({name: value})

    def drop(name):
        return lambda saved: saved["state"][1].pop(name)

    where = "of parameter 1 of group 0"
    return [
        (
            "shape of exp_avg",
            entry("exp_avg", torch.zeros(4, 3, 3)),
            ShapeMismatch,
            rf"exp_avg {where}.*\(4, 3, 3, 2\)",
        ),
        ("shape of exp_avg_sq", entry("exp_avg_sq", torch.zeros(0)), ShapeMismatch, f"exp_avg_sq {where}"),
        ("shape of master", entry("master", torch.zeros(1)), ShapeMismatch, f"master {where}"),
        ("no exp_avg", drop("exp_avg"), InvalidState, f"state {where} has no exp_avg"),
        ("no exp_avg_sq", drop("exp_avg_sq"), InvalidState, f"state {where} has no exp_avg_sq"),
        ("no step", drop("step"), InvalidState, f"state {where} has no step"),
        ("exp_avg is a number", entry("exp_avg", 1.0), InvalidState, f"exp_avg {where} must be a tensor, got float"),
        ("exp_avg of integers", entry("exp_avg", torch.zeros(4, 3, 3, 2, dtype=torch.int32)), InvalidState, "int32"),
        ("a group more", lambda s: s["param_groups"].append(s["param_groups"][0]), InvalidState, "parameter groups"),
        (
            "a parameter less",
            lambda s: s["param_groups"][0]["params"].pop(),
            InvalidState,
            r"\[4\] parameters, got \[3\]",
        ),
        ("amsgrad", lambda s: s["param_groups"][0].update(amsgrad=True), InvalidState, "convert_amsgrad"),
        ("format", lambda s: s["ruda"].update(format=2), InvalidState, "must have format 1, got 2"),
        ("no format", lambda s: s.update(ruda={}), InvalidState, "must have format 1, got None"),
        ("not a dict", lambda s: s.update(ruda="1"), InvalidState, "must have format 1, got '1'"),
        ("max_grad_norm", lambda s: s["ruda"].update(max_grad_norm=-1.0), InvalidState, "max_grad_norm"),
        ("check_finite", lambda s: s["ruda"].pop("check_finite"), InvalidState, "check_finite"),
    ]


@pytest.mark.parametrize(
    ("damage", "error", "message"), [pytest.param(*rest, id=name) for name, *rest in broken_checkpoints()]
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(damage, error, message):
    optimizer = adamw(model(torch.bfloat16), max_grad_norm=3.0)
    run(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 77.0
    saved["ruda"]["max_grad_norm"] = 5.0
    damage(saved)
    before, groups = contents(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(error, match=message) as caught:
        optimizer.load_state_dict(saved)
    assert isinstance(caught.value, FusedAdamWError)
    assert isinstance(caught.value, ValueError)
    assert contents(optimizer) == before
    assert optimizer.state_dict()["param_groups"] == groups
    assert optimizer.max_grad_norm == 3.0
    run(optimizer, 1)  # and the optimizer goes on


def test_the_name_of_a_parameter_appears_in_the_error():
    named = [("body.weight", model()[0]), ("head.weight", model()[1])]
    optimizer = adamw(named)
    run(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ShapeMismatch, match=r"exp_avg of parameter 1 of group 0 \(head.weight\)"):
        optimizer.load_state_dict(saved)


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("allocations", range(6))
@pytest.mark.parametrize("loaded", [False, True], ids=["first step", "masters after a load"])
def test_out_of_memory_while_allocating_leaves_everything_usable(monkeypatch, allocations, loaded):
    """The first step of four BF16 parameters allocates moments and masters; one of these allocations fails."""
    parameters = model(torch.bfloat16)
    optimizer = adamw(parameters, amsgrad=True)
    if loaded:
        source = torch.optim.AdamW(clones(parameters), amsgrad=True)
        run(source, 1)
        optimizer.load_state_dict(source.state_dict())
    before = contents(optimizer)
    count = itertools.count()

    def failing(original):
        def allocate(*args, **kwargs):
            if next(count) == allocations:
                raise torch.OutOfMemoryError("out of memory (made up)")
            return original(*args, **kwargs)

        return allocate

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", failing(torch.empty_like))
        patch.setattr(torch, "zeros_like", failing(torch.zeros_like))
        patch.setattr(torch.Tensor, "to", failing(torch.Tensor.to))
        gradients = [torch.ones_like(p) for p in parameters]
        count = itertools.count()
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        if loaded and allocations >= len(parameters):  # nothing but one master for each is missing
            optimizer.step()
            return
        with pytest.raises(torch.OutOfMemoryError, match="made up"):
            optimizer.step()
    assert contents(optimizer) == before
    fresh = adamw(model(torch.bfloat16), amsgrad=True)
    if loaded:
        fresh.load_state_dict(source.state_dict())
    run(optimizer, 2)
    run(fresh, 2)
    assert contents(optimizer) == contents(fresh)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("operator", ["adamw_scaled", "analyze_gradient", "decide"])
def test_a_failing_operator_leaves_parameters_and_state_alone(operator, steps_before, monkeypatch):
    """Where the launches are made one by one, as on an accelerator or under a profiler; the native step has none."""
    monkeypatch.setattr(engine, "_observed", lambda: True)
    optimizer, twin = (adamw(model(torch.bfloat16), max_grad_norm=1.0) for _ in range(2))
    run(optimizer, steps_before)
    run(twin, steps_before)
    before = contents(optimizer)
    kernels = storage.select(torch.device("cpu"))

    def fail(*args, **kwargs):
        raise RuntimeError("the launch failed (made up)")

    original = getattr(kernels, operator)
    object.__setattr__(kernels, operator, fail)  # the record is frozen
    try:
        with pytest.raises(RuntimeError, match="made up"):
            run(optimizer, 1, first=steps_before)
    finally:
        object.__setattr__(kernels, operator, original)
    assert contents(optimizer) == before
    run(optimizer, 1, first=steps_before)
    run(twin, 1, first=steps_before)
    assert contents(optimizer) == contents(twin)


def test_a_failure_while_loading_changes_nothing(monkeypatch):
    optimizer = adamw(model(torch.bfloat16))
    run(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    run(optimizer, 1)
    before = contents(optimizer)
    original = checkpoint._convert
    calls = itertools.count()

    def failing(*args):
        if next(calls) == 7:
            raise torch.OutOfMemoryError("out of memory (made up)")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_convert", failing)
        with pytest.raises(torch.OutOfMemoryError, match="made up"):
            optimizer.load_state_dict(saved)
    assert contents(optimizer) == before
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    optimizer.load_state_dict(saved)
    run(optimizer, 1)
