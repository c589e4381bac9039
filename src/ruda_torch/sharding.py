"""Sharded parameters: the only file that looks at DTensor and torch.distributed.

A DTensor is a part on each rank of a device mesh. The kernels work on parts; what crosses ranks is one small sum per
step, in FP64: the squares of each parameter group, and what tells whether all ranks see the same step. Every rank
takes its decision from that sum alone.

How often an element is counted: a parameter whose mesh dimensions that shard it have the sizes n1, n2, ... has each
element on 1 / (n1 n2 ...) of the W ranks, so its squares are multiplied by n1 n2 ... and the sum is divided by W. That
holds for any mixture of meshes and plain (replicated) tensors, and for uneven and empty parts.
"""

from __future__ import annotations

import gc
import math
import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ruda_optim.fused_adamw import InvalidOption, InvalidState, InvalidTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import Tensor

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_SIGNATURE_BITS = 18
"""So that the sum of squared signatures of 100,000 ranks stays an exact FP64 integer."""


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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, after any communication it still waits for; a plain tensor is its own part."""
    if type(tensor) in _PLAIN:
        return tensor
    # Not to_local(): it makes a new view of a parameter at each call.
    part: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    if type(part) in _PLAIN or not hasattr(part, "wait"):
        return part
    return part.wait()  # an AsyncCollectiveTensor has no memory to point at


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


def find(parameters: Sequence[Tensor], *, guarded: bool) -> Ranks | None:
    """The ranks that share these parameters; None if all are plain tensors, whose statistics need no other rank.

    Args:
        parameters: all of an optimizer's.
        guarded: whether gradient statistics are asked for.

    Raises:
        InvalidTensor: flat parameters of FSDP1, whose parts cannot be told apart.
    """
    if guarded and "torch.distributed.fsdp" in sys.modules:
        for index, parameter in enumerate(parameters):
            if getattr(parameter, "_fsdp_flattened", False):
                raise InvalidTensor(
                    f"parameter {index} of all groups belongs to FullyShardedDataParallel (FSDP1), which does not say "
                    "which part of it this rank holds, so no global norm can be taken; use fully_shard (FSDP2), or "
                    "check_finite=False and max_grad_norm=None"
                )
    kinds = set(map(type, parameters)) - _PLAIN
    dtensor = _dtensor() if kinds else None
    if dtensor is None or not any(issubclass(kind, dtensor) for kind in kinds):
        return None
    return Ranks(parameters)


class Ranks:
    """The ranks over which the statistics of one optimizer are summed.

    They are those of the largest mesh among its parameters if that contains every other mesh, else all ranks. (A mesh
    of some dimensions only, as for a parameter that tensor parallelism does not split, lies inside the larger mesh.)

    Attributes:
        size: how many ranks.
        device: where their process groups communicate.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # By identity: the optimizer's cache drops this object when it sees other parameters.
        self._counts = {id(p): (p.numel(), local(p).numel(), _multiplicity(p)) for p in parameters}
        meshes = {p.device_mesh for p in parameters if is_sharded(p)}  # type: ignore[attr-defined]
        members = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
        largest = max(members, key=lambda mesh: len(members[mesh]))
        self.size = len(members[largest])
        if self.size == dist.get_world_size() or not all(some <= members[largest] for some in members.values()):
            self.size = dist.get_world_size()
            self._process_groups: list[Any] = [None]
        else:
            # Summing along one mesh dimension after the other reaches every rank of the mesh without a new group.
            self._process_groups = [largest.get_group(dimension) for dimension in range(largest.ndim)]
        kind = largest.device_type
        self.device = torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, torch.get_device_module(kind).current_device())

    def elements(self, parameters: Sequence[Tensor]) -> tuple[int, int]:
        """How many elements the parameters have, and this rank's contribution to W times that number."""
        known = [self._counts[id(parameter)] for parameter in parameters]
        return sum(full for full, _, _ in known), sum(factor * part for _, part, factor in known)

    def shares(
        self, parameters: Sequence[Tensor], rows: Tensor, groups: Tensor, count: int, device: torch.device
    ) -> Shares:
        """What turns statistics rows into sums per parameter group.

        Args:
            parameters: one per table column.
            rows: int64 ``(n,)``, statistics rows of each column.
            groups: int64 ``(n,)``, ascending: the group of each column.
            count: number of groups.
            device: where the rows are.
        """
        known = [self._counts[id(parameter)][2] for parameter in parameters]
        factors = torch.tensor(known, dtype=torch.float64, device="cpu")
        lengths = torch.zeros(count, dtype=torch.int64, device="cpu").index_add_(0, groups, rows)
        return Shares(factors.repeat_interleave(rows).to(device), lengths.to(device))

    def sum(self, numbers: Tensor) -> list[float]:
        """The FP64 numbers summed over all ranks, the same bits on each; waits for the device."""
        numbers = numbers.to(self.device)
        for group in self._process_groups:
            dist.all_reduce(numbers, group=group)
        # Groups along the last dimension may each have added in an order of their own; the first one's sum counts.
        for group in self._process_groups[:-1]:
            dist.broadcast(numbers, group=group, group_src=0)
        return numbers.tolist()


