"""Moments that other optimizers store in 8 or 4 bits, as FP32 numbers; none of those packages needs to be installed.

The formats, all blockwise: an element's value is what its code stands for, times the scale of its block. Blocks run
over the elements in row-major order.

- bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861): ``state1`` and ``state2`` hold codes (uint8, the parameter's
  shape), ``qmap1`` and ``qmap2`` the 256 values that codes stand for, ``absmax1`` and ``absmax2`` an FP32 scale for
  each block of 256 elements (2,048 in versions before 0.44), the last block being shorter.
- torchao: a tensor subclass with ``codes``, ``scale`` and, but for FP8, ``qmap``. 8 bits: codes as above. 4 bits (Li et
  al. 2023, arXiv:2309.01507): ``codes`` is flat and holds two codes a byte, the first in the high half; 16 values. FP8:
  the codes are float8_e4m3fn numbers. A block is as many elements as there are for one scale.

The values are those that the optimizer itself computes with, bit for bit: one FP32 multiplication. What was lost when
the codes were made is lost. See :func:`checked` for what must be repaired.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import InvalidState

from . import sharding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeGuard

    from torch import Tensor

_BLOCKS = (256, 2048)  # of bitsandbytes, today's and before 0.44


def is_torchao(value: object) -> TypeGuard[Tensor]:
    """True for a quantized tensor of torchao, also as one rank's part of a sharded one."""
    if not isinstance(value, torch.Tensor):
        return False
    return type(sharding.local(value)).__module__.split(".")[0] == "torchao"


def bitsandbytes_moment(where: str, entry: Mapping[str, Any], number: int) -> Tensor:
    """Moment 1 or 2 of a parameter's state in bitsandbytes' blockwise form, in FP32, of the parameter's shape.

    Args:
        where: the parameter, for errors.
        entry: its state: ``state1, qmap1, absmax1`` or ``state2, qmap2, absmax2``; contiguous.
        number: 1 or 2.

    Raises:
        InvalidState: something is missing or does not fit.
    """
    names = [f"{name}{number}" for name in ("state", "qmap", "absmax")]
    missing = [name for name in names if not isinstance(entry.get(name), torch.Tensor)]
    if missing:
        raise InvalidState(
            f"{where} must have the tensors {', '.join(names)} of blockwise 8-bit moments, but has no "
            f"{', '.join(missing)}, only {', '.join(map(str, entry))}; moments with one scale for a whole tensor "
            "(block_wise=False) are not converted"
        )
    codes, values, scales = (entry[name] for name in names)
    what = f"{names[0]} of {where}"
    for block in _BLOCKS:
        if scales.shape == (math.ceil(codes.numel() / block),):
            return _scaled(_looked_up(what, codes, values, 256), scales, block).view(codes.shape)
    raise InvalidState(
        f"{names[2]} of {where} must have a scale for every {' or '.join(map(str, _BLOCKS))} of {codes.numel()} "
        f"elements, got shape {tuple(scales.shape)}"
    )


def torchao_moment(what: str, moment: Tensor) -> Tensor:
    """A quantized tensor of torchao (``OptimState8bit``, ``OptimState4bit``, ``OptimStateFp8``) in FP32, of its shape.

    Args:
        what: the moment, for errors.
        moment: the tensor; of a sharded one, this rank's part, which torchao quantizes by itself.

    Raises:
        InvalidState: a tensor of another form.
    """
    codes, scales, values = (getattr(moment, name, None) for name in ("codes", "scale", "qmap"))
    form = type(moment).__name__
    if not isinstance(codes, torch.Tensor) or not isinstance(scales, torch.Tensor) or scales.ndim != 1:
        raise InvalidState(f"{what} must hold codes and a list of scales, got torchao's {form}")
    codes = codes.detach()
    if codes.dtype is torch.float8_e4m3fn:
        numbers = codes.reshape(-1).float()
    elif codes.dtype is torch.uint8 and isinstance(values, torch.Tensor) and codes.shape == moment.shape:
        numbers = _looked_up(what, codes, values, 256)
    elif codes.dtype is torch.uint8 and isinstance(values, torch.Tensor) and 2 * codes.numel() == moment.numel():
        pairs = torch.stack([codes.reshape(-1) >> 4, codes.reshape(-1) & 15], dim=-1)
        numbers = _looked_up(what, pairs, values, 16)
    else:
        raise InvalidState(f"{what} is of a form that is not known here: torchao's {form} with {codes.dtype} codes")
    if numbers.numel() != moment.numel() or not len(scales) or numbers.numel() % len(scales):
        raise InvalidState(
            f"{what} must have codes for {moment.numel()} elements and scales for equal blocks of them, got "
            f"{numbers.numel()} and {len(scales)}"
        )
    return _scaled(numbers, scales, numbers.numel() // len(scales)).view(moment.shape)


def checked(where: str, first: Tensor, second: Tensor, maximum: Tensor | None = None) -> Tensor:
    """Check dequantized moments; return the first one, with 0 where the divisor was rounded to 0.

    In AdamW ``|m| <= C sqrt(v)``, with C about 7 at betas (0.9, 0.999) (Cauchy and Schwarz), so v = 0 means m = 0. A
    quantized state breaks that: m and v have scales of their own, and a v below half of its block's smallest code is 0
    beside an m that is not. The next gradient may be tiny, and the element would move by ``lr * m / eps``. With m = 0
    it starts anew instead: its next step is at most ``(1 - beta1) / sqrt(1 - beta2)`` times lr, bias corrections apart.
    Elsewhere v is at least its block's smallest code, and the ratio exceeds that bound by a small factor at most.

    Args:
        where: the parameter, for errors.
        first: the first moment, FP32; not changed.
        second: the second moment, FP32, of the same shape.
        maximum: AMSGrad's maximum, FP32, of the same shape, or None.

    Raises:
        InvalidState: different shapes, a NaN or an infinity, or a second moment or maximum below 0.
    """
    shapes = [tuple(moment.shape) for moment in (first, second, maximum) if moment is not None]
    if len(set(shapes)) > 1:
        raise InvalidState(f"the moments of {where} must have one shape, got {', '.join(map(str, shapes))}")
    for name, moment, least in (("first", first, -math.inf), ("second", second, 0.0), ("maximum", maximum, 0.0)):
        if moment is None:
            continue
        if not bool(moment.isfinite().all()):
            raise InvalidState(f"the {name} moment of {where} is not finite; its scales are damaged, or its run was")
        if bool((moment < least).any()):
            raise InvalidState(f"the {name} moment of {where} has values below 0; is it an AdamW checkpoint?")
    divisor = second if maximum is None else torch.maximum(second, maximum)
    return first.masked_fill(divisor == 0.0, 0.0)


def _looked_up(what: str, codes: Tensor, values: Tensor, count: int) -> Tensor:
    """What each code stands for, flat, in FP32."""
    if codes.dtype is not torch.uint8 or values.shape != (count,) or not values.is_floating_point():
        raise InvalidState(
            f"{what} must hold uint8 codes for {count} values, got {codes.dtype} for {tuple(values.shape)} values"
        )
    return values.detach().float().index_select(0, codes.detach().reshape(-1).int())


def _scaled(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of flat numbers by its scale, in place; the last block may be shorter."""
    scales = scales.detach().float()
    whole = numbers.numel() // block
    numbers[: whole * block].view(whole, block).mul_(scales[:whole, None])
    if whole < len(scales):
        numbers[whole * block :].mul_(scales[whole])
    return numbers
