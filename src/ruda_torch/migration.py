"""Checkpoints of other optimizers in the form of ``torch.optim.AdamW``, where their state has the same meaning.

Each function takes the ``state_dict()`` of one optimizer and returns a new one that :class:`ruda_torch.AdamW` and
``torch.optim.AdamW`` load. The input is not changed; tensors that need no conversion are shared with it, and loading
copies them. None of the packages needs to be installed.

What a checkpoint cannot tell is the caller's to know: these libraries keep the choice between Adam with an L2 term and
AdamW outside of it, so load only what was trained with ``adam_w_mode=True`` (apex), ``adamw_mode=True`` (DeepSpeed) or
a class whose name begins with AdamW (torchao).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import InvalidState

from . import quantized, sharding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.optimizer import StateDict

    ReadGroup = Callable[[str, dict[str, Any]], dict[str, Any]]
    ReadEntry = Callable[[str, dict[str, Any], dict[str, Any]], dict[str, Any]]

_STATES = ("state1", "state2")
_BITSANDBYTES_NESTED = "__bnb_optimizer_quant_state__"
# Names by which a checkpoint shows where it comes from: in a group, in a parameter's state.
_CONVERTERS = {
    "from_bitsandbytes": (set(), {"state1", _BITSANDBYTES_NESTED}),
    "from_optimi": ({"decouple_lr", "kahan_sum"}, {"kahan_comp"}),
    "from_apex": ({"bias_correction"}, set()),
}


def check_origin(state_dict: Any) -> None:
    """Raise :class:`InvalidState` for a checkpoint that holds something else than AdamW's state in torch's form.

    The error says what it holds instead and what converts it. This is the only place that knows.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidState(f"a checkpoint must be an optimizer's state dict, got {type(state_dict).__name__}")
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise InvalidState(f"the checkpoint must have 'state' and 'param_groups': {_instead(state_dict)}")
    entries = [entry for entry in state_dict["state"].values() if isinstance(entry, Mapping)]
    groups = state_dict["param_groups"]
    names = set().union(*groups), set().union(*entries)
    found = [converter for converter, marks in _CONVERTERS.items() if any(map(set.intersection, names, marks))]
    if any(quantized.is_torchao(value) for entry in entries for value in entry.values()):
        found.append("from_torchao")
    if found:
        other = " or from_deepspeed" if found[0] == "from_apex" else ""
        raise InvalidState(
            f"the checkpoint is another optimizer's; load ruda_torch.migration.{found[0]}(state_dict){other}, which "
            "brings it into torch's form"
        )
    for number, group in enumerate(groups):
        if not group.get("decoupled_weight_decay", True) and group.get("weight_decay"):
            raise InvalidState(
                f"group {number} of the checkpoint is Adam's, with weight_decay={group['weight_decay']} added to the "
                "gradient; AdamW takes it from the parameter. To go on that way, load a copy in which "
                "param_groups[...]['decoupled_weight_decay'] is True; to go on as before, use torch.optim.Adam"
            )


def _instead(state_dict: Mapping[Any, Any]) -> str:
    inner = [
        name
        for name, value in state_dict.items()
        if isinstance(value, Mapping) and "state" in value and "param_groups" in value
    ]
    if inner:
        return f"it is a dict of several things; load its {inner[0]!r}"
    if state_dict and all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        return "it holds tensors by name, as a model's state dict does; load that with model.load_state_dict"
    return f"it has {', '.join(map(repr, list(state_dict)[:8])) or 'nothing'}"


def from_apex(state_dict: StateDict) -> StateDict:
    """Convert a checkpoint of ``apex.optimizers.FusedAdam``, which counts steps once per parameter group.

    Raises:
        InvalidState: ``bias_correction=False``, or a state that is not FusedAdam's.
    """
    return _convert("apex", state_dict, _plain_group, _plain_entry, {"bias_correction", "step"})


def from_deepspeed(state_dict: StateDict) -> StateDict:
    """Convert a checkpoint of DeepSpeed's ``DeepSpeedCPUAdam`` or ``FusedAdam``, used on its own.

    A ZeRO checkpoint holds flat partitions instead; DeepSpeed's own tools turn it into weights, not into this form.

    Raises:
        InvalidState: ``bias_correction=False``, or a state that is not theirs.
    """
    return _convert("deepspeed", state_dict, _plain_group, _plain_entry, {"bias_correction", "step"})


