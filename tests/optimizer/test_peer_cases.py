"""Situations in which other libraries went wrong, as public threads describe them, with the right values.

Unless a test says otherwise: FP32 on the CPU, betas (0.9, 0.999), eps 1e-8, no weight decay, lr 0.1, the first step.
Each test names its threads. Where a thread is about another library's own API, the same situation stands here on ours.
This file holds the arithmetic; test_peer_interface.py the checkpoints, schedulers, scalers and arguments.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import compare
from peers import NORM, U, adamw, bits, first_step_bound, give, parameter
from small_runs import master_of

import ruda_torch
from ruda_optim.fused_adamw import (
    InvalidTensor,
    gradient_stats,
)


def test_c1_large_finite_gradients_keep_a_finite_norm():
    """pytorch/pytorch#46849: 100 gradients of 1e20 overflowed the norm, and the clip set them all to zero."""
    p = parameter(torch.ones(100))
    optimizer = adamw([p], max_grad_norm=1.0)
    p.grad = torch.full((100,), 1e20)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(1e21, rel=NORM)
    assert optimizer.last_clip_factor == pytest.approx(1e-21, rel=NORM + U)
    state = optimizer.state[p]
    compare("exp_avg", state["exp_avg"], torch.full((100,), 0.01, dtype=torch.float64), 0.01 * (NORM + 4 * U))
    compare("exp_avg_sq", state["exp_avg_sq"], torch.full((100,), 1e-5, dtype=torch.float64), 1e-5 * (2 * NORM + 8 * U))
    # eps 1e-8 beside a root of 0.1 takes 1e-7 of the update away.
    target = torch.full((100,), 1.0 - 0.1 / (1.0 + 1e-7), dtype=torch.float64)
    compare("parameter", p, target, first_step_bound(target))


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("count", "value", "dtype", "norm"),
    [
        (1, 300.0, torch.float16, 300.0),
        (4096, 2000.0, torch.float16, 128000.0),
        (1096, 1.0, torch.bfloat16, math.sqrt(1096)),
    ],
    ids=["one 300", "4096 of 2000", "1096 ones"],
)
def test_c3_norms_of_half_gradients_are_fp32(count, value, dtype, norm, parameter_dtype):
    """tracel-ai/burn#5699, facebookresearch/fairscale#263: a norm in FP16 overflows, in BF16 it has two digits."""
    p = parameter(torch.ones(count), parameter_dtype)
    optimizer = adamw([p], max_grad_norm=1.0)
    give(p, torch.full((count,), value, dtype=dtype))
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(norm, rel=NORM)
    assert gradient_stats([p.grad]).total_norm == pytest.approx(norm, rel=NORM)
    clipped = value / (norm + 1e-6)
    # The norm; the factor and the product with it; the coefficient of exp_avg and its product.
    target = torch.full((count,), 0.1 * clipped, dtype=torch.float64)
    compare("exp_avg", optimizer.state[p]["exp_avg"], target, target.numpy() * (NORM + 5 * U))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [4, 1027])
