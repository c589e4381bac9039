"""The C++ operator: every case within its derived bound, the same bits over threads and instruction sets, rounding."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import kernel_runs
import numpy as np
import pytest
import torch
from cases import (
    CASES,
    U,
    as_array,
    check,
    compare,
    expected,
    to_torch,
)
from kernel_runs import (
    CPU,
    MOMENTS,
    Run,
    copies,
    half_neighbourhood,
    join_bits,
    same_bits,
    split_bits,
)

from ruda_optim.fused_adamw import AdamWOptions, reference
from ruda_optim.fused_adamw.kernels import cpu
from ruda_optim.fused_adamw.storage import (
    COEFFICIENTS,
    LaunchTable,
    TensorMemory,
    adamw_scaled,
    coefficient_table,
)

CSRC = pathlib.Path(cpu.__file__).parents[1] / "csrc"
SUPPORT = pathlib.Path(__file__).parents[1] / "support"
HALF = (torch.float16, torch.bfloat16)


# ------------------------------------------------------------------------------------------------- values and layouts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_lies_within_its_bound(case) -> None:
    run = Run(case)
    for want in expected(case):
        run.advance()
        check(case, want, run.values())
    if case.parameter_dtype != "float32":
        assert same_bits(run.copy, run.master.to(run.copy.dtype))
    for tensor in (run.master, *run.moments.values()):  # what lies between and before the elements
        if case.layout == "every second":
            assert (tensor._base[..., 1::2] == 77).all()
        elif case.layout == "misaligned":
            assert tensor._base[0] == 77


@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_of_place_is_the_same_and_leaves_its_inputs(case) -> None:
    inside, outside = Run(case), Run(case)
    inside.advance(), outside.advance()
    gradient = outside.gradient()
    inputs = [outside.master, *outside.moments.values(), gradient]
    kept = [tensor.clone() for tensor in inputs]
    outputs = {
        f"{name}_out": to_torch(np.full(case.shape, np.nan), "float32", case.layout)
        for name in ("parameter", *outside.moments)
    }
    clip = expected(case)[1].clip_factor
    adamw_scaled(
        LaunchTable([outside.memory(gradient, outputs)], CPU),
        coefficient_table([case.options.prepare_step(1, case.control)]),
        case.control.inverse_scale,
        clip,
    )
    inside.advance()
    for before, after in zip(kept, inputs, strict=True):
        assert same_bits(before, after)
    for name in ("parameter", *outside.moments):
        assert same_bits(outputs[f"{name}_out"], inside.values()[name])


@pytest.mark.parametrize("case", [case for case in CASES if case.parameter_dtype == "bfloat16"], ids=str)
def test_split_master_moves_like_an_fp32_master(case) -> None:
    whole, split = Run(case), Run(case, split=True)
    for _ in range(case.steps):
        whole.advance(), split.advance()
        for name in ("parameter", *whole.moments):
            assert same_bits(whole.values()[name], split.values()[name])
        # The parameter: the master rounded to nearest, and only a tie may be rounded otherwise than torch does.
        distance = (split.parameter.double() - whole.master.double()).abs()
        assert (distance <= (whole.parameter.double() - whole.master.double()).abs()).all()


def test_one_table_gives_each_tensor_what_it_gets_alone() -> None:
    chosen = [case for case in CASES if case.max_norm is None and case.gradient_scale == 1 and case.steps == 5]
    together, alone = [Run(case) for case in chosen], [Run(case) for case in chosen]
    for _ in range(5):
        kernel_runs.step_together(together)
        for run in alone:
            run.advance()
    for left, right in zip(together, alone, strict=True):
        for name, tensor in left.values().items():
            assert same_bits(tensor, right.values()[name]), f"{left.case}: {name}"


def test_a_table_without_tensors_is_no_work() -> None:
    adamw_scaled(LaunchTable([], CPU), torch.empty(0, COEFFICIENTS))


# ------------------------------------------------------------------------------------ the same bits everywhere


def run_at_level(level: str, *threads: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SUPPORT / "kernel_runs.py", *threads],
        env={**os.environ, "RUDA_CPU_LEVEL": level, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def digests(result: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def own_digest() -> dict[str, str]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = kernel_runs.digest()
        torch.set_num_threads(2)
        assert kernel_runs.digest() == single, "two threads give other bits than one"
    finally:
        torch.set_num_threads(before)
    return single


def test_digest_tells_things_apart(own_digest) -> None:
    # Everything here differs in its inputs or in what is computed from them: equal hashes would mean a blind digest.
    mixed = [value for key, value in own_digest.items() if key.startswith(("one table", "statistics", "update"))]
    assert len(set(mixed)) == len(mixed)


@pytest.mark.parametrize("level", ["4", "3", "2", "0"])
def test_every_level_and_thread_count_gives_the_same_bits(level, own_digest) -> None:
    result = run_at_level(level, "1", "2")
    if f"got '{level}'" in result.stderr:
        pytest.skip(f"level {level} is not part of this build or not for this processor")
    for found in digests(result):
        assert found == own_digest


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    result = run_at_level("7", "1")
    assert result.returncode != 0
    message = re.search(r"RUDA_CPU_LEVEL must be one of ([\d, ]+) on this machine; got '7'", result.stderr)
    assert message, result.stderr
    assert str(cpu.level()) in message[1].split(", ")


# ------------------------------------------------------------------------------------------------- half types


@pytest.mark.parametrize("layout", ["contiguous", "every second"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_half_gradient_is_read_exactly(dtype, layout) -> None:
    """beta1 = 3/4 and no old moment: the new one is a quarter of the gradient, which FP32 holds exactly."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(256, 256)
    gradient = every
    if layout == "every second":
        gradient = torch.zeros(256, 512, dtype=dtype)[:, ::2].copy_(every)
    parameter, first, second = (torch.zeros(256, 256) for _ in range(3))
    table = LaunchTable([TensorMemory(gradient, parameter, first, second, first=True)], CPU)
    adamw_scaled(table, coefficient_table([AdamWOptions(beta1=0.75).prepare_step(0)]))
    quarter = every.float() / 4
    assert torch.equal(first.nan_to_num(nan=12345.0), quarter.nan_to_num(nan=12345.0))
    assert torch.equal(first.isnan(), every.isnan())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_copies_are_rounded_like_torchs(dtype) -> None:
    bits = half_neighbourhood(dtype)
    values = torch.from_numpy(bits.view(np.float32).copy())
    # An infinite master minus lr * weight_decay * itself is NaN; infinite copies come from masters too large for them.
    wanted = torch.where(values.isinf(), np.nan, values).to(dtype)
    assert (wanted.isinf()).any()
    assert (wanted.float().abs() < torch.finfo(dtype).tiny).any()
    found = copies(bits, dtype)
    assert same_bits(found, wanted)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_an_overflowing_update_is_infinite_in_master_and_copy(dtype) -> None:
    master = torch.tensor([-3.4e38, 3.4e38, 1.0] * 7)
    copy = master.to(dtype)
    gradient = torch.tensor([1.0, -1.0, 0.0] * 7)
    memory = TensorMemory(gradient, master, torch.zeros(21), torch.zeros(21), copy=copy, first=True)
    options = AdamWOptions(learning_rate=3e38, weight_decay=0)
    adamw_scaled(LaunchTable([memory], CPU), coefficient_table([options.prepare_step(0)]))
    wanted = torch.tensor([-np.inf, np.inf, 1.0] * 7)
    assert torch.equal(master, wanted)
    assert torch.equal(copy.float(), wanted)


