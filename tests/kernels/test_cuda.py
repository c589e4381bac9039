"""The device kernels on a GPU: bits of the CPU operator, values of the reference, statistics, the functional API.

``tools/run_adamw_regressions.py --suite cuda`` runs this file and test_cuda_optimizer.py and fails where there is no
GPU; here every test is then skipped.
"""

from __future__ import annotations

import math

import cases
import fixture_runs
import numpy as np
import pytest
import torch
from cuda_runs import CPU, DEVICE, needs_gpu, needs_hardware, on_cpu, place, placed, require, run_case
from step_inputs import parts
from test_nvrtc import GRADIENTS, LAYOUTS, STORES, Kind, assert_same_bits, coefficient_rows, tensors_of
from test_nvrtc import run_case as run_case_on_cpu

from ruda_optim.fused_adamw import (
    AdamWOptions,
    GradientGuardOptions,
    InvalidOption,
    NonFiniteGradients,
    NonFinitePolicy,
    StepControl,
    adamw_step,
    gradient_stats,
    guarded_adamw_step,
    reference,
)
from ruda_optim.fused_adamw.kernels import cpu
from ruda_optim.fused_adamw.storage import Field, LaunchTable, StatisticsWorkspace, TensorMemory, select

pytestmark = needs_gpu

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# The longest run of FP32 additions that a square passes through in one statistics row. nvrtc: test_nvrtc_statistics.py.
# ptx: 256 elements of a strided tensor at a time are added in a tree (8), and the 640 of them in a row of 163,840
# elements in a chain; every other walk adds fewer numbers one after another.
CHAIN = {"nvrtc": 42, "ptx": 8 + 640}
GIB = 2**30


@pytest.fixture(params=["nvrtc", "ptx"])
def compiler(request, monkeypatch) -> str:
    require(request.param)
    monkeypatch.setenv("RUDA_CUDA_COMPILER", request.param)
    return request.param


# ------------------------------------------------------------------------------------------------------ the update


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{SHORT[case.gradient_dtype]} {case}")
def test_case_has_the_cpu_operators_bits_and_the_references_values(case, compiler) -> None:
    actual = run_case(select(DEVICE, compiler), case, DEVICE)
    wanted = run_case_on_cpu(cpu.kernels(), case)
    for got, want, expected in zip(actual, wanted, cases.expected(case), strict=True):
        assert_same_bits(got, want)
        cases.check(case, expected, got)


@pytest.mark.parametrize(
    "index", range(12), ids=[f"{SHORT[case.gradient_dtype]} {case}" for case in cases.FIXTURE_CASES]
)
def test_kernels_agree_with_torch(index, compiler) -> None:
    fixture_runs.check_fixture(select(DEVICE, compiler), index, DEVICE)


def update(kernels, kinds: list[Kind], device: torch.device, clip: float = 0.375) -> list[dict[str, torch.Tensor]]:
    """One step of all kinds in one table; every tensor afterwards, inputs included, on the CPU."""
    options = [AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8, maximize=bool(i % 2)) for i in range(3)]
    memories = [placed(kind.memory(seed), device) for seed, kind in enumerate(kinds)]
    kept = [tensors_of(memory) | {"gradient": memory.gradient} for memory in memories]
    table = LaunchTable(memories, device)
    table.fields[Field.COEFFICIENTS] = torch.arange(len(kinds)) % len(options)
    kernels.adamw_scaled(table, coefficient_rows(*options, completed=2), 0.5, clip)
    return [on_cpu(tensors) for tensors in kept]


EVERY_KIND = [
    Kind(gradient, store, amsgrad, layout, first, out_of_place, numel=1025)
    for gradient in GRADIENTS
    for store in STORES
    for amsgrad in (False, True)
    for layout in LAYOUTS
    for first, out_of_place in ((False, False), (True, False), (False, True))
]


