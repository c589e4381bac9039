"""A callback for Lightning's Trainer."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from . import observed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_LOGGER = logging.getLogger(__name__)


class RudaCallback(Callback):
    """Logs gradient norm, clip factor and skipped steps; on a skip, names the parameters and holds the schedule.

        lightning.Trainer(callbacks=[RudaCallback()])

    In automatic optimization. In manual optimization the module advances its schedules itself: it looks at
    ``last_step_skipped``, and this callback only logs. Reads what a step did after each step, which waits for an
    accelerator.
    """

    def __init__(self) -> None:
        self._held: observed.HeldSchedules | None = None
        self._logs: dict[str, float] = {}
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the optimizers: Lightning has no hook between the step and the schedule."""
        for position, optimizer in enumerate(trainer.optimizers):
            suffix = f"/{position}" if len(trainer.optimizers) > 1 else ""
            after = partial(self._after_step, trainer, pl_module, suffix)
            self._hooks.append(observed.unwrapped(optimizer).register_step_post_hook(after))

    def _after_step(self, trainer: Trainer, pl_module: LightningModule, suffix: str, optimizer: Any, *_: Any) -> None:
        self._logs.update({name + suffix: value for name, value in observed.numbers(optimizer).items()})
        if optimizer.last_step_skipped:
            _LOGGER.warning(observed.skip_message(optimizer, pl_module, trainer.global_step + 1))
            if pl_module.automatic_optimization:
                every_step = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
                self._held = observed.HeldSchedules(optimizer, every_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After Lightning advanced the schedules."""
        if self._held is not None:
            self._held.restore()
            self._held = None
        if self._logs:  # a batch that only accumulates makes no step
            pl_module.log_dict(self._logs)
            self._logs = {}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Training ended, whether or not by an error."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
