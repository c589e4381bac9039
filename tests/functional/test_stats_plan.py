"""StatsPlan: integers in, integers out."""

from __future__ import annotations

import dataclasses

import pytest

from ruda_optim.fused_adamw import InvalidOption, StatsPlan
from ruda_optim.fused_adamw.stats_plan import FAN_IN, MAX_ROWS, ROW_ELEMENTS, Stage


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (0, "0"),
        (-1, "-1"),
        (4_194_305, "4194305"),
        (2**64, "18446744073709551616"),
        (1.0, "1.0"),
        (True, "True"),
        ("5", "'5'"),
        (None, "None"),
    ],
)
def test_bad_row_counts_are_refused(rows, shown) -> None:
    with pytest.raises(InvalidOption, match=rf"rows must be an int in \[1, 4194304\], got {shown}; use larger chunks"):
        StatsPlan.new(rows)


@pytest.mark.parametrize(
    ("rows", "stages", "scratch", "final"),
    [
        (1, [], 0, 1),
        (1023, [], 0, 1023),
        (1024, [], 0, 1024),
        (1025, [(1025, 2, 0)], 6, 2),
        (2048, [(2048, 2, 0)], 6, 2),
        (2049, [(2049, 3, 0)], 9, 3),
        (1024 * 1024, [(1024 * 1024, 1024, 0)], 3072, 1024),
        (1024 * 1024 + 1, [(1024 * 1024 + 1, 1025, 0), (1025, 2, 3075)], 3081, 2),
        (4_194_303, [(4_194_303, 4096, 0), (4096, 4, 12_288)], 12_300, 4),
        (4_194_304, [(4_194_304, 4096, 0), (4096, 4, 12_288)], 12_300, 4),
    ],
)
def test_plans(rows, stages, scratch, final) -> None:
    plan = StatsPlan.new(rows)
    assert plan == StatsPlan(rows, tuple(Stage(*stage) for stage in stages), scratch, final)


def test_largest_scratch_is_49200_bytes() -> None:
    assert StatsPlan.new(MAX_ROWS).scratch_bytes == 49_200
    assert MAX_ROWS == 4_194_304


@pytest.mark.parametrize("rows", [1, 1000, 1024, 1025, 5000, 99_999, 1_048_576, 1_048_577, 3_000_001, MAX_ROWS])
def test_every_row_is_merged_once_and_no_memory_is_shared(rows) -> None:
    plan = StatsPlan.new(rows)
    available, used = rows, 0
    for stage in plan.stages:
        assert stage.input_rows == available
        assert (stage.output_rows - 1) * FAN_IN < stage.input_rows <= stage.output_rows * FAN_IN
        assert stage.output_offset == used  # right behind the stage before: disjoint, and what that one wrote stays
        used += stage.output_rows * ROW_ELEMENTS
        available = stage.output_rows
    assert plan.scratch_elements == used
    assert plan.final_rows == available <= FAN_IN
    assert len(plan.stages) <= 2
    assert 4 * used <= 49_200


def test_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StatsPlan.new(5).rows = 6