def from_bitsandbytes(state_dict: StateDict) -> StateDict:
    """Convert a checkpoint of ``bitsandbytes.optim.AdamW``, ``AdamW32bit``, ``AdamW8bit`` or a paged one of them.

    Blockwise 8-bit moments become the FP32 numbers that bitsandbytes computes with, bit for bit; moments of small
    tensors, which it keeps in FP32, stay as they are. What the codes had rounded away is lost: see the page on
    migration. Where a second moment was rounded to 0, the first is set to 0 (:func:`ruda_torch.quantized.checked`).

    Args:
        state_dict: 8-bit states with blocks of 256 elements or, before bitsandbytes 0.44, 2,048; as ``state_dict()``
            nests them today, or flat.

    Raises:
        InvalidState: a third moment (AdEMAMix); moments that are not contiguous; 8-bit moments that are not blockwise,
            whose parts do not fit, that are not finite, or whose second moment is below 0.
    """
    return _convert("bitsandbytes", state_dict, _plain_group, _bitsandbytes_entry, {"alpha", "t_alpha", "t_beta3"})


def from_torchao(state_dict: StateDict) -> StateDict:
    """Convert a checkpoint of torchao's ``AdamW8bit``, ``AdamW4bit`` or ``AdamWFp8``.

    Quantized moments become the FP32 numbers of torchao's own ``dequantize()``, bit for bit; those of small tensors are
    taken over in FP32. What the codes had rounded away is lost: see the page on migration. Where the divisor was
    rounded to 0, the first moment is set to 0 (:func:`ruda_torch.quantized.checked`). The learning rate, a tensor in
    torchao, becomes a number. AMSGrad's maximum comes along. Moments of sharded parameters (DTensor) are converted part
    by part, without any communication.

    torchao's ``Adam8bit`` and so on add their weight decay to the gradient and look the same: convert them only if the
    decay is 0. To load a file with quantized moments torchao must be installed.

    Raises:
        InvalidState: quantized moments of another form, not finite, or a second moment below 0.
    """
    return _convert("torchao", state_dict, _torchao_group, _torchao_entry, set())


def from_optimi(state_dict: StateDict) -> StateDict:
    """Convert a checkpoint of ``optimi.AdamW``, which stores moments divided by ``1 - beta^step``.

    The multiplication rounds once, so the moments are within one FP32 rounding of what AdamW would have stored.
    ``decouple_lr=True`` becomes ``weight_decay / max_lr``, the same decay at every learning rate. A Kahan compensation
    is dropped: it belongs to the parameter, and an FP32 master starts from the parameter as it is.

    Raises:
        InvalidState: Adam without decoupled weight decay (``optimi.Adam`` with a weight decay), or another state.
    """
    own = {"beta1", "beta2", "decouple_wd", "decouple_lr", "max_lr", "kahan_sum", "triton", "gradient_release"}
    return _convert("optimi", state_dict, _optimi_group, _optimi_entry, own | {"setup", "step"})


def _convert(
    source: str, state_dict: StateDict, read_group: ReadGroup, read_entry: ReadEntry, dropped: set[str]
) -> StateDict:
    if not isinstance(state_dict, Mapping) or "state" not in state_dict or "param_groups" not in state_dict:
        check_origin(state_dict)
    defaults = torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))]).state_dict()["param_groups"][0]
    groups: list[dict[str, Any]] = []
    state: dict[Any, dict[str, Any]] = {}
    rest = dict(state_dict["state"])
    for number, group in enumerate(state_dict["param_groups"]):
        where = f"group {number} of the {source} checkpoint"
        kept = {name: value for name, value in group.items() if name not in dropped}  # a scheduler's initial_lr, names
        groups.append({**defaults, **kept, "foreach": None, **read_group(where, group)})
        for index, key in enumerate(group["params"]):
            entry = rest.pop(key, None)
            if entry:
                state[key] = read_entry(f"parameter {index} of {where}", group, entry)
    if rest:
        raise InvalidState(f"the {source} checkpoint has state for parameters of no group: {sorted(map(str, rest))}")
    return {"state": state, "param_groups": groups}


def _plain_group(where: str, group: dict[str, Any]) -> dict[str, Any]:
    if not group.get("bias_correction", True):
        raise InvalidState(f"{where} has bias_correction=False; AdamW always corrects, so its steps would be others")
    if group.get("amsgrad"):
        raise InvalidState(f"{where} has amsgrad=True, but its optimizer keeps no maximum; set amsgrad to False in it")
    betas = group.get("betas")
    if not isinstance(betas, (tuple, list)) or len(betas) < 2:
        raise InvalidState(f"{where} must have two betas, got {betas!r}")
    return {"betas": (betas[0], betas[1])}


