"""Checks of sharded runs: checkpoints cross world sizes, optimizers and layouts, and keep every bit and dtype."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_models import (
    LR,
    average_plain_gradients,
    batches,
    build,
    fsdp,
    full,
    groups_of,
    loss_of,
    optimizer_of,
    part_of_batch,
    two_dimensional,
)
from sharded_worker import Context, check
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import ruda_torch

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"amsgrad": True},
    "master": {"dtype": torch.bfloat16, "split_master": False},
    "split": {"dtype": torch.bfloat16},
    "bfloat16": {"dtype": torch.bfloat16, "moments": "bfloat16"},
    "packed16": {"moments": "packed16", "amsgrad": True},
}
"""What is saved on 4 ranks and loaded on 2 and on 1."""


def make(kind: str, mesh: object, shard=fsdp, **more: Any) -> tuple[nn.Module, ruda_torch.AdamW]:
    options = dict(KINDS[kind])
    model = build(options.pop("dtype", torch.float32))
    if mesh is not None:
        shard(model, mesh)
    return model, optimizer_of(model, max_grad_norm=1.0, **options, **more)


def train(model: nn.Module, optimizer: ruda_torch.AdamW, mesh: object, steps: int) -> None:
    dtype = next(model.parameters()).dtype
    for x in batches(steps, dtype):
        loss_of(model, x if mesh is None else part_of_batch(x, mesh, ("dp",))).backward()
        if mesh is not None:
            average_plain_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: ruda_torch.AdamW) -> dict[str, torch.Tensor]:
    """Full parameters and state by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter).clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = full(value).clone()
    return found


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.dtype == other.dtype, name
        integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.view(integer), other.view(integer)), name


def save(model: nn.Module, optimizer: ruda_torch.AdamW, folder: pathlib.Path, **options: Any) -> Any:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(folder), **options)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: pathlib.Path, **options: Any) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=str(folder), **options)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


@check(4)
def saved_on_four(context: Context) -> None:
    mesh = context.mesh()
    for kind in KINDS:
        model, optimizer = make(kind, mesh)
        train(model, optimizer, mesh, 2)
        save(model, optimizer, context.folder / kind)
        whole = everything(model, optimizer)
        if context.rank == 0:
            torch.save(whole, context.folder / f"{kind}.pt")
    model, optimizer = make("fp32", context.mesh((2, 2), ("dp", "tp")), two_dimensional)
    mesh = context.mesh((2, 2), ("dp", "tp"))
    train(model, optimizer, mesh, 1)
    save(model, optimizer, context.folder / "two_dimensional")
    whole = everything(model, optimizer)
    if context.rank == 0:
        torch.save(whole, context.folder / "two_dimensional.pt")
    model = fsdp(build(), context.mesh())
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
    train(model, optimizer, context.mesh(), 2)
    save(model, optimizer, context.folder / "torch")
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=str(context.folder / "torch_raw"))
    model = fsdp(build(torch.bfloat16), context.mesh())
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
    train(model, optimizer, context.mesh(), 2)
    save(model, optimizer, context.folder / "torch_half")
    dist.barrier()


@check(1, 2)
def loaded_and_continued(context: Context) -> None:
    mesh = context.mesh()
    for kind in (*KINDS, "two_dimensional"):
        model, optimizer = make(kind if kind in KINDS else "fp32", mesh)
        load(model, optimizer, context.folder / kind)
        expected = torch.load(context.folder / f"{kind}.pt")
        assert_same_bits(everything(model, optimizer), expected)
        before = float(optimizer.state[model.up.weight]["step"])
        train(model, optimizer, mesh, 1)
        assert not optimizer.last_step_skipped
        assert float(optimizer.state[model.up.weight]["step"]) == before + 1
        assert set(optimizer.state[model.up.weight]) == {
            key.removeprefix("up.weight.") for key in expected if key.startswith("up.weight.")
        }


@check(1, 2)
def a_checkpoint_of_torchs_adamw_is_loaded(context: Context) -> None:
    mesh = context.mesh()
    model, twin = fsdp(build(), mesh), fsdp(build(), mesh)
    optimizer = optimizer_of(model)
    theirs = torch.optim.AdamW(groups_of(twin), lr=LR)
    load(model, optimizer, context.folder / "torch")
    load(twin, theirs, context.folder / "torch")
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(full(optimizer.state[parameter][key]), full(theirs.state[other][key]))
    assert optimizer.param_groups[0]["lr"] == LR
    train(model, optimizer, mesh, 1)
    train(twin, theirs, mesh, 1)
    # The two orders of operations differ by roundings: below 16 u of the largest step, lr / (1 - beta1).
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert float((full(parameter) - full(other)).abs().max()) <= 16 * 2.0**-24 * (10 * LR + 1.0)


