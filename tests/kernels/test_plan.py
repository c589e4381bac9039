"""Plans: how the tensors of an optimizer are bound to its launch table, and what is noticed."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from cases import as_array, to_torch
from kernel_runs import CPU
from torch._subclasses.fake_tensor import FakeTensorMode

from ruda_optim.fused_adamw import binding
from ruda_optim.fused_adamw.binding import EMPTY, UNKNOWN, DecisionMemory, Plan
from ruda_optim.fused_adamw.kernels.tables import Field, Flag, TensorMemory


@dataclass
class Bindable:
    """Four parameters in two groups, with a plan for all of them."""

    shape: tuple[int, ...] = (4, 6)
    parameters: list[torch.Tensor] = field(init=False)
    gradients: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        size = torch.Size(self.shape).numel()
        self.parameters = [torch.linspace(-1, 1, size).view(self.shape) for _ in range(4)]
        self.gradients = [torch.linspace(1, -2 - index, size).view(self.shape) for index in range(4)]
        self.state = {
            p: {name: torch.zeros(self.shape) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(0.0)}
            for p in self.parameters
        }
        memories = [
            TensorMemory(g, p, s["exp_avg"], s["exp_avg_sq"], step=s["step"])
            for p, g, s in zip(self.parameters, self.gradients, self.state.values(), strict=True)
        ]
        self.plan = Plan(self.groups, [0, 1, 2, 3], memories, [CPU] * 4, [0, 0, 1, 1], [False] * 4)
        self.watch()
        self.settled: list[int] = []

    @property
    def groups(self) -> list[list[torch.Tensor]]:
        return [self.parameters[:2], self.parameters[2:]]

    def watch(self) -> None:
        tensors = [value for entry in self.state.values() for value in entry.values()]
        self.plan.watch(self.state, tensors, [False] * len(tensors))

    def bind(self, gradients: list[torch.Tensor | None] | None, *, watched: bool = True) -> bool:
        def settle(position: int, gradient: torch.Tensor) -> torch.Tensor:
            self.settled.append(position)
            return gradient

        return self.plan.bind(self.groups, gradients, self.state if watched else None, settle)

    def fields(self, row: Field) -> list[int]:
        return self.plan.table.fields[row].tolist()


def test_binding_takes_over_addresses() -> None:
    made = Bindable()
    fresh = [torch.full((4, 6), float(index)) for index in range(4)]
    revision = made.plan.table.revision
    assert made.bind(fresh)
    assert made.fields(Field.GRAD) == [gradient.data_ptr() for gradient in fresh]
    assert made.plan.table.revision == revision, "only addresses changed"
    assert made.plan.active() == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert made.settled == []


def test_binding_keeps_the_aligned_flag_true() -> None:
    made = Bindable()
    shifted = to_torch(as_array(made.gradients[1]), layout="misaligned")
    for gradient, aligned in ((shifted, False), (made.gradients[1], True)):
        assert made.bind([made.gradients[0], gradient, *made.gradients[2:]])
        found = [bool(flags & Flag.ALIGNED) for flags in made.fields(Field.FLAGS)]
        assert found == [True, aligned, True, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.bfloat16(),
        lambda g: g.half(),
        lambda g: g.t().contiguous().t(),
        lambda g: g[:, :1].expand(4, 6),
    ],
    ids=["bfloat16", "float16", "transposed", "expanded"],
)
def test_a_gradient_that_the_table_does_not_describe_is_settled_once_a_step(change) -> None:
    made = Bindable()
    changed = [made.gradients[0], made.gradients[1], change(made.gradients[2]), made.gradients[3]]
    for count in (1, 2):
        assert made.bind(changed)
        strided = change(made.gradients[2]).stride() != (6, 1)
        assert made.settled == [2] * (count if strided else 1), "a dtype is learned, a stride is asked for again"
        assert made.fields(Field.GRAD) == [gradient.data_ptr() for gradient in changed]


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.double(),
        lambda g: g.reshape(6, 4),
        lambda g: g.reshape(24),
        lambda g: g.to_sparse(),
        lambda g: g.to("meta"),
    ],
    ids=["float64", "shape", "dimensions", "sparse", "device"],
)
def test_a_gradient_that_does_not_fit_is_the_callers_to_refuse(change) -> None:
    made = Bindable()

    def refuse(position: int, _: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no: {position}")

    gradients = [*made.gradients[:2], change(made.gradients[2]), made.gradients[3]]
    with pytest.raises(ValueError, match="no: 2"):
        made.plan.bind(made.groups, gradients, None, refuse)
    assert made.plan._held == [], "nothing is held after an error"
    assert made.bind(made.gradients)


CHANGES = [
    pytest.param(lambda p: setattr(p, "data", p.data.clone()), id="memory"),
    pytest.param(lambda p: setattr(p, "data", p.data[:2]), id="smaller"),
    pytest.param(lambda p: setattr(p, "data", p.data.double()), id="dtype"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_state_that_changed_is_noticed_where_somebody_may_have_changed_it(change) -> None:
    made = Bindable()
    moment = made.state[made.parameters[2]]["exp_avg"]
    moment.add_(1.0)
    assert made.bind(made.gradients), "values may change"
    change(moment)
    assert not made.bind(made.gradients)
    assert made.bind(made.gradients, watched=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.state.pop(made.parameters[3]),
        lambda made: made.state[made.parameters[1]].pop("exp_avg"),
        lambda made: made.state[made.parameters[1]].update(exp_avg=torch.zeros(4, 6)),
        lambda made: made.state[made.parameters[1]].update(more=1),
        lambda made: made.state.update({made.parameters[0]: dict(made.state[made.parameters[0]])}),
        lambda made: made.state.update(more={}),
    ],
    ids=["entry gone", "tensor gone", "other tensor", "another value", "other dict", "another entry"],
)
def test_replaced_state_is_noticed(change) -> None:
    made = Bindable()
    assert made.bind(made.gradients)
    change(made)
    assert not made.bind(made.gradients)


@pytest.mark.parametrize("change", [*CHANGES, pytest.param(lambda p: setattr(p, "data", p.data.t()), id="transposed")])
def test_a_parameter_that_changed_is_noticed(change) -> None:
    made = Bindable()
    change(made.parameters[1])
    assert not made.bind(made.gradients)


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups[0].reverse(),
        lambda groups: groups[1].pop(),
        lambda groups: groups.pop(),
        lambda groups: groups[1].append(torch.ones(4, 6)),
        lambda groups: groups[0].__setitem__(0, groups[0][0].clone()),
    ],
    ids=["order", "fewer", "group", "more", "other"],
)
def test_other_parameters_are_noticed(change) -> None:
    made = Bindable()
    groups = made.groups
    assert made.plan.fits(groups)
    change(groups)
    assert not made.plan.fits(groups)
    assert not made.plan.bind(groups, made.gradients, None, lambda *_: pytest.fail("nothing to settle"))


def test_a_plan_holds_no_tensor() -> None:
    made = Bindable()
    assert made.bind(made.gradients)
    made.plan.release()
    plan, made_parameters = made.plan, [weakref.ref(p) for p in made.parameters]
    alive = [weakref.ref(t) for t in (*made.gradients, *(v for s in made.state.values() for v in s.values()))]
    del made
    gc.collect()
    assert all(reference() is None for reference in (*alive, *made_parameters))
    with FakeTensorMode():  # the collector may run at any time, torch's compilers among others
        del plan
        gc.collect()


def test_size_one_dimensions_are_no_difference() -> None:
    made = Bindable((1, 6))
    odd = torch.ones(100).as_strided((1, 6), (77, 1))
    assert made.bind([odd, *made.gradients[1:]])
    assert made.settled == []


@pytest.mark.parametrize("shape", [(1,), (), (4, 6)], ids=str)
def test_a_negated_gradient_is_settled_every_time(shape) -> None:
    """The imaginary part of a conjugate is one, and flat where it has a single element."""
    made = Bindable(shape)
    imaginary = torch.ones(shape, dtype=torch.complex64).conj().imag
    for negated in (imaginary, torch._neg_view(made.gradients[0])):
        assert negated.is_neg()
        for _ in range(2):
            made.settled.clear()
            assert made.bind([negated, *made.gradients[1:]])
            assert made.settled == [0]
        assert made.bind(made.gradients)
    assert made.fields(Field.GRAD)[0] == made.gradients[0].data_ptr()


def test_the_parameters_own_gradients_are_held_until_released() -> None:
    made = Bindable()
    for parameter, gradient in zip(made.parameters, made.gradients, strict=True):
        parameter.grad = gradient
    assert made.bind(None)
    assert made.fields(Field.GRAD) == [gradient.data_ptr() for gradient in made.gradients]
    assert [held is g for held, g in zip(made.plan._held, made.gradients, strict=True)] == [True] * 4
    made.plan.release()
    assert made.plan._held == []


def test_some_gradients_make_some_columns_active() -> None:
    made = Bindable()
    assert made.bind([None, made.gradients[1], None, made.gradients[3]])
    assert made.plan.active() == ([1, 3], [1, 3])
    (part,) = made.plan.parts()
    assert part.columns == [1, 3]
    assert part.table.fields[Field.GRAD].tolist() == [made.gradients[i].data_ptr() for i in (1, 3)]
    fresh = [gradient.clone() for gradient in made.gradients]
    assert made.bind([None, fresh[1], None, fresh[3]])
    (again,) = made.plan.parts()
    assert again is part, "a pattern that comes back has its table"
    assert again.table.fields[Field.GRAD].tolist() == [fresh[i].data_ptr() for i in (1, 3)]
    assert made.bind([None] * 4)
    assert made.plan.parts() == []


def test_a_parameter_without_a_column_asks_for_another_plan_once_it_has_a_gradient() -> None:
    parameters = [torch.ones(3), torch.ones(3), torch.ones(0)]
    moments = [torch.zeros(3), torch.zeros(3)]
    memory = TensorMemory(torch.ones(3), parameters[0], *moments, step=torch.tensor(0.0))
    plan = Plan([parameters], [0, UNKNOWN, EMPTY], [memory], [CPU], [0], [False] * 3)
    nothing = pytest.fail
    assert plan.bind([parameters], [torch.ones(3), None, torch.ones(0)], None, nothing)
    assert plan.active() == ([0], [0, 2])
    assert not plan.bind([parameters], [torch.ones(3), torch.ones(3), None], None, nothing)
    parameters[2].data = torch.ones(2)
    assert not plan.bind([parameters], [torch.ones(3), None, torch.ones(2)], None, nothing)


def test_an_error_of_a_parameter_comes_through() -> None:
    class Guarded(torch.nn.Parameter):
        @property
        def grad(self):
            raise RuntimeError("this gradient is not for you")

    parameter = Guarded(torch.ones(3))
    memory = TensorMemory(torch.ones(3), torch.ones(3), torch.zeros(3), torch.zeros(3))
    plan = Plan([[parameter]], [0], [memory], [CPU], [0], [False])
    with pytest.raises(RuntimeError, match="this gradient is not for you"):
        plan.bind([[parameter]], None, None, pytest.fail)


def test_another_generation_of_dlpack_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(binding, "_DLPACK_MAJOR", 2)
    with pytest.raises(ImportError, match=f"by DLPack 2, but torch {re.escape(torch.__version__)} speaks DLPack 1;"):
        binding._Functions()


@pytest.mark.parametrize(("size", "runs"), [(2**20, True), (64, False)], ids=["long", "short"])
def test_another_thread_runs_during_a_long_step(size, runs) -> None:
    """Data loaders and checkpoint threads must not wait for 100 ms because a step is under way.

    Nobody is made to hand the interpreter over here, and the other thread offers it after every count: so it counts
    during a step if the step gave it away, and not once if it did not, as a short one does not.
    """
    made = Bindable((size,))
    made.plan.prepare(DecisionMemory.empty(2, CPU), measured=True, check_finite=True, stages=False)
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(100.0)
    try:
        during = 0
        for _ in range(20):
            before = counted[0]
            groups = [{"params": parameters} for parameters in made.groups]
            assert made.plan.step(groups, made.gradients, None, pytest.fail, 1.0, 0.0, True)
            during += counted[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert (during > 0) is runs
