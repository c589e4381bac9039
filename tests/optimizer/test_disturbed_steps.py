"""Steps that something disturbs: another thread, a nested step, an interrupt, an error, a setting that is set back."""

from __future__ import annotations

import collections
import sys
import threading

import pytest
import torch

import ruda_torch
from ruda_optim.fused_adamw import InvalidState, InvalidTensor
from ruda_torch import engine


def made(*shapes: int, **options) -> tuple[list[torch.nn.Parameter], ruda_torch.AdamW]:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters, ruda_torch.AdamW([{"params": [p]} for p in parameters], lr=0.1, fused_step=True, **options)


def test_a_norm_that_is_set_and_set_back_clips_as_it_says():
    _, optimizer = made(4, max_grad_norm=1.0)
    optimizer.step()
    optimizer.max_grad_norm = 0.01
    optimizer.max_grad_norm = 1.0
    optimizer.step()
    assert optimizer.last_clip_factor == pytest.approx(0.5)
    saved = optimizer.state_dict()
    saved["ruda"]["max_grad_norm"] = None
    optimizer.load_state_dict(saved)
    optimizer.max_grad_norm = 1.0
    optimizer.step()
    assert optimizer.last_clip_factor == pytest.approx(0.5)


def test_another_norm_at_every_step_builds_no_plan(monkeypatch):
    _, optimizer = made(4, max_grad_norm=1.0)
    optimizer.step()
    monkeypatch.setattr(engine, "NewPlan", lambda *_: pytest.fail("a new plan"))
    for norm in (0.5, 0.25, 2.0):
        optimizer.max_grad_norm = norm
        optimizer.step()
        assert optimizer.last_clip_factor == pytest.approx(min(norm / 2, 1.0), rel=1e-5)


def test_steps_of_several_threads_are_taken_one_after_the_other():
    parameters, optimizer = made(*[64] * 60)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def train():
        for _ in range(50):
            for parameter in parameters:
                parameter.grad = torch.ones(64)
            optimizer.step()

    try:
        threads = [threading.Thread(target=train) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [float(optimizer.state[p]["step"]) for p in parameters] == [150.0] * 60


def test_a_step_within_a_step_is_refused():
    class Nosy(torch.nn.Parameter):
        @property
        def grad(self):
            optimizer.step()

    optimizer = ruda_torch.AdamW([Nosy(torch.ones(3))], fused_step=True)
    with pytest.raises(InvalidState, match="called from within a step of the same optimizer"):
        optimizer.step()


def test_state_that_another_thread_removes_lives_until_the_step_ends():
    parameters, optimizer = made(*[200_000] * 10)
    optimizer.step()
    stop = threading.Event()

    def remove():
        while not stop.is_set():
            optimizer.state.clear()

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(20):
            optimizer.step()
    finally:
        stop.set()
        thread.join()
    assert all(bool(p.isfinite().all()) for p in parameters)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_an_interrupted_launch_counts_nothing(monkeypatch, rebuilt):
    (parameter,), optimizer = made(8)
    monkeypatch.setattr(engine, "_observed", lambda: True)
    optimizer.step()
    before = parameter.detach().clone()
    if rebuilt:
        parameter.data = parameter.data.clone()
    original = torch.autograd.graph.increment_version
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(parameter, before)
    assert float(optimizer.state[parameter]["step"]) == 1.0
    monkeypatch.setattr(torch.autograd.graph, "increment_version", original)
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 2.0


def test_after_an_error_the_readers_tell_of_the_step_before():
    (a, b), optimizer = made(4, 16)
    optimizer.step()
    optimizer.step()
    told = optimizer.last_grad_norm, optimizer.last_group_norms
    a.grad, b.grad = None, torch.ones(16).to_sparse()
    with pytest.raises(InvalidTensor, match="must be dense"):
        optimizer.step()
    assert (optimizer.last_grad_norm, optimizer.last_group_norms) == told
    assert told[1] == pytest.approx((2.0, 4.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda group, step: group.update(lr=0.1 / (step + 1)),
        lambda group, step: group.update(lr=torch.tensor(0.1)) if step == 1 else None,
        lambda group, step: group["lr"].div_(2.0) if step > 1 else group.update(lr=torch.tensor(0.1)),
        lambda group, step: group.update(betas=[0.5, 0.9]) if step == 1 else None,
        lambda group, step: group["betas"].reverse() if step > 1 else group.update(betas=[0.9, 0.8]),
        lambda group, step: group.update(weight_decay=0.5 * (step == 2)),
        lambda group, step: group.update(eps=1e-8 if step % 2 else 0.1),
        lambda group, step: group.update(maximize=step == 1),
    ],
    ids=["lr", "tensor", "tensor in place", "betas", "betas in place", "decay", "eps", "maximize"],
)
def test_hyperparameters_that_change_between_steps_are_heard(change):
    found = []
    for cls, options in ((ruda_torch.AdamW, {"fused_step": True}), (torch.optim.AdamW, {})):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 9))
        optimizer = cls([parameter], lr=0.1, **options)
        for step in range(5):
            change(optimizer.param_groups[0], step)
            parameter.grad = torch.linspace(1, -1, 9) * (step + 1)
            optimizer.step()
        found.append(parameter.detach().clone())
    # Five steps of lr 0.1 in FP32: some roundings of numbers below 2.
    assert torch.allclose(*found, rtol=0.0, atol=2**-20)