@check(1, 2)
def a_checkpoint_of_torchs_adamw_has_no_masters(context: Context) -> None:
    """What it lacks is left as it is; the weights that were loaded with it are what the next step starts from."""
    mesh = context.mesh()
    partial = DefaultLoadPlanner(allow_partial_load=True)
    for split in (False, True):
        model, twin = fsdp(build(torch.bfloat16), mesh), fsdp(build(torch.bfloat16), mesh)
        optimizer = optimizer_of(model, split_master=split)
        theirs = torch.optim.AdamW(groups_of(twin), lr=LR)
        train(model, optimizer, mesh, 3)  # its masters are those of other weights
        load(model, optimizer, context.folder / "torch_half", planner=partial)
        load(twin, theirs, context.folder / "torch_half")
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(full(parameter), full(other))
            for key in ("exp_avg", "exp_avg_sq"):
                assert optimizer.state[parameter][key].dtype is torch.float32
                assert torch.equal(full(optimizer.state[parameter][key]).bfloat16(), full(theirs.state[other][key]))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = [full(parameter).clone() for parameter in model.parameters()]
        train(model, optimizer, mesh, 1)
        for parameter, other in zip(model.parameters(), before, strict=True):
            assert torch.equal(full(parameter), other), "nothing but the loaded weights may come back"


@check(1, 2)
def a_state_dict_of_torchs_adamw_is_loaded(context: Context) -> None:
    """Saved without get_state_dict: the settings under ``ruda`` are then missing, and stay what they are."""
    mesh = context.mesh()
    model, twin = fsdp(build(), mesh), fsdp(build(), mesh)
    optimizer = optimizer_of(model, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(groups_of(twin), lr=LR)
    train(model, optimizer, mesh, 1)  # makes the state that is to be loaded
    state = {"optimizer": optimizer.state_dict()}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=str(context.folder / "torch_raw"), planner=planner)
    optimizer.load_state_dict(state["optimizer"])
    load(twin, theirs, context.folder / "torch")
    assert optimizer.max_grad_norm == 0.5
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(full(optimizer.state[parameter][key]), full(theirs.state[other][key]))


@check(2)
def the_first_step_of_dcp_creates_all_state(context: Context) -> None:
    """DCP steps once with zero gradients and lr = 0 before it loads; nothing but state may come of it."""
    for kind in KINDS:
        model, optimizer = make(kind, context.mesh())
        before = [full(parameter).clone() for parameter in model.parameters()]
        get_optimizer_state_dict(model, optimizer)
        assert all(torch.equal(full(p), other) for p, other in zip(model.parameters(), before, strict=True))
        keys = {
            "fp32": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
            "master": {"step", "exp_avg", "exp_avg_sq", "master"},
            "split": {"step", "exp_avg", "exp_avg_sq", "master_remainder"},
            "bfloat16": {"step", "exp_avg", "exp_avg_sq", "master_remainder"},
            "packed16": {"step", "packed_moments", "max_exp_avg_sq"},
        }[kind]
        assert all(optimizer.state[parameter].keys() == keys for parameter in model.parameters())


@check(2)
def full_state_from_rank_0(context: Context) -> None:
    mesh = context.mesh()
    for kind in KINDS:
        model, optimizer = make(kind, mesh)
        train(model, optimizer, mesh, 2)
        expected = everything(model, optimizer)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_optimizer_state_dict(model, optimizer, options=options)
        assert bool(whole) == (context.rank == 0), "only rank 0 holds it"
        other, fresh = make(kind, mesh)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(other, fresh, whole, options=options)
        for name, parameter in other.named_parameters():
            for key, value in fresh.state[parameter].items():
                assert_same_bits({key: full(value)}, {key: expected[f"{name}.{key}"]})


@check(2)
def full_state_on_every_rank(context: Context) -> None:
    """load_state_dict itself takes a checkpoint of one process and splits it; and one split in the same way."""
    mesh = context.mesh()
    for kind in KINDS:
        alone, alone_optimizer = make(kind, None)
        train(alone, alone_optimizer, None, 2)
        model, optimizer = make(kind, mesh)
        optimizer.load_state_dict(alone_optimizer.state_dict())
        again, again_optimizer = make(kind, mesh)
        again_optimizer.load_state_dict(optimizer.state_dict())
        for parameter, first, second in zip(alone.parameters(), model.parameters(), again.parameters(), strict=True):
            expected = alone_optimizer.state[parameter]
            for split in (optimizer.state[first], again_optimizer.state[second]):
                assert_same_bits({key: full(value) for key, value in split.items()}, expected)
            assert all(type(t) is type(first.data) for key, t in optimizer.state[first].items() if key != "step")
        train(model, optimizer, mesh, 1)
        # and back: a sharded state into a plain model gathers it
        plain, plain_optimizer = make(kind, None)
        plain_optimizer.load_state_dict(again_optimizer.state_dict())
        for parameter, other in zip(plain.parameters(), alone.parameters(), strict=True):
            assert_same_bits(plain_optimizer.state[parameter], alone_optimizer.state[other])


@check(2)
def asynchronous_save_while_training(context: Context) -> None:
    """With a process group of its own, so that its collectives do not mix with those of the training."""
    mesh = context.mesh()
    group = dist.new_group(backend="gloo")
    model, optimizer = make("master", mesh)
    train(model, optimizer, mesh, 2)
    expected = everything(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    folder = context.folder / "asynchronous"
    future = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(folder), process_group=group
    )
    train(model, optimizer, mesh, 2)
    future.result(timeout=60)
    other, fresh = make("master", mesh)
    load(other, fresh, folder)
    assert_same_bits(everything(other, fresh), expected)
    dist.destroy_process_group(group)
