"""The launch tables of a step, kept from one step to the next while they still describe the same tensors.

Building a table reads the layout of every tensor in Python; a step that finds a valid plan only compares identities and
addresses, and lets the C++ operator fill in the gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw.storage import (
    CHANGED,
    CoefficientRows,
    Field,
    LaunchTable,
    StatisticsWorkspace,
    TensorMemory,
    TensorWatch,
    bind_gradients,
    count_gradients,
    same_objects,
    same_values,
)

from . import reduction, sharding
from .members import MASTER, MOMENTS, REMAINDER, check_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from .members import Member

_KEPT_PLANS = 4
"""A training loop that alternates between sets of active parameters (GANs, experts) needs a few plans."""


def same(left: list[Any], right: list[Any]) -> bool:
    """True if both hold the very same objects."""
    return len(left) == len(right) and same_objects(left, 0, right)


class Part:
    """The tensors of one device: one launch.

    Attributes:
        members: the non-empty members of this device, one per table column.
        positions: where their gradients stand in the plan's list.
        groups: int64 ``(n,)``, the parameter group of each column.
        coefficients: the rows that they share.
        bound: the gradients of this step, held until its launches were made; see :meth:`StepPlan.release`.
    """

    def __init__(self, members: list[Member], positions: list[int], memories: list[TensorMemory]) -> None:
        self.members = members
        self.positions = positions
        self.table = LaunchTable(memories, memories[0].gradient.device)
        self._parameters = self._parts()
        self._watch = TensorWatch([], [])
        self.groups = torch.tensor([member.group for member in members], dtype=torch.int64, device="cpu")
        self.coefficients = CoefficientRows(self.table, self.groups)
        self.bound: list[Any] = []
        self._group_rows: dict[int, dict[int, tuple[int, int]]] = {}
        self._shares: dict[tuple[int, int], reduction.Shares] = {}
        self._sharded = any(sharding.is_sharded(member.target) for member in members)

    def watch(self) -> None:
        """Note what the table points into; call it once the optimizer holds what was allocated."""
        keys = ("step", *MOMENTS, MASTER, REMAINDER)
        state = [member.local(key) for member in self.members for key in keys]
        self._watch = TensorWatch(self._parameters, [tensor for tensor in state if tensor is not None])

    def bind(self, gradients: list[Tensor] | None) -> bool:
        """Take over this step's gradients (None: the parameters' own); False if the table is out of date."""
        if self._sharded and not same(self._parts(), self._parameters):  # a DTensor stays while its part is replaced
            return False
        held: list[Any] = [None] * len(self.members)
        column = bind_gradients(self.table, self._watch, self._parameters, gradients, 0, held)
        while column >= 0:
            member = self.members[column]
            gradient = member.parameter.grad if gradients is None else gradients[column]
            if gradient is None:
                return False
            held[column] = check_gradient(member.where, member.parameter, gradient)
            self.table.set_gradient(column, held[column])
            column = bind_gradients(self.table, self._watch, self._parameters, gradients, column + 1, held)
        self.bound = held
        return column != CHANGED

    def _parts(self) -> list[Tensor]:
        return [sharding.local(member.target) for member in self.members]

    def group_rows(self, chunk: int) -> dict[int, tuple[int, int]]:
        """The statistics rows ``[first, last)`` of each parameter group; a group's members are neighbours."""
        if chunk in self._group_rows:
            return self._group_rows[chunk]
        rows = self._rows(chunk)
        ends = rows.cumsum(0).tolist()
        ranges: dict[int, tuple[int, int]] = {}
        for member, count, end in zip(self.members, rows.tolist(), ends, strict=True):
            first, _ = ranges.get(member.group, (end - count, end))
            ranges[member.group] = (first, end)
        self._group_rows[chunk] = ranges
        return ranges

    def shares(self, ranks: reduction.Ranks, chunk: int, groups: int) -> reduction.Shares:
        """How the statistics rows count in the sum over ranks."""
        key = (chunk, groups)
        if key not in self._shares:
            parameters = [member.parameter for member in self.members]
            self._shares[key] = ranks.shares(parameters, self._rows(chunk), self.groups, groups, self.table.device)
        return self._shares[key]

    def _rows(self, chunk: int) -> Tensor:
        return (self.table.fields[Field.NUMEL] + (chunk - 1)) // chunk