def test_a_number_that_comes_back_after_a_step_that_python_took_is_heard(monkeypatch):
    (parameter,), optimizer = made(4, weight_decay=0.0)
    optimizer.step()
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_observed", lambda: True)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate  # the very same object
    before = parameter.detach().clone()
    optimizer.step()
    assert not torch.equal(parameter, before)


def test_a_setting_in_a_group_is_refused_between_steps():
    (parameter,), optimizer = made(4)
    optimizer.step()
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    before = parameter.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="max_grad_norm is no option of a group"):
            optimizer.step()
    del optimizer.param_groups[0]["max_grad_norm"]
    assert torch.equal(parameter, before)
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 2.0


def test_parameters_of_a_group_may_be_a_tuple():
    (parameter,), optimizer = made(4)
    optimizer.step()
    optimizer.param_groups[0]["params"] = (parameter,)
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 2.0


@pytest.mark.parametrize("how", ["t_", "data of a state dict"])
def test_a_moment_that_is_transposed_in_place_is_noticed(how):
    torch.manual_seed(0)
    start, gradient = torch.randn(3, 3), torch.randn(3, 3)
    found = []
    for cls, options in ((ruda_torch.AdamW, {"fused_step": True}), (torch.optim.AdamW, {})):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = cls([parameter], lr=0.1, **options)
        for step in range(3):
            parameter.grad = gradient * (step + 1)
            optimizer.step()
            if step == 1 and how == "t_":
                optimizer.state[parameter]["exp_avg"].t_()
            elif step == 1:
                moment = optimizer.state_dict()["state"][0]["exp_avg"]
                moment.data = moment.data.t()
        found.append(parameter.detach().clone())
    # Two steps of lr 0.1 in FP32: some roundings of numbers below 2.
    assert torch.allclose(*found, rtol=0.0, atol=2**-20)


def test_a_gradient_over_the_parameters_own_memory_is_refused_however_it_comes():
    (parameter, other), optimizer = made(4, 4)
    optimizer.step()
    other.grad = None
    parameter.data = parameter.data.clone()  # a new plan, while `other` has no gradient
    optimizer.step()
    other.grad = other.detach()
    with pytest.raises(InvalidTensor, match="shares memory with"):
        optimizer.step()


def test_a_gradient_that_reaches_into_its_parameter_is_refused():
    base = torch.zeros(8)
    parameter = torch.nn.Parameter(base[4:])
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    parameter.grad = base[:4]
    optimizer.step()
    parameter.grad = base[::2]
    with pytest.raises(InvalidTensor, match="shares memory with"):
        optimizer.step()


def test_a_state_that_is_no_dict_is_refused():
    _, optimizer = made(4)
    with pytest.raises(InvalidState, match="must be a dict, got UserDict"):
        optimizer.state = collections.UserDict()


def test_a_report_outlives_the_group_that_it_tells_of():
    _, optimizer = made(4, 16)
    optimizer.step()
    optimizer.param_groups.pop()
    assert [line.elements for line in optimizer.gradient_report()] == [4, 16]
