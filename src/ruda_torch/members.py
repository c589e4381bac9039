"""Which tensors take part in a step, with every check that a step needs before it changes anything.

Collecting members is the slow path: it runs on the first step and when the tensors of a step differ from those of the
last one, which a plan notices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import DifferentDevice, FusedAdamWError, InvalidState, InvalidTensor, ShapeMismatch
from ruda_optim.fused_adamw.storage import GRADIENT_DTYPES, TensorMemory, check_has_memory, check_memory, overlaps

from . import sharding
from .moments import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, PACKED, check_one_form, state_dtype, state_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .settings import Settings

PARAMETER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASTER = "master"
"""State key of the FP32 master of an FP16 or BF16 parameter."""
REMAINDER = "master_remainder"
"""State key of a split master's low 16 bits, stored as the bits of a BF16 tensor (a type every backend can move)."""


@dataclass
class Member:
    """One parameter of a plan.

    ``state`` is what the optimizer holds, empty before the first update. ``target`` is the memory that the step reads
    and writes: the parameter itself, or the stand-in that a compiled graph passes for it. ``gradient`` is this rank's
    part of it, None for a parameter that has a state and stays out of this step. ``moments`` are the keys of the state.
    """

    where: str
    parameter: Tensor
    target: Tensor
    gradient: Tensor | None
    position: int
    group: int
    moments: tuple[str, ...]
    state: dict[str, Any]
    created: dict[str, Tensor] = field(default_factory=dict)

    @property
    def amsgrad(self) -> bool:
        return MAX_EXP_AVG_SQ in self.moments

    @property
    def memory_keys(self) -> tuple[str, ...]:
        """What of the state a step reads and writes, as far as it is there."""
        masters = () if self.target.dtype is torch.float32 else (MASTER, REMAINDER)
        return ("step", *self.moments, *masters)

    def entry(self, key: str) -> Tensor | None:
        """A state tensor, or None."""
        return self.created.get(key, self.state.get(key))

    def local(self, key: str) -> Tensor | None:
        """This rank's part of a state tensor, or None."""
        tensor = self.entry(key)
        return None if tensor is None else sharding.local(tensor)

    def allocate(self, settings: Settings) -> None:
        """Allocate what the state lacks, into ``created``: nothing the optimizer holds changes yet.

        The host does not know whether the step will be taken, so the moments start as zeros in memory.
        """
        parameter, new = self.target, self.created
        if not self.state:
            new["step"] = torch.zeros((), dtype=torch.float32, device=_counter_device(parameter))
            for key in self.moments:
                new[key] = torch.zeros_like(parameter, dtype=state_dtype(settings.moments), requires_grad=False)
        if parameter.dtype is torch.float32:
            return
        if settings.keeps_split(parameter.dtype):
            if REMAINDER not in self.state:
                new[REMAINDER] = torch.zeros_like(parameter, requires_grad=False)
        elif MASTER not in self.state:
            new[MASTER] = parameter.detach().to(torch.float32)

    def memory(self) -> TensorMemory:
        """The launch description of this member; everything it needs has been checked and allocated."""
        parameter = sharding.local(self.target)
        half = parameter.dtype is not torch.float32
        split = half and self.entry(REMAINDER) is not None
        return TensorMemory(
            gradient=parameter if self.gradient is None else self.gradient,
            parameter=None if split else self.local(MASTER) if half else parameter,
            exp_avg=self.local(PACKED if PACKED in self.moments else EXP_AVG),
            exp_avg_sq=self.local(EXP_AVG_SQ) if EXP_AVG_SQ in self.moments else None,
            max_exp_avg_sq=self.local(MAX_EXP_AVG_SQ) if self.amsgrad else None,
            copy=parameter if half else None,
            remainder=self.local(REMAINDER) if split else None,
            step=self.local("step"),
        )


def collect(
    groups: Sequence[dict[str, Any]],
    targets: Sequence[Sequence[Tensor]],
    state: dict[Tensor, dict[str, Any]],
    gradients: Sequence[Tensor | None],
    settings: Settings,
) -> list[Member]:
    """The members of a plan, in the order of the groups, all of them checked.

    Args:
        groups, state: the optimizer's.
        targets: the parameters of each group, or their stand-ins.
        gradients: this rank's parts, one per parameter of all groups, None for those that stay out of this step.
        settings: say in which form moments are kept, and which parameters keep a split master.

    Raises:
        InvalidTensor, ShapeMismatch, DifferentDevice, InvalidState: what is wrong, with group and index.
    """
    members: list[Member] = []
    seen: set[int] = set()
    position = -1
    for number, group in enumerate(groups):
        names = group.get("param_names")
        keys = state_keys(settings.moments, amsgrad=bool(group["amsgrad"]))
        for index, (parameter, target) in enumerate(zip(group["params"], targets[number], strict=True)):
            position += 1
            gradient = gradients[position]
            held = state.get(parameter, {})
            if gradient is None and not held:
                continue
            where = describe(number, index, names)
            member = Member(where, parameter, target, None, position, number, keys, held)
            if gradient is None:
                if _is_ready(member, settings):
                    members.append(member)
                continue
            if id(parameter) in seen:
                raise InvalidTensor(f"{where} appears twice; an optimizer updates each parameter once per step")
            seen.add(id(parameter))
            member.gradient = check_gradient(where, parameter, gradient)
            _check_parameter(where, target)
            _check_state(member, settings)
            members.append(member)
    fake = [member for member in members if sharding.is_fake(member.target)]
    if not fake:
        _check_memory(members)
    elif len(fake) < len(members):
        raise InvalidTensor(
            f"{fake[0].where} has no memory (the meta device, or FakeTensorMode), other parameters of this step have; "
            "give all of them memory first: model.to_empty(device=...)"
        )
    return members


