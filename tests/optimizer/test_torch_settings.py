"""Whatever torch is set to, a step has the same bits: on the CPU and on the simulated device backends.

``test_ptx.py`` runs this file in Triton's interpreter too. No test here has seen a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import simulated_backend
import torch

import ruda_torch
from ruda_optim.fused_adamw import kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter


@pytest.fixture(params=["cpu", "simulated"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "simulated":
        if simulated_backend.unavailable() is not None:
            pytest.skip(str(simulated_backend.unavailable()))
        monkeypatch.setitem(kernels._loaded, "cpu", simulated_backend.kernels())
    return request.param


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def threads(count: int):
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


SETTINGS = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": default_device,
    "with device": lambda: torch.device("meta"),
    "gradients on": torch.enable_grad,
    "gradients off": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "three threads": lambda: threads(3),
}


def train(setting, steps_inside: set[int], *, in_thread: bool = False) -> list[torch.Tensor]:
    """Parameters and state after four steps of three tensors in two groups; the second one is skipped."""
    random = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    parameters = [torch.nn.Parameter(torch.randn(300, generator=random).to(dtype)) for dtype in dtypes]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3e-3}]
    with setting() if 0 in steps_inside else contextlib.nullcontext():
        optimizer = ruda_torch.AdamW(groups, lr=1e-2, fused_step=True, max_grad_norm=0.5)

    def step(number: int) -> None:
        for parameter in parameters:
            parameter.grad = torch.randn(300, generator=random).to(parameter.dtype)
        if number == 2:
            parameters[1].grad[7] = torch.inf
        optimizer.param_groups[0]["lr"] = 1e-2 / number
        with setting() if number in steps_inside else contextlib.nullcontext():
            optimizer.step()
        assert optimizer.last_step_skipped == (number == 2)

    for number in range(1, 5):
        if in_thread:
            thread = threading.Thread(target=step, args=(number,))
            thread.start()
            thread.join()
        else:
            step(number)
    found = [parameter.detach() for parameter in parameters]
    for parameter in parameters:
        found += optimizer.state[parameter].values()
    found.append(torch.tensor([optimizer.last_grad_norm, optimizer.last_clip_factor]))
    return found


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    """As integers: the 16 bits of a split master may read as NaN."""
    assert left.dtype is right.dtype
    assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@functools.cache
def plain(backend: str) -> list[torch.Tensor]:
    return train(contextlib.nullcontext, set())


INSIDE = {"first": {0, 1, 2}, "later": {2, 3}, "always": {0, 1, 2, 3, 4}}
if simulated_backend.INTERPRETED:  # slow, and what there is to find is found when memory is made
    del INSIDE["later"], INSIDE["always"]


@pytest.mark.parametrize("inside", INSIDE.values(), ids=list(INSIDE))
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_no_bit(backend: str, setting: str, inside: set[int]) -> None:
    if setting == "inference mode":
        inside = inside - {0}  # torch takes no parameters that were made in it
    for left, right in zip(train(SETTINGS[setting], inside), plain(backend), strict=True):
        assert_same_bits(left, right)


def test_a_new_thread_for_every_step(backend: str) -> None:
    for left, right in zip(train(contextlib.nullcontext, set(), in_thread=True), plain(backend), strict=True):
        assert_same_bits(left, right)
