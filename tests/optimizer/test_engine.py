"""The one engine: what a GPU runs, driven on the CPU by the simulated CUDA kernels; no hardware involved.

What only hardware can show (graph capture and replay, streams) is in the ``cuda`` suite of the regression runner.
"""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import simulated_backend
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ruda_torch
from ruda_optim.fused_adamw import InvalidState, InvalidTensor, kernels
from ruda_torch import control, engine

needs_simulator = pytest.mark.skipif(
    simulated_backend.unavailable() is not None, reason=str(simulated_backend.unavailable())
)
SHAPES = ((5, 3), (0,), (300,))


@pytest.fixture
def simulated(monkeypatch):
    """The simulated CUDA kernels in the CPU's place, and a CPU that counts as an accelerator: nothing may be read."""
    if simulated_backend.unavailable() is not None:
        pytest.skip(str(simulated_backend.unavailable()))
    monkeypatch.setitem(kernels._loaded, "cpu", simulated_backend.kernels())
    for module in (control, engine):
        monkeypatch.setattr(module, "on_host", lambda device: False)


def _optimizer(**options) -> tuple[list[torch.nn.Parameter], ruda_torch.AdamW]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.randn(9, generator=generator).bfloat16()))
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "lr": 3e-3}]
    return parameters, ruda_torch.AdamW(groups, lr=1e-2, fused_step=True, **options)


def _give_gradients(parameters: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).mul_(scale).to(parameter.dtype)


def _tensors(parameters, optimizer) -> list[torch.Tensor]:
    """Parameters and every state tensor but the step counters, which may be on another device."""
    found = []
    for parameter in parameters:
        found.append(parameter.detach())
        found += [value for key, value in optimizer.state.get(parameter, {}).items() if key != "step"]
    return found


def _steps(parameters, optimizer) -> list[float]:
    return [float(optimizer.state[parameter]["step"]) for parameter in parameters]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_an_accelerator_takes_the_steps_of_the_cpu(amsgrad, max_grad_norm, request):
    options = {"amsgrad": amsgrad, "max_grad_norm": max_grad_norm}
    found = {}
    for where in ("cpu", "simulated"):
        if where == "simulated":
            request.getfixturevalue("simulated")
        parameters, optimizer = _optimizer(**options)
        reports = []
        for seed in range(4):
            _give_gradients(parameters, seed)
            if seed == 2:  # one bad element: nothing may move
                parameters[2].grad[-1] = math.inf
            optimizer.param_groups[1]["lr"] = 3e-3 / (seed + 1)
            optimizer.step()
            numbers = (optimizer.last_grad_norm, optimizer.last_clip_factor, *optimizer.last_group_norms)
            reports.append((optimizer.last_step_skipped, *numbers))
        assert [report[0] for report in reports] == [False, False, True, False]
        assert optimizer.skipped_steps == 1
        assert _steps(parameters, optimizer) == [3.0] * 4
        found[where] = reports, [tensor.clone() for tensor in _tensors(parameters, optimizer)]
    # The statistics rows are cut in other places, so the norms differ by their FP32 sums: some roundings of 2^-24.
    for left, right in zip(*(reports for reports, _ in found.values()), strict=True):
        assert left == pytest.approx(right, rel=2**-20)
    # The same norm error, twice, enters moments and updates through the clip factor. The device raises beta to the step
    # by another pow: the FP32 bias corrections agree but for a rare last bit, on a step of at most lr / (1 - beta1).
    for left, right in zip(*(tensors for _, tensors in found.values()), strict=True):
        if left.dtype is torch.bfloat16:
            left, right = left.view(torch.int16), right.view(torch.int16)
            assert (left - right).abs().max() <= 2**10, "the remainder of a split master"
        else:
            assert torch.allclose(left.float(), right.float(), rtol=2**-19, atol=3 * 1e-1 * 2**-20)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("moments", ["bfloat16", "packed16"])
def test_an_accelerator_stores_the_words_of_the_cpu(moments, amsgrad, request):
    """Bit for bit: nothing is clipped, and the powers of these decays are FP64 numbers that every pow returns."""
    found = {}
    for where in ("cpu", "simulated"):
        if where == "simulated":
            request.getfixturevalue("simulated")
        parameters, optimizer = _optimizer(amsgrad=amsgrad, moments=moments, betas=(0.75, 0.5), max_grad_norm=math.inf)
        for seed in range(4):
            _give_gradients(parameters, seed)
            if seed == 2:
                parameters[2].grad[-1] = math.inf
            optimizer.step()
        assert _steps(parameters, optimizer) == [3.0] * 4
        found[where] = [tensor.contiguous().clone() for tensor in _tensors(parameters, optimizer)]
    for left, right in zip(*found.values(), strict=True):
        assert left.dtype is right.dtype
        assert torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))


