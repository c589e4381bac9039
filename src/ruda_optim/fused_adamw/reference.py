"""The specification in FP64 NumPy: slow, readable, called explicitly, never a fallback.

For the one-based update number t, with every operation in FP64:

    g      = stored_gradient * (1 / gradient_scale) * clip_factor      # then negated if maximize
    m      = beta1 * m_old + (1 - beta1) * g
    v      = beta2 * v_old + (1 - beta2) * g * g
    v_used = max(v_max_old, v)          # AMSGrad only; the uncorrected maximum is stored
    p_new  = p * (1 - lr * weight_decay)
             - lr * (m / (1 - beta1^t)) / (sqrt(v_used / (1 - beta2^t)) + epsilon)

Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad; PyTorch's AdamW for the order of the
maximum and the correction. The corrections are computed here and not taken from ``options.prepare_step``, so that a
mistake there cannot hide.

Moments in 16 bits are specified by their codes, in ``moment_codes.py``, which this module hands on. ``adamw`` itself
returns the exact moments whatever ``options.moments`` says; a kernel stores ``encode_bf16(m, v, dither(p, g, seed))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import InvalidState, ShapeMismatch, StepOverflow
from .gradient_norm import GradientGuardOptions, GradientStats
from .moment_codes import NEAREST as NEAREST
from .moment_codes import decode_bf16 as decode_bf16
from .moment_codes import decode_packed as decode_packed
from .moment_codes import dither as dither
from .moment_codes import encode_bf16 as encode_bf16
from .moment_codes import encode_packed as encode_packed
from .options import MAX_STEP, AdamWOptions, StepControl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

_DEFAULT_CONTROL = StepControl()


class ReferenceState(NamedTuple):
    """State after ``step`` updates: FP64 arrays of the parameter's shape, uncorrected moments."""

    step: int
    first_moment: Array
    second_moment: Array
    max_second_moment: Array | None
    """None without AMSGrad."""


def adamw(
    parameter: ArrayLike,
    gradient: ArrayLike,
    state: ReferenceState | None,
    options: AdamWOptions,
    control: StepControl = _DEFAULT_CONTROL,
    clip_factor: float = 1.0,
) -> tuple[Array, ReferenceState | None]:
    """One update, out of place.

    Args:
        parameter: any shape; read as FP64.
        gradient: as stored (scaled by ``control.gradient_scale``), same shape; read as FP64.
        state: None before the first update: moments count as zero.
        options: hyperparameters.
        control: the scale of the gradient. With ``skip_update``, and for an empty tensor, the inputs come back
            unchanged and no step is counted.
        clip_factor: the factor of ``GradientStats.decision``. Default 1.

    Returns:
        New parameter and new state. NaN and infinity propagate as IEEE says.

    Raises:
        ShapeMismatch: gradient or moments differ in shape from the parameter.
        InvalidState: the state's maximum does not fit ``options.amsgrad``, or its step is below 1.
        StepOverflow: the state's step is 2^64 - 1, and this call would count another, or it is above.
    """
    p = np.asarray(parameter, dtype=np.float64)
    stored = np.asarray(gradient, dtype=np.float64)
    _check(p, stored, state, options, control)
    if not _counts(p, control):
        return p.copy(), state
    if state is None:
        zero = np.zeros_like(p)
        state = ReferenceState(0, zero, zero, zero if options.amsgrad else None)

    beta1, beta2, lr = options.beta1, options.beta2, options.learning_rate
    t = state.step + 1
    with np.errstate(all="ignore"):  # overflow and NaN are results here, not accidents
        g = stored * (1.0 / control.gradient_scale) * clip_factor
        if options.maximize:
            g = -g
        m = beta1 * state.first_moment + (1.0 - beta1) * g
        v = beta2 * state.second_moment + (1.0 - beta2) * g * g
        v_max = None if state.max_second_moment is None else np.maximum(state.max_second_moment, v)  # keeps NaN
        v_used = v if v_max is None else v_max
        m_hat = m / (1.0 - beta1**t)
        v_hat = v_used / (1.0 - beta2**t)
        p_new = p * (1.0 - lr * options.weight_decay) - lr * m_hat / (np.sqrt(v_hat) + options.epsilon)
    return p_new, ReferenceState(t, m, v, v_max)


