"""The device copy of a launch table, with the CPU as the device, and captures that are made up. No GPU is involved."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch

from ruda_optim.fused_adamw.kernels import block_map
from ruda_optim.fused_adamw.kernels import device_table as module
from ruda_optim.fused_adamw.kernels.block_map import STATISTICS_KIND, UPDATE_KIND, describe_blocks
from ruda_optim.fused_adamw.kernels.device_table import (
    StreamOrder,
    device_table,
    keep_for_graphs,
    one_step,
    upload,
)
from ruda_optim.fused_adamw.kernels.tables import COEFFICIENTS, Field, Flag, LaunchTable, TensorMemory

CPU = torch.device("cpu")


def test_the_source_may_change_right_after_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy to the device is deferred here, as a stream defers it: it must come from memory of its own."""
    deferred = []

    def later(source: torch.Tensor, stage: torch.Tensor, target: torch.Tensor) -> None:
        stage = stage.view(source.dtype)
        stage.copy_(source.view(-1))
        deferred.append((stage, target))

    monkeypatch.setattr(module, "_copy", later)
    targets = [torch.zeros(1000 * (i + 1)) for i in range(20)]
    source = torch.empty(20_000)
    for i, target in enumerate(targets):
        source.fill_(i + 1)
        upload(source[: target.numel()], target)
    source.fill_(-1)
    for stage, target in deferred:
        target.copy_(stage)
    assert [target.unique().tolist() for target in targets] == [[i + 1] for i in range(20)]


# ------------------------------------------------------------------------------------------------- captures and streams


class Capture:
    """A capture that is made up: copies to the device are written down."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []  # where host memory was read, and how many bytes

    def copy(self, source: torch.Tensor, stage: torch.Tensor, target: torch.Tensor) -> None:
        stage = stage.view(source.dtype)
        stage.copy_(source.view(-1))
        target.view(-1).copy_(stage)
        self.copies.append((stage.data_ptr(), stage.numel() * stage.element_size()))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    capture = Capture()
    monkeypatch.setattr(module, "capturing", lambda device: True)
    monkeypatch.setattr(module, "_copy", capture.copy)
    monkeypatch.setattr(module, "_kept", {})
    return capture


def test_staging_for_a_graph_is_never_shared(capture: Capture) -> None:
    targets = [torch.zeros(5), torch.zeros(300_000), torch.zeros(5)]
    for i, target in enumerate(targets):
        upload(torch.full(target.shape, float(i + 1)), target)
    spans = sorted((begin, begin + size) for begin, size in capture.copies)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(begin % 16 == 0 for begin, _ in spans)
    kept = [stage.view(torch.float32)[:5].tolist() for stage in module._kept.values()]
    assert [stage[0] for stage in kept] == [1.0, 2.0, 3.0]


def test_a_captured_step_makes_one_copy_of_its_table_and_leaves_nothing_but_its_staging_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, _gradients = make()
    device_table(table).blocks(table, 64, UPDATE_KIND)  # the step before the capture
    capture = Capture()
    monkeypatch.setattr(module, "capturing", lambda device: True)
    monkeypatch.setattr(module, "_copy", capture.copy)
    monkeypatch.setattr(module, "_kept", {})
    with one_step(table):
        copies = [device_table(table) for _ in range(3)]
        copies[0].blocks(table, 64, UPDATE_KIND)
    assert copies[0] is copies[1] is copies[2]
    assert copies[0] is not table.device_cache["device_table"]
    assert len(capture.copies) == 2, "layouts and fields"
    assert torch.equal(copies[0].fields, table.fields)
    with one_step(table):
        assert device_table(table) is not copies[0], "another capture must fill a copy of its own"
    fields = weakref.ref(copies[0].fields)
    del copies
    gc.collect()
    assert fields() is None, "the graph's own pool owns the device's memory"


def test_a_graph_cannot_capture_coefficients_of_the_host(capture: Capture) -> None:
    table, _gradients = make()
    with pytest.raises(RuntimeError, match=r"every replay would repeat this one step. Capture ruda_torch\.AdamW"):
        device_table(table).step_values(torch.zeros(1, COEFFICIENTS), 1.0, 1.0)


def test_a_capture_needs_a_step_before_it(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _gradients = make(numel=77)
    with pytest.raises(RuntimeError, match="only after a step with the same tensors"):
        device_table(table).blocks(table, 64, UPDATE_KIND)


def test_memory_that_is_kept_for_graphs_is_kept_once(capture: Capture) -> None:
    memory = torch.zeros(4)
    keep_for_graphs(memory, torch.zeros(3))
    keep_for_graphs(memory)
    assert len(module._kept) == 2
    del memory
    gc.collect()
    assert [tensor.tolist() for tensor in module._kept.values()] == [[0.0] * 4, [0.0] * 3]


class Stream:
    """Writes down for whom it waited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)


def test_memory_waits_for_the_stream_that_used_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stream("first"), Stream("second")
    current = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    order = StreamOrder(torch.device("cuda", 0))
    recorded: list[str] = []
    order.add(types.SimpleNamespace(record_stream=lambda stream: recorded.append(stream.name)))
    for stream in (first, second, second, first):
        current[0] = stream
        order.follow()
    assert (first.waited, second.waited) == (["second"], ["first"])
    assert recorded == ["first", "second", "first"]


# ----------------------------------------------------------------------------------------------------------- block maps


