"""A launch table's copy on its device, and how it is kept up to date. Shared by every device backend.

What a step costs on the host: three row comparisons; one copy of the rows that changed, if any did; one copy of the
coefficients. Block maps depend on shapes and flags alone and are kept across tables.

Streams. Everything is submitted to torch's current stream; the table's device must be the current device. A table that
moves to another stream waits there for the work that it was last used for. Parameters, moments and gradients follow
torch's rule for every operator: memory that was allocated on another stream is the caller's to synchronize.

CUDA graphs. A captured copy reads its host memory again on every replay, so a capture gets staging memory and device
copies of its own, which are kept until the process ends. Run one step before the capture: block maps are built there.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .tables import COEFFICIENTS, Field, Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from .tables import LaunchTable

# What a kernel is specialized for; everything else is read from the table while it runs.
_GRADIENT_KIND = Flag.GRAD_FP16 | Flag.GRAD_BF16
STATISTICS_KIND = _GRADIENT_KIND | Flag.STRIDED
UPDATE_KIND = STATISTICS_KIND | Flag.COPY_FP16 | Flag.COPY_BF16 | Flag.AMSGRAD | Flag.SPLIT

# The rows that may change from step to step without a new revision: tables.py says so.
_STEP_ROWS = (Field.GRAD, Field.FLAGS, Field.COEFFICIENTS)

# step_values: the decision comes first, padded so that the rows of coefficients start aligned to 16 bytes.
_DECISION = 4

SLOTS = 8  # copies in flight before the host has to wait for one
_MAPS = 128  # block maps kept, the least recently used goes first
_CAPTURE_SPARE = 1 << 20  # bytes of staging memory set aside for a capture, which should not allocate


class StagingRing:
    """Page-locked memory for small copies to one device: a slot is used again only after its last copy has ended.

    Args:
        device: where the copies go. On a CPU there is nothing to lock and nothing to wait for.
        new_event: makes an event with ``record()`` and ``synchronize()``. Default: a CUDA event on a CUDA device.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._new_event = new_event or (torch.cuda.Event if self._pinned else None)
        self._buffers = [self._allocate(0)] * SLOTS
        self._events: list[Any] = [None] * SLOTS
        self._next = 0
        self._lock = threading.Lock()
        self._spare = self._allocate(_CAPTURE_SPARE) if self._pinned else self._allocate(0)

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned and size > 0)

    def upload(self, source: Tensor, target: Tensor) -> None:
        """Copies ``source`` (CPU, contiguous) to ``target`` (same dtype and size) asynchronously on the current stream.

        ``source`` may be changed as soon as the call returns.
        """
        with self._lock:
            slot = self._next
            self._next = (slot + 1) % SLOTS
            event = self._events[slot]
            if event is not None:
                event.synchronize()
            size = source.numel() * source.element_size()
            if self._buffers[slot].numel() < size:
                self._buffers[slot] = self._allocate(max(4096, 1 << (size - 1).bit_length()))
            self._copy(source, self._buffers[slot][:size], target)
            if self._new_event is not None:
                if event is None:
                    event = self._events[slot] = self._new_event()
                event.record()

    def upload_for_ever(self, source: Tensor, target: Tensor) -> None:
        """As :meth:`upload`, through memory that nothing else will ever use: for a copy that a graph repeats."""
        size = source.numel() * source.element_size()
        with self._lock:
            if self._spare.numel() < size:
                self._spare = self._allocate(max(_CAPTURE_SPARE, size))
            stage, self._spare = self._spare[:size], self._spare[-(-size // 16) * 16 :]
            _captured.append(stage)
            self._copy(source, stage, target)

    @staticmethod
    def _copy(source: Tensor, stage: Tensor, target: Tensor) -> None:
        stage = stage.view(source.dtype)
        stage.copy_(source.view(-1))
        target.view(-1).copy_(stage, non_blocking=True)


# Memory that captured graphs refer to. A graph does not tell when it dies.
_captured: list[Tensor] = []


@functools.cache
def staging_ring(device: torch.device) -> StagingRing:
    """The ring of one device; every table of the process shares it."""
    return StagingRing(device)


@dataclass(frozen=True)
class BlockRange:
    """Consecutive blocks that one kernel specialization serves."""

    kind: int  # the Flag bits that the tensors of these blocks share
    first: int
    count: int


@dataclass(frozen=True)
class BlockMap:
    """Which elements each block of a launch works on.

    Attributes:
        entries: int64 ``(2, blocks)`` on the device. Row 0: ``tensor << 32 | chunk``. Row 1: the block's place in table
            order, which is the statistics row it writes.
        ranges: one launch each; a single one unless the tensors differ in kind.
        blocks: how many there are.
    """

    entries: Tensor
    ranges: tuple[BlockRange, ...]
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
    tensor = torch.repeat_interleave(torch.arange(len(numel)), chunks)
    row = torch.arange(blocks)
    entries = torch.stack((tensor << 32 | row - (ends - chunks)[tensor], row))
    order = torch.argsort(kinds[tensor], stable=True)
    ranges = []
    first = 0
    for kind, count in zip(*(x.tolist() for x in torch.unique(kinds[tensor], return_counts=True)), strict=True):
        ranges.append(BlockRange(kind, first, count))
        if reverse:
            order[first : first + count] = order[first : first + count].flip(0)
        first += count
    return entries[:, order].contiguous(), tuple(ranges)


_maps: OrderedDict[object, BlockMap] = OrderedDict()
_maps_lock = threading.Lock()


def _block_map(table: LaunchTable, chunk: int, mask: int, reverse: bool, capturing: bool) -> BlockMap:
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
    built = BlockMap(entries.to(table.device, copy=True), ranges, entries.shape[1])
    with _maps_lock:
        _maps[key] = built
        while len(_maps) > _MAPS:
            _maps.popitem(last=False)
    return built


class _Room(NamedTuple):
    """Where the values of a step with so many coefficients stand: views that are made once."""

    staged: Tensor
    numbers: Any  # staged, as a NumPy array: a number is written into it in a tenth of the time
    values: Tensor
    coefficients: Tensor
    decision: Tensor


class DeviceTable:
    """The device's copy of one :class:`~.tables.LaunchTable`. Get it with :func:`device_table`, before every launch.

    Attributes:
        fields: int64 ``(len(Field), n)`` on the device.
        layouts: flat int64 on the device.
    """

    def __init__(self, table: LaunchTable, capturing: bool = False) -> None:
        self._ring = staging_ring(table.device)
        self._upload = self._ring.upload_for_ever if capturing else self._ring.upload
        self._capturing = capturing
        self._host = torch.empty_like(table.fields)
        self._host_rows = self._host.unbind(0)
        self._table_rows = table.fields.unbind(0)
        self._revision: int | None = None
        self._blocks: dict[tuple[int, int, bool], BlockMap] = {}
        self._values = torch.empty(0, device=table.device)
        self._rooms: dict[int, _Room] = {}
        self.fields = torch.empty_like(table.fields, device=table.device)
        self.layouts = torch.empty_like(table.layouts, device=table.device)
        self._stream = _current_stream(table.device)
        self.refresh(table)

    def refresh(self, table: LaunchTable) -> None:
        """Brings the device copy to the table's present contents."""
        stream = _current_stream(table.device)
        if stream != self._stream:
            self._move_to(stream)
        if self._revision != table.revision:
            if self.layouts.shape != table.layouts.shape:
                self.layouts = torch.empty_like(table.layouts, device=table.device)
            self._upload(table.layouts, self.layouts)
            self._blocks.clear()
            self._upload_rows(table, 0, len(Field))
            self._revision = table.revision
            return
        changed = [row for row in _STEP_ROWS if not torch.equal(self._host_rows[row], self._table_rows[row])]
        if changed:
            # One copy of a few rows too many is cheaper than two copies.
            self._upload_rows(table, changed[0], changed[-1] + 1)

    def blocks(self, table: LaunchTable, chunk: int, mask: int, *, reverse: bool = False) -> BlockMap:
        """The block map for tensors grouped by ``flags & mask``, in chunks of ``chunk`` elements."""
        key = (chunk, mask, reverse)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = _block_map(table, chunk, mask, reverse, self._capturing)
            self._keep(found.entries)
        return found

    def step_values(self, coefficients: Tensor, clip_factor: float) -> tuple[Tensor, Tensor]:
        """The host's coefficients and its decision, on the device.

        Args:
            coefficients: FP32 ``(k, COEFFICIENTS)`` on the host.
            clip_factor: rounded to FP32.

        Returns:
            FP32 ``(k, COEFFICIENTS)``, and FP32 ``(2,)``: skip (always 0), clip factor. Both serve work
            submitted before the next call.
        """
        count = coefficients.numel()
        room = self._rooms.get(count)
        if room is None:
            room = self._rooms[count] = self._make_room(count)
        room.numbers[1] = clip_factor
        room.numbers[_DECISION:] = coefficients.numpy().reshape(-1)
        self._upload(room.staged, room.values)
        return room.coefficients, room.decision

    def _make_room(self, count: int) -> _Room:
        if self._values.numel() < _DECISION + count:
            # Room for one row per tensor, so that this happens once.
            size = _DECISION + max(count, COEFFICIENTS * self.fields.shape[1])
            self._values = torch.empty(size, device=self.fields.device)
            self._keep(self._values)
            self._rooms.clear()
        staged, values = torch.zeros(_DECISION + count), self._values[: _DECISION + count]
        return _Room(staged, staged.numpy(), values, values[_DECISION:].view(-1, COEFFICIENTS), values[:2])

    def _upload_rows(self, table: LaunchTable, first: int, end: int) -> None:
        self._host[first:end] = table.fields[first:end]
        self._upload(self._host[first:end], self.fields[first:end])

    def _keep(self, tensor: Tensor) -> None:
        """Ties memory that other tables may share, or that is newer than this object, to the stream that reads it."""
        if self._capturing:
            _captured.append(tensor)
        elif self._stream is not None:
            tensor.record_stream(self._stream)

    def _move_to(self, stream: torch.cuda.Stream) -> None:
        # The old stream may still read what the next upload overwrites.
        stream.wait_stream(self._stream)
        self._stream = stream
        for tensor in (self.fields, self.layouts, self._values, *(found.entries for found in self._blocks.values())):
            tensor.record_stream(stream)


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def device_table(table: LaunchTable) -> DeviceTable:
    """The up-to-date device copy of ``table``. Call it right before each launch, on the stream of the launch."""
    if table.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        captured = DeviceTable(table, capturing=True)
        _captured.extend((captured.fields, captured.layouts))
        return captured
    copy = table.device_cache.get("device_table")
    if not isinstance(copy, DeviceTable):
        copy = table.device_cache["device_table"] = DeviceTable(table)
    else:
        copy.refresh(table)
    return copy
