"""Sharded training that is only simulated: torch's fake process group, tensors without memory, ranks in one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from quantized_states import Quantized, looked_up, random_codes, random_scales
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ruda_torch
from ruda_optim.fused_adamw import InvalidState, InvalidTensor
from ruda_torch import migration

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of four, of which the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        dist.destroy_process_group()


def test_a_fake_process_group_stands_for_ranks_like_this_one(mesh: DeviceMesh) -> None:
    model = nn.Linear(8, 6)  # 6 rows on 4 ranks: uneven
    fully_shard(model, mesh=mesh)
    optimizer = ruda_torch.AdamW(model.parameters(), lr=0.5, fused_step=True, max_grad_norm=1.0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert not optimizer.last_step_skipped
    # As if each of the four had the two rows of eight and the two elements of this one.
    assert math.isclose(optimizer.last_grad_norm, math.sqrt(4 * 18), rel_tol=1e-6)
    model.weight.grad.to_local()[0, 0] = math.nan
    optimizer.step()
    assert optimizer.last_step_skipped


def test_quantized_moments_of_torchao_are_converted_part_by_part(mesh: DeviceMesh) -> None:
    """An uneven split: 130 rows on 4 ranks. This rank's part is quantized by itself, and nothing is sent."""
    parameter = nn.Parameter(distribute_tensor(torch.ones(130, 128), mesh, [Shard(0)]))
    part = parameter.to_local().shape
    assert part == (33, 128)
    scales, values = random_scales(33, 1), torch.linspace(0, 1, 256)
    codes = random_codes(*part, seed=2, low=1)
    moment = DTensor.from_local(
        Quantized(part, codes, scales, values), mesh, [Shard(0)], run_check=False, shape=(130, 128), stride=(128, 1)
    )
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    saved = {"state": {0: {"step": 3, "exp_avg": moment, "exp_avg_sq": moment}}, "param_groups": [group]}
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    with pytest.raises(InvalidState, match="from_torchao"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(migration.from_torchao(saved))
    for name in ("exp_avg", "exp_avg_sq"):
        loaded = optimizer.state[parameter][name]
        assert loaded.shape == (130, 128)
        assert loaded.placements == parameter.placements
        assert loaded.to_local().reshape(-1).tolist() == looked_up(codes.numpy(), values, scales, 128)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "max_grad_norm": 1.0}], ids=["plain", "amsgrad"])
def test_sharded_tensors_without_memory_get_state_without_memory(mesh: DeviceMesh, options: dict) -> None:
    """Estimates of memory run the step under FakeTensorMode: the state has its shapes, and nothing is launched."""
    with FakeTensorMode():
        model = nn.Linear(8, 6)
        fully_shard(model, mesh=mesh)
        optimizer = ruda_torch.AdamW(model.parameters(), fused_step=True, **options)
        for _ in range(2):
            model(torch.randn(3, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            entry = optimizer.state[parameter]
            assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if options else set())
            assert entry["exp_avg"].to_local().shape == parameter.to_local().shape
            assert entry["exp_avg"].placements == parameter.placements


def test_several_ranks_in_one_process_are_refused(mesh: DeviceMesh) -> None:
    """LocalTensorMode keeps a tensor per rank behind one that has no memory of its own."""
    simulation = pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensorMode")
    with simulation.LocalTensorMode(4):
        parameter = nn.Parameter(distribute_tensor(torch.ones(8, 3), init_device_mesh("cpu", (4,)), [Shard(0)]))
        parameter.grad = torch.ones_like(parameter)
        optimizer = ruda_torch.AdamW([parameter], fused_step=True)
        with pytest.raises(InvalidTensor, match=r"parameter 0 of group 0 .*LocalTensor"):
            optimizer.step()
        assert not optimizer.state
