"""One step, for every device: measure, decide, update.

The decision (skip, clip factor, coefficients, step counters) is taken where the tensors are, so a step never waits for
an accelerator; who asks what it did, waits. On a CPU a plan that still fits takes the whole step in one native call;
everything else (another device, several devices or ranks, a profiler, a compiled graph's copies) makes the same three
calls from here. Nothing that the optimizer holds changes before every check has passed.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.autograd import profiler

from ruda_optim.fused_adamw import InvalidState
from ruda_optim.fused_adamw.binding import capturing, keep_for_graphs, one_step

from . import sharding
from .control import Control, flag_on, on_host, scale_on
from .outcome import Outcome
from .plan import NewPlan
from .ranks import find
from .reduction import Reduction
from .report import GradientReport, next_warning, warn_of_skips
from .step_counts import count_empty, take_back
from .step_inputs import StepInputs, parameter_lists

if TYPE_CHECKING:
    from torch import Tensor

    from ruda_optim.fused_adamw.binding import Part, Plan

    from .ranks import Ranks, Shares
    from .reduction import GlobalStatistics
    from .settings import Settings


class Engine:
    """Takes the steps of one optimizer.

    Args:
        settings: the optimizer's own.

    Attributes:
        outcome: what the last step did; None before the first one.
        lists: the groups' lists of parameters, for whoever names a parameter by its position.
    """

    def __init__(self, settings: Settings) -> None:
        self.outcome: Outcome | None = None
        self.lists: list[list[Tensor]] = []
        self._settings = settings
        self._control = Control()
        self._plan: Plan | None = None
        self._native: Outcome | None = None
        self._amsgrad: list[bool] = []
        self._ranks: Ranks | None = None
        self._in_modules: set[int] = set()
        self._bound = 0  # parameters that had gradients in the last step
        self._pending: GlobalStatistics | None = None
        self._torn: str | None = None
        self._lock = threading.RLock()  # a step lets other threads run
        self._stepping = False
        self._warn_at = next_warning(0)

    def configure(self, settings: Settings) -> None:
        """Take over settings. What was counted stays, and so does the memory that a captured graph replays."""
        self._control.limit(settings.max_grad_norm)
        # Another norm to clip by leaves the plan as it is.
        if replace(settings, max_grad_norm=None) != replace(self._settings, max_grad_norm=None) or (
            settings.measures is not self._settings.measures
        ):
            self.forget()
        self._settings = settings

    def forget(self) -> None:
        """Build the plan anew at the next step, for example because the state was replaced."""
        self._plan = self._native = None

    def restored(self) -> None:
        """The state was loaded: what a failed launch left behind is gone."""
        self.forget()
        self._torn = None

    def last(self, groups: list[dict[str, Any]]) -> Outcome | None:
        """What the last step did; raises what its sum over ranks has to say, and warns of a run of skipped steps."""
        self.check_ranks()
        outcome = self.outcome
        if outcome is not None and not on_host(outcome.memory.counts.device):
            self._warn_of_skips(outcome, groups)
        return outcome

    def _warn_of_skips(self, outcome: Outcome, groups: list[dict[str, Any]]) -> None:
        """Say once, then at powers of ten, that steps in a row were skipped; waits for the device."""
        run = int(outcome.memory.counts[1].item())
        if run == 0:
            self._warn_at = next_warning(0)
        elif run >= self._warn_at:
            self._warn_at = next_warning(run)
            report = outcome.gradients(groups) if outcome.measured else GradientReport(())
            warn_of_skips(report, run)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far; waits for the devices."""
        return self._control.skipped_steps

    def check_whole(self) -> None:
        """Raise :class:`InvalidState` if only some launches of an earlier step were made."""
        if self._torn is not None:
            raise InvalidState(
                "an earlier step was launched in part only, so parameters and state belong to two different steps "
                f"({self._torn}); load a checkpoint with load_state_dict to go on"
            )

    def check_ranks(self) -> None:
        """Raise what the last step's sum over ranks has to say, if nobody has looked yet; waits for the device."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.check()

    # ---- the step ----------------------------------------------------------------------------------------------------

    def run(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        grad_scale: Tensor | float | None,
        found_inf: Tensor | float | None,
        watched: dict[Tensor, dict[str, Any]] | bool | None,
        gradients: list[Tensor | None] | None = None,
        stand_ins: list[list[Tensor]] | None = None,
    ) -> None:
        """Take one step over all groups; another thread's step waits for it. See :class:`StepInputs`.

        Args:
            stand_ins: the memory that stands in for the parameters of each group in a compiled graph.
        """
        with self._lock:
            if self._stepping:
                raise InvalidState(
                    "step() was called from within a step of the same optimizer (by a .grad property or a finalizer?); "
                    "call it after that step"
                )
            self._stepping = True
            try:
                if stand_ins is None and self._run_native(groups, state, grad_scale, found_inf, watched, gradients):
                    return
                lists = self.lists = parameter_lists(groups)
                inputs = StepInputs(groups, state, lists, grad_scale, found_inf, gradients, watched)
                if stand_ins is not None:
                    inputs = replace(inputs, targets=stand_ins, stand_in=True)
                with torch.no_grad():
                    self._run(inputs)
                outcome = self.outcome
                if outcome is not None and on_host(outcome.memory.counts.device):
                    self._warn_of_skips(outcome, groups)
            finally:
                self._stepping = False

    def abandon(self, groups: list[dict[str, Any]], found_inf: Tensor | float | None) -> None:
        """Something raised before :meth:`run`: tell the ranks that share these parameters, which would wait for us."""
        self._ranks = find(groups, guarded=self._settings.measures, known=self._ranks)
        if self._ranks is not None:
            with torch.no_grad():
                self._reduction(self._ranks, groups, found_inf).abandon()

    def _prepare(self, groups: list[dict[str, Any]]) -> None:
        """What may be wrong before any tensor is looked at."""
        self.check_whole()
        if self._native is not None:
            self._native.plan.note(None)  # until what is read now is in memory
        self._control.read(groups, self._settings)
        if self._amsgrad != self._control.amsgrad():
            self.forget()

    def _run_native(
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        grad_scale: Tensor | float | None,
        found_inf: Tensor | float | None,
        watched: dict[Tensor, dict[str, Any]] | bool | None,
        gradients: list[Tensor | None] | None,
    ) -> bool:
        """Take the step in one native call; False if there is no plan for it that still fits."""
        native = self._native
        if native is None or _observed():
            return False
        plan = native.plan

        def inputs() -> StepInputs:  # which most steps do not need
            return StepInputs(groups, state, parameter_lists(groups), grad_scale, found_inf, gradients)

        def settle(position: int, gradient: Tensor) -> Tensor:
            return inputs().settle(position, gradient)

        inverse_scale = 1.0 if grad_scale is None else scale_on(_CPU, grad_scale)[0]
        flag = 0.0 if found_inf is None else float(found_inf)
        taken = plan.step(groups, gradients, watched, settle, inverse_scale, flag, False)
        if taken is None:
            self._prepare(groups)
            if native is not self._native:
                return False
            self._control.memory(_CPU)
            plan.note(self._control.values)
            taken = plan.step(groups, gradients, watched, settle, inverse_scale, flag, True)
        if not taken:
            return False
        self.outcome = native
        if plan.has_empty:
            count_empty(native, inputs())
        if plan.stepped != self._bound:
            self._check_not_replaced(plan.stepped, inputs())
        if plan.skipped or self._warn_at > 2:
            self._warn_of_skips(native, groups)
        return True

    def _check_not_replaced(self, count: int, inputs: StepInputs) -> None:
        """Raise if parameters have no gradients any more because their modules hold DTensors instead."""
        fewer, self._bound = count < self._bound, count
        if fewer and sharding.may_replace():
            gradients = inputs.own_gradients()
            sharding.check_not_replaced(inputs.parameters, gradients, inputs.where, self._in_modules)

    def _run(self, inputs: StepInputs) -> None:
        if self._plan is None or not self._plan.fits(inputs.targets):
            self.forget()
            self._in_modules.clear()
            self._ranks = find(inputs.groups, guarded=self._settings.measures, known=self._ranks)
        if self._ranks is None:
            self._prepare(inputs.groups)
            self._step(inputs, None)
            return
        with self._reduction(self._ranks, inputs.groups, inputs.found_inf) as reduction:
            self.check_ranks()
            self._prepare(inputs.groups)
            gradients = reduction.settle(inputs.parameters, inputs.own_gradients(), inputs.where)
            self._step(replace(inputs, gradients=gradients), reduction)

    def _reduction(self, ranks: Ranks, groups: list[dict[str, Any]], found_inf: Tensor | float | None) -> Reduction:
        settings = f"{self._settings.check_finite} {self._settings.max_grad_norm} {self._settings.moments}"
        enabled = self._settings.measures or found_inf is not None
        return Reduction(ranks, len(groups), enabled=enabled, settings=settings)

    def _step(self, inputs: StepInputs, reduction: Reduction | None) -> None:
        """Bind a plan to this step's tensors, building it where the kept one does not fit, and launch it."""
        plan, new = self._plan, None
        if (
            plan is None
            or inputs.stand_in
            or not plan.bind(inputs.targets, inputs.gradients, inputs.watched, inputs.settle)
        ):
            gradients = inputs.own_gradients()
            if not inputs.stand_in:
                sharding.check_not_replaced(inputs.parameters, gradients, inputs.where, self._in_modules)
            new = NewPlan(inputs.groups, inputs.targets, inputs.state, gradients, self._settings)
            plan = new.plan
            if plan is None:
                new.commit()
                return
            if not plan.bind(inputs.targets, gradients, None, inputs.settle):
                raise RuntimeError("a plan does not describe the tensors that it was built from")
        try:
            if not inputs.stand_in:
                self._check_not_replaced(plan.count(), inputs)
            self.outcome = self._launch(plan, new, inputs, reduction)
        finally:
            plan.release()
        if new is not None:
            if not new.committed:
                return
            if not inputs.stand_in:
                self._keep(plan)
        if plan.has_empty:
            count_empty(self.outcome, inputs)

    def _keep(self, plan: Plan) -> None:
        settings = self._settings
        self._plan, self._native = plan, None
        self._amsgrad = self._control.amsgrad()
        if self._ranks is None and set(plan.devices) == {_CPU} and all(map(_on_host, plan.parts())):
            memory = self._control.memory(_CPU)
            measured = settings.measures
            plan.prepare(
                memory,
                measured=measured,
                check_finite=settings.check_finite,
                stages=settings.hierarchical_stats,
            )
            plan.note(self._control.values)
            groups = len(self._amsgrad)
            self._native = Outcome(memory, measured, plan, lambda: [plan.native_rows()], groups)

    def _launch(self, plan: Plan, new: NewPlan | None, inputs: StepInputs, reduction: Reduction | None) -> Outcome:
        """Measure, decide and update the tensors of a bound plan, device by device."""
        parts = plan.parts() or [plan.no_part(_device_of(inputs))]
        captured = [part for part in parts if capturing(part.table.device)]
        if not captured:
            return self._submit(parts, plan, new, inputs, reduction)
        with contextlib.ExitStack() as stack:
            for part in captured:
                stack.enter_context(one_step(part.table))
                memory = self._control.memory(part.table.device)
                keep_for_graphs(*memory.tensors(), part.coefficients, part.rows)
            return self._submit(parts, plan, new, inputs, reduction)

    def _submit(
        self, parts: list[Part], plan: Plan, new: NewPlan | None, inputs: StepInputs, reduction: Reduction | None
    ) -> Outcome:
        settings, measured = self._settings, self._settings.measures
        devices = [part.table.device for part in parts]
        memories = [self._control.memory(device) for device in devices]
        scales = [scale_on(device, inputs.grad_scale) for device in devices]
        if measured:
            for part, (inverse_scale, scale) in zip(parts, scales, strict=True):
                part.kernels.analyze_gradient(part.table, part.rows, inverse_scale, scale=scale)
        updated = plan.updated(inputs.targets)
        report, found_inf, total = None, inputs.found_inf, None
        if reduction is not None and reduction.enabled:
            sums = [self._shares(part, plan, reduction, inputs).sums(part.rows) for part in parts if len(part.columns)]
            total = reduction.run(updated if measured else None, sums if measured else [], found_inf)
            if all(map(_on_host, parts)):
                total.check()
            else:
                self._pending = total
            report, found_inf = total.report, total.skip
        elif measured and len(parts) > 1:
            report = _report_of(parts)
        decided = launched = 0
        try:
            for number, (part, memory, (inverse_scale, scale)) in enumerate(zip(parts, memories, scales, strict=True)):
                if report is not None:
                    memory.report.copy_(report)
                if number > 0:  # several devices take the same decision, which counts once
                    memory = replace(memory, counts=torch.zeros_like(memory.counts))
                part.kernels.decide(
                    part.table,
                    memory,
                    part.coefficients,
                    part.rows if measured and report is None else None,
                    inverse_scale,
                    measured=measured,
                    check_finite=settings.check_finite,
                    scale=scale,
                    found_inf=flag_on(part.table.device, found_inf),
                    stages=settings.hierarchical_stats,
                )
                decided += 1
            outcome = Outcome(memories[0], measured, plan, lambda: parts, len(inputs.groups), total)
            if _on_host(parts[0]) and outcome.skipped:
                return outcome
            torch.autograd.graph.increment_version(updated)
            for part, memory in zip(parts, memories, strict=True):
                part.kernels.adamw_scaled(part.table, part.coefficients, 1.0, 1.0, decision=memory.decision)
                launched += 1
        except BaseException as error:  # an interrupt as well
            if all(map(_on_host, parts)) and not launched:
                if decided:
                    take_back(plan, inputs, new)  # nothing happened, so nothing is counted
            elif decided:
                self._torn = f"{type(error).__name__}: {error}"
            raise
        if new is not None:
            new.commit()
        return outcome

    def _shares(self, part: Part, plan: Plan, reduction: Reduction, inputs: StepInputs) -> Shares:
        """How a part's statistics rows count in the sum over ranks."""
        if part.shares is None:
            groups = [plan.members[column] for column in part.columns]
            parameters, position_of = inputs.parameters, plan.positions
            part.shares = reduction.ranks.shares(
                [parameters[position_of[column]] for column in part.columns],
                part.table.rows_per_tensor(part.kernels.statistics_chunk),
                torch.tensor(groups, dtype=torch.int64, device="cpu"),
                len(inputs.groups),
                part.table.device,
            )
        return part.shares  # type: ignore[no-any-return]


_CPU = torch.device("cpu")


def _on_host(part: Part) -> bool:
    """Whether the part's calls have ended when they return, so that reading a decision waits for nothing."""
    return part.kernels.name == "cpu"


def _observed() -> bool:
    """Whether somebody wants to see the launches: a profiler, or a dispatch mode."""
    return profiler._is_profiler_enabled or _len_torch_dispatch_stack() > 0


def _device_of(inputs: StepInputs) -> torch.device:
    """Where a step without gradients is decided."""
    return next((sharding.local(target).device for target in inputs.parameters), _CPU)


def _report_of(parts: list[Part]) -> Tensor:
    """One report for several devices, on the first of them; FP64 (bad, scale, sumsq)."""
    reports = [part.report().to(parts[0].table.device).double() for part in parts]
    bad, scale, sumsq = torch.stack(reports).unbind(1)
    largest = scale.max()
    ratios = torch.where(largest > 0.0, scale / largest, 0.0)
    return torch.stack([bad.max(), largest, (sumsq * ratios * ratios).sum()])
