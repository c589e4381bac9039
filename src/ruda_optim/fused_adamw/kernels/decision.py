"""What a step decides and where it is decided: the device memory that ``Kernels.decide`` reads and writes.

The decision is taken where the tensors are, on every backend, so that a step never waits for an accelerator. The host
looks at this memory only when somebody asks what the step did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import ShapeMismatch
from .tables import COEFFICIENTS

if TYPE_CHECKING:
    from torch import Tensor

    from .tables import LaunchTable

HYPERPARAMETERS = 8
"""FP64 numbers per parameter group, the columns of ``csrc/adamw_update.h``'s ``Hyperparameters``: lr, beta1, beta2,
epsilon, weight_decay, gradient_sign, max_norm (negative: no clipping), guard epsilon. The last two belong to the whole
step and are read from row 0."""
MAX_NORM = 6
"""The column of max_norm."""
DECISION = 4
"""FP32 numbers of a decision: skip (0 or 1), clip factor, inverse of the loss scale, 0."""


@dataclass
class DecisionMemory:
    """The memory of one device; everything contiguous and on that device.

    Attributes:
        hyperparameters: FP64 ``(groups, HYPERPARAMETERS)``, read.
        report: FP64 ``(3,)``: bad, scale, sumsq. Written from the statistics rows, or read where it came from
            elsewhere (several devices, several ranks). ``bad`` is 1 too where ``found_inf`` called the step off.
        decision: FP32 ``(DECISION,)``, written; the update reads it.
        counts: int64 ``(2,)``: skipped steps in all, and skipped steps in a row. Updated.
    """

    hyperparameters: Tensor
    report: Tensor
    decision: Tensor
    counts: Tensor

    @classmethod
    @torch.inference_mode(False)
    def empty(cls, groups: int, device: torch.device) -> DecisionMemory:
        """The memory of a step over ``groups`` parameter groups that has not decided anything yet."""
        return cls(
            torch.zeros((groups, HYPERPARAMETERS), dtype=torch.float64, device=device),
            torch.zeros(3, dtype=torch.float64, device=device),
            torch.zeros(DECISION, dtype=torch.float32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.hyperparameters, self.report, self.decision, self.counts


def check_room(table: LaunchTable, coefficients: Tensor, rows: Tensor | None, *, measured: bool) -> None:
    """What ``decide`` refuses: the sizes on which its writes depend, and rows of a step that measured nothing."""
    if coefficients.numel() != COEFFICIENTS * len(table) or not coefficients.is_contiguous():
        raise ShapeMismatch(
            f"decide needs a contiguous row of {COEFFICIENTS} coefficients for each of {len(table)} tensors, got shape "
            f"{tuple(coefficients.shape)} with strides {coefficients.stride()}"
        )
    if rows is not None and (not measured or rows.numel() % 3 or not rows.is_contiguous()):
        raise ShapeMismatch(
            "decide needs contiguous statistics rows of 3 numbers with measured=True, or None; got shape "
            f"{tuple(rows.shape)} with strides {rows.stride()} and measured={measured}"
        )
