"""What the optimizer tells of its last step, parameter by parameter, and when it speaks up by itself."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import ruda_torch
from ruda_optim.fused_adamw import InvalidState
from workloads import gpt2_shapes


def named_parameters(shapes) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"layer{n}", torch.nn.Parameter(torch.zeros(shape))) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooks"])
def test_a_loop_that_only_calls_step_reads_the_name_of_one_bad_parameter_in_148(hooked) -> None:
    named = named_parameters([[max(1, side // 96) for side in shape] for shape in gpt2_shapes()])
    assert len(named) == 148
    optimizer = ruda_torch.AdamW(named, fused_step=True)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    spoken = []
    for step in range(1, 14):
        bad = step != 3  # a run of two, a good step, a run of ten
        named[77][1].grad.view(-1)[-1] = torch.nan if bad else 1.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        spoken += [(step, str(warning.message)) for warning in caught]
        assert all(warning.category is ruda_torch.SkippedStepsWarning for warning in caught)
        assert all(warning.filename == __file__ for warning in caught), "it points at the line that called step()"
    assert [step for step, _ in spoken] == [2, 5, 13]
    for (_, message), run in zip(spoken, (2, 2, 10), strict=True):
        assert message.startswith(f"{run} steps in a row were skipped: ")
        assert " not finite in layer77 (1 of 148 parameters)" in message


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("capturable", [False, True])
def test_every_kind_of_gradient(scale, max_grad_norm, capturable) -> None:
    torch.manual_seed(0)
    dtypes = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}
    first = [torch.nn.Parameter(torch.zeros(40, 30, dtype=dtype)) for dtype in dtypes]
    second = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(70_000,), (0,), (), (5, 6), (3,)]]
    optimizer = ruda_torch.AdamW(
        [{"params": first}, {"params": second}],
        fused_step=True,
        max_grad_norm=max_grad_norm,
        capturable=capturable,
    )
    assert len(optimizer.gradient_report()) == 0
    for number, parameter in enumerate([*first, *second[:-1]]):  # the last has no gradient
        parameter.grad = (torch.randn(parameter.shape) * 10.0 ** (number % 3 - 1)).to(parameter.dtype)
    second[3].grad = torch.randn(6, 5).t()  # strided
    gradients = [parameter.grad.clone() for parameter in [*first, *second[:-1]]]
    if scale is None:
        optimizer.step()
    else:
        optimizer.step(grad_scale=scale)
    optimizer.zero_grad()
    report = optimizer.gradient_report()
    assert [(line.name, line.group, line.index) for line in report] == [
        *((None, 0, index) for index in range(3)),
        *((None, 1, index) for index in range(4)),
    ]
    for line, gradient in zip(report, gradients, strict=True):
        wanted = gradient.double() / (scale or 1.0)
        # FP32 sums of at most 70,000 squares in partial sums of a chunk: their roundings add up like a random walk.
        assert line.norm == pytest.approx(float(wanted.norm()), rel=1e-5)
        assert line.largest == pytest.approx(float(wanted.abs().max()) if wanted.numel() else 0.0, rel=2**-23)
        assert line.finite
        assert line.elements == gradient.numel()
    assert report.total_norm == pytest.approx(optimizer.last_grad_norm, rel=1e-6)


def test_it_tells_of_the_last_step_only() -> None:
    parameters = named_parameters([(3,), (4,)])
    optimizer = ruda_torch.AdamW(parameters, fused_step=True)
    for size in (1.0, math.nan, 2.0):
        parameters[1][1].grad = torch.full((4,), size)
        optimizer.step()
        (line,) = optimizer.gradient_report()
        assert (line.name, line.finite) == ("layer1", math.isfinite(size))
        assert line.norm == (2.0 * size if line.finite else math.inf)
    parameters[0][1].grad = torch.ones(3)
    optimizer.step()
    assert [line.name for line in optimizer.gradient_report()] == ["layer0", "layer1"]
    assert [line.name for line in optimizer.update_report()] == ["layer0", "layer1"]


def test_without_statistics_it_says_what_they_need() -> None:
    ((_, parameter),) = named = named_parameters([(3,)])
    optimizer = ruda_torch.AdamW(named, fused_step=True, check_finite=False)
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(InvalidState, match="they need check_finite=True or a max_grad_norm"):
        optimizer.gradient_report()