def test_scale_and_found_inf_stay_on_the_device(simulated):
    parameters, optimizer = _optimizer(max_grad_norm=1.0)
    plain_parameters, plain = _optimizer(max_grad_norm=1.0)
    _give_gradients(parameters, 0, scale=1024.0)
    _give_gradients(plain_parameters, 0)
    optimizer.grad_scale = torch.tensor(1024.0)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    plain.step()
    assert optimizer.last_grad_norm == plain.last_grad_norm
    assert optimizer.last_clip_factor == plain.last_clip_factor
    assert optimizer.last_group_norms == plain.last_group_norms
    for left, right in zip(_tensors(parameters, optimizer), _tensors(plain_parameters, plain), strict=True):
        assert torch.equal(left, right), "a power of two changes no bit"
    optimizer.found_inf = torch.tensor(2.0)
    before = [tensor.clone() for tensor in _tensors(parameters, optimizer)]
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.last_grad_norm == math.inf
    assert all(map(torch.equal, _tensors(parameters, optimizer), before))
    assert _steps(parameters, optimizer) == [1.0] * 4


def test_found_inf_alone_decides_when_nothing_is_checked(simulated):
    parameters, optimizer = _optimizer(check_finite=False)
    _give_gradients(parameters, 0)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert _steps(parameters, optimizer) == [0.0] * 4
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert _steps(parameters, optimizer) == [1.0] * 4
    del optimizer.found_inf
    parameters[0].grad[0] = math.nan
    optimizer.step()
    assert math.isnan(parameters[0][0, 0].item()), "with the check off, NaN goes where it goes"
    assert math.isnan(optimizer.last_grad_norm)


def test_a_tensor_learning_rate_is_read_at_every_step(simulated):
    parameters, optimizer = _optimizer()
    reference_parameters, reference = _optimizer()
    lr = torch.tensor(1e-2)
    optimizer.param_groups[0]["lr"] = lr
    for value in (1e-2, 2e-3):
        lr.fill_(value)
        reference.param_groups[0]["lr"] = float(lr)
        for some in (parameters, reference_parameters):
            _give_gradients(some, 1)
        optimizer.step()
        reference.step()
    for left, right in zip(_tensors(parameters, optimizer), _tensors(reference_parameters, reference), strict=True):
        assert torch.equal(left, right)


def test_a_host_checkpoint_continues_on_the_device_and_back(simulated):
    parameters, host = _optimizer()
    _give_gradients(parameters, 0)
    host.step()
    copies, device = _optimizer()
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.data.copy_(parameter)
    device.load_state_dict(host.state_dict())
    for some, optimizer in ((parameters, host), (copies, device)):
        _give_gradients(some, 1)
        optimizer.step()
    assert _steps(copies, device) == [2.0] * 4
    back_parameters, back = _optimizer()
    back.load_state_dict(device.state_dict())
    assert [float(back.state[p]["step"]) for p in back_parameters] == [2.0] * 4


def test_capturable_is_accepted_everywhere_and_changes_nothing():
    found = []
    for capturable in (False, True):
        parameters, optimizer = _optimizer(capturable=capturable, max_grad_norm=0.5)
        for seed in range(3):
            _give_gradients(parameters, seed)
            optimizer.step()
        assert optimizer.param_groups[0]["capturable"] is capturable
        found.append([tensor.clone().view(torch.uint8) for tensor in _tensors(parameters, optimizer)])
    assert all(map(torch.equal, *found))


def test_a_bad_gradient_is_an_error_before_anything_changes(simulated):
    parameters, optimizer = _optimizer()
    _give_gradients(parameters, 0)
    parameters[2].grad = None
    parameters[2].grad_dtype = None
    parameters[2].grad = torch.zeros(300, dtype=torch.float64)
    with pytest.raises(InvalidTensor, match="the gradient of parameter 0 of group 1 must be float32"):
        optimizer.step()
    assert not optimizer.state


def test_a_gradient_that_overflows_in_unscaling_is_skipped(simulated):
    parameters, optimizer = _optimizer()
    _give_gradients(parameters, 0)
    parameters[0].grad[0] = 3e38
    optimizer.grad_scale = torch.tensor(2.0**-10)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.last_grad_norm == math.inf
    assert _steps(parameters, optimizer) == [0.0] * 4


