"""Storage functions on caller-owned memory, and the plan of the merges."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch
from allocations import record
from cases import as_array, compare, norm_relative_bound
from kernel_runs import CHAIN, CPU, gradient_rows, same_bits

from ruda_optim.fused_adamw import (
    AdamWOptions,
    DifferentDevice,
    InvalidOption,
    InvalidTensor,
    ShapeMismatch,
    StatsPlan,
    storage,
)
from ruda_optim.fused_adamw.kernels import cpu, library
from ruda_optim.fused_adamw.stats_plan import FAN_IN, ROW_ELEMENTS
from ruda_optim.fused_adamw.storage import Field, LaunchTable, StatisticsWorkspace, TensorMemory

CSRC = pathlib.Path(cpu.__file__).parents[1] / "csrc"
OPTIONS = AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8)


def tensors(count: int, size: int = 40) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1 + index, size) for index in range(count)]


# ---------------------------------------------------------------------------------------------- caller-owned memory


def test_the_four_kernels_allocate_nothing() -> None:
    parameter, gradient, first, second = tensors(4, 70_000)
    table = LaunchTable([TensorMemory(gradient, parameter, first, second.abs_())], CPU)
    rows = torch.empty(storage.statistics_rows(table), ROW_ELEMENTS)
    merged, report = torch.empty(1, ROW_ELEMENTS), torch.empty(ROW_ELEMENTS)
    coefficients = storage.coefficient_table([OPTIONS.prepare_step(0)])

    def calls() -> None:
        storage.analyze_gradient(table, rows)
        storage.merge_gradient_stats_chunks(rows, merged)
        storage.merge_gradient_stats(merged, report)
        storage.adamw_scaled(table, coefficients)

    recorded = record(calls)
    assert recorded.allocations == []
    assert recorded.operators == [
        f"ruda_optim::{name}"
        for name in ("analyze_gradient", "merge_gradient_stats_chunks", "merge_gradient_stats", "adamw_scaled")
    ]


def test_only_the_described_memory_is_written() -> None:
    base = torch.full((4, 1000), 77.0)
    parameter, first, second, gradient = (row[100:900] for row in base)
    for tensor in (parameter, first, second, gradient):
        tensor.fill_(0.5)
    storage.adamw_scaled(
        LaunchTable([TensorMemory(gradient, parameter, first, second)], CPU),
        storage.coefficient_table([OPTIONS.prepare_step(0)]),
    )
    assert (base[:, :100] == 77).all()
    assert (base[:, 900:] == 77).all()
    assert (gradient == 0.5).all()
    assert (parameter != 0.5).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda t: storage.analyze_gradient(t, torch.empty(1, 3)),
            ShapeMismatch,
            r"rows must have shape \(2, 3\), got",
        ),
        (
            lambda t: storage.analyze_gradient(t, torch.empty(6)),
            ShapeMismatch,
            r"rows must have shape \(2, 3\), got \(6,",
        ),
        (
            lambda t: storage.analyze_gradient(t, torch.empty(2, 3).double()),
            InvalidTensor,
            r"rows must be a contiguous FP32 tensor, got torch.float64",
        ),
        (
            lambda t: storage.analyze_gradient(t, torch.empty(3, 2).t()),
            InvalidTensor,
            r"rows must be a contiguous FP32",
        ),
        (
            lambda t: storage.analyze_gradient(t, torch.empty(2, 3, device="meta")),
            DifferentDevice,
            r"rows must be on cpu, got meta",
        ),
        (
            lambda _: storage.merge_gradient_stats_chunks(torch.empty(1025, 3), torch.empty(1, 3)),
            ShapeMismatch,
            r"merged must have shape \(2, 3\), got \(1, 3\)",
        ),
        (
            lambda _: storage.merge_gradient_stats_chunks(torch.empty(5, 4), torch.empty(1, 3)),
            ShapeMismatch,
            r"rows must have shape \(5, 3\), got \(5, 4\)",
        ),
        (
            lambda _: storage.merge_gradient_stats(torch.empty(5, 3), torch.empty(4)),
            ShapeMismatch,
            r"report must have shape \(3,\), got \(4,\)",
        ),
        (
            lambda _: storage.merge_gradient_stats(torch.empty(5, 3), torch.empty(6)[::2]),
            InvalidTensor,
            r"report must be a contiguous FP32",
        ),
        (
            lambda t: storage.adamw_scaled(t, torch.empty(1, 7)),
            ShapeMismatch,
            r"coefficients must have shape \(1, 10\), got \(1, 7\)",
        ),
        (
            lambda t: storage.adamw_scaled(t, torch.empty(1, storage.COEFFICIENTS).double()),
            InvalidTensor,
            r"coefficients must be a contiguous FP32 tensor",
        ),
        (
            lambda t: storage.adamw_scaled(t, torch.empty(1, storage.COEFFICIENTS, device="meta")),
            DifferentDevice,
            r"coefficients must be on cpu, got meta",
        ),
        (
            lambda _: storage.select(torch.device("meta")),
            InvalidTensor,
            r"device types 'cpu' and 'cuda'\); got 'meta'",
        ),
        (
            lambda _: storage.select(torch.device("cuda"), "gcc"),
            InvalidOption,
            r"compiler must be one of nvrtc, ptx; got 'gcc'",
        ),
    ],
)
def test_sizes_are_checked(call, error, message) -> None:
    table = LaunchTable([TensorMemory(gradient) for gradient in tensors(2)], CPU)
    with pytest.raises(error, match=message):
        call(table)


def test_the_operator_checks_sizes_once_more() -> None:
    operators = library.operators()
    table = LaunchTable([TensorMemory(gradient) for gradient in tensors(2)], CPU)
    with pytest.raises(RuntimeError, match="needs 2 statistics rows"):
        operators.analyze_gradient(table.fields, table.layouts, torch.empty(3, 3), 65536, 1.0)
    with pytest.raises(RuntimeError, match="the launch table needs 16 rows"):
        operators.adamw_scaled(table.fields[1:], table.layouts, torch.empty(1, storage.COEFFICIENTS), 1.0, 1.0, False)


# ----------------------------------------------------------------------------------------------------------- merges


def synthetic_rows(count: int, *, bad: int | None = None) -> torch.Tensor:
    """Rows as the first pass might write them, of very different magnitudes."""
    random = np.random.default_rng(count)
    rows = np.zeros((count, ROW_ELEMENTS), dtype=np.float32)
    rows[:, 0] = 10.0 ** random.uniform(-38, 38, count)
    rows[:, 1] = random.uniform(1, 65536, count)
    rows[random.random(count) < 0.1, :2] = 0
    if bad is not None:
        rows[bad, 2] = 1
    return torch.from_numpy(rows)


def exact(rows: torch.Tensor) -> tuple[float, float]:
    """Largest magnitude and norm of rows, in FP64."""
    scale, sumsq, _ = as_array(rows).T
    largest = scale.max()
    return largest, largest * np.sqrt(np.sum(sumsq * (scale / largest) ** 2))


def merge_by_plan(rows: torch.Tensor) -> tuple[StatsPlan, list[float]]:
    """What StatsPlan says, with the storage functions."""
    plan = StatsPlan.new(rows.shape[0])
    scratch, report = torch.full((plan.scratch_elements,), np.nan), torch.full((ROW_ELEMENTS,), np.nan)
    for stage in plan.stages:
        assert rows.shape[0] == stage.input_rows
        end = stage.output_offset + stage.output_rows * ROW_ELEMENTS
        merged = scratch[stage.output_offset : end].view(-1, ROW_ELEMENTS)
        storage.merge_gradient_stats_chunks(rows, merged)
        rows = merged
    assert rows.shape[0] == plan.final_rows
    storage.merge_gradient_stats(rows, report)
    return plan, report.tolist()


@pytest.mark.parametrize(
    ("count", "stages"),
    [(1, 0), (2, 0), (1023, 0), (1024, 0), (1025, 1), (5000, 1), (2**20, 1), (2**20 + 1, 2), (3 * 2**20, 2)],
)
def test_merging_in_stages(count, stages) -> None:
    """The rows are exact here, so the bound is that of the merges alone: the 7 + CHAIN of unscaling and squaring stay
    in it unused."""
    rows = synthetic_rows(count)
    if count == 1:
        rows[0] = torch.tensor([2.0, 3.0, 0.0])
    plan, (bad, scale, sumsq) = merge_by_plan(rows)
    assert len(plan.stages) == stages
    largest, norm = exact(rows)
    assert (bad, scale) == (0.0, largest)
    bound = norm_relative_bound(chain=1, levels=stages + 1) * norm
    compare("norm", np.float64(scale) * np.sqrt(sumsq), norm, bound)
    # Flat: all rows at once.
    report = torch.empty(ROW_ELEMENTS)
    storage.merge_gradient_stats(rows, report)
    assert report[1] == scale
    compare("flat", np.float64(scale) * np.sqrt(report[2].item()), norm, norm_relative_bound(chain=1, levels=1) * norm)


@pytest.mark.parametrize("place", [0, 1023, 1024, 4999])
def test_one_bad_row_marks_the_report(place) -> None:
    rows = synthetic_rows(5000, bad=place)
    _, (bad, scale, _) = merge_by_plan(rows)
    assert (bad, scale) == (1.0, exact(rows)[0])


def test_rows_of_zeros() -> None:
    assert merge_by_plan(torch.zeros(3000, ROW_ELEMENTS))[1] == [0.0, 0.0, 0.0]


def test_the_largest_rows_do_not_overflow() -> None:
    rows = torch.tensor([[3.4e38, 65536.0, 0.0]] * 2000)
    _, (bad, scale, sumsq) = merge_by_plan(rows)
    assert (bad, scale, sumsq) == (0.0, rows[0, 0].item(), 65536.0 * 2000)


# -------------------------------------------------------------------------------------------------------- workspace


@pytest.mark.parametrize("count", [1, 1024, 1025, 3000])
def test_workspace_hierarchical_and_flat(count) -> None:
    random = torch.Generator().manual_seed(count)
    gradients = [torch.randn(5, generator=random) * 10.0 ** (index % 60 - 30) for index in range(count)]
    table = LaunchTable([TensorMemory(gradient) for gradient in gradients], CPU)
    norm = np.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    for hierarchical, levels in ((True, 1 + (count > FAN_IN)), (False, 1)):
        workspace = StatisticsWorkspace(CPU, hierarchical=hierarchical)
        workspace.run(table, 1.0)
        assert workspace.rows.shape == (count, ROW_ELEMENTS)
        assert same_bits(workspace.rows, gradient_rows(gradients))
        bad, scale, sumsq = workspace.report.tolist()
        assert (bad, scale) == (0.0, max(gradient.abs().max().item() for gradient in gradients))
        compare("norm", np.float64(scale) * np.sqrt(sumsq), norm, norm_relative_bound(CHAIN, levels) * norm)
        first = workspace.report.clone()
        workspace.run(table, 1.0)
        assert same_bits(workspace.report, first), "a second pass repeats bit for bit"


def test_workspace_is_reused_for_smaller_and_larger_tables() -> None:
    workspace = StatisticsWorkspace(CPU)
    for count in (3, 2000, 1, 2000, 1030):
        table = LaunchTable([TensorMemory(torch.full((2,), 3.0)) for _ in range(count)], CPU)
        keep = [torch.full((2,), 3.0) for _ in range(count)]
        for index, gradient in enumerate(keep):
            table.fields[Field.GRAD, index] = gradient.data_ptr()
        workspace.run(table, 0.5)
        assert workspace.report.tolist() == [0.0, 1.5, 2.0 * count]
        assert record(lambda table=table: workspace.run(table, 0.5)).allocations == []


def test_report_of_some_rows() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0, 0.0]), torch.tensor([np.nan, 12.0])]
    workspace = StatisticsWorkspace(CPU)
    workspace.run(LaunchTable([TensorMemory(gradient) for gradient in gradients], CPU), 1.0)
    assert workspace.report_of(0, 1) == [0.0, 3.0, 1.0]
    bad, scale, sumsq = workspace.report_of(0, 2)
    assert (bad, scale) == (0.0, 4.0)
    compare("norm", scale * np.sqrt(sumsq), 5.0, 5 * norm_relative_bound(CHAIN, 1))
    assert workspace.report_of(2, 3) == [1.0, 12.0, 1.0]
    assert workspace.report[0] == 1.0, "the report of the whole pass stays"
