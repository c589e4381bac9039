"""Lightning: who clips, automatic and manual optimization, mixed precision, averaging, checkpoints."""

from __future__ import annotations

import csv

import pytest
import torch
from framework_runs import (
    MAX_NORM,
    STEPS,
    TOLERANCE,
    Watch,
    assert_close,
    assert_same_bits,
    distance,
    loader,
    ours,
    regression,
    samples,
    theirs,
)

import ruda_torch

lightning = pytest.importorskip("lightning", reason="lightning is not installed (make test-integrations)")
from ruda_torch.integrations.lightning import RudaCallback  # noqa: E402 - after the library that may be missing

pytestmark = [
    pytest.mark.integration,
    # Advice about this machine and about a loader of eight batches.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
]


class Module(lightning.LightningModule):
    def __init__(self, make, dtype=torch.float32):
        super().__init__()
        self.model = regression(dtype)
        self.make = make

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        self.made = self.make(self.model)
        self.watch = Watch(self.made) if hasattr(self.made, "last_grad_norm") else None
        return self.made


class Manual(Module):
    """Accumulates two micro-batches by hand."""

    automatic_optimization = False

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        self.manual_backward(self.model(**batch)["loss"] / 2)
        if number % 2:
            if not isinstance(self.made, type(ours(self.model))):
                self.clip_gradients(optimizer, MAX_NORM, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Scheduled(Module):
    def __init__(self, make, interval="step"):
        super().__init__(make)
        self.interval = interval

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class Held(Scheduled):
    """A skipped step does not advance the schedule; by hand, without the callback."""

    def lr_scheduler_step(self, scheduler, metric):
        if not scheduler.optimizer.last_step_skipped:
            super().lr_scheduler_step(scheduler, metric)


def trainer(folder, **settings):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return lightning.Trainer(**{**defaults, **settings})


def fit(folder, module, *, data=None, batch_size=8, **settings):
    used = trainer(folder, **settings)
    used.fit(module, loader(data or samples(), batch_size))
    return module


def clipping(model):
    return ours(model, max_grad_norm=MAX_NORM)


def test_our_clip_in_place_of_lightnings(tmp_path) -> None:
    left = fit(tmp_path, Module(clipping))
    right = fit(tmp_path, Module(theirs), gradient_clip_val=MAX_NORM)
    unlike = fit(tmp_path, Module(theirs))
    assert_close(left.model, right.model, unlike.model)
    assert len(left.watch.factors) == STEPS
    assert min(left.watch.factors) < 0.5
    # Nobody clipped before: the optimizer saw norms far above the limit, where Lightning's clip leaves none.
    assert max(left.watch.norms) > 2 * MAX_NORM
    assert left.watch.reported == pytest.approx(left.watch.norms, rel=1e-6)


def test_lightnings_clip_without_ours(tmp_path) -> None:
    """In full precision its clip works, inside the closure: statistics are taken after it."""
    left = fit(tmp_path, Module(ours), gradient_clip_val=MAX_NORM)
    right = fit(tmp_path, Module(theirs), gradient_clip_val=MAX_NORM)
    unlike = fit(tmp_path, Module(theirs))
    assert_close(left.model, right.model, unlike.model)
    assert left.watch.factors == [1.0] * STEPS
    assert max(left.watch.reported) <= MAX_NORM


BF16_TOLERANCE = 2e-4
"""Under bf16 autocast a parameter off by FP32 rounding may round to another BF16 number, 2^-8 away; that moves one of
8 or 16 summands of an output, so a gradient by at most 2^-8 / 8 = 5e-4 of itself, and an update by lr times that.
Twelve steps, growth by 3: 12 * 0.01 * 5e-4 * 3 = 1.8e-4."""


def test_bf16_mixed_needs_our_clip(tmp_path) -> None:
    left = fit(tmp_path, Module(clipping), precision="bf16-mixed")
    right = fit(tmp_path, Module(theirs), precision="bf16-mixed", gradient_clip_val=MAX_NORM)
    unlike = fit(tmp_path, Module(theirs), precision="bf16-mixed")
    assert left.model.layers[0].weight.dtype is torch.float32
    assert not {"master", "master_remainder"} & left.made.state[left.model.layers[0].weight].keys()
    assert_close(left.model, right.model, unlike.model, BF16_TOLERANCE)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(tmp_path, Module(ours), precision="bf16-mixed", gradient_clip_val=MAX_NORM)


@pytest.mark.filterwarnings("ignore::ruda_torch.report.SkippedStepsWarning")
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, ruda_torch.GradScaler], ids=["torch's", "ours"])
def test_fp16_loss_scaling(tmp_path, scaler_class) -> None:
    """Lightning turns 16-mixed into bf16-mixed on the CPU; its plugin itself works there, with any scaler."""

    def run(make, **settings):
        scaler = scaler_class("cpu", init_scale=2.0**18, growth_interval=4)
        plugin = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        module = fit(tmp_path, Module(make), plugins=[plugin], **settings)
        return module, scaler.get_scale()

    left, scale = run(clipping)
    right, other = run(theirs, gradient_clip_val=MAX_NORM)
    unlike, _ = run(theirs)
    assert 0 < left.made.skipped_steps < STEPS / 2, "some scales must overflow in FP16"
    assert scale == other
    assert_close(left.model, right.model, unlike.model, BF16_TOLERANCE / 8)  # FP16 has three bits more
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        run(ours, gradient_clip_val=MAX_NORM)


