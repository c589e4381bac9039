"""Cases run through the storage functions, and a digest of everything the CPU kernels can compute.

Run as a program it prints the digest as JSON, so that a test can compare instruction-set levels, which a process
chooses once: ``RUDA_CPU_LEVEL=3 python tests/kernel_runs.py THREADS...``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from cases import CASES, DTYPES, Case, expected, initial_parameter, stored_gradient, to_torch

from ruda_optim.fused_adamw import AdamWOptions
from ruda_optim.fused_adamw.storage import (
    Field,
    LaunchTable,
    TensorMemory,
    adamw_scaled,
    analyze_gradient,
    coefficient_table,
    statistics_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CPU = torch.device("cpu")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# For cases.norm_relative_bound: a partial sum of the CPU kernel adds the 16 squares of a block of 1024 that fall on it;
# between blocks and rows the sums are FP64.
CHAIN = 16


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit; every NaN is the same NaN."""
    integer = {4: torch.int32, 2: torch.int16}[left.element_size()]
    equal = left.contiguous().view(integer) == right.contiguous().view(integer)
    return left.dtype is right.dtype and bool((equal | (left.isnan() & right.isnan())).all())


def split_bits(bits: np.ndarray) -> tuple[Tensor, Tensor]:
    """FP32 bit patterns as a split master: BF16 rounded with ties away from zero, and the low 16 bits."""
    wide = bits.astype(np.uint64)
    high = ((wide + 0x8000) >> 16).astype(np.uint16).view(np.int16)
    low = (wide & 0xFFFF).astype(np.uint16).view(np.int16)
    return torch.from_numpy(high).view(torch.bfloat16), torch.from_numpy(low).view(torch.bfloat16)


def join_bits(high: Tensor, remainder: Tensor) -> np.ndarray:
    """The inverse of :func:`split_bits`."""
    upper = high.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.int64) << 16
    lower = remainder.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.int64)
    return (upper + lower - ((lower & 0x8000) << 1)).astype(np.uint32)


class Run:
    """The tensors of one case, updated in place.

    Moments start as NaN: the first step must not read them. ``split`` keeps the master of a BF16 parameter as the
    parameter and 16 bits.
    """

    def __init__(self, case: Case, *, split: bool = False) -> None:
        self.case = case
        self.step = 0
        values = initial_parameter(case)
        self.parameter = to_torch(values, case.parameter_dtype, case.layout)
        half = case.parameter_dtype != "float32"
        self.split = split
        self.remainder = to_torch(np.zeros(case.shape), "bfloat16", case.layout) if split else None
        self.master = None if split else to_torch(values, "float32", case.layout) if half else self.parameter
        self.copy = self.parameter if half else None
        count = 3 if case.options.amsgrad else 2
        self.moments = {name: to_torch(np.full(case.shape, np.nan), "float32", case.layout) for name in MOMENTS[:count]}

    def gradient(self) -> Tensor:
        """The gradient of the next step."""
        return to_torch(stored_gradient(self.case, self.step + 1), self.case.gradient_dtype, self.case.gradient_layout)

    def memory(self, gradient: Tensor, outputs: dict[str, Tensor] | None = None) -> TensorMemory:
        """The launch description of the next step; ``outputs`` (by ``TensorMemory``'s names) makes it out of place."""
        return TensorMemory(
            gradient=gradient,
            parameter=self.master,
            copy=self.copy,
            remainder=self.remainder,
            first=self.step == 0,
            **self.moments,
            **(outputs or {}),
        )

    def advance(self) -> None:
        """One step."""
        step_together([self])

    def values(self) -> dict[str, Tensor]:
        """By the names of ``cases.FIELDS``."""
        if self.split:
            bits = join_bits(self.parameter, self.remainder)
            found = {"parameter": torch.from_numpy(bits.view(np.float32)).view(self.parameter.shape)}
        else:
            found = {"parameter": self.master}
        found |= self.moments
        if self.copy is not None:
            found["copy"] = self.copy
        return found


def step_together(runs: Sequence[Run]) -> None:
    """One step of several cases in one launch, each with its own coefficients; scale and clip are the first's."""
    gradients = [run.gradient() for run in runs]  # the table keeps none of them alive
    table = LaunchTable([run.memory(gradient) for run, gradient in zip(runs, gradients, strict=True)], CPU)
    table.fields[Field.COEFFICIENTS] = torch.arange(len(runs))
    steps = [run.case.options.prepare_step(run.step, run.case.control) for run in runs]
    clip = 1.0 if runs[0].case.max_norm is None else expected(runs[0].case)[runs[0].step].clip_factor
    adamw_scaled(table, coefficient_table(steps), runs[0].case.control.inverse_scale, clip)
    for run in runs:
        run.step += 1


def gradient_rows(gradients: Sequence[Tensor], inverse_scale: float = 1.0) -> Tensor:
    """The statistics rows of ``gradients``."""
    table = LaunchTable([TensorMemory(gradient) for gradient in gradients], CPU)
    rows = torch.full((statistics_rows(table), 3), np.nan)
    analyze_gradient(table, rows, inverse_scale)
    return rows


