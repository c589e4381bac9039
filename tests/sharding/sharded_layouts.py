"""Checks of sharded runs: every way to split a model trains as one process does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from sharded_models import (
    average_plain_gradients,
    batches,
    build,
    compare_with_one_process,
    fsdp,
    full,
    loss_of,
    mixed_precision,
    offloaded,
    optimizer_of,
    part_of_batch,
    partly_plain,
    same_on_all_ranks,
    tensor_parallel,
    two_dimensional,
)
from sharded_worker import Context, check
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ruda_torch
from ruda_torch.sharding import placed_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@check(2, 4)
def fsdp2_trains_as_one_process(context: Context) -> None:
    mesh = context.mesh()
    compare_with_one_process(mesh, fsdp, max_grad_norm=None)
    compare_with_one_process(mesh, fsdp, amsgrad=True)


@check(2)
def half_parameters_keep_their_masters(context: Context) -> None:
    mesh = context.mesh()
    for split in (False, True):
        for max_grad_norm in (None, 0.25):
            compare_with_one_process(mesh, fsdp, dtype=torch.bfloat16, max_grad_norm=max_grad_norm, split_master=split)


@check(2, 4)
def low_moments_have_the_bits_of_one_process(context: Context) -> None:
    """The dither is a hash of the element and the step: no shard, even or uneven or empty, changes a bit."""
    flat = context.mesh()
    square = context.mesh((2, context.world // 2), ("dp", "tp"))
    for shard, mesh in ((fsdp, flat), (offloaded, flat), (two_dimensional, square)):
        for moments in ("bfloat16", "packed16"):
            for dtype, amsgrad in ((torch.float32, True), (torch.bfloat16, False)):
                model, alone = shard(build(dtype), mesh), build(dtype)
                options = {"moments": moments, "amsgrad": amsgrad, "max_grad_norm": math.inf}
                optimizer, twin = optimizer_of(model, **options), optimizer_of(alone, **options)
                generator = torch.Generator().manual_seed(3)
                for _ in range(3):
                    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
                        other.grad = torch.randn(other.shape, generator=generator).to(dtype)
                        parameter.grad = placed_like("the gradient", other.grad, parameter)
                    optimizer.step()
                    twin.step()
                for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
                    assert torch.equal(full(parameter), other)
                    assert optimizer.state[parameter].keys() == twin.state[other].keys()
                    for key, wanted in twin.state[other].items():
                        found = full(optimizer.state[parameter][key])
                        assert torch.equal(found.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8)), key


@check(2)
def mixed_precision_policy(context: Context) -> None:
    compare_with_one_process(context.mesh(), mixed_precision, compute=torch.bfloat16, max_grad_norm=None)


@check(2)
def cpu_offload_policy(context: Context) -> None:
    compare_with_one_process(context.mesh(), offloaded)


@check(2)
def partial_gradients_are_summed(context: Context) -> None:
    """Sequence parallel leaves partial sums on replicated parameters; the plain head is the same on all ranks."""
    mesh = context.mesh(names=("tp",))
    model = tensor_parallel(build(), mesh)
    loss_of(model, next(batches(1))).backward()
    assert model.norm.weight.grad.placements[0].is_partial(), "otherwise this check shows nothing"
    assert type(model.head.weight) is nn.Parameter
    compare_with_one_process(mesh, tensor_parallel, data=(), max_grad_norm=None)
    compare_with_one_process(mesh, tensor_parallel, data=())
    # Also without statistics, where nothing else crosses ranks.
    compare_updates_without_statistics(mesh)


def compare_updates_without_statistics(mesh: object) -> None:
    model, copied = tensor_parallel(build(), mesh), build()
    optimizer, other = (optimizer_of(some, check_finite=False) for some in (model, copied))
    loss_of(model, next(batches(1))).backward()
    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
        twin.grad = full(parameter.grad).clone()
    optimizer.step()
    other.step()
    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(full(parameter), twin.detach())


@check(2, 4)
def plain_parameters_beside_sharded_ones(context: Context) -> None:
    compare_with_one_process(context.mesh(), partly_plain, max_grad_norm=None)
    compare_with_one_process(context.mesh(), partly_plain)


@check(4)
def hybrid_sharding(context: Context) -> None:
    mesh = context.mesh((2, 2), ("replicate", "shard"))
    compare_with_one_process(mesh, fsdp, data=("replicate", "shard"), max_grad_norm=None)
    compare_with_one_process(mesh, partly_plain, data=("replicate", "shard"))


@check(4)
def tensor_parallel_inside_fsdp(context: Context) -> None:
    mesh = context.mesh((2, 2), ("dp", "tp"))
    model = two_dimensional(build(), mesh)
    meshes = {p.device_mesh.ndim if hasattr(p, "device_mesh") else 0 for p in model.parameters()}
    assert meshes == {0, 1, 2}, "plain, on the dp dimension, on both"
    compare_with_one_process(mesh, two_dimensional, max_grad_norm=None)
    compare_with_one_process(mesh, two_dimensional)


@check(4)
def two_models_on_disjoint_ranks(context: Context) -> None:
    """Ranks 0 and 1 train one model, 2 and 3 another, at their own pace: no rank waits for the other model."""
    _train_on_half_of_the_ranks(context, context.mesh((2, 2), ("model", "dp"))["dp"])
    _train_on_half_of_the_ranks(context, context.mesh((2, 1, 2), ("model", "replicate", "shard"))["replicate", "shard"])


def _train_on_half_of_the_ranks(context: Context, mesh: DeviceMesh) -> None:
    model = fsdp(build(), mesh)
    optimizer = optimizer_of(model, max_grad_norm=0.25)
    alone = build()
    alone_optimizer = optimizer_of(alone, max_grad_norm=0.25)
    for x in batches(1 + context.rank // 2):
        loss_of(model, part_of_batch(x, mesh, mesh.mesh_dim_names)).backward()
        for parameter, twin in zip(model.parameters(), alone.parameters(), strict=True):
            twin.grad = full(parameter.grad).clone()
        optimizer.step()
        alone_optimizer.step()
        optimizer.zero_grad()
        # 1e-6: the norm's tolerance of this project; both are FP64 sums of squares in FP32 rows of 16.
        assert abs(optimizer.last_grad_norm - alone_optimizer.last_grad_norm) <= 1e-6 * alone_optimizer.last_grad_norm


@check(2)
def ddp_needs_no_reduction(context: Context) -> None:
    """Plain parameters with averaged gradients: the norm is the same on every rank because its bits repeat."""
    for views in (False, True):
        model = DistributedDataParallel(build(), gradient_as_bucket_view=views)
        optimizer = optimizer_of(model, max_grad_norm=0.25)
        torch.set_num_threads(1 + context.rank)  # ranks differ
        for x in batches(3):
            loss_of(model, part_of_batch(x, context.mesh(), ("dp",))).backward()
            reduce, dist.all_reduce = dist.all_reduce, None
            try:
                optimizer.step()
            finally:
                dist.all_reduce = reduce
            same_on_all_ranks(optimizer.last_grad_norm, optimizer.last_clip_factor)
            optimizer.zero_grad()
        torch.set_num_threads(1)
        for parameter in model.parameters():
            same_on_all_ranks(*parameter.detach().flatten().tolist())


@check(2)
def ddp_norm_does_not_depend_on_the_thread_count(context: Context) -> None:
    """A gradient of several statistics chunks, cut the same way by any number of threads."""
    parameter = nn.Parameter(torch.zeros(200_000))
    parameter.grad = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True, max_grad_norm=1.0)
    torch.set_num_threads(1 + 2 * context.rank)
    optimizer.step()
    torch.set_num_threads(1)
    same_on_all_ranks(optimizer.last_grad_norm)


@check(2)
def ddp_join_with_uneven_inputs(context: Context) -> None:
    """Rank 1 has one batch more; under join() rank 0 shadows its collectives, of which our step has none."""
    model = DistributedDataParallel(build())
    optimizer = optimizer_of(model, max_grad_norm=0.25)
    with model.join():
        for x in batches(2 + context.rank):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = float(optimizer.state[next(model.parameters())]["step"])
    assert steps == 2 + context.rank


@check(2)
def gradient_accumulation(context: Context) -> None:
    """Two micro-batches without synchronization, then one with: as one large batch."""
    mesh = context.mesh()
    model, copied = fsdp(build(), mesh), build()
    optimizer, other = optimizer_of(model), optimizer_of(copied)
    parts = list(batches(3))
    for index, x in enumerate(parts):
        model.set_requires_gradient_sync(index == 2)
        loss_of(model, part_of_batch(x, mesh, ("dp",))).backward()
        if index < 2:
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()  # nothing to do yet, on any rank
            assert not optimizer.state
    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
        twin.grad = full(parameter.grad).clone()
    optimizer.step()
    other.step()
    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(full(parameter), twin.detach())


@check(2)
def loss_scaling(context: Context) -> None:
    """Both scalers, with and without unscale_, and an infinity that only one rank sees."""
    mesh = context.mesh()
    for make in (ruda_torch.GradScaler, torch.amp.GradScaler):
        for unscale in (False, True):
            scaler = make("cpu", init_scale=1024.0)
            model, copied = fsdp(build(), mesh), build()
            optimizer, other = optimizer_of(model), optimizer_of(copied)
            for index, x in enumerate(batches(3)):
                scaler.scale(loss_of(model, part_of_batch(x, mesh, ("dp",)))).backward()
                for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
                    twin.grad = full(parameter.grad) / 1024.0
                if index == 1 and context.rank == 0:
                    model.up.weight.grad.to_local()[0, 0] = torch.inf
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert optimizer.last_step_skipped == (index == 1)
                assert scaler.get_scale() == (1024.0 if index < 1 else 512.0)
                if index == 0:
                    other.step()
                if index < 2:
                    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
                        assert torch.equal(full(parameter), twin.detach()), "a power of two changes no bit, a skip none"
                optimizer.zero_grad()


@check(2)
def waits_for_an_asynchronous_redistribution(context: Context) -> None:
    """A gradient that is still under way has no memory to point at."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = context.mesh()
    parameter = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))
    whole = distribute_tensor(torch.full((5, 3), 2.0), mesh, [Replicate()])
    partial = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    replicated = nn.Parameter(partial)
    optimizer = ruda_torch.AdamW([parameter, replicated], lr=0.5, eps=1e-8, weight_decay=0.0, fused_step=True)
    parameter.grad = whole.redistribute(placements=[Shard(0)], async_op=True)
    replicated.grad = (
        distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        .sum(0)
        .redistribute(placements=[Replicate()], async_op=True)
    )
    assert replicated.grad.to_local().data_ptr() == 0, "otherwise this check shows nothing"
    optimizer.step()
    # 15 elements of 2, 3 elements of 4.
    assert abs(optimizer.last_grad_norm - (15 * 4 + 3 * 16) ** 0.5) <= 1e-6 * 11
    assert torch.allclose(full(parameter), torch.full((5, 3), 0.5))
    assert torch.allclose(full(replicated), torch.full((3,), 0.5))


