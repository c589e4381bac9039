"""Step counters where no kernel counts: parameters without elements, and steps that were not taken after all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ruda_optim.fused_adamw.binding import EMPTY

from . import sharding

if TYPE_CHECKING:
    from ruda_optim.fused_adamw.binding import Plan

    from .outcome import Outcome
    from .plan import NewPlan
    from .step_inputs import StepInputs


def take_back(plan: Plan, inputs: StepInputs, new: NewPlan | None) -> None:
    """Undo the counting of a step that was decided on the CPU and could not be launched."""
    parameters = [parameter for group in inputs.groups for parameter in group["params"]]
    fresh = set() if new is None else new.new_counters
    for column in plan.active()[0]:
        position = plan.positions[column]
        if position not in fresh:
            sharding.local(inputs.state[parameters[position]]["step"]).sub_(1.0)


def count_empty(outcome: Outcome, inputs: StepInputs) -> None:
    """Count the step of the parameters without elements, which no kernel sees."""
    plan = outcome.plan
    skip = outcome.memory.decision[0]
    parameters = [parameter for group in inputs.groups for parameter in group["params"]]
    with torch.no_grad():
        for position in plan.active()[1]:
            if plan.columns[position] == EMPTY:
                step = sharding.local(inputs.state[parameters[position]]["step"])
                step.add_(1.0).sub_(skip if skip.device == step.device else skip.to(step.device))
