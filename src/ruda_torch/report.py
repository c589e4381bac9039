"""Which layer? What a step saw of each gradient and did to each parameter, as data and as a table."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import torch

from ruda_optim import generic

from . import sharding
from .moments import PACKED, unpacked

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


@dataclass(frozen=True, slots=True)
class _Parameter:
    """Who a line of a report is about. ``str()`` is its name, or its place where the optimizer was given no names."""

    name: str | None
    """From ``AdamW(model.named_parameters())``; None without names."""
    group: int
    index: int
    """Within the group."""
    elements: int

    def __str__(self) -> str:
        return f"parameter {self.index} of group {self.group}" if self.name is None else self.name

    def _cells(self, *numbers: str) -> tuple[str, ...]:
        return (*numbers, f"{self.elements:,}", f"{self.group}/{self.index}", self.name or "")


T = TypeVar("T", bound=_Parameter)


class _Report(Sequence[T]):
    """Lines about parameters, in the order of groups and parameters.

    Args:
        parameters: the lines.
        scope: whose they are, for the heading; " of this rank", for example.
    """

    def __init__(self, parameters: Iterable[T], scope: str = "") -> None:
        self._parameters = tuple(parameters)
        self.scope = scope

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._parameters[index]

    def __len__(self) -> int:
        return len(self._parameters)

    def __repr__(self) -> str:
        return str(self).partition("\n")[0]

    def _table(self, what: str, found: str, numbers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
        """A heading, then numbers aligned to the right and names to the left; says how many lines are left out."""
        elements = sum(parameter.elements for parameter in self)
        lines = [f"{what} of {len(self):,} parameters{self.scope}, {elements:,} elements: {found}"]
        columns = (*numbers, "elements", "group/index", "name")
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in (columns, *cells):
            aligned = (cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True))
            lines.append("  ".join([*aligned, row[-1]]).rstrip())
        if len(self) > len(cells):
            lines.append(f"... and {len(self) - len(cells):,} more")
        return "\n".join(lines)


# ---- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterGradient(_Parameter):
    """The gradient of one parameter in the last step, unscaled and before clipping."""

    norm: float
    """L2 norm; infinity if an element is not finite."""
    largest: float
    """The largest magnitude among the finite elements; 0 without any."""
    finite: bool


class GradientReport(_Report[ParameterGradient]):
    """The gradients of a step, of every parameter that had one; ``str()`` is a table, the worst first."""

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

    def __str__(self) -> str:
        bad = len(self.not_finite)
        found = f"{bad:,} not finite" if bad else f"all finite, norm {self.total_norm:.4g}"
        cells = [
            line._cells(f"{line.norm:.4g}" if line.finite else "NOT FINITE", f"{line.largest:.4g}")
            for line in self.worst(SHOWN)
        ]
        return self._table("gradients", found, ("norm", "largest"), cells)


def gradient_report(entries: Iterable[Entry], rows: Tensor, scope: str = "") -> GradientReport:
    """Merge statistics rows into a report. Waits for the device once, to copy the rows.

    Args:
        entries: the parameters; one without rows (an empty tensor) has norm 0.
        rows: FP32 ``(count, 3)`` on any device: (largest finite magnitude, sum of squares relative to it, 1 if an
            element was not finite).
        scope: whose gradients these are, for the heading; " of this rank", for example.
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


def listed(parameters: Sequence[ParameterGradient]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(parameters) - NAMED:,} more" if len(parameters) > NAMED else ""
    return ", ".join(map(str, parameters[:NAMED])) + more


def skip_warning(report: GradientReport, run: int) -> str:
    """What to say about ``run`` skipped steps in a row, the last of which saw ``report``."""
    bad = report.not_finite
    if bad:
        whose = f"in {listed(bad)} ({len(bad):,} of {len(report):,} parameters)"
    else:
        whose = "elsewhere (the gradients of this process are finite; found_inf or another rank told of one)"
    return (
        f"{run:,} steps in a row were skipped: gradients that are not finite {whose}. Parameters and state are as they "
        "were before. Look at the loss and the data of these steps, and lower the learning rate or the loss scale; "
        "print(optimizer.gradient_report()) shows every parameter"
    )


