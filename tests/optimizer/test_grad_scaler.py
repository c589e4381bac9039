"""``ruda_torch.GradScaler`` with our optimizer and with torch's, and torch's scaler with our optimizer."""

from __future__ import annotations

import pickle

import pytest
import torch

import ruda_torch
from ruda_optim.fused_adamw import InvalidOption, InvalidTensor

SCALERS = {"ours": ruda_torch.GradScaler, "torch": torch.amp.GradScaler}
scalers = pytest.mark.parametrize("scaler_class", SCALERS.values(), ids=SCALERS)


def make(shape=(5,), dtype=torch.float32, **settings):
    parameter = torch.nn.Parameter(torch.linspace(1.0, 2.0, 5).to(dtype).expand(shape).clone())
    options = {"lr": 0.1, "weight_decay": 0.0, "fused_step": True, **settings}
    return parameter, ruda_torch.AdamW([parameter], **options)


def backward(scaler, parameter, gradient):
    """Leave ``scale * gradient`` in ``parameter.grad``."""
    parameter.grad = None
    scaler.scale((parameter * gradient).sum()).backward()


def bits(tensor):
    return tensor.detach().clone().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


GRADIENT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


@scalers
@pytest.mark.parametrize("clip", [None, 1.0], ids=["no clip", "clip"])
def test_every_order_gives_the_same_bits(scaler_class, clip):
    """With a power-of-two scale unscaling is exact, wherever it happens."""
    results = []
    for order in ("plain", "scale-step", "unscale-step"):
        parameter, optimizer = make(max_grad_norm=clip)
        if order == "plain":
            parameter.grad = GRADIENT.clone()
            optimizer.step()
        else:
            scaler = scaler_class("cpu", init_scale=1024.0)
            backward(scaler, parameter, GRADIENT)
            if order == "unscale-step":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.last_grad_norm == pytest.approx(55**0.5, rel=1e-6)
        results.append((bits(parameter), bits(optimizer.state[parameter]["exp_avg"])))
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], result, strict=True))


