"""Checkpoints that are not this optimizer's: what they are is said, what converts them, and what would be lost."""

from __future__ import annotations

import collections
import copy
import warnings

import pytest
import torch
from small_runs import adamw, clones, contents, model, run

import ruda_torch
from ruda_optim.fused_adamw import InvalidState
from ruda_torch import migration


def adams(**options) -> dict:
    optimizer = torch.optim.Adam(model(), lr=1e-2, **options)
    run(optimizer, 2)
    return optimizer.state_dict()


def with_state(entry: dict, group: dict | None = None) -> dict:
    saved = adamw(model()).state_dict()
    saved["state"] = {0: entry}
    saved["param_groups"][0].update(group or {})
    return saved


class Quantized(torch.Tensor):
    """Stands for torchao's OptimState8bit."""


Quantized.__module__ = "torchao.optim.subclass_8bit"
QUANTIZED = torch.zeros(17, 5).as_subclass(Quantized)
BNB = {"state1": torch.zeros(17, 5), "state2": torch.zeros(17, 5)}
MOMENTS = {"exp_avg": torch.zeros(17, 5), "exp_avg_sq": torch.zeros(17, 5)}

FOREIGN = {
    "a model": (
        torch.nn.Linear(2, 2).state_dict(),
        "as a model's state dict does; load that with model.load_state_dict",
    ),
    "a whole checkpoint": ({"model": {}, "optimizer": adams(), "step": 3}, "several things; load its 'optimizer'"),
    "something else": ({"epoch": 3}, "must have 'state' and 'param_groups': it has 'epoch'"),
    "nothing": ({}, "it has nothing"),
    "None": (None, "must be an optimizer's state dict, got NoneType"),
    "a list": ([1, 2], "must be an optimizer's state dict, got list"),
    "bitsandbytes": (with_state({"step": 1, **BNB}), r"migration.from_bitsandbytes\(state_dict\)"),
    "bitsandbytes nested": (
        with_state({"step": 1, "__bnb_optimizer_quant_state__": BNB}),
        "migration.from_bitsandbytes",
    ),
    "apex": (with_state(MOMENTS, {"bias_correction": True, "step": 3}), "migration.from_apex.* or from_deepspeed"),
    "optimi": (with_state(MOMENTS, {"decouple_lr": False, "kahan_sum": True}), "migration.from_optimi"),
    "torchao": (
        with_state({"step": 1, "exp_avg": QUANTIZED, "exp_avg_sq": QUANTIZED}),
        r"migration.from_torchao\(state_dict\)",
    ),
    "Adam": (adams(weight_decay=0.1), "Adam's, with weight_decay=0.1 added to the gradient"),
    "SGD": (with_state({"momentum_buffer": torch.zeros(17, 5)}), "has no step, only momentum_buffer; is it an AdamW"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_ours_is_named_and_changes_nothing(name) -> None:
    saved, message = FOREIGN[name]
    optimizer = adamw(model())
    run(optimizer, 2)
    before = contents(optimizer)
    with pytest.raises(InvalidState, match=message):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before
    run(optimizer, 1)


def test_every_converter_that_is_named_exists() -> None:
    for name in ("from_bitsandbytes", "from_apex", "from_deepspeed", "from_optimi", "from_torchao"):
        assert callable(getattr(migration, name))


def test_adam_without_decay_is_adamw_without_decay() -> None:
    parameters = model()
    theirs = torch.optim.Adam(parameters, lr=1e-2)
    run(theirs, 2)
    ours = adamw(clones(parameters))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["decoupled_weight_decay"] is True
    run(theirs, 2, first=2)
    run(ours, 2, first=2)
    for left, right in zip(parameters, ours.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(left, right)


def test_adams_decay_becomes_ours_when_asked_for() -> None:
    saved = copy.deepcopy(adams(weight_decay=0.1))
    saved["param_groups"][0]["decoupled_weight_decay"] = True
    optimizer = adamw(model())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_hook_may_convert_before_anybody_judges() -> None:
    optimizer = adamw(model())
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["optimizer"])
    optimizer.load_state_dict({"optimizer": adamw(model(), lr=0.5).state_dict()})
    assert optimizer.param_groups[0]["lr"] == 0.5


# --------------------------------------------------------------------------------- into an optimizer of torch's steps


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"max_grad_norm": 0.5, "check_finite": False}, [r"clipping \(max_grad_norm=0.5\)"]),
        ({}, [r"the check for NaN and infinity \(check_finite=True\)"]),
        ({"max_grad_norm": 2.0}, ["clipping", "the check for NaN"]),
    ],
)
def test_torchs_step_says_what_it_loses(options, lost) -> None:
    source = adamw(model(), **options)
    run(source, 1)
    plain = ruda_torch.AdamW(model())
    with pytest.warns(UserWarning, match=".*".join(lost)):
        plain.load_state_dict(source.state_dict())
    assert len(plain.state) == 4