def warn_of_skips(report: GradientReport, run: int) -> None:
    """Warn of ``run`` skipped steps in a row, at the line outside this package and torch that asked for the step."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("ruda_torch", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(skip_warning(report, run), SkippedStepsWarning, stacklevel=level)


# ---- updates ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterUpdate(_Parameter):
    """How far the last update moved one parameter, weight decay apart."""

    update: float
    """L2 norm of ``lr * m_hat / (sqrt(v_hat) + eps)``."""
    parameter: float
    """L2 norm of the parameter as it is now."""

    @property
    def ratio(self) -> float:
        """Size of the update relative to the parameter; infinity for a parameter of zeros that was moved."""
        if self.parameter == 0.0:
            return math.inf if self.update else 0.0
        return self.update / self.parameter


class UpdateReport(_Report[ParameterUpdate]):
    """The last update of every parameter that has had one; ``str()`` is a table, the largest ratio first."""

    def largest(self, count: int = 1) -> tuple[ParameterUpdate, ...]:
        """The ``count`` parameters that moved most, relative to their size."""
        return tuple(sorted(self, key=lambda line: -line.ratio)[:count])

    def __str__(self) -> str:
        ratios = sorted(line.ratio for line in self)
        found = f"median of update / parameter {ratios[len(ratios) // 2]:.2g}" if ratios else "no update yet"
        cells = [
            line._cells(f"{line.ratio:.2g}", f"{line.update:.4g}", f"{line.parameter:.4g}")
            for line in self.largest(SHOWN)
        ]
        return self._table("updates", found, ("update / parameter", "update", "parameter"), cells)


@torch.no_grad()
def update_report(optimizer: torch.optim.Optimizer) -> UpdateReport:
    """The size of each parameter's last update, computed anew from its moments and its group's settings as they are.

    Costs a pass over parameters and moments, with plain tensor operations and memory for the largest parameter twice or
    three times; ask for it every hundred steps, not at every one. Waits for the device. Where a schedule has changed
    ``lr`` since the step, the update is of the new one. Of a sharded parameter, this rank's part.

    Args:
        optimizer: this package's AdamW or torch's.
    """
    state = vars(optimizer)["state"]  # as an attribute it would count as handed out; see AdamW.state
    owners = [
        (number, index, group, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter in state
    ]
    steps = _fetch([torch.as_tensor(sharding.local(state[parameter]["step"])) for *_, parameter in owners])
    norms, lines = [], []
    for (number, index, group, parameter), step in zip(owners, steps, strict=True):
        if step > 0:
            local = sharding.local(parameter)
            norms += [_norm(_update(group, state[parameter], int(step))), _norm(local)]
            lines.append((_name(group, index), number, index, local.numel()))
    sizes = iter(_fetch(norms))
    return UpdateReport(ParameterUpdate(*line, next(sizes), next(sizes)) for line in lines)


def _update(group: dict[str, Any], state: dict[str, Any], step: int) -> Tensor:
    lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
    amsgrad = bool(group["amsgrad"])
    config = generic.AdamWConfig(float(lr), float(beta1), float(beta2), eps, amsgrad=amsgrad)
    held = {name: sharding.local(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    if PACKED in held:
        first, second = unpacked(held[PACKED])
    else:
        first, second = held["exp_avg"].float(), held["exp_avg_sq"].float()
    maximum = held["max_exp_avg_sq"].float() if amsgrad else None
    return generic.AdamW(config).update(generic.Moments(step, first, second, maximum))


def _name(group: dict[str, Any], index: int) -> str | None:
    names = group.get("param_names")
    return None if names is None else names[index]


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def _fetch(numbers: list[Tensor]) -> list[float]:
    """One number of each tensor, with one copy from each device."""
    places: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number.device, []).append(place)
    found = [math.nan] * len(numbers)
    for here in places.values():
        for place, value in zip(here, torch.stack([numbers[place] for place in here]).tolist(), strict=True):
            found[place] = value
    return found
