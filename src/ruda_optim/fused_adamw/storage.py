"""The kernels on memory that the caller owns: nothing here allocates device memory, and nothing is returned but counts.

A :class:`LaunchTable` describes any number of tensors of one device; one call serves them all. The caller vouches for
what the table holds (shapes, dtypes, aliasing, that the memory outlives the launch) and for the order of the calls on
an accelerator: they run on torch's current stream. Sizes of rows, reports and coefficients are checked here.

A statistics row is three FP32 numbers: scale (largest finite magnitude), sum of (g / scale)^2, bad (0 or 1). The report
of a step is twelve bytes: bad, scale, sumsq. Gradients are only read, and no kernel uses atomics, so a run repeats bit
for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .errors import DifferentDevice, InvalidTensor, ShapeMismatch
from .kernels import Availability as Availability
from .kernels import Kernels as Kernels
from .kernels import available as available
from .kernels import select as select
from .kernels.library import level
from .kernels.memory import check_has_memory as check_has_memory
from .kernels.memory import check_memory as check_memory
from .kernels.memory import overlaps as overlaps
from .kernels.tables import COEFFICIENTS as COEFFICIENTS
from .kernels.tables import GRADIENT_DTYPES as GRADIENT_DTYPES
from .kernels.tables import Field as Field
from .kernels.tables import Flag as Flag
from .kernels.tables import LaunchTable as LaunchTable
from .kernels.tables import TensorMemory as TensorMemory
from .stats_plan import FAN_IN, ROW_ELEMENTS, StatsPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .options import StepCoefficients


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise InvalidTensor(
            f"{name} must be a contiguous FP32 tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    if tuple(tensor.shape) != shape:
        raise ShapeMismatch(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise DifferentDevice(f"{name} must be on {device}, got {tensor.device}")
    check_has_memory(name, tensor)


def cpu_level() -> str:
    """The instruction set that the CPU operator uses: the best of this machine, or what ``RUDA_CPU_LEVEL`` names.

    Raises:
        ImportError: the package was built without the operator.
        RuntimeError: the processor is too old, or ``RUDA_CPU_LEVEL`` names no level of this machine.
    """
    number = level()
    return f"x86-64-v{number}" if number else "plain (no x86-64 level)"


def statistics_rows(table: LaunchTable) -> int:
    """How many rows :func:`analyze_gradient` writes for ``table``; the backend of its device decides."""
    return table.statistics_rows(select(table.device).statistics_chunk)


def analyze_gradient(table: LaunchTable, rows: Tensor, inverse_scale: float = 1.0) -> None:
    """Describe every gradient of ``table`` after multiplication by ``inverse_scale``.

    Args:
        table: the gradients; other columns are not looked at.
        rows: FP32 ``(statistics_rows(table), 3)`` on the table's device, written.
        inverse_scale: FP32 value, finite and > 0.
    """
    kernels = select(table.device)
    _check("rows", rows, (table.statistics_rows(kernels.statistics_chunk), ROW_ELEMENTS), table.device)
    kernels.analyze_gradient(table, rows, inverse_scale)


def merge_gradient_stats_chunks(rows: Tensor, merged: Tensor) -> None:
    """Merge each run of 1024 ``rows`` (the last may be shorter) into one row of ``merged``; see :class:`StatsPlan`."""
    _check("rows", rows, (rows.shape[0], ROW_ELEMENTS), rows.device)
    _check("merged", merged, (-(-rows.shape[0] // FAN_IN), ROW_ELEMENTS), rows.device)
    select(rows.device).merge_gradient_stats_chunks(rows, merged, FAN_IN)


def merge_gradient_stats(rows: Tensor, report: Tensor) -> None:
    """Merge all ``rows`` into ``report``, FP32 ``(3,)``: bad, scale, sumsq."""
    _check("rows", rows, (rows.shape[0], ROW_ELEMENTS), rows.device)
    _check("report", report, (ROW_ELEMENTS,), rows.device)
    select(rows.device).merge_gradient_stats(rows, report)


def adamw_scaled(
    table: LaunchTable, coefficients: Tensor, inverse_scale: float = 1.0, clip_factor: float = 1.0
) -> None:
    """Update every tensor of ``table`` in one launch.

    Args:
        table: the tensors. ``Field.COEFFICIENTS`` holds each tensor's row of ``coefficients``.
        coefficients: FP32 ``(k, COEFFICIENTS)`` on the host, from :func:`coefficient_table`.
        inverse_scale: FP32; every gradient is multiplied by it.
        clip_factor: FP32; the unscaled gradient is multiplied by it.
    """
    _check("coefficients", coefficients, (coefficients.shape[0], COEFFICIENTS), torch.device("cpu"))
    select(table.device).adamw_scaled(table, coefficients, inverse_scale, clip_factor)


def coefficient_table(steps: Sequence[StepCoefficients]) -> Tensor:
    """The FP32 ``(len(steps), COEFFICIENTS)`` host tensor that :func:`adamw_scaled` reads."""
    return torch.tensor([step.row for step in steps], dtype=torch.float32, device="cpu").view(-1, COEFFICIENTS)


class StatisticsWorkspace:
    """Reusable scratch for one statistics pass over tables of one device, and the pass itself.

    Args:
        device: where the tables live.
        hierarchical: merge in stages of 1024 rows (at most two, see :class:`StatsPlan`) before the final merge. False
            merges all rows at once, which costs an accelerator more time for large models and the same time on a CPU.

    Attributes:
        rows: FP32 ``(r, 3)``, the rows of the last pass.
        report: FP32 ``(3,)``, the report of the last pass.
    """

    def __init__(self, device: torch.device, *, hierarchical: bool = True) -> None:
        self._device = device
        self._hierarchical = hierarchical
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._plan = StatsPlan.new(1)
        self.rows = self._memory
        self.report = torch.empty(ROW_ELEMENTS, dtype=torch.float32, device=device)

    def run(self, table: LaunchTable, inverse_scale: float) -> None:
        """Analyze and merge; ``rows`` and ``report`` hold the result once the device gets there."""
        kernels = select(self._device)
        rows = table.statistics_rows(kernels.statistics_chunk)
        if rows != self.rows.shape[0]:
            self._reserve(rows)
        kernels.analyze_gradient(table, self.rows, inverse_scale)
        current = self.rows
        if self._hierarchical:
            scratch = self._memory[self.rows.numel() :]
            for stage in self._plan.stages:
                end = stage.output_offset + stage.output_rows * ROW_ELEMENTS
                merged = scratch[stage.output_offset : end].view(-1, ROW_ELEMENTS)
                kernels.merge_gradient_stats_chunks(current, merged, FAN_IN)
                current = merged
        kernels.merge_gradient_stats(current, self.report)

    def report_of(self, first_row: int, last_row: int) -> list[float]:
        """The report ``[bad, scale, sumsq]`` over the rows ``[first_row, last_row)`` of the last pass; waits for it."""
        report = torch.empty_like(self.report)
        select(self._device).merge_gradient_stats(self.rows[first_row:last_row], report)
        return report.tolist()

    def _reserve(self, rows: int) -> None:
        plan = StatsPlan.new(rows)
        needed = rows * ROW_ELEMENTS + plan.scratch_elements
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.float32, device=self._device)
        self._plan = plan
        self.rows = self._memory[: rows * ROW_ELEMENTS].view(rows, ROW_ELEMENTS)
