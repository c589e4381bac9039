"""What the tests of the peers' cases share: one-parameter optimizers, and how far their first step may be off."""

from __future__ import annotations

import torch
from cases import norm_relative_bound

import ruda_torch

U = 2.0**-24  # FP32 unit roundoff
# A row adds up to 16 squares in FP32 before it goes on in FP64.
NORM = norm_relative_bound(chain=17)


def parameter(values, dtype=torch.float32):
    return torch.nn.Parameter(torch.as_tensor(values, dtype=dtype))


def adamw(parameters, **options):
    return ruda_torch.AdamW(parameters, **{"lr": 0.1, "weight_decay": 0.0, "fused_step": True, **options})


def give(p, gradient):
    """Set a gradient of any dtype."""
    p.grad_dtype = None
    p.grad = gradient


def first_step_bound(new, lr=0.1):
    """What the first update may be off by.

    In units of U, relative to lr: the coefficients lr, 1 - beta1 and 1 / bias1 and their three products; half of what v
    went through (g * g, two coefficients, two products) with the root and the sum with eps; the quotient: below 12. The
    subtraction rounds once, relative to the new parameter.
    """
    return U * (12.0 * lr + torch.as_tensor(new, dtype=torch.float64).abs().numpy()) * 1.001


def bits(optimizer):
    """Every bit that a step could change."""
    kept = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [p.detach(), *(optimizer.state[p].values() if p in optimizer.state else ())]
            kept.append([t.contiguous().view(-1).view(torch.uint8).tolist() for t in tensors])
    return kept
