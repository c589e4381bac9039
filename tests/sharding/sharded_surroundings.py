"""Checks of sharded runs: what happens around the step, and what stands in for ranks and memory."""

from __future__ import annotations

import math

import pytest
import torch
from sharded_models import batches, build, copy_of, fsdp, loss_of, optimizer_of, part_of_batch
from sharded_worker import Context, check
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

import ruda_torch
from ruda_optim.fused_adamw import InvalidState


@check(2)
def an_error_before_the_step_reaches_all_ranks(context: Context) -> None:
    """A closure or a hook that raises on one rank must not leave the other ranks waiting in the sum."""
    mesh = context.mesh()
    model = fsdp(build(), mesh)
    optimizer = optimizer_of(model)
    x = part_of_batch(next(batches(1)), mesh, ("dp",))

    def closure():
        loss = loss_of(model, x)
        loss.backward()
        if context.rank == 1 and spoil:
            raise ArithmeticError("spoiled")
        return loss

    def hook(*_):
        if context.rank == 1 and spoil:
            raise ArithmeticError("spoiled")

    for first in (True, False):  # also in the very first step
        for arguments, hooked in (((closure,), False), ((), True)):
            spoil = True
            handle = optimizer.register_step_pre_hook(hook) if hooked else None
            before = copy_of(model)
            with pytest.raises(
                ArithmeticError if context.rank == 1 else InvalidState,
                match="spoiled" if context.rank == 1 else "1 of 2 ranks could not take this step",
            ):
                optimizer.step(*arguments)
            assert all(map(torch.equal, copy_of(model), before))
            spoil = False
            if not first:
                optimizer.step(*arguments)
                assert not all(map(torch.equal, copy_of(model), before))
            if handle is not None:
                handle.remove()
    # The sum of the step is over when a hook behind it raises: no other is sent after it.
    spoil = True
    handle = optimizer.register_step_post_hook(hook)
    try:
        optimizer.step()
        assert context.rank == 0
    except ArithmeticError:
        assert context.rank == 1
    handle.remove()
    optimizer.step()


@check(2)
def another_number_of_groups_is_an_error_on_all(context: Context) -> None:
    """The message has room for the groups, so its length follows from what the ranks agreed on."""
    for count in (2, 12):  # within the room that every message has, and beyond it
        parameters = [nn.Parameter(distribute_tensor(torch.ones(4), context.mesh(), [Shard(0)])) for _ in range(12)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        mine = count if context.rank == 1 else 1
        groups = [{"params": parameters[: 13 - mine]}, *({"params": [p]} for p in parameters[13 - mine :])]
        optimizer = ruda_torch.AdamW(groups, fused_step=True)
        for _ in range(2):
            with pytest.raises(InvalidState, match="do not have the same parameter groups"):
                optimizer.step()
        assert not optimizer.state
        optimizer = ruda_torch.AdamW(parameters, fused_step=True)
        optimizer.step()
        if context.rank == 1:
            more = nn.Parameter(torch.ones(3))
            more.grad = torch.ones(3)
            optimizer.add_param_group({"params": [more]})
        with pytest.raises(InvalidState, match="the 2 ranks do not have"):
            optimizer.step()
    optimizer = ruda_torch.AdamW([{"params": [p]} for p in parameters], fused_step=True)
    optimizer.step()
    assert math.isclose(optimizer.last_grad_norm, math.sqrt(48), rel_tol=1e-6)
    assert optimizer.last_group_norms == (2.0,) * 12


@check(2)
def the_parameters_of_gathered_modules_count_as_held(context: Context) -> None:
    """After a forward pass the root stays gathered: its modules hold other parameters, FSDP holds the optimizer's."""
    mesh = context.mesh()
    x = part_of_batch(next(batches(1)), mesh, ("dp",))
    average = fsdp(build(), mesh)  # of the same shapes, as an EMA model has
    for frozen in average.parameters():
        frozen.requires_grad_(False)
    model = fsdp(build(), mesh)
    optimizer = optimizer_of(model)
    with torch.no_grad():
        model(x)
    assert any(type(parameter) is nn.Parameter for parameter in model.parameters()), "otherwise this shows nothing"
    optimizer.step()  # no gradients, nothing to do
    model.head.weight.requires_grad_()
    (model.up(x).square().mean()).backward()  # norm, down and head stay out of this step
    optimizer.step()
    assert len(optimizer.state) == 2
    assert average is not None


@check(2)
def memory_runs_out_on_one_rank(context: Context) -> None:
    """What a step needs is allocated before the sum, so that no rank updates when another cannot."""
    mesh = context.mesh()
    for dtype in (torch.float32, torch.bfloat16):
        model = fsdp(build(dtype), mesh)
        optimizer = optimizer_of(model)
        loss_of(model, part_of_batch(next(batches(1, dtype)), mesh, ("dp",))).backward()
        before = copy_of(model)
        with pytest.MonkeyPatch.context() as patch:
            if context.rank == 1:
                for name in ("empty_like", "zeros_like"):
                    patch.setattr(torch, name, _no_memory)
            with pytest.raises(
                torch.OutOfMemoryError if context.rank == 1 else InvalidState,
                match="none left" if context.rank == 1 else "1 of 2 ranks could not take this step",
            ):
                optimizer.step()
        assert all(map(torch.equal, copy_of(model), before))
        assert not optimizer.state
        optimizer.step()
        assert not all(map(torch.equal, copy_of(model), before))


def _no_memory(*_, **__):
    raise torch.OutOfMemoryError("none left")


@check(2)
def state_of_parameters_on_meta(context: Context) -> None:
    """A checkpoint's layout is asked for before the weights have memory: shapes come of it, as with torch's."""
    mesh = context.mesh()
    for options in ({}, {"amsgrad": True}):
        with torch.device("meta"):
            model, other = (fsdp(type(build())(), mesh) for _ in range(2))
        ours = get_optimizer_state_dict(model, optimizer_of(model, **options))
        theirs = get_optimizer_state_dict(other, torch.optim.AdamW(other.parameters(), **options))
        assert ours["state"].keys() == theirs["state"].keys()
        for name, entry in theirs["state"].items():
            assert ours["state"][name].keys() == entry.keys()
            for key, value in entry.items():
                mine = ours["state"][name][key]
                assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device), (name, key)
