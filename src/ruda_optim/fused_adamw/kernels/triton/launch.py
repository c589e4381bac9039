"""How the Triton kernels are launched: tables, block maps, compiled kernels, the PTX version. No arithmetic on tensors.

A kernel is compiled once per device and specialization and launched through the compiled object, past Triton's
argument inspection; no argument's value is part of a specialization, so neither a new learning rate nor another number
of tensors compiles anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InvalidOption
from .. import Kernels
from ..block_map import SEVERAL_KINDS, STATISTICS_KIND, UPDATE_KIND, Launch
from ..decision import check_room
from ..device_table import device_table
from ..tables import Flag
from .memory import GENERAL_KIND

if TYPE_CHECKING:
    from torch import Tensor

    from ..decision import DecisionMemory
    from ..tables import LaunchTable

PTX_VERSION_VARIABLE = "RUDA_PTX_VERSION"

THREADS = 256
# Four elements a thread: one 128-bit access of FP32, and a 16-bit gradient needs no exchange between threads. The tail,
# which is masked or misaligned, goes one element at a time.
UPDATE_BLOCK = 4 * THREADS
UPDATE_TAIL = 2 * THREADS
UPDATE_CHUNK = 8 * UPDATE_BLOCK
# One reduction per block, so a large one: 32 elements a thread, all of them in flight at once.
STATISTICS_BLOCK = 32 * THREADS
STATISTICS_TAIL = 8 * THREADS
# Rows of a 124-million-parameter model stay below 1024, so that its statistics need no merge launch.
STATISTICS_CHUNK = 20 * STATISTICS_BLOCK
# A strided walk keeps a 64-bit offset per element and role: one element a thread.
STRIDED_TAIL = THREADS
MERGE_BLOCK = 1024
DECIDE_BLOCK = THREADS


@dataclass(frozen=True)
class Functions:
    """The Triton functions of update.py, statistics.py and decide.py."""

    update: Any
    analyze: Any
    merge: Any
    decide: Any


@dataclass(frozen=True)
class Specialization:
    """What a kernel is compiled for: the values of its ``constexpr`` parameters."""

    constants: tuple[tuple[str, int], ...]

    def options(self, warp_size: int) -> dict[str, Any]:
        """Every multiplication and addition rounds by itself: contraction would change bits."""
        return {"num_warps": THREADS // warp_size, "enable_fp_fusion": False}


@functools.cache
def update_specialization(kind: int) -> Specialization:
    """The update of tensors whose ``flags & UPDATE_KIND`` is ``kind``, or of any with the form of moments in ``kind``
    (``GENERAL_KIND | form``)."""
    tail = STRIDED_TAIL if kind & (Flag.STRIDED | GENERAL_KIND) else UPDATE_TAIL
    return Specialization((("KIND", kind), ("CHUNK", UPDATE_CHUNK), ("BLOCK", UPDATE_BLOCK), ("TAIL", tail)))


@functools.cache
def analyze_specialization(kind: int) -> Specialization:
    """The statistics of tensors whose ``flags & STATISTICS_KIND`` is ``kind``, or of any (``GENERAL_KIND``)."""
    block, tail = STATISTICS_BLOCK, STATISTICS_TAIL
    if kind == GENERAL_KIND:
        block, tail = block // 4, STRIDED_TAIL  # three loads, and a strided walk
    elif kind & Flag.STRIDED:
        tail = STRIDED_TAIL
    return Specialization((("KIND", kind), ("CHUNK", STATISTICS_CHUNK), ("BLOCK", block), ("TAIL", tail)))


@functools.cache
def merge_specialization(report: bool) -> Specialization:
    """The merge of rows into rows, or into the final report."""
    return Specialization((("REPORT", int(report)), ("BLOCK", MERGE_BLOCK)))


DECIDE = Specialization((("MERGE", MERGE_BLOCK), ("BLOCK", DECIDE_BLOCK)))


def every_specialization() -> dict[str, list[Specialization]]:
    """All that this module can ever ask Triton for, by kernel name; the ``build`` suite compiles each of them."""
    strided = (0, int(Flag.STRIDED))
    gradients = (0, int(Flag.GRAD_FP16), int(Flag.GRAD_BF16))
    copies = (0, int(Flag.COPY_FP16), int(Flag.COPY_BF16), int(Flag.COPY_BF16 | Flag.SPLIT))
    amsgrad = (0, int(Flag.AMSGRAD))
    moments = (0, int(Flag.MOMENTS_BF16), int(Flag.MOMENTS_PACKED))
    updates = [g | c | a | s | m for m in moments for s in strided for g in gradients for c in copies for a in amsgrad]
    updates += [GENERAL_KIND | m for m in moments]
    statistics = [g | s for s in strided for g in gradients]
    return {
        "update": [update_specialization(kind) for kind in updates],
        "analyze": [analyze_specialization(kind) for kind in (*statistics, GENERAL_KIND)],
        "merge": [merge_specialization(False), merge_specialization(True)],
        "decide": [DECIDE],
    }


# ---- PTX version -----------------------------------------------------------------------------------------------------

# The first PTX version that knows an architecture (the 'a' variant from 9.0 on, which is what Triton compiles for).
# A lower one ends the process inside LLVM instead of raising.
_FIRST_PTX = {75: 63, 80: 70, 86: 71, 87: 74, 89: 78, 90: 80, 100: 86, 103: 88, 110: 90, 120: 87, 121: 88}


def parse_ptx_version(text: str, arch: int, newest: int) -> int:
    """``"8.6"`` as Triton's number 86.

    Args:
        text: the value of ``RUDA_PTX_VERSION``.
        arch: compute capability times ten, for example 90.
        newest: the newest version that Triton's assembler takes, as a number.

    Raises:
        InvalidOption: not a version, or one that the architecture or the assembler does not take.
    """
    first = _FIRST_PTX.get(arch)
    if first is None:
        raise InvalidOption(
            f"{PTX_VERSION_VARIABLE} cannot be checked for sm_{arch}; unset it to let Triton choose. Known: "
            + ", ".join(f"sm_{known}" for known in _FIRST_PTX)
        )
    accepted = f"{first // 10}.{first % 10} to {newest // 10}.{newest % 10}"
    match = re.fullmatch(r"([0-9]+)\.([0-9])", text)
    version = int(match[1]) * 10 + int(match[2]) if match else None
    if version is None or not first <= version <= newest:
        raise InvalidOption(
            f"{PTX_VERSION_VARIABLE} must be a PTX version from {accepted} on sm_{arch} with the installed Triton; "
            f"got {text!r}. Unset it to let Triton choose"
        )
    return version


def ptx_version(backend: str, arch: Any) -> int | None:
    """The checked value of ``RUDA_PTX_VERSION`` for Triton's target, or ``None`` if it is unset.

    Raises:
        InvalidOption: see :func:`parse_ptx_version`; also on AMD, which has no PTX.
    """
    text = os.environ.get(PTX_VERSION_VARIABLE)
    if not text:
        return None
    if backend != "cuda":
        raise InvalidOption(f"{PTX_VERSION_VARIABLE} is for NVIDIA devices only, got {text!r} on {arch}; unset it")
    from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

    return parse_ptx_version(text, int(arch), ptx_get_version(get_ptxas(int(arch)).version))


# ---- launches --------------------------------------------------------------------------------------------------------


def interpreted(functions: Functions) -> bool:
    """Whether ``TRITON_INTERPRET`` was set when the kernels were defined."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(functions.update, InterpretedFunction)