def assert_same_updates(kinds: list[Kind], kernels, others, device: torch.device) -> None:
    for actual, wanted in zip(update(kernels, kinds, DEVICE), update(others, kinds, device), strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("store", STORES, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda dtype: SHORT[str(dtype).removeprefix("torch.")])
def test_specialization_has_the_cpu_operators_bits_for_hard_values(gradient, store, compiler) -> None:
    for amsgrad in (False, True):
        kinds = [
            Kind(gradient, store, amsgrad),
            Kind(gradient, store, amsgrad, numel=3),
            Kind(gradient, store, amsgrad, layout="misaligned", numel=1001),
            Kind(gradient, store, amsgrad, out_of_place=True, numel=1030),
        ]
        assert_same_updates(kinds, select(DEVICE, compiler), cpu.kernels(), CPU)
        strided = [Kind(gradient, store, amsgrad, layout="strided", numel=1025)]
        assert_same_updates(strided, select(DEVICE, compiler), cpu.kernels(), CPU)


def test_one_table_of_every_kind_has_the_cpu_operators_bits(compiler) -> None:
    assert_same_updates(EVERY_KIND, select(DEVICE, compiler), cpu.kernels(), CPU)


def test_nvrtc_and_ptx_update_to_the_same_bits() -> None:
    require("nvrtc")
    require("ptx")
    assert_same_updates(EVERY_KIND, select(DEVICE, "nvrtc"), select(DEVICE, "ptx"), DEVICE)
    for kind in EVERY_KIND[::7]:
        assert_same_updates([kind], select(DEVICE, "nvrtc"), select(DEVICE, "ptx"), DEVICE)


@needs_hardware
def test_more_than_two_to_the_31_elements(compiler) -> None:
    numel = 2**31 + 1003
    needed = numel * (2 + 3 * 4) + GIB
    if torch.cuda.mem_get_info(DEVICE)[0] < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of free device memory")
    # Everywhere the same numbers, but for three places with numbers of their own. The update is elementwise, so each
    # place must come out as a small tensor of its numbers does.
    places = [slice(0, 1000), slice(2**31 - 500, 2**31 + 500), slice(numel - 1000, numel)]
    common = {"gradient": 0.5, "parameter": 1.5, "exp_avg": 0.25, "exp_avg_sq": 0.125}
    dtypes = {"gradient": torch.bfloat16}
    generator = torch.Generator().manual_seed(0)
    own = [
        {name: (torch.rand(1000, generator=generator) + value).to(dtypes.get(name, torch.float32))
         for name, value in common.items()}
        for _ in places
    ]  # fmt: skip
    own.append(
        {name: torch.full((16,), value, dtype=dtypes.get(name, torch.float32)) for name, value in common.items()}
    )
    rows = coefficient_rows(AdamWOptions(learning_rate=1e-2, weight_decay=0.1), completed=4)
    for tensors in own:
        cpu.kernels().adamw_scaled(LaunchTable([TensorMemory(**tensors)], CPU), rows, 1.0, 0.75)

    big = {name: torch.full((numel,), value, dtype=dtypes.get(name, torch.float32), device=DEVICE)
           for name, value in common.items()}  # fmt: skip
    generator.manual_seed(0)
    for place_ in places:
        for name, value in common.items():
            big[name][place_] = (torch.rand(1000, generator=generator) + value).to(big[name].dtype).to(DEVICE)
    table = LaunchTable([TensorMemory(**big)], DEVICE)
    workspace = StatisticsWorkspace(DEVICE)
    workspace.run(table, 1.0)
    bad, scale, sumsq = workspace.report.tolist()
    largest = max(float(big["gradient"][place_].float().max()) for place_ in places)
    inner = sum(float(big["gradient"][place_].double().square().sum()) for place_ in places)
    norm = math.sqrt(inner + (numel - 3000) * 0.25)
    assert (bad, scale) == (0.0, largest)
    bound = cases.norm_relative_bound(chain=CHAIN[compiler]) * norm
    cases.compare("norm", np.float64(scale * math.sqrt(sumsq)), norm, bound)

    select(DEVICE, compiler).adamw_scaled(table, rows, 1.0, 0.75)
    for place_, wanted in zip(places, own, strict=False):
        assert_same_bits({name: tensor[place_].cpu() for name, tensor in big.items()}, wanted)
    for name, tensor in big.items():
        for start in range(1000, numel - 1000, 2**28):
            piece = tensor[start : min(start + 2**28, numel - 1000)]
            different = int((piece != own[-1][name][0].to(DEVICE)).sum())
            inside = max(0, min(start + len(piece), places[1].stop) - max(start, places[1].start))
            assert different <= inside, f"{name}: {different} elements from {start} on are not as everywhere else"
    big["gradient"][-1] = math.inf
    workspace.run(table, 1.0)
    assert workspace.report[0].item() == 1.0


# -------------------------------------------------------------------------------------------------- gradient statistics


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=SHORT.get)
def test_statistics_agree_with_the_reference(dtype, compiler) -> None:
    random = np.random.default_rng(0)
    layouts = [("contiguous", (300_007,)), ("misaligned", (20_001,)), ("every second", (70, 64)),
               ("transposed", (900, 700)), ("contiguous", (1,)), ("contiguous", (8192,))]  # fmt: skip
    arrays = [cases.round_to(random.standard_normal(shape) * 10.0 ** random.uniform(-3, 2, shape), dtype)
              for _, shape in layouts]  # fmt: skip
    tensors = [place(cases.to_torch(array, dtype, layout), DEVICE)
               for array, (layout, _) in zip(arrays, layouts, strict=True)]  # fmt: skip
    kept = [tensor.clone() for tensor in tensors]
    for scale in (1.0, 8.0):
        for some in (slice(None), slice(0, 1), slice(2, 3)):
            stats = gradient_stats(tensors[some], scale)
            want = reference.gradient_stats(arrays[some], scale)
            bound = cases.norm_relative_bound(chain=CHAIN[compiler]) * want.total_norm
            cases.compare("norm", np.float64(stats.total_norm), want.total_norm, bound)
            assert stats.max_finite_abs == want.max_finite_abs
            assert stats.all_finite
            again = gradient_stats(tensors[some], scale)
            assert again.total_norm == stats.total_norm, "the order of the additions is fixed"
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, before), "gradients are only read"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=SHORT.get)
def test_one_element_that_is_not_finite_is_seen_anywhere(dtype, value, compiler) -> None:
    gradient = torch.ones(200_003, dtype=getattr(torch, dtype), device=DEVICE)
    for position in (0, 8191, 100_000, 200_002):
        gradient.fill_(1.0)
        gradient[position] = value
        stats = gradient_stats([torch.ones(5, device=DEVICE, dtype=gradient.dtype), gradient], 1.0)
        assert not stats.all_finite
        assert stats.total_norm == math.inf
        assert stats.max_finite_abs == 1.0


