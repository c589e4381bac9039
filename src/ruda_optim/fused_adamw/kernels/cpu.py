"""The C++ operator on the CPU, and the table operators that serve every device.

The library is found as a module (so an editable install, a wheel and a source tree all work) and loaded with
``torch.ops.load_library`` on first use; importing this file loads nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from . import Kernels

if TYPE_CHECKING:
    from torch import Tensor

    from .tables import LaunchTable

# Gradient elements per statistics row: enough to hide the row's own cost, few enough to share the work of one large
# tensor between threads.
STATISTICS_CHUNK = 65536


def unavailable() -> str | None:
    """Why the CPU operator cannot run, or ``None``."""
    if _library() is None:
        return (
            "ruda-optim was built without its C++ operator, which the fused step needs on the CPU. Install a C++ "
            "compiler (Debian: apt-get install g++) and reinstall: pip install "
            "--no-build-isolation --force-reinstall ruda-optim"
        )
    return None


def _library() -> str | None:
    spec = importlib.util.find_spec(f"{__package__}._ops")
    return None if spec is None else spec.origin


@functools.cache
def operators() -> Any:
    """The namespace of C++ operators, loaded once.

    Raises:
        ImportError: the package was built without the operator.
    """
    reason = unavailable()
    if reason is not None:
        raise ImportError(reason)
    torch.ops.load_library(_library())
    return torch.ops.ruda_optim


def level() -> int:
    """The instruction-set level in use: 4, 3 or 2 for x86-64-v4, v3, v2; 0 for the plain build."""
    return int(operators().cpu_level.default(torch.empty(0)))


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
