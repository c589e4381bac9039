"""A thread's own floating-point mode (subnormals flushed, another rounding) changes no bit, and stays the thread's."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from typing import TYPE_CHECKING

import pytest
import torch
from kernel_runs import CPU, same_bits

import ruda_torch
from ruda_optim.fused_adamw import AdamWOptions, storage
from ruda_optim.fused_adamw.storage import LaunchTable, StatisticsWorkspace, TensorMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 150_001
UPWARD = {"x86_64": 0x800, "AMD64": 0x800, "aarch64": 0x400000, "arm64": 0x400000}.get(platform.machine())
"""FE_UPWARD of this machine's fenv.h."""


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        yield
        assert torch.tensor([1e-40]).mul(1.0).view(torch.int32) == 0, "the caller's mode is as it was"
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def rounding_upward() -> Iterator[None]:
    if UPWARD is None:
        pytest.skip(f"FE_UPWARD is not known for {platform.machine()}")
    libm = ctypes.CDLL(None)
    assert libm.fesetround(UPWARD) == 0
    try:
        yield
        assert libm.fegetround() == UPWARD, "the caller's mode is as it was"
    finally:
        libm.fesetround(0)


MODES = {"plain": contextlib.nullcontext, "flushing": flushing, "rounding upward": rounding_upward}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Gradients whose squares are subnormal, that are subnormal themselves, on the border, and ordinary ones."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(SIZE, generator=generator) * 10.0**power).to(dtype) for power in (-20, -41, -38, -7, 0)]


def kernels_in(mode: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Statistics, both merges and two updates in a mode: everything that they write."""
    stored = gradients(dtype)
    updates = [[g.float() * 0.3, g.float() * 0.7, g.float().square(), g.to(torch.float16)] for g in stored]
    table = LaunchTable(
        [TensorMemory(g, p, m, v, copy=c) for g, (p, m, v, c) in zip(stored, updates, strict=True)], CPU
    )
    coefficients = storage.coefficient_table([AdamWOptions(learning_rate=1e-20, epsilon=1e-40).prepare_step(1)])
    workspace = StatisticsWorkspace(CPU)
    with MODES[mode]():
        workspace.run(table, 1.0)
        many = torch.cat([workspace.rows] * 500)
        merged, report = torch.empty(-(-len(many) // 1024), 3), torch.empty(3)
        storage.merge_gradient_stats_chunks(many, merged)
        storage.merge_gradient_stats(workspace.rows[3:6], report)
        for _ in range(2):
            storage.adamw_scaled(table, coefficients, 1.0, 0.75)
    return [workspace.rows, workspace.report, merged, report, *(tensor for four in updates for tensor in four)]


@pytest.mark.parametrize("mode", ["flushing", "rounding upward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_kernel_returns_the_same_bits(mode, dtype, threads) -> None:
    for index, (found, wanted) in enumerate(zip(kernels_in(mode, dtype), kernels_in("plain", dtype), strict=True)):
        assert same_bits(found, wanted), f"output {index}"


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}, {"check_finite": False}], ids=str)
def test_a_whole_step_returns_the_same_bits(settings, threads) -> None:
    def run(mode: str) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(g * 0.5) for g in gradients()]
        optimizer = ruda_torch.AdamW(parameters, lr=1e-2, fused_step=True, **settings)
        for parameter, gradient in zip(parameters, gradients(), strict=True):
            parameter.grad = gradient
        with MODES[mode]():
            for _ in range(3):
                optimizer.step()
        return [t.detach() for p in parameters for t in (p, *optimizer.state[p].values())]

    assert all(same_bits(one, other) for one, other in zip(run("flushing"), run("plain"), strict=True))


def test_step_counters_round_to_nearest() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    optimizer.step()
    optimizer.state[parameter]["step"].fill_(2.0**24)  # the next FP32 number is two away, so one more is a tie
    with rounding_upward():
        optimizer.step()
    assert optimizer.state[parameter]["step"] == 2.0**24


def test_the_norm_of_subnormal_gradients_is_reported() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.full((1000,), 1e-41)
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    optimizer.step()
    norm = optimizer.last_grad_norm
    with flushing():
        optimizer.step()
        assert optimizer.last_grad_norm == norm > 0
