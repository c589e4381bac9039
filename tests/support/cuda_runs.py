"""What the tests on CUDA hardware run: tensors placed on the device exactly as on the CPU, and whole optimizers.

With ``RUDA_REHEARSAL=1`` the device is the CPU, and ``csrc/cuda.cu`` on the host simulator is its backend: the tests
that need no real device are run through, so that they are not wrong themselves on the day when somebody has a GPU.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import tempfile
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import cases
import pytest
import simulated_backend
import torch
from test_nvrtc import coefficient_rows, memory_of, tensors_of
from torch.profiler import ProfilerActivity, profile

import ruda_torch
from ruda_optim.fused_adamw import kernels, storage
from ruda_optim.fused_adamw.storage import Field, Flag, LaunchTable, TensorMemory
from ruda_torch import control, engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from ruda_optim.fused_adamw.storage import Kernels

CPU = torch.device("cpu")
REHEARSAL = os.environ.get("RUDA_REHEARSAL") == "1"
DEVICE = CPU if REHEARSAL else torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not REHEARSAL and not torch.cuda.is_available(), reason="needs a GPU that torch can use")
needs_hardware = pytest.mark.skipif(REHEARSAL, reason="a rehearsal has no streams, no graphs and no profiler")
if REHEARSAL:
    kernels._loaded["cpu"] = simulated_backend.kernels()
    for module in (control, engine):
        module.on_host = lambda device: False


def require(compiler: str) -> None:
    """Skip the running test, by name, where this compiler's kernels cannot run."""
    if REHEARSAL:
        if compiler != "nvrtc":
            pytest.skip("a rehearsal is of nvrtc")
        return
    for entry in storage.available():
        if entry.name == compiler and not entry.available:
            pytest.skip(entry.reason)


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` with the same strides and the same offset in its storage, gaps between elements included."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def placed(memory: TensorMemory, device: torch.device) -> TensorMemory:
    """The same memory on ``device``."""
    tensors = {}
    for entry in fields(TensorMemory):
        value = getattr(memory, entry.name)
        if isinstance(value, torch.Tensor):
            tensors[entry.name] = place(value, device)
    return replace(memory, **tensors)


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(CPU, copy=True) for name, tensor in tensors.items()}


def run_case(kernels: Kernels, case: cases.Case, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The case's tensors after each step, on the CPU; the clip factor is the reference's."""
    memory = placed(memory_of(case), device)
    kept = tensors_of(memory)
    table = LaunchTable([memory], device)
    results = []
    for step, want in enumerate(cases.expected(case), start=1):
        gradient = cases.to_torch(cases.stored_gradient(case, step), case.gradient_dtype, case.gradient_layout)
        gradient = place(gradient, device)  # kept until the step is over: a table does not keep gradients alive
        table.set_gradient(0, gradient)
        rows = coefficient_rows(case.options, completed=step - 1)
        kernels.adamw_scaled(table, rows, case.control.inverse_scale, want.clip_factor)
        table.fields[Field.FLAGS] &= ~int(Flag.FIRST)
        results.append(on_cpu(kept))
    return results


# ------------------------------------------------------------------------------------------------ whole optimizers

SHAPES = ((33, 17), (5,), (64, 3, 3, 2), (1, 7), (2048,), (0,), (20_011,))


def parameters_of(kind: str, device: torch.device) -> list[torch.nn.Parameter]:
    """Parameters of every shape. ``kind``: a dtype, or ``mixed``: all dtypes and layouts side by side."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3] if kind == "mixed" else DTYPES[kind]
        values = values.to(dtype)
        if kind in ("mixed", "strided") and len(shape) == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        if kind in ("mixed", "strided") and shape == SHAPES[0]:
            values = values.t().contiguous().t()
        if kind in ("mixed", "misaligned") and len(shape) == 1 and shape[0]:
            values = torch.cat([values[:1], values])[1:]  # one element past an aligned address
        made.append(torch.nn.Parameter(place(values, device)))
    return made


DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "strided": torch.float32,
    "misaligned": torch.float32,
}


def optimizer_of(parameters: list[torch.nn.Parameter], **options: Any) -> ruda_torch.AdamW:
    """Two groups with hyperparameters of their own."""
    groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "lr": 3e-3, "maximize": True}]
    return ruda_torch.AdamW(groups, lr=1e-2, fused_step=True, **options)


def give_gradients(parameters: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Contiguous gradients of the parameters' dtypes, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        values = torch.randn(parameter.shape, generator=generator).mul_(scale).to(parameter.dtype)
        parameter.grad = values.to(parameter.device)


def contents(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and state on the CPU. Step counters too, as numbers, wherever they live."""
    found = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        found[f"{number} parameter"] = parameter.detach().to(CPU, copy=True)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{number} {key}"] = torch.as_tensor(value).detach().to(CPU, torch.float32 if key == "step" else None,
                                                                           copy=True)  # fmt: skip
    return found


def device_kernels(call: Callable[[], object]) -> list[str]:
    """Names of the kernels that ``call`` ran on the device, as the profiler's trace has them; no copies, no fills."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "kernel"]


def sumsq_of(gradients: list[torch.Tensor]) -> float:
    """The sum of squares in FP64."""
    return math.fsum(float(gradient.double().square().sum()) for gradient in gradients)
