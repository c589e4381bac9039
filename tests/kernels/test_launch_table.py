"""The launch table: layouts, gradients of a step, step counts, and the same numbers in Python and C++."""

from __future__ import annotations

import gc
import pathlib
import re
import weakref
from collections import defaultdict

import numpy as np
import pytest
import torch
from cases import as_array, to_torch
from kernel_runs import CPU, gradient_rows, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from ruda_optim.fused_adamw import (
    AdamWOptions,
    StepCoefficients,
    storage,
)
from ruda_optim.fused_adamw.kernels import cpu, host, tables
from ruda_optim.fused_adamw.stats_plan import ROW_ELEMENTS
from ruda_optim.fused_adamw.storage import Field, Flag, LaunchTable, TensorMemory

CSRC = pathlib.Path(cpu.__file__).parents[1] / "csrc"
OPTIONS = AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8)


def tensors(count: int, size: int = 40) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1 + index, size) for index in range(count)]


def updated(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The parameter after a first step, in memory of its own."""
    out = parameter.clone(memory_format=torch.contiguous_format)
    memory = TensorMemory(gradient, out, *(torch.empty(out.shape) for _ in range(2)), first=True)
    storage.adamw_scaled(LaunchTable([memory], CPU), storage.coefficient_table([OPTIONS.prepare_step(0)]))
    return out


# ---------------------------------------------------------------------------------------------- gradients of a step


def bindable() -> tuple[LaunchTable, list[torch.Tensor], list[torch.Tensor]]:
    """Four tensors, with a table of their first step."""
    parameters = [torch.linspace(-1, 1, 24).view(4, 6) for _ in range(4)]
    gradients = [torch.linspace(1, -2 - index, 24).view(4, 6) for index in range(4)]
    memories = [
        TensorMemory(gradient, parameter, torch.empty(4, 6), torch.empty(4, 6), first=True)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return LaunchTable(memories, CPU), parameters, gradients


def test_bind_gradients_takes_over_addresses() -> None:
    table, parameters, _ = bindable()
    watch = storage.TensorWatch(parameters, [])
    fresh = [torch.full((4, 6), float(index)) for index in range(4)]
    revision = table.revision
    assert storage.bind_gradients(table, watch, parameters, fresh) == -1
    assert table.fields[Field.GRAD].tolist() == [gradient.data_ptr() for gradient in fresh]
    assert table.revision == revision, "only addresses changed"


def test_bind_gradients_keeps_the_aligned_flag_true() -> None:
    table, parameters, gradients = bindable()
    watch = storage.TensorWatch(parameters, [])
    assert all(flags & Flag.ALIGNED for flags in table.fields[Field.FLAGS].tolist())
    shifted = to_torch(as_array(gradients[1]), layout="misaligned")
    assert storage.bind_gradients(table, watch, parameters, [gradients[0], shifted, *gradients[2:]]) == -1
    aligned = [bool(flags & Flag.ALIGNED) for flags in table.fields[Field.FLAGS].tolist()]
    assert aligned == [True, False, True, True]
    assert storage.bind_gradients(table, watch, parameters, gradients) == -1
    assert all(flags & Flag.ALIGNED for flags in table.fields[Field.FLAGS].tolist())


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g.bfloat16(),
        lambda g: g.half(),
        lambda g: g.double(),
        lambda g: g.t().contiguous().t(),
        lambda g: g[:, :1].expand(4, 6),
        lambda g: g.reshape(6, 4),
        lambda g: g.reshape(24),
        lambda g: g.to_sparse(),
        lambda g: g.to("meta"),
    ],
    ids=["bfloat16", "float16", "float64", "transposed", "expanded", "shape", "dimensions", "sparse", "device"],
)
def test_bind_gradients_stops_at_a_column_that_the_table_does_not_describe(change) -> None:
    table, parameters, gradients = bindable()
    watch = storage.TensorWatch(parameters, [])
    before = table.fields.clone()
    changed = [gradients[0].clone(), gradients[1].clone(), change(gradients[2]), gradients[3].clone()]
    assert storage.bind_gradients(table, watch, parameters, changed) == 2
    assert storage.bind_gradients(table, watch, parameters, changed, 2) == 2
    assert storage.bind_gradients(table, watch, parameters, changed, 3) == -1
    assert (table.fields[:, 2] == before[:, 2]).all(), "the column in question is left to the caller"
    for index in (0, 1, 3):
        assert table.fields[Field.GRAD, index] == changed[index].data_ptr()


@pytest.mark.parametrize("count", [3, 5000], ids=["few", "enough for every thread"])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", p.data[:2]),
        lambda p: setattr(p, "data", p.data.double()),
    ],
    ids=["memory", "smaller", "dtype"],
)
def test_bind_gradients_notices_state_that_changed(change, count) -> None:
    table, parameters, gradients = bindable()
    state = [torch.ones(4, 6) for _ in range(count)]
    watch = storage.TensorWatch(parameters, state)
    state[-2].add_(1.0)
    assert storage.bind_gradients(table, watch, parameters, gradients) == -1, "values may change"
    change(state[-2])
    assert storage.bind_gradients(table, watch, parameters, gradients) == storage.CHANGED


def test_a_watch_holds_its_state_alone_and_lets_it_go() -> None:
    """torch.utils.swap_tensors refuses parameters that somebody else holds."""
    state, parameter = torch.ones(8), torch.ones(8)
    watch = storage.TensorWatch([parameter], [state])
    assert (state._use_count(), parameter._use_count()) == (2, 1)
    with FakeTensorMode():  # the collector may run at any time, torch's compilers among others
        del watch
        gc.collect()
    assert state._use_count() == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: setattr(p, "data", p.data.t()),
        lambda p: setattr(p, "data", p.data[:2]),
        lambda p: setattr(p, "data", p.data.double()),
    ],
    ids=["memory", "transposed", "smaller", "dtype"],
)
def test_bind_gradients_notices_a_parameter_that_changed(change) -> None:
    table, parameters, gradients = bindable()
    watch = storage.TensorWatch(parameters, [])
    change(parameters[1])
    assert storage.bind_gradients(table, watch, parameters, gradients) == storage.CHANGED
    assert storage.bind_gradients(table, watch, parameters, gradients, 2) == -1


def test_size_one_dimensions_are_no_difference() -> None:
    parameter = torch.linspace(-1, 1, 6).view(1, 6)
    table = LaunchTable([TensorMemory(torch.ones(1, 6), parameter, torch.zeros(1, 6), torch.zeros(1, 6))], CPU)
    odd = torch.ones(100).as_strided((1, 6), (77, 1))
    assert storage.bind_gradients(table, storage.TensorWatch([parameter], []), [parameter], [odd]) == -1


@pytest.mark.parametrize("shape", [(1,), (), (4, 6)], ids=str)
def test_bind_gradients_leaves_a_negated_gradient_to_the_caller(shape) -> None:
    """The imaginary part of a conjugate is one, and flat where it has a single element."""
    parameter, gradient = torch.ones(shape), torch.full(shape, 2.0)
    table = LaunchTable([TensorMemory(gradient, parameter, torch.zeros(shape), torch.zeros(shape))], CPU)
    watch = storage.TensorWatch([parameter], [])
    assert storage.bind_gradients(table, watch, [parameter], [gradient]) == -1
    imaginary = torch.ones(shape, dtype=torch.complex64).conj().imag
    for negated in (imaginary, torch._neg_view(gradient)):
        assert negated.is_neg()
        for _ in range(2):
            assert storage.bind_gradients(table, watch, [parameter], [negated]) == 0
        assert storage.bind_gradients(table, watch, [parameter], [gradient]) == -1
    assert table.fields[Field.GRAD, 0] == gradient.data_ptr()


def test_bind_gradients_takes_the_parameters_own() -> None:
    table, _, _ = bindable()
    parameters = [torch.nn.Parameter(torch.ones(4, 6)) for _ in range(4)]
    watch = storage.TensorWatch(parameters, [])
    for parameter in parameters:
        parameter.grad = torch.ones(4, 6)
    assert storage.count_gradients(parameters) == 4
    assert storage.bind_gradients(table, watch, parameters) == -1
    assert table.fields[Field.GRAD].tolist() == [parameter.grad.data_ptr() for parameter in parameters]
    assert storage.bind_gradients(table, watch, tuple(parameters), tuple(p.grad for p in parameters)) == -1
    held = [None] * 4
    assert storage.bind_gradients(table, watch, parameters, held=held) == -1
    assert all(gradient is parameter.grad for gradient, parameter in zip(held, parameters, strict=True))
    parameters[2].grad = None
    assert storage.count_gradients(parameters) == 3
    assert storage.bind_gradients(table, watch, parameters) == 2
    assert storage.bind_gradients(table, watch, parameters, start=3) == -1


def test_an_error_of_a_parameter_comes_through() -> None:
    class Guarded(torch.nn.Parameter):
        @property
        def grad(self):
            raise RuntimeError("this gradient is not for you")

    table, _, _ = bindable()
    parameters = [Guarded(torch.ones(4, 6)) for _ in range(4)]
    watch = storage.TensorWatch(parameters, [])
    with pytest.raises(RuntimeError, match="this gradient is not for you"):
        storage.bind_gradients(table, watch, parameters)
    with pytest.raises(RuntimeError, match="this gradient is not for you"):
        storage.count_gradients(parameters)


def test_same_objects_compares_identities() -> None:
    a, b, c = (torch.ones(2) for _ in range(3))
    assert storage.same_objects([a, b, c], 0, [a, b])
    assert storage.same_objects([a, b, c], 1, [b, c])
    assert storage.same_objects([a], 1, [])
    assert not storage.same_objects([a, b, c], 0, [b])
    assert not storage.same_objects([a, b], 1, [b, c]), "longer than what there is"


def test_same_values_compares_identities_dict_by_dict() -> None:
    a, b, c = (torch.ones(2) for _ in range(3))
    dicts = [{"x": a, "y": b}, {}, {"x": c}]
    assert storage.same_values(dicts, [a, b, c])
    assert storage.same_values([defaultdict(dict, {a: dicts[0]})], dicts[:1])
    assert storage.same_values([], [])
    for other in ([a, b], [a, b, c, a], [a, c, b], [a, b, torch.ones(2)]):
        assert not storage.same_values(dicts, other)


def test_another_generation_of_dlpack_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(host, "_DLPACK_MAJOR", 2)
    with pytest.raises(ImportError, match=f"by DLPack 2, but torch {re.escape(torch.__version__)} speaks DLPack 1;"):
        host._Functions()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every second", "misaligned"])
def test_set_gradient_describes_any_dtype_and_layout(dtype, layout) -> None:
    table, parameters, gradients = bindable()
    wanted = [updated(p, g) for p, g in zip(parameters, gradients, strict=True)]
    other = to_torch(as_array(gradients[2]), str(dtype).removeprefix("torch."), layout)
    wanted[2] = updated(parameters[2], other.clone())
    revision = table.revision
    table.set_gradient(2, other)
    assert (table.revision != revision) == (dtype is not torch.float32 or layout != "contiguous")
    storage.adamw_scaled(table, storage.coefficient_table([OPTIONS.prepare_step(0)]))
    for parameter, want in zip(parameters, wanted, strict=True):
        assert same_bits(parameter, want)


def test_set_gradient_back_and_forth() -> None:
    table, parameters, gradients = bindable()
    watch = storage.TensorWatch(parameters, [])
    clean = table.fields.clone()
    table.set_gradient(1, to_torch(as_array(gradients[1]), "bfloat16", "every second"))
    table.set_gradient(3, to_torch(as_array(gradients[3]), "float32", "transposed"))
    assert table.fields[Field.LAYOUT].tolist()[::2] == [-1, -1]
    assert min(table.fields[Field.LAYOUT].tolist()[1::2]) >= 0
    table.set_gradient(1, gradients[1])
    table.set_gradient(3, gradients[3])
    assert torch.equal(table.fields, clean)
    assert storage.bind_gradients(table, watch, parameters, gradients) == -1


def test_a_strided_gradient_that_stays_the_same_changes_nothing() -> None:
    """Else every step would pack all layouts anew for each such tensor, and a device would fetch its table again."""
    table, _, gradients = bindable()
    for index in range(4):
        table.set_gradient(index, to_torch(as_array(gradients[index]), "float32", "every second"))
    revision, layouts, fields = table.revision, table.layouts, table.fields.clone()
    for index in range(4):
        table.set_gradient(index, to_torch(as_array(gradients[index]), "float32", "every second"))
    assert table.revision == revision
    assert table.layouts is layouts
    assert torch.equal(table.fields[Field.LAYOUT], fields[Field.LAYOUT])


def test_set_gradient_keeps_what_the_steps_have_made() -> None:
    """FIRST stays cleared, and so does the coefficient row."""
    table, _, gradients = bindable()
    table.fields[Field.COEFFICIENTS] = torch.tensor([0, 1, 2, 3])
    storage.advance_steps(table)
    table.set_gradient(2, gradients[2].bfloat16())
    assert not any(flags & Flag.FIRST for flags in table.fields[Field.FLAGS].tolist())
    assert table.fields[Field.COEFFICIENTS].tolist() == [0, 1, 2, 3]


def test_a_table_keeps_no_gradient_alive() -> None:
    gradient = torch.ones(3)
    alive = weakref.ref(gradient)
    table = LaunchTable([TensorMemory(gradient, torch.ones(3), torch.ones(3), torch.ones(3))], CPU)
    del gradient
    assert alive() is None
    assert len(table) == 1


# ------------------------------------------------------------------------------------------------------ bookkeeping


def test_tensors_of_one_group_and_step_share_coefficients() -> None:
    steps = [torch.tensor(float(value)) for value in (0, 0, 5, 0, 5, 5, 2**24)]
    memories = [TensorMemory(gradient, step=step) for gradient, step in zip(tensors(7), steps, strict=True)]
    table = LaunchTable(memories, CPU)
    groups = torch.tensor([0, 0, 0, 1, 0, 1, 1])
    rows = storage.CoefficientRows(table, groups)
    assert rows.assign() == [(0, 0), (0, 5), (1, 0), (1, 5), (1, 2**24)]
    assert table.fields[Field.COEFFICIENTS].tolist() == [0, 0, 1, 2, 1, 3, 4]


def test_advance_steps_counts_and_clears_first() -> None:
    steps = [torch.tensor(0.0), torch.tensor(7.0)]
    memories = [TensorMemory(g, first=True, step=step) for g, step in zip(tensors(2), steps, strict=True)]
    table = LaunchTable([*memories, TensorMemory(torch.ones(2), first=True)], CPU)  # the last one has no counter
    storage.advance_steps(table)
    assert [step.item() for step in steps] == [1.0, 8.0]
    assert not any(flags & Flag.FIRST for flags in table.fields[Field.FLAGS].tolist())


def test_coefficient_table_holds_the_rows() -> None:
    steps = [OPTIONS.prepare_step(0), OPTIONS.prepare_step(41)]
    rows = storage.CoefficientRows(LaunchTable([], CPU), torch.empty(0, dtype=torch.int64))
    for found in (storage.coefficient_table(steps), rows.fill(steps)):
        assert found.dtype is torch.float32
        np.testing.assert_array_equal(as_array(found), [step.row for step in steps])
    again = rows.fill(steps[::-1])
    assert again.data_ptr() == found.data_ptr(), "the memory serves every step"
    np.testing.assert_array_equal(as_array(again), [step.row for step in steps[::-1]])
    assert rows.fill(steps[:1]).shape == (1, 8)
    assert storage.coefficient_table([]).shape == (0, 8)


@pytest.mark.parametrize(
    ("tensor", "overlapping"),
    [
        (torch.zeros(3, 4), False),
        (torch.zeros(4).expand(3, 4), True),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(3, 1).expand(3, 4), True),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(3, 8)[:, ::2], False),
        (torch.zeros(20).as_strided((4, 4), (3, 1)), True),
        (torch.zeros(20).as_strided((4, 3), (3, 1)), False),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
        (torch.zeros(5).as_strided((1, 5), (0, 1)), False),
        (torch.zeros(()), False),
        (torch.zeros(0, 4), False),
    ],
)
def test_overlaps(tensor, overlapping) -> None:
    assert storage.overlaps(tensor) is overlapping


# ------------------------------------------------------------------------------------------- numbers of the seam


def enumerators(name: str) -> dict[str, int]:
    """The enumerators of an enum in table.h, without their prefixes, as NAMES_LIKE_THIS."""
    text = re.sub(r"//[^\n]*", "", (CSRC / "table.h").read_text(encoding="utf-8"))
    body = re.search(rf"enum {name}\b[^{{]*{{([^}}]*)}}", text)[1]
    found, following = {}, 0
    for entry in filter(None, (part.strip() for part in body.split(","))):
        label, _, value = (part.strip() for part in entry.partition("="))
        following = int(value) if value else following
        found[re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", label.removeprefix("k")).upper()] = following
        following += 1
    return found


def test_fields_and_flags_have_the_same_numbers_in_python_and_c() -> None:
    fields = enumerators("Field")
    assert fields.pop("FIELDS") == len(Field)
    fields["COEFFICIENTS"] = fields.pop("COEFFICIENT_ROW")
    assert fields == {field.name: field.value for field in Field}
    assert enumerators("Flag") == {flag.name: flag.value for flag in Flag}
    roles = enumerators("Role")
    assert roles.pop("ROLES") == len(tables.LAYOUT_ROLES)
    named = {"parameter": "ROLE_PARAM", "gradient": "ROLE_GRAD"}
    wanted = {named.get(role, f"ROLE_{role.upper()}"): index for index, role in enumerate(tables.LAYOUT_ROLES)}
    assert roles == wanted


def struct(header: str, name: str) -> tuple[list[str], int]:
    """The members of a struct of floats, and the constant that follows it."""
    text = re.sub(r"//[^\n]*", "", (CSRC / header).read_text(encoding="utf-8"))
    body, size = re.search(rf"struct {name} {{([^}}]*)}};\s*constexpr int \w+ = (\d+);", text).groups()
    return re.findall(r"float (\w+);", body), int(size)


def test_rows_have_the_same_columns_in_python_and_c() -> None:
    assert struct("adamw_update.h", "Coefficients") == (
        list(StepCoefficients._fields[: storage.COEFFICIENTS]),
        storage.COEFFICIENTS,
    )
    assert struct("gradient_stats.h", "StatsRow") == (["scale", "sumsq", "bad"], ROW_ELEMENTS)
    row = gradient_rows([torch.tensor([-2.0, 1.0])])
    assert as_array(row).tolist() == [[2.0, 1.25, 0.0]]
