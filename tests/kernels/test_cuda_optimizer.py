"""``ruda_torch.AdamW`` on a GPU: the CPU's bits, streams, launches, host reads, CUDA graphs, scalers, compiled steps.

Run like test_cuda.py, by the suite ``cuda``.
"""

from __future__ import annotations

import math
import warnings

import cases
import pytest
import torch
from cuda_runs import (
    CPU,
    DEVICE,
    contents,
    device_kernels,
    give_gradients,
    needs_gpu,
    needs_hardware,
    optimizer_of,
    parameters_of,
    require,
    sumsq_of,
)
from test_cuda import CHAIN
from test_nvrtc import assert_same_bits

import ruda_torch

pytestmark = [
    needs_gpu,
    # Inductor itself still imports a deprecated part of torch.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


@pytest.fixture(params=["nvrtc", "ptx"])
def compiler(request, monkeypatch) -> str:
    require(request.param)
    monkeypatch.setenv("RUDA_CUDA_COMPILER", request.param)
    return request.param


def made(kind: str = "fp32", device: torch.device = DEVICE, **options) -> tuple[list, ruda_torch.AdamW]:
    parameters = parameters_of(kind, device)
    return parameters, optimizer_of(parameters, **options)


def norm_of(parameters: list[torch.nn.Parameter]) -> float:
    return math.sqrt(sumsq_of([parameter.grad for parameter in parameters]))


# ------------------------------------------------------------------------------------------------- values and state


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "mixed", "strided", "misaligned"])
def test_steps_have_the_bits_of_the_cpu(kind, amsgrad, compiler) -> None:
    results = []
    for device in (DEVICE, CPU):
        parameters, optimizer = made(kind, device, amsgrad=amsgrad, hierarchical_stats=True)
        for seed in range(4):
            give_gradients(parameters, seed)
            if seed == 2:
                parameters[1].grad = None  # its counter falls behind
                optimizer.param_groups[0]["lr"] = 2e-2
            optimizer.step()
            assert not optimizer.last_step_skipped
        results.append(contents(optimizer))
    assert_same_bits(*results)


def test_split_masters_bf16_have_the_bits_of_the_cpu(compiler) -> None:
    results = []
    for device in (DEVICE, CPU):
        parameters, optimizer = made("bf16", device, split_master=True)
        for seed in range(3):
            give_gradients(parameters, seed)
            optimizer.step()
        results.append(contents(optimizer))
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "mixed"])
def test_norm_and_clip_factor(kind, compiler) -> None:
    parameters, optimizer = made(kind, max_grad_norm=1.0)
    give_gradients(parameters, 0)
    before = [parameter.grad.clone() for parameter in parameters]
    optimizer.step()
    norm = norm_of(parameters)
    relative = cases.norm_relative_bound(chain=CHAIN[compiler])
    assert abs(optimizer.last_grad_norm - norm) <= relative * norm
    factor = 1.0 / (norm + 1e-6)
    assert abs(optimizer.last_clip_factor - factor) <= (relative + 2 * cases.U) * factor
    for number, some in enumerate((parameters[:3], parameters[3:])):
        want = norm_of(some)
        assert abs(optimizer.last_group_norms[number] - want) <= relative * want
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_skips_the_whole_step(kind, compiler) -> None:
    parameters, optimizer = made(kind)
    give_gradients(parameters, 0)
    optimizer.step()
    before = contents(optimizer)
    give_gradients(parameters, 1)
    parameters[6].grad[-1] = math.nan
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1
    assert_same_bits(contents(optimizer), before)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_checkpoint_goes_to_the_cpu_and_back(kind, compiler) -> None:
    parameters, optimizer = made(kind)
    copies, other = made(kind, CPU)
    for seed, (source, source_parameters, target, target_parameters) in enumerate(
        [(optimizer, parameters, other, copies), (other, copies, optimizer, parameters)]
    ):
        give_gradients(source_parameters, seed)
        source.step()
        target.load_state_dict(source.state_dict())
        with torch.no_grad():
            for new, old in zip(target_parameters, source_parameters, strict=True):
                new.copy_(old)
        assert_same_bits(contents(target), contents(source))


# ------------------------------------------------------------------------------------------------------- the device


