"""A launch table's copy on its device, and how it is kept up to date. Shared by every device backend.

What a step costs on the host: three row comparisons; one copy of the rows that changed, if any did; one copy of the
coefficients, where the host decides. Block maps depend on shapes and flags alone and are kept across tables.

Streams. Everything is submitted to torch's current stream; the table's device must be the current device. Memory that
moves to another stream waits there for the work that it was last used for (:class:`StreamOrder`). Parameters, moments
and gradients follow torch's rule for every operator: memory that was allocated on another stream is the caller's to
synchronize.

CUDA graphs. A captured copy reads its host memory again on every replay, so a capture gets staging memory of its own,
and everything else that the kernels read or write at every replay must outlive the graph: :func:`keep_for_graphs`. The
device copy of a table is allocated by the capture, in the graph's own pool, and filled by the graph: it may go.
Run one step before the capture: block maps are built there.

What torch is set to (default dtype, default device, inference mode) does not matter: memory is made for its purpose.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .block_map import BlockMap, block_map
from .decision import DECISION
from .tables import COEFFICIENTS, Field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from .tables import LaunchTable

# The rows that may change from step to step without a new revision: tables.py says so.
_STEP_ROWS = (Field.GRAD, Field.FLAGS, Field.COEFFICIENTS)

_CAPTURE_SPARE = 1 << 20  # bytes of page-locked memory set aside for a capture, which should not allocate any


# ---- captures and streams --------------------------------------------------------------------------------------------

_kept: dict[tuple[torch.device, int], Tensor] = {}


def capturing(device: torch.device) -> bool:
    """Whether what is submitted to ``device`` now is captured into a CUDA graph, and runs when that is replayed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_for_graphs(*tensors: Tensor) -> None:
    """Keep memory until the process ends: a captured graph refers to it, and a graph does not tell when it dies.

    For memory that was allocated before the capture and that kernels of the capture read or write. Keeping the same
    memory again costs nothing, so a step that is captured may name all that it uses.
    """
    for tensor in tensors:
        _kept.setdefault((tensor.device, tensor.data_ptr()), tensor)


