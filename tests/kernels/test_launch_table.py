"""The launch table: layouts, gradients of a step, step counts, and the same numbers in Python and C++."""

from __future__ import annotations

import pathlib
import re
import weakref

import numpy as np
import pytest
import torch
from cases import as_array, to_torch
from kernel_runs import CPU, gradient_rows, same_bits

from ruda_optim.fused_adamw import (
    AdamWOptions,
    StepCoefficients,
    storage,
)
from ruda_optim.fused_adamw.kernels import cpu, tables
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
    table, _, gradients = bindable()
    clean = table.fields.clone()
    table.set_gradient(1, to_torch(as_array(gradients[1]), "bfloat16", "every second"))
    table.set_gradient(3, to_torch(as_array(gradients[3]), "float32", "transposed"))
    assert table.fields[Field.LAYOUT].tolist()[::2] == [-1, -1]
    assert min(table.fields[Field.LAYOUT].tolist()[1::2]) >= 0
    table.set_gradient(1, gradients[1])
    table.set_gradient(3, gradients[3])
    assert torch.equal(table.fields, clean)


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


def test_set_gradient_keeps_what_is_not_the_gradients() -> None:
    table, _, gradients = bindable()
    table.fields[Field.COEFFICIENTS] = torch.tensor([0, 1, 2, 3])
    table.fields[Field.FLAGS] &= ~int(Flag.FIRST)
    table.set_gradient(2, gradients[2].bfloat16())
    assert not any(flags & Flag.FIRST for flags in table.fields[Field.FLAGS].tolist())
    assert table.fields[Field.COEFFICIENTS].tolist() == [0, 1, 2, 3]


def test_a_selection_describes_some_of_the_columns() -> None:
    table, parameters, gradients = bindable()
    gradients[2] = to_torch(as_array(gradients[2]), "float32", "every second")
    table.set_gradient(2, gradients[2])
    wanted = [updated(p, g) for p, g in zip(parameters, gradients, strict=True)]
    before = [parameter.clone() for parameter in parameters]
    part = table.select([0, 2], CPU)
    assert (len(part), part.numel) == (2, 48)
    storage.adamw_scaled(part, storage.coefficient_table([OPTIONS.prepare_step(0)]))
    for index, parameter in enumerate(parameters):
        assert same_bits(parameter, wanted[index] if index in (0, 2) else before[index])


@pytest.mark.parametrize("hold", [True, False])
def test_a_table_keeps_no_gradient_alive(hold) -> None:
    tensors = [torch.ones(3) for _ in range(4)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    table = LaunchTable([TensorMemory(*tensors)], CPU, hold=hold)
    del tensors
    assert [reference() is not None for reference in alive] == [False, hold, hold, hold]
    assert len(table) == 1


# ------------------------------------------------------------------------------------------------------ bookkeeping


def test_coefficient_table_holds_the_rows() -> None:
    steps = [OPTIONS.prepare_step(0), OPTIONS.prepare_step(41)]
    found = storage.coefficient_table(steps)
    assert found.dtype is torch.float32
    np.testing.assert_array_equal(as_array(found), [step.row for step in steps])
    assert storage.coefficient_table([]).shape == (0, storage.COEFFICIENTS)


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
