"""Checks of sharded runs: what gradient_report() tells of a rank's part, and of the whole."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from sharded_models import batches, build, fsdp, full, groups_of, loss_of, optimizer_of, partly_plain, two_dimensional
from sharded_worker import Context, check
from torch import nn
from torch.distributed.tensor import DTensor

from ruda_torch.report import GradientReport


def _compare(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    loss_of(model, next(batches(1))).backward()
    parameters = [parameter for group in groups_of(model) for parameter in group["params"]]
    gradients = [full(parameter.grad).double() for parameter in parameters]
    optimizer.step()
    local, whole = optimizer.gradient_report(), optimizer.gradient_report(whole=True)
    assert len(local) == len(whole) == len(gradients)
    for line, gradient in zip(whole, gradients, strict=True):
        # FP32 squares of a few hundred elements.
        assert math.isclose(line.norm, float(gradient.norm()), rel_tol=1e-5)
        assert line.largest == float(gradient.abs().max())
        assert line.elements == gradient.numel()
        assert line.finite
    assert math.isclose(whole.total_norm, optimizer.last_grad_norm, rel_tol=1e-6)
    assert "of this rank" in str(local).partition("\n")[0]
    assert "of this rank" not in str(whole)
    assert any(part.elements < line.elements for part, line in zip(local, whole, strict=True))
    _same_on_all_ranks(whole)
    # One element on one rank.
    if dist.get_rank() == dist.get_world_size() - 1:
        parameter = next(p for p in parameters if isinstance(p, DTensor) and p.grad.to_local().numel())
        parameter.grad.to_local().view(-1)[0] = torch.nan
    optimizer.step()
    assert optimizer.last_step_skipped
    whole = optimizer.gradient_report(whole=True)
    assert len(whole.not_finite) == 1, "the same parameter, whoever held the element"
    assert whole.total_norm == math.inf
    assert len(optimizer.gradient_report().not_finite) == (dist.get_rank() == dist.get_world_size() - 1)
    _same_on_all_ranks(whole)


def _same_on_all_ranks(report: GradientReport) -> None:
    texts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(report))
    assert texts == [texts[0]] * len(texts)


@check(2, 4)
def gradient_reports_of_a_rank_and_of_the_whole(context: Context) -> None:
    _compare(fsdp(build(), context.mesh()))
    _compare(partly_plain(build(), context.mesh()))


@check(4)
def gradient_reports_over_mixed_meshes(context: Context) -> None:
    _compare(two_dimensional(build(), context.mesh((2, 2), ("dp", "tp"))))
