"""Sharded training that is only simulated: torch's fake process group, tensors without memory, ranks in one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ruda_torch

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
