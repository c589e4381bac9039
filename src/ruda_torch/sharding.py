"""What the optimizer knows about sharded tensors: the only file that looks at DTensor and torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a plain tensor is its own part."""
    return tensor


def local_gradient(where: str, parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, laid out like its parameter's part."""
    return gradient
