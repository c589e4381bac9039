"""What the callbacks of all frameworks share: the numbers of a step, the words about a skip, a schedule that waits."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ruda_optim.fused_adamw import InvalidState

from ..adamw import AdamW
from ..report import listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

NORM, FACTOR, SKIPS = "optimizer/grad_norm", "optimizer/clip_factor", "optimizer/skipped_steps"


class Schedule(Protocol):
    """The public part of torch's schedulers that a wrapper of one has as well."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def unwrapped(optimizer: Any) -> AdamW:
    """The optimizer inside a framework's wrapper.

    Raises:
        TypeError: it is not this package's AdamW with ``fused_step=True``.
    """
    inner = optimizer
    while not isinstance(inner, AdamW) and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, AdamW) or not inner.fused_step:
        kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
        raise TypeError(
            f"RudaCallback needs ruda_torch.AdamW with fused_step=True as the optimizer, got {kind}"
            f"{' with fused_step=False' * isinstance(inner, AdamW)}; build that one, or leave the callback out"
        )
    return inner


def numbers(optimizer: AdamW) -> dict[str, float]:
    """What to log about the last step."""
    return {
        NORM: optimizer.last_grad_norm,
        FACTOR: optimizer.last_clip_factor,
        SKIPS: float(optimizer.skipped_steps),
    }


def skip_message(optimizer: AdamW, model: Module, step: int) -> str:
    """Which parameters a skipped step found not to be finite, by the names that the model gives them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    try:
        found = optimizer.gradient_report().not_finite
    except InvalidState:  # without statistics of its own the step followed found_inf
        found = ()
    bad = [replace(line, name=line.name or names.get(id(groups[line.group]["params"][line.index]))) for line in found]
    return f"step {step} was skipped; gradients that are not finite: {listed(bad) or 'none in this process'}"


class HeldSchedules:
    """Schedules, and the hyperparameters they set, as they are now: a framework that does not know of skipped steps
    advances them, and :meth:`restore` takes that back. Through public methods alone, so it holds any scheduler.
    """

    def __init__(self, optimizer: AdamW, schedules: Iterable[Schedule]) -> None:
        self._groups = optimizer.param_groups
        self._schedules = [(schedule, copy.deepcopy(schedule.state_dict())) for schedule in schedules]
        self._hyperparameters = [
            {name: _copied(value) for name, value in group.items() if name != "params"} for group in self._groups
        ]

    def restore(self) -> None:
        """Take back what happened to them since."""
        for schedule, state in self._schedules:
            schedule.load_state_dict(state)
        if not self._schedules:
            return
        for group, kept in zip(self._groups, self._hyperparameters, strict=True):
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
