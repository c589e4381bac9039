"""What ruda_torch.AdamW takes and refuses: PyTorch's own test inputs, bad arguments, gradients that cannot be read."""

from __future__ import annotations

import sys
import types
import warnings

import numpy as np
import pytest
import torch
from cases import as_array
from kernel_runs import same_bits
from optimizer_runs import SHAPES, STRONG, Twins, backward, bits_of, groups, model
from torch.optim import lr_scheduler

import ruda_torch
from ruda_optim.fused_adamw import FusedAdamWError, InvalidOption, InvalidTensor


def test_a_parameter_twice_in_one_group_is_refused_before_any_write() -> None:
    parameter, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = ruda_torch.AdamW([other, parameter, parameter], fused_step=True)
    parameter.grad = other.grad = torch.ones(3)
    with pytest.raises(InvalidTensor, match="parameter 2 of group 0 appears twice"):
        optimizer.step()
    assert (other == 1).all()
    assert not optimizer.state


def test_named_parameters_are_named_in_errors() -> None:
    net = model()
    optimizer = ruda_torch.AdamW(net.named_parameters(), fused_step=True)
    backward(net, 0)
    optimizer.step()
    net[3].weight.grad = torch.ones(4, 9).to_sparse()
    with pytest.raises(InvalidTensor, match=r"parameter 4 of group 0 \(3.weight\) must be dense"):
        optimizer.step()


# ----------------------------------------------------------------------------------- PyTorch's own test inputs


