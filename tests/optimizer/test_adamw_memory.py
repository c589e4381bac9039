"""ruda_torch.AdamW and memory: layouts, dtypes, overlapping and empty tensors, and what a step allocates."""

from __future__ import annotations

import itertools
import pathlib
import tracemalloc

import numpy as np
import pytest
import torch
from allocations import record
from cases import (
    CASES,
    Case,
    Follower,
    check,
    expected,
    initial_parameter,
    norm_relative_bound,
    stored_gradient,
    to_torch,
)
from kernel_runs import CHAIN, same_bits
from optimizer_runs import STRONG, assert_same, bits_of, gradient_for, options_of
from small_runs import master_of

import ruda_torch
from ruda_optim.fused_adamw import InvalidTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Assign a gradient of any dtype: torch insists on the parameter's own unless it is told otherwise."""
    parameter.grad_dtype = None
    parameter.grad = gradient


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, flat."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def untouched(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor's storage that the tensor itself does not use."""
    used = torch.zeros(storage_of(tensor).numel(), dtype=torch.bool)
    used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return storage_of(tensor)[~used]


# ------------------------------------------------------------------------------------------------ the table of cases


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_lies_within_its_bound(case) -> None:
    """Layouts and dtypes of parameters and gradients; clipping with the norm that the kernels compute."""
    o = case.options
    parameter = torch.nn.Parameter(to_torch(initial_parameter(case), case.parameter_dtype, case.layout))
    optimizer = ruda_torch.AdamW(
        [parameter],
        o.learning_rate,
        (o.beta1, o.beta2),
        o.epsilon,
        o.weight_decay,
        o.amsgrad,
        maximize=o.maximize,
        fused_step=True,
        max_grad_norm=case.max_norm,
    )
    optimizer.grad_scale = torch.tensor(case.gradient_scale)
    address = parameter.data_ptr()
    norm_error = 0.0 if case.max_norm is None else norm_relative_bound(chain=CHAIN, levels=1)
    for want in expected(case, norm_error=norm_error):
        set_gradient(parameter, to_torch(stored_gradient(case, want.step), case.gradient_dtype, case.gradient_layout))
        kept = storage_of(parameter.grad).clone()
        optimizer.step()
        assert same_bits(storage_of(parameter.grad), kept), "gradients are never written"
        state = optimizer.state[parameter]
        found = {name: state[name] for name in want.values if name in state}
        if case.parameter_dtype == "float32":
            found["parameter"] = parameter
        else:
            found |= {"parameter": master_of(parameter, state), "copy": parameter}
        check(case, want, found)
    assert parameter.data_ptr() == address
    assert (untouched(parameter.detach()) == 77).all(), "neighbours keep their bits"
    assert untouched(parameter.detach()).numel() > 0 or case.layout not in ("every second", "misaligned")


@pytest.mark.parametrize(
    ("parameter_dtype", "gradient_dtype", "split_master"),
    [*itertools.product(DTYPES, DTYPES, [None, False, True])],
    ids=str,
)
def test_every_pair_of_dtypes_in_one_optimizer(parameter_dtype, gradient_dtype, split_master) -> None:
    name = str(parameter_dtype).removeprefix("torch.")
    shapes = [(5, 13), (1030,), (), (0, 3)]
    starts = [initial_parameter(Case("start", shape, parameter_dtype=name, seed=i)) for i, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(to_torch(start, name)) for start in starts]
    followers = [
        Follower(Case(f"{name}, {shape}", shape, parameter_dtype=name), start)
        for shape, start in zip(shapes, starts, strict=True)
    ]
    optimizer = ruda_torch.AdamW(parameters, fused_step=True, split_master=split_master, **STRONG)
    gradient_name = str(gradient_dtype).removeprefix("torch.")
    for step in range(4):
        for index, parameter in enumerate(parameters):
            set_gradient(
                parameter, to_torch(gradient_for(parameter.shape, (step, index), gradient_name), gradient_name)
            )
        optimizer.step()
        for index, (parameter, follower) in enumerate(zip(parameters, followers, strict=True)):
            gradient = gradient_for(parameter.shape, (step, index), gradient_name)
            want = follower.step(gradient, options_of(optimizer.param_groups[0]))
            state = optimizer.state[parameter]
            assert state["step"] == step + 1
            if parameter.numel() == 0:
                continue
            found = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if parameter_dtype is torch.float32:
                found["parameter"] = parameter
            else:
                found |= {"parameter": master_of(parameter, state), "copy": parameter}
                kept = parameter_dtype is torch.bfloat16 and split_master is not False
                assert set(state) & {"master", "master_remainder"} == {"master_remainder" if kept else "master"}
            assert all(state[key].dtype is torch.float32 for key in ("exp_avg", "exp_avg_sq"))
            check(follower.case, want, found)


