"""Models and data of the sharding tests, how to split them over ranks, and the comparison with one process."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ruda_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

SEQUENCE, WIDTH, BATCH = 4, 8, 8
LR, EPS = 1e-2, 0.1  # a large epsilon keeps the update smooth, so that a tolerance can be derived
U = 2.0**-24  # FP32 unit roundoff


class Block(nn.Module):
    """Norm, up, down, head. The head has 3 rows and a bias of 3: uneven over 2 ranks, empty on some of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.norm(x)))))


def build(dtype: torch.dtype = torch.float32) -> Block:
    """The same model on every rank."""
    torch.manual_seed(7)
    return Block().to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """The same whole batches on every rank."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(count):
        yield torch.randn(BATCH, SEQUENCE, WIDTH, generator=generator).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1.0).float().square().mean()


def fsdp(model: Block, mesh: DeviceMesh, **options: Any) -> Block:
    """fully_shard with two communication groups."""
    fully_shard(model.up, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def offloaded(model: Block, mesh: DeviceMesh) -> Block:
    return fsdp(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def mixed_precision(model: Block, mesh: DeviceMesh) -> Block:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(model, mesh, mp_policy=policy)


def partly_plain(model: Block, mesh: DeviceMesh) -> Block:
    """Two parameters stay plain tensors on every rank."""
    return fsdp(model, mesh, ignored_params={model.norm.weight, model.head.bias})


def tensor_parallel(model: Block, mesh: DeviceMesh) -> Block:
    """Sequence parallel norm (its gradients are partial sums), column and row parallel layers, a plain head."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def two_dimensional(model: Block, mesh: DeviceMesh) -> Block:
    """Tensor parallel inside, FSDP outside: parameters on the 2-D mesh, the head on its dp dimension, one plain."""
    return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"], ignored_params={model.head.bias})


def part_of_batch(x: torch.Tensor, mesh: DeviceMesh, data_dimensions: tuple[str, ...]) -> torch.Tensor:
    """This rank's samples: ranks that differ in a data dimension see different ones."""
    for name in data_dimensions:
        x = x.chunk(mesh[name].size())[mesh.get_local_rank(name)]
    return x


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor as a plain one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def average_plain_gradients(model: nn.Module) -> None:
    """What FSDP leaves to the user for parameters that it ignores."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, as trainers make them: matrices with weight decay, the rest without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def optimizer_of(model: nn.Module, **options: Any) -> ruda_torch.AdamW:
    return ruda_torch.AdamW(groups_of(model), lr=LR, eps=EPS, fused_step=True, **options)


def compare_with_one_process(
    mesh: DeviceMesh,
    shard: Callable[[Block, DeviceMesh], nn.Module],
    *,
    data: tuple[str, ...] = ("dp",),
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    steps: int = 4,
    max_grad_norm: float | None = 0.25,
    **options: Any,
) -> None:
    """Train a sharded model and compare every step with two runs of one process.

    The "shadow" gets the sharded run's gradients in full, so it must agree to the bit; with clipping, up to the
    rounding of the norm. The "alone" run trains on the whole batch by itself.
    """
    model = shard(build(dtype), mesh)
    optimizer = optimizer_of(model, max_grad_norm=max_grad_norm, **options)
    shadow = build(dtype)
    shadow_optimizer = optimizer_of(shadow, max_grad_norm=max_grad_norm, **options)
    alone = build(dtype)
    alone_optimizer = optimizer_of(alone, max_grad_norm=max_grad_norm, **options)
    average = any(isinstance(p, DTensor) for p in model.parameters()) and len(data) > 0
    for step, x in enumerate(batches(steps, dtype), 1):
        loss_of(model, part_of_batch(x, mesh, data)).backward()
        loss_of(alone, x).backward()
        if average:
            average_plain_gradients(model)
        for parameter, copied in zip(model.parameters(), shadow.parameters(), strict=True):
            copied.grad = full(parameter.grad).clone()
        for some in (optimizer, shadow_optimizer, alone_optimizer):
            some.step()
            assert not some.last_step_skipped
        check_norms(optimizer, shadow)
        for parameter in alone.parameters():
            parameter.grad = None
        check_shadow(model, optimizer, shadow, shadow_optimizer, step, exact=max_grad_norm is None)
        if dtype is torch.float32 and compute is None:
            check_alone(model, alone, step)
            # Each of n gradient elements is off by its rounding and 4 times the parameters' error; the norm of such
            # a vector is at most sqrt(n) times that.
            count = sum(parameter.numel() for parameter in alone.parameters())
            bound = (gradient_error() + 4 * parameter_error(step - 1)) * math.sqrt(count)
            assert abs(optimizer.last_grad_norm - alone_optimizer.last_grad_norm) <= bound
        optimizer.zero_grad()


def check_norms(optimizer: ruda_torch.AdamW, shadow: nn.Module) -> None:
    """Against FP64 norms of the full gradients, and the same bits on every rank."""
    groups = [[p.grad.double() for p in group["params"]] for group in groups_of(shadow)]
    expected = [math.sqrt(sum(float(g.square().sum()) for g in gradients)) for gradients in groups]
    for norm, wanted in zip(optimizer.last_group_norms, expected, strict=True):
        assert math.isclose(norm, wanted, rel_tol=1e-6)
    assert math.isclose(optimizer.last_grad_norm, math.hypot(*expected), rel_tol=1e-6)
    same_on_all_ranks(optimizer.last_grad_norm, optimizer.last_clip_factor, *optimizer.last_group_norms)


def same_on_all_ranks(*numbers: float) -> None:
    """The same FP64 bits everywhere."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [number.hex() for number in map(float, numbers)])
    assert all(some == gathered[0] for some in gathered), gathered