@pytest.mark.parametrize("layout", ["contiguous", "misaligned", "every second", "transposed"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_half_parameter_that_somebody_wrote_is_what_a_step_starts_from(dtype, layout) -> None:
    """A clamp and a swap, in two of three blocks and in the tail: as if the master had held those values."""
    generator = torch.Generator().manual_seed(3)
    shape = (61, 43)
    values = torch.randn(shape, generator=generator)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return to_torch(tensor.float().numpy(), str(tensor.dtype).removeprefix("torch."), layout)

    written = values.to(dtype).clamp(-1.5, 0.75)
    written[:20] = values.to(dtype)[:20]  # the first block is as the last step left it
    written[-1, -3:] = torch.tensor([np.nan, np.inf, -0.0])
    written[40, 0] = values.to(dtype)[40, 0] + 1
    touched = written.view(torch.int16) != values.to(dtype).view(torch.int16)
    assert 100 < int(touched.sum()) < touched.numel() / 2
    results = []
    for start in (values, torch.where(touched, written.float(), values)):
        gradient = placed(torch.randn(shape, generator=generator.manual_seed(4)))
        master, first, second = placed(start), placed(torch.ones(shape)), placed(torch.ones(shape))
        copy = placed(written)
        table = LaunchTable([TensorMemory(gradient, master, first, second, copy=copy)], CPU)
        adamw_scaled(table, coefficient_table([AdamWOptions(learning_rate=0.1).prepare_step(6)]))
        assert same_bits(copy, master.to(dtype))
        results.append((master, first, second, copy))
    for disturbed, wanted in zip(*results, strict=True):
        assert same_bits(disturbed, wanted)
    assert int(results[0][0].isnan().sum()) == 2  # the NaN, and infinity less a part of itself


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_nan_beside_a_nan_is_one_whatever_its_payload(dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    copy = every[every.isnan()].clone()
    tensors = [torch.zeros(len(copy)) for _ in range(3)]
    master = torch.full((len(copy),), np.nan)
    adamw_scaled(
        LaunchTable([TensorMemory(tensors[0], master, *tensors[1:], copy=copy)], CPU),
        coefficient_table([AdamWOptions().prepare_step(0)]),
    )
    assert master.isnan().all()
    assert copy.isnan().all()


# Upper halves: both zeros, subnormals, 1, the largest finite values (whose upper neighbour is infinity).
UPPER = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x4049, 0x7F7E, 0x7F7F]


def test_a_split_master_keeps_all_32_bits() -> None:
    upper = np.array(UPPER + [high | 0x8000 for high in UPPER], dtype=np.uint32)
    bits = (upper[:, None] << np.uint32(16) | np.arange(2**16, dtype=np.uint32)).reshape(-1)
    parameter, remainder = split_bits(bits)
    assert (join_bits(parameter, remainder) == bits).all()
    zeros = [torch.zeros(len(bits)) for _ in range(3)]
    memory = TensorMemory(zeros[0], None, *zeros[1:], copy=parameter, remainder=remainder)
    options = AdamWOptions(learning_rate=0, weight_decay=0)
    for _ in range(2):
        adamw_scaled(LaunchTable([memory_of(memory, zeros[0])], CPU), coefficient_table([options.prepare_step(0)]))
        np.testing.assert_array_equal(join_bits(parameter, remainder), bits)
    wanted = split_bits(bits)
    assert torch.equal(parameter.view(torch.int16), wanted[0].view(torch.int16))


def memory_of(memory: TensorMemory, gradient: torch.Tensor) -> TensorMemory:
    """A table takes the gradient out of its description: put it back for the next table."""
    memory.gradient = gradient
    return memory


def test_a_split_master_that_is_not_a_number_stays_none() -> None:
    bits = np.array([0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32)
    # Stored as no kernel would store them: the upper bits and the lower bits as they are.
    parameter = torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    remainder = torch.zeros_like(parameter)
    parameter[0] = parameter[-1] = np.nan
    zeros = [torch.zeros(len(bits)) for _ in range(3)]
    memory = TensorMemory(zeros[0], None, *zeros[1:], copy=parameter, remainder=remainder)
    options = AdamWOptions(learning_rate=0, weight_decay=0)
    adamw_scaled(LaunchTable([memory], CPU), coefficient_table([options.prepare_step(0)]))
    assert parameter.isnan().all()
    assert np.isnan(join_bits(parameter, remainder).view(np.float32)).all()


# ------------------------------------------------------------------------------------------------------ accuracy


@pytest.fixture
def one_thread():
    """Many short parallel regions crawl where other processes keep the second core busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_thousand_steps_are_at_least_as_accurate_as_torchs_fused_step(amsgrad) -> None:
    """Root mean square error of the parameters against FP64, 1000 steps on 100,003 elements from the same start."""
    count, steps = 100_003, 1000
    random = torch.Generator().manual_seed(5)
    start = torch.randn(count, generator=random)
    scale = 10.0 ** (torch.rand(count, generator=random) * 4 - 3)
    options = AdamWOptions(1e-3, 0.9, 0.999, 1e-8, 1e-2, amsgrad=amsgrad)

    torchs = start.clone().requires_grad_()
    fused = torch.optim.AdamW([torchs], 1e-3, (0.9, 0.999), 1e-8, 1e-2, amsgrad=amsgrad, fused=True)
    exact = start.double().requires_grad_()
    wide_adamw = torch.optim.AdamW([exact], 1e-3, (0.9, 0.999), 1e-8, 1e-2, amsgrad=amsgrad, foreach=False)
    ours = start.clone()
    moments = [torch.zeros(count) for _ in range(3 if amsgrad else 2)]
    gradient, wide = torch.empty(count), torch.empty(count, dtype=torch.float64)
    torchs.grad, exact.grad = gradient, wide
    table = LaunchTable([TensorMemory(gradient, ours, *moments)], CPU)
    for step in range(steps):
        gradient.normal_(generator=random).mul_(scale)
        wide.copy_(gradient)
        fused.step()
        wide_adamw.step()
        adamw_scaled(table, coefficient_table([options.prepare_step(step)]))

    def error(found: torch.Tensor) -> float:
        return float((found.detach().double() - exact.detach()).square().mean().sqrt())

    ratio = error(ours) / error(torchs)
    assert ratio <= 1, (
        f"RMS error {error(ours):.3e}, torch's fused step {error(torchs):.3e}: {ratio:.3f} times as large"
    )


# ---------------------------------------------------------------------------------------------- special values


def stepped(gradients: list[float], options: AdamWOptions, parameter: float = 1.0) -> dict[str, torch.Tensor]:
    """Eighteen equal elements (a vector and a tail) after one update per gradient."""
    tensors = {"parameter": torch.full((18,), parameter)}
    for name in MOMENTS[: 3 if options.amsgrad else 2]:
        tensors[name] = torch.full((18,), np.nan)
    for step, value in enumerate(gradients):
        gradient = torch.full((18,), value)
        table = LaunchTable([TensorMemory(gradient, **tensors, first=step == 0)], CPU)
        adamw_scaled(table, coefficient_table([options.prepare_step(step)]))
    for tensor in tensors.values():
        assert same_bits(tensor, tensor[:1].expand(18)), "the tail differs from the vector body"
    return {name: tensor[0] for name, tensor in tensors.items()}


@pytest.mark.parametrize("beta", [0.0, 2.0**-20])
def test_a_beta_near_zero_does_not_lose_a_falling_moment(beta) -> None:
    """The form old + w * (x - old) would leave 0 of x = 1e-10 after old = 1e15."""
    found = stepped([1e15, 1e-10], AdamWOptions(beta1=beta, beta2=beta, epsilon=1e-30))
    for name, old, new in (("exp_avg", 1e15, 1e-10), ("exp_avg_sq", 1e30, 1e-20)):
        compare(name, found[name], beta * (1 - beta) * old + (1 - beta) * new, 4 * U * (beta * old + new))
    if beta == 0:
        assert found["exp_avg"] == np.float32(1e-10)
        assert found["exp_avg_sq"] == np.float32(1e-10) * np.float32(1e-10)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("beta2", [0.999, 0.25])
def test_an_overflowed_second_moment_stays_infinite(beta2, amsgrad) -> None:
    options = AdamWOptions(beta2=beta2, amsgrad=amsgrad, weight_decay=0)
    found = stepped([1e30, 1.0, 1e-3], options)
    assert found["exp_avg_sq"] == np.inf
    assert found["parameter"] == 1.0, "divided by infinity, no gradient moves the element"
    assert found["exp_avg"].isfinite()
    if amsgrad:
        assert found["max_exp_avg_sq"] == np.inf


@pytest.mark.parametrize(
    ("gradients", "amsgrad"),
    [
        ([np.nan], False),
        ([np.nan], True),
        ([1.0, np.nan], True),
        ([np.nan, 1.0], True),
        ([1.0, np.nan, 1.0], True),
        ([1e30, np.nan], True),
        ([1e30, np.nan, 1.0], False),
        ([np.inf], False),
        ([1.0, -np.inf], True),
    ],
)
def test_nan_and_infinity_go_where_ieee_sends_them(gradients, amsgrad) -> None:
    options = AdamWOptions(amsgrad=amsgrad)
    found = stepped(gradients, options)
    parameter, state = np.ones(1), None
    for value in gradients:
        gradient = np.array([value])
        parameter, state = reference.adamw(parameter, gradient, state, options)
    wanted = {"parameter": parameter, "exp_avg": state.first_moment, "exp_avg_sq": state.second_moment}
    if amsgrad:
        wanted["max_exp_avg_sq"] = state.max_second_moment
    for name, value in wanted.items():
        got = as_array(found[name])
        assert (np.isnan(got), np.isinf(got)) == (np.isnan(value[0]), np.isinf(value[0])), name


def test_unscaling_comes_before_clipping() -> None:
    """Folded into one factor, 3e38 / 0.25 * 0.125 would be finite; unscaled first, it overflows."""
    gradient, parameter = torch.full((18,), 3e38), torch.ones(18)
    first, second = torch.zeros(18), torch.zeros(18)
    table = LaunchTable([TensorMemory(gradient, parameter, first, second)], CPU)
    adamw_scaled(table, coefficient_table([AdamWOptions().prepare_step(0)]), 4.0, 0.125)
    assert (first == np.inf).all()