class StreamOrder:
    """Lets memory of one device move from stream to stream: each waits for what the previous one was doing with it.

    Add memory that lives longer than a step, and call :meth:`follow` before a step submits anything that uses it. On a
    CPU nothing happens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[Tensor] = []
        self._stream = self._current()
        self._moved = False

    def add(self, *tensors: Tensor) -> None:
        """Memory that the current stream uses from now on."""
        self._tensors += tensors
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def clear(self) -> None:
        """Forget all memory that was added."""
        self._tensors.clear()

    def follow(self) -> None:
        """Everything added may be used on the current stream after this."""
        stream = self._current()
        if stream == self._stream:
            return
        stream.wait_stream(self._stream)
        self._stream, self._moved = stream, True
        for tensor in self._tensors:
            tensor.record_stream(stream)

    def lend(self, *tensors: Tensor) -> None:
        """Memory of somebody else, which this step uses: it may be freed on the stream that it was allocated on."""
        if self._moved:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None


# ---- small copies to a device ----------------------------------------------------------------------------------------


_spare: dict[torch.device, Tensor] = {}
_spare_lock = threading.Lock()


def upload(source: Tensor, target: Tensor) -> None:
    """Copies ``source`` (CPU, contiguous) to ``target`` (same dtype and size) asynchronously on the current stream.

    ``source`` may be changed as soon as the call returns. torch keeps page-locked memory from being used again before
    the copies out of it have ended. A graph repeats the copy, so a capture gets memory that nothing else will ever use.
    """
    size = source.numel() * source.element_size()
    stage = (
        _stage_in_graph(size, target.device)
        if capturing(target.device)
        else torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=target.is_cuda)
    )
    _copy(source, stage, target)


def upload_settings(source: Tensor, target: Tensor) -> None:
    """:func:`upload` for what outlives a step: never inside a capture.

    A graph would send the numbers of the capture again at every replay, over whatever was set since, and the host,
    which sends only what changed, would take the device to have its own.

    Raises:
        RuntimeError: in a capture; nothing is launched.
    """
    if capturing(target.device):
        raise RuntimeError(
            "hyperparameters (lr, betas, eps, weight_decay, maximize or max_grad_norm) changed after the last step, "
            "and a CUDA graph that sends them would send them again at every replay, whatever is set later. "
            "Take one step with the new values before the capture, or let lr be a tensor on the device"
        )
    upload(source, target)


def _stage_in_graph(size: int, device: torch.device) -> Tensor:
    whole = -(-size // 16) * 16
    with _spare_lock:
        left = _spare.get(device)
        if left is None or left.numel() < whole:
            left = _new_spare(device, whole)
        stage, _spare[device] = left[:size], left[whole:]
    keep_for_graphs(stage)
    return stage


def _new_spare(device: torch.device, needed: int = 0) -> Tensor:
    pinned = device.type == "cuda"
    return torch.empty(max(_CAPTURE_SPARE, needed), dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _copy(source: Tensor, stage: Tensor, target: Tensor) -> None:
    stage = stage.view(source.dtype)
    stage.copy_(source.view(-1))
    target.view(-1).copy_(stage, non_blocking=True)


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
        chosen: what a backend chose by the table's flags; forgotten when they change.
    """

    @torch.inference_mode(False)
    def __init__(self, table: LaunchTable, *, in_graph: bool = False) -> None:
        self._in_graph = in_graph
        self._host = torch.empty_like(table.fields)
        self._host_rows = self._host.unbind(0)
        self._table_rows = table.fields.unbind(0)
        self._revision: int | None = None
        self._blocks: dict[tuple[int, int, bool], BlockMap] = {}
        self._values = torch.empty(0, dtype=torch.float32, device=table.device)
        self._rooms: dict[int, _Room] = {}
        self.chosen: dict[object, Any] = {}
        self._order = StreamOrder(table.device)
        if not in_graph and table.device.type == "cuda" and table.device not in _spare:
            with _spare_lock:
                _spare.setdefault(table.device, _new_spare(table.device))
        self.fields = torch.empty_like(table.fields, device=table.device)
        self.layouts = torch.empty_like(table.layouts, device=table.device)
        self.refresh(table)

    def refresh(self, table: LaunchTable) -> None:
        """Brings the device copy to the table's present contents."""
        self._order.follow()
        if self._revision != table.revision:
            self._renew(table)
            return
        changed = [row for row in _STEP_ROWS if not torch.equal(self._host_rows[row], self._table_rows[row])]
        if changed:
            # One copy of a few rows too many is cheaper than two copies.
            self._upload_rows(table, changed[0], changed[-1] + 1)

    @torch.inference_mode(False)
    def _renew(self, table: LaunchTable) -> None:
        if self.layouts.shape != table.layouts.shape:
            self.layouts = torch.empty_like(table.layouts, device=table.device)
        upload(table.layouts, self.layouts)
        self._blocks.clear()
        self._upload_rows(table, 0, len(Field))
        self._revision = table.revision
        self._order.clear()
        self._order.add(self.fields, self.layouts, self._values)

    def uses(self, *tensors: Tensor) -> None:
        """What a launch reads and writes beside the table and the tensors that it describes."""
        self._order.lend(*tensors)

    def blocks(self, table: LaunchTable, chunk: int, mask: int, *, reverse: bool = False) -> BlockMap:
        """The block map for tensors grouped by ``flags & mask``, in chunks of ``chunk`` elements."""
        key = (chunk, mask, reverse)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = block_map(table, chunk, mask, reverse, capturing=capturing(table.device))
            self._keep(found.entries)
        return found

    def step_values(self, coefficients: Tensor, inverse_scale: float, clip_factor: float) -> tuple[Tensor, Tensor]:
        """The host's coefficients and its decision, on the device.

        Args:
            coefficients: FP32 ``(k, COEFFICIENTS)`` on the host.
            inverse_scale, clip_factor: rounded to FP32.

        Returns:
            FP32 ``(k, COEFFICIENTS)``, and FP32 ``(DECISION,)`` as ``Kernels.decide`` writes it, with skip 0. Both
            serve work that is submitted before the next call.

        Raises:
            RuntimeError: in a capture, whose replays would all repeat this one step.
        """
        if self._in_graph:
            raise RuntimeError(
                "a CUDA graph cannot capture an update whose coefficients the host computed: every replay would repeat "
                "this one step. Capture ruda_torch.AdamW, whose step the device decides"
            )
        count = coefficients.numel()
        room = self._rooms.get(count)
        if room is None:
            room = self._rooms[count] = self._make_room(count)
        room.numbers[1:3] = clip_factor, inverse_scale
        room.numbers[DECISION:] = coefficients.numpy().reshape(-1)
        upload(room.staged, room.values)
        return room.coefficients, room.decision

    @torch.inference_mode(False)
    def _make_room(self, count: int) -> _Room:
        if self._values.numel() < DECISION + count:
            # Room for one row per tensor, so that this happens once.
            size = DECISION + max(count, COEFFICIENTS * self.fields.shape[1])
            self._values = torch.empty(size, dtype=torch.float32, device=self.fields.device)
            self._order.add(self._values)
            self._rooms.clear()
        staged = torch.zeros(DECISION + count, dtype=torch.float32, device="cpu")
        values = self._values[: DECISION + count]
        # The decision comes first: its length lets the rows of coefficients start aligned to 16 bytes.
        rows = values[DECISION:].view(-1, COEFFICIENTS)
        return _Room(staged, staged.numpy(), values, rows, values[:DECISION])

    def _upload_rows(self, table: LaunchTable, first: int, end: int) -> None:
        if first <= Field.FLAGS < end:
            self.chosen.clear()
        self._host[first:end] = table.fields[first:end]
        upload(self._host[first:end], self.fields[first:end])

    def _keep(self, entries: Tensor) -> None:
        """Memory that other tables share, and that was allocated before a capture."""
        if self._in_graph:
            keep_for_graphs(entries)
        else:
            self._order.add(entries)


_DEVICE_TABLE, _IN_GRAPH = "device_table", "device_table of a capture"


def device_table(table: LaunchTable) -> DeviceTable:
    """The up-to-date device copy of ``table``. Call it right before each launch, on the stream of the launch."""
    if capturing(table.device):
        copy = table.device_cache.get(_IN_GRAPH)
        if not isinstance(copy, DeviceTable):
            return DeviceTable(table, in_graph=True)
        copy.refresh(table)
        return copy
    copy = table.device_cache.get(_DEVICE_TABLE)
    if not isinstance(copy, DeviceTable):
        copy = table.device_cache[_DEVICE_TABLE] = DeviceTable(table)
    else:
        copy.refresh(table)
    return copy


@contextlib.contextmanager
def one_step(table: LaunchTable) -> Iterator[None]:
    """Inside, the launches of one step share one device copy in a capture too, where otherwise each makes its own.

    A copy must not outlast the step: nothing tells one capture from the next, and a graph that did not fill a copy
    itself would read what another one left there.
    """
    if not capturing(table.device):
        yield
        return
    table.device_cache[_IN_GRAPH] = DeviceTable(table, in_graph=True)
    try:
        yield
    finally:
        del table.device_cache[_IN_GRAPH]
