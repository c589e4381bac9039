"""``csrc/cuda.cu`` on the host simulator: the update against the CPU operator, bit for bit, and against the reference.

No test here needs a GPU, and none shows that the kernels run on one: the simulator runs the same source on the CPU.
"""

from __future__ import annotations

import math
import pathlib
import re
from dataclasses import dataclass, replace

import cases
import numpy as np
import pytest
import torch

from fused_adamw import host_simulator
from ruda_optim.fused_adamw.kernels import cpu
from ruda_optim.fused_adamw.kernels.device_table import device_table
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc
from ruda_optim.fused_adamw.kernels.tables import COEFFICIENTS, Field, Flag, LaunchTable, TensorMemory
from ruda_optim.fused_adamw.options import AdamWOptions

pytestmark = pytest.mark.skipif(host_simulator.unavailable() is not None, reason=str(host_simulator.unavailable()))

CPU = torch.device("cpu")
CSRC = pathlib.Path(nvrtc.__file__).parents[1] / "csrc"
CHUNK = nvrtc.STATISTICS_CHUNK


@pytest.fixture(scope="module")
def launcher():
    return host_simulator.HostLauncher(host_simulator.build(), seed=0)


@pytest.fixture(scope="module")
def simulated(launcher):
    return nvrtc.record(host_simulator.NAME, launcher)


@pytest.fixture(scope="module")
def on_cpu():
    return cpu.kernels()


def test_the_python_side_repeats_the_numbers_of_the_source() -> None:
    text = (CSRC / "cuda.cu").read_text() + (CSRC / "cuda_memory.h").read_text()
    constants = dict(re.findall(r"constexpr int (\w+) = (-?\d+);", text))
    assert int(constants["kThreads"]) == nvrtc.THREADS
    assert int(constants["kChunk"]) == nvrtc.STATISTICS_CHUNK


# ------------------------------------------------------------------------------------------------- the case table


def memory_of(case: cases.Case, step: int = 1) -> TensorMemory:
    """The memory of the case's tensor before ``step``, with moments from an earlier life unless it is the first."""
    parameter = cases.to_torch(cases.initial_parameter(case), case.parameter_dtype, case.layout)
    half = case.parameter_dtype != "float32"
    moments = [np.full(case.shape, 7.0, dtype=np.float32)] * 3  # not to be read: the first step takes zeros
    first, second, maximum = (cases.to_torch(values, "float32", case.layout) for values in moments)
    return TensorMemory(
        gradient=cases.to_torch(cases.stored_gradient(case, step), case.gradient_dtype, case.gradient_layout),
        parameter=parameter.float() if half else parameter,
        exp_avg=first,
        exp_avg_sq=second,
        max_exp_avg_sq=maximum if case.options.amsgrad else None,
        copy=parameter if half else None,
        first=True,
    )


def tensors_of(memory: TensorMemory) -> dict[str, torch.Tensor]:
    names = (*cases.FIELDS, "remainder", *(f"{name}_out" for name in cases.FIELDS[:-1]))
    return {name: value for name in names if (value := getattr(memory, name)) is not None}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits as integers, NaN canonical: only the payload of a NaN may differ between backends."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def assert_same_bits(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        different = bits(tensor) != bits(wanted[name])
        assert not different.any(), f"{name}: {int(different.sum())} of {different.numel()} elements differ"


def coefficient_rows(*options: AdamWOptions, completed: int = 0) -> torch.Tensor:
    return torch.tensor([option.prepare_step(completed).row for option in options], dtype=torch.float32)