@pytest.mark.parametrize("where", [0, 1, -1], ids=["first", "second", "last"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_c4_one_bad_gradient_skips_the_whole_step(bad, size, where, steps_before):
    """facebookresearch/habitat-lab#2226: one NaN reached every weight through the clip factor."""
    a, b = parameter(torch.ones(size)), parameter(torch.ones(size))
    optimizer = adamw([a, b], max_grad_norm=1.0, weight_decay=0.5, amsgrad=True)
    for p in (a, b):
        p.grad = torch.ones(size)
    for _ in range(steps_before):
        optimizer.step()
    before = bits(optimizer)
    b.grad[where] = bad
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1
    assert optimizer.last_grad_norm == math.inf
    assert bits(optimizer) == before
    b.grad[where] = 1.0
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert optimizer.state[a]["step"] == steps_before + 1


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_c6_any_found_inf_above_zero_skips(found_inf, kind):
    """pytorch/pytorch#88015: two overflowed devices sum to 2, and a comparison with 1 lets NaN through."""
    p = parameter(torch.ones(4))
    optimizer = adamw([p], check_finite=False)
    p.grad = torch.full((4,), math.nan) if found_inf else torch.ones(4)
    optimizer.grad_scale, optimizer.found_inf = kind(1.0), kind(found_inf)
    optimizer.step()
    assert optimizer.last_step_skipped is (found_inf > 0)
    if found_inf:
        assert torch.equal(p, torch.ones(4))
        assert not optimizer.state
    else:
        compare("parameter", p, torch.full((4,), 0.9).double(), first_step_bound(torch.full((4,), 0.9)) + 2e-8)


@pytest.mark.parametrize("swapped", [False, True], ids=["parameter", "gradient"])
@pytest.mark.parametrize("kind", ["channels_last", "transposed"])
def test_c7_layouts_of_parameter_and_gradient_may_differ(kind, swapped):
    """pytorch/pytorch#126585, pytorch/pytorch#106951: refused, or paired with the wrong elements."""
    random = torch.Generator().manual_seed(0)
    shape = (8, 4, 3, 3) if kind == "channels_last" else (4, 6)
    values, gradient = torch.randn(shape, generator=random), torch.randn(shape, generator=random)

    def other(tensor):
        if kind == "channels_last":
            return tensor.to(memory_format=torch.channels_last)
        return tensor.t().contiguous().t()

    p = torch.nn.Parameter(values.clone() if swapped else other(values).clone())
    optimizer = adamw([p])
    p.grad = other(gradient) if swapped else gradient.clone()
    assert p.stride() != p.grad.stride()
    optimizer.step()
    g = gradient.double()
    target = values.double() - 0.1 * g / (g.abs() + 1e-8)
    compare("parameter", p, target, first_step_bound(target))


def test_c8_a_view_changes_its_own_elements_in_the_base():
    """lucidrains/titans-pytorch#64: neighbours of a strided view were written, or the base was left behind."""
    base = torch.ones(4, 12)
    p = torch.nn.Parameter(base[:, ::2])
    optimizer = adamw([p])
    p.grad = torch.ones(4, 6)
    optimizer.step()
    assert torch.equal(base[:, 1::2], torch.ones(4, 6))
    target = torch.full((4, 6), 1.0 - 0.1 / (1.0 + 1e-8), dtype=torch.float64)
    compare("base", base[:, ::2], target, first_step_bound(target))


def test_c8_an_expanded_parameter_is_refused_before_any_write():
    """lucidrains/titans-pytorch#64: an expanded parameter was written past its allocation."""
    base = torch.ones(1, 4)
    p, plain = torch.nn.Parameter(base.expand(3, 4)), parameter(torch.ones(4))
    optimizer = adamw([plain, p])
    plain.grad, p.grad = torch.ones(4), torch.ones(3, 4)
    with pytest.raises(InvalidTensor, match=r"parameter 1 of group 0 must not share memory.*clone"):
        optimizer.step()
    assert torch.equal(base, torch.ones(1, 4))
    assert torch.equal(plain, torch.ones(4))
    assert not optimizer.state


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ruda_torch.GradScaler], ids=["torch", "ours"])
@pytest.mark.parametrize("variant", [1, 2, 3], ids=["step", "unscale-clip-step", "unscale-our clip"])
def test_c10_gradients_are_unscaled_once_in_every_order(variant, scaler_class):
    """pytorch/pytorch#90752, pytorch/pytorch#94060: after unscale_() the fused step divided by the scale again."""
    parameters = [parameter([1.0]) for _ in range(5)]
    optimizer = adamw(parameters, max_grad_norm=1.0 if variant == 3 else None)
    scaler = scaler_class("cpu", init_scale=1024.0)
    scaler.scale(sum((i + 1) * p.sum() for i, p in enumerate(parameters))).backward()
    if variant > 1:
        scaler.unscale_(optimizer)
    if variant == 2:
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert norm.item() == pytest.approx(math.sqrt(55), rel=8 * U)  # squares, four sums, the root
    scaler.step(optimizer)
    scaler.update()
    if variant != 2:
        assert optimizer.last_grad_norm == pytest.approx(math.sqrt(55), rel=NORM)
    divisor = 1.0 if variant == 1 else math.sqrt(55) + 1e-6  # both clips add 1e-6 to the norm
    for i, p in enumerate(parameters):
        # The norm, the factor, its product, the coefficient, its product.
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.1 * (i + 1) / divisor, rel=NORM + 5 * U)