@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_cover_every_element_once(reverse: bool) -> None:
    numel = torch.tensor([1, 100, 101, 350, 99, 200])
    kinds = torch.tensor([2, 0, 2, 0, 0, 5])
    entries, ranges = describe_blocks(numel, kinds, 100, reverse=reverse)
    seen = []
    for part in ranges:
        place = entries[:, part.first : part.first + part.count]
        tensors, chunks = (place[0] >> 32).tolist(), (place[0] & 0xFFFFFFFF).tolist()
        assert all(kinds[t] == part.kind for t in tensors)
        rows = place[1].tolist()
        assert rows == sorted(rows, reverse=reverse)
        seen += list(zip(rows, tensors, chunks, strict=True))
    wanted = [(t, c) for t in range(6) for c in range(-(-int(numel[t]) // 100))]
    assert sorted(seen) == [(row, *place) for row, place in enumerate(wanted)]
    assert [part.kind for part in ranges] == [0, 2, 5]


def test_blocks_of_a_tensor_with_more_than_2_to_the_32_elements() -> None:
    entries, (part,) = describe_blocks(torch.tensor([2**33 + 1]), torch.tensor([0]), 2**20, reverse=False)
    assert part.count == 2**13 + 1
    assert entries[0].tolist() == list(range(2**13 + 1))


def test_no_tensors_have_no_blocks() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    entries, ranges = describe_blocks(nothing, nothing, 8, reverse=False)
    assert (tuple(entries.shape), ranges) == ((2, 0), ())


def make(count: int = 3, numel: int = 100) -> tuple[LaunchTable, list[torch.Tensor]]:
    gradients = [torch.zeros(numel + i) for i in range(count)]
    memories = [TensorMemory(g, *(torch.zeros(g.shape) for _ in range(3)), first=True) for g in gradients]
    return LaunchTable(memories, CPU), gradients


def test_tables_of_equal_shapes_share_a_block_map() -> None:
    (first, _a), (second, _b), (other, _c) = make(), make(), make(numel=200)
    maps = [device_table(table).blocks(table, 64, UPDATE_KIND) for table in (first, second, other)]
    assert maps[0] is maps[1]
    assert maps[0] is not maps[2]


def test_a_large_table_of_a_few_kinds_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_map, "SPLIT_FROM", 1000)
    monkeypatch.setattr(block_map, "_maps", OrderedDict())
    for count, numel, split in ((2, 300, False), (2, 600, True), (6, 600, False)):
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        memories = []
        for i in range(count):
            gradient = torch.zeros(numel, dtype=dtypes[i % 3])
            state = [torch.zeros(numel) for _ in range(3)]
            memories.append(TensorMemory(gradient, *state, max_exp_avg_sq=torch.zeros(numel) if i > 2 else None))
        table = LaunchTable(memories, CPU)
        found = device_table(table).blocks(table, 64, UPDATE_KIND)
        if not split:
            assert [part.kind for part in found.launches] == [block_map.SEVERAL_KINDS]
            continue
        assert [part.kind for part in found.launches] == [0, int(Flag.GRAD_FP16)]
        for tensor, part in enumerate(found.launches):
            assert part.blocks == -(-numel // 64)
            assert (part.entries[: part.blocks] >> 32).tolist() == [tensor] * part.blocks
            rows = part.entries[found.blocks : found.blocks + part.blocks].tolist()
            assert rows == list(range(tensor * part.blocks, (tensor + 1) * part.blocks))


# ------------------------------------------------------------------------------------------------------------- contents


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every upload."""
    sizes: list[int] = []
    real = module._copy

    def copy(source: torch.Tensor, stage: torch.Tensor, target: torch.Tensor) -> None:
        sizes.append(source.numel() * source.element_size())
        real(source, stage, target)

    monkeypatch.setattr(module, "_copy", copy)
    return sizes


def test_only_what_changed_is_uploaded(uploads: list[int]) -> None:
    table, gradients = make()
    copy = device_table(table)
    assert torch.equal(copy.fields, table.fields)
    assert torch.equal(copy.layouts, table.layouts)
    uploads.clear()

    assert device_table(table) is copy
    assert uploads == []

    gradients[1] = torch.zeros(101)
    table.fields[Field.GRAD, 1] = gradients[1].data_ptr()
    assert torch.equal(device_table(table).fields, table.fields)
    assert uploads == [8 * 3]  # one row
    uploads.clear()

    table.fields[Field.FLAGS] &= ~int(Flag.FIRST)
    table.fields[Field.COEFFICIENTS, 2] = 1
    assert torch.equal(device_table(table).fields, table.fields)
    assert uploads == [8 * 3 * 2]  # two rows that stand together, in one copy


def test_a_new_revision_renews_everything(uploads: list[int]) -> None:
    table, _gradients = make()
    copy = device_table(table)
    blocks = copy.blocks(table, 64, STATISTICS_KIND)
    half = torch.zeros(101, dtype=torch.bfloat16)
    table.set_gradient(1, half)
    assert device_table(table) is copy
    assert torch.equal(copy.fields, table.fields)
    assert copy.blocks(table, 64, STATISTICS_KIND) is not blocks
    assert [part.kind for part in copy.blocks(table, 64, STATISTICS_KIND).launches] == [block_map.SEVERAL_KINDS]

    strided = torch.zeros(202)[::2]
    table.set_gradient(1, strided)
    device_table(table)
    assert torch.equal(copy.fields, table.fields)
    assert torch.equal(copy.layouts, table.layouts)


def test_step_values(uploads: list[int]) -> None:
    table, _gradients = make()
    copy = device_table(table)
    uploads.clear()
    for rows in (1, 3, 2):
        given = torch.rand(rows, COEFFICIENTS)
        coefficients, decision = copy.step_values(given, 0.5, 0.25)
        assert torch.equal(coefficients, given)
        assert decision.tolist() == [0.0, 0.25, 0.5, 0.0]
        assert coefficients.data_ptr() % 16 == 0
    assert len(uploads) == 3  # one copy a step