def torchs_inputs() -> tuple[list, list, list]:
    """PyTorch's inputs, error inputs and schedulers for AdamW."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's testing package imports what it deprecates
        from torch.testing._internal.common_optimizers import optim_db
    (info,) = (info for info in optim_db if info.optim_cls is torch.optim.AdamW)
    inputs = info.optim_inputs_func(device="cpu")
    return inputs, info.optim_error_inputs_func(device="cpu", dtype=torch.float32), info.scheduler_inputs


INPUTS, ERROR_INPUTS, SCHEDULER_INPUTS = torchs_inputs()

# Error inputs of torch that the fused step answers in its own words: description -> what it says, and why.
OWN_WORDS = {
    "Tensor lr must be 1-element": "lr must be one number",  # checked before torch does, with the group named
    "beta1 should be between 0 and 1": r"betas\[0\] must be a number in",  # the same range, one wording for all options
    "weight_decay should > 0": "weight_decay must be a finite number >= 0",  # likewise
    # Chooses one of torch's steps, which fused_step=True replaces.
    "lr as Tensor doesn't work with foreach & not capturable": "foreach=True chooses one of torch's steps",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "foreach=True chooses one of",
}


@pytest.mark.parametrize("entry", INPUTS, ids=lambda entry: entry.desc)
def test_torchs_own_inputs(entry) -> None:
    twins = Twins([(SHAPES, {})], **entry.kwargs)
    for _ in range(4):
        twins.step()


@pytest.mark.parametrize("fused_step", [False, True])
@pytest.mark.parametrize("entry", ERROR_INPUTS, ids=lambda entry: entry.optimizer_error_input.desc)
def test_torchs_own_error_inputs(entry, fused_step) -> None:
    described = entry.optimizer_error_input
    params = [torch.nn.Parameter(torch.ones(1))] if described.params is None else described.params
    expected = OWN_WORDS.get(described.desc, entry.error_regex) if fused_step else entry.error_regex
    if entry.error_type is UserWarning:
        with pytest.warns(UserWarning, match=expected):
            ruda_torch.AdamW(params, fused_step=fused_step, **described.kwargs)
        return
    with pytest.raises(entry.error_type, match=expected):
        ruda_torch.AdamW(params, fused_step=fused_step, **described.kwargs)


def test_the_list_of_own_words_is_up_to_date() -> None:
    assert OWN_WORDS.keys() <= {entry.optimizer_error_input.desc for entry in ERROR_INPUTS}


@pytest.mark.parametrize("index", range(len(SCHEDULER_INPUTS)))
def test_torchs_own_scheduler_inputs(index) -> None:
    twins = Twins([(SHAPES, {})], lr=0.01)
    both = [[make(optimizer) for make in SCHEDULER_INPUTS[index]] for optimizer in (twins.ours, twins.theirs)]
    for _ in range(5):
        twins.step()
        for schedules in both:
            for schedule in schedules:
                schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


# ------------------------------------------------------------------------------------------------- what is refused


def one(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, dtype=dtype))]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fused_step": 1}, InvalidOption, "fused_step must be True or False, got 1"),
        ({"check_finite": None}, InvalidOption, "check_finite must be True or False, got None"),
        ({"split_master": 1}, InvalidOption, "split_master must be None, True or False, got 1"),
        ({"max_grad_norm": 1.0}, InvalidOption, "max_grad_norm=1.0 needs fused_step=True"),
        ({"hierarchical_stats": True}, InvalidOption, "hierarchical_stats=True needs fused_step=True"),
        ({"split_master": True}, InvalidOption, "split_master=True needs fused_step=True"),
        ({"max_grad_norm": -1.0, "fused_step": True}, InvalidOption, r"None or a number >= 0 .*, got -1.0"),
        ({"max_grad_norm": np.nan, "fused_step": True}, InvalidOption, r"None or a number >= 0 .*, got nan"),
        ({"foreach": True, "fused_step": True}, InvalidOption, "foreach=True chooses one of torch's steps"),
        ({"fused": True, "fused_step": True}, InvalidOption, "fused=True chooses one of torch's steps"),
        ({"differentiable": True, "fused_step": True}, InvalidOption, "differentiable=True chooses one of"),
        ({"params": one(torch.float64), "fused_step": True}, InvalidTensor, "parameter 0 of group 0 must be float32, "),
        ({"params": one(torch.complex64), "fused_step": True}, InvalidTensor, "got torch.complex64"),
    ],
)
def test_the_constructor_refuses(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        ruda_torch.AdamW(**{"params": one(), **arguments})


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": one(), "lr": -1.0}, "group 1: lr"),
        ({"params": one(torch.float64)}, "parameter 0 of group 1 must be float32"),
        ({"params": [*one(), *one(torch.float64)]}, "parameter 1 of group 1 must be float32"),
    ],
)
def test_a_late_group_is_refused_before_it_is_added(group, message) -> None:
    optimizer = ruda_torch.AdamW(one(), fused_step=True)
    with pytest.raises(FusedAdamWError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("params", [{torch.nn.Parameter(torch.ones(2))}, "set"], ids=["a set", "text"])
@pytest.mark.parametrize("fused_step", [False, True])
def test_what_is_no_list_of_parameters_is_torchs_to_refuse(params, fused_step) -> None:
    """The order of a set differs from run to run, and with it what a checkpoint means."""
    optimizer = ruda_torch.AdamW(one(), fused_step=fused_step)
    with pytest.raises(TypeError, match=r"ordered collections|only optimize Tensors"):
        optimizer.add_param_group({"params": params})
    with pytest.raises(TypeError, match=r"ordered collections|only optimize Tensors"):
        ruda_torch.AdamW([{"params": params}], fused_step=fused_step)
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group(params)
    assert len(optimizer.param_groups) == 1


FROZEN = [torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", FROZEN, ids=str)
def test_a_frozen_parameter_may_be_anything(dtype) -> None:
    frozen = torch.nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    trained = one()[0]
    optimizer = ruda_torch.AdamW([frozen, trained], fused_step=True, max_grad_norm=1.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(frozen.data.clone(), requires_grad=False)]})
    for _ in range(2):
        trained.grad = torch.ones(2)
        optimizer.step()
    assert frozen not in optimizer.state
    assert (frozen == torch.ones(3).to(dtype)).all()
    loaded = ruda_torch.AdamW([frozen, trained], fused_step=True)
    loaded.add_param_group({"params": [torch.nn.Parameter(frozen.data.clone(), requires_grad=False)]})
    loaded.load_state_dict(optimizer.state_dict())
    loaded.step()


def test_a_parameter_that_is_thawed_is_checked_when_it_has_a_gradient() -> None:
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    trained = one()[0]
    optimizer = ruda_torch.AdamW([trained, frozen], fused_step=True)
    trained.grad, frozen.grad = torch.ones(2), torch.ones(3, dtype=torch.float64)
    with pytest.raises(InvalidTensor, match="parameter 1 of group 0"):
        optimizer.step()
    assert (trained == 1).all()


@pytest.mark.parametrize(
    ("name", "bad"),
    [("lr", -1.0), ("lr", np.nan), ("betas", (0.9, 1.0)), ("betas", (0.9,)), ("eps", 0.0), ("weight_decay", -1.0)],
)
def test_a_bad_hyperparameter_set_later_stops_the_step_before_any_write(name, bad) -> None:
    twins = groups()
    twins.step()
    before = bits_of(twins.ours)
    twins.ours.param_groups[3][name] = bad
    twins.backward()
    with pytest.raises(InvalidOption, match="group 3: "):
        twins.ours.step()
    assert all(map(same_bits, before, bits_of(twins.ours)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda g: g.to_sparse(), "gradient of parameter 1 of group 0 must be dense, got layout torch.sparse_coo"),
        (torch._neg_view, "gradient of parameter 1 of group 0 is a lazily negated view"),
        (lambda g: torch._efficientzerotensor(g.shape), "parameter 1 of group 0 is zero without memory"),
    ],
    ids=["sparse", "negated", "zero tensor"],
)
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
def test_a_gradient_that_cannot_be_read_stops_the_step_before_any_write(bad, message, steps) -> None:
    """Autograd itself can hand over a lazily negated gradient: a custom backward may return one."""
    twins = Twins([(SHAPES, {})], **STRONG)
    for _ in range(steps):
        twins.step()
    before = bits_of(twins.ours)
    twins.backward()
    good = twins.pairs[1][0].grad
    twins.pairs[1][0].grad = bad(good)
    with pytest.raises(InvalidTensor, match=message):
        twins.ours.step()
    assert all(map(same_bits, before, bits_of(twins.ours)))
    twins.pairs[1][0].grad = good
    twins.ours.step()
    twins.theirs.step()
    twins.compare()


def test_a_custom_backward_can_return_a_negated_gradient() -> None:
    class Negate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return -x

        @staticmethod
        def backward(ctx, gradient):
            return torch._neg_view(gradient.clone())

    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.zero_grad()
    Negate.apply(parameter).sum().backward()
    assert parameter.grad.is_neg()
    before = parameter.clone()
    with pytest.raises(InvalidTensor, match=r"assign p.grad.resolve_neg\(\)"):
        optimizer.step()
    parameter.grad = parameter.grad.resolve_neg()
    optimizer.step()
    assert not same_bits(before, parameter)
    assert (as_array(optimizer.state[parameter]["exp_avg"]) < 0.09).all()


def test_parameters_that_cannot_be_followed_are_refused_at_every_step(monkeypatch) -> None:
    """Not at the first one alone: the second would clip by this rank's norm."""
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", types.ModuleType("torch.distributed.fsdp"))
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter._fsdp_flattened = True
    parameter.grad = torch.ones(3)
    optimizer = ruda_torch.AdamW([parameter], fused_step=True, max_grad_norm=1.0)
    for _ in range(3):
        with pytest.raises(InvalidTensor, match="FSDP1"):
            optimizer.step()
    assert (parameter == 1).all()
