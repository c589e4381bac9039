"""A callback for the Hugging Face Trainer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from . import observed

if TYPE_CHECKING:
    from collections.abc import Callable

_LOGGER = logging.getLogger(__name__)


class RudaCallback(TrainerCallback):
    """Logs gradient norm, clip factor and skipped steps; on a skip, names the parameters and holds the schedule.

        trainer.add_callback(RudaCallback(trainer.log))

    Reads what a step did after each step, which waits for an accelerator.

    Args:
        log: receives the numbers with every record of the training loss: ``trainer.log``, so that the trainer's history
            and everything it reports to have them.
    """

    def __init__(self, log: Callable[[dict[str, float]], Any]) -> None:
        self._log = log
        self._held: observed.HeldSchedules | None = None

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any
    ) -> None:
        """After the step, before the trainer advances the schedule."""
        own = observed.unwrapped(optimizer)
        if own.last_step_skipped:
            _LOGGER.warning(observed.skip_message(own, model, state.global_step + 1))
            self._held = observed.HeldSchedules(own, [lr_scheduler])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the trainer advanced the schedule."""
        if self._held is not None:
            self._held.restore()
            self._held = None

    def on_log(self, args: Any, state: Any, control: Any, *, optimizer: Any, logs: Any, **_: Any) -> None:
        """With each record of the training loss. The record that this makes has no loss, so it makes no other."""
        if logs and "loss" in logs:
            self._log(observed.numbers(observed.unwrapped(optimizer)))