def steady(optimizer: ruda_torch.AdamW, parameters: list[torch.nn.Parameter]) -> None:
    """Two steps, after which everything is allocated and compiled."""
    for seed in range(2):
        give_gradients(parameters, seed)
        optimizer.step()
    torch.cuda.synchronize()


OPTIONS = {"unchecked": {"check_finite": False}, "checked": {}, "clipped": {"max_grad_norm": 1.0}}


@needs_hardware
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("kind", ["fp32", "bf16", "mixed"])
def test_launches_of_a_step(kind, options, compiler) -> None:
    """Statistics where there is a question, decision, update. What counts the step of an empty tensor is torch's."""
    parameters, optimizer = made(kind, **options)
    steady(optimizer, parameters)
    kernels = [name for name in device_kernels(optimizer.step) if "at::native" not in name]
    assert len(kernels) == (2 if options == OPTIONS["unchecked"] else 3), kernels


def host_reads(call) -> int:
    """How often torch waited for the device during ``call``."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns that it does not see every wait
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


@needs_hardware
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_the_host_waits_for_nothing(options, compiler) -> None:
    parameters, optimizer = made("fp32", **options)
    steady(optimizer, parameters)
    assert host_reads(lambda: float(parameters[0].detach().flatten()[0])) == 1, "torch tells of a read"
    assert host_reads(optimizer.step) == 0
    give_gradients(parameters, 5)  # other gradient tensors
    optimizer.param_groups[0]["lr"] = 3e-3
    assert host_reads(optimizer.step) == 0
    assert host_reads(lambda: optimizer.last_step_skipped) >= 1, "who asks, waits"


@needs_hardware
def test_a_steady_step_allocates_nothing(compiler) -> None:
    parameters, optimizer = made("fp32", max_grad_norm=1.0)
    steady(optimizer, parameters)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    optimizer.step()
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before


@needs_hardware
def test_work_follows_the_current_stream(compiler) -> None:
    results = []
    for device in (DEVICE, CPU):
        parameters, optimizer = made("mixed", device, max_grad_norm=1e30)
        streams = [torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE), torch.cuda.default_stream(DEVICE)]
        for seed in range(6):
            if device is CPU:
                give_gradients(parameters, seed)
                optimizer.step()
                continue
            stream, previous = streams[seed % 3], torch.cuda.current_stream(DEVICE)
            stream.wait_stream(previous)
            with torch.cuda.stream(stream):
                wanted = parameters_of("mixed", CPU)
                give_gradients(wanted, seed)
                late = []
                for parameter, source in zip(parameters, wanted, strict=True):
                    parameter.grad = torch.full_like(parameter, math.nan)
                    late.append(source.grad.pin_memory() if source.grad.numel() else source.grad)
                torch.cuda._sleep(50_000_000)  # tens of milliseconds, in which a step on another stream would be done
                for parameter, source in zip(parameters, late, strict=True):
                    parameter.grad.copy_(source, non_blocking=True)
                optimizer.step()
                assert not optimizer.last_step_skipped, "the step saw gradients that were not there yet"
                optimizer.zero_grad(set_to_none=True)
                for parameter in parameters:  # takes the gradients' memory while the update may still run
                    torch.full_like(parameter, math.nan)
            torch.cuda.current_stream(DEVICE).wait_stream(stream)
        torch.cuda.synchronize()
        results.append(contents(optimizer))
    assert_same_bits(*results)


@needs_hardware
def test_hundreds_of_steps_ahead_of_the_device(compiler) -> None:
    """The host runs ahead: staged coefficients and pointers must not be overwritten before they were copied."""
    results = []
    for device in (DEVICE, CPU):
        parameters, optimizer = made("fp32", device, check_finite=False)
        give_gradients(parameters, 0)
        kept = [[parameter.grad.clone() for parameter in parameters] for _ in range(2)]
        if device is DEVICE:
            torch.cuda._sleep(200_000_000)
        for step in range(200):
            for parameter, gradient in zip(parameters, kept[step % 2], strict=True):
                parameter.grad = gradient
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            optimizer.step()
        results.append(contents(optimizer))
    assert_same_bits(*results)


# ------------------------------------------------------------------------------------------------------ CUDA graphs


def capture(optimizer: ruda_torch.AdamW, parameters: list[torch.nn.Parameter]) -> torch.cuda.CUDAGraph:
    """A graph of one step over the gradients' present memory; one step outside of it comes first."""
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@needs_hardware
@pytest.mark.parametrize("kind", ["fp32", "bf16", "mixed"])
def test_a_replayed_graph_equals_eager_steps(kind, compiler) -> None:
    twins = []
    for _ in range(2):
        parameters, optimizer = made(kind, max_grad_norm=1.0)
        lr = torch.tensor(1e-2, device=DEVICE)
        optimizer.param_groups[0]["lr"] = lr
        give_gradients(parameters, 0)
        twins.append((parameters, optimizer, lr))
    (parameters, optimizer, lr), (eager_parameters, eager, eager_lr) = twins
    graph = capture(optimizer, parameters)
    eager.step()
    for seed in range(1, 6):
        for some, rate in ((parameters, lr), (eager_parameters, eager_lr)):
            source = parameters_of(kind, CPU)
            give_gradients(source, seed)
            if seed == 3:
                source[6].grad[0] = math.inf
            for parameter, other in zip(some, source, strict=True):
                parameter.grad.copy_(other.grad)
            rate.fill_(1e-2 / seed)
        graph.replay()
        eager.step()
        assert optimizer.last_step_skipped == eager.last_step_skipped == (seed == 3)
        assert optimizer.last_grad_norm == eager.last_grad_norm
        assert_same_bits(contents(optimizer), contents(eager))
    assert optimizer.skipped_steps == eager.skipped_steps == 1


