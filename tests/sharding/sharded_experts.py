"""Checks of sharded runs: ranks that hold different parameters (experts, ZeRO-1), and ranks that hold none."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from sharded_models import batches, build, full, loss_of, same_on_all_ranks
from sharded_worker import Context, check
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import ruda_torch
from ruda_optim.fused_adamw import InvalidOption, InvalidState


def _dense_and_expert(context: Context, placed: str) -> tuple[list[nn.Parameter], float]:
    """A dense parameter on all ranks and an expert per rank or per pair of ranks; the true norm of all gradients."""
    mesh = context.mesh()
    dense = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    dense.grad = distribute_tensor(torch.full((4, 3), 0.5), mesh, [Shard(0)])
    squares = 12 * 0.25
    if placed == "plain":
        expert = nn.Parameter(torch.ones(5))
        expert.grad = torch.full((5,), 1.0 + context.rank)
        squares += sum(5 * (1.0 + rank) ** 2 for rank in range(context.world))
    else:
        pair = context.mesh((2, context.world // 2), ("experts", "shards"))["shards"]
        number = context.rank // (context.world // 2)
        expert = nn.Parameter(distribute_tensor(torch.ones(5, 2), pair, [Shard(0)]))
        expert.grad = distribute_tensor(torch.full((5, 2), 1.0 + number), pair, [Shard(0)])
        squares += 10 * (1.0 + 4.0)
    return [dense, expert], math.sqrt(squares)


@check(2, 4)
def experts_are_noticed_and_counted(context: Context) -> None:
    """Experts that look like copies would count once for all; told apart, the norm is that of all of them."""
    for placed in ("plain", "sharded"):
        parameters, norm = _dense_and_expert(context, placed)
        optimizer = ruda_torch.AdamW(parameters, lr=0.5, fused_step=True)
        before = full(parameters[0]).clone()
        with pytest.raises(InvalidState, match=r"have different norms on different ranks.*ruda_torch\.mark_distinct"):
            optimizer.step()
        assert not optimizer.state
        assert torch.equal(full(parameters[0]), before)

        ruda_torch.mark_distinct(parameters[1:])
        optimizer = ruda_torch.AdamW(parameters, lr=0.5, fused_step=True, max_grad_norm=1.0)
        optimizer.step()
        assert math.isclose(optimizer.last_grad_norm, norm, rel_tol=1e-6)
        same_on_all_ranks(optimizer.last_grad_norm, optimizer.last_clip_factor)
        # An expert that no token reached has no gradient on its ranks; the others go on, and it skips with them.
        if context.rank == 0 and placed == "plain":
            parameters[1].grad = None
        if context.rank == context.world - 1:
            parameters[0].grad.to_local()[0, 0] = math.nan
        optimizer.step()
        assert optimizer.last_step_skipped
    for copies in (0, True, 1.0):
        with pytest.raises(InvalidOption, match="copies must be a whole number"):
            ruda_torch.mark_distinct(parameters, copies=copies)


@check(4)
def experts_with_copies(context: Context) -> None:
    """Two experts, each held by two ranks that average its gradient; without any DTensor beside them."""
    expert = nn.Parameter(torch.ones(5))
    expert.grad = torch.full((5,), 1.0 + context.rank % 2)
    ruda_torch.mark_distinct([expert], copies=2)
    optimizer = ruda_torch.AdamW([expert], fused_step=True)
    optimizer.step()
    assert math.isclose(optimizer.last_grad_norm, math.sqrt(5 * (1 + 4)), rel_tol=1e-6)


@check(2)
def copies_may_differ_in_roundings(context: Context) -> None:
    mesh = context.mesh()
    dense, plain = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])), nn.Parameter(torch.ones(64))
    dense.grad, plain.grad = torch.ones_like(dense), torch.full((64,), 1.0 + context.rank * 2.0**-16)
    optimizer = ruda_torch.AdamW([dense, plain], fused_step=True)
    optimizer.step()
    assert math.isclose(optimizer.last_grad_norm, math.sqrt(68), rel_tol=2.0**-16)


def _zero(model: nn.Module, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because its module warns when imported

    make = functools.partial(ruda_torch.AdamW, fused_step=True, **options)
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=1e-2)


@check(2)
def zero_redundancy_optimizer(context: Context) -> None:
    """Every rank updates parameters of its own; norm, clip factor and decision are those of all of them."""
    model, alone = build(), build()
    wrapper = _zero(model, max_grad_norm=0.25)
    optimizer = ruda_torch.AdamW(alone.parameters(), lr=1e-2, fused_step=True, max_grad_norm=0.25)
    for index, x in enumerate(batches(4)):
        for some in (model, alone):
            loss_of(some, x).backward()
        if index == 2:  # a gradient of a parameter that only rank 0 updates
            bad = wrapper.optim.param_groups[0]["params"][0]
            if context.rank == 0:
                bad.grad.view(-1)[0] = math.nan
            alone.head.bias.grad[0] = math.nan
        wrapper.step()
        optimizer.step()
        assert wrapper.optim.last_step_skipped == optimizer.last_step_skipped == (index == 2)
        if index != 2:
            assert math.isclose(wrapper.optim.last_grad_norm, optimizer.last_grad_norm, rel_tol=1e-6)
        same_on_all_ranks(wrapper.optim.last_grad_norm, wrapper.optim.last_clip_factor)
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            # The norms' last bits differ, which moves clipped gradients below 0.25 by 2 u: far below 1e-6 of lr.
            assert float((parameter - other).detach().abs().max()) <= 1e-6
            parameter.grad = other.grad = None
    with pytest.raises(InvalidOption, match=r"fused_step is no option of a group.*functools\.partial"):
        type(wrapper)(model.parameters(), optimizer_class=ruda_torch.AdamW, fused_step=True)
    # An error on one rank is one on all, here too.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if context.rank == 1:
        wrapper.optim.param_groups[0]["params"][0].grad = None
        wrapper.optim.state[wrapper.optim.param_groups[0]["params"][1]].pop("exp_avg")
    with pytest.raises(InvalidState, match="must have step" if context.rank == 1 else "1 of 2 ranks could not"):
        wrapper.step()


@check(2)
def a_rank_of_zero_without_parameters(context: Context) -> None:
    layer = nn.Linear(3, 1, bias=False)
    wrapper = _zero(layer)
    layer.weight.grad = torch.full((1, 3), 2.0)
    wrapper.step()
    wrapper.step()
    assert len(wrapper.optim.param_groups[0]["params"]) == 1 - context.rank
    assert math.isclose(wrapper.optim.last_grad_norm, math.sqrt(12), rel_tol=1e-6)


@check(2)
def zero_redundancy_checkpoints(context: Context) -> None:
    model, other = build(), build()
    wrapper, fresh = _zero(model), _zero(other)
    for x in batches(2):
        loss_of(model, x).backward()
        wrapper.step()
        wrapper.zero_grad()
    wrapper.consolidate_state_dict(to=0)
    saved = [wrapper.state_dict() if context.rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    fresh.load_state_dict(saved[0])
    for mine, theirs in zip(
        wrapper.optim.param_groups[0]["params"], fresh.optim.param_groups[0]["params"], strict=True
    ):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(wrapper.optim.state[mine][key], fresh.optim.state[theirs][key])


@check(4)
def a_rank_outside_of_the_mesh_takes_no_part(context: Context) -> None:
    mesh = DeviceMesh("cpu", [0, 1, 3])
    parameter = nn.Parameter(distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]))
    optimizer = ruda_torch.AdamW([parameter], lr=0.5, fused_step=True, max_grad_norm=1.0)
    for _ in range(1 if context.rank == 2 else 3):
        parameter.grad = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        optimizer.step()
        if context.rank != 2:
            assert math.isclose(optimizer.last_grad_norm, math.sqrt(12), rel_tol=1e-6)


@check(4)
def all_ranks_choose_the_same_of_two_equal_meshes(context: Context) -> None:
    """Two stages; each has a 1-D mesh for dense layers and a 2-D one for experts over the same two ranks.

    A set of meshes has another order in each process, because hashes do; here the orders differ by force.
    """
    stages = context.mesh((2, 2), ("stage", "dense"))["dense"], context.mesh((2, 1, 2), ("stage", "a", "b"))["a", "b"]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)] * mesh.ndim)) for mesh in stages]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for odd in (False, True):
        hashes = {id(mesh): (index + odd * context.rank) % 2 for index, mesh in enumerate(stages)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceMesh, "__hash__", lambda mesh, hashes=hashes: hashes.get(id(mesh), 0))
            optimizer = ruda_torch.AdamW(parameters, fused_step=True)
            optimizer.step()
        assert math.isclose(optimizer.last_grad_norm, 4.0, rel_tol=1e-6)
