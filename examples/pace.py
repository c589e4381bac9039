"""How many steps of the demo fit into the time that it promises, on this machine, measured."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from training import Run

if TYPE_CHECKING:
    from demo_text import Text
    from training import Configuration

MOST, FEWEST = 600, 20
"""Steps of each run. With fewer than the least of them the picture shows nothing."""
OTHER_SECONDS = 8.0
"""Measuring, checkpoints, the picture and the text that the model writes."""


def evaluations(steps: int) -> int:
    """How often a run of so many steps looks at the validation text, which takes as long as several of them."""
    return max(2, min(10, steps // 60))


def timing_steps(steps: int) -> int:
    """Steps of the third, short run, which only times ``torch.optim.AdamW(fused=True)``."""
    return min(40, max(1, steps // 4))


class Pace(NamedTuple):
    """Measured seconds of one training step and of one pass over the validation text."""

    step: float
    validation: float

    def seconds(self, steps: int, *, compare: bool) -> float:
        """What the whole demo takes."""
        one = steps * self.step + evaluations(steps) * self.validation
        return OTHER_SECONDS + (2 * one + timing_steps(steps) * self.step if compare else one)

    def steps(self, seconds: float, *, compare: bool) -> int:
        """As many as fit, in tens, between the fewest and the most."""
        fitting = (steps for steps in range(MOST, FEWEST, -10) if self.seconds(steps, compare=compare) <= seconds)
        return next(fitting, FEWEST)


def measure(config: Configuration, text: Text) -> Pace:
    """Train a few steps that do not count."""
    run = Run(replace(config, steps=MOST), text, "torch")
    times = []
    for _ in range(8):
        before = time.perf_counter()
        run.train_step()
        times.append(time.perf_counter() - before)
    before = time.perf_counter()
    run.validation_loss()
    return Pace(statistics.median(times[2:]), time.perf_counter() - before)  # the first ones allocate
