"""A captured step and its replays, with a capture that is made up: launches and copies are written down and repeated.

The kernels are ``csrc/cuda.cu`` on the host simulator. What CUDA itself does with a graph is in the ``cuda`` suite.
"""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

import ruda_torch
from fused_adamw import host_simulator
from ruda_optim.fused_adamw import kernels
from ruda_optim.fused_adamw.kernels import device_table
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc
from ruda_torch import engine

pytestmark = pytest.mark.skipif(
    host_simulator.unavailable() is not None, reason=f"no host simulator: {host_simulator.unavailable()}"
)


class Graph:
    """Inside ``with graph:`` what is submitted is written down and not done; :meth:`replay` does it.

    A real capture allocates from a pool of the graph's own; here the targets of copies are held instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launcher = host_simulator.HostLauncher(host_simulator.build(), seed=0)
        self._nodes: list[tuple[object, ...]] = []
        self._real_copy = device_table._copy
        self.active = False
        monkeypatch.setattr(device_table, "_copy", self._copy)
        monkeypatch.setattr(device_table, "capturing", lambda device: self.active)
        monkeypatch.setattr(engine, "capturing", lambda device: self.active)
        monkeypatch.setattr(device_table, "_kept", {})
        monkeypatch.setitem(kernels._loaded, "cpu", nvrtc.record(host_simulator.NAME, self))

    def on(self, device: torch.device) -> object:
        return self._launcher.on(device)

    def __call__(self, *launch: object) -> None:
        if self.active:
            self._nodes.append((self._launcher, *launch))
        else:
            self._launcher(*launch)

    def _copy(self, source: torch.Tensor, stage: torch.Tensor, target: torch.Tensor) -> None:
        if not self.active:
            self._real_copy(source, stage, target)
            return
        stage = stage.view(source.dtype)
        stage.copy_(source.view(-1))
        address, size = stage.data_ptr(), stage.numel()
        self._nodes.append((_copy_from, address, size, target.view(-1)))

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *_: object) -> None:
        self.active = False

    def replay(self) -> None:
        for call, *arguments in self._nodes:
            call(*arguments)

    @property
    def kernels(self) -> list[str]:
        return [node[2] for node in self._nodes if node[0] is self._launcher]


def _copy_from(address: int, size: int, target: torch.Tensor) -> None:
    """Reads host memory by its address, as a graph does: nothing here keeps it alive."""
    memory = (ctypes.c_char * (size * target.element_size())).from_address(address)
    target.copy_(torch.frombuffer(memory, dtype=target.dtype))


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    return Graph(monkeypatch)


def made(**options) -> tuple[list[torch.nn.Parameter], ruda_torch.AdamW]:
    random = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=random)) for size in (300, 7, 9000)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters, ruda_torch.AdamW(parameters, lr=1e-2, fused_step=True, capturable=True, **options)


def fill_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    """In place: a graph reads where it read when it was captured."""
    random = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad.copy_(torch.randn(parameter.shape, generator=random))


def captured(graph: Graph, **options) -> tuple[list[torch.nn.Parameter], ruda_torch.AdamW]:
    parameters, optimizer = made(**options)
    fill_gradients(parameters, 0)
    optimizer.step()
    with graph:
        optimizer.step()
    return parameters, optimizer


def test_replays_are_steps(graph: Graph) -> None:
    """Counters and bias corrections go on, a bad gradient skips its replay, and a step is three launches."""
    parameters, optimizer = captured(graph, max_grad_norm=1.0)
    twins, twin = made(max_grad_norm=1.0)
    fill_gradients(twins, 0)
    twin.step()
    for seed in range(1, 5):
        for some in (parameters, twins):
            fill_gradients(some, seed)
            if seed == 2:
                some[1].grad[3] = torch.nan
        graph.replay()
        twin.step()
        assert optimizer.last_step_skipped == twin.last_step_skipped == (seed == 2)
        assert optimizer.last_grad_norm == twin.last_grad_norm
        assert all(map(torch.equal, parameters, twins))
    assert [kernel.partition("<")[0] for kernel in graph.kernels] == ["ruda::analyze", "ruda::decide", "ruda::update"]
    assert optimizer.skipped_steps == 1


def test_max_grad_norm_is_heard_by_replays(graph: Graph) -> None:
    parameters, optimizer = captured(graph, max_grad_norm=1.0)
    for limit in (0.25, 1e9):
        optimizer.max_grad_norm = limit
        fill_gradients(parameters, 1)
        graph.replay()
        decision = next(iter(optimizer._live.engine._control._memories.values())).decision
        norm = torch.cat([parameter.grad for parameter in parameters]).double().norm().item()
        assert decision[1].item() == pytest.approx(min(limit / norm, 1.0), rel=1e-6)


def test_what_replays_use_outlives_the_optimizer(graph: Graph) -> None:
    """All but parameters, gradients and state, which belong to the training loop, as with every optimizer of torch."""
    parameters, optimizer = captured(graph, max_grad_norm=1.0)
    control = optimizer._live.engine._control
    memory = next(iter(control._memories.values()))
    (part,) = optimizer._live.engine._plan.parts()
    tensors = [*memory.tensors(), part.coefficients, part.rows]
    addresses = {tensor.data_ptr() for tensor in tensors}
    state = [dict(values) for values in optimizer.state.values()]
    del optimizer, control, memory, part, tensors
    gc.collect()
    assert addresses <= {tensor.data_ptr() for tensor in device_table._kept.values()}
    before = [parameter.detach().clone() for parameter in parameters]
    fill_gradients(parameters, 3)
    graph.replay()
    assert not any(map(torch.equal, parameters, before))
    del state


def change_lr(optimizer: ruda_torch.AdamW) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def change_betas(optimizer: ruda_torch.AdamW) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)


def change_max_grad_norm(optimizer: ruda_torch.AdamW) -> None:
    optimizer.max_grad_norm = 0.25


CHANGES = (change_lr, change_betas, change_max_grad_norm)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_after_the_last_step_cannot_be_captured_before_a_step_with_it(change, graph: Graph) -> None:
    """A graph would send it again at every replay, over what is set later."""
    (parameters, optimizer), (twins, twin) = made(max_grad_norm=1.0), made(max_grad_norm=1.0)
    for some, one in ((parameters, optimizer), (twins, twin)):
        fill_gradients(some, 0)
        one.step()
        change(one)
    with pytest.raises(RuntimeError, match=r"changed after the last step.*Take one step with the new values"), graph:
        optimizer.step()
    assert graph.kernels == []
    for one in (optimizer, twin):  # nothing was submitted: the optimizer goes on
        one.step()
    with graph:
        optimizer.step()
    for seed in (1, 2):
        for some in (parameters, twins):
            fill_gradients(some, seed)
        graph.replay()
        twin.step()
        assert all(map(torch.equal, parameters, twins))


def test_a_number_that_changes_after_the_capture_is_heard_by_the_next_step_and_by_replays(graph: Graph) -> None:
    """Replays read what was sent last, and send nothing themselves: a step between them and a later one agree."""
    parameters, optimizer = captured(graph, max_grad_norm=1.0)
    twins, twin = made(max_grad_norm=1.0)
    for _ in range(2):
        fill_gradients(twins, 0)
        twin.step()
    graph.replay()
    for lr, limit in ((0.5, 0.25), (0.125, 1e9)):
        for one in (optimizer, twin):
            one.param_groups[0]["lr"] = lr
            one.max_grad_norm = limit
            one.step()
        graph.replay()
        optimizer.step()
        for _ in range(2):
            twin.step()
        assert all(map(torch.equal, parameters, twins))