def check_shadow(
    model: nn.Module,
    optimizer: ruda_torch.AdamW,
    shadow: nn.Module,
    shadow_optimizer: ruda_torch.AdamW,
    steps: int,
    *,
    exact: bool,
) -> None:
    """Parameters and all state, elementwise.

    The update is elementwise, so splitting cannot change it. With clipping the two norms, sums in different orders, may
    put the clip factor 2 FP32 ulps = 4 u apart. That is what m carries, v twice that, and the quotient of both thrice
    that, each relative to terms below 0.25: clipped gradients, and lr times a quotient below 10. Two roundings more.
    """
    moved = (3 * 4 + 2) * U * 0.25 * steps
    for (name, parameter), copied in zip(model.named_parameters(), shadow.parameters(), strict=True):
        state, copied_state = optimizer.state[parameter], shadow_optimizer.state[copied]
        assert state.keys() == copied_state.keys()
        tensors = [(name, full(parameter), copied.detach())]
        tensors += [(f"{key} of {name}", full(state[key]), copied_state[key]) for key in state]
        for what, ours, theirs in tensors:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            if exact or what.startswith("step"):
                assert torch.equal(ours, theirs), f"{what}: {(ours - theirs).abs().max()}"
            elif ours.dtype is torch.float32:
                assert bool(((ours - theirs).abs() <= moved + 2 * U * theirs.abs()).all()), what
            elif not what.startswith("master_remainder"):  # the bits below BF16: checked by the exact runs
                # The FP32 values above are close, so their BF16 roundings are at most one step of 2^-7 apart.
                assert bool(((ours.float() - theirs.float()).abs() <= moved + 2.0**-7 * theirs.float().abs()).all())


def gradient_error() -> float:
    """How far two orders of summation can put one gradient element apart at the same parameters.

    It is a sum over BATCH * SEQUENCE = 32 positions of products through layers of width at most 12; all values here are
    below 8 and the loss weights them by 1 / 96, so any order of summation is within (32 + 3 * 12) * u * 8.
    """
    return (32 + 3 * 12) * U * 8


def parameter_error(steps: int) -> float:
    """How far parameters may then be apart after ``steps`` steps.

    The update is m / (sqrt(v) + eps) with m <= 2 sqrt(v) in the first steps, so an error e of the gradient, doubled at
    most by clipping, moves it by at most 4 lr / eps * e = 0.4 e. The loss has second derivatives below 4, so an error p
    of the parameters comes back as 4 p in the next gradient: p grows by 1 + 0.4 * 4 at each step.
    """
    error = 0.0
    for _ in range(steps):
        error = error * (1 + 4 * LR / EPS * 4) + 4 * LR / EPS * gradient_error()
    return error


def check_alone(model: nn.Module, alone: nn.Module, steps: int) -> None:
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        difference = float((full(parameter) - other.detach()).abs().max())
        assert difference <= parameter_error(steps), f"{name} after {steps} steps: {difference}"


def copy_of(model: nn.Module) -> list[torch.Tensor]:
    """Full copies of all parameters."""
    return [full(parameter).clone() for parameter in model.parameters()]


def state_copy(optimizer: ruda_torch.AdamW) -> list[Any]:
    return copy.deepcopy(list(optimizer.state.values()))