@pytest.mark.parametrize("grad_scale", [None, 4.0])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("check_finite", [True, False])
def test_c11_grad_scale_and_found_inf_are_independent(grad_scale, found_inf, check_finite):
    """pytorch/pytorch#95847, pytorch/pytorch#186360: found_inf was ignored where grad_scale was absent."""
    for gradient in (torch.tensor([8.0, math.inf, 8.0]), torch.full((3,), 8.0)):
        p = parameter(torch.ones(3))
        optimizer = adamw([p], check_finite=check_finite)
        p.grad = gradient
        if grad_scale is not None:
            optimizer.grad_scale = torch.tensor(grad_scale)
        if found_inf is not None:
            optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        finite = bool(gradient.isfinite().all())
        skips = bool(found_inf) or (check_finite and not finite)
        assert optimizer.last_step_skipped is skips
        if skips:
            assert torch.equal(p, torch.ones(3))
            assert not optimizer.state
        else:
            unscaled = 8.0 / (grad_scale or 1.0)
            compare("exp_avg", optimizer.state[p]["exp_avg"][[0, 2]], torch.full((2,), 0.1 * unscaled).double(), 8 * U)


def test_c12_eps_survives_half_precision():
    """google-deepmind/optax#1754, pytorch/pytorch#147437: eps 1e-8 is zero in FP16, and 0 / 0 is NaN."""
    p = parameter([1.0, 1.0], torch.float16)
    optimizer = adamw([p])
    p.grad = torch.tensor([0.0, 1e-4], dtype=torch.float16)
    optimizer.step()
    assert torch.equal(p, torch.tensor([1.0, 0.9], dtype=torch.float16))


@pytest.mark.parametrize("split", [False, True], ids=["FP32 master", "split master"])
def test_c13_small_updates_of_bf16_parameters_add_up(split):
    """pytorch/pytorch#120376, pytorch/ao#1124: 100 updates of 1e-4 all rounded away."""
    p = parameter(torch.ones(64), torch.bfloat16)
    optimizer = adamw([p], lr=1e-4, split_master=split)
    for _ in range(100):
        p.grad = torch.ones(64, dtype=torch.bfloat16)
        optimizer.step()
    assert torch.equal(p, torch.full((64,), 0.98828125, dtype=torch.bfloat16))
    if not split:
        # 100 subtractions below 1, each half an ulp of 2^-24; the updates themselves are 12 U off at most.
        bound = 100 * (2.0**-25 + 1e-4 * 12 * U)
        compare("master", optimizer.state[p]["master"], torch.full((64,), 0.99 + 1e-10).double(), bound)


def test_c19_parameters_of_two_dtypes_count_their_own_steps():
    """deepspeedai/DeepSpeed#8471: a counter shared between dtypes gave [0, 4] and the wrong corrections."""
    p, q = parameter(torch.ones(64)), parameter(torch.ones(64), torch.bfloat16)
    optimizer = adamw([p, q], lr=0.01)
    for _ in range(2):
        p.grad, q.grad = torch.ones(64), torch.ones(64, dtype=torch.bfloat16)
        optimizer.step()
    bound = 2 * first_step_bound(torch.ones(64), lr=0.01)
    compare("FP32", p, torch.full((64,), 0.98 + 2e-10).double(), bound + U)  # U: 0.98 as torch.full holds it
    assert torch.equal(q, torch.full((64,), 0.98046875, dtype=torch.bfloat16))
    assert [optimizer.state[x]["step"].item() for x in (p, q)] == [2, 2]


