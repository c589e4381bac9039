"""Builds the plan of a step: which parameters take part, what their state lacks, and what the plan must watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ruda_optim.fused_adamw.binding import EMPTY, UNKNOWN, Plan
from ruda_optim.fused_adamw.storage import Field

from . import sharding
from .members import collect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .members import Member
    from .settings import Settings


class NewPlan:
    """A plan whose state is not the optimizer's yet; everything was checked and allocated.

    Args:
        groups, state: the optimizer's.
        targets: the parameters of each group, or the memory that stands in for them.
        gradients: this rank's parts, one per parameter of all groups, None for those that stay out of this step.
        settings: the optimizer's own.

    Attributes:
        plan: None for fake tensors, which have no memory to launch anything on.
        committed: whether the state is the optimizer's.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        targets: list[list[Tensor]],
        state: dict[Tensor, dict[str, Any]],
        gradients: Sequence[Tensor | None],
        settings: Settings,
    ) -> None:
        self._state = state
        self.committed = False
        self._members = collect(groups, targets, state, gradients, settings)
        for member in self._members:
            member.allocate(settings)
        fake = any(sharding.is_fake(member.target) for member in self._members)
        self.plan = None if fake else self._build(targets)

    def _build(self, targets: list[list[Tensor]]) -> Plan:
        parameters = [target for group in targets for target in group]
        columns = [UNKNOWN] * len(parameters)
        filled: list[Member] = []
        for member in self._members:
            empty = sharding.local(member.target).numel() == 0
            columns[member.position] = EMPTY if empty else len(filled)
            if not empty:
                filled.append(member)
        plan = Plan(
            targets,
            columns,
            [member.memory() for member in filled],
            [sharding.local(member.target).device for member in filled],
            [member.group for member in filled],
            [sharding.is_sharded(parameter) for parameter in parameters],
        )
        for column, member in enumerate(filled):
            if member.gradient is None:  # described by the parameter; it has no memory yet
                plan.table.fields[Field.GRAD, column] = 0
        return plan

    @property
    def new_counters(self) -> set[int]:
        """Positions of the parameters whose step counter the optimizer does not hold yet."""
        return {member.position for member in self._members if "step" in member.created}

    def commit(self) -> None:
        """Hand over to the optimizer what was allocated, and let the plan watch it."""
        self.committed = True
        for member in self._members:
            if member.created:
                self._state.setdefault(member.parameter, {}).update(member.created)
        if self.plan is not None:
            entries = [member.entry(key) for member in self._members for key in member.memory_keys]
            tensors = [entry for entry in entries if entry is not None]
            self.plan.watch(self._state, tensors, [sharding.is_sharded(tensor) for tensor in tensors])
