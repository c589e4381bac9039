"""A table that is launched once per kind has the bits of one that goes through the general kernel at once.

Runs on the simulated device backends: see ``simulated_backend``. No test here has seen a GPU.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import simulated_backend
import torch

from ruda_optim.fused_adamw import AdamWOptions
from ruda_optim.fused_adamw.kernels import block_map
from ruda_optim.fused_adamw.kernels.tables import LaunchTable, TensorMemory

pytestmark = [
    pytest.mark.skipif(simulated_backend.unavailable() is not None, reason=str(simulated_backend.unavailable())),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
SIZES = (8192 + 5, 300, 17000, 7)


def results(split: bool, monkeypatch: pytest.MonkeyPatch, *, first: bool) -> list[torch.Tensor]:
    monkeypatch.setattr(block_map, "SPLIT_FROM", 0 if split else 1 << 60)
    monkeypatch.setattr(block_map, "_maps", OrderedDict())
    random = torch.Generator().manual_seed(0)
    memories, gradients = [], []
    for i, size in enumerate(SIZES):
        gradients.append(torch.randn(size, generator=random).to(torch.bfloat16 if i % 2 else torch.float32))
        state = [torch.rand(size, generator=random) for _ in range(3)]
        memories.append(TensorMemory(gradients[-1], *state, first=first and i == 2))
    table = LaunchTable(memories, CPU)
    kernels = simulated_backend.kernels()
    count = table.statistics_rows(kernels.statistics_chunk)
    rows = torch.full((count, 3), torch.nan)
    kernels.analyze_gradient(table, rows, 0.5)
    kernels.adamw_scaled(table, torch.tensor([AdamWOptions().prepare_step(0).row]), 0.5, 0.25)
    return [rows, *(tensor for m in memories for tensor in (m.parameter, m.exp_avg, m.exp_avg_sq))]


@pytest.mark.parametrize("first", [False, True])
def test_split_or_not_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    whole, split = (results(how, monkeypatch, first=first) for how in (False, True))
    assert not whole[0].isnan().any()
    for left, right in zip(whole[1:], split[1:], strict=True):
        assert torch.equal(left, right)
    # A row's sum may be taken in another order: scale and bad are exact, the sum to FP32's rounding over a row.
    assert torch.equal(whole[0][:, [0, 2]], split[0][:, [0, 2]])
    torch.testing.assert_close(whole[0][:, 1], split[0][:, 1], rtol=2e-6, atol=0)
