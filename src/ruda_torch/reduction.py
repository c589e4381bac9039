"""The one sum over ranks of a step with sharded parameters. What crosses ranks never visits the host.

It is a few FP64 numbers: the squares of each parameter group, and what tells whether all ranks see the same step. Every
rank takes its decision from that sum alone, where the sum is: on the device.

How often an element is counted: a parameter whose mesh dimensions that shard it have the sizes n1, n2, ... has each
element on 1 / (n1 n2 ...) of the W ranks, so its squares are multiplied by n1 n2 ... and the sum is divided by W. That
holds for any mixture of meshes and plain (replicated) tensors, and for uneven and empty parts.
"""

from __future__ import annotations

import math
import sys
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ruda_optim.fused_adamw import InvalidState, InvalidTensor

from .sharding import is_sharded, local, misplaced_gradients, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import Tensor

_SIGNATURE_BITS = 18
"""So that the sum of squared signatures of 100,000 ranks stays an exact FP64 integer."""


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
    return Ranks(parameters) if any(map(is_sharded, parameters)) else None


class Ranks:
    """The ranks over which the statistics of one optimizer are summed.

    They are those of the largest mesh among its parameters if that contains every other mesh, else all ranks. (A mesh
    of some dimensions only, as for a parameter that tensor parallelism does not split, lies inside the larger mesh.)
    All ranks must choose alike, so among meshes of one size the first in the order of the parameters counts.

    Attributes:
        size: how many ranks.
        device: where their process groups communicate.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # By identity: the optimizer's cache drops this object when it sees other parameters.
        self._counts = {id(p): (p.numel(), local(p).numel(), _multiplicity(p)) for p in parameters}
        meshes = dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p))  # type: ignore[attr-defined]
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
        self._constants: dict[tuple[float, ...], Tensor] = {}

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

    def constant(self, *values: float) -> Tensor:
        """FP64 numbers on the device; they are sent when they change."""
        known = self._constants.get(values)
        if known is None:
            if len(self._constants) > 32:
                self._constants.clear()
            known = torch.tensor(values, dtype=torch.float64, device="cpu").to(self.device)
            self._constants[values] = known
        return known

    def sum(self, numbers: Tensor) -> Tensor:
        """The FP64 numbers summed over all ranks in place, the same bits on each."""
        for group in self._process_groups:
            dist.all_reduce(numbers, group=group)
        # Groups along the last dimension may each have added in an order of their own; the first one's sum counts.
        for group in self._process_groups[:-1]:
            dist.broadcast(numbers, group=group, group_src=0)
        return numbers


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
    """What all ranks know after the sum, on the device of the ranks; only ``check`` and ``group_norms`` wait for it.

    Attributes:
        report: FP64 ``(3,)``: bad (0 or 1), scale 1, sum of squares of all finite elements.
        skip: FP32 ``(1,)``, above 0 on all ranks or on none: some rank was told to skip (``found_inf``), some rank
            failed, or the ranks do not see the same step. Nothing may be updated then.
        group_squares, group_bad: FP64 ``(g,)``: the same per parameter group; above 0 is bad.
        ranks, elements: whose sum it is, and what their parts must add up to.
        tail, expected: FP64 ``(5,)``: skip requests, failures, signatures, their squares, elements; from the sum, and
            as they are when all is well.
    """

    report: Tensor
    skip: Tensor
    group_squares: Tensor
    group_bad: Tensor
    ranks: Ranks
    elements: int
    tail: Tensor
    expected: Tensor

    def check(self) -> None:
        """Raise :class:`InvalidState` on every rank where ``skip`` stands for an error; waits for the device."""
        (requests, failures, *signatures, counted), expected = self.tail.tolist(), self.expected.tolist()
        size = self.ranks.size
        if failures > 0.0:
            raise InvalidState(
                f"{failures:.0f} of {size} ranks could not take this step; nothing was updated on this one. The error "
                "on that rank says why"
            )
        if signatures != expected[2:4]:
            raise InvalidState(
                f"the {size} ranks do not have gradients for the same parameters (or not with the same placements), so "
                "an update would make them drift apart; nothing was updated. Let every rank run the same layers, or "
                "clear or zero-fill the gradients of the layers that some ranks did not run"
            )
        # A rank that is told to skip need not look at its gradients.
        if requests == 0.0 and abs(counted - expected[4]) > _slack(self.elements, size):
            raise InvalidState(
                f"the parts of the parameters on all {size} ranks add up to {counted / size:.15g} elements, the "
                f"parameters have {self.elements}: they do not live on the same ranks (pipeline stages?). Give each "
                "set of ranks a mesh of its own, or use check_finite=False and max_grad_norm=None"
            )

    def group_norms(self) -> tuple[float, ...]:
        """The L2 norm of each group; infinity where something is not finite."""
        pairs = zip(self.group_bad.tolist(), self.group_squares.tolist(), strict=True)
        return tuple(math.inf if bad > 0.0 else math.sqrt(squares) for bad, squares in pairs)


def _slack(elements: int, size: int) -> float:
    """How far the sum of the parts may be from ``size * elements``: the rounding of sums beyond 2^53."""
    return size * (0.25 + elements * 2.0**-45)


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
        ranks have said that they see the same such gradients; for that alone a step waits for the device.

        Args:
            parameters, gradients: of all groups, None for a parameter without one.
            where: names a parameter by its position, for errors.
        """
        misplaced = misplaced_gradients(parameters, gradients, where)
        active = bytes(gradient is not None for gradient in gradients)
        self._signature = zlib.crc32(active + repr(misplaced).encode()) % 2**_SIGNATURE_BITS
        if misplaced and self.enabled:
            self._exchange().check()
            self._done = False  # the sum itself is still to come
        return settled(parameters, gradients, misplaced)

    def run(
        self, parameters: Sequence[Tensor] | None, sums: Sequence[Tensor], skip: Tensor | float | None = None
    ) -> GlobalStatistics:
        """Sum over ranks, without waiting for the device.

        On a CPU call ``check()`` of the result before anything is updated. On an accelerator ``skip`` holds the update
        back on every rank; ``check()`` may come later, inside the next step's ``with`` block.

        Args:
            parameters: those that ``sums`` describe; None when there are no statistics.
            sums: from :meth:`Shares.sums`, one per device of this rank.
            skip: above 0, this rank was told that a gradient is not finite (``found_inf``): a number, or one element on
                any device.
        """
        elements, own = (0, 0) if parameters is None else self.ranks.elements(parameters)
        return self._exchange(elements, own, sums, skip)

    def _exchange(
        self,
        elements: int = 0,
        own: int = 0,
        sums: Sequence[Tensor] = (),
        skip: Tensor | float | None = None,
        *,
        failed: bool = False,
    ) -> GlobalStatistics:
        ranks, g, h = self.ranks, self._groups, self._signature
        told = float(skip > 0.0) if isinstance(skip, (int, float)) else 0.0
        numbers = ranks.constant(*[0.0] * (2 * g), told, failed, h, h * h, own).clone()
        for part in sums:
            numbers[: 2 * g] += part.flatten().to(ranks.device)
        if isinstance(skip, torch.Tensor):
            numbers[2 * g : 2 * g + 1] = (skip.detach().reshape(1) > 0).to(ranks.device)
        self._done = True  # also if this fails: there is no second try
        numbers = ranks.sum(numbers)
        tail = numbers[2 * g :]
        # The signatures are equal if their sum and the sum of their squares are those of W times this rank's: then
        # the sum of (signature - h)^2 is zero. If they are not, no rank finds both.
        expected = ranks.constant(0.0, 0.0, ranks.size * h, ranks.size * h * h, ranks.size * elements)
        tolerance = ranks.constant(0.0, 0.0, 0.0, 0.0, _slack(elements, ranks.size))
        squares, bad = numbers[:g] / ranks.size, numbers[g : 2 * g]
        return GlobalStatistics(
            report=torch.stack([(bad > 0.0).any().double(), ranks.constant(1.0)[0], squares.sum()]),
            skip=((tail - expected).abs() > tolerance).any().float().reshape(1),
            group_squares=squares,
            group_bad=bad,
            ranks=ranks,
            elements=elements,
            tail=tail,
            expected=expected,
        )
