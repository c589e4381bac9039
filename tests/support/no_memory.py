"""Tensors that have a shape and a dtype, and no memory: following their address ends the process."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map_only

KINDS = ("wrapper", "two tensors", "freed", "freed view", "cut short")


class Wrapper(torch.Tensor):
    """A subclass around a tensor, as quantized weights are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


def without_memory(kind: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and dtype of ``like``, one of ``KINDS``."""
    if kind == "wrapper":
        return Wrapper(like.detach().clone())
    if kind == "two tensors":
        from torch.testing._internal.two_tensor import TwoTensor

        return TwoTensor(like.detach().clone(), like.detach().clone())
    offset = 3 if kind == "freed view" else 0
    base = torch.zeros(like.numel() + offset, dtype=like.dtype)
    made = base[offset:].view(like.shape)
    base.untyped_storage().resize_(4 if kind == "cut short" else 0)
    return made