def _is_ready(member: Member, settings: Settings) -> bool:
    """Whether a parameter without a gradient could be stepped; what is wrong with it is said once it has one."""
    try:
        _check_parameter(member.where, member.target)
        _check_state(member, settings)
    except FusedAdamWError:
        return False
    return all(member.entry(key) is not None for key in member.moments)


def _check_has_memory(what: str, part: Tensor, parameter: Tensor) -> None:
    if not sharding.is_fake(parameter):  # which has none on purpose, and nothing is launched on it
        check_has_memory(what, part)


def _check_memory(members: Sequence[Member]) -> None:
    """Raise :class:`InvalidTensor` unless what the step writes, as far as it exists, belongs to one tensor each."""
    written = [(member.where, sharding.local(member.target)) for member in members]
    for member in members:
        for key in member.memory_keys:
            tensor = member.local(key)
            if tensor is not None:
                written.append((f"{key} of {member.where}", tensor))
    gradients = ((f"the gradient of {member.where}", member.gradient) for member in members)
    check_memory(written, [(name, gradient) for name, gradient in gradients if gradient is not None])


def describe(group: int, index: int, names: Sequence[str] | None) -> str:
    """What error messages call a parameter."""
    return f"parameter {index} of group {group}" + ("" if names is None else f" ({names[index]})")


def describe_position(groups: Sequence[dict[str, Any]], position: int) -> str:
    """What error messages call the parameter at ``position`` among those of all groups."""
    for number, group in enumerate(groups):
        if position < len(group["params"]):
            return describe(number, position, group.get("param_names"))
        position -= len(group["params"])
    raise IndexError(position)


def _check_parameter(where: str, parameter: Tensor) -> None:
    check_parameter_dtype(where, parameter)
    local = sharding.local(parameter)
    if local.layout is not torch.strided or local.is_neg():
        raise InvalidTensor(f"{where} must be a dense tensor, got layout {local.layout}")
    _check_has_memory(where, local, local)
    if overlaps(local):
        raise InvalidTensor(
            f"{where} must not share memory between its elements; got shape {tuple(local.shape)} with strides "
            f"{local.stride()} (an expanded tensor?). Use a parameter with memory of its own: "
            "torch.nn.Parameter(tensor.clone())"
        )


def check_parameter_dtype(where: str, parameter: Tensor) -> None:
    """Raise :class:`InvalidTensor` unless the fused step takes the parameter's dtype."""
    if parameter.dtype not in PARAMETER_DTYPES:
        raise InvalidTensor(
            f"{where} must be float32, float16 or bfloat16 for the fused step, got {parameter.dtype}; convert it, or "
            "use fused_step=False"
        )


