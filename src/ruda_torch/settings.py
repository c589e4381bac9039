"""The settings of ruda_torch.AdamW beside torch's own, and the checks of what its constructor is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ruda_optim.fused_adamw import AdamWOptions, GradientGuardOptions, InvalidOption


@dataclass(frozen=True)
class Settings:
    """The optimizer's own settings: what torch's parameter groups do not hold. Plain numbers, so they can be saved."""

    hierarchical_stats: bool = False
    max_grad_norm: float | None = None
    check_finite: bool = True
    split_master: bool = False


def check_settings(settings: Settings, *, fused_step: bool) -> None:
    """Raise :class:`InvalidOption` for a setting of the wrong type or range, or one that ``fused_step`` must serve."""
    for name in ("hierarchical_stats", "check_finite", "split_master"):
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise InvalidOption(f"{name} must be True or False, got {value!r}")
    if not isinstance(fused_step, bool):
        raise InvalidOption(f"fused_step must be True or False, got {fused_step!r}")
    if settings.max_grad_norm is not None:
        try:
            GradientGuardOptions(max_norm=settings.max_grad_norm)
        except InvalidOption:
            raise InvalidOption(
                f"max_grad_norm must be None or a finite number >= 0, got {settings.max_grad_norm!r}"
            ) from None
    if not fused_step:
        for name, on in (
            ("hierarchical_stats", settings.hierarchical_stats),
            ("max_grad_norm", settings.max_grad_norm is not None),
            ("split_master", settings.split_master),
        ):
            if on:
                raise InvalidOption(f"{name} needs fused_step=True; torch's step does not do it")


def float_betas(betas: Any) -> Any:
    """As torch wants them: it refuses an int beta, such as 0; the fused step takes it as the number it is."""
    if not isinstance(betas, (tuple, list)):
        return betas
    return tuple(float(beta) if type(beta) is int else beta for beta in betas)


def check_group(number: int, group: dict[str, Any]) -> None:
    """The hyperparameters of a group as the fused step will read them."""
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InvalidOption(f"group {number}: betas must be two numbers in [0, 1), got {betas!r}")
    values: list[Any] = []
    for name, value in (("lr", group["lr"]), ("beta", betas[0]), ("beta", betas[1]), ("eps", group["eps"])):
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise InvalidOption(
                    f"group {number}: {name} must be one number, got a tensor of shape {tuple(value.shape)}"
                )
            value = value.item()
        values.append(value)
    lr, beta1, beta2, epsilon = values
    try:
        AdamWOptions(lr, beta1, beta2, epsilon, group["weight_decay"])
    except InvalidOption as error:
        raise InvalidOption(f"group {number}: {error}") from None