def _counts(p: Array, control: StepControl) -> bool:
    """Whether an update of ``p`` is a step."""
    return p.size > 0 and not control.skip_update


def _check(
    p: Array, gradient: Array, state: ReferenceState | None, options: AdamWOptions, control: StepControl
) -> None:
    if gradient.shape != p.shape:
        raise ShapeMismatch(f"gradient must have the parameter's shape {p.shape}, got {gradient.shape}")
    if state is None:
        return
    if state.step < 1:
        raise InvalidState(f"state.step must be at least 1, got {state.step}; before the first update pass None")
    if state.step + _counts(p, control) > MAX_STEP:
        raise StepOverflow(f"the step count must stay at most 2^64 - 1, got state.step {state.step}")
    if (state.max_second_moment is not None) != options.amsgrad:
        raise InvalidState(f"state.max_second_moment must be present exactly if amsgrad, got amsgrad={options.amsgrad}")
    for name, moment in zip(state._fields[1:], state[1:], strict=True):
        if moment is not None and moment.shape != p.shape:
            raise ShapeMismatch(f"{name} must have the parameter's shape {p.shape}, got {moment.shape}")


def gradient_stats(gradients: Sequence[NDArray[Any]], gradient_scale: float = 1.0) -> GradientStats:
    """Statistics of all gradients as if concatenated, after unscaling; sums in FP64.

    An element counts as finite if the stored value is finite and so is its FP32 product with the FP32 reciprocal of
    ``gradient_scale``: that is the value a kernel computes with. FP64 arrays are checked in FP64.

    Args:
        gradients: float arrays of any shapes; may be empty. BF16 values are passed as FP32 arrays, which hold them.
        gradient_scale: see :class:`~ruda_optim.fused_adamw.options.StepControl`.

    Raises:
        InvalidOption: ``gradient_scale`` is out of range.
    """
    control = StepControl(gradient_scale)
    sum_of_squares, largest, finite, elements = 0.0, 0.0, True, 0
    for gradient in gradients:
        stored = np.asarray(gradient)
        elements += stored.size
        with np.errstate(all="ignore"):
            if stored.dtype == np.float64:
                unscaled = stored * (1.0 / control.gradient_scale)
                good = np.isfinite(stored) & np.isfinite(unscaled)
            else:
                in_fp32 = stored.astype(np.float32) * np.float32(control.inverse_scale)
                good = np.isfinite(stored) & np.isfinite(in_fp32)
                unscaled = stored.astype(np.float64) * (1.0 / control.gradient_scale)
        magnitudes = np.abs(unscaled[good])
        finite = finite and bool(good.all())
        largest = max(largest, float(magnitudes.max(initial=0.0)))
        sum_of_squares += float(np.sum(magnitudes**2))
    return GradientStats(
        total_norm=float(np.sqrt(sum_of_squares)) if finite else float("inf"),
        max_finite_abs=largest,
        all_finite=finite,
        elements=elements,
        tensors=len(gradients),
        gradient_scale=control.gradient_scale,
    )


class ReferenceEntry(NamedTuple):
    """One parameter of a guarded group; see :func:`adamw`."""

    parameter: ArrayLike
    gradient: NDArray[Any]
    state: ReferenceState | None = None


def guarded_adamw(
    entries: Sequence[ReferenceEntry],
    options: AdamWOptions,
    control: StepControl = _DEFAULT_CONTROL,
    guard: GradientGuardOptions | None = None,
) -> list[tuple[Array, ReferenceState | None]]:
    """Statistics of all gradients, one decision, then :func:`adamw` for each entry with the common clip factor.

    Raises:
        NonFiniteGradients: a gradient is not finite and the policy is ``NonFinitePolicy.ERROR``.
        ShapeMismatch, InvalidState, StepOverflow: as :func:`adamw`, checked for every entry before the statistics.
    """
    for entry in entries:
        _check(np.asarray(entry.parameter), np.asarray(entry.gradient), entry.state, options, control)
    skip, clip_factor = control.skip_update, 1.0
    if not skip:
        stats = gradient_stats([entry.gradient for entry in entries], control.gradient_scale)
        decision = stats.decision(GradientGuardOptions() if guard is None else guard)
        skip, clip_factor = decision.skip_update, decision.clip_factor
    applied = StepControl(control.gradient_scale, skip)
    return [adamw(e.parameter, e.gradient, e.state, options, applied, clip_factor) for e in entries]
