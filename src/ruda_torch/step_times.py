"""One whole step beside torch's fused AdamW, as people call both: what ``ruda-optim check`` times."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from .adamw import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 16
ROUNDS = 15
MAX_NORM = 1.0
GRADIENT = 1e-2
"""Of every element: clipped in anything but a tiny model."""


def time_steps(device: torch.device, elements: int) -> list[dict[str, Any]]:
    """Median milliseconds of a step over equal FP32 tensors, without and with clipping, ours and torch's in turn.

    Args:
        device: where.
        elements: of all tensors together.

    Returns:
        Plain values per method, ours before torch's. ``times_ours`` is the median, over the rounds, of its time divided
        by ours.
    """
    size = max(1, elements // TENSORS)
    timings = []
    for max_norm in (None, MAX_NORM):
        methods = {**_ours(device, size, max_norm), **_torch(device, size, max_norm)}
        seconds = _alternate(methods, device)
        first = next(iter(seconds.values()))
        timings += [
            {
                "method": name,
                "milliseconds": 1e3 * statistics.median(values),
                "times_ours": statistics.median(a / b for a, b in zip(values, first, strict=True)),
                "tensors": TENSORS,
                "elements_per_tensor": size,
            }
            for name, values in seconds.items()
        ]
    return timings


def _alternate(
    methods: dict[str, tuple[list[torch.nn.Parameter], Callable[[], object]]], device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each step, all methods once per round, the order reversed from one round to the next."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    order = list(methods)
    for number in range(ROUNDS + 2):  # two to warm up: state is allocated, kernels are compiled
        for name in order:
            parameters, step = methods[name]
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.fill_(GRADIENT)  # torch's clipping has overwritten it
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
        order.reverse()
    return seconds


def _parameters(device: torch.device, size: int) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(size, device=device)) for _ in range(TENSORS)]
    for parameter in made:
        parameter.grad = torch.empty_like(parameter)
    return made


def _ours(
    device: torch.device, size: int, max_norm: float | None
) -> dict[str, tuple[list[torch.nn.Parameter], Callable[[], object]]]:
    parameters = _parameters(device, size)
    step = AdamW(parameters, fused_step=True, max_grad_norm=max_norm).step
    return {f"ruda_torch.AdamW, {'finite check' if max_norm is None else 'clipping'}": (parameters, step)}


def _torch(
    device: torch.device, size: int, max_norm: float | None
) -> dict[str, tuple[list[torch.nn.Parameter], Callable[[], object]]]:
    parameters = _parameters(device, size)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    if max_norm is None:
        return {"torch.optim.AdamW(fused=True)": (parameters, optimizer.step)}

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()

    return {"clip_grad_norm_, torch.optim.AdamW(fused=True)": (parameters, step)}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
