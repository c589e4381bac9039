"""The peers' cases about checkpoints, schedulers, scalers and arguments; see test_peer_cases.py for what is assumed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import compare
from peers import NORM, U, adamw, bits, give, parameter

import ruda_torch
from ruda_optim.fused_adamw import (
    FusedAdamWError,
    GradientGuardOptions,
    InvalidOption,
    InvalidState,
    InvalidTensor,
    gradient_stats,
)


def test_c14_loading_keeps_the_state_dtype():
    """pytorch/pytorch#43706: FP32 moments of BF16 parameters came back as BF16."""
    p = parameter(torch.ones(3), torch.bfloat16)
    optimizer = adamw([p])
    p.grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.full((3,), 0.12345679)
    fresh = adamw([p])
    fresh.load_state_dict(optimizer.state_dict())
    loaded = fresh.state[p]["exp_avg"]
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded, torch.full((3,), 0.12345679))

    q = parameter(torch.ones(3))  # and a BF16 state in the checkpoint of an FP32 parameter
    narrow = adamw([q])
    saved = optimizer.state_dict()
    saved["state"][0] = {key: value.bfloat16() for key, value in saved["state"][0].items() if key != "master"}
    narrow.load_state_dict(saved)
    assert narrow.state[q]["exp_avg"].dtype is torch.float32
    assert torch.equal(narrow.state[q]["exp_avg"], torch.full((3,), 0.12345679).bfloat16().float())


@pytest.mark.parametrize("source_class", [adamw, torch.optim.AdamW], ids=["ours", "torch"])
def test_c15_two_optimizers_never_share_state(source_class):
    """pytorch/pytorch#196083: stepping one optimizer advanced the other, whose state_dict it had loaded."""
    p, q = parameter(torch.ones(3)), parameter(torch.ones(3))
    first, second = source_class([p], lr=torch.tensor(0.1)), adamw([q], lr=torch.tensor(0.1))
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    first.step()
    second.load_state_dict(first.state_dict())
    shared = {t.data_ptr() for t in first.state[p].values()} & {t.data_ptr() for t in second.state[q].values()}
    assert not shared
    assert first.param_groups[0]["lr"] is not second.param_groups[0]["lr"]
    before = bits(first)
    second.step()
    assert bits(first) == before
    assert (first.state[p]["step"], second.state[q]["step"]) == (1, 2)
    before = bits(second)
    first.step()
    assert bits(second) == before


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor([7.0]), torch.tensor(7), torch.tensor(7.0, dtype=torch.float64)])
def test_c17a_step_counts_in_any_form(step):
    """pytorch/pytorch#103256: a step count as int, float or one-element tensor broke the resumed run."""
    p = parameter(torch.ones(3))
    source = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    source.step()
    saved = source.state_dict()
    saved["state"][0]["step"] = step
    optimizer = adamw([p])
    optimizer.load_state_dict(saved)
    optimizer.step()
    count = optimizer.state[p]["step"]
    assert count == 8
    assert (count.dtype, count.dim()) == (torch.float32, 0)


def test_c17b_loading_keeps_the_implementation_of_the_live_optimizer():
    """pytorch/pytorch#103256 (family): loading flipped the group's flags, and the next scaler.step() failed."""
    p = parameter(torch.ones(3))
    source = torch.optim.AdamW([p], foreach=True)
    p.grad = torch.ones(3)
    source.step()
    optimizer = adamw([p])
    flags = {name: optimizer.param_groups[0][name] for name in ("fused", "foreach", "capturable", "differentiable")}
    optimizer.load_state_dict(source.state_dict())
    assert {name: optimizer.param_groups[0][name] for name in flags} == flags
    assert optimizer.fused_step
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    p.grad = None
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state[p]["step"] == 2