def run_case(kernels, case: cases.Case) -> list[dict[str, torch.Tensor]]:
    """The tensors after each step; the clip factor is the reference's, so that only the update is compared."""
    memory = memory_of(case)
    kept = tensors_of(memory)
    table = LaunchTable([memory], CPU)
    results = []
    for step, want in enumerate(cases.expected(case), start=1):
        gradient = cases.to_torch(cases.stored_gradient(case, step), case.gradient_dtype, case.gradient_layout)
        table.set_gradient(0, gradient)
        table.fields[Field.GRAD, 0] = gradient.data_ptr()
        rows = coefficient_rows(case.options, completed=step - 1)
        kernels.adamw_scaled(table, rows, case.control.inverse_scale, want.clip_factor)
        table.fields[Field.FLAGS] &= ~int(Flag.FIRST)
        results.append({name: tensor.clone() for name, tensor in kept.items()})
    return results


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_simulated_update_has_the_cpu_operators_bits_and_the_references_values(case, simulated, on_cpu) -> None:
    actual, wanted = run_case(simulated, case), run_case(on_cpu, case)
    for got, want, expected in zip(actual, wanted, cases.expected(case), strict=True):
        assert_same_bits(got, want)
        cases.check(case, expected, got)


# --------------------------------------------------------------------------------------------- every specialization

GRADIENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MOMENTS = {"float32": 0, "bfloat16": 1, "packed16": 2}
STORES = {None: 0, torch.float16: 1, torch.bfloat16: 2, "split": 3}
LAYOUTS = ("flat", "misaligned", "scattered", "strided")
NUMEL = CHUNK + 1003  # two chunks, the last with a tail of three elements after its groups of four
HARD = (0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1e-8, 65504.0, 65520.0, math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Kind:
    """What a table column can be."""

    gradient: torch.dtype = torch.float32
    store: torch.dtype | str | None = None
    amsgrad: bool = False
    layout: str = "flat"
    first: bool = False
    out_of_place: bool = False
    numel: int = NUMEL
    moments: str = "float32"
    shift: int = 1

    def memory(self, seed: int = 0) -> TensorMemory:
        """Random values, some of them hard: infinities, NaN, subnormal numbers, signed zeros."""
        generator = torch.Generator().manual_seed(seed)

        def random(count: int) -> torch.Tensor:
            return torch.rand(count, generator=generator)

        def tensor(dtype: torch.dtype = torch.float32, *, positive: bool = False) -> torch.Tensor:
            values = torch.randn(self.numel, generator=generator) * 10 ** (random(self.numel) * 4 - 3)
            places = torch.randperm(self.numel, generator=generator)[: len(HARD)]
            values[places] = torch.tensor(HARD[: len(places)])
            return self.placed((values.abs() if positive else values).to(dtype), generator)

        def moment(*, positive: bool = False) -> torch.Tensor:
            return tensor(torch.float32 if self.moments == "float32" else torch.bfloat16, positive=positive)

        def words() -> torch.Tensor:
            drawn = torch.randint(-32768, 32768, (self.numel,), generator=generator).to(torch.int16)
            return self.placed(drawn, generator)

        def out(source: torch.Tensor | None) -> torch.Tensor | None:
            if source is None or not self.out_of_place:
                return None
            if self.layout in ("misaligned", "scattered"):
                return self.beginning_at(self.shift, torch.empty(self.numel, dtype=source.dtype))
            return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)

        split, packed = self.store == "split", self.moments == "packed16"
        low = torch.randint(-32768, 32768, (self.numel,), generator=generator).to(torch.int16)
        copy_dtype = torch.bfloat16 if split else self.store
        parameter = None if split else tensor()
        copy = None if copy_dtype is None else tensor(copy_dtype)
        if parameter is not None and copy is not None:  # most elements as the last step left them, the others written
            kept = self.placed(random(self.numel) < 0.75, generator)
            copy.copy_(torch.where(kept, parameter.to(copy_dtype), copy))
        memory = TensorMemory(
            gradient=tensor(self.gradient),
            parameter=parameter,
            exp_avg=words() if packed else moment(),
            exp_avg_sq=None if packed else moment(positive=True),
            max_exp_avg_sq=moment(positive=True) if self.amsgrad else None,
            copy=copy,
            remainder=self.placed(low, generator) if split else None,
            first=self.first,
        )
        for name in cases.FIELDS[:-1]:
            setattr(memory, f"{name}_out", out(getattr(memory, name)))
        return memory

    def placed(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if self.layout == "misaligned":
            return self.beginning_at(self.shift, values)
        if self.layout == "scattered":  # each tensor at an offset of its own
            return self.beginning_at(int(torch.randint(0, 16, (), generator=generator)), values)
        if self.layout == "strided":  # each tensor with a row pitch of its own
            pitch = 5 + int(torch.randint(0, 4, (), generator=generator))
            return torch.zeros(self.numel // 5, pitch, dtype=values.dtype)[:, :5].copy_(values.view(-1, 5))
        return values

    def beginning_at(self, shift: int, values: torch.Tensor) -> torch.Tensor:
        """A copy that begins so many elements after a boundary of 64 bytes."""
        whole = torch.zeros(self.numel + shift + 16, dtype=values.dtype)
        assert whole.data_ptr() % 64 == 0
        return whole[shift : shift + self.numel].copy_(values)


def compare(kinds: list[Kind], simulated, on_cpu, *, clip: float = 0.375) -> None:
    """One step of all kinds in one table by both backends; every tensor, inputs included, must have the same bits."""
    options = [AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8, maximize=bool(i % 2)) for i in range(3)]
    results = []
    for backend in (simulated, on_cpu):
        memories = [kind.memory(seed) for seed, kind in enumerate(kinds)]
        results.append([tensors_of(memory) | {"gradient": memory.gradient} for memory in memories])
        table = LaunchTable(memories, CPU)
        table.fields[Field.COEFFICIENTS] = torch.arange(len(kinds)) % len(options)
        backend.adamw_scaled(table, coefficient_rows(*options, completed=2), 0.5, clip)
    for actual, wanted in zip(*results, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("store", STORES, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_a_table_of_one_kind_runs_its_specialization(
    gradient, store, amsgrad, moments, launcher, simulated, on_cpu
) -> None:
    flat = Kind(gradient, store, amsgrad, moments=moments)
    small = replace(flat, numel=3)
    misaligned = replace(flat, layout="misaligned", numel=1001)
    out = replace(flat, out_of_place=True, numel=1030)
    launcher.launched.clear()
    compare([flat, small, misaligned, out], simulated, on_cpu)
    assert launcher.launched == [
        f"ruda::update<{GRADIENTS[gradient]}, {STORES[store]}, {int(amsgrad)}, {MOMENTS[moments]}>"
    ]


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_table_of_every_kind_runs_one_launch(moments, launcher, simulated, on_cpu) -> None:
    kinds = [
        Kind(gradient, store, amsgrad, layout, first, out_of_place, numel=1025, moments=moments)
        for gradient in GRADIENTS
        for store in STORES
        for amsgrad in (False, True)
        for layout in LAYOUTS
        for first, out_of_place in ((False, False), (True, False), (False, True))
    ]
    launcher.launched.clear()
    compare(kinds, simulated, on_cpu)
    assert launcher.launched == [f"ruda::update<-1, -1, -1, {MOMENTS[moments]}>"]


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("store", STORES, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_every_offset_and_every_tail(gradient, store, amsgrad, moments, simulated, on_cpu) -> None:
    """Arrays that begin alike, so many elements after a boundary; and arrays each of which begins elsewhere."""
    one = Kind(gradient, store, amsgrad, "misaligned", moments=moments)
    kinds = [replace(one, shift=shift, numel=numel) for shift in range(9) for numel in (*range(1, 20), 1001)]
    kinds += [replace(one, shift=shift, numel=CHUNK + 1003 + shift) for shift in (1, 6)]
    kinds += [replace(one, shift=shift, numel=1030, out_of_place=True) for shift in range(1, 8)]
    kinds += [replace(one, layout="scattered", numel=1025)] * 5
    compare(kinds, simulated, on_cpu)


@pytest.fixture(scope="module")
def only_vectors():
    """The kernels without the loop that takes elements one by one: what they change, they change as vectors."""
    source = (CSRC / "cuda.cu").read_text(encoding="utf-8")
    loop = "for (int i = thread; i < piece.size - packed; i += kThreads)"
    assert source.count(loop) == 1
    instances = [
        f"ruda::update<{kind}>" for kind in ("0, 0, 0, 0", "2, 3, 0, 0", "2, 3, 0, 1", "2, 3, 0, 2", "2, 3, 1, 2")
    ]
    return host_simulator.kernels(source.replace(loop, "for (int i = 0; i < 0;)"), instances)


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (Kind(), 4),
        (Kind(torch.bfloat16, "split"), 4),
        (Kind(torch.bfloat16, "split", moments="bfloat16"), 8),
        (Kind(torch.bfloat16, "split", moments="packed16"), 8),
        (Kind(torch.bfloat16, "split", amsgrad=True, moments="packed16"), 4),
    ],
    ids=str,
)
def test_all_but_head_and_tail_of_a_misaligned_tensor_go_as_vectors(kind, width, only_vectors) -> None:
    """Element sizes differ, so the boundary is counted in elements."""
    for shift in range(17):
        for numel in (1, width - 1, width + 1, 1001, CHUNK + 77):
            memory = replace(kind, layout="misaligned", shift=shift, numel=numel).memory()
            changing = memory.exp_avg
            changing.copy_(torch.full_like(changing, 17))  # a moment, or a word, that no step leaves as it is
            memory.gradient.fill_(1.0)
            before = changing.clone()
            only_vectors.adamw_scaled(
                LaunchTable([memory], CPU), coefficient_rows(AdamWOptions(), completed=2), 1.0, 1.0
            )
            head = min(-shift % width, numel)
            wanted = torch.zeros(numel, dtype=torch.bool)
            for begin in range(0, numel, CHUNK):
                size = min(CHUNK, numel - begin)
                first = begin + min(head, size)
                wanted[first : first + (begin + size - first) // width * width] = True
            assert torch.equal(changing != before, wanted), (shift, numel)


def test_arrays_that_lie_differently_go_one_by_one(only_vectors) -> None:
    memory = Kind(layout="misaligned", shift=4, numel=1001).memory()
    memory.gradient = Kind().beginning_at(1, torch.ones(NUMEL))[:1001]
    before = memory.exp_avg.clone()
    only_vectors.adamw_scaled(LaunchTable([memory], CPU), coefficient_rows(AdamWOptions(), completed=2), 1.0, 1.0)
    assert torch.equal(bits(memory.exp_avg), bits(before))


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_clip_factors_without_a_rounding(clip, simulated, on_cpu) -> None:
    compare([Kind(numel=1027), Kind(torch.bfloat16, torch.bfloat16, numel=1027)], simulated, on_cpu, clip=clip)


def test_every_half_number_is_read_and_written_like_on_the_cpu(simulated, on_cpu) -> None:
    # As gradients every bit pattern; as copies every tie between two finite numbers, and the FP32 numbers next to it.
    patterns = torch.arange(-32768, 32768).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        halves = patterns.view(dtype)
        ordered = halves[halves.isfinite()].double().sort().values
        ties = ((ordered[:-1] + ordered[1:]) / 2).float()
        above, below = (torch.nextafter(ties, torch.tensor(end)) for end in (math.inf, -math.inf))
        steps = torch.cat([ordered.float(), ties, above, below])
        zeros = torch.zeros(len(steps))  # kept here: a table does not keep gradients alive
        results = []
        for backend in (simulated, on_cpu):
            memories = [
                TensorMemory(gradient=halves, parameter=torch.zeros(65536), exp_avg=torch.zeros(65536),
                             exp_avg_sq=torch.zeros(65536)),
                TensorMemory(gradient=zeros, parameter=steps.clone(), exp_avg=torch.zeros(len(steps)),
                             exp_avg_sq=torch.zeros(len(steps)), copy=steps.to(dtype)),
            ]  # fmt: skip
            tensors = [tensors_of(memory) for memory in memories]
            still = AdamWOptions(weight_decay=0.0)
            backend.adamw_scaled(LaunchTable(memories, CPU), coefficient_rows(still), 1.0, 1.0)
            results.append(tensors)
        for actual, wanted in zip(*results, strict=True):
            assert_same_bits(actual, wanted)
        assert torch.equal(results[0][1]["copy"], steps.to(dtype))
        assert torch.equal(results[0][1]["parameter"], steps), "rounded otherwise, and so taken for written"


def test_more_than_two_to_the_31_elements(launcher, simulated) -> None:
    # The last chunk of 4.9e9 elements: pointers set back so far that the offsets lead into memory that exists.
    numel = 4_900_000_003
    chunk = (numel - 1) // CHUNK
    begin, size = chunk * CHUNK, numel - chunk * CHUNK
    kind = Kind(torch.bfloat16, torch.bfloat16, True, numel=size)
    direct, far = kind.memory(), kind.memory()
    wanted, actual = tensors_of(direct), tensors_of(far)
    gradients = direct.gradient, far.gradient  # kept here: a table does not keep gradients alive
    rows = coefficient_rows(AdamWOptions())
    simulated.adamw_scaled(LaunchTable([direct], CPU), rows, 1.0, 1.0)
    table = LaunchTable([far], CPU)
    table.fields[Field.NUMEL] = numel
    sizes = {Field.GRAD: 2, Field.COPY: 2}
    for row in range(Field.PARAM, Field.NUMEL):
        if table.fields[row, 0]:
            table.fields[row] -= begin * sizes.get(Field(row), 4)
    values = device_table(table).step_values(rows, 1.0, 1.0)
    blocks = torch.tensor([chunk, 0])
    for instance in ("ruda::update<2, 2, 1, 0>", "ruda::update<-1, -1, -1, 0>"):
        for tensor, start in zip(actual.values(), tensors_of(kind.memory()).values(), strict=True):
            tensor.copy_(start)
        launcher(CPU, instance, 1, table.fields.data_ptr(), table.layouts.data_ptr(), blocks.data_ptr(), 1,
                 values[0].data_ptr(), values[1].data_ptr(), 0)  # fmt: skip
        assert_same_bits(actual, wanted)
    del gradients


# ------------------------------------------------------------- the device decides: the decision is in test_decide.py


@pytest.mark.parametrize("skip", [False, True])
def test_update_takes_the_devices_decision(skip, simulated, on_cpu) -> None:
    kinds = [Kind(numel=1027), Kind(numel=5), Kind(numel=CHUNK + 1)]
    rows = coefficient_rows(*(AdamWOptions(learning_rate=0.1 * (i + 1)) for i in range(3)))
    own, others = [kind.memory(1) for kind in kinds], [kind.memory(1) for kind in kinds]
    actual, wanted = [[tensors_of(memory) | {"gradient": memory.gradient} for memory in x] for x in (own, others)]
    # Row i for tensor i, whatever Field.COEFFICIENTS says: there it names the group. The host's factors are ignored.
    decision = torch.tensor([float(skip), 0.25, 0.5, 0.0])
    simulated.adamw_scaled(LaunchTable(own, CPU), rows, 77.0, 77.0, decision=decision)
    if not skip:
        table = LaunchTable(others, CPU)
        table.fields[Field.COEFFICIENTS] = torch.arange(3)
        on_cpu.adamw_scaled(table, rows, 0.5, 0.25)
    for got, want in zip(actual, wanted, strict=True):
        assert_same_bits(got, want)


def test_an_empty_table_launches_nothing(launcher, simulated) -> None:
    launcher.launched.clear()
    empty = LaunchTable([], CPU)
    simulated.adamw_scaled(empty, torch.zeros(0, COEFFICIENTS), 1.0, 1.0)
    simulated.analyze_gradient(empty, torch.zeros(0, 3), 1.0)
    assert launcher.launched == []
