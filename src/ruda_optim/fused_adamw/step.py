"""The functional, out-of-place step: check everything, allocate, launch.

Inputs and their aliases are never written. Every check comes before the first allocation or launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from .errors import DifferentDevice, InvalidOption, InvalidState, InvalidTensor, ShapeMismatch
from .gradient_norm import GradientDecision, GradientGuardOptions, GradientStats
from .options import AdamWOptions, StepCoefficients, StepControl
from .state import AdamWState, AdamWUpdate
from .storage import (
    GRADIENT_DTYPES,
    Field,
    LaunchTable,
    StatisticsWorkspace,
    TensorMemory,
    adamw_scaled,
    check_has_memory,
    coefficient_table,
    select,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from torch import Tensor

_Function = TypeVar("_Function", bound="Callable[..., Any]")

_DEFAULT_CONTROL = StepControl()
_DEFAULT_GUARD = GradientGuardOptions()
_MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class GuardedUpdate:
    """The result of :func:`guarded_adamw_step`."""

    updates: tuple[AdamWUpdate, ...]
    """One per entry, in order."""
    stats: GradientStats | None
    """Statistics of all gradients; None when ``control.skip_update`` asked for nothing to be launched."""
    decision: GradientDecision


def _outside_of_graphs(function: _Function) -> _Function:
    """Break the graph of ``torch.compile`` around ``function``, which reads addresses and branches on values."""
    eager = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # imports the compiler at its first call

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (eager if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@_outside_of_graphs
def adamw_step(
    parameters: Tensor,
    gradients: Tensor,
    state: AdamWState | None,
    options: AdamWOptions,
    control: StepControl = _DEFAULT_CONTROL,
) -> AdamWUpdate:
    """One AdamW / AMSGrad update, out of place, in one kernel.

    Args:
        parameters: FP32, dense and contiguous, any shape.
        gradients: FP32, FP16 or BF16, the parameters' shape, any strides; ``control.gradient_scale`` times the true
            gradients.
        state: the state after the previous update, or None before the first one: that update computes the moments
            without reading memory for them.
        options: hyperparameters. ``options.amsgrad`` and ``options.moments`` must agree with the state.
        control: loss scale, and a flag that skips the update.

    Returns:
        New parameters and state. For an empty tensor, or with ``control.skip_update``, nothing is launched or allocated
        and no step is counted: the very inputs come back with ``updated=False``. On an accelerator the call is
        asynchronous and ``updated=True`` means submitted.

    Raises:
        InvalidTensor: not a tensor, a wrong dtype or layout.
        ShapeMismatch, DifferentDevice: tensors that do not belong together; nothing is broadcast or moved.
        InvalidState: the state lacks the AMSGrad maximum that the options need, has one that they do not use, or has
            not the dtype that they say.
        StepOverflow: the step count is at 2^64 - 1, and this call would count another.
        ImportError: the device's kernels cannot run here; the message says why.

    Source of the formula: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad.
    """
    _check_settings(options, control)
    coefficients = _check_entry("", parameters, gradients, state, options, control)
    if coefficients is None:
        return AdamWUpdate(parameters, state, updated=False)
    return _launch([(parameters, gradients, state)], [coefficients], options, 1.0)[0]


@_outside_of_graphs
def gradient_stats(gradients: Sequence[Tensor], gradient_scale: float = 1.0) -> GradientStats:
    """One global L2 norm over all gradients as if concatenated, after unscaling. Reads each gradient once.

    Args:
        gradients: FP32, FP16 or BF16 tensors of one device, any strides, possibly empty. Not parameters: their
            ``.grad`` is not looked up.
        gradient_scale: the loss scale to take out; see :class:`StepControl` for its range.

    Returns:
        The statistics. Finite gradients never give an infinite norm, and small ones never vanish: the sum of squares is
        kept relative to the largest magnitude. Waits for the device (12 bytes).

    Raises:
        InvalidTensor: not a sequence of tensors, or a wrong dtype or layout.
        DifferentDevice: the gradients live on several devices.
        InvalidOption: a ``gradient_scale`` out of range.
    """
    control = StepControl(gradient_scale=gradient_scale)
    if not _is_sequence(gradients):
        raise InvalidTensor(
            f"gradients must be a sequence of tensors, got {type(gradients).__name__}; pass [tensor] for a single one"
        )
    gradients = list(gradients)
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, torch.nn.Parameter):
            raise InvalidTensor(f"gradients[{index}] is a Parameter; pass its gradient, [p.grad for p in parameters]")
        _check_tensor(f"gradients[{index}]", gradient, GRADIENT_DTYPES)
        if gradient.device != gradients[0].device:
            raise DifferentDevice(
                f"all gradients must be on one device; gradients[0] is on {gradients[0].device}, gradients[{index}] on "
                f"{gradient.device}"
            )
    return _statistics(gradients, control)


@_outside_of_graphs
def guarded_adamw_step(
    entries: Sequence[tuple[Tensor, Tensor, AdamWState | None]],
    options: AdamWOptions,
    control: StepControl = _DEFAULT_CONTROL,
    guard: GradientGuardOptions = _DEFAULT_GUARD,
) -> GuardedUpdate:
    """:func:`adamw_step` for a group of tensors, clipped to one global norm and guarded against non-finite gradients.

    Order: all metadata and step checks; one statistics pass over all gradients; one decision; one update launch, with
    the common clip factor inside the kernel.

    Args:
        entries: ``(parameters, gradients, state)`` per tensor, each as for :func:`adamw_step`, all on one device.
        options: as for :func:`adamw_step`, common to all entries.
        control: likewise.
        guard: largest norm, and what a non-finite gradient does.

    Returns:
        One update per entry, the statistics and the decision. A skip keeps the whole group: no decay, no moments, no
        step, ``updated=False`` everywhere.

    Raises:
        NonFiniteGradients: with ``NonFinitePolicy.ERROR``, before any update is launched.
        FusedAdamWError: as for :func:`adamw_step`, naming the entry.
    """
    _check_settings(options, control)
    if not isinstance(guard, GradientGuardOptions):
        raise InvalidOption(f"guard must be GradientGuardOptions, got {type(guard).__name__}")
    if not _is_sequence(entries):
        raise InvalidTensor(
            f"entries must be a sequence of (parameters, gradients, state), got {type(entries).__name__}"
        )
    entries = list(entries)
    coefficients = []
    for index, entry in enumerate(entries):
        if not _is_entry(entry):
            raise InvalidTensor(f"entries[{index}] must be a tuple (parameters, gradients, state), got {entry!r:.80}")
        coefficients.append(_check_entry(f"entries[{index}].", *entry, options, control))
        if entry[0].device != entries[0][0].device:
            raise DifferentDevice(
                f"all entries must be on one device; entries[0] is on {entries[0][0].device}, entries[{index}] on "
                f"{entry[0].device}. Call guarded_adamw_step once per device"
            )
    kept = tuple(AdamWUpdate(parameters, state, updated=False) for parameters, _, state in entries)
    if control.skip_update:
        return GuardedUpdate(kept, None, GradientDecision(clip_factor=1.0, skip_update=True))

    stats = _statistics([gradients for _, gradients, _ in entries], control)
    decision = stats.decision(guard)
    if decision.skip_update:
        return GuardedUpdate(kept, stats, decision)
    filled = {index: step for index, step in enumerate(coefficients) if step is not None}
    launched = _launch([entries[i] for i in filled], list(filled.values()), options, decision.clip_factor)
    updates = list(kept)
    for index, update in zip(filled, launched, strict=True):
        updates[index] = update
    return GuardedUpdate(tuple(updates), stats, decision)


def _is_sequence(value: object) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, torch.Tensor)


def _is_entry(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3


def _check_settings(options: AdamWOptions, control: StepControl) -> None:
    if not isinstance(options, AdamWOptions):
        raise InvalidOption(f"options must be AdamWOptions, got {type(options).__name__}")
    if not isinstance(control, StepControl):
        raise InvalidOption(f"control must be StepControl, got {type(control).__name__}")


def _check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidTensor(f"{name} must be a {wanted} tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise InvalidTensor(f"{name} must be a dense tensor, got layout {tensor.layout}; call .to_dense()")
    if tensor.dtype not in dtypes:
        raise InvalidTensor(f"{name} must be {wanted}, got {tensor.dtype}")
    if tensor.is_neg():
        raise InvalidTensor(f"{name} is a lazily negated view; call .resolve_neg()")
    if tensor._is_zerotensor():
        raise InvalidTensor(f"{name} is zero without memory; call .clone()")
    check_has_memory(name, tensor)


def _check_entry(
    where: str,
    parameters: Tensor,
    gradients: Tensor,
    state: AdamWState | None,
    options: AdamWOptions,
    control: StepControl,
) -> StepCoefficients | None:
    """Every check of one tensor, and the scalars of its next step; None where no step is counted."""
    _check_tensor(f"{where}parameters", parameters, (torch.float32,))
    if not parameters.is_contiguous():
        raise InvalidTensor(
            f"{where}parameters must be contiguous; got shape {tuple(parameters.shape)} with strides "
            f"{parameters.stride()}. Call .contiguous(), or use ruda_torch.AdamW, which updates any layout in place"
        )
    _check_tensor(f"{where}gradients", gradients, GRADIENT_DTYPES)
    others = [("gradients", gradients)]
    if state is not None:
        if not isinstance(state, AdamWState):
            raise InvalidState(f"{where}state must be AdamWState or None, got {type(state).__name__}")
        moments = [("state.first_moment", state.first_moment), ("state.second_moment", state.second_moment)]
        if state.max_second_moment is not None:
            moments.append(("state.max_second_moment", state.max_second_moment))
        for name, moment in moments:
            if moment.dtype is not _MOMENT_DTYPES[options.moments]:
                raise InvalidState(
                    f"{where}{name} must be {options.moments} for moments={options.moments!r}, got "
                    f"{str(moment.dtype).removeprefix('torch.')}. To convert, rebuild the state with "
                    f"AdamWState.from_parts(...) of .to(torch.{options.moments}), which rounds to nearest once"
                )
            _check_tensor(f"{where}{name}", moment, (_MOMENT_DTYPES[options.moments],))
            if not moment.is_contiguous():
                raise InvalidTensor(
                    f"{where}{name} must be contiguous, got strides {moment.stride()}; call .contiguous()"
                )
        others += moments
        if options.amsgrad and state.max_second_moment is None:
            raise InvalidState(
                f"{where}state has no max_second_moment, which amsgrad=True needs. To convert, rebuild the state with "
                "maximum=second_moment.clone()"
            )
        if not options.amsgrad and state.max_second_moment is not None:
            raise InvalidState(
                f"{where}state has a max_second_moment, which amsgrad=False would leave behind. To convert, rebuild "
                "the state with maximum=None"
            )
    for name, tensor in others:
        if tensor.shape != parameters.shape:
            raise ShapeMismatch(
                f"{where}{name} must have the parameters' shape {tuple(parameters.shape)}, got {tuple(tensor.shape)}; "
                "nothing is broadcast"
            )
        if tensor.device != parameters.device:
            raise DifferentDevice(
                f"{where}{name} must be on the parameters' device {parameters.device}, got {tensor.device}"
            )
    select(parameters.device)  # raises where the device's kernels cannot run
    if control.skip_update or parameters.numel() == 0:
        return None
    return options.prepare_step(0 if state is None else state.step, control)


def _statistics(gradients: list[Tensor], control: StepControl) -> GradientStats:
    filled = [gradient for gradient in gradients if gradient.numel() > 0]
    report = [0.0, 0.0, 0.0]
    if filled:
        table = LaunchTable([TensorMemory(gradient) for gradient in filled], filled[0].device)
        workspace = StatisticsWorkspace(filled[0].device)
        workspace.run(table, control.inverse_scale)
        report = workspace.report.tolist()
    return GradientStats.from_report(
        *report,
        elements=sum(gradient.numel() for gradient in gradients),
        tensors=len(gradients),
        gradient_scale=control.gradient_scale,
    )


def _launch(
    entries: list[tuple[Tensor, Tensor, AdamWState | None]],
    steps: list[StepCoefficients],
    options: AdamWOptions,
    clip_factor: float,
) -> list[AdamWUpdate]:
    """Allocate the results of checked, non-empty entries and launch one update for all of them."""
    if not entries:
        return []
    memories, updates = [], []
    for (parameters, gradients, state), step in zip(entries, steps, strict=True):
        moments = _MOMENT_DTYPES[options.moments]
        new_state = AdamWState(
            step.step, *(torch.empty_like(parameters, dtype=moments) for _ in range(3 if options.amsgrad else 2))
        )
        new = torch.empty_like(parameters)
        old_state = new_state if state is None else state  # FIRST: the kernel does not read the old moments
        memories.append(
            TensorMemory(
                gradient=gradients,
                parameter=parameters,
                exp_avg=old_state.first_moment,
                exp_avg_sq=old_state.second_moment,
                max_exp_avg_sq=old_state.max_second_moment,
                parameter_out=new,
                exp_avg_out=new_state.first_moment,
                exp_avg_sq_out=new_state.second_moment,
                max_exp_avg_sq_out=new_state.max_second_moment,
                first=state is None,
            )
        )
        updates.append(AdamWUpdate(new, new_state, updated=True))
    table = LaunchTable(memories, entries[0][0].device)
    rows = {step: row for row, step in enumerate(dict.fromkeys(steps))}
    table.fields[Field.COEFFICIENTS] = torch.tensor([rows[step] for step in steps], device="cpu")
    adamw_scaled(table, coefficient_table(list(rows)), steps[0].inverse_scale, clip_factor)
    return updates