@pytest.mark.parametrize("amsgrad", [False, True])
def test_c17c_a_mismatch_in_amsgrad_raises_and_can_be_converted(amsgrad):
    """pytorch/pytorch#103256 (family): AMSGrad was silently turned off by loading."""
    p = parameter(torch.ones(3))
    source = torch.optim.AdamW([p], amsgrad=amsgrad)
    p.grad = torch.ones(3)
    source.step()
    optimizer = adamw([p], amsgrad=not amsgrad)
    with pytest.raises(InvalidState, match=r"amsgrad=.*convert_amsgrad\(state_dict, amsgrad="):
        optimizer.load_state_dict(source.state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["amsgrad"] is not amsgrad
    optimizer.load_state_dict(ruda_torch.convert_amsgrad(source.state_dict(), amsgrad=not amsgrad))
    assert optimizer.param_groups[0]["amsgrad"] is not amsgrad
    state = optimizer.state[p]
    assert ("max_exp_avg_sq" in state) is not amsgrad
    if not amsgrad:
        assert torch.equal(state["max_exp_avg_sq"], state["exp_avg_sq"])
        assert state["max_exp_avg_sq"].data_ptr() != state["exp_avg_sq"].data_ptr()
    optimizer.step()
    assert state["step"] == 2


def test_c26_betas_are_read_at_every_step():
    """pytorch/pytorch#133898: a scheduler that cycles betas, and betas edited by hand between steps."""
    p = parameter([0.0])
    optimizer = adamw([p], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6, cycle_momentum=True)
    first, second, used = 0.0, 0.0, set()
    for step in range(5):
        if step == 3:
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        beta1, beta2 = optimizer.param_groups[0]["betas"]
        used.add((beta1, beta2))
        gradient = float(step + 1)
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        p.grad = torch.tensor([gradient])
        optimizer.step()
        # Five steps, each at most a difference, a coefficient, a product, a sum and (for v) a square.
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(first, rel=5 * 5 * U)
        assert optimizer.state[p]["exp_avg_sq"].item() == pytest.approx(second, rel=5 * 5 * U)
        if step < 3:
            scheduler.step()
    assert len(used) == 4


@pytest.mark.parametrize("amsgrad", [False, True])
def test_c28a_torch_checkpoints_load_both_ways(amsgrad):
    """NVIDIA/apex#577, bitsandbytes-foundation/bitsandbytes#1261: a drop-in that cannot load torch's checkpoints."""
    random = torch.Generator().manual_seed(1)
    gradients = [torch.randn(1000, generator=random) for _ in range(5)]
    start = torch.randn(1000, generator=random)
    options = {"lr": 1e-3, "weight_decay": 0.0, "amsgrad": amsgrad}
    for first_class, second_class in ((torch.optim.AdamW, adamw), (adamw, torch.optim.AdamW)):
        p = torch.nn.Parameter(start.clone())
        first = first_class([p], **options)
        for gradient in gradients[:3]:
            p.grad = gradient.clone()
            first.step()
        q = torch.nn.Parameter(p.detach().clone())
        second = second_class([q], **options)
        second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch aliases what it loads
        for x, optimizer in ((p, first), (q, second)):
            x.grad = gradients[3].clone()
            optimizer.step()
        # One ulp of the parameter, for subtractions that round to neighbouring numbers; and what the updates, below
        # 4 lr and at most 12 U off on either side, add where the parameter is too small for that to vanish in its ulp.
        bound = 2 * U * p.detach().double().abs() + 2 * 4e-3 * 12 * U
        compare("parameter", q, p.detach().double(), bound.numpy())
        assert first.state[p]["step"] == second.state[q]["step"] == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learning_rate": 0.1}, TypeError, "learning_rate"),
        ({"lr": math.nan}, InvalidOption, "nan"),
        ({"lr": math.inf}, InvalidOption, "inf"),
        ({"lr": -1.0}, InvalidOption, "-1.0"),
        ({"betas": (0.9, 1.0)}, InvalidOption, r"1\.0"),
        ({"betas": (0.9, 0.99, 0.999)}, InvalidOption, "two numbers"),
        ({"eps": -1e-8}, InvalidOption, "-1e-08"),
        ({"weight_decay": -0.1}, InvalidOption, "-0.1"),
    ],
)
def test_c28b_arguments_out_of_range_are_refused(options, error, message):
    """NVIDIA/apex#577, bitsandbytes-foundation/bitsandbytes#1261: arguments that do nothing or break the run."""
    with pytest.raises(error, match=message):
        adamw([parameter([1.0])], **options)
    assert issubclass(InvalidOption, ValueError)


def test_c28b_an_integer_beta_is_a_number():
    """NVIDIA/apex#577: int 0 is as good a beta as 0.0."""
    p, q = parameter([1.0]), parameter([1.0])
    for x, beta in ((p, 0), (q, 0.0)):
        optimizer = adamw([x], betas=(beta, 0.999))
        x.grad = torch.tensor([3.0])
        optimizer.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_c29_gradients_are_read_only(maximize, dtype):
    """pytorch/pytorch#123074: the step wrote the unscaled gradient back; others negated it or set it to None."""
    p = parameter(torch.ones(16))
    optimizer = adamw([p], maximize=maximize, max_grad_norm=0.5)
    give(p, gradient := torch.full((16,), 1024.0, dtype=dtype))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    version = gradient._version
    optimizer.step()
    assert p.grad is gradient
    assert torch.equal(gradient, torch.full((16,), 1024.0, dtype=dtype))
    assert gradient._version == version
    assert (p > 1).all() if maximize else (p < 1).all()


def test_c30_a_skipped_step_can_be_seen():
    """pytorch/pytorch#55585, pytorch/pytorch#67590: schedulers advanced on skipped steps; no official flag."""
    p = parameter(torch.ones(3))
    optimizer = adamw([p])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = ruda_torch.GradScaler(init_scale=1024.0)
    flags, counts, rates = [], [], []
    for gradient in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((p * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if not optimizer.last_step_skipped:
            scheduler.step()
        flags.append(optimizer.last_step_skipped)
        counts.append(optimizer.state[p]["step"].item() if p in optimizer.state else 0)
        rates.append(round(optimizer.param_groups[0]["lr"], 9))
    assert flags == [True, False]
    assert counts == [0, 1]
    assert rates == [0.1, 0.01]
    assert scaler.get_scale() == 512.0
    assert optimizer.skipped_steps == 1

    before = bits(optimizer)
    optimizer.zero_grad()
    scaler.step(optimizer)  # no gradient anywhere
    scaler.update()
    assert not optimizer.last_step_skipped
    assert bits(optimizer) == before


def test_c32_gradients_are_passed_as_what_they_are():
    """huggingface/transformers#46113: a clip looked for .grad on the gradients it was given, and did nothing."""
    gradients = [torch.tensor([10.0]) for _ in range(4)]
    stats = gradient_stats(gradients)
    assert stats.total_norm == pytest.approx(20.0, rel=NORM)
    assert stats.decision(GradientGuardOptions(max_norm=1.0)).clip_factor == pytest.approx(0.05, rel=1e-6)
    p = parameter([1.0])
    p.grad = torch.tensor([10.0])
    for wrong, error in (
        ([p], InvalidTensor),  # a parameter instead of its gradient
        ([None], InvalidTensor),
        ([10.0], InvalidTensor),
        (torch.tensor([10.0]), InvalidTensor),
        ([torch.tensor([10])], InvalidTensor),
    ):
        with pytest.raises(error) as caught:
            gradient_stats(wrong)
        assert isinstance(caught.value, FusedAdamWError)
