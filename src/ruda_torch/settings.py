"""The settings of ruda_torch.AdamW beside torch's own: what each may be, and the one rule for where they are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from ruda_optim.fused_adamw import GradientGuardOptions, InvalidOption, StepControl
from ruda_optim.fused_adamw.options import check_flag

from .moments import check_form


@dataclass(frozen=True)
class Settings:
    """The optimizer's own settings: what torch's parameter groups do not hold. Plain numbers, so they can be saved.

    Raises:
        InvalidOption: a setting of the wrong type or outside its range.
    """

    hierarchical_stats: bool = False
    max_grad_norm: float | None = None
    check_finite: bool = True
    moments: str = "float32"
    split_master: bool | None = None

    def __post_init__(self) -> None:
        check_flag("hierarchical_stats", self.hierarchical_stats)
        check_flag("check_finite", self.check_finite)
        check_form(self.moments)
        if self.split_master is not None and not isinstance(self.split_master, bool):
            raise InvalidOption(f"split_master must be None, True or False, got {self.split_master!r}")
        try:
            guard = GradientGuardOptions(max_norm=self.max_grad_norm)
        except InvalidOption:
            raise InvalidOption(
                "max_grad_norm must be None or a number >= 0 (infinity measures and never clips), got "
                f"{self.max_grad_norm!r}"
            ) from None
        object.__setattr__(self, "max_grad_norm", guard.max_norm)

    @property
    def measures(self) -> bool:
        """Whether a step takes gradient statistics."""
        return self.check_finite or self.max_grad_norm is not None

    @property
    def clip_norm(self) -> float | None:
        """The norm that gradients are clipped to; None where none is, however large."""
        return None if self.max_grad_norm == math.inf else self.max_grad_norm

    def keeps_split(self, dtype: torch.dtype) -> bool:
        """Whether a parameter of this dtype keeps a split master. FP16 cannot: its exponent is not FP32's."""
        return dtype is torch.bfloat16 and self.split_master is not False


SETTINGS = ("fused_step", *(field.name for field in fields(Settings)))
"""What is given to the constructor once, for all groups."""


def check_served(settings: Settings, *, fused_step: bool) -> None:
    """Raise :class:`InvalidOption` for a setting that only the fused step serves, without it."""
    check_flag("fused_step", fused_step)
    if fused_step:
        return
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if value != field.default:
            raise InvalidOption(f"{field.name}={value!r} needs fused_step=True; torch's step does not do it")


def check_group_keys(number: int, group: dict[str, Any]) -> None:
    """Raise :class:`InvalidOption` for a setting of ours inside a parameter group, where it would change nothing."""
    for name in SETTINGS:
        if name in group:
            why = "the norm is global" if name == "max_grad_norm" else "it is one for all groups"
            raise InvalidOption(
                f"group {number}: {name} is no option of a group: {why}; pass it to AdamW(...), or to a wrapper that "
                f"makes groups of its arguments as functools.partial(AdamW, {name}={group[name]!r})"
            )


def check_switches(where: str, options: dict[str, Any]) -> None:
    """Raise :class:`InvalidOption` for an option that chooses one of torch's steps."""
    for name in ("foreach", "fused", "differentiable"):
        if options.get(name):
            raise InvalidOption(
                f"{where}{name}={options[name]!r} chooses one of torch's steps; leave it out with fused_step=True"
            )


def check_group_switches(number: int, group: dict[str, Any], *, capturable: bool) -> None:
    """Raise :class:`InvalidOption` for a switch of torch's that the fused step would leave unheard."""
    check_switches(f"group {number}: ", group)
    if bool(group.get("capturable", capturable)) != capturable:
        raise InvalidOption(
            f"group {number}: capturable={group['capturable']!r} is no option of a group with fused_step=True: one "
            "step serves all groups; pass it to AdamW(...)"
        )
    if not group.get("decoupled_weight_decay", True):
        raise InvalidOption(
            f"group {number}: decoupled_weight_decay=False is Adam with an L2 term, which the fused step does not "
            "compute; use torch.optim.Adam, or leave it out"
        )


def check_grad_scale(grad_scale: Any, *, fused_step: bool) -> None:
    """Raise :class:`InvalidOption` for a ``grad_scale`` that ``step`` cannot divide by. A tensor's value is not read.

    Args:
        grad_scale: the argument of ``step``.
        fused_step: whether anybody divides.
    """
    if not fused_step:
        raise InvalidOption("grad_scale needs fused_step=True; divide the gradients before torch's step")
    if isinstance(grad_scale, torch.Tensor):
        if grad_scale.numel() != 1 or not grad_scale.is_floating_point():
            raise InvalidOption(
                f"grad_scale must be one floating-point number, got a tensor of shape {tuple(grad_scale.shape)} and "
                f"dtype {grad_scale.dtype}"
            )
        return
    try:
        StepControl(gradient_scale=grad_scale)
    except InvalidOption as error:
        raise InvalidOption(str(error).replace("gradient_scale", "grad_scale")) from None
