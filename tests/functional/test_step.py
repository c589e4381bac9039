"""The functional step: every line of its contract."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from allocations import record
from cases import (
    FLAT_CASES,
    U,
    check,
    compare,
    expected,
    initial_parameter,
    stored_gradient,
    to_torch,
)
from kernel_runs import same_bits
from step_inputs import AMSGRAD, BAD_TENSORS, GOOD, MAX_STEP, OPTIONS, filled, parts, state_of

from ruda_optim.fused_adamw import (
    AdamWState,
    StepControl,
    StepOverflow,
    adamw_step,
    guarded_adamw_step,
    reference,
)


def memory_of(tensor: torch.Tensor) -> range:
    start = tensor.untyped_storage().data_ptr()
    return range(start, start + tensor.untyped_storage().nbytes())


def disjoint(tensors: list[torch.Tensor]) -> bool:
    spans = sorted((memory_of(tensor) for tensor in tensors), key=lambda span: span.start)
    return all(left.stop <= right.start for left, right in pairwise(spans))


# ---------------------------------------------------------------------------------------------------- adamw_step


@pytest.mark.parametrize("case", FLAT_CASES, ids=str)
def test_values_lie_within_their_bounds(case) -> None:
    parameters, state = to_torch(initial_parameter(case), layout=case.layout), None
    for want in expected(case):
        gradients = to_torch(stored_gradient(case, want.step), case.gradient_dtype, case.gradient_layout)
        update = adamw_step(parameters, gradients, state, case.options, case.control)
        assert update.updated
        assert update.state.step == want.step
        parameters, state = update.parameters, update.state
        check(case, want, parts(update))


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("options", [OPTIONS, AMSGRAD], ids=["adamw", "amsgrad"])
def test_inputs_and_their_aliases_keep_their_bits_and_results_are_new_memory(options, first) -> None:
    bases = [torch.linspace(-1, 1, 12) for _ in range(5)]
    parameters, gradients, *moments = (base[1:11].view(2, 5) for base in bases)
    moments = [moment.abs_() for moment in moments]
    state = None if first else AdamWState(3, *moments[: 3 if options.amsgrad else 2])
    kept = [base.clone() for base in bases]
    versions = [base._version for base in bases]
    update = adamw_step(parameters, gradients, state, options)
    for base, before in zip(bases, kept, strict=True):
        assert same_bits(base, before)
    assert [base._version for base in bases] == versions
    assert disjoint([*bases, *parts(update).values()])
    assert all(tensor.is_contiguous() and tensor.shape == (2, 5) for tensor in parts(update).values())
    if not first:
        assert state.step == 3


@pytest.mark.parametrize("options", [OPTIONS, AMSGRAD], ids=["adamw", "amsgrad"])
def test_inputs_may_be_one_and_the_same_memory(options) -> None:
    """Out of place, nothing that is read is written: aliased inputs give what equal but separate ones give."""
    shared = torch.linspace(0.1, 2, 1030)
    count = 3 if options.amsgrad else 2
    aliased = adamw_step(shared, shared, AdamWState(3, *[shared] * count), options)
    copies = [shared.clone() for _ in range(5)]
    separate = adamw_step(copies[0], copies[1], AdamWState(3, *copies[2 : 2 + count]), options)
    for name, tensor in parts(separate).items():
        assert same_bits(parts(aliased)[name], tensor)
    assert same_bits(shared, torch.linspace(0.1, 2, 1030))


def test_overlapping_views_may_be_inputs() -> None:
    base = torch.linspace(0.1, 2, 40)
    overlapping = adamw_step(base[:30], base[5:35], AdamWState(3, base[10:], base[3:33]), OPTIONS)
    separate = adamw_step(
        base[:30].clone(), base[5:35].clone(), AdamWState(3, base[10:].clone(), base[3:33].clone()), OPTIONS
    )
    for name, tensor in parts(separate).items():
        assert same_bits(parts(overlapping)[name], tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda g: g.t().contiguous().t(),
        lambda g: torch.stack([g, g], -1)[..., 0],
        lambda g: g[:1].expand(6, 4),
        lambda g: g[:, :1].expand(6, 4),
        lambda g: g.flip(0),
    ],
    ids=["transposed", "every second", "expanded rows", "expanded columns", "flipped"],
)
def test_gradients_may_have_any_strides(view) -> None:
    parameters = torch.linspace(-1, 1, 24).view(6, 4)
    gradients = view(torch.linspace(3, -2, 24).view(6, 4))
    strided = adamw_step(parameters, gradients, state_of(shape=(6, 4)), OPTIONS)
    dense = adamw_step(
        parameters, gradients.clone(memory_format=torch.contiguous_format), state_of(shape=(6, 4)), OPTIONS
    )
    for name, tensor in parts(dense).items():
        assert same_bits(parts(strided)[name], tensor)


def test_a_scalar_and_size_one_dimensions() -> None:
    for shape in ((), (1,), (1, 5, 1)):
        parameters = torch.ones(shape)
        update = adamw_step(parameters, torch.ones(shape), None, OPTIONS)
        assert update.parameters.shape == shape
        want, _ = reference.adamw(np.ones(shape), np.ones(shape), None, OPTIONS)
        compare(str(shape), update.parameters, want, 8 * U)


def test_results_take_no_part_in_autograd() -> None:
    parameters = filled(1.0).requires_grad_()
    for update in (adamw_step(parameters, filled(1.0), None, OPTIONS),):
        assert not any(tensor.requires_grad for tensor in parts(update).values())
    with torch.inference_mode():
        inference = adamw_step(parameters, filled(1.0), None, OPTIONS)
    assert same_bits(inference.parameters, update.parameters)


@pytest.mark.parametrize("state", [None, state_of()], ids=["first step", "later step"])
@pytest.mark.parametrize(
    ("parameters", "control"),
    [
        (filled(1.0), StepControl(skip_update=True)),
        (filled(1.0, 0), StepControl()),
        (filled(1.0, 3, 0, 2), StepControl(skip_update=True)),
    ],
    ids=["skip", "empty", "empty and skip"],
)
def test_skip_and_empty_allocate_and_launch_nothing(parameters, control, state) -> None:
    if state is not None:
        state = state_of(shape=tuple(parameters.shape))
    gradients = torch.full_like(parameters, np.nan)
    adamw_step(parameters, gradients, state, OPTIONS, control)  # loads the operator
    recorded = record(lambda: adamw_step(parameters, gradients, state, OPTIONS, control))
    assert recorded.allocations == []
    assert recorded.operators == []
    assert recorded.result.parameters is parameters
    assert recorded.result.state is state
    assert recorded.result.updated is False


def test_a_step_allocates_its_results_and_a_small_table() -> None:
    """The positive control of the test above: the profiler sees what is allocated."""
    parameters = torch.ones(100_000)
    recorded = record(lambda: adamw_step(parameters, parameters, None, AMSGRAD))
    large = [size for size in recorded.allocations if size > 1000]
    assert large == [400_000] * 4
    assert recorded.count("adamw_scaled") == 1


def test_step_counts() -> None:
    update = adamw_step(filled(1.0), filled(1.0), state_of(2**32), OPTIONS)
    assert update.state.step == 2**32 + 1
    update = adamw_step(filled(1.0), filled(1.0), state_of(MAX_STEP - 1), OPTIONS)
    assert update.state.step == MAX_STEP
    with pytest.raises(StepOverflow, match="2\\^64"):
        adamw_step(filled(1.0), filled(1.0), update.state, OPTIONS)


@pytest.mark.parametrize(("size", "skip"), [(0, False), (0, True), (3, True)])
def test_what_counts_no_step_overflows_nothing(size, skip) -> None:
    control = StepControl(skip_update=skip)
    state = state_of(MAX_STEP, shape=(size,))
    update = adamw_step(torch.ones(size), torch.ones(size), state, OPTIONS, control)
    assert not update.updated
    assert update.state is state
    other = (torch.ones(2), torch.ones(2), None)
    guarded = guarded_adamw_step([(torch.ones(size), torch.ones(size), state), other], OPTIONS, control)
    assert [one.updated for one in guarded.updates] == [False, not skip]
    assert guarded.updates[0].state is state


@pytest.mark.parametrize(
    ("changes", "error", "message"), [row[1:] for row in BAD_TENSORS], ids=[r[0] for r in BAD_TENSORS]
)
def test_what_does_not_fit_is_refused_before_anything_happens(changes, error, message) -> None:
    arguments = {**GOOD, **changes}

    def call() -> None:
        with pytest.raises(error, match=message):
            adamw_step(**arguments)

    recorded = record(call)
    assert not any(name.startswith("ruda_optim::") for name in recorded.operators)
    assert recorded.allocations == []