@needs_hardware
def test_replays_hear_max_grad_norm_and_outlive_the_plan(compiler) -> None:
    """Setting it makes a new plan; what the graph uses of the old one stays."""
    parameters, optimizer = made("fp32", max_grad_norm=1.0)
    give_gradients(parameters, 0)
    graph = capture(optimizer, parameters)
    optimizer.max_grad_norm = 0.25
    others = [torch.full((1 << 20,), math.nan, device=DEVICE) for _ in range(8)]  # takes memory that was freed
    graph.replay()
    factor = 0.25 / (norm_of(parameters) + 1e-6)
    assert (
        abs(optimizer.last_clip_factor - factor) <= (cases.norm_relative_bound(chain=CHAIN[compiler]) + 2e-7) * factor
    )
    assert not any(bool(parameter.isnan().any()) for parameter in parameters)
    del others


# ------------------------------------------------------------------------------------------- compiled steps, scaling


@needs_hardware
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_has_the_eager_bits(backend, compiler) -> None:
    torch._dynamo.reset()
    parameters, optimizer = made("fp32", max_grad_norm=1.0)
    eager_parameters, eager = made("fp32", max_grad_norm=1.0)

    @torch.compile(backend=backend, fullgraph=True)
    def step() -> None:
        optimizer.step()

    for seed in range(3):
        for some in (parameters, eager_parameters):
            give_gradients(some, seed)
        for each in (optimizer, eager):
            each.param_groups[0]["lr"] = 1e-2 / (1 + seed)
        step()
        eager.step()
        assert_same_bits(contents(optimizer), contents(eager))
    torch._dynamo.reset()


@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, ruda_torch.GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_scaled_steps_equal_unscaled_ones_and_overflow_skips(kind, capturable, scaler_of, compiler) -> None:
    parameters, optimizer = made(kind, capturable=capturable)
    plain_parameters, plain = made(kind, capturable=capturable)
    scaler = scaler_of(DEVICE.type, init_scale=256.0, growth_interval=1000)
    scaler.scale(torch.ones((), device=DEVICE))  # makes the scale, which a training loop's loss does
    for seed in range(3):
        give_gradients(plain_parameters, seed)
        if seed == 2:
            plain_parameters[0].grad[0] = math.inf
        for parameter, other in zip(parameters, plain_parameters, strict=True):
            parameter.grad = other.grad * 256.0  # a power of two changes no bit
        scaler.step(optimizer)
        scaler.update()
        plain.step()
        assert_same_bits(contents(optimizer), contents(plain))
        assert scaler.get_scale() == (256.0 if seed < 2 else 128.0)
    assert optimizer.skipped_steps == plain.skipped_steps == 1
