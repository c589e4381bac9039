"""The step whose decisions the device makes, driven on the CPU by the simulated CUDA kernels: no hardware involved.

What only hardware can show (graph capture and replay, streams) is in the ``cuda`` suite of the regression runner.
"""

from __future__ import annotations

import math

import pytest
import torch

import ruda_torch
from fused_adamw import host_simulator
from ruda_optim.fused_adamw import InvalidOption, InvalidTensor, kernels

pytestmark = pytest.mark.skipif(
    host_simulator.unavailable() is not None, reason=f"no host simulator: {host_simulator.unavailable()}"
)
SHAPES = ((5, 3), (0,), (300,))


@pytest.fixture
def simulated(monkeypatch):
    """The simulated CUDA kernels in the CPU's place."""
    monkeypatch.setitem(kernels._loaded, "cpu", host_simulator.kernels())


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
def test_capturable_agrees_with_the_host_decision(simulated, amsgrad, max_grad_norm):
    options = {"amsgrad": amsgrad, "max_grad_norm": max_grad_norm}
    device_parameters, device = _optimizer(capturable=True, **options)
    host_parameters, host = _optimizer(**options)
    for seed in range(4):
        for parameters in (device_parameters, host_parameters):
            _give_gradients(parameters, seed)
        if seed == 2:  # one bad element: neither may move
            device_parameters[2].grad[-1] = host_parameters[2].grad[-1] = math.inf
        device.param_groups[1]["lr"] = host.param_groups[1]["lr"] = 3e-3 / (seed + 1)
        device.step()
        host.step()
        assert device.last_step_skipped == host.last_step_skipped == (seed == 2)
        assert device.last_grad_norm == host.last_grad_norm
        assert device.last_clip_factor == host.last_clip_factor
        assert device.last_group_norms == host.last_group_norms
    assert device.skipped_steps == host.skipped_steps == 1
    assert _steps(device_parameters, device) == _steps(host_parameters, host) == [3.0] * 4
    # The device raises beta to the step by repeated squaring, the host by pow: up to a few FP64 ulps, so the FP32
    # bias corrections agree but for a rare last bit: 2^-23 relative on a step of at most lr / (1 - beta1) each time.
    for left, right in zip(_tensors(device_parameters, device), _tensors(host_parameters, host), strict=True):
        assert torch.allclose(left.float(), right.float(), rtol=2**-22, atol=3 * 1e-1 * 2**-23)


def test_scale_and_found_inf_stay_on_the_device(simulated):
    parameters, optimizer = _optimizer(capturable=True, max_grad_norm=1.0)
    plain_parameters, plain = _optimizer(capturable=True, max_grad_norm=1.0)
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
    parameters, optimizer = _optimizer(capturable=True, check_finite=False)
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
    parameters, optimizer = _optimizer(capturable=True)
    reference_parameters, reference = _optimizer(capturable=True)
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
    copies, device = _optimizer(capturable=True)
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.data.copy_(parameter)
    device.load_state_dict(host.state_dict())
    assert device.param_groups[0]["capturable"], "which step runs is the live optimizer's"
    for some, optimizer in ((parameters, host), (copies, device)):
        _give_gradients(some, 1)
        optimizer.step()
    assert _steps(copies, device) == [2.0] * 4
    back_parameters, back = _optimizer()
    back.load_state_dict(device.state_dict())
    assert [float(back.state[p]["step"]) for p in back_parameters] == [2.0] * 4


def test_capturable_on_a_cpu_says_what_to_do():
    parameters, optimizer = _optimizer(capturable=True)
    _give_gradients(parameters, 0)
    with pytest.raises(
        InvalidOption, match="capturable=True needs parameters on an accelerator, got cpu; leave it out"
    ):
        optimizer.step()
    assert not optimizer.state


def test_a_bad_gradient_is_an_error_before_anything_changes(simulated):
    parameters, optimizer = _optimizer(capturable=True)
    _give_gradients(parameters, 0)
    parameters[2].grad = None
    parameters[2].grad_dtype = None
    parameters[2].grad = torch.zeros(300, dtype=torch.float64)
    with pytest.raises(InvalidTensor, match="the gradient of parameter 0 of group 1 must be float32"):
        optimizer.step()
    assert not optimizer.state


def test_a_gradient_that_overflows_in_unscaling_is_skipped(simulated):
    parameters, optimizer = _optimizer(capturable=True)
    _give_gradients(parameters, 0)
    parameters[0].grad[0] = 3e38
    optimizer.grad_scale = torch.tensor(2.0**-10)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.last_grad_norm == math.inf
    assert _steps(parameters, optimizer) == [0.0] * 4


def test_found_inf_of_0_does_not_switch_the_check_on(simulated):
    parameters, optimizer = _optimizer(capturable=True, check_finite=False, max_grad_norm=1.0)
    host_parameters, host = _optimizer(check_finite=False, max_grad_norm=1.0)
    for some, one in ((parameters, optimizer), (host_parameters, host)):
        _give_gradients(some, 0)
        some[0].grad[0] = math.inf
        one.found_inf = torch.tensor(0.0)
        one.step()
    assert optimizer.last_step_skipped == host.last_step_skipped is False
    assert _steps(parameters, optimizer) == _steps(host_parameters, host) == [1.0] * 4