def test_extreme_magnitudes_neither_overflow_nor_vanish(compiler) -> None:
    for magnitude in (3e38, 1e30, 1e-30, 1e-38, 1e-44):
        gradient = torch.full((10_000,), magnitude, device=DEVICE)
        stats = gradient_stats([gradient], 1.0)
        exact = float(gradient[0]) * 100.0
        bound = cases.norm_relative_bound(chain=CHAIN[compiler]) * exact
        cases.compare(f"norm of {magnitude}", np.float64(stats.total_norm), exact, bound)


def test_thousands_of_rows_are_merged_in_stages(compiler) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, 5, generator=generator)
    gradients = list(values.to(DEVICE).unbind())
    want = float(values.double().norm())
    bound = cases.norm_relative_bound(chain=CHAIN[compiler]) * want
    cases.compare("norm", np.float64(gradient_stats(gradients, 1.0).total_norm), want, bound)


# ------------------------------------------------------------------------------------------------- functional API


@pytest.mark.parametrize("case", cases.FLAT_CASES[::3], ids=lambda case: f"{SHORT[case.gradient_dtype]} {case}")
def test_functional_step_has_the_cpu_operators_bits(case, compiler) -> None:
    results = []
    for device in (DEVICE, CPU):
        parameters = place(cases.to_torch(cases.initial_parameter(case)), device)
        state, found = None, []
        for step in range(1, case.steps + 1):
            gradients = place(cases.to_torch(cases.stored_gradient(case, step), case.gradient_dtype), device)
            updated = adamw_step(parameters, gradients, state, case.options, case.control)
            assert updated.updated
            parameters, state = updated.parameters, updated.state
            found.append(on_cpu(parts(updated)))
        results.append(found)
    for actual, wanted in zip(*results, strict=True):
        assert_same_bits(actual, wanted)


