"""The seam: one record of callables per backend, chosen by device and, on NVIDIA, by compiler.

Backends never import each other, and nothing above this package names one of them.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidOption, InvalidTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

CUDA_COMPILERS = ("nvrtc", "ptx")
_FOLDERS = {"cpu": "cpu", "nvrtc": "nvrtc", "ptx": "triton"}
CUDA_COMPILER_VARIABLE = "RUDA_CUDA_COMPILER"


@dataclass(frozen=True)
class Kernels:
    """What a backend offers. All calls are asynchronous where the device is; pointers come from the table.

    The engine calls ``analyze_gradient``, ``decide`` and ``adamw_scaled``, at most one launch each. The functional API
    decides on the host, with the two merges.

    Attributes:
        name: ``"cpu"``, ``"ptx"`` or ``"nvrtc"``.
        statistics_chunk: gradient elements that one statistics row describes.
        analyze_gradient: ``(table, rows, inverse_scale, *, scale=None)``; one row ``(scale, sumsq, bad)`` per
            ``statistics_chunk`` elements of each tensor, in table order. ``rows`` is FP32 ``(r, 3)`` on the device.
            ``scale`` is a loss scale in memory of the device, FP32 ``(1,)``: its reciprocal, one FP32 division, then
            takes the place of ``inverse_scale``.
        merge_gradient_stats_chunks: ``(rows, merged, fan_in)``; ``merged`` has one row per ``fan_in`` rows.
        merge_gradient_stats: ``(rows, report)``; ``report`` is FP32 ``(3,)`` on the device: bad, scale, sumsq.
        decide: ``(table, memory, coefficients, rows, inverse_scale, *, measured, check_finite, scale=None,
            found_inf=None, stages=False)``; the decision of a whole step, written into ``memory`` (:mod:`.decision`).
            ``rows``: the statistics rows of the step, merged into ``memory.report`` (sums in FP64, the sum then rounded
            to FP32, as ``merge_gradient_stats`` does); None where the report is there already (``measured=True``) or
            where nothing was measured (``measured=False``; the report then says bad 0, scale and sumsq NaN).
            ``stages`` merges runs of 1024 rows first, on a CPU; an accelerator has one order of merging and ignores it.
            ``found_inf``: FP32 ``(1,)`` on the device; above 0 skips the step and makes the report bad. The step is
            also skipped when it was measured, something was not finite, and ``check_finite``. Without ``check_finite``
            a bad report clips by 0 if ``max_norm`` is finite and >= 0, else by 1. A finite report clips as
            ``GradientStats.decision`` says; an infinite ``max_norm`` never clips. A skipped step has clip factor 1.
            ``coefficients`` is FP32 ``(n, COEFFICIENTS)`` on the device; row i is written for tensor i, whose
            ``Field.COEFFICIENTS`` is its group (row of ``memory.hyperparameters``) and whose ``Field.STEP`` points to
            its FP32 counter of completed steps on the device, incremented unless the step is skipped. A table without
            tensors has a decision all the same.
        adamw_scaled: ``(table, coefficients, inverse_scale, clip_factor, *, decision=None)``; updates every tensor of
            the table. ``coefficients`` is FP32 ``(k, COEFFICIENTS)`` on the host. With ``decision``
            (``DecisionMemory.decision``) the coefficients are on the device, one row per tensor, the decision says what
            to multiply by and whether to do anything, and the two numbers are ignored.
    """

    name: str
    statistics_chunk: int
    adamw_scaled: Callable[..., None]
    analyze_gradient: Callable[..., None]
    merge_gradient_stats_chunks: Callable[[Tensor, Tensor, int], None]
    merge_gradient_stats: Callable[[Tensor, Tensor], None]
    decide: Callable[..., None]


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run on this machine and, if not, why and what to do."""

    name: str
    available: bool
    reason: str


def select(device: torch.device, compiler: str | None = None) -> Kernels:
    """The kernels that run on ``device``.

    Args:
        device: the device of the tensors.
        compiler: on NVIDIA ``"nvrtc"`` or ``"ptx"``. Default: the environment variable ``RUDA_CUDA_COMPILER``; if
            that is unset, ``nvrtc`` where cuda-bindings and NVRTC can be imported (lower host cost, no C compiler at
            run time), else ``ptx``.

    Raises:
        InvalidOption: the compiler's name is unknown or does not serve this device.
        InvalidTensor: no backend serves this device.
        ImportError: the chosen backend cannot run here; the message says why and what to do. There is no fallback.
    """
    if device.type == "cpu":
        return _load("cpu")
    if device.type == "cuda":
        # Asked several times a step. What answers it does not change while a process runs, but for the variable.
        key = compiler or os.environ.get(CUDA_COMPILER_VARIABLE) or ""
        found = _on_cuda.get(key)
        if found is None:
            found = _on_cuda[key] = _load(cuda_compiler(compiler))
        return found
    raise InvalidTensor(
        f"the fused step needs tensors on a CPU, an NVIDIA or an AMD device (torch device types 'cpu' and 'cuda'); got "
        f"{str(device)!r}. Move the tensors, or use torch.optim.AdamW"
    )


def cuda_compiler(compiler: str | None = None) -> str:
    """The compiler that :func:`select` takes for a ``cuda`` device; see there."""
    import torch

    source = "compiler"
    if compiler is None:
        source, compiler = CUDA_COMPILER_VARIABLE, os.environ.get(CUDA_COMPILER_VARIABLE) or None
    if compiler is not None and compiler not in CUDA_COMPILERS:
        raise InvalidOption(f"{source} must be one of {', '.join(CUDA_COMPILERS)}; got {compiler!r}")
    if torch.version.hip is not None:
        if compiler == "nvrtc":
            raise InvalidOption(
                f"{source}='nvrtc' compiles for NVIDIA only; on AMD use 'ptx' (Triton) or leave it unset"
            )
        return "ptx"
    if compiler is None:
        return "nvrtc" if _availability("nvrtc").available else "ptx"
    return compiler


def available() -> tuple[Availability, ...]:
    """What this machine can run, backend by backend. Compiles nothing and initializes no device."""
    return tuple(_availability(name) for name in ("cpu", "nvrtc", "ptx"))


def _availability(name: str) -> Availability:
    try:
        reason = importlib.import_module(f".{_FOLDERS[name]}", __package__).unavailable()
    except ImportError as error:
        reason = str(error)
    return Availability(name, reason is None, "ready" if reason is None else reason)


_loaded: dict[str, Kernels] = {}
_on_cuda: dict[str, Kernels] = {}  # by the compiler's name, "" for none given


def _load(name: str) -> Kernels:
    kernels = _loaded.get(name)
    if kernels is None:
        module = importlib.import_module(f".{_FOLDERS[name]}", __package__)
        reason = module.unavailable()
        if reason is not None:
            raise ImportError(reason)
        kernels = _loaded[name] = module.kernels()
    return kernels
