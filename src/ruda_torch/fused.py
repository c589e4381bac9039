"""One fused step: find or build the plan, one statistics pass, one decision, one update launch per device.

Nothing that the optimizer holds changes before every check has passed and the decision is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import (
    GradientGuardOptions,
    GradientStats,
    StepControl,
    storage,
)

from . import sharding
from .hyperparameters import Hyperparameters
from .members import collect, describe_position
from .plan import PlanCache, StepPlan, own_gradients, split
from .reduction import Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from ruda_optim.fused_adamw import AdamWOptions
    from ruda_optim.fused_adamw.storage import StatisticsWorkspace

    from .plan import Part
    from .settings import Settings

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass
class StepReport:
    """What a step did. Per-group norms are merged from the statistics rows when somebody asks."""

    skipped: bool
    grad_norm: float
    clip_factor: float
    sources: list[tuple[StatisticsWorkspace, dict[int, tuple[int, int]]]] = field(default_factory=list)
    groups: int = 0
    norms: tuple[float, ...] | None = None
    """The group norms of sharded parameters: they travel with the sum over ranks, so that reading needs no other."""

    def group_norms(self) -> tuple[float, ...]:
        """The L2 norm of each group's gradients, after unscaling, before clipping; 0 for a group without gradients."""
        if self.norms is not None:
            return self.norms
        if not self.sources:  # no statistics, or no gradients to make any from
            return (0.0 if self.grad_norm == 0.0 else math.nan,) * self.groups
        norms = []
        for group in range(self.groups):
            reports = [workspace.report_of(*ranges[group]) for workspace, ranges in self.sources if group in ranges]
            norms.append(combined(reports).total_norm)
        self.sources = []
        return tuple(norms)


def _skipped(groups: int) -> StepReport:
    """The report of a step that ``found_inf`` called off before anybody looked at the gradients."""
    return StepReport(skipped=True, grad_norm=math.inf, clip_factor=1.0, groups=groups)


def combined(reports: list[list[float]]) -> GradientStats:
    """Reports of several devices as one, in FP64."""
    squares = 0.0
    largest = max((scale for _, scale, _ in reports), default=0.0)
    for _, scale, sumsq in reports:
        squares += sumsq * (scale / largest) ** 2 if largest > 0.0 else 0.0
    bad = max((bad for bad, _, _ in reports), default=0.0)
    return GradientStats.from_report(bad, largest, squares, elements=0, tensors=len(reports), gradient_scale=1.0)


