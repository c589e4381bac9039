"""Which layer? What the last step saw of each parameter's gradient, as data and as a table to paste into an issue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

SHOWN = 30
"""Rows of a printed report; a model of thousands of parameters must still fit into an issue."""
NAMED = 5
"""Parameters that a warning names."""


class SkippedStepsWarning(UserWarning):
    """Several steps in a row were skipped because gradients were not finite."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter, and where its statistics rows lie: ``first_row`` up to ``end_row``, which is not one of them."""

    name: str | None
    group: int
    index: int
    elements: int
    first_row: int
    end_row: int


def label(name: str | None, group: int, index: int) -> str:
    """What a report calls a parameter: its name, if the optimizer was given one."""
    return f"parameter {index} of group {group}" if name is None else name


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """The gradient of one parameter in the last step, unscaled and before clipping."""

    name: str | None
    """From ``AdamW(model.named_parameters())``; None without names."""
    group: int
    index: int
    """Within the group."""
    elements: int
    norm: float
    """L2 norm; infinity if an element is not finite."""
    largest: float
    """The largest magnitude among the finite elements; 0 without any."""
    finite: bool

    def __str__(self) -> str:
        return label(self.name, self.group, self.index)


class GradientReport(Sequence[ParameterGradient]):
    """The gradients of a step, in the order of groups and parameters; ``str()`` is a table, the worst first.

    Args:
        parameters: those that had a gradient.
        scope: whose gradients these are, for the heading; " of this rank", for example.
    """

    def __init__(self, parameters: Iterable[ParameterGradient], scope: str = "") -> None:
        self._parameters = tuple(parameters)
        self.scope = scope

    @overload
    def __getitem__(self, index: int) -> ParameterGradient: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ParameterGradient, ...]: ...
    def __getitem__(self, index: int | slice) -> ParameterGradient | tuple[ParameterGradient, ...]:
        return self._parameters[index]

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def total_norm(self) -> float:
        """L2 norm of all gradients as if concatenated; infinity if an element is not finite."""
        return math.hypot(*(parameter.norm for parameter in self))

    @property
    def not_finite(self) -> tuple[ParameterGradient, ...]:
        return tuple(parameter for parameter in self if not parameter.finite)

    def worst(self, count: int = 1) -> tuple[ParameterGradient, ...]:
        """``count`` parameters: those that are not finite, in their order, then those with the largest norms."""
        return tuple(sorted(self, key=lambda parameter: -parameter.norm)[:count])

    def __repr__(self) -> str:
        return f"<GradientReport of {len(self)} parameters, {len(self.not_finite)} not finite>"

    def __str__(self) -> str:
        bad = len(self.not_finite)
        found = f"{bad:,} not finite" if bad else f"all finite, norm {self.total_norm:.4g}"
        elements = sum(parameter.elements for parameter in self)
        heading = f"gradients of {len(self):,} parameters{self.scope}, {elements:,} elements: {found}"
        cells = [
            (
                f"{parameter.norm:.4g}" if parameter.finite else "NOT FINITE",
                f"{parameter.largest:.4g}",
                f"{parameter.elements:,}",
                f"{parameter.group}/{parameter.index}",
                parameter.name or "",
            )
            for parameter in self.worst(SHOWN)
        ]
        return table(heading, ("norm", "largest", "elements", "group/index", "name"), cells, len(self))


def gradient_report(entries: Iterable[Entry], rows: Tensor, scope: str = "") -> GradientReport:
    """Merge statistics rows into a report. Waits for the device once, to copy the rows.

    Args:
        entries: the parameters; one without rows (an empty tensor) has norm 0.
        rows: FP32 ``(count, 3)`` on any device: (largest finite magnitude, sum of squares relative to it, 1 if an
            element was not finite).
        scope: see :class:`GradientReport`.
    """
    entries = list(entries)
    scale, sumsq, bad = rows.detach().cpu().numpy().astype(np.float64).T
    # An FP32 magnitude squared neither overflows nor underflows in FP64, so nothing is kept relative here.
    merged = np.stack([scale * scale * sumsq, bad])
    occupied = [(entry.first_row, entry.end_row) for entry in entries if entry.end_row > entry.first_row]
    bounds = np.asarray(occupied, dtype=np.intp).reshape(-1)
    if bounds.size:
        # Sums over the ranges between neighbouring bounds; every other one is a gap. A bound must be a column that
        # exists, so one of zeros follows the last row.
        squares, bad = np.add.reduceat(np.pad(merged, ((0, 0), (0, 1))), bounds, axis=1)[:, ::2]
        largest = np.maximum.reduceat(np.append(scale, 0.0), bounds)[::2]
        found = zip(np.sqrt(squares).tolist(), largest.tolist(), (bad == 0.0).tolist(), strict=True)
    else:
        found = zip((), (), (), strict=True)
    parameters = []
    for entry in entries:
        norm, highest, finite = next(found) if entry.end_row > entry.first_row else (0.0, 0.0, True)
        norm = norm if finite else math.inf
        parameters.append(
            ParameterGradient(entry.name, entry.group, entry.index, entry.elements, norm, highest, finite)
        )
    return GradientReport(parameters, scope)


# ---- a run of skipped steps ------------------------------------------------------------------------------------------


def next_warning(run: int) -> int:
    """The length of a run of skipped steps that is warned about next, once ``run`` steps of it are known.

    2, then 10, 100 and so on: at a threshold and not at an equality, because an accelerator tells late and may jump.
    """
    if run < 2:
        return 2
    due = 10
    while due <= run:
        due *= 10
    return due


def skip_warning(report: GradientReport, run: int) -> str:
    """What to say about ``run`` skipped steps in a row, the last of which saw ``report``."""
    bad = report.not_finite
    if bad:
        more = f" and {len(bad) - NAMED:,} more" if len(bad) > NAMED else ""
        whose = f"in {', '.join(map(str, bad[:NAMED]))}{more} ({len(bad):,} of {len(report):,} parameters)"
    else:
        whose = "as found_inf reported (the gradients that this process holds are finite)"
    return (
        f"{run:,} steps in a row were skipped: gradients that are not finite {whose}. Parameters and state are as they "
        "were before. Look at the loss and the data of these steps, and lower the learning rate or the loss scale; "
        "print(optimizer.gradient_report()) shows every parameter"
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(heading: str, columns: Sequence[str], cells: Sequence[Sequence[str]], total: int) -> str:
    """Numbers aligned to the right, the last column (names) to the left; says how many of ``total`` are missing."""
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [heading]
    for row in (columns, *cells):
        numbers = (cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True))
        lines.append("  ".join([*numbers, row[-1]]).rstrip())
    if total > len(cells):
        lines.append(f"... and {total - len(cells):,} more")
    return "\n".join(lines)
