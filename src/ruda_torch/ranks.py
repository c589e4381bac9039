"""Which ranks share the parameters of an optimizer, and how each parameter's part counts in a sum over them.

A parameter whose mesh dimensions that shard it have the sizes n1, n2, ... has each element on 1 / (n1 n2 ...) of the W
ranks, so its squares are multiplied by n1 n2 ... and the sum is divided by W. That holds for any mixture of meshes and
plain (replicated) tensors, and for uneven and empty parts.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ruda_optim.fused_adamw import InvalidTensor

from .report import GradientReport
from .sharding import copies_of, crosses_ranks, is_fake, is_sharded, local, zero_redundancy_wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def find(groups: Sequence[dict[str, Any]], *, guarded: bool, known: Ranks | None = None) -> Ranks | None:
    """The ranks that share these parameters; None where the statistics of plain tensors need no other rank.

    Args:
        groups: the optimizer's own list of parameter groups.
        guarded: whether gradient statistics are asked for.
        known: what was found before. On what its ranks agreed, they need not agree again while it is the same.

    Raises:
        InvalidTensor: flat parameters of FSDP1, whose parts cannot be told apart.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    if guarded and "torch.distributed.fsdp" in sys.modules:
        for index, parameter in enumerate(parameters):
            if getattr(parameter, "_fsdp_flattened", False):
                raise InvalidTensor(
                    f"parameter {index} of all groups belongs to FullyShardedDataParallel (FSDP1), which does not say "
                    "which part of it this rank holds, so no global norm can be taken; use fully_shard (FSDP2), or "
                    "check_finite=False and max_grad_norm=None"
                )
    wrapper = zero_redundancy_wrapper(groups)
    if wrapper is None and not any(map(crosses_ranks, parameters)):
        return None
    found = Ranks(parameters, guarded=guarded, wrapper=wrapper)
    if known is not None and known.structure == found.structure:
        found.agreed = known.agreed
    return found


@dataclass(frozen=True)
class _Count:
    """How a parameter counts.

    Attributes:
        full: its elements; 0 if they differ between ranks.
        share: how many of ``W full`` elements this rank adds.
        factor: what the squares of this rank's part are multiplied by.
        copies: this rank's weight among those that hold copies; 0 for none.
    """

    full: int
    share: float
    factor: float
    copies: float


