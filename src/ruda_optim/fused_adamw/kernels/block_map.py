"""Which elements each block of a launch works on, and how many launches a table needs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .tables import MOMENTS_KIND, Field, Flag

if TYPE_CHECKING:
    from torch import Tensor

    from .tables import LaunchTable

# What a kernel is specialized for; everything else is read from the table while it runs.
_GRADIENT_KIND = Flag.GRAD_FP16 | Flag.GRAD_BF16
STATISTICS_KIND = _GRADIENT_KIND | Flag.STRIDED
UPDATE_KIND = STATISTICS_KIND | Flag.COPY_FP16 | Flag.COPY_BF16 | Flag.AMSGRAD | Flag.SPLIT | MOMENTS_KIND

# A large table whose tensors are of a few kinds gets a launch for each of them: together they cost less than the
# general kernel, which holds what every kind needs. An estimate, not measured: a launch more is some microseconds, and
# so many elements take a hundred on the fastest GPU.
SPLIT_FROM = 1 << 24
SPLIT_KINDS = 4
SEVERAL_KINDS = -1

_MAPS = 128  # block maps kept, the least recently used goes first


@dataclass(frozen=True)
class BlockRange:
    """Consecutive blocks that one kernel specialization serves."""

    kind: int  # the Flag bits that the tensors of these blocks share
    first: int
    count: int


class Launch(NamedTuple):
    """One launch of a map's."""

    kind: int
    """The kind of its tensors, or ``SEVERAL_KINDS``."""
    blocks: int
    entries: Tensor
    """Of the map, flat, from its first block on."""


@dataclass(frozen=True)
class BlockMap:
    """Which elements each block works on.

    Attributes:
        entries: int64 ``(2, blocks)`` on the device. Row 0: ``tensor << 32 | chunk``. Row 1: the block's place in table
            order, which is the statistics row it writes.
        launches: a single one unless the table is split by kind.
        blocks: how many there are.
    """

    entries: Tensor
    launches: tuple[Launch, ...]
    blocks: int


def describe_blocks(
    numel: Tensor, kinds: Tensor, chunk: int, *, reverse: bool
) -> tuple[Tensor, tuple[BlockRange, ...]]:
    """The entries and ranges of a :class:`BlockMap` on the host.

    Args:
        numel, kinds: int64 ``(n,)``: elements and kind of each tensor.
        chunk: elements per block; the last block of a tensor may have fewer.
        reverse: walk each range from its end, so that a pass that follows forwards begins on what is still in cache.
    """
    chunks = (numel + (chunk - 1)) // chunk
    ends = chunks.cumsum(0)
    blocks = int(ends[-1]) if len(ends) else 0
    tensor = torch.repeat_interleave(torch.arange(len(numel), device="cpu"), chunks)
    row = torch.arange(blocks, device="cpu")
    entries = torch.stack((tensor << 32 | row - (ends - chunks)[tensor], row))
    order = torch.argsort(kinds[tensor], stable=True)
    ranges = []
    first = 0
    for kind, count in torch.stack(torch.unique(kinds[tensor], return_counts=True), 1).tolist():
        ranges.append(BlockRange(kind, first, count))
        if reverse:
            order[first : first + count] = order[first : first + count].flip(0)
        first += count
    return entries[:, order].contiguous(), tuple(ranges)


_maps: OrderedDict[object, BlockMap] = OrderedDict()
_maps_lock = threading.Lock()


@torch.inference_mode(False)
def block_map(table: LaunchTable, chunk: int, mask: int, reverse: bool, *, capturing: bool) -> BlockMap:
    """The map of ``table`` for tensors grouped by ``flags & mask``; see :func:`describe_blocks`."""
    numel, kinds = table.fields[Field.NUMEL], table.fields[Field.FLAGS] & mask
    key = (table.device, chunk, reverse, numel.numpy().tobytes(), kinds.numpy().tobytes())
    with _maps_lock:
        found = _maps.get(key)
        if found is not None:
            _maps.move_to_end(key)
            return found
    if capturing:
        raise RuntimeError(
            "a CUDA graph can capture a fused step only after a step with the same tensors ran outside of the capture; "
            "run one first (torch calls it warm-up)"
        )
    entries, ranges = describe_blocks(numel, kinds, chunk, reverse=reverse)
    # A blocking copy: when it returns, every stream may read the map. It happens once for a set of shapes.
    on_device = entries.to(table.device, copy=True)
    if len(ranges) > SPLIT_KINDS or (len(ranges) > 1 and table.numel < SPLIT_FROM):
        ranges = (BlockRange(SEVERAL_KINDS, 0, entries.shape[1]),)
    launches = tuple(Launch(part.kind, part.count, on_device.view(-1)[part.first :]) for part in ranges)
    built = BlockMap(on_device, launches, entries.shape[1])
    with _maps_lock:
        _maps[key] = built
        while len(_maps) > _MAPS:
            _maps.popitem(last=False)
    return built
