"""Gradient statistics of ``csrc/cuda.cu`` on the host simulator, and what the simulator notices. No GPU is involved."""

from __future__ import annotations

import math
import pathlib

import cases
import numpy as np
import pytest
import torch

from fused_adamw import host_simulator
from ruda_optim.fused_adamw import reference
from ruda_optim.fused_adamw.gradient_norm import GradientStats
from ruda_optim.fused_adamw.kernels import cpu
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc
from ruda_optim.fused_adamw.kernels.tables import Field, Flag, LaunchTable, TensorMemory
from ruda_optim.fused_adamw.stats_plan import StatsPlan

pytestmark = pytest.mark.skipif(host_simulator.unavailable() is not None, reason=str(host_simulator.unavailable()))

CPU = torch.device("cpu")
CHUNK = nvrtc.STATISTICS_CHUNK
U = 2.0**-24
# The longest run of FP32 additions that a square passes through. Whole aligned chunk: 8 in its chain, 2 between the
# four chains. Otherwise a thread has one chain of 32. Then 5 + 3 across the block.
HELD, LOOPED = 8 + 2 + 8, 32 + 2 + 8


def row_bound(chain: int) -> float:
    """Relative error of a row's sumsq: the square rounds once, the additions, then scale * rescale is exact (a power of
    two), its square and the division round. Multiplying by inverse_scale is not counted: the expected value sees the
    product rounded, as the kernel does."""
    return (1 + chain + 2) * U * 1.01


@pytest.fixture(scope="module")
def simulated():
    return host_simulator.kernels()


def analyze(kernels, gradients: list[torch.Tensor], inverse_scale: float = 1.0) -> torch.Tensor:
    table = LaunchTable([TensorMemory(gradient=gradient) for gradient in gradients], CPU)
    rows = torch.full((table.statistics_rows(kernels.statistics_chunk), 3), -7.0)
    kernels.analyze_gradient(table, rows, inverse_scale)
    return rows


def expected_rows(gradients: list[torch.Tensor], inverse_scale: float) -> list[tuple[float, float, float]]:
    """(scale, sumsq, bad) per chunk, in FP64 from the FP32 products."""
    rows = []
    for gradient in gradients:
        unscaled = gradient.float().reshape(-1) * torch.tensor(inverse_scale, dtype=torch.float32)
        for chunk in unscaled.double().split(CHUNK):
            finite = chunk[chunk.isfinite()]
            scale = float(finite.abs().max()) if len(finite) else 0.0
            sumsq = float(((finite / scale) ** 2).sum()) if scale else 0.0
            rows.append((scale, sumsq, float(len(finite) < len(chunk))))
    return rows


def check_rows(rows: torch.Tensor, gradients: list[torch.Tensor], scale: float = 1.0, chain: int = LOOPED) -> None:
    wanted = torch.tensor(expected_rows(gradients, scale), dtype=torch.float64)
    assert torch.equal(rows[:, 0].double(), wanted[:, 0]), "scale must be exact"
    assert torch.equal(rows[:, 2].double(), wanted[:, 2]), "bad must be exact"
    cases.compare("sumsq", rows[:, 1], wanted[:, 1], row_bound(chain) * wanted[:, 1])


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 7, 1024, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 20000])
def test_rows_of_one_tensor(numel, dtype, simulated) -> None:
    gradients = [values(numel, dtype)]
    whole = numel % CHUNK == 0
    check_rows(analyze(simulated, gradients, 0.37), gradients, 0.37, HELD if whole else LOOPED)


def test_rows_of_tensors_of_every_kind_stand_in_table_order(simulated) -> None:
    gradients = []
    for seed, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        gradients += [
            values(CHUNK + 5, dtype, seed),
            values(CHUNK + 6, dtype, seed + 3)[1:],
            values(3 * 41 * 7, dtype, seed + 6).view(3, 41, 7).transpose(0, 2),
            values(2 * 9000, dtype, seed + 9)[::2],
        ]
    parameters = [torch.zeros(gradient.shape) for gradient in gradients]
    table = LaunchTable(
        [TensorMemory(gradient=g, exp_avg=p) for g, p in zip(gradients, parameters, strict=True)], CPU
    )  # fmt: skip
    rows = torch.full((table.statistics_rows(CHUNK), 3), -7.0)
    simulated.analyze_gradient(table, rows, 2.0)
    check_rows(rows, gradients, 2.0)


