"""What the two sides of a comparison share."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from workloads import Variant, Workload


class Data:
    """The tensors of a comparison: shapes, initial parameter values and this step's gradients.

    Args:
        gradient_dtype: default: BF16 for a half variant, else FP32.
    """

    def __init__(
        self, workload: Workload, variant: Variant, device: torch.device, gradient_dtype: torch.dtype | None = None
    ) -> None:
        self.workload, self.variant, self.device = workload, variant, device
        self.gradient_dtype = gradient_dtype or (torch.bfloat16 if variant.half else torch.float32)
        self._generator = torch.Generator(device).manual_seed(1)
        self.source = torch.empty(workload.elements, dtype=self.gradient_dtype, device=device)
        self._views = self._split(self.source)
        self.gradients = [torch.empty_like(view, memory_format=torch.contiguous_format) for view in self._views]

    def parameters(self) -> list[torch.nn.Parameter]:
        """New parameters, each with memory of its own; the same values at every call."""
        generator = torch.Generator(self.device).manual_seed(0)
        values = torch.empty(self.workload.elements, device=self.device).normal_(0, 0.02, generator=generator)
        dtype = torch.bfloat16 if self.variant.half else torch.float32
        made = []
        for value, gradient in zip(self._split(values), self.gradients, strict=True):
            parameter = torch.nn.Parameter(torch.empty(value.shape, dtype=dtype, device=self.device))
            parameter.data.copy_(value)
            if gradient.dtype is not dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient
            made.append(parameter)
        return made

    def draw(self) -> None:
        """Fresh gradients: normal, standard deviation 0.01, multiplied by the variant's scale."""
        self.source.normal_(0, 0.01 * (self.variant.scale or 1.0), generator=self._generator)

    def restore(self) -> None:
        """The gradients as drawn, whatever a step made of them."""
        torch._foreach_copy_(self.gradients, self._views)

    def _split(self, flat: Tensor) -> list[Tensor]:
        sizes = [prod(shape) for shape in self.workload.shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), self.workload.shapes, strict=True)]