class Ranks:
    """The ranks over which the statistics of one optimizer are summed.

    They are those of the largest mesh among its parameters if that contains every other mesh, else all ranks. (A mesh
    of some dimensions only, as for a parameter that tensor parallelism does not split, lies inside the larger mesh.)
    All ranks must choose alike, so among meshes of one size the first in the order of the parameters counts.

    Whether tensors that should be copies of each other are copies is seen in the sum, too: each rank's squares of such
    tensors, multiplied by a weight that belongs to the rank, add up to zero, because the weights do.

    Args:
        parameters: all of an optimizer's.
        guarded: whether gradient statistics are asked for.
        wrapper: a ZeroRedundancyOptimizer, whose ranks have different parameters each.

    Attributes:
        size: how many ranks.
        device: where their process groups communicate.
        outside: this rank takes no part: it is not one of them, or its tensors have no memory.
        agreed: number of parameter groups on which the ranks have agreed; -1 before.
    """

    def __init__(self, parameters: Sequence[Tensor], *, guarded: bool, wrapper: Any = None) -> None:
        rank = dist.get_rank()
        meshes = dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p))  # type: ignore[attr-defined]
        with _disable_current_modes():  # FakeTensorMode does not read a mesh, which is a tensor
            members = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
        largest = max(members, key=lambda mesh: len(members[mesh]), default=None)
        everybody = frozenset(range(dist.get_world_size()))
        ranks = members.get(largest, everybody)
        if not all(some <= ranks for some in members.values()):
            ranks = everybody
        kind = parameters[0].device.type if largest is None and parameters else "cpu"
        self._process_groups: list[Any] = [None]
        if wrapper is not None:
            self._process_groups = [wrapper.process_group]
            ranks = frozenset(dist.get_process_group_ranks(wrapper.process_group))
            kind = wrapper.join_device.type
        elif largest is not None:
            kind = largest.device_type
            if ranks != everybody and rank in ranks:
                # Summing along one mesh dimension after the other reaches every rank of it without a new group.
                self._process_groups = [largest.get_group(dimension) for dimension in range(largest.ndim)]
        self.size = len(ranks)
        self.outside = rank not in ranks or any(map(is_fake, parameters))
        self.device = torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, torch.get_device_module(kind).current_device())
        self.agreed = -1
        self._simulated = not self.outside and all(dist.get_backend(g) == "fake" for g in self._process_groups)
        # By identity: the optimizer's cache drops this object when it sees other parameters.
        weights = _weights(sorted(ranks))
        own = None if wrapper is None else 1
        self._counts = {id(p): self._count(p, members, rank, weights, own or copies_of(p)) for p in parameters}
        self._has_copies = any(count.copies for count in self._counts.values())
        shared = [(p.shape, p.dtype) for p in parameters if self._counts[id(p)].full] if wrapper is None else []
        self.structure = repr((self.size, guarded, shared))
        self._constants: dict[tuple[float, ...], Tensor] = {}

    def _count(
        self,
        parameter: Tensor,
        members: dict[Any, frozenset[int]],
        rank: int,
        weights: dict[int, float],
        distinct: int | None,
    ) -> _Count:
        """How a parameter counts; ``distinct``: how many copies there are of one that differs between ranks."""
        holders, factor = frozenset((rank,)), 1
        if is_sharded(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            holders = members[mesh]
            # See the top of this file.
            factor = math.prod(mesh.size(i) for i, place in enumerate(placements) if not place.is_replicate())
        if distinct is not None:
            return _Count(0, 0, factor * self.size / (len(holders) * distinct), 0.0)
        if self._simulated:
            return _Count(parameter.numel(), parameter.numel(), factor, 0.0)
        # The root keeps weights of large meshes, which average over many ranks, in the range of those of small ones.
        copies = 0.0
        if len(holders) < self.size and not self.outside:
            copies = factor * sum(weights[member] for member in holders) / math.sqrt(len(holders))
        return _Count(parameter.numel(), factor * local(parameter).numel(), factor, copies)

    def counts(self, parameter: Tensor) -> bool:
        """Whether the other ranks have the same parameter, or other parts of it."""
        return self._counts[id(parameter)].full > 0

    def elements(self, parameters: Sequence[Tensor]) -> tuple[int, float]:
        """How many elements the parameters have, and this rank's contribution to W times that number."""
        known = [self._counts[id(parameter)] for parameter in parameters]
        return sum(count.full for count in known), sum(count.share for count in known)

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
        known = [self._counts[id(parameter)] for parameter in parameters]
        pairs = torch.tensor([(count.factor, count.copies) for count in known], dtype=torch.float64, device="cpu")
        factors, copies = pairs.view(-1, 2).repeat_interleave(rows, 0).to(device).unbind(1)
        lengths = torch.zeros(count, dtype=torch.int64, device="cpu").index_add_(0, groups, rows)
        return Shares(factors, copies if self._has_copies else None, lengths.to(device))

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
        if self._simulated:  # the fake process group moves nothing; as if every rank said what this one says
            return numbers.mul_(self.size)
        for group in self._process_groups:
            dist.all_reduce(numbers, group=group)
        # Groups along the last dimension may each have added in an order of their own; the first one's sum counts.
        for group in self._process_groups[:-1]:
            dist.broadcast(numbers, group=group, group_src=0)
        return numbers

    def whole(self, report: GradientReport, parameters: Sequence[Tensor]) -> GradientReport:
        """A report of all ranks' parts; every rank calls this, after the same step.

        Args:
            report: of this rank's parts.
            parameters: one per line. Those of which each rank has its own keep the line of this rank.
        """
        known = [self._counts[id(parameter)] for parameter in parameters]
        mine = [(line, count) for line, count in zip(report, known, strict=True) if count.full]
        if self.outside or not mine:
            return report
        # Infinity, where something is not finite, goes through sums and products as it should.
        squares = torch.tensor([line.norm**2 * count.factor for line, count in mine], dtype=torch.float64, device="cpu")
        largest = torch.tensor([line.largest for line, _ in mine], dtype=torch.float64, device="cpu").to(self.device)
        norms = (self.sum(squares.to(self.device)) / self.size).sqrt().tolist()
        if not self._simulated:
            for group in self._process_groups:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        found = zip(norms, largest.tolist(), strict=True)
        lines = []
        for line, count in zip(report, known, strict=True):
            if count.full:
                norm, highest = next(found)
                line = replace(line, elements=count.full, norm=norm, largest=highest, finite=math.isfinite(norm))
            lines.append(line)
        return GradientReport(lines)


def _weights(ranks: list[int]) -> dict[int, float]:
    """Numbers between -1 and 1 that add up to zero, the same on every rank, and no two subsets alike."""
    generator = random.Random(0)
    drawn = [generator.random() for _ in ranks]
    mean = math.fsum(drawn) / len(drawn)
    return {rank: number - mean for rank, number in zip(ranks, drawn, strict=True)}


@dataclass(frozen=True)
class Shares:
    """``factors``, ``copies``: FP64 ``(r,)``, what the squares of each row are multiplied by, None for no copies;
    ``lengths``: int64 ``(g,)``, rows per group."""

    factors: Tensor
    copies: Tensor | None
    lengths: Tensor

    def sums(self, rows: Tensor) -> Tensor:
        """FP64 ``(1 + 2 g,)``: weighted squares of copies, then squares and the number of bad rows per group.

        FP64 squares of FP32 magnitudes neither overflow nor vanish, so no common scale is needed. Each group is added
        up in order, so the same rows give the same bits.
        """
        scale, sumsq, bad = rows.double().unbind(1)
        squares = scale * scale * sumsq
        copies = squares.new_zeros(1) if self.copies is None else (squares * self.copies).sum().reshape(1)
        columns = (squares * self.factors, bad)
        return torch.cat(
            [copies, *(torch.segment_reduce(column, "sum", lengths=self.lengths, unsafe=True) for column in columns)]
        )