def test_bf16_true_trains_masters(tmp_path) -> None:
    """The same bits as a loop by hand: Lightning casts the module before it asks for optimizers."""
    module = fit(tmp_path, Module(clipping), precision="bf16-true")
    model = regression(torch.bfloat16)
    optimizer = clipping(model)
    for batch in loader(samples()):
        model(batch["inputs"].bfloat16(), batch["labels"].bfloat16())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all("master_remainder" in module.made.state[p] for p in module.model.parameters())
    assert_same_bits(module.made, optimizer)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_manual_optimization_with_accumulation(tmp_path, precision) -> None:
    left = fit(tmp_path, Manual(clipping), precision=precision, batch_size=4)
    right = fit(tmp_path, Manual(theirs), precision=precision, batch_size=4)
    unlike = fit(tmp_path, Module(theirs), precision=precision)
    assert len(left.watch.norms) == STEPS
    assert_close(left.model, right.model, unlike.model, TOLERANCE if precision == "32-true" else BF16_TOLERANCE)


def test_accumulate_grad_batches(tmp_path) -> None:
    left = fit(tmp_path, Module(clipping), batch_size=2, accumulate_grad_batches=4)
    right = fit(tmp_path, Module(theirs), batch_size=2, accumulate_grad_batches=4, gradient_clip_val=MAX_NORM)
    unlike = fit(tmp_path, Module(theirs), batch_size=2, accumulate_grad_batches=4)
    assert len(left.watch.norms) == STEPS
    assert_close(left.model, right.model, unlike.model)


@pytest.mark.parametrize("module_class", [Scheduled, Held])
def test_a_skip_and_the_schedule_without_the_callback(tmp_path, module_class) -> None:
    module = fit(tmp_path, module_class(ours), data=samples(bad_batch=4))
    assert module.made.skipped_steps == 1
    assert module.watch.skipped == [number == 4 for number in range(STEPS)]
    assert module.lr_schedulers().last_epoch == STEPS - (module_class is Held)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_callback_logs_names_and_holds_the_schedule(tmp_path, caplog, accumulate) -> None:
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    module = fit(
        tmp_path,
        Scheduled(clipping),
        data=samples(bad_batch=4),
        batch_size=8 // accumulate,
        accumulate_grad_batches=accumulate,
        callbacks=[RudaCallback()],
        logger=logger,
        log_every_n_steps=1,
    )
    assert module.lr_schedulers().last_epoch == STEPS - 1
    assert module.made.param_groups[0]["lr"] == module.lr_schedulers().get_last_lr()[0]
    with open(f"{logger.log_dir}/metrics.csv", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["optimizer/grad_norm"]) for row in rows] == pytest.approx(module.watch.reported)
    assert [float(row["optimizer/clip_factor"]) for row in rows] == pytest.approx(module.watch.factors)
    assert [float(row["optimizer/skipped_steps"]) for row in rows] == [0.0] * 4 + [1.0] * 8
    (record,) = (record for record in caplog.records if record.name == "ruda_torch.integrations.lightning")
    assert record.getMessage() == (
        "step 5 was skipped; gradients that are not finite: model.layers.0.weight, model.layers.0.bias, "
        "model.layers.2.weight, model.layers.2.bias"
    )
    assert len(module.made._optimizer_step_post_hooks) == 1, "the watch's own; the callback took its hook back"


def test_the_callback_leaves_a_schedule_by_epochs_alone(tmp_path) -> None:
    """The last step of an epoch is skipped: the epoch has ended all the same."""
    module = Scheduled(clipping, interval="epoch")
    fit(tmp_path, module, data=samples(bad_batch=STEPS - 1), callbacks=[RudaCallback()])
    assert module.made.last_step_skipped
    assert module.lr_schedulers().last_epoch == 1


def test_the_callback_refuses_another_optimizer(tmp_path) -> None:
    with pytest.raises(TypeError, match=r"needs ruda_torch.AdamW with fused_step=True .* got torch.optim.adamw.AdamW"):
        fit(tmp_path, Module(theirs), callbacks=[RudaCallback()])


def test_settings_are_read_and_assigned_through_the_wrapper(tmp_path) -> None:
    """``self.optimizers()`` is a wrapper."""
    module = fit(tmp_path, Module(clipping))
    wrapper = module.optimizers()
    assert wrapper.last_grad_norm == module.made.last_grad_norm
    assert wrapper.state is module.made.state
    wrapper.max_grad_norm = 5.0
    assert module.made.max_grad_norm == 5.0


def test_a_checkpoint_continues_bit_for_bit(tmp_path) -> None:
    straight = fit(tmp_path, Module(clipping), max_epochs=2, precision="bf16-true")
    first, resumed = Module(clipping), Module(clipping)
    used = trainer(tmp_path, max_epochs=1, precision="bf16-true")
    used.fit(first, loader(samples()))
    used.save_checkpoint(tmp_path / "half.ckpt")
    used = trainer(tmp_path, max_epochs=2, precision="bf16-true")
    used.fit(resumed, loader(samples()), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert resumed.made.state[resumed.model.layers[0].weight]["step"] == 2 * STEPS
    assert_same_bits(straight.made, resumed.made)


def test_moving_average(tmp_path) -> None:
    """Lightning's callback keeps the average, and leaves it in the model at the end."""

    def averaged(make, **settings):
        callback = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.9)
        return fit(tmp_path, Module(make), callbacks=[callback], **settings).model

    left, right = averaged(clipping), averaged(theirs, gradient_clip_val=MAX_NORM)
    assert_close(left, right, averaged(theirs))
    assert distance(left, fit(tmp_path, Module(clipping)).model) > 100 * TOLERANCE