class FusedStep:
    """Runs the fused step of one optimizer. Holds caches only, so an optimizer may drop it and make a new one.

    Args:
        settings: the optimizer's own.
        skipped_steps: where the count of skipped steps starts.
    """

    def __init__(self, settings: Settings, skipped_steps: int = 0) -> None:
        self._settings = settings
        self._guarded = settings.measures
        self._cache = PlanCache(hierarchical=settings.hierarchical_stats, guarded=self._guarded)
        self._guard = GradientGuardOptions(max_norm=settings.clip_norm, epsilon=CLIP_EPSILON)
        self._hyperparameters = Hyperparameters()
        self._skipped_steps = skipped_steps

    @property
    def skipped_steps(self) -> int:
        return self._skipped_steps

    def run(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        grad_scale: Tensor | float | None,
        found_inf: Tensor | float | None,
        gradients: list[Tensor | None] | None = None,
        targets: list[Tensor] | None = None,
        *,
        state_shown: bool = True,
    ) -> StepReport:
        """One step over all groups.

        Args:
            groups: torch's parameter groups; hyperparameters are read now.
            state: the optimizer's state; new entries appear after the update was launched.
            grad_scale: what the gradients were multiplied by; None means they are unscaled already.
            found_inf: above 0 means that somebody saw a non-finite gradient; the step is skipped.
            gradients: one per parameter of all groups, or None for the parameters' own ``.grad``.
            targets: memory that stands in for the parameters (a compiled graph may pass copies); None for their own.
            state_shown: whether anybody outside may have replaced something in ``state``.
        """
        ranks = self._cache.follow(groups)
        step = partial(self._step, groups, state, grad_scale, found_inf, gradients, targets, state_shown)
        if ranks is None:
            report = step(None)
        else:
            summed = self._guarded or found_inf is not None
            with torch.no_grad(), Reduction(ranks, len(groups), enabled=summed) as reduction:
                report = step(reduction)
        self._skipped_steps += report.skipped
        return report

    def _step(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        grad_scale: Tensor | float | None,
        found_inf: Tensor | float | None,
        gradients: list[Tensor | None] | None,
        targets: list[Tensor] | None,
        state_shown: bool,
        reduction: Reduction | None,
    ) -> StepReport:
        control = StepControl(gradient_scale=1.0 if grad_scale is None else float(grad_scale))
        options = [self._hyperparameters.read(number, group) for number, group in enumerate(groups)]
        parameters = self._cache.parameters
        if reduction is not None:
            gradients = own_gradients(parameters) if gradients is None else gradients
            gradients = reduction.settle(parameters, gradients, partial(describe_position, groups))
        if found_inf is not None and float(found_inf) > 0.0:
            if reduction is not None:
                reduction.run(None, (), 1.0).check()
            return _skipped(len(groups))
        plan = self._find(groups, state, gradients, targets, state_shown)
        if plan is not None:
            try:
                report = self._analyze(plan.parts, plan.parameters, len(groups), control, reduction)
                if not report.skipped:
                    self._update(plan, options, control, report.clip_factor)
            finally:
                plan.release()
            return report
        gradients = own_gradients(parameters) if gradients is None else gradients
        where = partial(describe_position, groups)
        sharding.check_not_replaced(parameters, gradients, where, self._cache.in_modules)
        report, plan = self._first_run(groups, state, gradients, targets, options, control, reduction)
        if plan is not None and targets is None:
            plan.remember(state)
            self._cache.keep(groups, gradients, plan)
        return report

    def _find(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        gradients: list[Tensor | None] | None,
        targets: list[Tensor] | None,
        state_shown: bool,
    ) -> StepPlan | None:
        """A kept plan for these tensors, bound to their gradients, or None."""
        return None if targets is not None else self._cache.find(groups, gradients, state if state_shown else None)

    @torch.no_grad()
    def _first_run(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        gradients: list[Tensor | None],
        targets: list[Tensor] | None,
        options: list[AdamWOptions],
        control: StepControl,
        reduction: Reduction | None,
    ) -> tuple[StepReport, StepPlan | None]:
        """A step whose tensors are new: check them, decide, and only then allocate what their state lacks."""
        members, present = collect(groups, state, gradients, targets, settings=self._settings)
        parts = split(members, [storage.TensorMemory(gradient) for gradient in present])
        for part in parts:
            storage.select(part.table.device)  # raises where the device's kernels cannot run
        report = self._analyze(parts, [member.parameter for member in members], len(groups), control, reduction)
        if report.skipped:
            return report, None
        for member in members:
            member.allocate(settings=self._settings)
        plan = StepPlan(members, present)
        self._update(plan, options, control, report.clip_factor)
        plan.commit(state)
        return report, plan

    def _analyze(
        self,
        parts: list[Part],
        parameters: list[Tensor],
        groups: int,
        control: StepControl,
        reduction: Reduction | None,
    ) -> StepReport:
        """The statistics pass over all parts, one read per device, and the decision for the whole step.

        Args:
            parts: this rank's memory.
            parameters: what the parts belong to, empty ones included.
            groups: number of parameter groups.
            control: the loss scale.
            reduction: for sharded parameters, the sum over ranks.
        """
        if not self._guarded and reduction is None:
            return StepReport(skipped=False, grad_norm=math.nan, clip_factor=1.0, groups=groups)
        runs = []
        if self._guarded:
            for part in parts:
                workspace = self._cache.workspace(part.table.device)
                workspace.run(part.table, control.inverse_scale)
                runs.append((part, workspace, storage.select(part.table.device).statistics_chunk))
        sources, norms = [], None
        if reduction is not None and reduction.enabled:
            sums = [part.shares(reduction.ranks, chunk, groups).sums(workspace.rows) for part, workspace, chunk in runs]
            known = reduction.run(parameters if self._guarded else None, sums)
            known.check()
            if known.skip.item() > 0.0:
                return _skipped(groups)
            norms = known.group_norms()
            bad, scale, sumsq = known.report.tolist()
            stats = GradientStats.from_report(bad, scale, sumsq, elements=0, tensors=0, gradient_scale=1.0)
        else:
            sources = [(workspace, part.group_rows(chunk)) for part, workspace, chunk in runs]
            stats = combined([workspace.report.tolist() for _, workspace, _ in runs])
        if not self._guarded:
            return StepReport(skipped=False, grad_norm=math.nan, clip_factor=1.0, groups=groups)
        decision = stats.decision(self._guard)
        if decision.skip_update and not self._settings.check_finite:
            # The check is off: NaN and infinity go where IEEE arithmetic sends them, with max_norm / infinity = 0.
            clip_factor = 1.0 if self._settings.clip_norm is None else 0.0
            return StepReport(False, math.inf, clip_factor, sources, groups, norms)
        return StepReport(decision.skip_update, stats.total_norm, decision.clip_factor, sources, groups, norms)

    def _update(
        self,
        plan: StepPlan,
        options: list[AdamWOptions],
        control: StepControl,
        clip_factor: float,
    ) -> None:
        launches = []
        for part in plan.parts:
            steps = [options[group].prepare_step(completed, control) for group, completed in part.coefficients.assign()]
            launches.append((storage.select(part.table.device), part.table, part.coefficients.fill(steps)))
        # Before the launch, while the parameters are still in cache; from here on nothing can fail.
        torch.autograd.graph.increment_version(plan.parameters)
        for kernels, table, coefficients in launches:
            kernels.adamw_scaled(table, coefficients, control.inverse_scale, clip_factor)
            storage.advance_steps(table)
        for member in plan.empty:
            step = member.local("step")
            if step is not None:
                step += 1.0
