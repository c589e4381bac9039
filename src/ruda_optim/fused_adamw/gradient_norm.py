"""What the gradient guard decides, and the numbers it decides from. The host part: no tensors, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from .errors import InvalidOption, InvalidState, NonFiniteGradients
from .options import check_number, round_to_fp32


class NonFinitePolicy(Enum):
    """What happens to a group in which a gradient is NaN or infinite, before or after unscaling."""

    SKIP = "skip"
    """Keep the whole group: no decay, no moments, no step."""
    ERROR = "error"
    """Raise :class:`~ruda_optim.fused_adamw.errors.NonFiniteGradients` before any update is launched."""


@dataclass(frozen=True, slots=True)
class GradientGuardOptions:
    """Global clipping and the finite check.

    Args:
        max_norm: largest global L2 norm of the unscaled gradients, >= 0. None checks finiteness only, and so does
            infinity. 0 makes every effective gradient zero; decay and step still happen. Default 1.
        epsilon: added to the norm before dividing, finite, >= 0. Default 1e-6.
        nonfinite: default ``NonFinitePolicy.SKIP``.

    Raises:
        InvalidOption: a value of the wrong type or outside its range.
    """

    max_norm: float | None = 1.0
    epsilon: float = 1e-6
    nonfinite: NonFinitePolicy = NonFinitePolicy.SKIP

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            requirement = "None (finite check only) or a number >= 0"
            max_norm = check_number("max_norm", self.max_norm, requirement, infinite=True)
            if max_norm < 0.0:
                raise InvalidOption(f"max_norm must be {requirement}, got {max_norm!r}")
            object.__setattr__(self, "max_norm", max_norm)
        epsilon = check_number("epsilon", self.epsilon, "a finite number >= 0")
        if epsilon < 0.0:
            raise InvalidOption(f"epsilon must be a finite number >= 0, got {epsilon!r}")
        object.__setattr__(self, "epsilon", epsilon)
        if not isinstance(self.nonfinite, NonFinitePolicy):
            raise InvalidOption(
                f"nonfinite must be NonFinitePolicy.SKIP or NonFinitePolicy.ERROR, got {self.nonfinite!r}"
            )


@dataclass(frozen=True, slots=True)
class GradientDecision:
    """One decision for a whole group."""

    clip_factor: float
    """In [0, 1], an FP32 value. 1 when the update is skipped: nothing is multiplied then."""
    skip_update: bool


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Statistics of all gradients of a group as if concatenated, after unscaling."""

    total_norm: float
    """Global L2 norm, FP64; infinity if anything is not finite."""
    max_finite_abs: float
    """Largest magnitude among the finite elements; 0 without any."""
    all_finite: bool
    """No element is NaN or infinite, neither as stored nor after unscaling in FP32."""
    elements: int
    tensors: int
    gradient_scale: float
    """The loss scale that was taken out; 1 for none."""

    @classmethod
    def from_report(
        cls, bad: float, scale: float, sumsq: float, *, elements: int, tensors: int, gradient_scale: float
    ) -> GradientStats:
        """Statistics from the three FP32 numbers that the merge kernels report.

        Args:
            bad: 0, or 1 if an element was not finite.
            scale: the largest finite magnitude.
            sumsq: sum of (g / scale)^2 over the finite elements.
            elements: how many there were.
            tensors: likewise.
            gradient_scale: the scale that the kernels took out.

        Raises:
            InvalidState: the numbers cannot come from the kernels (``bad`` is neither 0 nor 1, the others are negative
                or not finite).
        """
        if bad not in (0.0, 1.0) or not 0.0 <= scale < math.inf or not 0.0 <= sumsq < math.inf:
            raise InvalidState(
                "a statistics report must be (bad 0 or 1, scale finite >= 0, sumsq finite >= 0), "
                f"got ({bad!r}, {scale!r}, {sumsq!r}); its memory was overwritten or never written"
            )
        finite = bad == 0.0
        # scale * sqrt(sumsq) in FP64: at most 3.4e38 times the root of the element count, so it cannot overflow.
        return cls(
            total_norm=scale * math.sqrt(sumsq) if finite else math.inf,
            max_finite_abs=scale,
            all_finite=finite,
            elements=elements,
            tensors=tensors,
            gradient_scale=gradient_scale,
        )

    def decision(self, options: GradientGuardOptions) -> GradientDecision:
        """Clip factor min(max_norm / (total_norm + epsilon), 1) in FP64, then rounded to FP32; or skip.

        A zero norm gives factor 1, because there is nothing to clip; ``max_norm=0`` always gives 0.

        Raises:
            NonFiniteGradients: something is not finite and the policy is ``NonFinitePolicy.ERROR``.
        """
        if not self.all_finite:
            if options.nonfinite is NonFinitePolicy.ERROR:
                raise NonFiniteGradients(
                    f"gradients must be finite, got NaN or infinity among {self.elements} elements of {self.tensors} "
                    f"tensors at gradient_scale {self.gradient_scale!r}; nothing was updated. Lower the gradient scale "
                    "or the learning rate, or use NonFinitePolicy.SKIP"
                )
            return GradientDecision(clip_factor=1.0, skip_update=True)
        if options.max_norm is None:
            factor = 1.0
        elif options.max_norm == 0.0:
            factor = 0.0
        elif self.total_norm == 0.0:
            factor = 1.0
        else:
            factor = min(options.max_norm / (self.total_norm + options.epsilon), 1.0)
        return GradientDecision(clip_factor=round_to_fp32(factor), skip_update=False)