_compiled: dict[tuple[Any, Specialization, int, str | None], Any] = {}


def launch(function: Any, specialization: Specialization, grid: int, *arguments: Any, simulate: bool = False) -> None:
    """Launches on the current device and stream, compiling first if need be."""
    constants = dict(specialization.constants)
    if simulate:
        function[(grid,)](*arguments, **constants)
        return
    key = (function, specialization, torch.cuda.current_device(), os.environ.get(PTX_VERSION_VARIABLE))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(function, specialization, arguments)
    # The compiled object takes the constants too, as its launcher counts every parameter.
    compiled[(grid, 1, 1)](*arguments, *constants.values())


def _compile(function: Any, specialization: Specialization, arguments: tuple[Any, ...]) -> Any:
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    options = specialization.options(target.warp_size)
    version = ptx_version(target.backend, target.arch)
    if version is not None:
        options["ptx_version"] = version
    compiled = function.warmup(*arguments, grid=(1,), **dict(specialization.constants), **options)
    if hasattr(compiled, "__getitem__"):
        return compiled
    # A Triton whose warmup returns nothing that can be launched: its own path inspects every argument at each launch.
    return _Inspecting(function, len(arguments), specialization, options)


@dataclass(frozen=True)
class _Inspecting:
    """Triton's public launch path behind the interface of a compiled kernel."""

    function: Any
    arguments: int
    specialization: Specialization
    options: dict[str, Any]

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any) -> None:
            constants = dict(self.specialization.constants)
            self.function[grid](*arguments[: self.arguments], **constants, **self.options)

        return run


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _kind(part: Launch, shared: int = 0) -> int:
    """What a launch is specialized for: the kind of its tensors, or the general kernel with the bits ``shared``, which
    all tensors of a table have in common."""
    return GENERAL_KIND | shared if part.kind == SEVERAL_KINDS else part.kind