def test_found_inf_of_0_does_not_switch_the_check_on(simulated):
    parameters, optimizer = _optimizer(check_finite=False, max_grad_norm=1.0)
    host_parameters, host = _optimizer(check_finite=False, max_grad_norm=1.0)
    for some, one in ((parameters, optimizer), (host_parameters, host)):
        _give_gradients(some, 0)
        some[0].grad[0] = math.inf
        one.found_inf = torch.tensor(0.0)
        one.step()
    assert optimizer.last_step_skipped == host.last_step_skipped is False
    assert _steps(parameters, optimizer) == _steps(host_parameters, host) == [1.0] * 4


# ------------------------------------------------------------------------------------------- nothing reads the device


def _is_computed(tensor):
    """Numbers that a device computes, or the counters; launch tables are int64 and belong to the host."""
    return tensor.is_floating_point() or tensor.shape == (2,)


class NoReads(TorchDispatchMode):
    """Fails on every scalar read and on every copy to the host of something that a device computes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_to_copy") and _is_computed(args[0]):
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_reads(monkeypatch):
    """Whatever reads a tensor of floating-point numbers, or the counters, without the dispatcher."""

    def guarded(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            assert not _is_computed(tensor), f"Tensor.{name} waits for the device"
            return original(tensor, *args, **kwargs)

        return read

    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, guarded(name))


@pytest.mark.parametrize(
    "case", ["plain", "checked", "clipped", "scaled", "told", "tensor hyperparameters", "some gradients", "packed16"]
)
def test_no_step_reads_the_device(simulated, no_reads, case):
    options = {"max_grad_norm": 1.0} if case in ("clipped", "scaled", "told") else {"check_finite": case != "plain"}
    parameters, optimizer = _optimizer(**options, moments="packed16" if case == "packed16" else "float32")
    if case == "tensor hyperparameters":
        optimizer.param_groups[0].update(lr=torch.tensor(1e-2), weight_decay=torch.tensor(0.1))
        optimizer.param_groups[1]["betas"] = (torch.tensor(0.9), torch.tensor(0.99))
    for seed in range(3):
        _give_gradients(parameters, seed)
        if case == "some gradients" and seed:
            parameters[2].grad = parameters[3].grad = None
        if case in ("scaled", "told"):
            optimizer.grad_scale = torch.tensor(128.0)
        if case == "told":
            optimizer.found_inf = torch.tensor(float(seed == 1))
        with NoReads():
            optimizer.step()


def test_the_guard_against_reads_can_fail(no_reads):
    with pytest.raises(AssertionError, match="waits for the device"):
        float(torch.tensor(1.0))
    with NoReads(), pytest.raises(AssertionError, match="_to_copy waits"):
        torch.ones(2).to(torch.float64)


@needs_simulator
@pytest.mark.parametrize("hierarchical_stats", [False, True])
def test_a_step_is_at_most_three_launches(simulated, monkeypatch, hierarchical_stats):
    record = simulated_backend.kernels()
    launches = []
    for name in ("analyze_gradient", "merge_gradient_stats_chunks", "merge_gradient_stats", "decide", "adamw_scaled"):
        original = getattr(record, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            launches.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setitem(record.__dict__, name, counted)
    parameters, optimizer = _optimizer(max_grad_norm=1.0, hierarchical_stats=hierarchical_stats)
    for seed in range(2):
        _give_gradients(parameters, seed)
        launches.clear()
        optimizer.step()
        assert launches == ["analyze_gradient", "decide", "adamw_scaled"]


def test_a_new_largest_norm_reaches_memory_that_a_graph_replays(simulated):
    parameters, optimizer = _optimizer(max_grad_norm=1.0)
    _give_gradients(parameters, 0)
    optimizer.step()
    memory = optimizer._live.engine.outcome.memory
    optimizer.max_grad_norm = 0.25
    assert memory.hyperparameters[:, 6].tolist() == [0.25, 0.25]
    optimizer.step()
    assert optimizer._live.engine.outcome.memory is memory
    assert optimizer.last_clip_factor == pytest.approx(0.25 / optimizer.last_grad_norm, rel=1e-5)


def test_a_launch_that_fails_half_way_is_said_until_a_checkpoint_is_loaded(simulated, monkeypatch):
    parameters, optimizer = _optimizer(max_grad_norm=1.0)
    _give_gradients(parameters, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    record = simulated_backend.kernels()

    def fail(*args, **kwargs):
        raise RuntimeError("the launch failed (made up)")

    with monkeypatch.context() as patch:
        patch.setitem(record.__dict__, "adamw_scaled", fail)
        with pytest.raises(RuntimeError, match="made up"):
            optimizer.step()
    for use in (optimizer.step, optimizer.state_dict):
        for _ in range(2):
            with pytest.raises(InvalidState, match=r"launched in part only.*made up.*load a checkpoint"):
                use()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state_dict()["state"]


# --------------------------------------------------------------------------------------- whose tensors these are


def _references(optimizer) -> list[weakref.ref]:
    return [weakref.ref(value) for entry in vars(optimizer)["state"].values() for value in entry.values()]


@pytest.mark.parametrize("take_out", ["moments", "entry", "state", "other gradients"])
def test_state_that_is_taken_out_is_freed_at_once(take_out):
    """pytorch#144397 and others: people empty the state to make room."""
    parameters, optimizer = _optimizer(max_grad_norm=1.0)
    for seed in range(3):
        _give_gradients(parameters, seed)
        if take_out == "other gradients" and seed == 2:
            parameters[2].grad = None
        optimizer.step()
    alive = _references(optimizer)
    if take_out == "moments":
        for entry in optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg_sq"] = entry["step"] = None
            entry.pop("master_remainder", None)
    elif take_out == "entry":
        for parameter in parameters:
            del optimizer.state[parameter]
    else:
        optimizer.state = type(optimizer.state)(dict)
    assert [reference() for reference in alive] == [None] * len(alive)


