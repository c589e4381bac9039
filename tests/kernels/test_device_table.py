"""The device copy of a launch table, with the CPU as the device, and the staging ring with events that are made up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ruda_optim.fused_adamw.kernels import device_table as module
from ruda_optim.fused_adamw.kernels.device_table import (
    SLOTS,
    STATISTICS_KIND,
    UPDATE_KIND,
    StagingRing,
    describe_blocks,
    device_table,
)
from ruda_optim.fused_adamw.kernels.tables import COEFFICIENTS, Field, Flag, LaunchTable, TensorMemory

CPU = torch.device("cpu")


class Event:
    """Counts; ``log`` is shared by all events of a test."""

    log: list[tuple[str, int]]

    def __init__(self) -> None:
        self.number = sum(1 for what, _ in self.log if what == "new")
        self.log.append(("new", self.number))

    def record(self) -> None:
        self.log.append(("record", self.number))

    def synchronize(self) -> None:
        self.log.append(("wait", self.number))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    log: list[tuple[str, int]] = []
    monkeypatch.setattr(Event, "log", log, raising=False)
    return log


def test_a_slot_is_used_again_only_after_its_event(log: list[tuple[str, int]]) -> None:
    ring = StagingRing(CPU, Event)
    target = torch.zeros(4, dtype=torch.int64)
    for step in range(SLOTS + 2):
        ring.upload(torch.full((4,), step), target)
        assert target.tolist() == [step] * 4
    waits = [(i, number) for i, (what, number) in enumerate(log) if what == "wait"]
    assert [number for _, number in waits] == [0, 1]
    for i, number in waits:
        assert log[i + 1] == ("record", number)  # the slot's own event marks its next copy too
    assert sum(what == "record" for what, _ in log) == SLOTS + 2


def test_the_source_may_change_right_after_an_upload(
    log: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy to the device is deferred here, as a stream defers it: it must come from the ring's own memory."""
    deferred = []
    real = StagingRing._copy

    def later(source: torch.Tensor, stage: torch.Tensor, target: torch.Tensor) -> None:
        middle = torch.empty_like(target)
        real(source, stage, middle)
        deferred.append((stage.view(source.dtype), target))

    monkeypatch.setattr(StagingRing, "_copy", staticmethod(later))
    ring = StagingRing(CPU, Event)
    targets = [torch.zeros(1000 * (i + 1)) for i in range(SLOTS)]
    source = torch.empty(1000 * SLOTS)
    for i, target in enumerate(targets):
        source.fill_(i + 1)
        ring.upload(source[: target.numel()], target)
    source.fill_(-1)
    for stage, target in deferred:
        target.copy_(stage)
    assert [target.unique().tolist() for target in targets] == [[i + 1] for i in range(SLOTS)]


def test_staging_for_a_graph_is_never_shared() -> None:
    ring = StagingRing(CPU)
    before = len(module._captured)
    targets = [torch.zeros(5), torch.zeros(300_000), torch.zeros(5)]
    for i, target in enumerate(targets):
        ring.upload_for_ever(torch.full(target.shape, float(i + 1)), target)
    stages = module._captured[before:]
    spans = sorted((stage.data_ptr(), stage.data_ptr() + stage.numel()) for stage in stages)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert [float(stage.view(torch.float32)[-1]) for stage in stages] == [1.0, 2.0, 3.0]
    assert all(stage.data_ptr() % 16 == 0 for stage in stages)
    del module._captured[before:]


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


# ------------------------------------------------------------------------------------------------------------- contents


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every upload."""
    sizes: list[int] = []
    real = StagingRing.upload

    def upload(self: StagingRing, source: torch.Tensor, target: torch.Tensor) -> None:
        sizes.append(source.numel() * source.element_size())
        real(self, source, target)

    monkeypatch.setattr(StagingRing, "upload", upload)
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
    assert len(copy.blocks(table, 64, STATISTICS_KIND).ranges) == 2

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
        coefficients, decision = copy.step_values(given, 0.25)
        assert torch.equal(coefficients, given)
        assert decision.tolist() == [0.0, 0.25]
        assert coefficients.data_ptr() % 16 == 0
    assert len(uploads) == 3  # one copy a step
