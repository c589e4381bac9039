"""One reading and one check of hyperparameters: in the constructor, a group, an assignment, a checkpoint."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from small_runs import adamw, contents, run

import ruda_torch
from ruda_optim.fused_adamw import InvalidOption, InvalidState
from ruda_torch.hyperparameters import Hyperparameters, group_options


class Listlike:
    """As OmegaConf's ListConfig: a sequence by its methods, not by its class."""

    def __init__(self, *values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


def one():
    return [torch.nn.Parameter(torch.linspace(-1, 1, 9))]


# Values that torch's step computes with, all of them exactly the number 1/2 or 1/4 and 1/2.
TAKEN = [
    *(("lr", value) for value in (0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5]))),
    *(("lr", value) for value in (torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64), Fraction(1, 2))),
    *(("eps", value) for value in (0.5, np.float16(0.5), torch.tensor(0.5))),
    *(("weight_decay", value) for value in (0.5, np.float32(0.5), torch.tensor(0.5), np.array(0.5))),
    *(("betas", value) for value in ((0.25, 0.5), [0.25, 0.5], Listlike(0.25, 0.5), np.array([0.25, 0.5]))),
    *(("betas", value) for value in (np.array([0.25, 0.5], np.float32), torch.tensor([0.25, 0.5]))),
    ("betas", (torch.tensor(0.25), torch.tensor([0.5]))),
]
# What no step can compute with.
REFUSED = [
    *(("lr", value) for value in (-1.0, math.nan, math.inf, "0.1", None, True, torch.ones(2), np.ones(3), 1j)),
    *(("lr", value) for value in (torch.tensor(math.nan), torch.tensor(-1.0), 1e39)),
    *(("eps", value) for value in (0.0, -1e-8, math.nan, 1e-60, torch.tensor(0.0), "1e-8")),
    *(("weight_decay", value) for value in (-0.1, math.nan, math.inf, torch.tensor(-1.0), torch.ones(2))),
    *(("betas", value) for value in (0.9, (0.9,), (0.9, 0.99, 0.999), "ab", {0.9, 0.99}, {0: 0.9, 1: 0.99}, None)),
    *(("betas", value) for value in ((1.0, 0.5), (0.5, 1.0), (-0.1, 0.5), (0.5, math.nan), ("0.9", "0.99"))),
    *(("betas", value) for value in ((True, 0.5), (torch.ones(2), torch.ones(2)), np.ones((2, 2)))),
]
IDS = {"ids": lambda value: value if isinstance(value, str) else type(value).__name__ + repr(value)[:24]}


def built(name, value):
    return adamw(one(), **{name: value})


def in_a_group(name, value):
    return adamw([{"params": one(), name: value}])


def in_a_late_group(name, value):
    optimizer = adamw(one())
    del optimizer.param_groups[0]  # so that all of them hold one group
    optimizer.add_param_group({"params": one(), name: value})
    return optimizer


def assigned(name, value):
    optimizer = adamw(one())
    run(optimizer, 0)
    optimizer.param_groups[0][name] = value
    return optimizer


def loaded(name, value):
    optimizer = adamw(one())
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    optimizer.load_state_dict(saved)
    return optimizer


PLACES = [built, in_a_group, in_a_late_group, assigned, loaded]


