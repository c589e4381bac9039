"""Moments in each of their forms: memory for a kernel's step, and what that step must leave there, by NumPy.

Run as a program it prints a digest of the CPU's steps as JSON, once for each number of threads that it is given: a
process chooses its instruction-set level once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from cases import DTYPES
from kernel_runs import CPU, join_bits, split_bits

from ruda_optim.fused_adamw import moment_codes
from ruda_optim.fused_adamw.options import AdamWOptions, seed_of_step
from ruda_optim.fused_adamw.storage import LaunchTable, TensorMemory, adamw_scaled, coefficient_table

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMS = ("float32", "bfloat16", "packed16")
STORES = ("float32", "float16", "bfloat16", "split")
LAYOUTS = ("contiguous", "misaligned", "every second", "transposed")
HARD = (0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1e-8, 65504.0, 65520.0, np.inf, -np.inf, np.nan)
NAMES = ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy", "remainder")
F = np.float32


def placed(source: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy in one of ``LAYOUTS``."""
    if layout == "misaligned":
        target = source.new_zeros(source.numel() + 1)[1:].view(source.shape)
    elif layout == "every second":
        target = source.new_zeros((*source.shape[:-1], 2 * source.shape[-1]))[..., ::2]
    elif layout == "transposed":
        target = source.new_zeros(source.shape[::-1]).permute(*reversed(range(source.dim())))
    else:
        target = torch.empty_like(source)
    return target.copy_(source)


@dataclass(frozen=True)
class MomentKind:
    """One tensor of a launch. ``store``: the parameter's dtype, or ``"split"`` for a BF16 one with a split master."""

    form: str
    gradient: str = "float32"
    store: str = "float32"
    amsgrad: bool = False
    layout: str = "contiguous"
    first: bool = False
    shape: tuple[int, ...] = (61, 43)
    seed: int = 0

    def memory(self) -> TensorMemory:
        """Values over many magnitudes, hard ones among them; any word for packed moments."""
        random = np.random.default_rng(self.seed)

        def normal(*, positive: bool = False) -> torch.Tensor:
            values = random.standard_normal(self.shape) * 10.0 ** random.uniform(-5, 2, self.shape)
            places = random.permutation(values.size)[: len(HARD)]
            values.reshape(-1)[places] = HARD[: len(places)]
            return torch.from_numpy((np.abs(values) if positive else values).astype(F))

        def words() -> torch.Tensor:
            return torch.from_numpy(random.integers(-(2**15), 2**15, self.shape, dtype=np.int16))

        moment = torch.float32 if self.form == "float32" else torch.bfloat16
        value = normal()
        packed = self.form == "packed16"
        tensors = {
            "gradient": normal().to(getattr(torch, self.gradient)),
            "exp_avg": words() if packed else normal().to(moment),
            "exp_avg_sq": None if packed else normal(positive=True).to(moment),
            "max_exp_avg_sq": normal(positive=True).to(moment) if self.amsgrad else None,
        }
        if self.store == "split":
            high, low = split_bits(value.numpy().view(np.uint32))
            tensors |= {"copy": high, "remainder": low.view(torch.int16)}
        else:
            tensors["parameter"] = value
            if self.store != "float32":
                half = value.to(getattr(torch, self.store))
                half[0] = normal()[0].to(half.dtype)  # somebody wrote this row
                tensors["copy"] = half
        if self.first:  # holds nothing yet
            for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if tensors[name] is not None:
                    tensors[name].view(torch.int16 if moment is torch.bfloat16 else torch.int32).fill_(-1)
        kept = {name: None if tensor is None else placed(tensor, self.layout) for name, tensor in tensors.items()}
        return TensorMemory(**kept, first=self.first)


def tensors_of(memory: TensorMemory) -> dict[str, torch.Tensor]:
    """What a step writes, by the names of ``TensorMemory``."""
    return {name: tensor for name in NAMES if (tensor := getattr(memory, name)) is not None}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits as integers; every NaN is the same NaN."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, np.nan), tensor)
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def assert_same_bits(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: object = "") -> None:
    """Name by name."""
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        different = bits(tensor) != bits(wanted[name])
        assert not different.any(), f"{what}: {int(different.sum())} of {different.numel()} elements of {name} differ"


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().float().numpy()


def _words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def _bf16(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)


