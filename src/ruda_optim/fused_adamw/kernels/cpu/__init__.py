"""The C++ operator on the CPU. Importing this file loads nothing; see :mod:`..library`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import Kernels
from ..library import level as level
from ..library import operators
from ..library import unavailable as unavailable

if TYPE_CHECKING:
    from torch import Tensor

    from ..tables import LaunchTable

# Gradient elements per statistics row: enough to hide the row's own cost, few enough to share the work of one large
# tensor between threads.
STATISTICS_CHUNK = 65536


def kernels() -> Kernels:
    """The record of CPU kernels."""
    ops = operators()
    update, analyze = ops.adamw_scaled.default, ops.analyze_gradient.default

    def adamw_scaled(table: LaunchTable, coefficients: Tensor, inverse_scale: float, clip_factor: float) -> None:
        update(table.fields, table.layouts, coefficients, inverse_scale, clip_factor)

    def analyze_gradient(table: LaunchTable, rows: Tensor, inverse_scale: float) -> None:
        analyze(table.fields, table.layouts, rows, STATISTICS_CHUNK, inverse_scale)

    return Kernels(
        name="cpu",
        statistics_chunk=STATISTICS_CHUNK,
        adamw_scaled=adamw_scaled,
        analyze_gradient=analyze_gradient,
        merge_gradient_stats_chunks=ops.merge_gradient_stats_chunks.default,
        merge_gradient_stats=ops.merge_gradient_stats.default,
    )