def test_a_parameter_that_is_replaced_is_freed():
    """gaussian-splatting#897: points are added by replacing parameters."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ruda_torch.AdamW([parameter], lr=0.1, fused_step=True)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        optimizer.step()
    gone = weakref.ref(parameter)
    longer = torch.nn.Parameter(torch.ones(6))
    entry = optimizer.state.pop(parameter)
    for name in ("exp_avg", "exp_avg_sq"):
        entry[name] = torch.cat([entry[name], torch.zeros(2)])
    optimizer.param_groups[0]["params"][0] = longer
    optimizer.state[longer] = entry
    del parameter
    gc.collect()
    assert gone() is None
    longer.grad = torch.ones(6)
    optimizer.step()
    assert float(optimizer.state[longer]["step"]) == 3.0


def test_fake_tensors_get_a_state_and_nothing_is_launched(monkeypatch):
    """pytorch#93654: memory is estimated by taking a step that has none."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        model = torch.nn.Linear(300, 200, dtype=torch.bfloat16)
        optimizer = ruda_torch.AdamW(model.parameters(), fused_step=True, max_grad_norm=1.0, amsgrad=True)
        for _ in range(2):
            model(torch.randn(8, 300, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            entry = optimizer.state[parameter]
            assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_remainder"}
            for name, tensor in entry.items():
                assert isinstance(tensor, FakeTensor)
                assert tensor.shape == (() if name == "step" else parameter.shape)
                assert tensor.dtype is (torch.bfloat16 if name == "master_remainder" else torch.float32)


def test_many_patterns_of_gradients_share_one_plan(monkeypatch):
    """Adapters and experts: no pattern builds a plan once every parameter has been seen."""
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(12)]
    optimizer = ruda_torch.AdamW(parameters, fused_step=True, max_grad_norm=1.0)
    twin_parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    twin = torch.optim.AdamW(twin_parameters)
    built = []
    original = engine.NewPlan
    monkeypatch.setattr(engine, "NewPlan", lambda *args: built.append(1) or original(*args))
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        chosen = torch.rand(12, generator=generator) < 0.3 if number else torch.ones(12, dtype=torch.bool)
        for p, q, active in zip(parameters, twin_parameters, chosen.tolist(), strict=True):
            p.grad = torch.randn(3, generator=generator) if active else None
            q.grad = None if p.grad is None else p.grad.clone()
        torch.nn.utils.clip_grad_norm_([q for q in twin_parameters if q.grad is not None], 1.0)
        optimizer.step()
        twin.step()
    assert len(built) == 1
    for p, q in zip(parameters, twin_parameters, strict=True):
        assert optimizer.state[p]["step"] == twin.state[q]["step"]
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


def test_steps_before_the_first_gradient_do_nothing():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True, max_grad_norm=1.0)
    for _ in range(2):
        optimizer.step()
        assert not optimizer.state
        assert optimizer.last_grad_norm == 0.0
        assert not optimizer.last_step_skipped
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 1.0
