"""The gradient report: rows merged per parameter, the table, and the words and the rhythm of the skip warning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import ruda_torch
from ruda_optim.fused_adamw import moment_codes
from ruda_torch.report import (
    NAMED,
    SHOWN,
    Entry,
    GradientReport,
    ParameterGradient,
    ParameterUpdate,
    UpdateReport,
    gradient_report,
    next_warning,
    skip_warning,
    update_report,
)


def row_of(values: torch.Tensor) -> list[float]:
    """The statistics row of a run of gradients, as csrc/gradient_stats.h defines it."""
    finite = values[values.isfinite()].double()
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    sumsq = float((finite / scale).square().sum()) if scale else 0.0
    return [scale, sumsq, float(not values.isfinite().all())]


def reported(gradients: list[torch.Tensor], chunk: int = 7, names: bool = True) -> GradientReport:
    """The report of ``gradients``, cut into rows of ``chunk`` elements."""
    entries, rows = [], []
    for index, gradient in enumerate(gradients):
        first = len(rows)
        rows += [row_of(part) for part in gradient.split(chunk) if part.numel()]
        entries.append(Entry(f"layer{index}" if names else None, 0, index, gradient.numel(), first, len(rows)))
    return gradient_report(entries, torch.tensor(rows).reshape(-1, 3))


def parameter(name: str, norm: float, finite: bool = True) -> ParameterGradient:
    return ParameterGradient(name, 0, 0, 1, norm if finite else math.inf, norm, finite)


def test_rows_are_merged_per_parameter() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(n) * 10.0**e for n, e in [(1, 0), (7, -20), (0, 0), (8, 18), (100, 3), (0, 0)]]
    report = reported(gradients)
    assert [len(report), *(p.elements for p in report)] == [6, 1, 7, 0, 8, 100, 0]
    for found, gradient in zip(report, gradients, strict=True):
        # A row holds two FP32 numbers, each rounded once: 2 * 2^-24 in the square.
        assert found.norm == pytest.approx(float(gradient.double().norm()), rel=2**-23)
        assert found.largest == (float(gradient.abs().max()) if gradient.numel() else 0.0)
        assert found.finite
    assert report.total_norm == pytest.approx(float(torch.cat(gradients).double().norm()), rel=2**-23)
    assert report[-1] is report[5]
    assert report[1:3] == (report[1], report[2])


@pytest.mark.parametrize("magnitude", [1e-45, 3.4e38])
def test_norms_at_the_ends_of_fp32_keep_their_size(magnitude: float) -> None:
    gradient = torch.full((1000,), magnitude)
    assert reported([gradient])[0].norm == pytest.approx(float(gradient[0]) * math.sqrt(1000), rel=2**-22)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_marks_its_parameter_and_no_other(bad: float) -> None:
    gradients = [torch.ones(20) for _ in range(5)]
    gradients[2][13] = bad
    gradients[4][:] = bad
    report = reported(gradients)
    assert [p.name for p in report.not_finite] == ["layer2", "layer4"]
    assert [p.finite for p in report] == [True, True, False, True, False]
    assert report[2].norm == report.total_norm == math.inf
    assert [p.largest for p in report] == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_rows_need_not_follow_each_other() -> None:
    """Several devices, or groups in another order than their memory: a gap belongs to nobody."""
    rows = torch.tensor([row_of(torch.full((4,), float(value))) for value in range(1, 7)])
    report = gradient_report([Entry("b", 1, 0, 8, 4, 6), Entry("a", 0, 0, 4, 0, 1)], rows)
    assert [p.norm for p in report] == pytest.approx([math.sqrt(4 * 25 + 4 * 36), 2.0])
    assert [p.largest for p in report] == [6.0, 1.0]


def test_no_rows_at_all() -> None:
    assert str(gradient_report([], torch.empty(0, 3))) == (
        "gradients of 0 parameters, 0 elements: all finite, norm 0\nnorm  largest  elements  group/index  name"
    )
    assert reported([torch.empty(0)])[0] == ParameterGradient("layer0", 0, 0, 0, 0.0, 0.0, True)


def test_worst_are_the_bad_ones_in_their_order_then_the_largest() -> None:
    report = GradientReport(
        [parameter("a", 1), parameter("b", 9, False), parameter("c", 5), parameter("d", 2, False), parameter("e", 7)]
    )
    assert [p.name for p in report.worst(4)] == ["b", "d", "e", "c"]
    assert [p.name for p in report.worst()] == ["b"]


def test_table() -> None:
    gradients = [torch.full((4,), 0.5), torch.full((2000,), 2.0), torch.ones(3)]
    gradients[2][1] = math.nan
    assert str(reported(gradients)) == "\n".join(
        [
            "gradients of 3 parameters, 2,007 elements: 1 not finite",
            "      norm  largest  elements  group/index  name",
            "NOT FINITE        1         3          0/2  layer2",
            "     89.44        2     2,000          0/1  layer1",
            "         1      0.5         4          0/0  layer0",
        ]
    )
    assert "all finite, norm 1" in str(reported(gradients[:1], names=False))
    assert not any(line.endswith(" ") for line in str(reported(gradients, names=False)).splitlines())


def test_a_table_of_thousands_is_cut_after_the_worst() -> None:
    many = 4000
    rows = np.ones((many, 3), dtype=np.float32) * [1.0, 1.0, 0.0]
    rows[3000] = [5.0, 1.0, 0.0]
    rows[1234] = [0.0, 0.0, 1.0]
    report = gradient_report([Entry(None, 0, i, 9, i, i + 1) for i in range(many)], torch.from_numpy(rows).float())
    lines = str(report).splitlines()
    assert len(lines) == SHOWN + 3
    assert "0/1234" in lines[2]
    assert "0/3000" in lines[3]
    assert lines[-1] == f"... and {many - SHOWN:,} more"
    assert str(report.not_finite[0]) == "parameter 1234 of group 0"


def test_warnings_come_at_two_and_at_powers_of_ten() -> None:
    due, warned = next_warning(0), []
    for run in range(1, 12345):
        if run >= due:
            warned.append(run)
            due = next_warning(run)
    assert warned == [2, 10, 100, 1000, 10000]
    assert [next_warning(run) for run in (0, 1, 2, 9, 10, 57, 100)] == [2, 2, 10, 10, 100, 100, 1000]


def test_a_warning_names_the_parameters() -> None:
    gradients = [torch.ones(3) for _ in range(NAMED + 3)]
    gradients[1][0] = math.inf
    text = skip_warning(reported(gradients), 2)
    assert text.startswith("2 steps in a row were skipped: gradients that are not finite in layer1 (1 of 8 parameters)")
    assert "lower the learning rate or the loss scale" in text
    bad = [torch.full((2,), math.nan)] * (NAMED + 3)
    text = skip_warning(reported(bad, names=False), 1000)
    assert "1,000 steps" in text
    assert f"parameter {NAMED - 1} of group 0 and 3 more (8 of 8 parameters)" in text


def test_a_skip_that_somebody_else_asked_for_accuses_no_parameter() -> None:
    assert "not finite elsewhere (the gradients of this process are finite" in skip_warning(
        reported([torch.ones(3)]), 2
    )


# ---- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, ruda_torch.AdamW], ids=["torch", "fused"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["adamw", "amsgrad"])
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
def test_an_update_is_as_large_as_what_the_step_did(make: type, amsgrad: bool, lr: float | torch.Tensor) -> None:
    torch.manual_seed(0)
    parameters = [(f"p{n}", torch.nn.Parameter(torch.randn(n, 3))) for n in (1, 5, 40)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-3}]
    ours = {"fused_step": True} if make is ruda_torch.AdamW else {}
    optimizer = make(groups, lr=lr, weight_decay=0.0, amsgrad=amsgrad, **ours)
    for size in (10.0, 0.1, 1.0):
        before = [parameter.detach().clone() for _, parameter in parameters]
        for _, parameter in parameters:
            parameter.grad = size * torch.randn_like(parameter)
        optimizer.step()
    report = update_report(optimizer)
    assert [(line.name, line.group, line.index, line.elements) for line in report] == [
        ("p1", 0, 0, 3),
        ("p5", 0, 1, 15),
        ("p40", 1, 0, 120),
    ]
    for line, (_, parameter), old in zip(report, parameters, before, strict=True):
        moved = (parameter.detach() - old).double().norm()
        # The difference of two parameters near 1 has an error of 2^-24 an element; lr is the typical update.
        tolerance = 2**-24 * float(parameter.detach().abs().max()) * 4 / 1e-3
        assert line.update == pytest.approx(float(moved), rel=tolerance)
        assert line.parameter == pytest.approx(float(parameter.detach().double().norm()), rel=1e-6)
        assert line.ratio == line.update / line.parameter


def test_asking_for_updates_writes_nothing_and_skips_what_has_none() -> None:
    used, unused = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = ruda_torch.AdamW([used, unused], fused_step=True)
    assert str(update_report(optimizer)).startswith("updates of 0 parameters, 0 elements: no update yet")
    used.grad = torch.ones(4)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[used].items()}
    versions = [value._version for value in (used, *optimizer.state[used].values())]
    report = update_report(optimizer)
    assert [line.index for line in report] == [0]
    assert versions == [value._version for value in (used, *optimizer.state[used].values())]
    assert all(torch.equal(before[name], value) for name, value in optimizer.state[used].items())


def test_moments_in_sixteen_bits_are_read_as_what_they_stand_for() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(30, 7))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.randn(30, 7)
    optimizer.step()
    state = optimizer.state[parameter]
    first, second = state.pop("exp_avg"), state.pop("exp_avg_sq")
    words = moment_codes.encode_packed(first.numpy(), second.numpy())
    state["packed_moments"] = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    (packed,) = update_report(optimizer)
    del state["packed_moments"]
    first, second = map(torch.from_numpy, moment_codes.decode_packed(words))
    state.update(exp_avg=first.bfloat16(), exp_avg_sq=second.bfloat16())  # exact, as every word's moments are
    assert update_report(optimizer)[0] == packed
    assert 0.5 < packed.update / (1e-3 * math.sqrt(210)) < 2.0


def test_half_parameters_are_measured_in_fp32() -> None:
    parameter = torch.nn.Parameter(torch.full((1000,), 100.0, dtype=torch.float16))
    optimizer = ruda_torch.AdamW([parameter], lr=1e-4, fused_step=True)
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    (line,) = update_report(optimizer)
    assert line.parameter == pytest.approx(100 * math.sqrt(1000), rel=1e-3)  # 1e7 in the square: no FP16 number
    assert line.update == pytest.approx(1e-4 * math.sqrt(1000), rel=1e-3)  # far below half an ulp of the parameter


def test_table_of_updates() -> None:
    lines = [
        ParameterUpdate("head", 1, 0, 10, 0.0, 0.0),
        ParameterUpdate("zeros", 0, 0, 1_000, 0.5, 0.0),
        ParameterUpdate(None, 0, 1, 20, 0.001, 2.0),
    ]
    assert str(UpdateReport(lines)) == "\n".join(
        [
            "updates of 3 parameters, 1,030 elements: median of update / parameter 0.0005",
            "update / parameter  update  parameter  elements  group/index  name",
            "               inf     0.5          0     1,000          0/0  zeros",
            "            0.0005   0.001          2        20          0/1",
            "                 0       0          0        10          1/0  head",
        ]
    )