def kernels(functions: Functions, simulate: bool) -> Kernels:
    """The record of callables; see ``ptx.kernels``."""
    if simulate != interpreted(functions):
        raise RuntimeError(
            "kernels(simulate=True) needs TRITON_INTERPRET=1 in the environment before Triton is imported"
            if simulate
            else "TRITON_INTERPRET is set: the kernels would run in the interpreter; unset it, or ask for simulate=True"
        )

    def adamw_scaled(
        table: LaunchTable,
        coefficients: Tensor,
        inverse_scale: float,
        clip_factor: float,
        *,
        decision: Tensor | None = None,
    ) -> None:
        if table.numel == 0:
            return
        with _on_device(table.device):
            copy = device_table(table)
            blocks = copy.blocks(table, UPDATE_CHUNK, UPDATE_KIND)
            row_per_tensor = int(decision is not None)
            if decision is None:
                coefficients, decision = copy.step_values(coefficients, inverse_scale, clip_factor)
            for part in blocks.launches:
                launch(
                    functions.update,
                    update_specialization(_kind(part, table.moments)),
                    part.blocks,
                    *(copy.fields, copy.layouts, part.entries, coefficients, decision),
                    *(len(table), row_per_tensor),
                    simulate=simulate,
                )

    def analyze_gradient(
        table: LaunchTable, rows: Tensor, inverse_scale: float, *, scale: Tensor | None = None
    ) -> None:
        with _on_device(table.device):
            copy = device_table(table)
            # Backwards, so that the update, which walks forwards, starts on gradients that are still in cache.
            blocks = copy.blocks(table, STATISTICS_CHUNK, STATISTICS_KIND, reverse=True)
            _check_rows("analyze_gradient", "statistics rows", rows, blocks.blocks)
            copy.uses(rows)
            for part in blocks.launches if blocks.blocks else ():
                launch(
                    functions.analyze,
                    analyze_specialization(_kind(part)),
                    part.blocks,
                    *(copy.fields, copy.layouts, part.entries, rows, rows if scale is None else scale),
                    *(len(table), blocks.blocks, int(scale is not None), float(inverse_scale)),
                    simulate=simulate,
                )

    def merge_gradient_stats_chunks(rows: Tensor, merged: Tensor, fan_in: int) -> None:
        count = rows.numel() // 3
        groups = -(-count // fan_in)
        _check_rows("merge_gradient_stats_chunks", f"merged rows for {count} rows by {fan_in}", merged, groups)
        with _on_device(rows.device):
            launch(functions.merge, merge_specialization(False), groups, rows, merged, count, fan_in, simulate=simulate)

    def merge_gradient_stats(rows: Tensor, report: Tensor) -> None:
        count = rows.numel() // 3
        _check_rows("merge_gradient_stats", "report (bad, scale, sumsq)", report, 1)
        with _on_device(rows.device):
            launch(functions.merge, merge_specialization(True), 1, rows, report, count, count, simulate=simulate)

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
        check_room(table, coefficients, rows, measured=measured)
        with _on_device(table.device):
            # A kernel takes memory for every pointer, and looks at it only if the numbers say that it is there.
            absent = memory.decision
            copy = device_table(table)
            copy.uses(*memory.tensors(), coefficients)
            optional = tuple(absent if tensor is None else tensor for tensor in (rows, scale, found_inf))
            launch(
                functions.decide,
                DECIDE,
                1,
                copy.fields,
                *(memory.hyperparameters, memory.report, memory.decision, memory.counts, coefficients, *optional),
                *(len(table), -1 if rows is None else rows.numel() // 3),
                *map(int, (scale is not None, found_inf is not None, measured, check_finite)),
                float(inverse_scale),
                simulate=simulate,
            )

    return Kernels(
        name="ptx-simulated" if simulate else "ptx",
        statistics_chunk=STATISTICS_CHUNK,
        adamw_scaled=adamw_scaled,
        analyze_gradient=analyze_gradient,
        merge_gradient_stats_chunks=merge_gradient_stats_chunks,
        merge_gradient_stats=merge_gradient_stats,
        decide=decide,
    )


def _check_rows(name: str, what: str, tensor: Tensor, rows: int) -> None:
    if tensor.numel() != rows * 3 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} needs a contiguous tensor for {rows} {what} ({rows * 3} FP32 numbers), "
            f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
