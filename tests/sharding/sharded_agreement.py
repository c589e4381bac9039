"""Checks of sharded runs: all ranks take the same decision, and what goes wrong on one rank is an error on all."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from sharded_models import (
    average_plain_gradients,
    batches,
    build,
    copy_of,
    fsdp,
    full,
    loss_of,
    optimizer_of,
    part_of_batch,
    partly_plain,
    same_on_all_ranks,
    state_copy,
    tensor_parallel,
)
from sharded_worker import Context, check
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ruda_torch
import ruda_torch.engine
from ruda_optim.fused_adamw import InvalidOption, InvalidState, InvalidTensor
from ruda_torch.ranks import find
from ruda_torch.reduction import Reduction


def _model_with_gradients(context: Context, shard=fsdp, **options):
    mesh = context.mesh()
    model = shard(build(), mesh)
    optimizer = optimizer_of(model, **options)
    loss_of(model, part_of_batch(next(batches(1)), mesh, ("dp",))).backward()
    average_plain_gradients(model)
    return model, optimizer


def _unchanged(model: nn.Module, optimizer: ruda_torch.AdamW, parameters, state) -> bool:
    now = state_copy(optimizer)
    return all(map(torch.equal, copy_of(model), parameters)) and all(
        all(torch.equal(full(a[key]), full(b[key])) for key in a) for a, b in zip(now, state, strict=True)
    )


@check(2, 4)
def nan_on_one_rank_skips_on_all(context: Context) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        model, optimizer = _model_with_gradients(context)
        parameters = copy_of(model)
        gradient = model.down.weight.grad.to_local()
        original = float(gradient[-1, -1])
        if context.rank == context.world - 1:
            gradient[-1, -1] = bad
        optimizer.step()  # the very first step
        assert optimizer.last_step_skipped
        assert optimizer.last_grad_norm == math.inf
        assert optimizer.last_group_norms[0] == math.inf
        assert math.isfinite(optimizer.last_group_norms[1]), "the group without the bad element"
        assert not optimizer.state
        assert _unchanged(model, optimizer, parameters, [])
        if context.rank == context.world - 1:
            gradient[-1, -1] = original
        optimizer.step()
        assert not optimizer.last_step_skipped
        parameters, state = copy_of(model), state_copy(optimizer)
        if context.rank == 0:
            gradient[0, 0] = bad
        optimizer.step()  # with state and kept tables
        assert optimizer.last_step_skipped
        assert optimizer.skipped_steps == 2
        assert _unchanged(model, optimizer, parameters, state)


@check(2)
def an_unchecked_infinity_clips_everywhere(context: Context) -> None:
    """With check_finite=False the step happens; max_norm / infinity = 0 is the factor on every rank."""
    model, optimizer = _model_with_gradients(context, check_finite=False, max_grad_norm=1.0)
    if context.rank == 1:
        model.down.weight.grad.to_local()[0, 0] = math.inf
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert optimizer.last_clip_factor == 0.0
    assert bool(torch.isnan(full(model.down.weight)).any()), "infinity times 0"
    assert int(torch.isnan(full(model.down.weight)).sum()) == 1


@check(2)
def found_inf_on_one_rank_skips_on_all(context: Context) -> None:
    for check_finite in (True, False):
        model, optimizer = _model_with_gradients(context, check_finite=check_finite)
        parameters = copy_of(model)
        optimizer.found_inf = torch.tensor(float(context.rank == 1))
        optimizer.step()
        assert optimizer.last_step_skipped
        assert optimizer.skipped_steps == 1
        assert _unchanged(model, optimizer, parameters, [])
        optimizer.found_inf.zero_()
        optimizer.step()
        assert not optimizer.last_step_skipped


@check(2, 4)
def none_gradients_on_one_rank_raise_on_all(context: Context) -> None:
    model, optimizer = _model_with_gradients(context, partly_plain)
    optimizer.step()
    parameters, state = copy_of(model), state_copy(optimizer)
    kept = model.head.weight.grad
    if context.rank == 0:
        model.head.weight.grad = None
    with pytest.raises(InvalidState, match=rf"the {context.world} ranks do not have gradients for the same parameters"):
        optimizer.step()
    assert _unchanged(model, optimizer, parameters, state)
    if context.rank == 0:
        for parameter in model.parameters():
            parameter.grad = None
    with pytest.raises(InvalidState, match="do not have gradients for the same parameters"):
        optimizer.step()
    assert _unchanged(model, optimizer, parameters, state)
    optimizer.zero_grad()
    optimizer.step()  # None on all ranks: nothing to do, and no error
    assert not optimizer.last_step_skipped
    assert optimizer.last_grad_norm == 0.0
    model.head.weight.grad = kept
    optimizer.step()
    assert not _unchanged(model, optimizer, parameters, state)


@check(2)
def partial_gradients_on_one_rank_raise_on_all(context: Context) -> None:
    """The redistribution is itself a collective, so all ranks agree on it before one enters."""
    mesh = context.mesh(names=("tp",))
    model = tensor_parallel(build(), mesh)
    optimizer = optimizer_of(model)
    loss_of(model, next(batches(1))).backward()
    if context.rank == 1:
        model.norm.weight.grad = model.norm.bias.grad = None
    with pytest.raises(InvalidState, match="do not have gradients for the same parameters"):
        optimizer.step()
    assert not optimizer.state


@check(2, 4)
def an_error_on_one_rank_is_an_error_on_all(context: Context) -> None:
    def refuse_option(model, optimizer):
        optimizer.param_groups[1]["eps"] = -1.0

    def refuse_state(model, optimizer):
        del optimizer.state[model.head.weight]["exp_avg"]

    def refuse_gradient(model, optimizer):
        plain = model.norm.weight
        plain.grad_dtype = None
        plain.grad = torch.zeros(plain.shape, dtype=torch.float64)

    for spoil, kind, text in (
        (refuse_option, InvalidOption, "group 1: .*eps"),
        (refuse_state, InvalidState, "the state of parameter .* must have step"),
        (refuse_gradient, InvalidTensor, "the gradient of parameter .* must be float32"),
    ):
        model, optimizer = _model_with_gradients(context, partly_plain)
        optimizer.step()
        parameters = copy_of(model)
        culprit = context.world - 1
        if context.rank == culprit:
            spoil(model, optimizer)
        expected = (kind, text) if context.rank == culprit else (InvalidState, f"1 of {context.world} ranks could not")
        with pytest.raises(expected[0], match=expected[1]):
            optimizer.step()
        assert all(map(torch.equal, copy_of(model), parameters))


@check(2)
def an_optimizer_built_before_sharding_raises(context: Context) -> None:
    mesh = context.mesh()
    model = build()
    optimizer = optimizer_of(model)
    fsdp(model, mesh)
    for _ in range(2):
        loss_of(model, part_of_batch(next(batches(1)), mesh, ("dp",))).backward()
        with pytest.raises(
            InvalidOption, match=r"parameter 0 of group 0 is no longer part of any module.*Build the opt"
        ):
            optimizer.step()

    model = build()
    optimizer = optimizer_of(model)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    optimizer.zero_grad()
    tensor_parallel(model, mesh)  # replaces norm, up and down; the head goes on
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(InvalidOption, match="is no longer part of any module"):
        optimizer.step()

    mesh = context.mesh((context.world, 1), ("dp", "tp"))
    model = tensor_parallel(build(), mesh["tp"])
    optimizer = optimizer_of(model)  # between the two
    fsdp(model, mesh["dp"])
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(InvalidOption, match="is no longer part of any module"):
        optimizer.step()


@check(2)
def idle_plain_models_are_no_mistake(context: Context) -> None:
    """A second model without gradients in this iteration, next to a sharded one of the same shapes."""
    mesh = context.mesh()
    idle = build()
    optimizer = optimizer_of(idle)
    model = fsdp(build(), mesh)
    loss_of(model, part_of_batch(next(batches(1)), mesh, ("dp",))).backward()
    optimizer.step()
    assert not optimizer.state


@check(2)
def what_does_not_fit_is_named(context: Context) -> None:
    mesh = context.mesh()
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.ones(3))
    _one_step(parameter, plain, capturable=True)  # nothing is read on the host, so it may be captured
    flat = nn.Parameter(torch.ones(3))
    flat._fsdp_flattened = True  # how FullyShardedDataParallel marks its parameters
    flat.grad = torch.ones(3)
    with pytest.raises(InvalidTensor, match="belongs to FullyShardedDataParallel"):
        ruda_torch.AdamW([flat], fused_step=True).step()
    ruda_torch.AdamW([flat], fused_step=True, check_finite=False).step()


def _one_step(parameter: nn.Parameter, plain: nn.Parameter, **options) -> None:
    optimizer = ruda_torch.AdamW([parameter, plain], fused_step=True, **options)
    parameter.grad, plain.grad = torch.ones_like(parameter), torch.ones_like(plain)
    optimizer.step()


@check(4)
def parameters_of_other_ranks_are_noticed(context: Context) -> None:
    """Ranks 0-2 hold one kind of stage, rank 3 another, on one mesh."""
    mesh = context.mesh()
    rows = 4 if context.rank < 3 else 8
    from torch.distributed.tensor import DTensor

    parameter = nn.Parameter(DTensor.from_local(torch.ones(rows // 4, 3), mesh, [Shard(0)], run_check=False))
    parameter.grad = torch.ones_like(parameter)
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    with pytest.raises(InvalidState, match=r"do not have the same parameter groups.*different stages"):
        optimizer.step()
    assert not optimizer.state


@check(2, 4)
def ranks_without_any_element_take_part(context: Context) -> None:
    mesh = context.mesh()
    parameter = nn.Parameter(distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]))
    optimizer = ruda_torch.AdamW([parameter], lr=0.5, weight_decay=0.0, fused_step=True)
    parameter.grad = distribute_tensor(torch.full((1, 3), 2.0), mesh, [Shard(0)])
    assert parameter.to_local().numel() == (0 if context.rank else 3)
    for step in (1, 2):
        optimizer.step()
        assert abs(optimizer.last_grad_norm - 12**0.5) <= 1e-6 * 4
        assert float(optimizer.state[parameter]["step"]) == step
        assert optimizer.state[parameter]["exp_avg"].to_local().shape == parameter.to_local().shape
    parameter.grad.to_local().fill_(math.nan)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert float(optimizer.state[parameter]["step"]) == 2
    # Two steps of lr, short of a relative 1e-8, and roundings of numbers below 1
    assert float(full(parameter).abs().max()) <= 4 * 2.0**-24 + 1e-8


@check(2)
def one_reduction_per_step(context: Context) -> None:
    """Of a few dozen bytes; none without statistics."""
    sizes: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel() * tensor.element_size())
        return reduce(tensor, *args, **kwargs)

    for options, calls in (({}, 1), ({"max_grad_norm": 1.0}, 1), ({"check_finite": False}, 0)):
        model, optimizer = _model_with_gradients(context, partly_plain, **options)
        optimizer.step()
        sizes.clear()
        dist.all_reduce = counted
        try:
            optimizer.step()
            norms = optimizer.last_group_norms  # reading on one rank alone must not wait for another
        finally:
            dist.all_reduce = reduce
        assert sizes == [8 * (6 + 2 * 8)] * calls
        same_on_all_ranks(*norms)
        del model


@check(2)
def the_sum_over_ranks_never_visits_the_host(context: Context) -> None:
    """What stops the update is on the device, the same on every rank; the host reads when ``check`` is called."""
    parameter = nn.Parameter(distribute_tensor(torch.ones(3, 2), context.mesh(), [Shard(0)]))
    ranks = find([{"params": [parameter]}], guarded=True)
    part = parameter.to_local().numel()
    rank = context.rank

    def sums(bad: float) -> list[torch.Tensor]:
        shares = ranks.shares([parameter], torch.tensor([1]), torch.tensor([0]), 1, torch.device("cpu"))
        return [shares.sums(torch.tensor([[2.0, float(part), bad]]))]

    with Reduction(ranks, 1, enabled=True) as reduction:  # the ranks agree on what they have, once
        reduction.settle([parameter], [None], str)
        reduction.run(None, ())

    def summed(*, failed=False, gradient=True, elements=True, bad=0.0, skip=None):
        with _no_read(), Reduction(ranks, 1, enabled=True) as reduction:
            reduction.settle([parameter], [torch.ones_like(parameter) if gradient else None], str)
            if failed:
                reduction.__exit__(InvalidTensor, InvalidTensor("spoiled"), None)
                return None
            return reduction.run([parameter] if elements else None, sums(bad), skip)

    statistics = summed()
    assert statistics.report.tolist() == [0.0, 1.0, 6 * 4.0]
    assert (statistics.group_squares.tolist(), statistics.group_bad.tolist()) == ([24.0], [0.0])
    assert statistics.skip.tolist() == [0.0]
    statistics.check()
    statistics = summed(bad=float(rank == 1))
    assert statistics.report.tolist() == [1.0, 1.0, 24.0]
    assert statistics.skip.tolist() == [0.0], "whether that skips depends on check_finite"
    for skip in (float(rank), torch.tensor([float(rank)]), torch.tensor(float(rank)), rank):
        statistics = summed(skip=skip)
        assert statistics.skip.tolist() == [1.0]
        statistics.check()  # no error: nothing but a step to skip
    for spoiled, text in (
        (summed(gradient=rank == 0), "do not have gradients for the same parameters"),
        (summed(elements=rank == 0), "add up to 4 elements"),
        (summed(failed=rank == 1), "1 of 2 ranks could not take this step"),
    ):
        if spoiled is None:  # this is the rank that failed
            continue
        assert spoiled.skip.tolist() == [1.0]
        with pytest.raises(InvalidState, match=text):
            spoiled.check()


@check(2)
def an_accelerator_raises_later_and_updates_nothing(context: Context) -> None:
    """What is wrong skips the step on the device; the next step, or who reads, says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ruda_torch.engine, "_on_host", lambda part: False)
        for read in (False, True):
            model, optimizer = _model_with_gradients(context, partly_plain, max_grad_norm=1.0)
            optimizer.step()
            parameters, state = copy_of(model), state_copy(optimizer)
            kept = model.head.weight.grad
            if context.rank == 0:
                model.head.weight.grad = None
            optimizer.step()  # no error yet
            model.head.weight.grad = kept
            assert _unchanged(model, optimizer, parameters, state)
            with pytest.raises(InvalidState, match="do not have gradients for the same parameters"):
                _ = optimizer.last_grad_norm if read else optimizer.step()
            assert _unchanged(model, optimizer, parameters, state)
            optimizer.step()  # said once
            assert not _unchanged(model, optimizer, parameters, state)

            parameters, state = copy_of(model), state_copy(optimizer)
            eps = optimizer.param_groups[1]["eps"]
            if context.rank == 1:
                optimizer.param_groups[1]["eps"] = -1.0
                with pytest.raises(InvalidOption, match="eps"):
                    optimizer.step()
                optimizer.param_groups[1]["eps"] = eps
            else:
                optimizer.step()
                with pytest.raises(InvalidState, match="1 of 2 ranks could not take this step"):
                    optimizer.state_dict()
            assert _unchanged(model, optimizer, parameters, state)
            optimizer.step()
            assert not _unchanged(model, optimizer, parameters, state)


class _NoRead(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "read on the host"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_read():
    """Raises where a tensor is read on the host."""
    with pytest.MonkeyPatch.context() as patch, _NoRead():
        patch.setattr(torch.Tensor, "tolist", None)
        yield
