"""What the last step did, read from the memory where the devices left it. Everything here waits for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import GradientStats, InvalidState
from ruda_optim.fused_adamw.storage import Field

from .report import Entry, GradientReport, gradient_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from ruda_optim.fused_adamw.binding import DecisionMemory, Part, Plan

    from .reduction import GlobalStatistics


def combined(reports: list[list[float]]) -> GradientStats:
    """Reports (bad, scale, sumsq) of several tensors as one, in FP64."""
    squares = 0.0
    largest = max((scale for _, scale, _ in reports), default=0.0)
    for _, scale, sumsq in reports:
        squares += sumsq * (scale / largest) ** 2 if largest > 0.0 else 0.0
    bad = max((bad for bad, _, _ in reports), default=0.0)
    return GradientStats.from_report(bad, largest, squares, elements=0, tensors=len(reports), gradient_scale=1.0)


@dataclass
class Outcome:
    """The last step; a later step overwrites what it reads.

    Attributes:
        memory: where the step was decided.
        measured: whether there are gradient statistics.
        plan: its columns.
        parts: what was measured.
        groups: number of parameter groups.
        total: of sharded parameters, the sum over ranks.
    """

    memory: DecisionMemory
    measured: bool
    plan: Plan
    parts: Callable[[], list[Part]]
    groups: int
    total: GlobalStatistics | None = None

    @property
    def skipped(self) -> bool:
        return bool(self.memory.decision[0].item())

    @property
    def clip_factor(self) -> float:
        return float(self.memory.decision[1].item())

    @property
    def grad_norm(self) -> float:
        """The global L2 norm; infinity where something was not finite, NaN where nothing was measured."""
        bad, scale, sumsq = self.memory.report.tolist()
        if bad or not self.measured:
            return math.inf if bad else math.nan
        return combined([[bad, scale, sumsq]]).total_norm

    def group_norms(self) -> tuple[float, ...]:
        """The same for each group; 0 for a group without gradients."""
        if self.total is not None:
            return self.total.group_norms()
        if not self.measured:
            return (math.nan,) * self.groups
        reports: list[list[list[float]]] = [[] for _ in range(self.groups)]
        for part in self.parts():
            ranges: dict[int, tuple[int, int]] = {}
            for column, first, last in rows_of(part):  # a group's columns are neighbours
                group = self.plan.members[column]
                ranges[group] = (ranges.get(group, (first, last))[0], last)
            for group, (first, last) in ranges.items():
                reports[group].append(part.report(first, last).tolist())
        return tuple(combined(group).total_norm for group in reports)

    def gradients(self, groups: list[dict[str, Any]], *, whole: bool = False) -> GradientReport:
        """The gradients of the step, parameter by parameter; ``whole``: of all ranks, which all call this."""
        if not self.measured:
            raise InvalidState(
                "the last step took no gradient statistics; they need check_finite=True or a max_grad_norm (infinity "
                "measures and never clips)"
            )
        rows, entries, offset = [], {}, 0
        for part in self.parts():
            elements = part.table.fields[Field.NUMEL].tolist()
            for (column, first, last), size in zip(rows_of(part), elements, strict=True):
                entries[self.plan.positions[column]] = (offset + first, offset + last, size)
            rows.append(part.rows.cpu())
            offset += len(part.rows)
        places = [(group, index) for group, size in enumerate(self.plan.group_sizes) for index in range(size)]
        lines = []
        for position in sorted(self.plan.active()[1]):
            group, index = places[position]
            names = groups[group].get("param_names") if group < len(groups) else None
            first, last, elements = entries.get(position, (0, 0, 0))  # a parameter without elements has no rows
            lines.append(Entry(names[index] if names else None, group, index, elements, first, last))
        scope = "" if self.total is None else " of this rank"
        report = gradient_report(lines, torch.cat(rows) if rows else torch.empty((0, 3), device="cpu"), scope)
        if self.total is None or not whole:
            return report
        return self.total.ranks.whole(report, [groups[line.group]["params"][line.index] for line in lines])


def rows_of(part: Part) -> list[tuple[int, int, int]]:
    """The columns of a part, each with its statistics rows ``[first, last)``."""
    counts = part.table.rows_per_tensor(part.kernels.statistics_chunk)
    ends = counts.cumsum(0).tolist()
    return [(column, end - count, end) for column, count, end in zip(part.columns, counts.tolist(), ends, strict=True)]