# ----------------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "channels_last": lambda t: t.clone(memory_format=torch.channels_last),
    "transposed": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second": lambda t: torch.stack([t, torch.full_like(t, 77)], -1)[..., 0],
    "rows of a wider base": lambda t: torch.cat([t, torch.full_like(t, 77)], -1)[..., : t.shape[-1]],
}


def run_layouts(layout: str, gradient_layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> ruda_torch.AdamW:
    start = torch.from_numpy(gradient_for(shape, 0)).to(dtype)
    parameter = torch.nn.Parameter(LAYOUTS[layout](start))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True, amsgrad=True, **STRONG)
    for step in range(1, 4):
        parameter.grad = LAYOUTS[gradient_layout](torch.from_numpy(gradient_for(shape, step)).to(dtype))
        optimizer.step()
    assert (untouched(parameter.detach()) == 77).all()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 3, 5, 2), (3, 1, 4, 4), (1, 8, 1, 1), (2, 3, 1, 5), (9, 3, 16, 7)], ids=str)
@pytest.mark.parametrize("gradient_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_a_bit(layout, gradient_layout, shape, dtype) -> None:
    plain = run_layouts("contiguous", "contiguous", shape, dtype)
    assert_same(run_layouts(layout, gradient_layout, shape, dtype), plain)


def test_gradient_layouts_may_change_from_step_to_step() -> None:
    shape = (4, 3, 5, 2)
    optimizers = []
    for layouts in (itertools.cycle(LAYOUTS), itertools.repeat("contiguous")):
        parameter = torch.nn.Parameter(torch.from_numpy(gradient_for(shape, 0)))
        optimizer = ruda_torch.AdamW([parameter], fused_step=True, **STRONG)
        for step, layout in zip(range(1, 12), layouts, strict=False):
            parameter.grad = LAYOUTS[layout](torch.from_numpy(gradient_for(shape, step)))
            optimizer.step()
        optimizers.append(optimizer)
    assert_same(*optimizers)


def test_parameters_that_share_one_base_do_not_disturb_each_other() -> None:
    base = torch.from_numpy(gradient_for((6, 10), 0))
    views = [base[:, ::2], base[:, 1::4], base[:, 3::4]]
    apart = [view.clone() for view in views]
    for parameters in (views, apart):
        parameters[:] = [torch.nn.Parameter(view) for view in parameters]
    optimizers = [ruda_torch.AdamW(parameters, fused_step=True, **STRONG) for parameters in (views, apart)]
    for step in range(3):
        for one, other in zip(views, apart, strict=True):
            one.grad = torch.from_numpy(gradient_for(one.shape, (step, one.shape[1], one.storage_offset())))
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*optimizers)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.ones(1).expand(4),
        lambda: torch.ones(3, 1).expand(3, 4),
        lambda: torch.ones(10).as_strided((4, 4), (2, 1)),
    ],
    ids=["expanded scalar", "expanded column", "overlapping windows"],
)
def test_a_parameter_that_overlaps_itself_is_refused_before_any_write(view) -> None:
    healthy = torch.nn.Parameter(torch.ones(5))
    overlapping = torch.nn.Parameter(view())
    optimizer = ruda_torch.AdamW([healthy, overlapping], fused_step=True)
    for parameter in (healthy, overlapping):
        parameter.grad = torch.ones(parameter.shape)
    with pytest.raises(InvalidTensor, match="parameter 1 of group 0 must not share memory between its elements"):
        optimizer.step()
    assert (healthy == 1).all()
    assert (overlapping == 1).all()
    assert not optimizer.state


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 1)], ids=str)
def test_empty_tensors_anywhere(shape, position) -> None:
    starts = [(5,), (70_000,)]
    starts.insert(position, shape)
    optimizers = []
    for kept in (starts, [(5,), (70_000,)]):
        parameters = [torch.nn.Parameter(torch.from_numpy(gradient_for(start, 0))) for start in kept]
        optimizer = ruda_torch.AdamW(
            [{"params": []}, {"params": parameters}, {"params": []}], fused_step=True, max_grad_norm=1.0, **STRONG
        )
        for step in range(1, 4):
            for parameter in parameters:
                parameter.grad = torch.from_numpy(gradient_for(parameter.shape, step))
            optimizer.step()
        optimizers.append(optimizer)
    filled = [tensor for tensor in bits_of(optimizers[0]) if tensor.numel() > 0]
    steps = [optimizers[0].state[p]["step"] for g in optimizers[0].param_groups for p in g["params"]]
    assert [step.item() for step in steps] == [3.0] * 3, "an empty parameter counts its steps, as with torch"
    empty = next(p for g in optimizers[0].param_groups for p in g["params"] if p.numel() == 0)
    assert optimizers[0].state[empty]["exp_avg"].shape == shape
    filled = [
        tensor for g in optimizers[0].param_groups for p in g["params"] if p.numel() for tensor in of(p, optimizers[0])
    ]
    assert all(map(same_bits, filled, bits_of(optimizers[1])))
    assert optimizers[0].last_group_norms == optimizers[1].last_group_norms
    assert optimizers[0].last_group_norms[0] == 0.0


