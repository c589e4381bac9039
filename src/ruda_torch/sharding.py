"""Sharded parameters: with :mod:`ruda_torch.ranks` the only file that looks at DTensor and torch.distributed.

A DTensor is a part on each rank of a device mesh. The kernels work on parts.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ruda_optim.fused_adamw import InvalidOption, InvalidState, InvalidTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_dtensor_class: Any = None


def _dtensor() -> Any:
    """The class DTensor, or None: where nobody has imported its module, no tensor can be one."""
    global _dtensor_class  # noqa: PLW0603 - asked for once per tensor and step
    if _dtensor_class is None:
        _dtensor_class = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return _dtensor_class


def is_sharded(tensor: object) -> bool:
    """True for a DTensor, whatever its placements."""
    if type(tensor) in _PLAIN:
        return False
    dtensor = _dtensor()
    return dtensor is not None and isinstance(tensor, dtensor)


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor on ``meta`` or of torch's FakeTensorMode: shape and dtype without memory."""
    part = local(tensor)
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return part.is_meta or (fake is not None and isinstance(part, fake))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, after any communication it still waits for; a plain tensor is its own part."""
    if type(tensor) in _PLAIN:
        return tensor
    # Not to_local(): it makes a new view of a parameter at each call.
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    if type(part) in _PLAIN or not hasattr(part, "wait"):
        return part
    return part.wait()  # an AsyncCollectiveTensor has no memory to point at


def with_part(like: Tensor, part: Tensor) -> Tensor:
    """A tensor split over ranks as ``like`` is, of which this rank holds ``part``; nothing is sent."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # With its shape: parts of an uneven split do not tell it.
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def placed_like(what: str, value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` (of the parameter's full shape) split over ranks as ``parameter`` is.

    A plain tensor must be the full value on every rank; nothing is sent then. A DTensor that is split in another way is
    gathered, so all ranks must call this together.
    """
    if not is_sharded(parameter):
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if is_sharded(value):
        if value.device_mesh == mesh and value.placements == placements:  # type: ignore[attr-defined]
            return value
        value = value.full_tensor()  # type: ignore[attr-defined]
    from torch.distributed.tensor import distribute_tensor

    try:
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise InvalidState(
            f"{what} cannot be split as {placements}: {error}. Load it with torch.distributed.checkpoint.state_dict."
            "set_optimizer_state_dict"
        ) from error


def mark_distinct(parameters: Iterable[Tensor], *, copies: int = 1) -> None:
    """Say that other ranks hold other parameters in the place of these: experts, above all.

    Without it, plain tensors count as copies on all ranks, and so do DTensors on a mesh of some ranks on the others.
    Marked parameters count once each in the global norm, and they may lack gradients on some ranks. Mark them on every
    rank before the first step and after ``fully_shard``, which replaces parameters.

    Args:
        parameters: the parameters, for example ``model.experts.parameters()``.
        copies: on how many ranks (for DTensors: meshes) the same parameter is held, its gradients averaged.
    """
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
        raise InvalidOption(f"copies must be a whole number of ranks or meshes, at least 1, got {copies!r}")
    for parameter in parameters:
        parameter._ruda_copies = copies  # type: ignore[attr-defined]


def copies_of(parameter: Tensor) -> int | None:
    """What :func:`mark_distinct` said of the parameter; None if it said nothing."""
    return getattr(parameter, "_ruda_copies", None)


def crosses_ranks(parameter: Tensor) -> bool:
    """Whether the statistics of this parameter need other ranks."""
    return is_sharded(parameter) or copies_of(parameter) is not None


def zero_redundancy_wrapper(groups: Sequence[dict[str, Any]]) -> Any:
    """The ZeroRedundancyOptimizer whose optimizer on this rank has these very parameter groups, or None."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None:
        return None
    for thing in gc.get_objects():
        if issubclass(type(thing), module.ZeroRedundancyOptimizer):
            optimizer = getattr(thing, "optim", None)
            if optimizer is not None and optimizer.param_groups is groups:
                return thing
    return None


def misplaced_gradients(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], where: Callable[[int], str]
) -> list[int]:
    """Positions of the gradients whose placements are not their parameter's; raises where only one is a DTensor."""
    found = []
    for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if gradient is None:
            continue
        sharded = is_sharded(parameter)
        if is_sharded(gradient) is not sharded:
            raise InvalidTensor(
                f"{where(position)} is {'a DTensor' if sharded else 'a plain tensor'}, its gradient is not; let "
                "backward() produce gradients, or distribute them as the parameter is distributed"
            )
        if not sharded:
            continue
        own, other = parameter._spec, gradient._spec  # type: ignore[attr-defined]
        if own is other or (own.placements == other.placements and own.mesh == other.mesh):
            continue
        if own.mesh != other.mesh:
            raise InvalidTensor(
                f"the gradient of {where(position)} must be on the parameter's mesh {own.mesh}, got {other.mesh}"
            )
        found.append(position)
    return found


def settled(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], misplaced: Sequence[int]
) -> list[Tensor | None]:
    """This rank's parts of the gradients, the misplaced ones redistributed like their parameters (a collective)."""
    placed = list(gradients)
    for position in misplaced:
        placements = parameters[position].placements  # type: ignore[attr-defined]
        placed[position] = gradients[position].redistribute(placements=placements)  # type: ignore[union-attr]
    return [None if gradient is None else local(gradient) for gradient in placed]


def may_replace() -> bool:
    """Whether anybody in this process can have exchanged parameters for DTensors."""
    return _dtensor() is not None and dist.is_available() and dist.is_initialized()


def check_not_replaced(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], where: Callable[[int], str], known: set[int]
) -> None:
    """Raise if a module has exchanged a parameter for a DTensor since the optimizer was given it.

    ``fully_shard`` and ``parallelize_module`` do that; an optimizer built before them would update nothing, silently.
    Looks through all modules of the process, so it is called when the tensors of a step are new, or fewer than they
    were, and looks only if a parameter has no gradient.

    Args:
        parameters, gradients: of all groups.
        where: names a parameter by its position.
        known: ids of parameters that were found in a module before; extended here.
    """
    if not may_replace():
        return
    dtensor = _dtensor()
    idle = {
        id(parameter): position
        for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True))
        if gradient is None and parameter.requires_grad
    }
    if not idle or (idle.keys() <= known and len(idle) < len(parameters)):
        return
    mine = {id(parameter) for parameter in parameters}
    held: set[int] = set()
    foreign: set[torch.Size] = set()
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    fsdp_parameter = () if fsdp is None else fsdp.FSDPParam
    for thing in gc.get_objects():
        if issubclass(type(thing), fsdp_parameter):
            # Between a forward and a backward pass the module holds the gathered parameter instead.
            held.add(id(getattr(thing, "sharded_param", None)))
        elif issubclass(type(thing), torch.nn.Module):
            for parameter in vars(thing).get("_parameters", {}).values():
                held.add(id(parameter))
                if isinstance(parameter, dtensor) and id(parameter) not in mine:
                    foreign.add(parameter.shape)
    known.update(held & idle.keys())
    for number, position in idle.items():
        if number not in held and parameters[position].shape in foreign:
            raise InvalidOption(
                f"{where(position)} is no longer part of any module; a module holds a DTensor of its shape instead. "
                "Build the optimizer after fully_shard or parallelize_module, from the sharded model's parameters()"
            )