def test_scale_step_does_not_read_gradients_a_second_time(monkeypatch):
    """The optimizer's statistics pass decides; torch's own pass must not run."""

    def extra_pass(*_):
        raise AssertionError("torch's pass over the gradients ran")

    parameter, optimizer = make()
    scaler = ruda_torch.GradScaler(init_scale=1024.0)
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", extra_pass)
    for gradient, skipped in ((GRADIENT, False), (GRADIENT * float("inf"), True), (GRADIENT, False)):
        backward(scaler, parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_step_skipped is skipped
    assert scaler.get_scale() == 512.0
    unchecked = make(check_finite=False)
    backward(scaler, unchecked[0], GRADIENT)
    with pytest.raises(AssertionError, match="torch's pass"):  # the optimizer does not check, so the scaler must
        scaler.step(unchecked[1])


@scalers
def test_a_skip_without_check_finite_comes_from_the_scaler(scaler_class):
    parameter, optimizer = make(check_finite=False)
    before = bits(parameter)
    scaler = scaler_class("cpu", init_scale=1024.0)
    backward(scaler, parameter, GRADIENT * float("nan"))
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_step_skipped
    assert scaler.get_scale() == 512.0
    assert torch.equal(bits(parameter), before)
    assert not optimizer.state


@scalers
def test_gradients_are_never_rewritten(scaler_class):
    parameter, optimizer = make(max_grad_norm=0.5, maximize=True)
    scaler = scaler_class("cpu", init_scale=1024.0)
    backward(scaler, parameter, GRADIENT)
    scaler.step(optimizer)
    assert torch.equal(parameter.grad, 1024.0 * GRADIENT)


@scalers
def test_accumulation_over_micro_batches(scaler_class):
    parameter, optimizer = make(max_grad_norm=1.0)
    scaler = scaler_class("cpu", init_scale=256.0)
    for part in (0.25, 0.25, 0.5):  # powers of two: the sum is exactly GRADIENT
        scaler.scale((parameter * GRADIENT * part).sum()).backward()
    scaler.step(optimizer)
    expected, plain = make(max_grad_norm=1.0)
    expected.grad = GRADIENT.clone()
    plain.step()
    assert torch.equal(bits(parameter), bits(expected))


@scalers
def test_several_optimizers_decide_for_themselves(scaler_class):
    """One optimizer skips, the other steps, and the scale backs off once."""
    good, first = make()
    bad, second = make()
    scaler = scaler_class("cpu", init_scale=1024.0)
    before = bits(bad)
    backward(scaler, good, GRADIENT)
    backward(scaler, bad, GRADIENT * float("inf"))
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (first.last_step_skipped, second.last_step_skipped) == (False, True)
    assert torch.equal(bits(bad), before)
    assert not torch.equal(good, bad)
    assert scaler.get_scale() == 512.0


def test_one_scaler_serves_torch_optimizers_too():
    ours, first = make()
    theirs = torch.nn.Parameter(ours.detach().clone())
    second = torch.optim.SGD([theirs], lr=0.5)
    scaler = ruda_torch.GradScaler(init_scale=1024.0)
    backward(scaler, ours, GRADIENT)
    backward(scaler, theirs, GRADIENT)
    before = theirs.detach().clone()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert torch.equal(theirs, before - 0.5 * GRADIENT)
    backward(scaler, theirs, GRADIENT * float("nan"))
    scaler.step(second)
    scaler.update()
    assert torch.equal(theirs, before - 0.5 * GRADIENT)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("unscale", [False, True], ids=["scale-step", "unscale-step"])
@pytest.mark.parametrize("optimizer_class", [ruda_torch.AdamW, torch.optim.SGD], ids=["ours", "SGD"])
def test_a_step_without_gradients_is_a_quiet_no_op(optimizer_class, unscale):
    parameter = torch.nn.Parameter(torch.ones(3))
    settings = {"fused_step": True} if optimizer_class is ruda_torch.AdamW else {}
    optimizer = optimizer_class([parameter], lr=0.1, **settings)
    scaler = ruda_torch.GradScaler(init_scale=1024.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, torch.ones(3))
    assert not optimizer.state
    assert scaler.get_scale() == 2048.0  # nothing was skipped


def test_torch_scaler_takes_a_step_without_gradients_quietly():
    """With torch's scaler the step is quiet; its update() still wants to have seen a gradient."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert not optimizer.last_step_skipped
    assert not optimizer.state


def test_a_skip_after_unscale_backs_off_even_if_the_gradient_went_bad_later():
    parameter, optimizer = make()
    scaler = ruda_torch.GradScaler(init_scale=1024.0)
    backward(scaler, parameter, GRADIENT)
    scaler.unscale_(optimizer)
    parameter.grad[2] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_step_skipped
    assert scaler.get_scale() == 512.0


def test_a_failed_step_leaves_nothing_on_the_optimizer():
    """The next attempt must not multiply by the scale a second time."""
    parameter, optimizer = make()
    scaler = ruda_torch.GradScaler(init_scale=1024.0)
    backward(scaler, parameter, GRADIENT)
    gradient, parameter.grad = parameter.grad, parameter.grad.to_sparse()
    with pytest.raises(InvalidTensor, match="must be dense"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")
    parameter.grad = gradient
    scaler.step(optimizer)
    expected, plain = make()
    expected.grad = GRADIENT.clone()
    plain.step()
    assert torch.equal(bits(parameter), bits(expected))


@scalers
def test_a_scale_of_ones_own_is_multiplied_with_the_scalers(scaler_class):
    """As torch's contract says: grad_scale set beforehand is a further factor in the gradients."""
    parameter, optimizer = make()
    scaler = scaler_class("cpu", init_scale=1024.0)
    backward(scaler, parameter, GRADIENT * 4.0)
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.step(optimizer)
    expected, plain = make()
    expected.grad = GRADIENT.clone()
    plain.step()
    assert torch.equal(bits(parameter), bits(expected))


def test_misuse_is_refused_as_by_torch():
    parameter, optimizer = make()
    scaler = ruda_torch.GradScaler()
    with pytest.raises(AssertionError, match="scale"):
        scaler.step(optimizer)
    backward(scaler, parameter, GRADIENT)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.unscale_(optimizer)


@scalers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_gradients_need_no_unscale(scaler_class, dtype):
    """Torch refuses to unscale FP16 gradients in place; the fused step unscales them in FP32 and clips."""
    parameter, optimizer = make(dtype=dtype, max_grad_norm=1.0)
    scaler = scaler_class("cpu", init_scale=1024.0)
    backward(scaler, parameter, GRADIENT.to(dtype))
    assert parameter.grad.dtype is dtype
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.last_grad_norm == pytest.approx(55**0.5, rel=1e-6)
    assert optimizer.state[parameter]["master"].dtype is torch.float32


# ------------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 2.0**25}, r"init_scale must be a number in \[2\^-24, 2\^24\], got 33554432.0"),
        ({"init_scale": 0.0}, "init_scale must be"),
        ({"init_scale": float("nan")}, "init_scale must be"),
        ({"init_scale": "big"}, "init_scale must be"),
        ({"growth_factor": 1.0}, "growth_factor must be > 1, got 1.0"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be in \(0, 1\), got 0.0"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\), got 1.0"),
        ({"growth_interval": 0}, "growth_interval must be an int >= 1, got 0"),
        ({"growth_interval": 2.5}, "growth_interval must be an int >= 1, got 2.5"),
    ],
)
def test_arguments_are_checked(settings, message):
    with pytest.raises(InvalidOption, match=message):
        ruda_torch.GradScaler(**settings)


