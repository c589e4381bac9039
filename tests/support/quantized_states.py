"""Quantized moments made by hand, and what they mean, computed element by element."""

from __future__ import annotations

import numpy as np
import torch


def random_codes(*shape: int, seed: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.5


def looked_up(codes: np.ndarray, values: torch.Tensor, scales: torch.Tensor, block: int) -> list[float]:
    """One element after the other: the value of its code times the scale of its block, in FP32."""
    return [
        float(np.float32(values[int(code)].item()) * np.float32(scales[position // block].item()))
        for position, code in enumerate(codes.reshape(-1))
    ]


class Quantized(torch.Tensor):
    """What the converter sees of torchao's OptimState8bit, OptimState4bit and OptimStateFp8."""

    @staticmethod
    def __new__(cls, shape, codes, scale, qmap=None):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, shape, codes, scale, qmap=None) -> None:
        self.codes, self.scale = codes, scale
        if qmap is not None:
            self.qmap = qmap

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is not torch.ops.aten.view.default or tuple(arguments[1]) != tuple(arguments[0].shape):
            raise NotImplementedError(f"{function} of a stand-in")
        moment = arguments[0]  # DTensor.from_local makes a view
        return cls(moment.shape, moment.codes, moment.scale, getattr(moment, "qmap", None))


Quantized.__module__ = "torchao.optim.subclass_8bit"