@pytest.mark.parametrize("order", ["last", "first"])
def test_c21_empty_tensors_and_groups_are_harmless(order):
    """NVIDIA/TransformerEngine#3207: a zero-size tensor at the end of the list dropped the whole update."""
    full, empty = parameter(torch.ones(64)), parameter(torch.ones(0))
    parameters = [full, empty] if order == "last" else [empty, full]
    groups = [{"params": parameters}, {"params": []}]
    optimizer = adamw(groups, max_grad_norm=100.0)
    full.grad, empty.grad = torch.ones(64), torch.ones(0)
    optimizer.step()
    target = torch.full((64,), 1.0 - 0.1 / (1.0 + 1e-8), dtype=torch.float64)
    compare("parameter", full, target, first_step_bound(target))
    assert optimizer.state[empty]["step"] == 1
    assert optimizer.last_group_norms[1] == 0.0
    saved = optimizer.state_dict()
    for other in (adamw(groups), torch.optim.AdamW(groups)):
        other.load_state_dict(saved)
        assert other.state[full]["step"] == 1
        assert other.state[empty]["exp_avg"].shape == (0,)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_c22_gradients_of_another_dtype(parameter_dtype, gradient_dtype):
    """pytorch/pytorch#146542, NVIDIA/TransformerEngine#3358: refused, or read past the gradient's end."""
    p = parameter(torch.ones(64), parameter_dtype)
    optimizer = adamw([p])
    give(p, torch.ones(64, dtype=gradient_dtype))
    optimizer.step()
    assert torch.equal(optimizer.state[p]["exp_avg"], torch.full((64,), 0.1))
    target = torch.full((64,), 1.0 - 0.1 / (1.0 + 1e-8), dtype=torch.float64)
    updated = p if parameter_dtype is torch.float32 else master_of(p, optimizer.state[p])
    compare("parameter", updated, target, first_step_bound(target))
    assert torch.equal(p, torch.full((64,), 0.9).to(parameter_dtype)) or parameter_dtype is torch.float32


def test_c23_amsgrad_takes_the_maximum_before_the_correction():
    """pytorch/pytorch#142323, google-deepmind/optax#1423: a maximum over corrected moments is another algorithm."""
    p, plain = parameter([0.0]), parameter([0.0])
    groups = [{"params": [p], "amsgrad": True}, {"params": [plain], "amsgrad": False}]
    optimizer = adamw(groups, lr=1e-2, betas=(0.9, 0.5))
    seen = []
    for gradient in (10.0, 0.1, 0.1, 0.1, 0.1):
        p.grad, plain.grad = torch.tensor([gradient]), torch.tensor([gradient])
        optimizer.step()
        seen.append(p.item())
    right = [-0.01, -0.015865883, -0.019912614, -0.022923176, -0.025270180]
    # Nine digits of the target, and per step an update of at most lr that is off by 12 U plus 4 U for each step that
    # the moments have been through, and one rounding of the sum.
    bound = 5e-10 + sum(U * (1e-2 * (12 + 4 * t) + 0.045) for t in range(1, 6))
    compare("AMSGrad", torch.tensor(seen, dtype=torch.float64), torch.tensor(right, dtype=torch.float64), bound)
    compare("plain", plain, torch.tensor([-0.044268983], dtype=torch.float64), bound)
    assert "max_exp_avg_sq" not in optimizer.state[plain]
    assert optimizer.state[p]["max_exp_avg_sq"].item() == pytest.approx(50.0, rel=8 * U)


def test_c24_zero_gradients_are_an_ordinary_step():
    """deepspeedai/DeepSpeed#8614, deepspeedai/DeepSpeed#5223: a zero norm was an assertion, -1 stood for infinity."""
    p, idle = parameter(torch.ones(8)), parameter(torch.ones(8))
    optimizer = adamw([p, idle], max_grad_norm=1.0, weight_decay=0.5)
    p.grad = torch.zeros(8)
    optimizer.step()
    assert (optimizer.last_grad_norm, optimizer.last_clip_factor) == (0.0, 1.0)
    assert not optimizer.last_step_skipped
    compare("parameter", p, torch.full((8,), 0.95, dtype=torch.float64), 3 * U)  # lr * wd, its product, the difference
    state = optimizer.state[p]
    assert state["step"] == 1
    assert torch.equal(state["exp_avg"], torch.zeros(8))
    assert torch.equal(state["exp_avg_sq"], torch.zeros(8))
    assert torch.equal(idle, torch.ones(8))
    assert idle not in optimizer.state
