"""What the callbacks share, without any framework: a schedule that waits, and the words about a skip."""

from __future__ import annotations

import pytest
import torch
from framework_runs import ours, regression, theirs

from ruda_torch.integrations import observed

SCHEDULES = torch.optim.lr_scheduler
MAKERS = {
    "lambda": lambda o: SCHEDULES.LambdaLR(o, lambda n: 1 / (1 + n)),
    "exponential": lambda o: SCHEDULES.ExponentialLR(o, 0.5),
    "one cycle, betas too": lambda o: SCHEDULES.OneCycleLR(o, 1e-2, total_steps=20, cycle_momentum=True),
    "warm restarts": lambda o: SCHEDULES.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: SCHEDULES.SequentialLR(
        o, [SCHEDULES.LinearLR(o, 0.1, 1.0, 3), SCHEDULES.ExponentialLR(o, 0.5)], [3]
    ),
    "chain": lambda o: SCHEDULES.ChainedScheduler([SCHEDULES.ExponentialLR(o, 0.5), SCHEDULES.StepLR(o, 2)]),
}


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [
        {name: float(value) if name == "lr" else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["float", "tensor"])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("at", range(6))
def test_a_held_step_leaves_no_trace_in_any_schedule(maker, lr, at) -> None:
    runs = []
    for hold in (False, True):
        optimizer = ours(regression(), lr=lr if isinstance(lr, float) else lr.clone())
        schedule = maker(optimizer)
        optimizer.step()  # without gradients; a schedule warns when it goes first
        for step in range(6):
            if hold and step == at:
                held = observed.HeldSchedules(optimizer, [schedule])
                schedule.step()
                held.restore()
            schedule.step()
        runs.append((schedule, optimizer))
    (straight, one), (held, other) = runs
    assert hyperparameters(one) == hyperparameters(other)
    assert straight.get_last_lr() == held.get_last_lr()
    for schedule, _ in runs:
        schedule.step()
    assert straight.get_last_lr() == held.get_last_lr()


def test_without_a_schedule_hyperparameters_are_left_alone() -> None:
    optimizer = ours(regression())
    held = observed.HeldSchedules(optimizer, [])
    optimizer.param_groups[0]["lr"] = 0.5
    held.restore()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_model_names_what_the_optimizer_has_no_names_for() -> None:
    model = regression()
    optimizer = ours(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.layers[2].weight.grad[0, 3] = torch.inf
    optimizer.step()
    assert observed.skip_message(optimizer, model, 7) == (
        "step 7 was skipped; gradients that are not finite: layers.2.weight"
    )


def test_a_skip_without_statistics_names_nobody() -> None:
    model = regression()
    optimizer = ours(model, check_finite=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)  # as GradScaler does
    optimizer.step()
    assert optimizer.last_step_skipped
    assert observed.skip_message(optimizer, model, 7).endswith("not finite: none in this process")


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_is_found_under_its_wrappers_or_refused() -> None:
    model = regression()
    own = ours(model)
    assert observed.unwrapped(Wrapper(Wrapper(own))) is own
    with pytest.raises(TypeError, match=r"got torch\.optim\.adamw\.AdamW; build"):
        observed.unwrapped(Wrapper(theirs(model)))
    with pytest.raises(TypeError, match=r"got ruda_torch\.adamw\.AdamW with fused_step=False"):
        observed.unwrapped(ours(model, fused_step=False))
