"""Checkpoints: torch's form both ways, checked before anything is replaced, copied, with the state's own dtypes."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import InvalidOption, InvalidState, ShapeMismatch

from . import masters, migration, moments, sharding
from .hyperparameters import group_options
from .members import MASTER, REMAINDER, step_counter
from .moments import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, PACKED
from .settings import check_group_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim.optimizer import StateDict

    from .adamw import AdamW
    from .settings import Settings

KEY = "ruda"
"""Top-level key of a state dict under which this library's settings travel, as plain numbers."""
FORMAT = 1
_SWITCHES = ("foreach", "fused", "differentiable", "capturable", "decoupled_weight_decay")
_STATE_DTYPES = {
    **dict.fromkeys((EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, MASTER), torch.float32),
    **dict.fromkeys((PACKED, REMAINDER), torch.bfloat16),
}
"""How entries are read; moments are brought into the optimizer's form afterwards."""


def settings_entry(settings: Settings) -> dict[str, Any]:
    """What is saved under :data:`KEY`."""
    return {"format": FORMAT, **asdict(settings)}


def load(optimizer: AdamW, torch_load: Callable[[StateDict], None], state_dict: StateDict) -> Settings:
    """Load a checkpoint into a fused optimizer and return the settings it leaves behind.

    torch's loader does the groups, the hooks and nothing else: it would cast FP32 moments to the parameter's dtype, so
    the state is converted here, from a hook that runs after the user's and before anything is replaced.
    """
    converted: dict[Any, Any] = {}
    settings = optimizer.settings

    def take_state(_: object, incoming: StateDict) -> StateDict:
        nonlocal settings
        migration.check_origin(incoming)
        settings = _loaded_settings(incoming.get(KEY), settings)
        groups = _checked_groups(optimizer, incoming["param_groups"])
        converted.update(_convert_state(optimizer, groups, incoming["state"]))
        return {**incoming, "param_groups": groups, "state": {}}

    def put_state(_: object) -> None:
        optimizer.state.update(converted)

    if not isinstance(state_dict, dict):
        migration.check_origin(state_dict)  # torch would copy it before any hook sees it
    handles = [
        optimizer.register_load_state_dict_pre_hook(take_state),
        optimizer.register_load_state_dict_post_hook(put_state, prepend=True),
    ]
    try:
        torch_load(state_dict)
    finally:
        for handle in handles:
            handle.remove()
    return settings


def for_torch(state_dict: StateDict) -> StateDict:
    """What torch's own step can load of any checkpoint: packed moments are unpacked, which loses nothing."""
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    return moments.unpack_moments(state_dict) if isinstance(state, dict) else state_dict


def warn_of_loss(state_dict: StateDict) -> None:
    """Warn if a checkpoint of the fused step holds what torch's own step does not do."""
    entry = state_dict.get(KEY)
    if not isinstance(entry, dict):
        return
    lost = []
    if entry.get("max_grad_norm") is not None:
        lost.append(f"clipping (max_grad_norm={entry['max_grad_norm']})")
    if entry.get("check_finite"):
        lost.append("the check for NaN and infinity (check_finite=True)")
    if any(MASTER in held or REMAINDER in held for held in state_dict.get("state", {}).values()):
        lost.append("the FP32 masters of half parameters")
    if lost:
        warnings.warn(
            f"this checkpoint of the fused step loses {' and '.join(lost)} in an optimizer with fused_step=False; "
            "build it with fused_step=True to keep them",
            stacklevel=3,
        )