def test_guard_skips_clips_and_raises(compiler) -> None:
    options = AdamWOptions(learning_rate=1e-2, weight_decay=0.1)
    parameters = [torch.full((n,), 2.0, device=DEVICE) for n in (5, 3000)]
    gradients = [torch.full((n,), 0.5, device=DEVICE) for n in (5, 3000)]
    entries = [(p, g, None) for p, g in zip(parameters, gradients, strict=True)]
    norm = 0.5 * math.sqrt(3005)
    done = guarded_adamw_step(entries, options, StepControl(), GradientGuardOptions(max_norm=1.0))
    # 1 / (norm + 1e-6) from a norm within its bound, rounded once.
    bound = (cases.norm_relative_bound(chain=CHAIN[compiler]) + cases.U) / norm
    cases.compare("clip factor", np.float64(done.decision.clip_factor), 1.0 / (norm + 1e-6), bound)
    for (p, g, _), update_ in zip(entries, done.updates, strict=True):
        want = adamw_step(p.cpu(), g.cpu() * done.decision.clip_factor, None, options)
        assert_same_bits(on_cpu(parts(update_)), parts(want))

    gradients[1][-1] = math.nan
    skipped = guarded_adamw_step(entries, options, StepControl(), GradientGuardOptions(max_norm=1.0))
    assert skipped.decision.skip_update
    assert not any(update_.updated for update_ in skipped.updates)
    guard = GradientGuardOptions(max_norm=1.0, nonfinite=NonFinitePolicy.ERROR)
    with pytest.raises(NonFiniteGradients):
        guarded_adamw_step(entries, options, StepControl(), guard)
    assert all(bool((p == 2.0).all()) for p in parameters)


# ------------------------------------------------------------------------------------------------------- PTX version


needs_nvidia = pytest.mark.skipif(torch.version.hip is not None, reason="AMD devices have no PTX")


@needs_nvidia
def test_a_ptx_version_that_the_device_takes_is_used(monkeypatch) -> None:
    require("ptx")
    from ruda_optim.fused_adamw.kernels.triton import launch as ptx_launch

    major, minor = torch.cuda.get_device_capability(DEVICE)
    oldest = ptx_launch._FIRST_PTX[10 * major + minor]
    monkeypatch.setenv("RUDA_PTX_VERSION", f"{oldest // 10}.{oldest % 10}")
    monkeypatch.setattr(ptx_launch, "_compiled", {})
    assert_same_updates([Kind(numel=1025)], select(DEVICE, "ptx"), cpu.kernels(), CPU)
    (compiled,) = ptx_launch._compiled.values()
    assert f".version {oldest // 10}.{oldest % 10}\n" in compiled.asm["ptx"]


@needs_nvidia
def test_a_ptx_version_that_the_device_does_not_take_is_refused(monkeypatch) -> None:
    require("ptx")
    for version in ("1.0", "99.0", "new"):
        monkeypatch.setenv("RUDA_PTX_VERSION", version)
        with pytest.raises(InvalidOption, match=r"RUDA_PTX_VERSION must be a PTX version from"):
            update(select(DEVICE, "ptx"), [Kind(numel=1025)], DEVICE)
