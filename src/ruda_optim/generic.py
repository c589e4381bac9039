"""The generic AdamW / AMSGrad optimizer: plain tensor operations, one tensor at a time, out of place.

It runs wherever torch runs, in any floating dtype, and knows nothing of the fused kernels; they are compared with it.

    optimizer = AdamW(AdamWConfig(learning_rate=3e-4))
    weight, moments = optimizer.step(weight, gradient)             # first update
    weight, moments = optimizer.step(weight, gradient, moments)    # every later one
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """Hyperparameters; names, defaults and ranges of ``fused_adamw.AdamWOptions`` without its FP32 limits.

    Args:
        learning_rate: lr, finite, >= 0. Default 1e-3.
        beta1: decay of the first moment, in [0, 1). Default 0.9.
        beta2: decay of the second moment, in [0, 1). Default 0.999.
        epsilon: added outside the square root, finite, > 0. Default 1e-5.
        weight_decay: decoupled, finite, >= 0. Default 1e-4.
        amsgrad: divide by the running maximum of the uncorrected second moment. Default False.
        maximize: negate the gradient (not the decay). Default False.

    Raises:
        TypeError: a value that is not a number, or a flag that is not a bool.
        ValueError: a value outside its range.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-5
    weight_decay: float = 1e-4
    amsgrad: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        for name in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
            number = float(value)
            if not math.isfinite(number) or number < 0.0:
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
            if name in ("beta1", "beta2") and number >= 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {value!r}")
            object.__setattr__(self, name, number)
        if self.epsilon == 0.0:
            raise ValueError("epsilon must be > 0, got 0.0; the smallest useful values are near 1e-8")
        for name in ("amsgrad", "maximize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")


class Moments(NamedTuple):
    """State after ``step`` updates. Moments are uncorrected and have the parameter's shape."""

    step: int
    first_moment: Tensor
    second_moment: Tensor
    max_second_moment: Tensor | None
    """Running maximum of the second moment; None without AMSGrad."""


class AdamW:
    """Decoupled-weight-decay Adam, optionally AMSGrad. Holds the configuration only; state is passed in and returned.

    Args:
        config: default ``AdamWConfig()``.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad; PyTorch's AdamW for the order.
    """

    def __init__(self, config: AdamWConfig | None = None) -> None:
        self.config = AdamWConfig() if config is None else config

    @torch.no_grad()
    def step(self, parameter: Tensor, gradient: Tensor, moments: Moments | None = None) -> tuple[Tensor, Moments]:
        """One update. No input is written, nothing is recorded for autograd.

        Args:
            parameter: any shape, FP64, FP32, FP16 or BF16. For the half types arithmetic and moments are FP32 and the
                result is rounded back, because a half second moment underflows; else they have the parameter's dtype.
            gradient: same shape and device, any floating dtype.
            moments: what the previous call returned; None for the first update.

        Returns:
            The new parameter (detached, dtype of ``parameter``) and the new moments.

        Raises:
            TypeError: a dtype that is not real floating point.
            ValueError: shapes differ, or ``moments`` does not fit ``amsgrad``.
        """
        config = self.config
        _check(parameter, gradient, moments, config.amsgrad)
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        p, g = parameter.to(dtype), gradient.to(dtype)
        if moments is None:
            zero = torch.zeros_like(p)
            moments = Moments(0, zero, zero, zero if config.amsgrad else None)

        t = moments.step + 1
        if config.maximize:
            g = -g
        m = config.beta1 * moments.first_moment + (1.0 - config.beta1) * g
        v = config.beta2 * moments.second_moment + (1.0 - config.beta2) * (g * g)
        # The maximum of the uncorrected moments, corrected afterwards; torch.maximum lets NaN through.
        v_max = None if moments.max_second_moment is None else torch.maximum(moments.max_second_moment, v)
        new = Moments(t, m, v, v_max)
        p = p * (1.0 - config.learning_rate * config.weight_decay) - self.update(new)
        return p.to(parameter.dtype), new

    @torch.no_grad()
    def update(self, moments: Moments) -> Tensor:
        """What the step that left these moments took off the parameter, weight decay apart; their shape and dtype."""
        config = self.config
        v_used = moments.second_moment if moments.max_second_moment is None else moments.max_second_moment
        m_hat = moments.first_moment / (1.0 - config.beta1**moments.step)
        v_hat = v_used / (1.0 - config.beta2**moments.step)
        return config.learning_rate * m_hat / (v_hat.sqrt() + config.epsilon)


def _check(parameter: Tensor, gradient: Tensor, moments: Moments | None, amsgrad: bool) -> None:
    for name, tensor in (("parameter", parameter), ("gradient", gradient)):
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must have a real floating-point dtype, got {tensor.dtype}")
    if gradient.shape != parameter.shape:
        raise ValueError(
            f"gradient must have the parameter's shape {tuple(parameter.shape)}, got {tuple(gradient.shape)}; "
            "nothing is broadcast"
        )
    if moments is None:
        return
    if (moments.max_second_moment is not None) != amsgrad:
        raise ValueError(
            f"moments must hold max_second_moment exactly if amsgrad, got amsgrad={amsgrad}; "
            "start without moments, or keep the setting they were made with"
        )
    for name, moment in zip(moments._fields[1:], moments[1:], strict=True):
        if moment is not None and moment.shape != parameter.shape:
            raise ValueError(
                f"{name} must have the parameter's shape {tuple(parameter.shape)}, got {tuple(moment.shape)}"
            )