def convert_amsgrad(state_dict: StateDict, *, amsgrad: bool) -> StateDict:
    """A copy of an optimizer state dict that fits an optimizer with this ``amsgrad``.

    Turning AMSGrad on starts the running maximum at the second moment, as if it had been recorded from this step on;
    turning it off drops the maximum.

    Args:
        state_dict: from ``torch.optim.AdamW`` or :class:`ruda_torch.AdamW`; not changed.
        amsgrad: what the optimizer that will load it was built with.
    """
    state = {}
    for key, entry in state_dict["state"].items():
        state[key] = dict(entry)
        if not amsgrad:
            state[key].pop(MAX_EXP_AVG_SQ, None)
        elif MAX_EXP_AVG_SQ not in entry and (EXP_AVG_SQ in entry or PACKED in entry):
            state[key][MAX_EXP_AVG_SQ] = moments.second_moment(entry)
    groups = [{**group, "amsgrad": amsgrad} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def _loaded_settings(entry: Any, live: Settings) -> Settings:
    if entry is None:
        return live
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        came = entry.get("format") if isinstance(entry, dict) else entry
        raise InvalidState(
            f"the checkpoint's '{KEY}' entry must have format {FORMAT}, got {came!r}; it was written by another "
            "version of ruda-optim. Drop the entry to load the rest"
        )
    try:
        return replace(live, max_grad_norm=entry["max_grad_norm"], check_finite=entry["check_finite"])
    except KeyError as error:
        raise InvalidState(f"the checkpoint's '{KEY}' entry has no {error}") from None
    except InvalidOption as error:
        raise InvalidState(f"the checkpoint's '{KEY}' entry does not hold the settings: {error}") from None


def _checked_groups(optimizer: AdamW, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The checkpoint's groups with the live switches, their parameters in this optimizer's order."""
    live_groups = optimizer.param_groups
    sizes = [len(group["params"]) for group in saved_groups], [len(group["params"]) for group in live_groups]
    if sizes[0] != sizes[1]:
        raise InvalidState(
            f"the checkpoint must have this optimizer's parameter groups with {sizes[1]} parameters, got {sizes[0]}"
        )
    groups = []
    for number, (saved, live) in enumerate(zip(saved_groups, live_groups, strict=True)):
        if bool(saved.get("amsgrad", False)) != bool(live["amsgrad"]):
            raise InvalidState(
                f"group {number} of the checkpoint has amsgrad={bool(saved.get('amsgrad', False))}, this optimizer "
                f"amsgrad={bool(live['amsgrad'])}; load ruda_torch.convert_amsgrad(state_dict, "
                f"amsgrad={bool(live['amsgrad'])}), or build the optimizer like the checkpoint"
            )
        group = {**saved, **{name: live[name] for name in _SWITCHES if name in live}}
        missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
        if missing:
            raise InvalidState(
                f"group {number} of the checkpoint has no {', '.join(missing)}, only {', '.join(map(str, saved))}; is "
                "it an AdamW checkpoint?"
            )
        try:
            check_group_keys(number, group)
            group_options(number, group)
        except InvalidOption as error:
            raise InvalidState(f"the checkpoint does not fit: {error}") from None
        names, live_names = saved.get("param_names"), live.get("param_names")
        # Names that are a permutation of ours say which state belongs to whom; any other names (a wrapper's prefix) do
        # not, and the position decides, as it does in torch.
        if names and live_names and names != live_names and sorted(names) == sorted(live_names):
            key_of = dict(zip(names, saved["params"], strict=True))
            group.update(params=[key_of[name] for name in live_names], param_names=list(live_names))
        groups.append(group)
    return groups


def _convert_state(optimizer: AdamW, groups: list[dict[str, Any]], saved: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    rest = dict(saved)
    for number, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        names = group.get("param_names") or live.get("param_names")
        for index, (key, parameter) in enumerate(zip(group["params"], live["params"], strict=True)):
            entry = rest.pop(key, None)
            if entry is None:
                continue
            if not isinstance(entry, dict) or not entry:
                state[parameter] = deepcopy(entry)  # not ours
                continue
            where = f"parameter {index} of group {number}" + (f" ({names[index]})" if names else "")
            moments.check_one_form(f"the checkpoint's state of {where}", entry, "drop one of them")
            stored = (PACKED,) if PACKED in entry else (EXP_AVG, EXP_AVG_SQ)
            for needed in ("step", *stored, *((MAX_EXP_AVG_SQ,) if live["amsgrad"] else ())):
                if needed not in entry:
                    raise InvalidState(
                        f"the checkpoint's state of {where} has no {needed}, only {', '.join(map(str, entry))}; is it "
                        "an AdamW checkpoint?"
                    )
            if MAX_EXP_AVG_SQ in entry and not live["amsgrad"]:
                raise InvalidState(
                    f"the checkpoint's state of {where} has a max_exp_avg_sq, but its group amsgrad=False; load "
                    "ruda_torch.convert_amsgrad(state_dict, amsgrad=False), which drops it"
                )
            converted = {
                name: step_counter(where, value)
                if name == "step"
                else _convert(f"{name} of {where}", name, value, parameter)
                for name, value in _without_useless_master(entry, parameter).items()
            }
            moments.convert(converted, parameter, optimizer.settings.moments)
            _convert_master(converted, parameter, split=optimizer.settings.keeps_split(parameter.dtype))
            state[parameter] = converted
    state.update(deepcopy(rest))  # state of no parameter: somebody's own, kept as torch keeps it
    return state


def _without_useless_master(entry: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Leave out a master that no longer says anything; the next step makes one from the parameter.

    An FP32 parameter is its own master, and what lies below a BF16 number says nothing about an FP16 one. A master in
    another dtype went through an optimizer that keeps none: torch.optim.AdamW casts what it does not know to the
    parameter's dtype and then updates the parameter alone.
    """
    useless = {MASTER, REMAINDER} if parameter.dtype is torch.float32 else set()
    if parameter.dtype is not torch.bfloat16:
        useless.add(REMAINDER)
    master = entry.get(MASTER)
    if isinstance(master, torch.Tensor) and master.dtype is not torch.float32:
        useless.add(MASTER)
    return {name: value for name, value in entry.items() if name not in useless}


def _convert_master(entry: dict[str, Any], parameter: Tensor, *, split: bool) -> None:
    """Turn the master of a half parameter into the kind that this optimizer keeps; both lie as the parameter does."""
    if split and MASTER in entry:
        master = sharding.local(entry.pop(MASTER))
        if REMAINDER not in entry:
            entry[REMAINDER] = torch.empty_like(parameter, requires_grad=False)
            sharding.local(entry[REMAINDER]).copy_(masters.remainder_of(master))
    elif not split and REMAINDER in entry:
        remainder = sharding.local(entry.pop(REMAINDER))
        if MASTER not in entry:
            entry[MASTER] = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            sharding.local(entry[MASTER]).copy_(masters.joined(sharding.local(parameter), remainder))


def _convert(what: str, name: str, value: Any, parameter: Tensor) -> Any:
    """A copy of one state entry; a tensor of ours on the parameter's device, laid out like it, in the dtype we keep."""
    if name not in _STATE_DTYPES:
        return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)
    dtype = _STATE_DTYPES[name]
    if name == PACKED:
        moments.check_words(what, value)
    if not isinstance(value, torch.Tensor):
        raise InvalidState(f"{what} must be a tensor, got {type(value).__name__}")
    if value.shape != parameter.shape:
        raise ShapeMismatch(
            f"{what} must have the parameter's shape {tuple(parameter.shape)}, got {tuple(value.shape)}; were the "
            "model's parameters reordered?"
        )
    if not value.is_floating_point() or (name == REMAINDER and value.dtype is not dtype):
        wanted = str(dtype).removeprefix("torch.") if name == REMAINDER else "floating-point"
        raise InvalidState(f"{what} must be {wanted}, got {value.dtype}")
    copied = sharding.placed_like(what, value.detach().to(device=parameter.device, dtype=dtype, copy=True), parameter)
    if copied.stride() == parameter.stride():
        return copied
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(copied)
