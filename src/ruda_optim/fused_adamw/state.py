"""Optimizer state and the result of one update. Values only: nothing here serializes, moves or computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import DifferentDevice, InvalidState, InvalidTensor, ShapeMismatch, StepOverflow
from .options import MAX_STEP

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AdamWState:
    """The state after ``step`` completed updates. Moments are uncorrected (before the bias correction).

    Args:
        step: t of the last completed update, an int in [1, 2^64 - 1]. Before the first update there is no state.
        first_moment: m, FP32 or BF16 (``AdamWOptions.moments``), the parameter's shape.
        second_moment: v, same dtype, shape and device.
        max_second_moment: running maximum of v, same dtype, shape and device; None without AMSGrad.

    Raises:
        InvalidState: ``step`` is not an int or below 1.
        StepOverflow: ``step`` is above 2^64 - 1.
        InvalidTensor: a moment is neither FP32 nor BF16, or has another dtype than the first.
        ShapeMismatch, DifferentDevice: the moments do not belong together.
    """

    step: int
    first_moment: Tensor
    second_moment: Tensor
    max_second_moment: Tensor | None = None

    def __post_init__(self) -> None:
        import torch  # not at module level: options and the reference must stay usable without torch

        if type(self.step) is not int or self.step < 1:
            raise InvalidState(
                f"step must be an int >= 1, got {self.step!r}; before the first update pass no state at all"
            )
        if self.step > MAX_STEP:
            raise StepOverflow(f"step must be at most 2^64 - 1, got {self.step}")
        first = self.first_moment
        for name in ("first_moment", "second_moment", "max_second_moment"):
            moment = getattr(self, name)
            if moment is None and name == "max_second_moment":
                continue
            if not isinstance(moment, torch.Tensor):
                raise InvalidTensor(f"{name} must be an FP32 or BF16 tensor, got {type(moment).__name__}")
            if moment.dtype not in (torch.float32, torch.bfloat16):
                raise InvalidTensor(
                    f"{name} must be an FP32 or BF16 tensor, got {moment.dtype}; convert it with .float()"
                )
            if moment.dtype is not first.dtype:
                raise InvalidTensor(
                    f"{name} must have the dtype of first_moment, {first.dtype}, got {moment.dtype}; convert one of "
                    "them"
                )
            if moment.shape != first.shape:
                raise ShapeMismatch(
                    f"{name} must have the shape of first_moment {tuple(first.shape)}, got {tuple(moment.shape)}"
                )
            if moment.device != first.device:
                raise DifferentDevice(
                    f"{name} must be on the device of first_moment, {first.device}, got {moment.device}; move it first"
                )

    @classmethod
    def from_parts(cls, step: int, first: Tensor, second: Tensor, maximum: Tensor | None = None) -> AdamWState:
        """The inverse of :meth:`into_parts`; the tensors are kept, not copied."""
        return cls(step, first, second, maximum)

    def into_parts(self) -> tuple[int, Tensor, Tensor, Tensor | None]:
        """``(step, first_moment, second_moment, max_second_moment)``, for example to save them."""
        return self.step, self.first_moment, self.second_moment, self.max_second_moment


@dataclass(frozen=True, slots=True, eq=False)
class AdamWUpdate:
    """The result of one out-of-place step."""

    parameters: Tensor
    """New memory if ``updated``, else the very tensor that was passed in."""
    state: AdamWState | None
    """The state after the step; if not ``updated``, what was passed in (None before the first update)."""
    updated: bool
    """False after a skip and for an empty tensor. On an accelerator True means submitted, not finished."""
