"""Tensors that move between steps: ruda_torch.AdamW never updates memory that nobody looks at any more."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from kernel_runs import same_bits
from optimizer_runs import STRONG, bits_of, gradient_for
from small_runs import raw_bytes

import ruda_torch
from ruda_optim.fused_adamw import InvalidState, InvalidTensor, ShapeMismatch

SHAPES = ((4, 4), (3, 4, 2, 5), (1000,), ())


def build(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.ParameterList, ruda_torch.AdamW]:
    values = [torch.from_numpy(gradient_for(shape, index)).clone().to(dtype) for index, shape in enumerate(SHAPES)]
    module = torch.nn.ParameterList([torch.nn.Parameter(value) for value in values])
    return module, ruda_torch.AdamW(module.parameters(), fused_step=True, amsgrad=True, **STRONG)


def step(module: torch.nn.Module, optimizer: ruda_torch.AdamW, seed: int, view=lambda gradient: gradient) -> None:
    for index, parameter in enumerate(module.parameters()):
        gradient = torch.from_numpy(gradient_for(parameter.shape, (seed, index))).to(parameter.dtype)
        parameter.grad = view(gradient)
    optimizer.step()


def first(module: torch.nn.Module) -> torch.nn.Parameter:
    return next(module.parameters())


def replace_data(module, _):
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def transpose_data(module, _):
    first(module).data = first(module).data.t().contiguous().t()


def set_in_place(module, _):
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.set_(parameter.detach().clone())


def resize_storage(module, _):
    """As a sharded model frees and refills its parameters."""
    for parameter in module.parameters():
        values = parameter.detach().clone()
        storage = parameter.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        torch.empty(1 << 16)
        storage.resize_(size)
        parameter.data.copy_(values)


def share_memory(module, _):
    module.share_memory()


def channels_last(module, _):
    module.to(memory_format=torch.channels_last)


def swap_tensors(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = None
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().clone()))


def replace_state(_, optimizer):
    for state in optimizer.state.values():
        for key, value in list(state.items()):
            state[key] = value.clone()


def replace_one_moment(module, optimizer):
    state = optimizer.state[first(module)]
    state["exp_avg_sq"] = state["exp_avg_sq"].clone()


def replace_counter(module, optimizer):
    optimizer.state[first(module)]["step"] = optimizer.state[first(module)]["step"].clone()


def replace_state_data(_, optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def set_state_in_place(_, optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.set_(value.clone())


def replace_state_dict(_, optimizer):
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}


def other_layout_of_state(module, optimizer):
    state = optimizer.state[first(module)]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def counter_as_int(module, optimizer):
    optimizer.state[first(module)]["step"] = int(optimizer.state[first(module)]["step"])


def counter_as_fp64(module, optimizer):
    optimizer.state[first(module)]["step"] = optimizer.state[first(module)]["step"].double()


def reload(_, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def new_parameter_object(module, optimizer):
    old = module[0]
    module[0] = torch.nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"][0] = module[0]
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, entry in state.items():
        optimizer.state[module[0] if parameter is old else parameter] = entry


def reverse_parameters(module, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def reverse_state(_, optimizer):
    entries = list(optimizer.state.items())[::-1]
    optimizer.state.clear()
    optimizer.state.update(entries)


EVENTS = [
    replace_data,
    transpose_data,
    set_in_place,
    resize_storage,
    share_memory,
    channels_last,
    swap_tensors,
    replace_state,
    replace_one_moment,
    replace_counter,
    replace_state_data,
    set_state_in_place,
    replace_state_dict,
    other_layout_of_state,
    counter_as_int,
    counter_as_fp64,
    reload,
    new_parameter_object,
    reverse_parameters,
    reverse_state,
]


def values_of(module: torch.nn.Module, optimizer: ruda_torch.AdamW) -> list[torch.Tensor]:
    """Parameters and their state, in the module's order."""
    found = []
    for parameter in module.parameters():
        found += [
            parameter.detach().clone(),
            *(optimizer.state[parameter][key].clone() for key in sorted(optimizer.state[parameter])),
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_step_follows_tensors_that_move(event, dtype) -> None:
    """An undisturbed twin gives the values; old memory, kept alive by aliases, must stay as it was."""
    module, optimizer = build(dtype)
    twin, untouched = build(dtype)
    for seed in range(3):
        step(module, optimizer, seed)
        step(twin, untouched, seed)
    tensors = [*module.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    old = [] if event is resize_storage else [tensor.detach().view_as(tensor) for tensor in tensors]
    if event in (swap_tensors, set_in_place, set_state_in_place, share_memory):  # an alias forbids or follows these
        old = []
    event(module, optimizer)
    live = {
        t.data_ptr()
        for t in (
            *module.parameters(),
            *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
        )
    }
    stale = [(tensor, tensor.clone()) for tensor in old if tensor.data_ptr() not in live]
    for seed in range(3, 6):
        step(module, optimizer, seed)
        step(twin, untouched, seed)
        for found, wanted in zip(values_of(module, optimizer), values_of(twin, untouched), strict=True):
            assert raw_bytes(found) == raw_bytes(wanted)
    for tensor, before in stale:
        assert same_bits(tensor, before), "a stale tensor was written"


def test_a_transposed_view_of_the_same_memory_is_another_parameter() -> None:
    """Same address, same shape, other strides: nothing moved, and yet every element is another one."""
    module, optimizer = build()
    twin, untouched = build()
    for seed in range(2):
        step(module, optimizer, seed)
        step(twin, untouched, seed)
    with torch.no_grad():
        first(module).data = first(module).data.t()
        first(twin).copy_(first(twin).t().clone())
    for seed in range(2, 5):
        step(module, optimizer, seed, lambda g: g.t().contiguous().t() if g.dim() == 2 else g)
        step(twin, untouched, seed)
        for found, wanted in zip(values_of(module, optimizer), values_of(twin, untouched), strict=True):
            assert raw_bytes(found) == raw_bytes(wanted)


def test_moving_to_half_precision_starts_a_master_and_keeps_the_moments() -> None:
    module, optimizer = build()
    for seed in range(2):
        step(module, optimizer, seed)
    moments = optimizer.state[first(module)]["exp_avg"].clone()
    module.to(torch.bfloat16)
    step(module, optimizer, 2)
    state = optimizer.state[first(module)]
    assert state["master_remainder"].view(torch.int16).any()
    assert state["step"] == 3
    assert not same_bits(moments, state["exp_avg"])


def test_moving_to_a_dtype_without_kernels_is_refused_before_any_write() -> None:
    module, optimizer = build()
    for seed in range(2):
        step(module, optimizer, seed)
    module.to(torch.float64)
    before = bits_of(optimizer)
    with pytest.raises(InvalidTensor, match="parameter 0 of group 0 must be float32, float16 or bfloat16"):
        step(module, optimizer, 2)
    assert all(raw_bytes(left) == raw_bytes(right) for left, right in zip(before, bits_of(optimizer), strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda s: s.update(exp_avg=s["exp_avg"].half()),
            InvalidState,
            r"exp_avg of parameter 2 of group 0 must be float32",
        ),
        (
            lambda s: s.update(exp_avg=s["exp_avg"][:-1]),
            ShapeMismatch,
            r"must have the parameter's shape \(1000,\), got \(999,\)",
        ),
        (lambda s: s.update(exp_avg=s["exp_avg"][:1].expand(1000)), InvalidState, r"must not share memory"),
        (lambda s: s.pop("exp_avg_sq"), InvalidState, r"must have step, exp_avg and exp_avg_sq"),
        (lambda s: s.pop("max_exp_avg_sq"), InvalidState, r"no max_exp_avg_sq, which amsgrad=True needs"),
        (lambda s: s.update(step="3"), InvalidState, r"the step of parameter 2 of group 0 must be a number"),
        (lambda s: s.update(step=torch.ones(2)), InvalidState, r"must be one number, got a tensor of shape"),
        (lambda s: s.update(step=2.5), InvalidState, r"whole number >= 0, got 2.5"),
        (lambda s: s.update(step=-1), InvalidState, r"whole number >= 0, got -1"),
        (lambda s: s.update(exp_avg=None), InvalidState, r"exp_avg"),
    ],
)
def test_a_state_that_does_not_fit_stops_the_step_before_any_write(change, error, message) -> None:
    module, optimizer = build()
    for seed in range(2):
        step(module, optimizer, seed)
    change(optimizer.state[module[2]])
    before = [parameter.detach().clone() for parameter in module.parameters()]
    others = [value.clone() for value in optimizer.state[module[0]].values()]
    with pytest.raises(error, match=message):
        step(module, optimizer, 2)
    assert all(same_bits(a, b) for a, b in zip(before, (p.detach() for p in module.parameters()), strict=True))
    assert all(map(same_bits, others, optimizer.state[module[0]].values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("position", "change", "shape"),
    [
        (2, lambda data: data[:10], r"\(10,\)"),
        (1, lambda data: data[:, :, 0], r"\(3, 4, 5\)"),
        (0, lambda data: data[:2], r"\(2, 4\)"),
        (0, lambda data: data[:, ::2], r"\(4, 2\)"),
    ],
)
def test_a_parameter_that_shrinks_in_place_is_refused_before_any_write(position, change, shape, dtype) -> None:
    """Its address stays, but the moments belong to the old shape."""
    module, optimizer = build(dtype)
    for seed in range(2):
        step(module, optimizer, seed)
    module[position].data = change(module[position].data)
    before = bits_of(optimizer)
    with pytest.raises(
        ShapeMismatch, match=rf"parameter {position} of group 0 must have the parameter's shape {shape}"
    ):
        step(module, optimizer, 2)
    assert all(raw_bytes(left) == raw_bytes(right) for left, right in zip(before, bits_of(optimizer), strict=True))


def test_a_parameter_may_leave_and_return() -> None:
    module, optimizer = build()
    twin, untouched = build()
    for seed in range(6):
        if seed == 2:
            parked = optimizer.param_groups[0]["params"].pop(1)
        if seed == 4:
            optimizer.param_groups[0]["params"].insert(1, parked)
        step(module, optimizer, seed)
        for index, parameter in enumerate(twin.parameters()):
            parameter.grad = torch.from_numpy(gradient_for(parameter.shape, (seed, index)))
        if seed in (2, 3):
            twin[1].grad = None
        untouched.step()
        for found, wanted in zip(values_of(module, optimizer), values_of(twin, untouched), strict=True):
            assert raw_bytes(found) == raw_bytes(wanted)


class Doubled(torch.nn.Parameter):
    """Its gradient is computed when somebody asks, so nobody else owns it."""

    @property
    def grad(self):
        own = torch.Tensor.grad.__get__(self)
        return None if own is None else own * 2.0

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


@pytest.mark.parametrize("view", [lambda g: g, lambda g: g.t().contiguous().t()], ids=["flat", "strided"])
def test_a_computed_gradient_lives_until_the_update(view) -> None:
    shape = (256, 512)
    left, right = (kind(torch.ones(shape)) for kind in (torch.nn.Parameter, Doubled))
    plain, computed = (ruda_torch.AdamW([p], fused_step=True, max_grad_norm=0.5, **STRONG) for p in (left, right))
    for seed in range(4):
        gradient = view(torch.from_numpy(gradient_for(shape, seed)))
        left.grad, right.grad = gradient * 2.0, gradient
        plain.step()
        computed.step()
        assert same_bits(left, right)


def test_no_gradient_is_kept_between_steps() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    for _ in range(3):
        parameter.grad = torch.ones(5)
        alive = weakref.ref(parameter.grad)
        optimizer.step()
        parameter.grad = None
        assert alive() is None


def test_an_empty_parameter_that_is_given_elements_is_noticed() -> None:
    parameter, other = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.ones(2))
    optimizer = ruda_torch.AdamW([parameter, other], fused_step=True)
    for _ in range(2):
        parameter.grad, other.grad = torch.empty(0), torch.ones(2)
        optimizer.step()
    parameter.data = torch.zeros(3)
    parameter.grad = torch.ones(3)
    with pytest.raises(ShapeMismatch, match=r"exp_avg of parameter 0 of group 0 must have .* \(3,\), got \(0,\)"):
        optimizer.step()
