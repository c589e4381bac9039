"""The three forms of moments, and how one becomes another when a checkpoint is loaded.

``moments="float32"`` and ``"bfloat16"`` keep ``exp_avg`` and ``exp_avg_sq`` as torch does, in that dtype.
``"packed16"`` keeps both in one 16-bit word under ``packed_moments``: the bits of a BF16 tensor, a type that every
backend can move. What the words mean stands in :mod:`ruda_optim.fused_adamw.moment_codes`. Every word holds two BF16
numbers, so that unpacking it loses nothing and packing it again gives the same word.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ruda_optim.fused_adamw import InvalidOption, InvalidState, moment_codes

from . import sharding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim.optimizer import StateDict

EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
PACKED = "packed_moments"
"""State key of the words that hold both moments."""
FORMS = ("float32", "bfloat16", "packed16")
_CHUNK = 2**18
"""Elements that are packed at a time: what NumPy keeps in between then stays in the processor's cache."""


def check_form(value: object) -> None:
    """Raise :class:`InvalidOption` unless ``value`` names a form."""
    if not isinstance(value, str) or value not in FORMS:
        raise InvalidOption(f"moments must be {', '.join(map(repr, FORMS[:-1]))} or {FORMS[-1]!r}, got {value!r}")


def state_keys(form: str, *, amsgrad: bool) -> tuple[str, ...]:
    """The state keys of the moments."""
    stored = (PACKED,) if form == "packed16" else (EXP_AVG, EXP_AVG_SQ)
    return (*stored, MAX_EXP_AVG_SQ) if amsgrad else stored


def state_dtype(form: str) -> torch.dtype:
    """The dtype of all of them."""
    return torch.float32 if form == "float32" else torch.bfloat16


def check_one_form(where: str, state: Mapping[str, Any], remedy: str) -> None:
    """Raise :class:`InvalidState` if a state says twice what its moments are."""
    if PACKED in state and (EXP_AVG in state or EXP_AVG_SQ in state):
        both = ", ".join(key for key in (PACKED, EXP_AVG, EXP_AVG_SQ) if key in state)
        raise InvalidState(f"{where} holds its moments in two forms ({both}), which need not agree; {remedy}")


def unpacked(words: Tensor) -> tuple[Tensor, Tensor]:
    """``(exp_avg, exp_avg_sq)`` of packed moments, FP32 of the same shape, on their device; exact.

    Args:
        words: any shape, on any device, the bits of a BF16 tensor.
    """
    first, second = _tables(words.device)
    index = words.detach().view(torch.int16).to(torch.int32) & 0xFFFF
    return first[index], second[index]


def packed(exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The words nearest to these moments, in the order of their elements: the bits of a contiguous BF16 tensor.

    Args:
        exp_avg, exp_avg_sq: FP32, the same shape.
    """
    words = torch.empty(exp_avg.shape, dtype=torch.int16, device="cpu")
    flat = words.view(-1)
    m, v = exp_avg.detach().reshape(-1), exp_avg_sq.detach().reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        codes = moment_codes.encode_packed(m[part].cpu().numpy(), v[part].cpu().numpy())
        flat[part] = torch.from_numpy(codes.view(np.int16))
    return words.view(torch.bfloat16).to(exp_avg.device)


def convert(entry: dict[str, Any], parameter: Tensor, form: str) -> None:
    """Bring the moments of one state into ``form``.

    Args:
        entry: the state: its moments FP32 or packed, of the parameter's shape, device, layout and placements. Changed.
        parameter: whose state it is.
        form: what the optimizer keeps.
    """
    if form == "packed16":
        if PACKED not in entry:
            words = torch.empty_like(parameter, dtype=torch.bfloat16, requires_grad=False)
            pair = (sharding.local(entry.pop(EXP_AVG)), sharding.local(entry.pop(EXP_AVG_SQ)))
            # As bits: a copy of numbers may turn one NaN into another.
            sharding.local(words).view(torch.int16).copy_(packed(*pair).view(torch.int16))
            entry[PACKED] = words
    elif PACKED in entry:
        entry.update(_pair_of(entry.pop(PACKED), torch.float32))
    if form != "float32":
        for key in state_keys(form, amsgrad=MAX_EXP_AVG_SQ in entry):
            entry[key] = entry[key].to(torch.bfloat16)  # to nearest; strides stay


def unpack_moments(state_dict: StateDict) -> StateDict:
    """A copy of an optimizer state dict whose packed moments are ``exp_avg`` and ``exp_avg_sq``, for other optimizers.

    ``torch.optim.AdamW`` loads the result, and goes on from the very numbers that the words hold. What is not packed
    stays as it is, so every state dict may be passed.

    Args:
        state_dict: from :class:`ruda_torch.AdamW` with ``moments="packed16"``; not changed.

    Returns:
        Moments in BF16, which holds them exactly; loading casts them to what the optimizer keeps.
    """
    state = {}
    for key, entry in state_dict["state"].items():
        state[key] = entry
        if isinstance(entry, dict) and PACKED in entry:
            words = entry[PACKED]
            check_words(f"packed_moments of parameter {key}", words)
            moments = _pair_of(words, torch.bfloat16)
            state[key] = {
                name: value
                for old, kept in entry.items()
                for name, value in (moments.items() if old == PACKED else [(old, kept)])
            }
    return {**state_dict, "state": state}


def second_moment(entry: dict[str, Any]) -> Tensor:
    """A new tensor with the second moment of a state of any form."""
    if PACKED in entry:
        return _pair_of(entry[PACKED], torch.bfloat16)[EXP_AVG_SQ]
    return entry[EXP_AVG_SQ].clone()  # type: ignore[no-any-return]


def check_words(what: str, value: Any) -> None:
    """Raise :class:`InvalidState` unless ``value`` can be packed moments: a cast of words is nothing."""
    if not isinstance(value, torch.Tensor):
        raise InvalidState(f"{what} must be a tensor, got {type(value).__name__}")
    if value.dtype is not torch.bfloat16:
        raise InvalidState(
            f"{what} must be the bits of a bfloat16 tensor, got {value.dtype}: an optimizer that does not know them "
            "has cast them. Load ruda_torch.unpack_moments(state_dict) there, and what it saves here"
        )


def _pair_of(words: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    pair = unpacked(sharding.local(words))
    moments = {}
    for name, moment in zip((EXP_AVG, EXP_AVG_SQ), pair, strict=True):
        moments[name] = torch.empty_like(words, dtype=dtype)
        sharding.local(moments[name]).copy_(moment)
    return moments


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """FP32 ``(65536,)`` each: the moments of every word. The words 0 and -0 hold two zeros."""
    words = np.arange(2**16, dtype=np.uint16)
    first, second = moment_codes.decode_packed(words)
    second[words & 0x7FFF == 0] = 0.0
    return torch.from_numpy(first).to(device), torch.from_numpy(second).to(device)