def test_defaults():
    scaler = ruda_torch.GradScaler()
    assert scaler.get_scale() == 65536.0
    assert scaler.get_growth_factor() == 2.0
    assert scaler.get_backoff_factor() == 0.5
    assert scaler.get_growth_interval() == 2000
    assert scaler.is_enabled()


@pytest.mark.parametrize(
    ("start", "gradient", "limit"),
    [(2.0**23, 1.0, 2.0**24), (2.0**-23, float("inf"), 2.0**-24)],
    ids=["growth", "backoff"],
)
def test_the_scale_stays_within_its_bounds(start, gradient, limit):
    parameter, optimizer = make()
    scaler = ruda_torch.GradScaler(init_scale=start, growth_interval=1)
    scales = []
    for _ in range(3):
        backward(scaler, parameter, torch.full((5,), gradient))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [limit] * 3


def test_update_takes_a_scale_within_the_bounds():
    scaler = ruda_torch.GradScaler()
    scaler.scale(torch.ones(()))
    for value in (8, 4.0, torch.tensor(2.0), torch.tensor([16.0])):
        scaler.update(value)
        assert scaler.get_scale() == float(value)
    for value in (2.0**25, 0.0, float("nan"), torch.tensor(float("inf"))):
        with pytest.raises(InvalidOption, match=r"new_scale must be a number in \[2\^-24, 2\^24\]"):
            scaler.update(value)
    assert scaler.get_scale() == 16.0


def test_state_dict_interchanges_with_torch():
    parameter, optimizer = make()
    ours = ruda_torch.GradScaler(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    backward(ours, parameter, GRADIENT)
    ours.step(optimizer)
    ours.update()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    back = ruda_torch.GradScaler()
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict() == ours.state_dict()
    assert ours.state_dict()["_growth_tracker"] == 1
    back.load_state_dict({**theirs.state_dict(), "scale": 2.0**40})
    assert back.get_scale() == 2.0**24
    with pytest.raises(RuntimeError, match="empty"):
        back.load_state_dict({})


def test_pickle_and_disabled():
    scaler = pickle.loads(pickle.dumps(ruda_torch.GradScaler(init_scale=2.0, growth_interval=3)))
    assert type(scaler) is ruda_torch.GradScaler
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0, 3)

    parameter, optimizer = make()
    off = ruda_torch.GradScaler(enabled=False)
    backward(off, parameter, GRADIENT)
    assert torch.equal(parameter.grad, GRADIENT)
    off.unscale_(optimizer)
    off.step(optimizer)
    off.update()
    assert off.get_scale() == 1.0
    assert off.state_dict() == {}
    off.load_state_dict({})
    assert optimizer.state[parameter]["step"] == 1
