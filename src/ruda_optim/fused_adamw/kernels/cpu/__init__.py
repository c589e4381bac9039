"""The C++ operator on the CPU. Importing this file loads nothing; see :mod:`..library`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import Kernels
from ..library import level as level
from ..library import operators
from ..library import unavailable as unavailable

if TYPE_CHECKING:
    from torch import Tensor

    from ..decision import DecisionMemory
    from ..tables import LaunchTable

# Gradient elements per statistics row: enough to hide the row's own cost, few enough to share the work of one large
# tensor between threads.
STATISTICS_CHUNK = 65536


def kernels() -> Kernels:
    """The record of CPU kernels."""
    ops = operators()
    update, analyze, take_decision = ops.adamw_scaled.default, ops.analyze_gradient.default, ops.decide.default

    def adamw_scaled(
        table: LaunchTable,
        coefficients: Tensor,
        inverse_scale: float,
        clip_factor: float,
        *,
        decision: Tensor | None = None,
    ) -> None:
        if decision is not None:
            skip, clip_factor, inverse_scale, _ = decision.tolist()
            if skip:
                return
        update(table.fields, table.layouts, coefficients, inverse_scale, clip_factor, decision is not None)

    def analyze_gradient(
        table: LaunchTable, rows: Tensor, inverse_scale: float, *, scale: Tensor | None = None
    ) -> None:
        analyze(table.fields, table.layouts, rows, STATISTICS_CHUNK, _inverse(inverse_scale, scale))

    def decide(
        table: LaunchTable,
        memory: DecisionMemory,
        coefficients: Tensor,
        rows: Tensor | None,
        inverse_scale: float,
        *,
        measured: bool,
        check_finite: bool,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        stages: bool = False,
    ) -> None:
        take_decision(
            table.fields,
            memory.hyperparameters,
            memory.report,
            memory.decision,
            memory.counts,
            coefficients,
            memory.decision if rows is None else rows,
            rows is not None,
            stages,
            measured,
            check_finite,
            _inverse(inverse_scale, scale),
            0.0 if found_inf is None else float(found_inf),
        )

    return Kernels(
        name="cpu",
        statistics_chunk=STATISTICS_CHUNK,
        adamw_scaled=adamw_scaled,
        analyze_gradient=analyze_gradient,
        merge_gradient_stats_chunks=ops.merge_gradient_stats_chunks.default,
        merge_gradient_stats=ops.merge_gradient_stats.default,
        decide=decide,
    )


def _inverse(inverse_scale: float, scale: Tensor | None) -> float:
    return inverse_scale if scale is None else float(scale.reciprocal())