def half_neighbourhood(dtype: torch.dtype) -> np.ndarray:
    """FP32 bit patterns that decide how rounding to ``dtype`` works.

    Every value of the type and the middle between it and the next in magnitude, both with their FP32 neighbours; then
    FP32 subnormals, infinities and random patterns.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    values = every.float().numpy().view(np.uint32).astype(np.int64)
    # In FP32 the steps of BF16 are 2^16 bit patterns apart, and those of FP16 2^13 except among its subnormals.
    middle = values + (2**15 if dtype is torch.bfloat16 else 2**12)
    following = torch.nextafter(every, torch.full_like(every, np.inf)).float().double()
    exact = ((every.double() + following) / 2).float().numpy().view(np.uint32).astype(np.int64)
    random = np.random.default_rng(0).integers(0, 2**32, 100_000)
    special = [0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    special += [bits | 0x80000000 for bits in special]
    near = [base + shift for base in (values, middle, exact) for shift in (-1, 0, 1)]
    return np.concatenate([*near, random, special]).astype(np.uint32)


def copies(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The kernel's half copies of FP32 values: a step of learning rate 0 writes them beside the unchanged master.

    Raises:
        AssertionError: a master changed: the kernel does not round it as torch does, and took its copy for written.
    """
    values = torch.from_numpy(bits.view(np.float32).copy())
    master = values.clone()
    zero = torch.zeros_like(master)
    copy = master.to(dtype)
    memory = TensorMemory(zero, master, zero.clone(), zero.clone(), copy=copy)
    options = AdamWOptions(learning_rate=0, weight_decay=0)
    adamw_scaled(LaunchTable([memory], CPU), coefficient_table([options.prepare_step(0)]))
    # An infinite master minus lr * weight_decay * itself is NaN.
    assert same_bits(master, torch.where(values.isinf(), np.nan, values))
    return copy


# ---------------------------------------------------------------------------------------------------------- digest


def _hash(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over the bits, every NaN counted as the same NaN: processors differ in their payloads."""
    total = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().float().contiguous()
        total.update(torch.where(values.isnan(), np.nan, values).numpy().tobytes())
    return total.hexdigest()[:16]


def _mixed() -> list[Run]:
    """Every kind of tensor, with an odd number of elements: together more than two threads' least share of work."""
    runs = []
    for dtype, parameter, amsgrad, layout in product(
        DTYPES, ("float32", "float16", "bfloat16", "split"), (False, True), ("contiguous", "misaligned", "transposed")
    ):
        options = AdamWOptions(learning_rate=1e-2, epsilon=1e-8, weight_decay=0.1, amsgrad=amsgrad)
        case = Case(
            f"{dtype}, {parameter}, {layout}{', amsgrad' * amsgrad}",
            (61, 43),
            dtype,
            "bfloat16" if parameter == "split" else parameter,
            options,
            layout=layout,
            gradient_layout="misaligned" if layout == "misaligned" else "contiguous",
            seed=len(runs),
        )
        runs.append(Run(case, split=parameter == "split"))
    return runs


def digest() -> dict[str, str]:
    """A hash for each thing that neither the number of threads nor the instruction set may change."""
    found = {}
    for case in CASES:
        run = Run(case)
        for _ in range(min(case.steps, 3)):
            run.advance()
        found[f"case: {case}"] = _hash(list(run.values().values()))
    runs = _mixed()
    for _ in range(3):
        step_together(runs)
    for run in runs:
        found[f"one table: {run.case}"] = _hash(list(run.values().values()))

    random = torch.Generator().manual_seed(0)
    wild = torch.randn(300_007, generator=random) * 10.0 ** (torch.rand(300_007, generator=random) * 80 - 42)
    bad = wild.clone()
    bad[[3, 70_000, 299_999]] = torch.tensor([np.nan, np.inf, -np.inf])
    options = AdamWOptions(learning_rate=1e-2, amsgrad=True)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for name, source in (("wild", wild), ("not finite", bad)):
            if dtype is torch.float16:  # into its range
                source = source.sign() * source.abs() ** 0.1
            source = source.to(dtype)
            for layout, stored in (("flat", source), ("strided", source[::2]), ("misaligned", source[1:])):
                label = f"{name} {layout} {dtype} gradients"
                found[f"statistics: {label}"] = _hash([gradient_rows([stored, stored[:999]], 1 / 3)])
                tensors = [torch.ones(stored.shape) for _ in range(4)]
                table = LaunchTable([TensorMemory(stored, *tensors)], CPU)
                adamw_scaled(table, coefficient_table([options.prepare_step(4)]), 1 / 3, 0.7)
                found[f"update: {label}"] = _hash(tensors)
    for dtype in (torch.float16, torch.bfloat16):
        found[f"copies: {dtype}"] = _hash([copies(half_neighbourhood(dtype), dtype)])
    return found


def main(threads: Sequence[str]) -> None:
    for count in threads:
        torch.set_num_threads(int(count))
        print(json.dumps(digest()))


if __name__ == "__main__":
    main(sys.argv[1:])
