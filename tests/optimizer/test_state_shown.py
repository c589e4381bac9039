"""Who may have changed the state: steps compare it only once somebody was handed it."""

from __future__ import annotations

import collections
import copy

import torch

import ruda_torch


def stepped(**options) -> tuple[torch.nn.Parameter, ruda_torch.AdamW]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50))
    optimizer = ruda_torch.AdamW([parameter], lr=1e-2, fused_step=True, **options)
    for _ in range(2):
        parameter.grad = torch.linspace(1, -1, 50)
        optimizer.step()
    return parameter, optimizer


def test_steps_and_checkpoints_show_nothing():
    _, optimizer = stepped(max_grad_norm=1.0)
    assert not optimizer._live.state_shown
    saved = optimizer.state_dict()
    assert not optimizer._live.state_shown
    _, other = stepped()
    other.load_state_dict(saved)
    assert not other._live.state_shown


def test_a_replaced_tensor_is_noticed_however_late():
    parameter, optimizer = stepped()
    entry = optimizer.state[parameter]
    optimizer.step()
    optimizer.step()
    fresh = torch.zeros(50)
    entry["exp_avg"] = fresh
    optimizer.step()
    assert entry["exp_avg"] is fresh
    assert fresh.abs().max() > 0, "the step must have written to the tensor that the state holds"


def test_a_state_dict_cannot_put_tensors_into_the_state():
    parameter, optimizer = stepped()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(50)
    before = copy.deepcopy(optimizer.state[parameter]["exp_avg"])
    assert before.abs().max() > 0
    assert optimizer.state_dict()["state"][0]["exp_avg"] is optimizer.state[parameter]["exp_avg"]


def test_new_memory_behind_a_saved_tensor_is_noticed():
    """A state dict shares the tensors, as torch's does, and a tensor can be given other memory."""
    parameter, optimizer = stepped()
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert not optimizer._live.state_shown
    moment.data = torch.zeros(50)
    optimizer.step()
    assert moment.abs().max() > 0
    assert optimizer.state[parameter]["exp_avg"] is moment


def test_hooks_that_see_the_state_count():
    _, optimizer = stepped()
    held = []
    optimizer.register_state_dict_post_hook(lambda _, saved: held.append(saved["state"][0]))
    optimizer.state_dict()
    assert optimizer._live.state_shown
    held[0]["exp_avg"] = fresh = torch.zeros(50)
    optimizer.step()
    assert fresh.abs().max() > 0


def test_loading_hooks_that_see_the_state_count():
    parameter, optimizer = stepped()
    saved = optimizer.state_dict()
    held = []
    handle = optimizer.register_load_state_dict_post_hook(lambda loaded: held.append(loaded.state[parameter]))
    optimizer.load_state_dict(saved)
    assert optimizer._live.state_shown
    handle.remove()
    optimizer.step()
    held[0]["exp_avg"] = fresh = torch.zeros(50)
    optimizer.step()
    assert fresh.abs().max() > 0


def test_an_assigned_state_is_noticed():
    """Emptying the state by assignment is how training loops restart an optimizer."""
    parameter, optimizer = stepped()
    optimizer.state = collections.defaultdict(dict)
    parameter.grad = torch.ones(50)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 1
    _, fresh = stepped()
    assert not fresh._live.state_shown, "making an optimizer does not count"
