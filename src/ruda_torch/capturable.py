"""The fused step without a host read: the device counts steps and decides whether to skip and how much to clip.

For CUDA graphs, and for loops that must not wait for the device. Run one step before capturing: it allocates the state
and builds the tables. A learning rate that changes between replays must be a tensor on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import InvalidOption, storage

from . import sharding
from .fused import CLIP_EPSILON, FusedStep, StepReport, combined
from .hyperparameters import hyperparameters
from .members import collect, describe_position
from .plan import StepPlan, own_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from ruda_optim.fused_adamw.storage import StatisticsWorkspace

    from .plan import Part
    from .settings import Settings

_HYPERPARAMETERS = 8  # lr, beta1, beta2, epsilon, weight_decay, gradient_sign, max_norm (-1: none), guard epsilon


@dataclass
class CapturedReport:
    """What the last step, or the last replay of its graph, did. Every read waits for the device."""

    decision: Tensor
    report: Tensor | None
    workspace: StatisticsWorkspace
    inverse_scale: Tensor | None
    ranges: dict[int, tuple[int, int]]
    groups: int

    @property
    def skipped(self) -> bool:
        return bool(self.decision[0].item())

    @property
    def clip_factor(self) -> float:
        factor = float(self.decision[1].item())
        return factor if self.inverse_scale is None else factor / self._inverse()

    @property
    def grad_norm(self) -> float:
        if self.report is None:
            return math.nan
        return combined([self.report.tolist()]).total_norm

    def group_norms(self) -> tuple[float, ...]:
        if self.report is None:
            return (math.nan,) * self.groups
        reports = [
            [self.workspace.report_of(*self.ranges[group])] if group in self.ranges else []
            for group in range(self.groups)
        ]
        return tuple(combined(report).total_norm * self._inverse() for report in reports)

    def _inverse(self) -> float:
        return 1.0 if self.inverse_scale is None else float(self.inverse_scale.item())


class CapturableStep(FusedStep):
    """As :class:`FusedStep`, deciding on the device.

    Loss scaling: statistics are taken of the stored gradients and rescaled on the device, and the inverse scale rides
    on the clip factor. With a scale that is a power of two, which every scaler uses, the bits are those of the
    other mode.
    """

    def __init__(self, settings: Settings, skipped_steps: int = 0) -> None:
        super().__init__(settings, skipped_steps)
        self._host_rows: list[tuple[float, ...]] = []
        self._device_memory: dict[str, Tensor] = {}
        self._coefficients: dict[int, Tensor] = {}

    @property
    def skipped_steps(self) -> int:
        counted = self._device_memory.get("skips")
        return self._skipped_steps + (0 if counted is None else int(counted.item()))

    @torch.no_grad()
    def run(  # type: ignore[override]
        self,
        groups: list[dict[str, Any]],
        state: dict[Tensor, dict[str, Any]],
        grad_scale: Tensor | float | None,
        found_inf: Tensor | float | None,
        gradients: list[Tensor | None] | None = None,
        targets: list[Tensor] | None = None,
        *,
        state_shown: bool = True,
    ) -> StepReport | CapturedReport:
        """One step over all groups; see :meth:`FusedStep.run`. ``grad_scale`` and ``found_inf`` stay on the device."""
        rows = [self._row(number, group) for number, group in enumerate(groups)]
        if self._cache.follow(groups) is not None:
            raise InvalidOption(
                "capturable=True does not take sharded parameters (DTensor): the sum over ranks is read on the host; "
                "leave it out"
            )
        plan = self._find(groups, state, gradients, targets, state_shown)
        if plan is None:
            parameters = self._cache.parameters
            gradients = own_gradients(parameters) if gradients is None else gradients
            sharding.check_not_replaced(
                parameters, gradients, partial(describe_position, groups), self._cache.in_modules
            )
            members, parts = collect(groups, state, gradients, targets, settings=self._settings, capturable=True)
            devices = {gradient.device for gradient in parts}
            if len(devices) > 1:
                raise InvalidOption(
                    f"capturable=True needs all parameters on one device, got {', '.join(sorted(map(str, devices)))}"
                )
            for device in devices:
                if storage.select(device).decide is None:
                    raise InvalidOption(
                        f"capturable=True needs parameters on an accelerator, got {device}; leave it out on a CPU, "
                        "where there is no graph to capture"
                    )
            for member in members:
                member.allocate(settings=self._settings, capturable=True)
            plan = StepPlan(members, parts, capturable=True)
            plan.commit(state)  # zeros: valid whether or not the device updates
            if targets is None:
                plan.remember(state)
                self._cache.keep(groups, gradients, plan)
        if not plan.parts:
            return StepReport(skipped=False, grad_norm=math.nan, clip_factor=1.0, groups=len(groups))
        (part,) = plan.parts
        try:
            self._upload(groups, rows, part.table.device)
            return self._launch(plan, part, len(groups), grad_scale, found_inf)
        finally:
            plan.release()

    def _launch(
        self,
        plan: StepPlan,
        part: Part,
        groups: int,
        grad_scale: Tensor | float | None,
        found_inf: Tensor | float | None,
    ) -> CapturedReport:
        table, memory, settings = part.table, self._device_memory, self._settings
        kernels = storage.select(table.device)
        assert kernels.decide is not None  # checked when the plan was built
        workspace = self._cache.workspace(table.device)
        table.fields[storage.Field.COEFFICIENTS] = part.groups
        coefficients = self._coefficients.get(len(table))
        if coefficients is None:
            shape = (len(table), storage.COEFFICIENTS)
            coefficients = torch.empty(shape, dtype=torch.float32, device=table.device)
            self._coefficients[len(table)] = coefficients
        report = None
        inverse = None
        if self._guarded:
            workspace.run(table, 1.0)
            report = workspace.report
        elif found_inf is not None:
            report = workspace.report.zero_()
        if report is not None:
            if not settings.check_finite:
                # The check is off: NaN and infinity go where IEEE arithmetic sends them, with max_norm / infinity = 0.
                report[1:2] = torch.where(report[:1] > 0, torch.finfo(torch.float32).max, report[1:2])
                report[:1] = 0.0
            if grad_scale is not None:
                inverse = _on(table.device, grad_scale).reciprocal()
                report[1:2] *= inverse
                report[:1] = torch.maximum(report[:1], torch.isinf(report[1:2]).to(torch.float32))
                report[1:2] = torch.nan_to_num(report[1:2], posinf=0.0)  # a report holds finite magnitudes
            if found_inf is not None:
                report[:1] = torch.maximum(report[:1], (_on(table.device, found_inf) > 0).to(torch.float32))
        elif grad_scale is not None:
            inverse = _on(table.device, grad_scale).reciprocal()
        decision = memory["decision"]
        kernels.decide(table, memory["hyperparameters"], report, coefficients, decision)
        if inverse is not None:
            decision[1:2] *= inverse
        kernels.adamw_scaled(table, coefficients, 1.0, 1.0, decision=decision)
        memory["skips"] += decision[:1].to(torch.int64)
        for member in plan.empty:
            step = member.local("step")
            if step is not None:
                step += 1.0 - decision[0]
        torch.autograd.graph.increment_version(plan.parameters)
        ranges = part.group_rows(kernels.statistics_chunk)
        return CapturedReport(decision, report if self._guarded else None, workspace, inverse, ranges, groups)

    def _upload(self, groups: list[dict[str, Any]], rows: list[tuple[float, ...]], device: torch.device) -> None:
        """Bring the device's hyperparameters up to date: numbers when they change, tensors at every step."""
        memory = self._device_memory
        if "hyperparameters" not in memory or memory["hyperparameters"].shape[0] != len(rows):
            memory["hyperparameters"] = torch.zeros((len(rows), _HYPERPARAMETERS), dtype=torch.float64, device=device)
            memory.setdefault("decision", torch.zeros(2, dtype=torch.float32, device=device))
            memory.setdefault("skips", torch.zeros(1, dtype=torch.int64, device=device))
            self._host_rows = []
        if rows != self._host_rows:
            memory["hyperparameters"].copy_(torch.tensor(rows, dtype=torch.float64, device="cpu"))
            self._host_rows = rows
        for number, group in enumerate(groups):
            for column, value in enumerate(hyperparameters(group)):
                if isinstance(value, torch.Tensor):
                    memory["hyperparameters"][number, column : column + 1].copy_(value.detach().reshape(1))

    def _row(self, number: int, group: dict[str, Any]) -> tuple[float, ...]:
        """A group's row. A tensor's value is not looked at: it is copied on the device."""
        options = self._hyperparameters.read(number, group, look=False)
        max_norm = self._settings.clip_norm
        return (
            options.learning_rate,
            options.beta1,
            options.beta2,
            options.epsilon,
            options.weight_decay,
            -1.0 if options.maximize else 1.0,
            -1.0 if max_norm is None else max_norm,
            CLIP_EPSILON,
        )


def _on(device: torch.device, value: Tensor | float) -> Tensor:
    """A scale or flag as one FP32 number on the device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device=device, dtype=torch.float32).reshape(1)
    return torch.full((1,), float(value), dtype=torch.float32, device=device)