def _multiplicity(parameter: Tensor) -> int:
    """The number by which squares and elements of this rank's part are multiplied; see the top of this file."""
    if not is_sharded(parameter):
        return 1
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    placements = parameter.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(i) for i, placement in enumerate(placements) if not placement.is_replicate())


@dataclass(frozen=True)
class Shares:
    """``weights``: FP64 ``(r,)``, multiplicity of each statistics row; ``lengths``: int64 ``(g,)``, rows per group."""

    weights: Tensor
    lengths: Tensor

    def sums(self, rows: Tensor) -> Tensor:
        """FP64 ``(2, g)``: weighted squares and the number of bad rows per group.

        FP64 squares of FP32 magnitudes neither overflow nor vanish, so no common scale is needed. Each group is added
        up in order, so the same rows give the same bits.
        """
        scale, sumsq, bad = rows.double().unbind(1)
        columns = (scale * scale * sumsq * self.weights, bad)
        return torch.stack(
            [torch.segment_reduce(column, "sum", lengths=self.lengths, unsafe=True) for column in columns]
        )


@dataclass(frozen=True)
class GlobalStatistics:
    """What all ranks know after the reduction.

    Attributes:
        skip_requested: some rank was told (``found_inf``) that a gradient is not finite.
        bad: per group, whether a gradient is not finite somewhere.
        squares: per group, the sum of squares of all finite elements.
    """

    skip_requested: bool
    bad: list[bool]
    squares: list[float]

    def group_norms(self) -> tuple[float, ...]:
        """The L2 norm of each group; infinity where something is not finite."""
        return tuple(
            math.inf if bad else math.sqrt(squares) for bad, squares in zip(self.bad, self.squares, strict=True)
        )


