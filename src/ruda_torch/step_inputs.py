"""What one step is taken from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .members import check_gradient, describe_position

if TYPE_CHECKING:
    from torch import Tensor


def parameter_lists(groups: list[dict[str, Any]]) -> list[list[Tensor]]:
    """The parameters of each group. Torch makes lists; who assigns a tuple is heard as well."""
    lists = [group["params"] for group in groups]
    return [params if type(params) is list else list(params) for params in lists]


@dataclass
class StepInputs:
    """What one step is taken from.

    Attributes:
        groups, state: the optimizer's; hyperparameters are read now.
        targets: the parameters of each group, or the memory that stands in for them in a compiled graph.
        grad_scale: what the gradients were multiplied by; None means they are unscaled already.
        found_inf: above 0 means that somebody saw a non-finite gradient; the step is skipped.
        gradients: one per parameter of all groups, or None for the parameters' own ``.grad``.
        watched: ``state`` if somebody outside may have changed something in it, True if he can only have given other
            memory to its tensors, None if neither.
        stand_in: whether ``targets`` are not the parameters.
    """

    groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]
    targets: list[list[Tensor]]
    grad_scale: Tensor | float | None = None
    found_inf: Tensor | float | None = None
    gradients: list[Tensor | None] | None = None
    watched: dict[Tensor, dict[str, Any]] | bool | None = None
    stand_in: bool = False

    @property
    def parameters(self) -> list[Tensor]:
        return [target for group in self.targets for target in group]

    def own_gradients(self) -> list[Tensor | None]:
        return [target.grad for target in self.parameters] if self.gradients is None else self.gradients

    def where(self, position: int) -> str:
        """What error messages call the parameter at a position."""
        return describe_position(self.groups, position)

    def settle(self, position: int, gradient: Tensor) -> Tensor:
        """A gradient that is not what the plan expects, checked."""
        return check_gradient(self.where(position), self.parameters[position], gradient)