class StepPlan:
    """Everything one set of members needs, and the memory of what it was built from.

    Args:
        members: checked, with their state allocated.
        gradients: one per member.
        capturable: the device counts the steps.

    Attributes:
        empty: members without elements; they have no part.
        idle: parameters of the optimizer that have no gradient in this plan's steps.
    """

    def __init__(self, members: list[Member], gradients: list[Tensor], *, capturable: bool = False) -> None:
        self.members = members
        self.parameters = [member.parameter for member in members]
        pairs = zip(members, gradients, strict=True)
        self.parts = split(members, [member.memory(gradient, capturable=capturable) for member, gradient in pairs])
        filled = {id(member) for part in self.parts for member in part.members}
        self.empty = [member for member in members if id(member) not in filled]
        self.idle: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        self._values: list[Any] = []
        self._all_states: list[Any] = []

    def bind(self, gradients: list[Tensor | None] | None) -> bool:
        """Take over this step's gradients, and hold them until :meth:`release`; False if this plan is not one for them.

        Args:
            gradients: one per parameter of the optimizer, None where it has none: the pattern that this plan was kept
                for. None for the parameters' own; their pattern is looked at here.
        """
        bound = False
        try:
            bound = self._fits(gradients) and all(part.bind(self._of(part, gradients)) for part in self.parts)
        finally:
            if not bound:
                self.release()
        return bound

    def _fits(self, gradients: list[Tensor | None] | None) -> bool:
        """What no part looks at: empty parameters, and which of the parameters have a gradient of their own."""
        if any(sharding.local(member.target).numel() for member in self.empty):
            return False
        if gradients is not None:
            return True
        empty = [member.parameter for member in self.empty]
        return not (self.idle and count_gradients(self.idle)) and (not empty or count_gradients(empty) == len(empty))

    def _of(self, part: Part, gradients: list[Tensor | None] | None) -> list[Tensor] | None:
        """A part's share of the gradients."""
        if gradients is None:
            return None
        present = [gradient for gradient in gradients if gradient is not None]
        return present if len(part.positions) == len(present) else [present[i] for i in part.positions]

    def release(self) -> None:
        """Let the gradients go: a plan must not keep them alive between steps."""
        for part in self.parts:
            part.bound = []

    def commit(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Hand what was allocated over to the optimizer, now that it holds values."""
        for member in self.members:
            if member.created:
                state.setdefault(member.parameter, {}).update(member.created)

    def remember(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Note the optimizer state that the tables point into; call it once the state holds what was allocated."""
        self._states = [state[parameter] for parameter in self.parameters]
        self._values = [value for entry in self._states for value in entry.values()]
        self._all_states = list(state.values())
        for part in self.parts:
            part.watch()

    def still_describes(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """True if the state consists of the very tensors that the tables were built from; ``bind`` looks inside."""
        return same_values([state], self._all_states) and same_values(self._states, self._values)


def split(members: list[Member], memories: list[TensorMemory]) -> list[Part]:
    """One part per device, without the empty tensors."""
    devices: dict[torch.device, list[int]] = {}
    for position, memory in enumerate(memories):
        if memory.gradient.numel() > 0:
            devices.setdefault(memory.gradient.device, []).append(position)
    return [
        Part([members[i] for i in positions], positions, [memories[i] for i in positions])
        for positions in devices.values()
    ]


def own_gradients(parameters: list[Tensor]) -> list[Tensor | None]:
    """The parameters' ``.grad``, in the form in which a step may also be handed gradients."""
    return [parameter.grad for parameter in parameters]


def _signature(groups: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What of the groups a plan depends on, beside the parameters themselves."""
    return tuple((len(group["params"]), group["amsgrad"]) for group in groups)


def _key(groups: list[dict[str, Any]], gradients: list[Tensor | None]) -> tuple[bytes, tuple[Any, ...]]:
    return bytes(gradient is not None for gradient in gradients), _signature(groups)


class PlanCache:
    """The last few plans, by which parameters were active, and the statistics scratch of each device.

    Args:
        hierarchical: how to merge statistics rows.
        guarded: whether gradient statistics are asked for.
    """

    def __init__(self, *, hierarchical: bool, guarded: bool) -> None:
        self._plans: OrderedDict[Any, StepPlan] = OrderedDict()
        self._parameters: list[Tensor] = []
        self._ranks: reduction.Ranks | None = None
        self._guarded = guarded
        self.in_modules: set[int] = set()
        """Ids of parameters that were seen in a module; see :func:`ruda_torch.sharding.check_not_replaced`."""
        self._workspaces: dict[torch.device, StatisticsWorkspace] = {}
        self._hierarchical = hierarchical

    @property
    def parameters(self) -> list[Tensor]:
        """The followed parameters of all groups."""
        return self._parameters

    def follow(self, groups: list[dict[str, Any]]) -> reduction.Ranks | None:
        """Drop what belongs to other parameters than these; the ranks that share them, None for plain tensors.

        Comparing identities is all that a step with plain parameters pays for sharding.
        """
        first = 0
        for group in groups:
            if not same_objects(self._parameters, first, group["params"]):
                break
            first += len(group["params"])
        else:
            if first == len(self._parameters):
                return self._ranks
        self.forget()
        self.in_modules.clear()
        self._parameters = []  # followed once the ranks are known: until then every step raises what the first one does
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._ranks = reduction.find(parameters, guarded=self._guarded)
        self._parameters = parameters
        return self._ranks

    def find(
        self,
        groups: list[dict[str, Any]],
        gradients: list[Tensor | None] | None,
        state: dict[Tensor, dict[str, Any]] | None,
    ) -> StepPlan | None:
        """A kept plan that fits the followed parameters, bound to this step's gradients.

        Args:
            groups: the followed ones.
            gradients: one per followed parameter; None for their own.
            state: the optimizer's; None where nobody can have replaced anything in it.
        """
        if gradients is None:
            # Most steps are like the one before: try its plan before a list of gradients is made.
            if self._plans:
                key = next(reversed(self._plans))
                plan = self._plans[key]
                if key[1] == _signature(groups) and (state is None or plan.still_describes(state)) and plan.bind(None):
                    return plan
            gradients = own_gradients(self._parameters)
        key = _key(groups, gradients)
        found = self._plans.get(key)
        if found is None or not (state is None or found.still_describes(state)) or not found.bind(gradients):
            return None
        self._plans.move_to_end(key)
        return found

    def keep(self, groups: list[dict[str, Any]], gradients: list[Tensor | None], plan: StepPlan) -> None:
        """Keep a plan for later steps whose gradients are present and absent in the same places."""
        pairs = zip(self._parameters, gradients, strict=True)
        plan.idle = [parameter for parameter, gradient in pairs if gradient is None]
        key = _key(groups, gradients)
        self._plans[key] = plan
        self._plans.move_to_end(key)
        while len(self._plans) > _KEPT_PLANS:
            self._plans.popitem(last=False)

    def forget(self) -> None:
        """Drop every plan, for example because the state was replaced."""
        self._plans.clear()

    def workspace(self, device: torch.device) -> StatisticsWorkspace:
        if device not in self._workspaces:
            self._workspaces[device] = StatisticsWorkspace(device, hierarchical=self._hierarchical)
        return self._workspaces[device]
