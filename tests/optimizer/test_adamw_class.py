"""ruda_torch.AdamW against torch.optim.AdamW: hyperparameters, groups, schedules, closures, copies, hooks."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from kernel_runs import same_bits
from optimizer_runs import SHAPES, STRONG, Twins, assert_same, backward, bits_of, gradient_for, groups, model
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ruda_torch

# ------------------------------------------------------------------------------------------ fused_step=False


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"amsgrad": True, "maximize": True},
        {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"lr": torch.tensor(0.1)},
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"fused": True, "amsgrad": True},
        {"eps": 0.0},
    ],
    ids=str,
)
def test_without_fused_step_it_is_torchs_step_bit_for_bit(settings) -> None:
    nets = model(), model()
    ours = ruda_torch.AdamW(nets[0].parameters(), **settings)
    theirs = torch.optim.AdamW(nets[1].parameters(), **settings)
    for seed in range(4):
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            optimizer.zero_grad()
            backward(net, seed)
            optimizer.step()
        assert_same(ours, theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    assert isinstance(ours, torch.optim.AdamW)
    assert not ours.fused_step


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("others", ["none", "before", "after"])
def test_hooks_run_once(fused_step, others) -> None:
    """The first object of an optimizer class makes torch wrap the step of that class."""
    if others == "before":
        torch.optim.AdamW(model().parameters())
    net = model()
    optimizer = ruda_torch.AdamW(net.parameters(), fused_step=fused_step)
    if others == "after":
        torch.optim.AdamW(model().parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    try:
        backward(net, 0)
        optimizer.step()
        assert calls == ["global pre", "pre", "post", "global post"]
        optimizer.step()
        assert len(calls) == 8
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("fused_step", [False, True])
def test_the_profiler_sees_the_step(fused_step) -> None:
    net = model()
    optimizer = ruda_torch.AdamW(net.parameters(), fused_step=fused_step)
    backward(net, 0)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        optimizer.step()
    optimizer.step()
    counted = {event.key: event.count for event in profile.key_averages()}
    assert counted["Optimizer.step#AdamW.step"] == 1
    assert counted.get("ruda_optim::adamw_scaled", 0) == int(fused_step)


# ------------------------------------------------------------------------------------------ values, against FP64


@pytest.mark.parametrize(
    "settings",
    [
        STRONG,
        {},
        {**STRONG, "amsgrad": True},
        {**STRONG, "maximize": True},
        {**STRONG, "amsgrad": True, "maximize": True},
        {**STRONG, "weight_decay": 0},
        {**STRONG, "betas": (0.0, 0.0), "amsgrad": True},
        {**STRONG, "betas": (0.5, 0.9)},
        {"lr": torch.tensor(0.01, dtype=torch.float64), "weight_decay": 0.1},
        {**STRONG, "betas": (torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64))},
        {"lr": 0.0},
        {"lr": 1, "weight_decay": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("check_finite", [True, False])
def test_hyperparameters(settings, check_finite) -> None:
    twins = Twins([(SHAPES, {})], **settings)
    twins.ours = ruda_torch.AdamW(
        [ours for ours, _ in twins.pairs], fused_step=True, check_finite=check_finite, **settings
    )
    for _ in range(5):
        twins.step()


def test_groups_with_their_own_hyperparameters() -> None:
    twins = groups()
    for _ in range(5):
        twins.step()


def test_hyperparameters_are_read_at_every_step() -> None:
    twins = groups()
    for step in range(6):
        for optimizer in (twins.ours, twins.theirs):
            first, _, third, fourth, *_, last = optimizer.param_groups
            first["lr"] = 1e-2 / (step + 1)
            first["weight_decay"] = 0.1 * step
            third["betas"] = (0.5 + 0.05 * step, 0.9 + 0.01 * step)
            fourth["eps"] = 10.0 ** (step - 6)
            third["maximize"] = bool(step % 2)
            last["lr"].fill_(0.01 * (step + 1))
        twins.step()


def test_a_group_added_later_starts_at_step_one() -> None:
    twins = Twins([(SHAPES, {})], **STRONG)
    for _ in range(3):
        twins.step()
    ours, theirs = twins.new_group([(4, 4), (0,)], {"lr": 0.05, "amsgrad": True})
    twins.ours.add_param_group(ours)
    twins.theirs.add_param_group(theirs)
    for _ in range(3):
        twins.step()
    assert twins.ours.state[twins.pairs[-2][0]]["step"] == 3


@pytest.mark.parametrize(
    "active",
    [
        [[0], [1], [0], [1], [0, 1], [0, 1]],
        [[0, 1, 2, 3, 4], [], [4], [], [0, 1, 2, 3, 4], [3]],
        [[0], [0, 1], [0, 1, 2], [1, 2], [2], [0, 2], [0], [2], [0, 1, 2, 3, 4], [0, 1]],
    ],
    ids=["alternating", "none at all", "more sets than kept plans"],
)
def test_gradients_that_come_and_go(active) -> None:
    twins = Twins([(SHAPES, {})], **STRONG, amsgrad=True)
    for positions in active * 2:
        before = bits_of(twins.ours)
        twins.step(positions)
        if not positions:
            assert all(map(same_bits, before, bits_of(twins.ours)))


def test_parameters_without_a_gradient_get_no_state() -> None:
    twins = Twins([(SHAPES, {})], **STRONG)
    twins.step([1])
    assert list(twins.ours.state) == [twins.pairs[1][0]]
    twins.ours.step()
    empty = ruda_torch.AdamW([torch.nn.Parameter(torch.ones(2))], fused_step=True)
    empty.step()
    assert not empty.state
    assert not empty.last_step_skipped


def test_a_frozen_parameter_rests_and_wakes() -> None:
    twins = Twins([(SHAPES, {})], **STRONG)
    frozen = twins.pairs[1]
    for parameter in frozen:
        parameter.requires_grad_(False)
    start = frozen[0].clone()
    for _ in range(2):
        twins.step()
    assert same_bits(frozen[0], start)
    for parameter in frozen:
        parameter.requires_grad_(True)
    for _ in range(2):
        twins.step()
    assert twins.ours.state[frozen[0]]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_device_and_dtype_do_not_matter(dtype) -> None:
    """A training script may set both; the books of a step are on the host and FP32 all the same."""
    left, right = (torch.nn.Parameter(torch.linspace(-1, 1, 600).to(dtype)) for _ in range(2))
    plain = ruda_torch.AdamW([left], fused_step=True, max_grad_norm=0.1, **STRONG)
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            other = ruda_torch.AdamW([right], fused_step=True, max_grad_norm=0.1, **STRONG)
            for seed in range(4):
                left.grad = right.grad = torch.from_numpy(gradient_for((600,), seed)).to(dtype)
                other.step()
                saved = other.state_dict()
                other.load_state_dict(saved)
                plain.step()
                assert other.last_group_norms == plain.last_group_norms
    finally:
        torch.set_default_dtype(usual)
    assert all(map(same_bits, bits_of(plain), bits_of(other)))


# ----------------------------------------------------------------------------------------------------- schedules

SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=8, cycle_momentum=True),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=3, cycle_momentum=True),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name, tensor_lr) -> None:
    lr = torch.tensor(0.01, dtype=torch.float64) if tensor_lr else 0.01
    twins = Twins([(SHAPES, {}), ([(17,)], {"weight_decay": 0.0})], lr=lr, weight_decay=0.1)
    if tensor_lr:  # each optimizer has its own
        for group in (*twins.ours.param_groups, *twins.theirs.param_groups):
            group["lr"] = lr.clone()
    schedules = [SCHEDULES[name](optimizer) for optimizer in (twins.ours, twins.theirs)]
    seen = set()
    for _ in range(7):
        twins.step()
        for schedule in schedules:
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        left, right = ([float(group["lr"]) for group in o.param_groups] for o in (twins.ours, twins.theirs))
        assert left == right
        seen.add(left[0])
    assert len(seen) > 1, "the schedule did nothing"
    if name in ("OneCycleLR", "CyclicLR"):
        assert float(twins.ours.param_groups[0]["betas"][0]) != 0.9, "momentum did not cycle"
    restored = SCHEDULES[name](copy.deepcopy(twins.ours))
    restored.load_state_dict(schedules[0].state_dict())


# --------------------------------------------------------------------------------- closures, zero_grad, copies


@pytest.mark.parametrize("fused_step", [False, True])
def test_a_closure_is_called_once_with_gradients_enabled(fused_step) -> None:
    net = model()
    optimizer = ruda_torch.AdamW(net.parameters(), fused_step=fused_step)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(net, len(calls))

    before = bits_of(optimizer)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.requires_grad
    assert not all(map(same_bits, before, bits_of(optimizer)))
    assert optimizer.step() is None


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(set_to_none) -> None:
    nets = model(), model()
    ours = ruda_torch.AdamW(nets[0].parameters(), fused_step=True, **STRONG)
    theirs = ruda_torch.AdamW(nets[1].parameters(), fused_step=True, **STRONG)
    for seed in range(4):
        ours.zero_grad(set_to_none=set_to_none)
        for parameter in nets[0].parameters():
            assert parameter.grad is None if set_to_none or seed == 0 else not parameter.grad.any()
        theirs.zero_grad()
        backward(nets[0], seed)
        backward(nets[1], seed)
        ours.step()
        theirs.step()
        assert_same(ours, theirs)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "deepcopy before the first step"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_grad_norm": 0.5, "hierarchical_stats": True}, {"check_finite": False, "amsgrad": True}],
    ids=str,
)
def test_a_copy_continues_bit_for_bit(settings, how) -> None:
    net = model().bfloat16() if settings.get("amsgrad") else model()
    optimizer = ruda_torch.AdamW(net.parameters(), fused_step=True, **STRONG, **settings)
    for seed in range(0 if "before" in how else 3):
        optimizer.zero_grad()
        backward_of(net, seed)
        optimizer.step()
    both = (net, optimizer)
    net2, optimizer2 = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    assert optimizer2.fused_step
    assert optimizer2.settings == optimizer.settings
    addresses = {tensor.data_ptr() for tensor in live(optimizer) if tensor.numel()}
    assert addresses.isdisjoint(tensor.data_ptr() for tensor in live(optimizer2))
    for seed in range(3, 6):
        for one, other in ((net, optimizer), (net2, optimizer2)):
            other.zero_grad()
            backward_of(one, seed)
            other.step()
        assert_same(optimizer, optimizer2)


def backward_of(net: torch.nn.Module, seed: int) -> None:
    for index, parameter in enumerate(net.parameters()):
        parameter.grad = torch.from_numpy(gradient_for(parameter.shape, (seed, index))).to(parameter.dtype)


def live(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters and state tensors themselves."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*(p for group in optimizer.param_groups for p in group["params"]), *states]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autograd_notices_the_update(dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    frozen = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = ruda_torch.AdamW([parameter, frozen], fused_step=True)
    for _ in range(3):
        parameter.grad = torch.ones(3, dtype=dtype)
        version = parameter._version
        saved = (parameter * parameter).sum()
        optimizer.step()
        assert parameter._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
    assert frozen._version == 0
    parameter.grad = torch.full((3,), np.nan, dtype=dtype)
    version = parameter._version
    optimizer.step()
    assert optimizer.last_step_skipped
    assert parameter._version == version, "a skipped step changes nothing"


@pytest.mark.filterwarnings("ignore::ruda_torch.report.SkippedStepsWarning")
@pytest.mark.parametrize("check_finite", [True, False])
def test_an_infinite_norm_measures_and_never_clips(check_finite) -> None:
    """People pass it to log the norm."""
    left, right = (torch.nn.Parameter(torch.linspace(-1, 1, 50)) for _ in range(2))
    measured = ruda_torch.AdamW([left], fused_step=True, max_grad_norm=math.inf, check_finite=check_finite)
    plain = ruda_torch.AdamW([right], fused_step=True, check_finite=check_finite)
    for gradient in (1e30, 1.0, math.nan, math.inf, 2.0):
        left.grad, right.grad = torch.full((50,), gradient), torch.full((50,), gradient)
        measured.step()
        plain.step()
        assert measured.last_clip_factor == 1.0
        assert measured.last_step_skipped is plain.last_step_skipped is (check_finite and not math.isfinite(gradient))
        want = gradient * 50**0.5 if math.isfinite(gradient) else math.inf
        assert measured.last_grad_norm == pytest.approx(want, rel=1e-6)
        assert same_bits(left, right)
    saved = measured.state_dict()
    loaded = ruda_torch.AdamW([left], fused_step=True)
    loaded.load_state_dict(saved)
    assert loaded.max_grad_norm == math.inf
