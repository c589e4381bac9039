"""The Triton kernels in Triton's interpreter, on CPU tensors, against the CPU operator bit for bit.

``test_ptx.py`` runs this file with ``TRITON_INTERPRET=1`` in a process of its own: Triton reads the variable when a
kernel is defined. Nothing here has seen a GPU.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import fields

import numpy as np
import pytest
import torch
from cases import CASES, FIXTURE_CASES, Case, check, expected, initial_parameter, stored_gradient, to_torch
from fixture_runs import check_fixture

from ruda_optim.fused_adamw.kernels import block_map, cpu
from ruda_optim.fused_adamw.kernels.tables import COEFFICIENTS, Field, Flag, LaunchTable, TensorMemory
from ruda_optim.fused_adamw.kernels.triton import launch as ptx_launch
from ruda_optim.fused_adamw.kernels.triton import update as ptx
from ruda_optim.fused_adamw.options import AdamWOptions
from ruda_optim.fused_adamw.stats_plan import FAN_IN

assert os.environ.get("TRITON_INTERPRET") == "1", "run by test_ptx.py; by hand: TRITON_INTERPRET=1 pytest <this file>"

# NumPy, which the interpreter computes with, warns of the infinities and NaNs that some cases are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
KERNELS = ptx.kernels(simulate=True)
REFERENCE = cpu.kernels()
NAN = float("nan")
OPTIONS = AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bit patterns, with every NaN made the same one: only its payload may differ between backends."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, NAN), tensor)
        return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return tensor


def assert_same_bits(actual: TensorMemory, wanted: TensorMemory, what: str) -> None:
    for field in fields(TensorMemory):
        a, w = getattr(actual, field.name, None), getattr(wanted, field.name, None)
        if isinstance(w, torch.Tensor):
            wrong = int((bits(a) != bits(w)).sum())
            assert wrong == 0, f"{what}: {wrong} of {w.numel()} elements of {field.name} differ"


def coefficients(options: AdamWOptions, completed: int = 0) -> torch.Tensor:
    return torch.tensor([options.prepare_step(completed).row], dtype=torch.float32)


def tensors(
    shape: tuple[int, ...],
    gradient_dtype: torch.dtype = torch.float32,
    copy_dtype: torch.dtype | None = None,
    *,
    amsgrad: bool = False,
    split: bool = False,
    first: bool = False,
    out_of_place: bool = False,
    offset: int = 0,
    seed: int = 0,
    moments: str = "float32",
) -> TensorMemory:
    """Random memory; ``offset``: elements between an aligned address and every tensor."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)

    def normal(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(numel + offset, generator=generator).to(dtype)[offset:].view(shape)

    def empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((numel + offset,), NAN if dtype.is_floating_point else 77, dtype=dtype)[offset:].view(shape)

    stored = torch.float32 if moments == "float32" else torch.bfloat16
    packed = moments == "packed16"

    def moment(*, positive: bool = True) -> torch.Tensor:
        if first:
            return empty(stored)
        return (normal().abs() if positive else normal()).to(stored)

    def words() -> torch.Tensor:
        drawn = torch.randint(-(2**15), 2**15, (numel + offset,), generator=generator, dtype=torch.int16)
        return drawn[offset:].view(shape)

    parameter = None if split else normal()
    half = None if copy_dtype is None else normal(copy_dtype)
    if parameter is not None and half is not None:  # most elements as the last step left them, the others written
        kept = torch.rand(shape, generator=generator) < 0.75
        half.copy_(torch.where(kept, parameter.to(copy_dtype), half))
    memory = TensorMemory(
        gradient=normal(gradient_dtype),
        parameter=parameter,
        exp_avg=words() if packed else moment(positive=False),
        exp_avg_sq=None if packed else moment(),
        max_exp_avg_sq=moment() if amsgrad else None,
        copy=half,
        first=first,
    )
    if split:
        low = torch.randint(-(2**15), 2**15, (numel + offset,), generator=generator, dtype=torch.int16)
        memory.remainder = low[offset:].view(shape)
    if out_of_place:
        memory.parameter_out, memory.exp_avg_out = empty(), empty(memory.exp_avg.dtype)
        memory.exp_avg_sq_out = None if packed else empty(stored)
        memory.max_exp_avg_sq_out = empty(stored) if amsgrad else None
    return memory


def tables(memories: list[TensorMemory]) -> tuple[LaunchTable, LaunchTable, list[TensorMemory], list[TensorMemory]]:
    """A table for the interpreter and one for the CPU operator, over copies with the same layouts and alignments."""
    mine, theirs = copy.deepcopy(memories), copy.deepcopy(memories)
    kept = [
        list(map(copy.copy, given)) for given in (mine, theirs)
    ]  # a table takes the gradients out of what it is given
    return LaunchTable(mine, CPU), LaunchTable(theirs, CPU), *kept


def update_both(memories: list[TensorMemory], what: str, clip: float = 0.75, inverse_scale: float = 0.5) -> None:
    simulated, wanted, mine, theirs = tables(memories)
    row = coefficients(OPTIONS, 3)
    KERNELS.adamw_scaled(simulated, row, inverse_scale, clip)
    REFERENCE.adamw_scaled(wanted, row, inverse_scale, clip)
    for i, (a, w) in enumerate(zip(mine, theirs, strict=True)):
        assert_same_bits(a, w, f"{what}, tensor {i}")


# ------------------------------------------------------------------------------------------------------ the case table


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_has_the_bits_of_the_cpu_operator_and_lies_within_the_bounds_of_the_reference(case: Case) -> None:
    parameter = to_torch(initial_parameter(case), case.parameter_dtype, case.layout)
    half = case.parameter_dtype != "float32"

    def moment() -> torch.Tensor:
        return torch.full_like(parameter, NAN, dtype=torch.float32)  # never read before the first step wrote it

    def gradient(step: int) -> torch.Tensor:
        return to_torch(stored_gradient(case, step), case.gradient_dtype, case.gradient_layout)

    memory = TensorMemory(
        gradient=gradient(1),
        parameter=parameter.float() if half else parameter,
        exp_avg=moment(),
        exp_avg_sq=moment(),
        max_exp_avg_sq=moment() if case.options.amsgrad else None,
        copy=parameter if half else None,
        first=True,
    )
    simulated, wanted, (mine,), (theirs,) = tables([memory])
    for want in expected(case)[:2]:  # the first step, which reads no moments, and one that does
        if want.step > 1:
            given = gradient(want.step)
            simulated.set_gradient(0, given)
            wanted.set_gradient(0, given)
        row = coefficients(case.options, want.step - 1)
        KERNELS.adamw_scaled(simulated, row, case.control.inverse_scale, want.clip_factor)
        REFERENCE.adamw_scaled(wanted, row, case.control.inverse_scale, want.clip_factor)
        assert_same_bits(mine, theirs, f"{case}, step {want.step}")
        names = ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy")
        actual = {name: getattr(mine, name) for name in names if getattr(mine, name) is not None}
        check(case, want, actual)
        for table in (simulated, wanted):
            table.fields[Field.FLAGS] &= ~int(Flag.FIRST)


@pytest.mark.parametrize("index", range(12), ids=[case.name for case in FIXTURE_CASES])
def test_kernels_agree_with_torch(index: int) -> None:
    check_fixture(KERNELS, index)


# --------------------------------------------------------------------------------------------------------- the update


@pytest.mark.parametrize("out_of_place", [False, True], ids=["in place", "out of place"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_all_kinds_in_one_table(offset: int, out_of_place: bool) -> None:
    memories = [
        tensors((1031,), gradient, half, amsgrad=amsgrad, first=first, offset=offset, out_of_place=out_of_place, seed=i)
        for i, (gradient, half, amsgrad, first) in enumerate(
            (gradient, half, amsgrad, first)
            for gradient in (torch.float32, torch.float16, torch.bfloat16)
            for half in (None, torch.float16, torch.bfloat16)
            for amsgrad in (False, True)
            for first in (False, True)
        )
    ]
    update_both(memories, f"offset {offset}")
    for i in range(0, len(memories), 7):
        update_both([memories[i]], f"offset {offset}, tensor {i} alone")


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("moments", ["bfloat16", "packed16"])
def test_moments_in_16_bits(moments: str, amsgrad: bool) -> None:
    """Alone and in one table: every kind of tensor, with hard values, in every place of a block."""
    memories = []
    for gradient in (torch.float32, torch.float16, torch.bfloat16):
        for half, split in ((None, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            for offset, first in ((0, False), (0, True), (1, False)):
                memory = tensors(
                    *((1031,), gradient, half),
                    amsgrad=amsgrad,
                    split=split,
                    first=first,
                    offset=offset,
                    out_of_place=offset == 1 and not split,
                    seed=len(memories),
                    moments=moments,
                )
                memory.gradient[:8] = torch.tensor([NAN, float("inf"), -float("inf"), 3e38, 1e-44, 0.0, -0.0, 1e19])
                if memory.parameter is not None:
                    memory.parameter[8:11] = torch.tensor([NAN, -NAN, float("inf")])
                memories.append(memory)
    wide = tensors((40, 33), torch.bfloat16, amsgrad=amsgrad, moments=moments)
    wide.exp_avg = wide.exp_avg.t().contiguous().t()
    wide.gradient = torch.randn(40, 66).bfloat16()[:, ::2]
    memories.append(wide)
    update_both(memories, "all kinds")
    for memory in memories[::4]:
        update_both([memory], f"{memory.gradient.dtype}, {memory.copy is not None}", clip=1.0, inverse_scale=1.0)


@pytest.mark.parametrize("gradient", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_split_masters_keep_all_bits(gradient: torch.dtype) -> None:
    memories = [
        tensors((1031,), gradient, torch.bfloat16, split=True, amsgrad=offset == 1, offset=offset, seed=offset)
        for offset in (0, 1)
    ]
    for memory in memories:
        # The ends of the 16 bits, a value that becomes NaN, one that becomes infinite.
        memory.remainder[:4] = torch.tensor([-(2**15), 2**15 - 1, 0, -1], dtype=torch.int16)
        memory.gradient[4] = NAN
        memory.exp_avg[5] = float("inf")
    update_both(memories, "split masters")
    update_both(memories[:1], "split master, aligned")
    update_both(memories[1:], "split master, misaligned")


@pytest.mark.parametrize("numel", [1, 7, 1024, 1025, 4096, 5000, 20000])
def test_sizes_around_blocks_and_chunks(numel: int) -> None:
    update_both([tensors((numel,), amsgrad=True, seed=numel), tensors((numel,), torch.bfloat16, offset=1)], f"{numel}")


def test_strided_tensors_of_several_ranks() -> None:
    memories = []
    for shape, order in (((40, 33), (1, 0)), ((3, 4, 5, 6), (0, 2, 3, 1)), ((2, 3, 4, 5, 6), (4, 2, 0, 1, 3))):
        for changed in ("gradient", "parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy"):
            memory = tensors(shape, torch.bfloat16, torch.float16, amsgrad=True, seed=len(memories))
            inverse = [order.index(d) for d in range(len(order))]
            given = getattr(memory, changed)
            setattr(memory, changed, given.permute(order).contiguous().permute(inverse))
            memories.append(memory)
    split = tensors((40, 33), torch.float32, torch.bfloat16, split=True)
    split.remainder = split.remainder.t().contiguous().t()
    memories.append(split)
    wide = tensors((40, 33), torch.float32)
    wide.gradient = torch.randn(40, 66)[:, ::2]
    memories.append(wide)
    update_both(memories, "strided")
    for memory in memories[::4]:
        update_both([memory], "strided, alone")


def test_nan_and_infinity_propagate_as_on_the_cpu() -> None:
    memory = tensors((1031,), amsgrad=True)
    special = [NAN, float("inf"), -float("inf"), 3e38, -3e38, 1e-44, 0.0, -0.0]
    numbers = np.array(np.meshgrid(special, special)).reshape(2, -1)
    count = numbers.shape[1]
    for name in ("gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "parameter"):
        for other in ("gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "parameter"):
            if name < other:
                varied = copy.deepcopy(memory)
                getattr(varied, name)[:count] = torch.from_numpy(numbers[0]).float()
                getattr(varied, other)[:count] = torch.from_numpy(numbers[1]).float()
                update_both([varied], f"{name} and {other}", clip=1.0, inverse_scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_gradient_and_the_rounding_of_half_copies(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    memory = tensors((2**16,), dtype, dtype)
    memory.gradient = every
    # With lr 0 the copy is the rounded parameter: values on, and one ulp around, the ties between neighbours.
    tie = every.float().view(torch.int32) + (0x1000 if dtype == torch.float16 else 0x8000)
    around = tie + torch.randint(-1, 2, tie.shape, dtype=torch.int32)
    memory.parameter = around.view(torch.float32)
    memory.copy = memory.parameter.to(dtype)
    memory.copy[::5] = every[::5]  # written by somebody: NaN and infinity among them
    simulated, wanted, mine, theirs = tables([memory])
    row = coefficients(AdamWOptions(learning_rate=0.0))
    KERNELS.adamw_scaled(simulated, row, 1.0, 1.0)
    REFERENCE.adamw_scaled(wanted, row, 1.0, 1.0)
    assert_same_bits(mine[0], theirs[0], f"{dtype}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_master_that_rounds_to_its_half_parameter_is_kept(dtype: torch.dtype) -> None:
    """To any bits of it: with lr 0 a step changes no master, unless its parameter was written."""
    generator = torch.Generator().manual_seed(0)
    memory = tensors((5000,), torch.float32, dtype)
    memory.parameter = torch.randn(5000, generator=generator) * 10 ** (torch.rand(5000, generator=generator) * 10 - 6)
    memory.copy = memory.parameter.to(dtype)
    memory.copy[[3, 1024, 4999]] = torch.tensor([NAN, 7.0, -float("inf")], dtype=dtype)
    start = memory.parameter.clone()
    start[[3, 1024]] = torch.tensor([NAN, 7.0])
    start[4999] = NAN  # infinity minus lr * weight decay times itself
    for others in ([], [tensors((5,))]):
        simulated, _, mine, _ = tables([memory, *others])
        KERNELS.adamw_scaled(simulated, coefficients(AdamWOptions(learning_rate=0.0)), 1.0, 1.0)
        assert torch.equal(bits(mine[0].parameter), bits(start))
        assert torch.equal(bits(mine[0].copy), bits(start.to(dtype)))


def test_elements_beyond_2_to_the_31() -> None:
    """Chunk 600,000 of a tensor of 4.9e9 elements, whose only mapped memory is that chunk."""
    chunk, count = 600_000, 1031
    memory = tensors((count,), torch.bfloat16, torch.float16, amsgrad=True)
    simulated, wanted, (mine,), (theirs,) = tables([memory])
    REFERENCE.adamw_scaled(wanted, coefficients(OPTIONS), 1.0, 1.0)
    start = chunk * ptx_launch.UPDATE_CHUNK
    assert start > 2**32
    table = simulated.fields.clone()
    for field in range(Field.PARAM, Field.NUMEL):
        size = 2 if field in (Field.GRAD, Field.COPY) else 4
        if table[field, 0] != 0:
            table[field, 0] -= start * size
    table[Field.NUMEL, 0] = start + count
    ptx_launch.launch(
        ptx.update_kernel,
        ptx_launch.update_specialization(int(table[Field.FLAGS, 0]) & block_map.UPDATE_KIND),
        1,
        *(table, simulated.layouts, torch.tensor([chunk]), coefficients(OPTIONS), torch.tensor([0.0, 1.0, 1.0, 0.0])),
        *(1, 0),
        simulate=True,
    )
    assert_same_bits(mine, theirs, "chunk 600,000")


def test_coefficient_rows_and_gradients_that_change_between_steps() -> None:
    memories = [tensors((300 + i,), seed=i) for i in range(3)]
    simulated, wanted, mine, theirs = tables(memories)
    rows = torch.cat([coefficients(OPTIONS, 0), coefficients(AdamWOptions(maximize=True, beta1=0.5), 7)])
    for step in range(3):
        # One gradient is of another kind in the last step. A table keeps no gradient alive.
        given = [torch.randn(300 + i).to(torch.float16 if (step, i) == (2, 1) else torch.float32) for i in range(3)]
        for i in range(3):
            for table in (simulated, wanted):
                table.set_gradient(i, given[i])
                table.fields[Field.COEFFICIENTS, i] = (step + i) % 2
        KERNELS.adamw_scaled(simulated, rows, 1.0, 0.5)
        REFERENCE.adamw_scaled(wanted, rows, 1.0, 0.5)
        for a, w in zip(mine, theirs, strict=True):
            assert_same_bits(a, w, f"step {step}")
        for table in (simulated, wanted):
            table.fields[Field.FLAGS] &= ~int(Flag.FIRST)


# --------------------------------------------------------------------------------------------------------- statistics

# Relative error of a sum of squares in FP32, all terms positive: 7 roundings per term (cases.norm_relative_bound), then
# 31 additions in a thread, 8 between threads, 20 between blocks with an exact change of frame, and a division by a
# square; twice, as both sides have an error, though the CPU adds fewer numbers at a time.
SUMSQ = 2.0**-24 * 2 * (7 + 31 + 8 + 20 + 3)


def analyze(kernels, table: LaunchTable, inverse_scale: float) -> tuple[float, float, float]:
    rows = torch.full((table.statistics_rows(kernels.statistics_chunk), 3), NAN)
    kernels.analyze_gradient(table, rows, inverse_scale)
    report = torch.full((3,), NAN)
    kernels.merge_gradient_stats(rows, report)
    return tuple(report.tolist())


def assert_same_statistics(gradients: list[torch.Tensor], inverse_scale: float = 1.0) -> None:
    memories = [TensorMemory(g, torch.zeros(g.shape), torch.zeros(g.shape), torch.zeros(g.shape)) for g in gradients]
    table = LaunchTable(memories, CPU)
    bad, scale, sumsq = analyze(KERNELS, table, inverse_scale)
    wanted_bad, wanted_scale, wanted_sumsq = analyze(REFERENCE, table, inverse_scale)
    assert (bad, scale) == (wanted_bad, wanted_scale)
    assert abs(sumsq - wanted_sumsq) <= SUMSQ * wanted_sumsq


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-20, 1.0, 1e30, 3.4e38], ids=str)
def test_statistics_at_every_magnitude(magnitude: float) -> None:
    values = torch.rand(20000) * 2 - 1
    assert_same_statistics([values * magnitude, (values * magnitude)[1:9000]])
    assert_same_statistics([torch.full((9000,), magnitude), torch.zeros(5)])


def test_statistics_of_mixed_magnitudes_kinds_and_layouts() -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(20000, generator=generator) * 10.0 ** torch.randint(-44, 38, (20000,), generator=generator)
    half = torch.randn(3, 40, 33, generator=generator)
    gradients = [wide, wide[1:17000], half.half(), half.bfloat16(), half.permute(2, 0, 1), torch.zeros(3000)]
    assert_same_statistics(gradients)
    assert_same_statistics(gradients, 2.0**-10)
    assert_same_statistics([half.half().permute(0, 2, 1), half.bfloat16()[:, ::2], half[:, :, ::3]], 3.0)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("at", [0, 8192, 19999])
def test_a_bad_element_anywhere_is_found_and_the_finite_ones_are_described(bad: float, at: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gradient = torch.randn(20000).to(dtype)
        gradient[at] = bad
        assert_same_statistics([torch.randn(100), gradient])
    assert_same_statistics([torch.full((9000,), bad)])


def test_unscaling_that_overflows_is_bad() -> None:
    gradient = torch.randn(9000)
    gradient[8999] = 3e38
    assert_same_statistics([gradient], 4.0)


def test_statistics_over_several_chunks_of_a_tensor() -> None:
    gradient = torch.randn(ptx_launch.STATISTICS_CHUNK + 10000) * torch.logspace(
        -30, 30, ptx_launch.STATISTICS_CHUNK + 10000
    )
    assert_same_statistics([gradient])


@pytest.mark.parametrize("fan_in", [4, 1000, FAN_IN, 1500])
def test_merging_rows_as_on_the_cpu(fan_in: int) -> None:
    count = 2 * min(FAN_IN, 60 * fan_in) + 5
    scale = 10.0 ** torch.randint(-40, 30, (count,))
    scale[::7] = 0
    rows = torch.stack((scale, (1 + torch.rand(count)) * (scale > 0), torch.zeros(count)), 1).float()
    rows[count - 1, 2] = 1
    results = []
    for kernels in (KERNELS, REFERENCE):
        merged = torch.full((-(-count // fan_in), 3), NAN)
        kernels.merge_gradient_stats_chunks(rows, merged, fan_in)
        report = torch.full((3,), NAN)
        kernels.merge_gradient_stats(merged, report)
        results.append((merged, report))
    (mine, report), (theirs, wanted) = results
    assert torch.equal(mine[:, [0, 2]], theirs[:, [0, 2]])
    assert torch.equal(report[:2], wanted[:2])
    # Both add in FP64 and round once: the order may move the sum by an ulp; after the second merge by three.
    torch.testing.assert_close(mine[:, 1], theirs[:, 1], rtol=2.0**-23, atol=0)
    torch.testing.assert_close(report[2], wanted[2], rtol=3 * 2.0**-23, atol=0)


def test_wrong_room_for_rows_is_refused() -> None:
    table = LaunchTable([tensors((10,))], CPU)
    with pytest.raises(ValueError, match=r"analyze_gradient needs .* 1 statistics rows .* got shape \(2, 3\)"):
        KERNELS.analyze_gradient(table, torch.empty(2, 3), 1.0)
    with pytest.raises(ValueError, match="merge_gradient_stats_chunks needs"):
        KERNELS.merge_gradient_stats_chunks(torch.empty(9, 3), torch.empty(2, 3), 4)


# ------------------------------------------------------------------------------------------------------------ launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    real = ptx_launch.launch

    def spy(function, specialization, *rest, **options) -> None:
        seen.append(specialization)
        real(function, specialization, *rest, **options)

    monkeypatch.setattr(ptx_launch, "launch", spy)
    return seen


def test_one_launch_for_a_model_of_one_kind_whatever_is_aligned_or_first(launches: list[object]) -> None:
    memories = [tensors((n,), first=n % 2 == 0, offset=n % 3, seed=n) for n in (1, 2, 3, 8, 9000)]
    update_both(memories, "model")
    assert len(launches) == 1


def test_one_launch_for_a_model_of_several_kinds(launches: list[object]) -> None:
    update_both([tensors((5,)), tensors((5,), torch.bfloat16, torch.bfloat16), tensors((6,))], "two kinds")
    assert launches == [ptx_launch.update_specialization(ptx_launch.GENERAL_KIND)]
    assert_same_statistics([torch.ones(5), torch.ones(5).half()])
    assert launches[1] == ptx_launch.analyze_specialization(ptx_launch.GENERAL_KIND)


def test_an_empty_table_launches_nothing(launches: list[object]) -> None:
    KERNELS.adamw_scaled(LaunchTable([], CPU), torch.empty(0, COEFFICIENTS), 1.0, 1.0)
    assert launches == []


def test_the_record_says_that_it_is_a_simulation() -> None:
    assert KERNELS.name == "ptx-simulated"
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        ptx.kernels()


def test_flags_that_specialize_a_kernel_are_those_that_change_with_shape_and_dtype_only() -> None:
    """FIRST and ALIGNED change from step to step: neither may cause a compilation."""
    assert not block_map.UPDATE_KIND & (Flag.FIRST | Flag.ALIGNED)
    kinds = {dict(s.constants)["KIND"] for s in ptx_launch.every_specialization()["update"]}
    assert len(kinds) == 3 * (48 + 1)  # and a general one for each form of moments
