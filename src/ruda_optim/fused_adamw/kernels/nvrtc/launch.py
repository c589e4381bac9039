"""CUDA C++ kernels, compiled with NVRTC when they are first needed. NVIDIA only.

``csrc/cuda.cu`` includes the formula that the CPU operator compiles. Importing this file loads neither NVRTC nor a
driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from .. import Kernels
from ..block_map import SEVERAL_KINDS, STATISTICS_KIND, UPDATE_KIND
from ..decision import check_room
from ..device_table import device_table
from ..tables import MOMENTS_KIND, Field, Flag
from .compiler import architecture, cubin, driver_too_old, missing_toolchain

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ..decision import DecisionMemory
    from ..device_table import DeviceTable
    from ..tables import LaunchTable

THREADS = 256  # kThreads of csrc/cuda.cu
STATISTICS_CHUNK = 8192  # kChunk of csrc/cuda_memory.h

# The arguments of an update instance, as csrc/cuda.cu numbers them. -1: decided per tensor, at run time.
_ANY = -1
_GRADIENT = {Flag(0): 0, Flag.GRAD_FP16: 1, Flag.GRAD_BF16: 2}
_STORE = {Flag(0): 0, Flag.COPY_FP16: 1, Flag.COPY_BF16: 2, Flag.COPY_BF16 | Flag.SPLIT: 3}
_GRADIENT_KIND = Flag.GRAD_FP16 | Flag.GRAD_BF16
_STORE_KIND = Flag.COPY_FP16 | Flag.COPY_BF16 | Flag.SPLIT
_MOMENTS = {Flag(0): 0, Flag.MOMENTS_BF16: 1, Flag.MOMENTS_PACKED: 2}
_UPDATE = "ruda::update<{}, {}, {}, {}>"

_MERGE_ROWS, _MERGE_REPORT = "ruda::merge<false>", "ruda::merge<true>"
_DECIDE = "ruda::decide<0>"

_LEGACY_STREAM = 1  # CU_STREAM_LEGACY


def unavailable() -> str | None:
    """Why the CUDA C++ kernels cannot run, or ``None``."""
    if torch.version.hip is not None:
        return f"the nvrtc backend serves NVIDIA only, and torch {torch.__version__} is built for AMD; use ptx (Triton)"
    reason = missing_toolchain()
    if reason is not None:
        return reason
    if torch.version.cuda is None:
        return (
            "the nvrtc backend needs an NVIDIA device and a torch that is built with CUDA; got torch "
            f"{torch.__version__}. Install torch for CUDA: https://pytorch.org/get-started/locally"
        )
    if torch.cuda.device_count() == 0:
        return (
            "the nvrtc backend needs an NVIDIA device, and torch sees none; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    version = _driver_version()
    return None if version is None else driver_too_old(version)


def _driver_version() -> int | None:
    """For example 12040 for CUDA 12.4. Needs no context, and makes none."""
    from cuda.bindings import driver

    try:
        result, version = driver.cuDriverGetVersion()
    except RuntimeError:  # no library of that name; torch, which sees a device, has another way to it
        return None
    return int(version) if int(result) == 0 else None


def kernels() -> Kernels:
    """The record of CUDA kernels."""
    return record("nvrtc", CudaLauncher())


class Launcher(Protocol):
    """Runs kernels of ``csrc/cuda.cu``, blocks of ``THREADS`` threads each."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes ``device`` the current one."""

    def __call__(self, device: torch.device, instance: str, blocks: int, *arguments: float) -> None:
        """Launches. A float becomes a C ``float``; an int anything else: a pointer, ``long long`` or ``int``."""


def update_instance(kinds: set[int]) -> str:
    """The update kernel for tensors whose ``Field.FLAGS`` are ``kinds``: specialized if all of them are alike."""
    alike = {kind & (UPDATE_KIND | Flag.FIRST) for kind in kinds}
    kind = Flag(next(iter(alike)))
    arguments = _ANY, _ANY, _ANY
    if len(alike) == 1 and not kind & (Flag.STRIDED | Flag.FIRST):
        arguments = _GRADIENT[kind & _GRADIENT_KIND], _STORE[kind & _STORE_KIND], int(bool(kind & Flag.AMSGRAD))
    return _UPDATE.format(*arguments, _MOMENTS[kind & MOMENTS_KIND])  # one form of moments in every launch