def _plain_entry(where: str, group: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Torch's names; the step with the parameter or, in apex, with its group."""
    return {
        "step": _step(where, entry.get("step", group.get("step"))),
        "exp_avg": _moment(where, entry, "exp_avg"),
        "exp_avg_sq": _moment(where, entry, "exp_avg_sq"),
    }


def _bitsandbytes_entry(where: str, group: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    moments = {**entry, **entry.get(_BITSANDBYTES_NESTED, {})}
    first, second = (_tensor(where, moments, name) for name in _STATES)
    if first.shape != second.shape:
        raise InvalidState(
            f"{where} must have one first and one second moment of one shape, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}; is it an AdamW checkpoint?"
        )
    if not (first.is_contiguous() and second.is_contiguous()):
        raise InvalidState(
            f"the moments of {where} must be contiguous, got strides {first.stride()} and {second.stride()}: on a GPU "
            "bitsandbytes goes along their memory beside a contiguous parameter, on a CPU in the order of the indices, "
            "and the checkpoint does not tell which it was"
        )
    if torch.uint8 in (first.dtype, second.dtype):
        first, second = (quantized.bitsandbytes_moment(where, moments, number) for number in (1, 2))
        first = quantized.checked(where, first, second)
    else:
        first, second = (_moment(where, moments, name) for name in _STATES)
    return {"step": _step(where, entry.get("step")), "exp_avg": first, "exp_avg_sq": second}


def _torchao_group(where: str, group: dict[str, Any]) -> dict[str, Any]:
    return {**_plain_group(where, {**group, "amsgrad": False}), "lr": float(group["lr"])}


def _torchao_entry(where: str, group: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
    held = {name: _moment(where, entry, name) for name in names}
    parts: dict[str, torch.Tensor] = {}
    for name, moment in held.items():  # of a sharded moment this rank's part: whether it is quantized differs by rank
        part = sharding.local(moment)
        in_codes = quantized.is_torchao(part)
        parts[name] = quantized.torchao_moment(f"{name} of {where}", part) if in_codes else part.float()
    if any(map(quantized.is_torchao, held.values())):
        parts["exp_avg"] = quantized.checked(where, *parts.values())
    moments = {name: sharding.with_part(held[name], part) for name, part in parts.items()}
    return {"step": _step(where, entry.get("step")), **moments}


def _optimi_group(where: str, group: dict[str, Any]) -> dict[str, Any]:
    for name in ("beta1", "beta2", "weight_decay", "decouple_wd", "decouple_lr"):
        if name not in group:
            raise InvalidState(f"{where} has no {name}, only {', '.join(map(str, group))}; is it optimi's AdamW?")
    decay = float(group["weight_decay"])
    if group["decouple_lr"]:
        decay /= float(group["max_lr"])
    elif decay and not group["decouple_wd"]:
        raise InvalidState(f"{where} adds weight decay {decay} to the gradient (Adam, not AdamW): its moments hold it")
    return {"betas": (float(group["beta1"]), float(group["beta2"])), "weight_decay": decay}


def _optimi_entry(where: str, group: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    step = _step(where, group.get("step"))
    count = int(step.item())
    moments = {
        name: _moment(where, entry, name).float() * (1.0 - float(group[beta]) ** count)
        for name, beta in (("exp_avg", "beta1"), ("exp_avg_sq", "beta2"))
    }
    return {"step": step, **moments}


def _tensor(where: str, entry: dict[str, Any], name: str) -> torch.Tensor:
    held = entry.get(name)
    if not isinstance(held, torch.Tensor):
        raise InvalidState(f"{where} has no {name}, only {', '.join(map(str, entry))}")
    return held


def _moment(where: str, entry: dict[str, Any], name: str) -> torch.Tensor:
    moment = _tensor(where, entry, name)
    if not moment.is_floating_point():
        raise InvalidState(
            f"{name} of {where} must be floating-point, got {moment.dtype}, a form that is not known here. "
            "Train on with the optimizer that wrote it, or start from the weights alone"
        )
    return moment


def _step(where: str, step: Any) -> torch.Tensor:
    if step is None:
        raise InvalidState(f"{where} has no step, neither of its own nor with its group")
    return torch.as_tensor(step, device="cpu").detach().to("cpu", torch.float32).reshape(())
