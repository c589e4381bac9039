"""What the devices know of a step before it is taken: hyperparameters, loss scale, and whether to skip it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import StepControl
from ruda_optim.fused_adamw.binding import MAX_NORM, DecisionMemory, upload

from .hyperparameters import Hyperparameters, hyperparameters

if TYPE_CHECKING:
    from torch import Tensor

    from ruda_optim.fused_adamw import AdamWOptions

    from .settings import Settings

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


class Control:
    """The decision memory of each device; it lives as long as the optimizer, because a graph may replay it.

    A hyperparameter that is a tensor on an accelerator is copied from device to device at every step and never looked
    at; everything else is read on the host, and sent when it changes.

    Attributes:
        values: what the hyperparameters were read from last; see :meth:`Hyperparameters.values`. None if something has
            to be read at every step.
    """

    def __init__(self) -> None:
        self._hyperparameters = Hyperparameters()
        self.values: list[tuple[Any, ...]] | None = None
        self._options: list[AdamWOptions] = []
        self._max_norm: float | None = None
        self._rows: list[tuple[float, ...]] = []
        self._tensors: list[tuple[int, int, Tensor]] = []
        self._memories: dict[torch.device, DecisionMemory] = {}
        self._sent: dict[torch.device, list[tuple[float, ...]]] = {}

    def read(self, groups: list[dict[str, Any]], settings: Settings) -> None:
        """Read and check the groups' hyperparameters, all of them before any is taken over."""
        read = self._hyperparameters.read
        away = [_on_accelerator(group) for group in groups]
        options = [read(number, group, look=not away[number]) for number, group in enumerate(groups)]
        self.values = None if any(away) else self._hyperparameters.values(groups)
        if any(away) or self._tensors:
            self._tensors = [
                (number, column, value)
                for number, group in enumerate(groups)
                for column, value in enumerate(hyperparameters(group, number))
                if isinstance(value, torch.Tensor) and not on_host(value.device)
            ]
        same = len(options) == len(self._options) and all(map(_is, options, self._options))
        if same and settings.max_grad_norm == self._max_norm:
            return
        largest = _as_number(settings.max_grad_norm)
        self._rows = [
            (
                option.learning_rate,
                option.beta1,
                option.beta2,
                option.epsilon,
                option.weight_decay,
                -1.0 if option.maximize else 1.0,
                largest,
                CLIP_EPSILON,
            )
            for option in options
        ]
        self._options, self._max_norm = options, settings.max_grad_norm

    def amsgrad(self) -> list[bool]:
        """Which groups keep a maximum."""
        return [option.amsgrad for option in self._options]

    def memory(self, device: torch.device) -> DecisionMemory:
        """The memory of a device, with the hyperparameters that were read last."""
        memory = self._memories.get(device)
        if memory is None or len(memory.hyperparameters) != len(self._rows):
            fresh = DecisionMemory.empty(len(self._rows), device)
            if memory is not None:
                fresh.counts = memory.counts
            memory = self._memories[device] = fresh
            self._sent.pop(device, None)
        if self._sent.get(device) is not self._rows:
            upload(torch.tensor(self._rows, dtype=torch.float64, device="cpu"), memory.hyperparameters)
            self._sent[device] = self._rows
        for number, column, value in self._tensors:
            memory.hyperparameters[number, column : column + 1].copy_(value.detach().reshape(1))
        return memory

    def limit(self, max_grad_norm: float | None) -> None:
        """Clip by another norm from now on, also where a graph is replayed."""
        for memory in self._memories.values():
            memory.hyperparameters[:, MAX_NORM].fill_(_as_number(max_grad_norm))

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped so far; waits for the devices."""
        return sum(int(memory.counts[0].item()) for memory in self._memories.values())


def _as_number(max_norm: float | None) -> float:
    return -1.0 if max_norm is None else max_norm


def on_host(device: torch.device) -> bool:
    """Whether reading memory of the device waits for nothing."""
    return device.type == "cpu"


def _is(one: object, other: object) -> bool:
    return one is other


def _on_accelerator(group: dict[str, Any]) -> bool:
    """Whether a group has a hyperparameter in memory of an accelerator."""
    values = [group["lr"], group["eps"], group["weight_decay"]]
    if isinstance(group["betas"], (tuple, list)):
        values += group["betas"]
    return any(isinstance(value, torch.Tensor) and not on_host(value.device) for value in values)


def scale_on(device: torch.device, grad_scale: Tensor | float | None) -> tuple[float, Tensor | None]:
    """The inverse of a loss scale as a number, or the scale as one FP32 number on an accelerator, not looked at."""
    if grad_scale is None:
        return 1.0, None
    if isinstance(grad_scale, torch.Tensor) and not (on_host(device) or on_host(grad_scale.device)):
        return 1.0, grad_scale.detach().to(device=device, dtype=torch.float32).reshape(1)
    return StepControl(gradient_scale=float(grad_scale)).inverse_scale, None


def flag_on(device: torch.device, found_inf: Tensor | float | None) -> Tensor | None:
    """``found_inf`` as one FP32 number on the device."""
    if found_inf is None:
        return None
    if isinstance(found_inf, torch.Tensor):
        return found_inf.detach().to(device=device, dtype=torch.float32).reshape(1)
    return torch.full((1,), float(found_inf), dtype=torch.float32, device=device)