EXTREMES = {
    "1e30": [1e30] * 100,
    "near the largest number": [3.4e38] * 100,
    "subnormal": [1e-44, 2e-45, -1e-44],
    "the smallest number": [1e-45],
    "zeros": [0.0, -0.0] * 50,
    "mixed": [1e30, 1e-30, -1e30, 0.0, 1.0, 1e-44],
    "just below infinity after rounding": [3.4028234663852886e38, -3.4028234663852886e38],
}


@pytest.mark.parametrize("numel", [100, CHUNK], ids=["looped", "held"])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_magnitudes_neither_overflow_nor_vanish(name, numel, simulated) -> None:
    pattern = torch.tensor(EXTREMES[name])
    gradients = [pattern.repeat(-(-numel // len(pattern)))[:numel].contiguous()]
    check_rows(analyze(simulated, gradients), gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [1, 100, CHUNK, CHUNK + 1])
def test_a_bad_last_element_is_seen_and_the_finite_ones_are_described(numel, bad, dtype, simulated) -> None:
    gradients = [values(numel, dtype)]
    gradients[0][-1] = bad
    check_rows(analyze(simulated, gradients), gradients)


def test_a_gradient_that_overflows_when_it_is_unscaled_is_bad(simulated) -> None:
    gradients = [torch.tensor([1.0, 3e38, -2.0])]
    rows = analyze(simulated, gradients, 4.0)
    assert rows[0].tolist() == [8.0, 1.25, 1.0]


@pytest.mark.parametrize(("count", "fan_in"), [(1, 4), (4, 4), (5, 4), (1000, 1024), (1024, 1024), (3001, 1024)])
def test_merged_rows_agree_with_the_cpu_operator(count, fan_in, simulated) -> None:
    generator = torch.Generator().manual_seed(count)
    rows = torch.rand(count, 3, generator=generator)
    rows[:, 0] *= 10.0 ** torch.randint(-40, 38, (count,), generator=generator)
    rows[::7, 0] = 0.0
    rows[:, 1] *= 8192
    rows[:, 2] = (rows[:, 2] > 0.9).float()
    groups = -(-count // fan_in)
    merged = [torch.full((groups, 3), -7.0) for _ in range(2)]
    reports = [torch.full((3,), -7.0) for _ in range(2)]
    for backend, out, report in zip((simulated, cpu.kernels()), merged, reports, strict=True):
        backend.merge_gradient_stats_chunks(rows, out, fan_in)
        backend.merge_gradient_stats(rows, report)
    for actual, wanted, column in ((*merged, 1), (*reports, 2)):
        # FP64 sums in another order, rounded once to FP32: the same number or its neighbour.
        cases.compare("sumsq", actual[..., column], wanted[..., column], 2.0**-23 * wanted[..., column].double())
        others = [c for c in range(3) if c != column]
        assert torch.equal(actual[..., others], wanted[..., others])


def test_the_norm_of_a_model(simulated) -> None:
    # 1030 rows: one level of merging, then the report.
    gradients = [values(numel, seed=seed) for seed, numel in enumerate([CHUNK] * 2 + [10] * 1028)]
    rows = analyze(simulated, gradients, 0.5)
    plan = StatsPlan.new(len(rows))
    assert len(plan.stages) == 1
    merged, report = torch.empty(plan.stages[0].output_rows, 3), torch.empty(3)
    simulated.merge_gradient_stats_chunks(rows, merged, 1024)
    simulated.merge_gradient_stats(merged, report)
    count = sum(gradient.numel() for gradient in gradients)
    arguments = {"elements": count, "tensors": len(gradients), "gradient_scale": 2.0}
    stats = GradientStats.from_report(*report.tolist(), **arguments)
    wanted = reference.gradient_stats([gradient.numpy() for gradient in gradients], 2.0)
    assert stats.all_finite
    assert stats.max_finite_abs == wanted.max_finite_abs
    assert abs(stats.total_norm - wanted.total_norm) <= cases.norm_relative_bound(LOOPED, 2) * wanted.total_norm


def test_a_repeated_run_gives_the_same_bits(simulated) -> None:
    gradients = [values(20000)]
    assert torch.equal(analyze(simulated, gradients), analyze(simulated, gradients))


def test_too_few_rows_are_refused(simulated) -> None:
    table = LaunchTable([TensorMemory(gradient=values(CHUNK + 1))], CPU)
    with pytest.raises(ValueError, match="room for 2 statistics rows"):
        simulated.analyze_gradient(table, torch.empty(1, 3), 1.0)
    with pytest.raises(ValueError, match="room for 3 statistics rows"):
        simulated.merge_gradient_stats_chunks(torch.empty(9, 3), torch.empty(2, 3), 4)


def test_memory_beside_the_gradient_does_not_matter(simulated) -> None:
    """One odd parameter does not send its gradient through the slow path, whose sums have another order."""
    gradient = values(2 * CHUNK, seed=7)
    rows = []
    for shift in (0, 1):
        state = [torch.zeros(2 * CHUNK + 1)[shift:][: 2 * CHUNK] for _ in range(3)]
        rows.append(torch.full((2, 3), torch.nan))
        table = LaunchTable([TensorMemory(gradient, *state)], CPU)
        assert bool(table.fields[Field.FLAGS, 0] & Flag.ALIGNED) == (shift == 0)
        simulated.analyze_gradient(table, rows[-1], 1.0)
    assert torch.equal(*rows)


# --------------------------------------------------------------------------------------------- the simulator itself

SOURCE = (pathlib.Path(nvrtc.__file__).parents[1] / "csrc" / "cuda.cu").read_text(encoding="utf-8")
BARRIER = "  __syncthreads();\n"
REDUCING = ("ruda::analyze<0>", "ruda::merge<false>", "ruda::merge<true>")


def differences(source: str, simulated) -> set[str]:
    """Which results of the changed kernels differ from those of the library's."""
    changed = host_simulator.kernels(source, REDUCING)
    gradients = [values(2 * CHUNK + 100, seed=1)]
    rows = [analyze(kernels, gradients) for kernels in (changed, simulated)]
    generator = torch.Generator().manual_seed(0)
    many = torch.rand(2000, 3, generator=generator) + 0.5
    found = {"analyze"} if not torch.equal(*rows) else set()
    for name, call, shape in (
        ("merge", lambda kernels, out: kernels.merge_gradient_stats_chunks(many, out, 1024), (2, 3)),
        ("report", lambda kernels, out: kernels.merge_gradient_stats(many, out), (3,)),
    ):
        results = [torch.zeros(shape) for _ in range(2)]
        for kernels, out in zip((changed, simulated), results, strict=True):
            call(kernels, out)
        if not torch.equal(*results):
            found.add(name)
    return found


def test_a_deleted_barrier_is_noticed(simulated) -> None:
    assert SOURCE.count("__syncthreads") == SOURCE.count(BARRIER) == 1, "delete each barrier in turn"
    assert differences(SOURCE, simulated) == set()
    assert differences(SOURCE.replace(BARRIER, ""), simulated) == {"analyze", "merge", "report"}


def test_a_barrier_that_not_every_thread_reaches_is_an_error(simulated) -> None:
    divergent = SOURCE.replace(BARRIER, "  if (threadIdx.x < 100) __syncthreads();\n")
    assert divergent != SOURCE
    with pytest.raises(host_simulator.SimulationError, match=r"barrier was reached by|shuffle was reached by"):
        differences(divergent, simulated)


def test_a_shuffle_that_not_every_lane_reaches_is_an_error(simulated) -> None:
    divergent = SOURCE.replace(
        "distance > 0; distance /= 2) x =", "distance > 0; distance /= 2) if (threadIdx.x % 2) x ="
    )
    assert divergent != SOURCE
    with pytest.raises(host_simulator.SimulationError, match="shuffle was reached by 16 of 32 lanes"):
        differences(divergent, simulated)


def test_an_instance_that_was_not_built_is_an_error() -> None:
    few = host_simulator.kernels(SOURCE, REDUCING)
    with pytest.raises(host_simulator.SimulationError, match="built without ruda::analyze<1>"):
        analyze(few, [torch.ones(3, dtype=torch.float16)])


def test_the_order_of_the_warps_does_not_matter(simulated) -> None:
    gradients = [torch.from_numpy(np.random.default_rng(0).standard_normal(20000).astype(np.float32))]
    other = host_simulator.kernels(seed=12345)
    assert torch.equal(analyze(other, gradients), analyze(simulated, gradients))
