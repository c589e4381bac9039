"""Objects that wrap an optimizer by inheriting from its class: what they read is the optimizer's, and so is what they
are told."""

from __future__ import annotations

import collections
import copy
import math

import pytest
import torch
from small_runs import contents, run

import ruda_torch


class LooksUp:
    """As Lightning's LightningOptimizer: nothing of its own but the optimizer, the rest by ``__getattr__``."""

    def __init__(self, optimizer: ruda_torch.AdamW) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copies:
    """As Fabric's _FabricOptimizer: a copy of the optimizer's ``__dict__``, taken when it was wrapped."""

    def __init__(self, optimizer: ruda_torch.AdamW) -> None:
        self.__dict__ = dict(optimizer.__dict__)
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)


WRAPPERS = pytest.mark.parametrize("wrap", [LooksUp, Copies])
READ = (
    *("last_step_skipped", "last_grad_norm", "last_clip_factor", "last_group_norms", "skipped_steps"),
    *("max_grad_norm", "settings", "fused_step"),
)


def wrapped(wrap, **options):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50))
    optimizer = ruda_torch.AdamW([parameter], lr=1e-2, fused_step=True, **options)
    return parameter, optimizer, wrap(optimizer)


@WRAPPERS
def test_everything_is_read_through_a_wrapper(wrap) -> None:
    parameter, optimizer, wrapper = wrapped(wrap, max_grad_norm=0.5)
    assert isinstance(wrapper, ruda_torch.AdamW)
    assert wrapper.state is optimizer.state
    for gradient in (1.0, math.nan, 3.0):
        parameter.grad = torch.full((50,), gradient)
        wrapper.step()
        for name in READ:
            assert str(getattr(wrapper, name)) == str(getattr(optimizer, name)), name
        assert str(wrapper.gradient_report()) == str(optimizer.gradient_report())
    assert wrapper.skipped_steps == 1
    assert wrapper.last_group_norms == wrapper.last_group_norms != ()
    assert "max_grad_norm" not in vars(wrapper)
    assert parameter in wrapper.state
    assert repr(wrapper).partition("(")[2] == repr(optimizer).partition("(")[2]


@WRAPPERS
def test_replaced_state_is_noticed_through_a_wrapper(wrap) -> None:
    parameter, optimizer, wrapper = wrapped(wrap)
    for _ in range(2):
        parameter.grad = torch.ones(50)
        wrapper.step()
    assert not optimizer._live.state_shown
    wrapper.state[parameter]["exp_avg"] = fresh = torch.zeros(50)
    wrapper.step()
    assert fresh.abs().max() > 0, "the step must have written to the tensor that the state holds"
    wrapper.state = collections.defaultdict(dict)
    wrapper.step()
    assert optimizer.state[parameter]["step"] == 1


@WRAPPERS
def test_what_a_wrapper_is_told_reaches_the_optimizer(wrap) -> None:
    parameter, optimizer, wrapper = wrapped(wrap, max_grad_norm=0.5)
    wrapper.max_grad_norm = 0.25
    assert optimizer.max_grad_norm == 0.25
    parameter.grad = torch.ones(50)
    wrapper.step()
    assert optimizer.last_clip_factor == pytest.approx(0.25 / 50**0.5, rel=1e-5)

    other = torch.nn.Parameter(torch.ones(3))
    wrapper.add_param_group({"params": [other], "lr": 0.5})
    other.grad = torch.ones(3)
    wrapper.step()
    assert len(optimizer.last_group_norms) == 2
    assert other[0] < 1.0


@WRAPPERS
def test_a_checkpoint_loaded_through_a_wrapper_reaches_the_optimizer(wrap) -> None:
    parameter, optimizer, wrapper = wrapped(wrap)
    run(optimizer, 2)
    saved = copy.deepcopy(wrapper.state_dict())
    saved["param_groups"][0]["lr"] = 0.125
    twin, target, other = wrapped(wrap)
    other.load_state_dict(saved)
    assert target.param_groups[0]["lr"] == 0.125
    with torch.no_grad():
        twin.copy_(parameter)
    optimizer.param_groups[0]["lr"] = 0.125
    run(optimizer, 2, first=2)
    expected = contents(optimizer)
    run(target, 2, first=2)
    assert contents(target) == expected
