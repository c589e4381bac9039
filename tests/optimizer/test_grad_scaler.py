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
    keys = {torch.float16: "master", torch.bfloat16: "master_remainder"}
    assert keys[dtype] in optimizer.state[parameter]


# ------------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 2.0**25}, r"init_scale must be in \[min_scale, max_scale\] = .*, 16777216.0\], got 33554432.0"),
        ({"init_scale": 0.0}, "init_scale must be"),
        ({"init_scale": float("nan")}, "init_scale must be"),
        ({"init_scale": "big"}, "init_scale must be"),
        ({"device": 1024.0}, r"got 1024.0; the scale is the second argument: GradScaler\(init_scale=1024.0\)"),
        ({"device": None}, "device must be a device type"),
        ({"growth_factor": 1.0}, "growth_factor must be a finite number > 1, got 1.0"),
        ({"growth_factor": float("inf")}, "growth_factor must be a finite number > 1, got inf"),
        ({"growth_factor": "2"}, "growth_factor must be a finite number > 1, got '2'"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be a number in \(0, 1\), got 0.0"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be a number in \(0, 1\), got 1.0"),
        ({"growth_interval": True}, "growth_interval must be an int >= 1, got True"),
        ({"min_scale": 0.0}, "min_scale must be"),
        ({"min_scale": 1e-60}, "min_scale must be a number > 0 and finite in FP32, got 1e-60"),
        ({"max_scale": float("inf")}, "max_scale must be"),
        ({"max_scale": 1.0}, "init_scale must be in"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be <= max_scale, got 4.0 and 2.0"),
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
    ("start", "gradient", "limit", "bounds"),
    [
        (2.0**23, 1.0, 2.0**24, {}),
        (2.0**-23, float("inf"), 2.0**-24, {}),
        (16.0, 1.0, 32.0, {"max_scale": 32.0}),
        (16.0, float("nan"), 8.0, {"min_scale": 8.0}),
        (2.0**32, 1.0, 2.0**33, {"max_scale": 2.0**33}),
    ],
)
@pytest.mark.filterwarnings("ignore::ruda_torch.report.SkippedStepsWarning")
def test_the_scale_stays_within_its_bounds(start, gradient, limit, bounds):
    parameter, optimizer = make()
    scaler = ruda_torch.GradScaler(init_scale=start, growth_interval=1, **bounds)
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
        with pytest.raises(InvalidOption, match="new_scale must be "):
            scaler.update(value)
    with pytest.raises(InvalidOption, match=r"new_scale must be one number, got a tensor of shape \(2,\)"):
        scaler.update(torch.ones(2))
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("scale", value) for value in (float("nan"), -1.0, "big", None, True)),
        *(("growth_factor", value) for value in (0.5, 1.0, float("inf"), float("nan"))),
        *(("backoff_factor", value) for value in (3, 0.0, float("nan"))),
        *(("growth_interval", value) for value in (0, -1, 2.5, True)),
        *(("_growth_tracker", value) for value in (-1, 0.5, None)),
    ],
)
def test_a_state_that_no_scaler_has_is_refused(name, value):
    scaler = ruda_torch.GradScaler(init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises(InvalidOption, match=f"{name} must be"):
        scaler.load_state_dict({**before, name: value})
    with pytest.raises(InvalidOption, match=rf"must hold .*; missing: \['{name}'\]"):
        scaler.load_state_dict({key: held for key, held in before.items() if key != name})
    if hasattr(scaler, f"set_{name}"):
        with pytest.raises(InvalidOption, match=f"{name} must be"):
            getattr(scaler, f"set_{name}")(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("loaded", "kept"), [(float("inf"), 32.0), (2.0**40, 32.0), (0.0, 4.0), (2.0**-40, 4.0), (8.0, 8.0)]
)
def test_a_loaded_scale_is_brought_within_the_bounds(loaded, kept):
    """Torch's scaler has none: its scale may have grown to infinity or shrunk to zero."""
    scaler = ruda_torch.GradScaler(init_scale=8.0, min_scale=4.0, max_scale=32.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": loaded})
    assert scaler.get_scale() == kept


# -------------------------------------------------------------------------------------------- a scale of the loop's own


@pytest.mark.parametrize("scale", [1024, 1024.0, torch.tensor(1024.0), torch.tensor([1024.0])], ids=repr)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_step_takes_the_scale_of_its_gradients(scale, clip):
    parameter, optimizer = make(max_grad_norm=clip)
    expected, plain = make(max_grad_norm=clip)
    for factor in (1.0, 0.5):
        parameter.grad = 1024.0 * factor * GRADIENT
        expected.grad = factor * GRADIENT
        assert optimizer.step(grad_scale=scale) is None
        plain.step()
        assert optimizer.last_grad_norm == plain.last_grad_norm
        assert torch.equal(parameter.grad, 1024.0 * factor * GRADIENT)
    assert torch.equal(bits(parameter), bits(expected))
    assert optimizer.step(lambda: 3.0, grad_scale=scale) == 3.0


@scalers
def test_the_scale_of_a_step_is_a_further_factor_beside_a_scaler(scaler_class):
    parameter, optimizer = make()
    scaler = scaler_class("cpu", init_scale=1024.0)
    backward(scaler, parameter, GRADIENT * 4.0)
    scaler.step(optimizer, grad_scale=4.0)
    expected, plain = make()
    expected.grad = GRADIENT.clone()
    plain.step()
    assert torch.equal(bits(parameter), bits(expected))


@pytest.mark.parametrize(
    "scale",
    [0.0, -1.0, float("nan"), float("inf"), 1e-60, "2", True, torch.ones(2), torch.ones((), dtype=torch.int32)],
    ids=repr,
)
def test_a_scale_that_nothing_can_be_divided_by_is_refused(scale):
    parameter, optimizer = make()
    parameter.grad = GRADIENT.clone()
    before = bits(parameter)
    with pytest.raises(InvalidOption, match=r"^grad_scale must"):
        optimizer.step(lambda: pytest.fail("the closure ran"), grad_scale=scale)
    assert torch.equal(bits(parameter), before)
    plain = ruda_torch.AdamW([parameter])
    with pytest.raises(InvalidOption, match="grad_scale needs fused_step=True"):
        plain.step(grad_scale=scale)


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