@pytest.mark.parametrize("split", [False, True])
def test_torchs_step_says_that_masters_are_lost(split) -> None:
    source = adamw(model(torch.bfloat16), split_master=split, check_finite=False)
    run(source, 1)
    with pytest.warns(UserWarning, match="loses the FP32 masters of half parameters in"):
        ruda_torch.AdamW(model(torch.bfloat16)).load_state_dict(source.state_dict())


def test_nothing_is_said_where_nothing_is_lost() -> None:
    source = adamw(model(), check_finite=False)
    run(source, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ruda_torch.AdamW(model()).load_state_dict(source.state_dict())
        ruda_torch.AdamW(model()).load_state_dict(ruda_torch.AdamW(model()).state_dict())


# ------------------------------------------------------------------------------------------------ somebody's own state


@pytest.mark.parametrize(
    "own",
    [5, [1, 2], [], (), "text", torch.ones(3), [("a", 1)], {"a": 1}, {}, collections.Counter("aab"), None],
    ids=repr,
)
def test_state_that_is_not_ours_is_saved_and_loaded_as_it_is(own) -> None:
    optimizer = adamw(model())
    run(optimizer, 2)
    optimizer.state["mine"] = own
    saved = optimizer.state_dict()
    assert saved["state"]["mine"] is own or type(own) is dict
    assert_same(saved["state"]["mine"], own)
    run(optimizer, 1, first=2)
    loaded = adamw(model())
    loaded.load_state_dict(saved)
    assert_same(loaded.state["mine"], own)
    run(loaded, 1)
    assert_same(loaded.state["mine"], own)


def assert_same(left, right) -> None:
    assert type(left) is type(right)
    assert torch.equal(left, right) if isinstance(right, torch.Tensor) else left == right


def test_a_parameters_state_of_another_kind_is_refused_before_any_write() -> None:
    optimizer = adamw(model())
    run(optimizer, 1)
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first] = [1, 2]
    before = first.clone()
    with pytest.raises(InvalidState, match="the state of parameter 0 of group 0 must be a dict, got list"):
        run(optimizer, 1)
    assert torch.equal(first, before)


# -------------------------------------------------------------------------------------------------------------- AMSGrad


def test_amsgrad_of_a_running_optimizer_stays() -> None:
    for start in (False, True):
        optimizer = adamw(model(), amsgrad=start)
        run(optimizer, 2)
        before = contents(optimizer)
        optimizer.param_groups[0]["amsgrad"] = not start
        with pytest.raises(InvalidState, match=f"convert_amsgrad.*amsgrad={not start}"):
            run(optimizer, 1)
        assert contents(optimizer) == before
        # What the message says helps.
        optimizer.load_state_dict(ruda_torch.convert_amsgrad(optimizer.state_dict(), amsgrad=not start))
        run(optimizer, 1)
        held = [("max_exp_avg_sq" in entry) for entry in optimizer.state.values()]
        assert held == [not start] * 4


def test_a_checkpoint_with_a_stale_maximum_is_refused() -> None:
    """Torch keeps the maximum when somebody turns amsgrad off; turned on again, it would be one of long ago."""
    theirs = torch.optim.AdamW(model(), amsgrad=True)
    run(theirs, 1)
    theirs.param_groups[0]["amsgrad"] = False
    optimizer = adamw(model())
    with pytest.raises(InvalidState, match=r"has a max_exp_avg_sq.*convert_amsgrad\(state_dict, amsgrad=False\)"):
        optimizer.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(ruda_torch.convert_amsgrad(theirs.state_dict(), amsgrad=False))
