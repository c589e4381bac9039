"""The functional API as an optimizer, as far as a benchmark needs it: every step makes new parameters and moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ruda_optim.fused_adamw import AdamWOptions, GradientGuardOptions, adamw_step, guarded_adamw_step

if TYPE_CHECKING:
    from torch import Tensor

    from ruda_optim.fused_adamw import AdamWState, AdamWUpdate


class OutOfPlaceAdamW:
    """``adamw_step`` for each tensor or, with a guard, ``guarded_adamw_step`` for all; allocation is part of a step.

    Args:
        parameters: FP32 tensors with gradients; the list's entries are replaced at every step.
        guard: None: neither clipped nor checked.
    """

    def __init__(self, parameters: list[Tensor], options: AdamWOptions, guard: GradientGuardOptions | None) -> None:
        self._parameters = parameters
        self._gradients = [parameter.grad for parameter in parameters]
        self._states: list[AdamWState | None] = [None] * len(parameters)
        self._options, self._guard = options, guard
        self.last_grad_norm = float("nan")

    def step(self) -> None:
        """Update every parameter."""
        if self._guard is None:
            for i, gradient in enumerate(self._gradients):
                self._keep(i, adamw_step(self._parameters[i], gradient, self._states[i], self._options))
            return
        entries = list(zip(self._parameters, self._gradients, self._states, strict=True))
        result = guarded_adamw_step(entries, self._options, guard=self._guard)
        self.last_grad_norm = result.stats.total_norm
        for i, update in enumerate(result.updates):
            self._keep(i, update)

    def _keep(self, index: int, update: AdamWUpdate) -> None:
        self._parameters[index], self._states[index] = update.parameters, update.state

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The moments by the names of ``torch.optim.AdamW``."""
        found = {}
        for parameter, state in zip(self._parameters, self._states, strict=True):
            found[parameter] = {"exp_avg": state.first_moment, "exp_avg_sq": state.second_moment}
            if state.max_second_moment is not None:
                found[parameter]["max_exp_avg_sq"] = state.max_second_moment
        return found