@check(2)
def waits_for_a_plain_gradient(context: Context) -> None:
    """The same without DTensor: a functional all_reduce leaves such a gradient to a plain parameter."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    parameter = nn.Parameter(torch.ones(40))
    optimizer = ruda_torch.AdamW([parameter], lr=0.5, weight_decay=0.0, fused_step=True)
    for step in (1, 2):
        parameter.grad = all_reduce(torch.ones(40), "sum", dist.group.WORLD)
        assert isinstance(parameter.grad, AsyncCollectiveTensor)
        assert parameter.grad.data_ptr() == 0, "otherwise this check shows nothing"
        optimizer.step()
        assert abs(optimizer.last_grad_norm - 2 * 40**0.5) <= 1e-6 * 13
        # lr * g / (|g| + eps): lr short of a relative 1e-8, and roundings of numbers below 1
        assert torch.allclose(parameter.detach(), torch.full((40,), 1 - 0.5 * step), rtol=0.0, atol=4 * 2.0**-24 + 1e-8)


@check(2)
def large_gradients_do_not_overflow_the_norm(context: Context) -> None:
    mesh = context.mesh()
    model = fsdp(build(), mesh)
    optimizer = optimizer_of(model, max_grad_norm=1.0)
    loss_of(model, part_of_batch(next(batches(1)), mesh, ("dp",))).backward()
    for parameter in model.parameters():
        parameter.grad.to_local().fill_(1e30)
    optimizer.step()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert not optimizer.last_step_skipped
    assert abs(optimizer.last_grad_norm / (1e30 * count**0.5) - 1.0) <= 1e-6
    for parameter in model.parameters():
        part = parameter.grad.to_local()
        assert bool((part == 1e30).all()), "gradients are only read"


@check(2)
def module_moves_are_followed(context: Context) -> None:
    """module._apply gives a parameter new memory while the object stays."""
    mesh = context.mesh()
    model, copied = fsdp(build(), mesh), build()
    optimizer, other = optimizer_of(model), optimizer_of(copied)
    for index, x in enumerate(batches(3)):
        if index:
            model._apply(lambda tensor: tensor.clone())
        loss_of(model, part_of_batch(x, mesh, ("dp",))).backward()
        for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
            twin.grad = full(parameter.grad).clone()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
        for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(full(parameter), twin.detach())


@check(4)
def ignored_gradients_are_the_users_to_average(context: Context) -> None:
    """A plain parameter among sharded ones counts once, whatever the number of ranks."""
    mesh = context.mesh()
    model = partly_plain(build(), mesh)
    optimizer = optimizer_of(model)
    loss_of(model, part_of_batch(next(batches(1)), mesh, ("dp",))).backward()
    average_plain_gradients(model)
    squares = sum(float(full(parameter.grad).double().square().sum()) for parameter in model.parameters())
    optimizer.step()
    assert abs(optimizer.last_grad_norm / squares**0.5 - 1.0) <= 1e-6


@check(2)
def the_step_leaves_compiled_graphs(context: Context) -> None:
    """A compiled training step with sharded parameters: our step runs between its graphs."""
    mesh = context.mesh()
    model, copied = fsdp(build(), mesh), build()
    optimizer, other = optimizer_of(model), optimizer_of(copied)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    step = torch.compile(optimizer.step, backend="eager")
    for x in batches(3):
        loss_of(model, part_of_batch(x, mesh, ("dp",))).backward()
        for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
            twin.grad = full(parameter.grad).clone()
        step()
        other.step()
        optimizer.zero_grad()
    assert len(calls) == 3
    for parameter, twin in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(full(parameter), twin.detach())