class Reduction:
    """The one sum over ranks of a step; every rank takes part in it exactly once, come what may.

    Leaving the ``with`` block by an exception before the sum takes part with an error mark, so that the other ranks
    raise too instead of waiting for this one. Whether there is a sum is settled by parameters and settings alone.

    Args:
        ranks: the ranks that take part.
        groups: number of parameter groups.
        enabled: False: nothing has to be summed, and nobody takes part.
    """

    def __init__(self, ranks: Ranks, groups: int, *, enabled: bool) -> None:
        self.ranks = ranks
        self.enabled = enabled
        self._groups = groups
        self._signature = 0
        self._done = not enabled

    def __enter__(self) -> Reduction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not self._done:
            self._exchange(failed=True)

    def settle(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], where: Callable[[int], str]
    ) -> list[Tensor | None]:
        """This rank's part of each gradient, split as its parameter is.

        A gradient with other placements (``Partial``: each rank holds a summand) is redistributed, but only after all
        ranks have said that they see the same such gradients.

        Args:
            parameters, gradients: of all groups, None for a parameter without one.
            where: names a parameter by its position, for errors.
        """
        misplaced = misplaced_gradients(parameters, gradients, where)
        active = bytes(gradient is not None for gradient in gradients)
        self._signature = zlib.crc32(active + repr(misplaced).encode()) % 2**_SIGNATURE_BITS
        if misplaced and self.enabled:
            self._exchange()
            self._done = False  # the sum itself is still to come
        return settled(parameters, gradients, misplaced)

    def run(
        self, parameters: Sequence[Tensor] | None, sums: Sequence[Tensor], *, skip: bool = False
    ) -> GlobalStatistics:
        """Sum over ranks.

        Args:
            parameters: those that ``sums`` describe; None when there are no statistics.
            sums: from :meth:`Shares.sums`, one per device of this rank.
            skip: this rank was told that a gradient is not finite.

        Raises:
            InvalidState: another rank failed before its sum, or the ranks see different steps.
        """
        elements, own = (0, 0) if parameters is None else self.ranks.elements(parameters)
        counted, *numbers = self._exchange(own, sums, skip=skip)
        skip_requested = numbers.pop() > 0.0
        if parameters is not None and not skip_requested:
            counted /= self.ranks.size
            # Exact but for the rounding of sums beyond 2^53 and of the division.
            if abs(counted - elements) > 0.25 + elements * 2.0**-45:
                raise InvalidState(
                    f"the parts of the parameters on all {self.ranks.size} ranks add up to {counted:.15g} elements, "
                    f"the parameters have {elements}: they do not live on the same ranks (pipeline stages?). "
                    "Give each set of ranks a mesh of its own, or use check_finite=False and max_grad_norm=None"
                )
        squares = [number / self.ranks.size for number in numbers[: self._groups]]
        return GlobalStatistics(skip_requested, [number > 0.0 for number in numbers[self._groups :]], squares)

    def _exchange(
        self,
        elements: int = 0,
        sums: Sequence[Tensor] = (),
        *,
        skip: bool = False,
        failed: bool = False,
    ) -> list[float]:
        """One sum over ranks; returns elements, squares and bad rows per group, skip requests."""
        h = self._signature
        empty = [0.0] * (2 * self._groups)
        numbers = torch.tensor([elements, *empty, skip, failed, h, h * h], dtype=torch.float64).to(self.ranks.device)
        middle = numbers[1 : 1 + len(empty)].view(2, self._groups)
        for part in sums:
            middle += part.to(self.ranks.device)
        self._done = True  # also if this fails: there is no second try
        *values, failures, signatures, squared = self.ranks.sum(numbers)
        if failed:
            return values
        if failures > 0.0:
            raise InvalidState(
                f"{failures:.0f} of {self.ranks.size} ranks could not take this step; nothing was updated on this "
                "one. The error on that rank says why"
            )
        # The variance of the signatures, in integers: zero only if all are equal.
        if self.ranks.size * int(squared) != int(signatures) ** 2:
            raise InvalidState(
                f"the {self.ranks.size} ranks do not have gradients for the same parameters (or not with the same "
                "placements), so an update would make them drift apart; nothing was updated. Let every rank run the "
                "same layers, or clear or zero-fill the gradients of the layers that some ranks did not run"
            )
        return values


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


def check_not_replaced(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], where: Callable[[int], str], known: set[int]
) -> None:
    """Raise if a module has exchanged a parameter for a DTensor since the optimizer was given it.

    ``fully_shard`` and ``parallelize_module`` do that; an optimizer built before them would update nothing, silently.
    Looks through all modules of the process, so it is called when the tensors of a step are new, and looks only if a
    parameter has no gradient.

    Args:
        parameters, gradients: of all groups.
        where: names a parameter by its position.
        known: ids of parameters that were found in a module before; extended here.
    """
    dtensor = _dtensor()
    if dtensor is None or not dist.is_available() or not dist.is_initialized():
        return
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
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module):
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