def check_gradient(where: str, parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient (this rank's part), if it fits its parameter."""
    local = sharding.local(parameter)
    if sharding.is_sharded(gradient):
        raise InvalidTensor(f"the gradient of {where} must be a plain tensor like its parameter, got a DTensor")
    gradient = sharding.local(gradient)  # it may still be under way
    if gradient.layout is not torch.strided:
        raise InvalidTensor(
            f"the gradient of {where} must be dense, got layout {gradient.layout}; build the layer with sparse=False, "
            "call .to_dense(), or use torch.optim.SparseAdam"
        )
    if gradient.dtype not in GRADIENT_DTYPES:
        raise InvalidTensor(f"the gradient of {where} must be float32, float16 or bfloat16, got {gradient.dtype}")
    if gradient.shape != local.shape:
        raise ShapeMismatch(
            f"the gradient of {where} must have the parameter's shape {tuple(local.shape)}, got {tuple(gradient.shape)}"
        )
    if gradient.device != local.device:
        raise DifferentDevice(
            f"the gradient of {where} must be on the parameter's device {local.device}, got {gradient.device}; move "
            "the model before the backward pass, or move the gradient"
        )
    if gradient.is_neg():
        raise InvalidTensor(f"the gradient of {where} is a lazily negated view; assign p.grad.resolve_neg()")
    if gradient._is_zerotensor():
        raise InvalidTensor(f"the gradient of {where} is zero without memory; assign p.grad.clone()")
    _check_has_memory(f"the gradient of {where}", gradient, local)
    return gradient


def _check_state(member: Member, settings: Settings) -> None:
    state, where = member.state, member.where
    if not isinstance(state, dict):
        raise InvalidState(f"the state of {where} must be a dict, got {type(state).__name__}")
    if not state:
        return
    needed = ("step", *state_keys(settings.moments, amsgrad=False))
    if any(key not in state for key in needed):
        raise InvalidState(
            f"the state of {where} must have {', '.join(needed[:-1])} and {needed[-1]}, got "
            f"{', '.join(map(str, state))}; load a checkpoint with load_state_dict, which converts moments"
        )
    check_one_form(f"the state of {where}", state, f"keep {' and '.join(needed[1:])}")
    if member.amsgrad and MAX_EXP_AVG_SQ not in state:
        raise InvalidState(
            f"the state of {where} has no max_exp_avg_sq, which amsgrad=True needs; convert the checkpoint with "
            "ruda_torch.convert_amsgrad(state_dict, amsgrad=True), or set amsgrad=False"
        )
    if not member.amsgrad and MAX_EXP_AVG_SQ in state:
        raise InvalidState(
            f"the state of {where} has a max_exp_avg_sq, but amsgrad is False now; a running optimizer keeps its "
            "amsgrad. Load ruda_torch.convert_amsgrad(optimizer.state_dict(), amsgrad=False) to drop the maximum"
        )
    split = settings.keeps_split(member.parameter.dtype)
    for key, wanted in ((MASTER, not split), (REMAINDER, split)):
        if key in state and not wanted and member.parameter.dtype is not torch.float32:
            raise InvalidState(
                f"the state of {where} holds '{key}', which split_master={settings.split_master} does not keep for "
                f"{member.parameter.dtype}; load the state with load_state_dict, which converts it"
            )
    parameter = member.parameter
    local = sharding.local(parameter)
    dtypes = [(key, state_dtype(settings.moments)) for key in member.moments]
    if parameter.dtype is not torch.float32:
        dtypes += [(MASTER, torch.float32), (REMAINDER, torch.bfloat16)]
    for key, dtype in dtypes:
        if key not in state:
            continue
        tensor = state[key]
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidState(
                f"{key} of {where} must be {str(dtype).removeprefix('torch.')}, got {kind}; load checkpoints with "
                "load_state_dict, which keeps this optimizer's state dtypes"
            )
        if tensor.shape != parameter.shape:
            raise ShapeMismatch(
                f"{key} of {where} must have the parameter's shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
            )
        part = sharding.local(tensor)
        if part.shape != local.shape:
            raise ShapeMismatch(
                f"{key} of {where} is sharded as {tuple(part.shape)}, the parameter as {tuple(local.shape)}"
            )
        if part.device != local.device:
            raise DifferentDevice(
                f"{key} of {where} must be on the parameter's device {local.device}, got {part.device}"
            )
        _check_has_memory(f"{key} of {where}", part, local)
        if overlaps(part):
            raise InvalidState(
                f"{key} of {where} must not share memory between its elements, got strides {part.stride()}"
            )
    step = state["step"]
    if isinstance(step, torch.Tensor):
        _check_has_memory(f"step of {where}", sharding.local(step), local)
    if not (
        isinstance(step, torch.Tensor)
        and step.dtype is torch.float32
        and step.dim() == 0
        and step.device == _counter_device(local)
    ):
        member.created["step"] = step_counter(where, step).to(_counter_device(local))


def _counter_device(parameter: Tensor) -> torch.device:
    """Where a step is counted: with the parameter, but for parameters on meta, whose steps nobody counts."""
    device = sharding.local(parameter).device
    return torch.device("cpu") if device.type == "meta" else device


def step_counter(where: str, step: object) -> Tensor:
    """A step count in the form this optimizer keeps: a 0-d FP32 tensor on the host.

    Args:
        step: int, float, or a tensor with one element, of any dtype and on any device.
    """
    if isinstance(step, torch.Tensor):
        if step.numel() != 1:
            raise InvalidState(f"the step of {where} must be one number, got a tensor of shape {tuple(step.shape)}")
        value = float(step.item())
    elif isinstance(step, (int, float)) and not isinstance(step, bool):
        value = float(step)
    else:
        raise InvalidState(f"the step of {where} must be a number or a tensor with one element, got {step!r:.60}")
    if not (value >= 0 and value == int(value)):
        raise InvalidState(f"the step of {where} must be a whole number >= 0, got {value}")
    return torch.tensor(value, dtype=torch.float32, device="cpu")
