"""What travels with a checkpoint besides tensors: settings, switches, load and save hooks; copies of the optimizer."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from small_runs import adamw, contents, model, run, saved_and_loaded

import ruda_torch


def test_settings_come_from_the_checkpoint_and_switches_stay():
    source = adamw(model(), lr=0.5, betas=(0.8, 0.9), max_grad_norm=2.0, check_finite=False, hierarchical_stats=True)
    source.param_groups[0]["lr"] = 0.25
    loaded = adamw(model())
    loaded.load_state_dict(source.state_dict())
    assert loaded.max_grad_norm == 2.0
    assert loaded.settings.check_finite is False
    assert loaded.settings.hierarchical_stats is False  # a switch
    group = loaded.param_groups[0]
    assert (group["lr"], tuple(group["betas"])) == (0.25, (0.8, 0.9))

    foreign = torch.optim.AdamW(model(), lr=0.125, foreach=True)
    kept = adamw(model(), max_grad_norm=4.0)
    kept.load_state_dict(foreign.state_dict())
    assert kept.max_grad_norm == 4.0
    assert kept.param_groups[0]["lr"] == 0.125
    assert not kept.param_groups[0]["foreach"]
    assert kept.fused_step
    run(kept, 1)

    captured = adamw(model(), capturable=True)  # for accelerators, but it loads anywhere
    captured.load_state_dict(kept.state_dict())
    assert captured.param_groups[0]["capturable"] is True
    kept.load_state_dict(captured.state_dict())
    assert kept.param_groups[0]["capturable"] is False
    run(kept, 1)


def test_the_settings_entry_loads_with_weights_only():
    optimizer = adamw(model(), max_grad_norm=1.5, lr=torch.tensor(0.1))
    run(optimizer, 1)
    saved = saved_and_loaded(optimizer.state_dict(), "torch.save")
    loaded = adamw(model(), lr=torch.tensor(0.5))
    loaded.load_state_dict(saved)
    assert loaded.max_grad_norm == 1.5
    assert loaded.param_groups[0]["lr"] == torch.tensor(0.1)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_carry_settings_and_go_on_with_the_same_bits(how):
    optimizer = adamw(model(torch.bfloat16), max_grad_norm=0.5, hierarchical_stats=True, split_master=True)
    run(optimizer, 2)
    twin = how(optimizer)
    assert type(twin) is ruda_torch.AdamW
    assert twin.settings == optimizer.settings
    assert twin.fused_step
    assert twin.skipped_steps == 0
    run(optimizer, 2, first=2)
    before = contents(optimizer)
    run(twin, 2, first=2)
    assert contents(twin) == before
    scaler = torch.amp.GradScaler("cpu")  # the copy still tells scalers what it can do
    p = twin.param_groups[0]["params"][0]
    twin.zero_grad()
    scaler.scale(p.sum()).backward()
    gradient = p.grad.clone()
    scaler.step(twin)
    assert torch.equal(p.grad, gradient)


def test_convert_amsgrad_changes_a_copy():
    optimizer = adamw(model(), amsgrad=True)
    run(optimizer, 2)
    saved = optimizer.state_dict()
    before = str(saved)
    off = ruda_torch.convert_amsgrad(saved, amsgrad=False)
    assert str(saved) == before
    assert all("max_exp_avg_sq" not in entry for entry in off["state"].values())
    assert off["ruda"] == saved["ruda"]
    plain = adamw(model())
    plain.load_state_dict(off)
    run(plain, 1)
    on = ruda_torch.convert_amsgrad(plain.state_dict(), amsgrad=True)
    optimizer.load_state_dict(on)
    for state in optimizer.state.values():
        assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])
    same = ruda_torch.convert_amsgrad(saved, amsgrad=True)
    assert str(same) == str(saved)


def test_load_hooks_see_and_may_alter_the_checkpoint():
    source = adamw(model())
    run(source, 2)
    saved = source.state_dict()
    seen = []

    def by_return(optimizer, incoming):
        seen.append(("pre", sorted(incoming), optimizer is loaded))
        entry = {**incoming["state"][0], "exp_avg": torch.full((17, 5), 5.0)}
        return {
            **incoming,
            "state": {**incoming["state"], 0: entry},
            "ruda": {**incoming["ruda"], "max_grad_norm": 9.0},
        }

    def in_place(_, incoming):
        incoming["param_groups"] = [{**group, "lr": 0.75} for group in incoming["param_groups"]]

    def after(optimizer):
        first = optimizer.param_groups[0]["params"][0]
        seen.append(("post", optimizer.state[first]["exp_avg"][0, 0].item(), len(optimizer.state)))
        optimizer.state[first]["exp_avg"].zero_()

    loaded = adamw(model())
    loaded.register_load_state_dict_pre_hook(by_return)
    loaded.register_load_state_dict_pre_hook(in_place)
    loaded.register_load_state_dict_post_hook(after)
    for _ in range(2):
        seen.clear()
        loaded.load_state_dict(saved)
        assert seen == [("pre", ["param_groups", "ruda", "state"], True), ("post", 5.0, 4)]
    assert loaded.param_groups[0]["lr"] == 0.75
    assert loaded.max_grad_norm == 9.0
    assert not loaded.state[loaded.param_groups[0]["params"][0]]["exp_avg"].any()
    assert source.param_groups[0]["lr"] == 1e-2
    assert len(loaded._optimizer_load_state_dict_pre_hooks) == 2  # ours were taken off again
    assert len(loaded._optimizer_load_state_dict_post_hooks) == 1


def test_save_hooks_see_our_entry():
    optimizer = adamw(model(), max_grad_norm=1.0)
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "epoch": 3})
    saved = optimizer.state_dict()
    assert saved["epoch"] == 3
    assert saved["ruda"]["max_grad_norm"] == 1.0
