"""Accelerate: one clip, accumulation, schedules and skips, checkpoints; against torch's AdamW in the same loop."""

from __future__ import annotations

import pytest
import torch
from framework_runs import (
    MAX_NORM,
    STEPS,
    Watch,
    assert_close,
    assert_same_bits,
    loader,
    ours,
    regression,
    samples,
    theirs,
)

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (make test-integrations)")
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps one state per process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def run(make, clip=None, *, accumulate=1, data=None, hold=False):
    """Train with Accelerate. ``clip`` is Accelerate's; ``hold`` keeps the schedule on a skipped step."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = regression()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    batches = loader(data or samples(), batch_size=8 // accumulate)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    norms, told = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if clip is not None and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            if accelerator.sync_gradients:
                told.append(accelerator.optimizer_step_was_skipped)
            if not (hold and optimizer.optimizer.last_step_skipped):
                schedule.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model), optimizer, schedule, norms, told


@pytest.mark.parametrize("accumulate", [1, 4])
def test_our_clip_in_place_of_accelerates(accumulate) -> None:
    watches = []

    def make(model):
        optimizer = ours(model, max_grad_norm=MAX_NORM)
        watches.append(Watch(optimizer))
        return optimizer

    left, optimizer, schedule, _, told = run(make, accumulate=accumulate)
    right, _, theirs_schedule, norms, _ = run(theirs, MAX_NORM, accumulate=accumulate)
    unlike, *_ = run(theirs, accumulate=accumulate)
    watches[0].check_one_clip(norms)
    assert_close(left, right, unlike)
    assert len(watches[0].norms) == STEPS
    assert told == [False] * STEPS
    assert schedule.get_last_lr() == theirs_schedule.get_last_lr() == [pytest.approx(1e-3)]
    assert all(optimizer.state[p]["step"] == STEPS for p in left.parameters())


def test_accelerates_clip_without_ours() -> None:
    """The other way round works too: the optimizer then sees clipped gradients and does not clip."""
    watches = []

    def make(model):
        optimizer = ours(model)
        watches.append(Watch(optimizer))
        return optimizer

    left, *_ = run(make, MAX_NORM)
    right, *_ = run(theirs, MAX_NORM)
    unlike, *_ = run(theirs)
    assert_close(left, right, unlike)
    assert watches[0].factors == [1.0] * STEPS
    assert max(watches[0].reported) <= MAX_NORM  # what a second clip would see


@pytest.mark.parametrize("hold", [False, True])
def test_a_skip_holds_the_schedule_only_when_the_loop_looks(hold) -> None:
    data = samples(bad_batch=4)
    _, optimizer, schedule, _, told = run(ours, data=data, hold=hold)
    assert optimizer.optimizer.skipped_steps == 1
    assert told == [False] * STEPS, "Accelerate noticed the skip by itself: docs/frameworks.md says that it does not"
    assert schedule.scheduler.last_epoch == STEPS - hold


@pytest.mark.parametrize("scaler_class", ["torch", "ours"])
def test_accelerate_does_not_see_a_scalers_skip_either(scaler_class) -> None:
    """It looks whether the scaler called step(); an optimizer that unscales in its step is always called."""
    import ruda_torch

    accelerate.Accelerator(cpu=True)
    scaler = (torch.amp.GradScaler if scaler_class == "torch" else ruda_torch.GradScaler)("cpu", init_scale=8.0)
    model = regression()
    optimizer = ours(model)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    scaler.scale(model(torch.ones(2, 8), torch.tensor([1.0, torch.nan]))["loss"]).backward()
    wrapped.step()
    assert optimizer.last_step_skipped
    assert scaler.get_scale() == 4.0
    assert not wrapped.step_was_skipped


def test_save_state_and_load_state_continue_bit_for_bit(tmp_path) -> None:
    batches = list(loader(samples()))

    def prepared():
        accelerator = accelerate.Accelerator(cpu=True)
        model = regression(torch.bfloat16)
        optimizer = ours(model, max_grad_norm=MAX_NORM)
        return accelerator, *accelerator.prepare(model, optimizer)

    def train(model, optimizer, batches):
        for batch in batches:
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    accelerator, model, straight = prepared()
    train(model, straight, batches[:5])
    accelerator.save_state(tmp_path)
    train(model, straight, batches[5:])
    accelerator, model, resumed = prepared()
    accelerator.load_state(tmp_path)
    assert "master_remainder" in resumed.state[next(model.parameters())]
    train(model, resumed, batches[5:])
    assert_same_bits(straight.optimizer, resumed.optimizer)