def of(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach(), *optimizer.state[parameter].values()]


def test_only_empty_tensors() -> None:
    parameter = torch.nn.Parameter(torch.empty(0))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True, max_grad_norm=1.0)
    for step in range(3):
        parameter.grad = torch.empty(0)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == step + 1
    assert optimizer.last_grad_norm == 0.0


# ------------------------------------------------------------------------------------------------------- allocations


def busy(dtype: torch.dtype, **settings) -> ruda_torch.AdamW:
    """An optimizer past its first steps."""
    parameters = [torch.nn.Parameter(torch.full((50, 200), 0.5, dtype=dtype)) for _ in range(40)]
    optimizer = ruda_torch.AdamW(
        [{"params": parameters[:20]}, {"params": parameters[20:], "lr": 1e-2}], fused_step=True, **settings
    )
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    for _ in range(3):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "settings",
    [{}, {"check_finite": False}, {"max_grad_norm": 0.1, "hierarchical_stats": True}, {"amsgrad": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_steady_step_allocates_nothing(dtype, settings) -> None:
    optimizer = busy(dtype, **settings)
    recorded = record(optimizer.step)
    assert recorded.count("adamw_scaled") == 1
    assert recorded.allocations == []


def test_the_first_step_allocates_its_state_and_tables() -> None:
    """The positive control: two moments per parameter, seen by the same record."""
    parameter = torch.nn.Parameter(torch.ones(100_000))
    parameter.grad = torch.ones(100_000)
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    recorded = record(optimizer.step)
    assert sorted(recorded.allocations)[-2:] == [400_000, 400_000]
    assert sum(recorded.allocations) < 2 * 400_000 + 20_000


def test_a_skipped_first_step_leaves_no_state() -> None:
    parameter = torch.nn.Parameter(torch.ones(100_000))
    parameter.grad = torch.full((100_000,), np.nan)
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    optimizer.step()
    assert optimizer.last_step_skipped
    assert not optimizer.state


def test_steady_steps_do_not_grow_python_memory() -> None:
    source = pathlib.Path(ruda_torch.__file__).parents[1]
    ours = [tracemalloc.Filter(True, str(source / "ruda_*" / "*"))]
    optimizer = busy(torch.float32, max_grad_norm=1.0)
    optimizer.step()
    tracemalloc.start()
    try:
        held = []
        optimizer.param_groups[0]["lr"] = 1e-4  # which is read anew and kept: something that the filter must see
        for _ in range(5):
            for _ in range(25):
                optimizer.step()
            # Only what our files allocated: other threads of a test run allocate as they please.
            traces = tracemalloc.take_snapshot().filter_traces(ours).traces
            held.append(sum(trace.size for trace in traces))
    finally:
        tracemalloc.stop()
    assert held[0] > 0, "the filter must see our files"
    # Free lists and caches settle first; then less than one byte per step and parameter.
    assert held[-1] - held[1] < 75 * 40, f"bytes held after each 25 steps of 40 parameters: {held}"