def statistics_instance(kinds: set[int]) -> str:
    """The statistics kernel for tensors whose ``Field.FLAGS`` are ``kinds``."""
    alike = {kind & (_GRADIENT_KIND | Flag.STRIDED) for kind in kinds}
    kind = Flag(alike.pop()) if len(alike) == 1 else Flag.STRIDED
    return f"ruda::analyze<{_ANY if kind & Flag.STRIDED else _GRADIENT[kind]}>"


def instances() -> tuple[str, ...]:
    """Every kernel instance that the library can ask for."""
    update = [(g, s, a) for g in _GRADIENT.values() for s in _STORE.values() for a in (0, 1)]
    update.append((_ANY, _ANY, _ANY))
    return (
        *(_UPDATE.format(*arguments, moments) for moments in _MOMENTS.values() for arguments in update),
        *(f"ruda::analyze<{gradient}>" for gradient in (*_GRADIENT.values(), _ANY)),
        _MERGE_ROWS,
        _MERGE_REPORT,
        _DECIDE,
    )


def record(name: str, launch: Launcher) -> Kernels:
    """The kernels of ``csrc/cuda.cu`` as a backend record; ``launch`` says where they run."""

    def adamw_scaled(
        table: LaunchTable,
        coefficients: Tensor,
        inverse_scale: float,
        clip_factor: float,
        *,
        decision: Tensor | None = None,
    ) -> None:
        if not len(table):
            return
        with launch.on(table.device):
            copy = device_table(table)
            blocks = copy.blocks(table, STATISTICS_CHUNK, UPDATE_KIND)
            row_per_tensor = decision is not None
            if decision is None:
                coefficients, decision = copy.step_values(coefficients, inverse_scale, clip_factor)
            for part in blocks.launches:
                launch(
                    table.device,
                    _instance_of(table, copy, update_instance, part.kind, UPDATE_KIND),
                    part.blocks,
                    copy.fields.data_ptr(),
                    copy.layouts.data_ptr(),
                    part.entries.data_ptr(),
                    len(table),
                    coefficients.data_ptr(),
                    decision.data_ptr(),
                    int(row_per_tensor),
                )

    def analyze_gradient(
        table: LaunchTable, rows: Tensor, inverse_scale: float, *, scale: Tensor | None = None
    ) -> None:
        if not len(table):
            return
        with launch.on(table.device):
            copy = device_table(table)
            # From the end, so that the update begins on gradients that are still in cache.
            blocks = copy.blocks(table, STATISTICS_CHUNK, STATISTICS_KIND, reverse=True)
            _check_rows("analyze_gradient", rows, blocks.blocks)
            copy.uses(rows)
            for part in blocks.launches:
                launch(
                    table.device,
                    _instance_of(table, copy, statistics_instance, part.kind, STATISTICS_KIND),
                    part.blocks,
                    copy.fields.data_ptr(),
                    copy.layouts.data_ptr(),
                    part.entries.data_ptr(),
                    len(table),
                    rows.data_ptr(),
                    _address(scale),
                    float(inverse_scale),
                    blocks.blocks,
                )

    def merge_gradient_stats_chunks(rows: Tensor, merged: Tensor, fan_in: int) -> None:
        count = rows.numel() // 3
        groups = -(-count // fan_in)
        _check_rows("merge_gradient_stats_chunks", merged, groups)
        with launch.on(rows.device):
            launch(rows.device, _MERGE_ROWS, groups, rows.data_ptr(), merged.data_ptr(), count, fan_in)

    def merge_gradient_stats(rows: Tensor, report: Tensor) -> None:
        count = rows.numel() // 3
        _check_rows("merge_gradient_stats", report, 1)
        with launch.on(rows.device):
            launch(rows.device, _MERGE_REPORT, 1, rows.data_ptr(), report.data_ptr(), count, count)

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
        with launch.on(table.device):
            copy = device_table(table)
            copy.uses(*memory.tensors(), coefficients)
            launch(
                table.device,
                _DECIDE,
                1,
                copy.fields.data_ptr(),
                len(table),
                memory.hyperparameters.data_ptr(),
                memory.report.data_ptr(),
                memory.decision.data_ptr(),
                memory.counts.data_ptr(),
                coefficients.data_ptr(),
                _address(rows),
                -1 if rows is None else rows.numel() // 3,
                _address(scale),
                _address(found_inf),
                float(inverse_scale),
                int(measured),
                int(check_finite),
            )

    return Kernels(
        name=name,
        statistics_chunk=STATISTICS_CHUNK,
        adamw_scaled=adamw_scaled,
        analyze_gradient=analyze_gradient,
        merge_gradient_stats_chunks=merge_gradient_stats_chunks,
        merge_gradient_stats=merge_gradient_stats,
        decide=decide,
    )


def _instance_of(table: LaunchTable, copy: DeviceTable, choose: Callable[[set[int]], str], kind: int, mask: int) -> str:
    """The instance for the tensors of one launch, whose ``flags & mask`` is ``kind``, by the table's present flags."""
    found: str | None = copy.chosen.get((choose, kind))
    if found is None:
        flags = table.fields[Field.FLAGS].tolist()
        found = copy.chosen[choose, kind] = choose({flag for flag in flags if kind in (SEVERAL_KINDS, flag & mask)})
    return found


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_rows(call: str, rows: Tensor, needed: int) -> None:
    if rows.numel() != 3 * needed:
        raise ValueError(f"{call} needs room for {needed} statistics rows, 3 numbers each; got {rows.numel()} numbers")


class PackedArguments(threading.local):
    """Kernel arguments as the driver takes them: an array of pointers to 8-byte slots. One buffer per thread, since a
    launch copies the arguments before it returns."""

    MOST = 14

    def __init__(self) -> None:
        self._integers = (ctypes.c_uint64 * self.MOST)()
        base = ctypes.addressof(self._integers)
        # A float takes the first four bytes of its slot.
        self._floats = (ctypes.c_float * (2 * self.MOST)).from_address(base)
        self._pointers = (ctypes.c_void_p * self.MOST)(*(base + 8 * slot for slot in range(self.MOST)))
        self.address = ctypes.addressof(self._pointers)

    def pack(self, arguments: tuple[float, ...]) -> int:
        """The address of the pointers; good until the next call in this thread."""
        for slot, value in enumerate(arguments):
            if type(value) is float:
                self._floats[2 * slot] = value
            else:
                self._integers[slot] = int(value)
        return self.address


class CudaLauncher:
    """Launches on torch's current stream. Kernels are compiled, or read from the disk cache, when first asked for."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, str], object] = {}
        self._by_arch: dict[tuple[str, str], object] = {}
        self._lock = threading.Lock()
        self._arguments = PackedArguments()
        self._ready = threading.local()

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes ``device`` the current one; free of charge if it is."""
        if device.index is None or device.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(device)

    def __call__(self, device: torch.device, instance: str, blocks: int, *arguments: float) -> None:
        """Launches ``blocks`` blocks of the kernel ``instance``.

        Raises:
            RuntimeError: compiling or launching failed.
        """
        from cuda.bindings import driver

        index = torch.cuda.current_device() if device.index is None else device.index
        function = self._functions.get((index, instance)) or self._load(index, instance)
        if not getattr(self._ready, "context", False):
            self._make_context_current(index)
        # torch's default stream is the legacy one. By its handle: 0 is a thread's own where cuda-bindings was told so.
        stream = torch.cuda.current_stream(index).cuda_stream or _LEGACY_STREAM
        address = self._arguments.pack(arguments)
        (result,) = driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, address, 0)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"launching {instance} on cuda:{index}, {blocks} blocks, failed: {_message(result)}")

    def _load(self, index: int, instance: str) -> object:
        from cuda.bindings import driver

        arch = architecture(*torch.cuda.get_device_capability(index))
        with self._lock:
            function = self._by_arch.get((arch, instance))
            if function is None:
                compiled = cubin(instance, arch)
                # A library belongs to no context, so one serves every device of an architecture. It is never unloaded.
                result, library = driver.cuLibraryLoadData(compiled.code, [], [], 0, [], [], 0)
                if result == driver.CUresult.CUDA_SUCCESS:
                    result, kernel = driver.cuLibraryGetKernel(library, compiled.symbol.encode())
                if result != driver.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"the driver does not load {instance} for {arch}: {_message(result)}")
                function = self._by_arch[arch, instance] = driver.CUfunction(int(kernel))
            self._functions[index, instance] = function
        return function

    def _make_context_current(self, index: int) -> None:
        """A new thread has no current context until the CUDA runtime works in it; a launch by the driver needs one."""
        from cuda.bindings import driver

        result, context = driver.cuCtxGetCurrent()
        if result == driver.CUresult.CUDA_SUCCESS and int(context) == 0:
            result, context = driver.cuDevicePrimaryCtxRetain(index)
            if result == driver.CUresult.CUDA_SUCCESS:
                (result,) = driver.cuCtxSetCurrent(context)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"this thread cannot use cuda:{index}: {_message(result)}")
        self._ready.context = True


def _message(result: object) -> str:
    from cuda.bindings import driver

    status, text = driver.cuGetErrorString(result)
    return str(text.decode()) if status == driver.CUresult.CUDA_SUCCESS else str(result)