def _lerp(old: np.ndarray, x: np.ndarray, weight: np.float32) -> np.ndarray:
    return old + weight * (x - old) if weight < F(0.5) else x - (F(1) - weight) * (x - old)


def expected(
    kind: MomentKind, options: AdamWOptions, completed: int, inverse_scale: float, clip_factor: float
) -> dict[str, torch.Tensor]:
    """``tensors_of`` after a step from ``kind.memory()``: FP32 in the kernels' order, moments by their codes."""
    memory = kind.memory()
    lr, decay, c1, c2, inv1, inv2, eps, sign, *_ = map(F, options.prepare_step(completed).row)
    zeros = np.zeros(kind.shape, F)
    if kind.store == "split":
        p = join_bits(memory.copy, memory.remainder).view(F)
    else:
        p = _array(memory.parameter)
        if memory.copy is not None:
            behind = bits(memory.parameter.to(memory.copy.dtype)) != bits(memory.copy)
            p = np.where(behind.numpy(), _array(memory.copy), p)
    with np.errstate(all="ignore"):
        if kind.form == "packed16":
            m, v = moment_codes.decode_packed(np.zeros_like(zeros) if kind.first else _words(memory.exp_avg))
        else:
            m, v = (zeros, zeros) if kind.first else (_array(memory.exp_avg), _array(memory.exp_avg_sq))
        v_max = zeros if kind.first or not kind.amsgrad else _array(memory.max_exp_avg_sq)
        g = _array(memory.gradient) * F(inverse_scale) * (F(clip_factor) * sign)
        gg = g * g
        m = _lerp(m, g, c1)
        v = np.where((v == np.inf) | (gg == np.inf), v + gg, _lerp(v, gg, c2))
        used = np.where((v > v_max) | np.isnan(v), v, v_max) if kind.amsgrad else v
        new = p - (decay * p + lr * (m * inv1) / (np.sqrt(used * inv2) + eps))

        found = {}
        r = moment_codes.dither(p, g, seed_of_step(completed + 1))
        if kind.form == "float32":
            found |= {"exp_avg": torch.from_numpy(m), "exp_avg_sq": torch.from_numpy(v)}
            stored, maximum = v, torch.from_numpy(used)
        elif kind.form == "bfloat16":
            m16, v16 = moment_codes.encode_bf16(m, v, r)
            found |= {"exp_avg": _bf16(m16), "exp_avg_sq": _bf16(v16)}
            stored = moment_codes.decode_bf16(v16)
        else:
            words = moment_codes.encode_packed(m, v, r)
            found |= {"exp_avg": torch.from_numpy(words.view(np.int16))}
            stored = moment_codes.decode_packed(words)[1]
        if kind.amsgrad:
            if kind.form != "float32":
                larger = np.where((stored > v_max) | np.isnan(stored), stored, v_max)
                maximum = torch.from_numpy(larger).to(torch.bfloat16)  # exact
            found["max_exp_avg_sq"] = maximum
    value = torch.from_numpy(new)
    if kind.store == "split":
        value = torch.where(value.isnan(), np.nan, value)
        high, low = split_bits(value.numpy().view(np.uint32))
        return found | {"copy": high, "remainder": low.view(torch.int16)}
    found["parameter"] = value
    if kind.store != "float32":
        found["copy"] = value.to(getattr(torch, kind.store))
    return found


def digest() -> dict[str, str]:
    """A hash of what every kind of tensor holds after two steps."""
    found = {}
    for form in FORMS:
        kinds = [
            MomentKind(form, *rest, seed=seed)
            for seed, rest in enumerate(product(DTYPES, STORES, (False, True), LAYOUTS, (False, True)))
        ]
        memories = [kind.memory() for kind in kinds]
        gradients = [memory.gradient for memory in memories]  # a table keeps none of them alive
        table = LaunchTable(memories, CPU)
        for completed in (0, 1):
            options = AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8)
            adamw_scaled(table, coefficient_table([options.prepare_step(completed)]), 0.5, 0.375)
        for kind, memory in zip(kinds, memories, strict=True):
            total = hashlib.sha256()
            for tensor in tensors_of(memory).values():
                total.update(bits(tensor).numpy().tobytes())
            found[str(kind)] = total.hexdigest()[:16]
        del gradients
    return found


def main(threads: Sequence[str]) -> None:
    for count in threads:
        torch.set_num_threads(int(count))
        print(json.dumps(digest()))


if __name__ == "__main__":
    main(sys.argv[1:])
