"""The staged baseline: AdamW as four kernels per tensor (five with AMSGrad), for benchmarks only.

Each stage is a plain torch expression that torch.compile turns into one kernel: first moment, second moment, [maximum,]
denominator, parameter. With gradients of g bytes they move (8 + g) + (8 + g) [+ 12] + 8 + 16 bytes per element: 48 in
FP32, 60 with AMSGrad, 4 less in BF16; the fused step moves 28 and 36, and 2 less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def _first_moment(m: Tensor, g: Tensor, weight: Tensor) -> None:
    m.copy_(m + weight * (g.float() - m))


def _second_moment(v: Tensor, g: Tensor, weight: Tensor) -> None:
    wide = g.float()
    v.copy_(v + weight * (wide * wide - v))


def _maximum(v_max: Tensor, v: Tensor) -> None:
    v_max.copy_(torch.maximum(v_max, v))


def _denominator(out: Tensor, v: Tensor, inverse_bias: Tensor, epsilon: Tensor) -> None:
    out.copy_((v * inverse_bias).sqrt() + epsilon)


def _parameter(p: Tensor, m: Tensor, denominator: Tensor, decay: Tensor, rate: Tensor) -> None:
    p.copy_(p - (decay * p + rate * m / denominator))


STAGES = (_first_moment, _second_moment, _maximum, _denominator, _parameter)


class StagedAdamW:
    """AdamW in stages, as far as a benchmark needs it: one group, FP32 parameters, every parameter has a gradient.

    Args:
        compiled: one kernel per stage through torch.compile. False runs the same expressions eagerly, in more kernels:
            for tests of the arithmetic.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        amsgrad: bool = False,
        compiled: bool = True,
    ) -> None:
        self._parameters = list(params)
        self._lr, self._betas, self._epsilon, self._decay = lr, betas, eps, weight_decay
        self._steps = 0
        self._stages = [torch.compile(stage, fullgraph=True, dynamic=True) if compiled else stage for stage in STAGES]
        largest = max(parameter.numel() for parameter in self._parameters)
        self._scratch = torch.empty(largest, dtype=torch.float32, device=self._parameters[0].device)
        keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        self.state = {p: {key: torch.zeros_like(p, requires_grad=False) for key in keys} for p in self._parameters}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        self._steps += 1
        first_moment, second_moment, maximum, denominator, update = self._stages
        beta1, beta2 = self._betas
        # Scalars travel as tensors, so that a new value never compiles anything again.
        weight1, weight2, inverse_bias2, epsilon, decay, rate = torch.tensor(
            [
                1 - beta1,
                1 - beta2,
                1 / (1 - beta2**self._steps),
                self._epsilon,
                self._lr * self._decay,
                self._lr / (1 - beta1**self._steps),
            ],
            dtype=torch.float32,
        ).unbind()
        for parameter in self._parameters:
            # Without its gradient, whose dtype may be another: torch.compile does not take that.
            p, g = parameter.data.view(-1), parameter.grad.view(-1)
            m, v, *rest = (tensor.view(-1) for tensor in self.state[parameter].values())
            scratch = self._scratch[: p.numel()]
            first_moment(m, g, weight1)
            second_moment(v, g, weight2)
            for v_max in rest:
                maximum(v_max, v)
                v = v_max
            denominator(scratch, v, inverse_bias2, epsilon)
            update(p, m, scratch, decay, rate)

    @staticmethod
    def bytes_per_element(gradient_bytes: int, *, amsgrad: bool) -> int:
        """What the stages read and write, with gradients of so many bytes."""
        return 40 + 12 * amsgrad + 2 * gradient_bytes
