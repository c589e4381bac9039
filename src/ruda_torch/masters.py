"""The two kinds of master of a BF16 parameter, and how one becomes the other when a checkpoint is loaded.

A split master is the parameter, rounded with ties away from zero, and the low 16 bits of the FP32 number
(``split_master`` in ``csrc/half_bits.h``). Beside an FP32 master stands the same number, rounded with ties to even. So
the two differ where the master lies exactly between two BF16 numbers, in one of two such places: the conversion moves
the master by one FP32 step there, towards the parameter, and keeps every other bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 0x8000  # as the low 16 bits: halfway between two BF16 numbers


def remainder_of(master: Tensor) -> Tensor:
    """The remainder of a BF16 parameter that is this FP32 master, rounded to even; the bits of a BF16 tensor.

    The parameter is not needed, so that it may be loaded before the optimizer or after it.
    """
    bits = master.detach().view(torch.int32)
    low = bits & 0xFFFF
    rounded_down = (low == _TIE) & (bits & 0x10000 == 0)
    low = torch.where(master.isnan(), 0, low - rounded_down.to(torch.int32))
    return low.to(torch.int16).view(torch.bfloat16)


def joined(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master of a BF16 parameter and its remainder, such that it rounds to the parameter, ties to even."""
    high = parameter.detach().view(torch.int16).to(torch.int32)
    low = remainder.detach().view(torch.int16).to(torch.int32)  # signed: what lies below the parameter is negative
    bits = (high << 16) + torch.where(high & 0x7FFF == 0, low & 0xFFFF, low)  # no number lies below a zero
    rounds_elsewhere = (low == -_TIE) & (high & 1 == 1)
    return torch.where(parameter.isnan(), high << 16, bits + rounds_elsewhere.to(torch.int32)).view(torch.float32)