@pytest.mark.parametrize(("name", "value"), TAKEN, **IDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_torch_computes_with_is_taken_everywhere(place, name, value) -> None:
    plain = {"lr": 0.5, "eps": 0.5, "weight_decay": 0.5, "betas": (0.25, 0.5)}[name]
    expected, optimizer = adamw(one(), **{name: plain}), place(name, value)
    run(expected, 3)
    run(optimizer, 3)
    assert contents(optimizer) == contents(expected)


@pytest.mark.parametrize(("name", "value"), REFUSED, **IDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_no_step_can_use_is_refused_everywhere(place, name, value) -> None:
    where = {built: "", loaded: "the checkpoint does not fit: group 0: "}.get(place, "group 0: ")
    with pytest.raises(
        InvalidState if place is loaded else InvalidOption, match=rf"^{where}{name}(\[[01]\])? must be "
    ):
        run(place(name, value), 1)


@pytest.mark.parametrize(("name", "value"), REFUSED, **IDS)
def test_a_refused_checkpoint_changes_nothing(name, value) -> None:
    optimizer = adamw(one(), max_grad_norm=1.0)
    run(optimizer, 2)
    before, groups = contents(optimizer), copy.deepcopy(optimizer.param_groups[0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0][name] = value
    saved["ruda"]["max_grad_norm"] = 2.0
    with pytest.raises(InvalidState):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before
    assert optimizer.max_grad_norm == 1.0
    assert {**optimizer.param_groups[0], "params": 0} == {**groups, "params": 0}


@pytest.mark.parametrize("value", [1, np.True_])
@pytest.mark.parametrize("place", [built, in_a_group, loaded])
def test_flags_may_be_numbers(place, value) -> None:
    expected, optimizer = adamw(one(), maximize=True), place("maximize", value)
    run(expected, 2)
    run(optimizer, 2)
    assert contents(optimizer) == contents(expected)


@pytest.mark.parametrize("value", ["no", 2, None])
def test_flags_that_are_none_are_refused(value) -> None:
    for place in (in_a_group, assigned, loaded):
        with pytest.raises(ValueError, match="group 0: maximize must be True or False"):
            run(place("maximize", value), 1)


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_a_checkpoint_without_a_hyperparameter_is_refused(name) -> None:
    optimizer = adamw(one())
    saved = optimizer.state_dict()
    del saved["param_groups"][0][name]
    with pytest.raises(InvalidState, match=f"group 0 of the checkpoint has no {name}"):
        optimizer.load_state_dict(saved)


def test_the_product_is_named_as_the_caller_names_it() -> None:
    with pytest.raises(InvalidOption, match=r"lr \* weight_decay must be finite in FP32"):
        adamw(one(), lr=1e30, weight_decay=1e30)


def test_betas_of_any_kind_are_kept_as_a_tuple_that_can_be_saved() -> None:
    for betas in (Listlike(0.25, 0.5), np.array([0.25, 0.5]), [0, 0.5]):
        kept = adamw([{"params": one()}, {"params": one(), "betas": betas}], betas=betas)
        for group in kept.param_groups:
            assert type(group["betas"]) is tuple
            assert [type(beta) for beta in group["betas"]] == [float, float]


def group(**options):
    return {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
        **options,
    }


def test_options_are_the_same_object_while_nothing_changes() -> None:
    known, live = Hyperparameters(), group()
    first = known.read(0, live)
    assert known.read(0, live) is first
    live["lr"] = float("0.1")  # an equal number, as a scheduler writes it
    assert known.read(0, live) is first
    live["betas"] = [0.9, 0.99]
    assert known.read(0, live) is first
    live["betas"][1] = 0.5
    assert known.read(0, live).beta2 == 0.5
    for name, value in (("lr", 0.2), ("eps", 1e-6), ("weight_decay", 0.1), ("amsgrad", True), ("maximize", True)):
        before = known.read(0, live)
        live[name] = value
        after = known.read(0, live)
        assert after != before
        assert after == group_options(0, live)
    assert known.read(1, live) == after
    assert known.read(1, live) is not after


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_a_number_that_changes_in_place_is_heard(make) -> None:
    known, live = Hyperparameters(), group(lr=make(0.5))
    for _ in range(2):
        assert known.read(0, live).learning_rate == 0.5
    live["lr"][...] = 0.25
    assert known.read(0, live).learning_rate == 0.25


def test_a_tensor_may_stand_unread() -> None:
    """As on an accelerator: a meta tensor has no value that could be read."""
    meta = torch.empty((), device="meta")
    live = group(lr=meta, betas=(meta, meta), eps=meta, weight_decay=meta)
    known = Hyperparameters()
    assert known.read(0, live, look=False) is known.read(0, live, look=False)
    assert known.read(0, {**live, "lr": 0.5}, look=False).learning_rate == 0.5
    with pytest.raises(InvalidOption, match=r"group 0: lr must be one number, got a tensor of shape \(2,\)"):
        known.read(0, {**live, "lr": torch.empty(2, device="meta")}, look=False)
    live = group(lr=torch.tensor(0.5))
    known.read(0, live, look=False)
    assert known.read(0, live).learning_rate == 0.5  # and the placeholder is not taken for the value


# ----------------------------------------------------------------------------------------------- settings and groups


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_grad_norm", 1e-3), ("fused_step", True), ("check_finite", False), ("split_master", True)),
        ("hierarchical_stats", True),
    ],
)
def test_a_setting_is_no_option_of_a_group(name, value, late, fused_step) -> None:
    def build():
        if late:
            ruda_torch.AdamW(one(), fused_step=fused_step).add_param_group({"params": one(), name: value})
        else:
            ruda_torch.AdamW([{"params": one()}, {"params": one(), name: value}], fused_step=fused_step)

    with pytest.raises(InvalidOption, match=f"group 1: {name} is no option of a group: .*; pass it to AdamW"):
        build()


def test_a_setting_put_into_a_group_later_stops_the_step() -> None:
    optimizer = adamw(one())
    run(optimizer, 2)
    before = contents(optimizer)
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(InvalidOption, match="group 0: max_grad_norm is no option of a group: the norm is global"):
        run(optimizer, 1)
    assert contents(optimizer) == before
    saved = adamw(one()).state_dict()
    saved["param_groups"][0]["max_grad_norm"] = 1.0
    with pytest.raises(InvalidState, match="the norm is global"):
        adamw(one()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"foreach": True}, "foreach=True chooses one of torch's steps"),
        ({"fused": True}, "fused=True chooses one of torch's steps"),
        ({"differentiable": True}, "differentiable=True chooses one of torch's steps"),
        ({"capturable": True}, "capturable=True is no option of a group"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False is Adam with an L2 term"),
    ],
)
def test_a_switch_of_torchs_in_a_group_is_heard_or_refused(option, message) -> None:
    with pytest.raises(InvalidOption, match=f"group 0: {message}"):
        adamw([{"params": one(), **option}])
    ruda_torch.AdamW([{"params": one(), **option}])
    adamw([{"params": one(), "foreach": None, "fused": False, "capturable": False, "decoupled_weight_decay": True}])


@pytest.mark.parametrize("setting", [{"check_finite": False}, {"split_master": False}, {"max_grad_norm": 0.0}], ids=str)
def test_every_setting_needs_the_fused_step(setting) -> None:
    (name,) = setting
    with pytest.raises(InvalidOption, match=f"{name}=.* needs fused_step=True"):
        ruda_torch.AdamW(one(), **setting)


def test_settings_are_kept_as_plain_numbers() -> None:
    optimizer = adamw(one(), max_grad_norm=np.float32(0.5))
    assert type(optimizer.max_grad_norm) is float
    optimizer.max_grad_norm = 2
    assert type(optimizer.state_dict()["ruda"]["max_grad_norm"]) is float


def test_the_settings_show() -> None:
    text = repr(adamw(one(), max_grad_norm=0.5))
    assert "    fused_step: True\n" in text
    assert "    max_grad_norm: 0.5\n" in text
    assert "    split_master: None\nParameter Group 0\n" in text
    assert "fused_step" not in repr(ruda_torch.AdamW(one()))
