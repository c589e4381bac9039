"""Proximal policy optimization of stable-baselines3 on CartPole, whole trainings, with our step and with torch's.

    make test-integrations PYTEST_ARGS=--collect-only    # installs stable-baselines3
    .venv/bin/python benchmarks/reinforcement.py         # five minutes on an idle machine

What is timed is all of ``learn()``: environment, rollouts, and the updates, of which the optimizer is a part.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback

import ruda_torch
import whole_runs

if TYPE_CHECKING:
    import pathlib

MAX_NORM = 0.5  # PPO's own default
ADAM = {"eps": 1e-5, "weight_decay": 0.0}  # PPO's own default is Adam, which is AdamW without decay
OURS = {**ADAM, "fused_step": True}
LAST = 3  # rollouts


class Phases(BaseCallback):
    """Processor seconds in rollouts, and the mean return of the episodes that ended in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts = 0.0
        self.curve: list[float] = []

    def _on_rollout_start(self) -> None:
        self._start = time.process_time()
        self._returns: list[float] = []

    def _on_step(self) -> bool:
        self._returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        self.rollouts += time.process_time() - self._start
        self.curve.append(sum(self._returns) / max(1, len(self._returns)))


class ClippingInTheStep(stable_baselines3.PPO):
    """PPO without its own clip: PPO has no option to leave it out."""

    def train(self) -> None:
        with mock.patch("torch.nn.utils.clip_grad_norm_", new=no_clip):
            super().train()


def no_clip(parameters: object, max_norm: float) -> None:
    """In place of torch's function, which reads all gradients and writes them."""


def train(make: type, optimizer: type, settings: dict[str, Any], seed: int, steps: int) -> dict[str, Any]:
    policy = {"optimizer_class": optimizer, "optimizer_kwargs": settings}
    model = make("MlpPolicy", "CartPole-v1", seed=seed, device="cpu", max_grad_norm=MAX_NORM, policy_kwargs=policy)
    phases = Phases()
    start = time.process_time()
    model.learn(steps, callback=phases)
    seconds = time.process_time() - start
    return {
        "quality": sum(phases.curve[-LAST:]) / len(phases.curve[-LAST:]),
        "mean returns": [round(value, 2) for value in phases.curve],
        "rollouts": phases.rollouts,
        "updates": seconds - phases.rollouts,
    }


CONTESTANTS = {
    "torch.optim.AdamW": partial(train, stable_baselines3.PPO, torch.optim.AdamW, ADAM),
    "torch.optim.AdamW(fused=True)": partial(train, stable_baselines3.PPO, torch.optim.AdamW, {**ADAM, "fused": True}),
    "ruda_torch.AdamW, PPO clips": partial(train, stable_baselines3.PPO, ruda_torch.AdamW, OURS),
    "ruda_torch.AdamW, the step clips": partial(
        train, ClippingInTheStep, ruda_torch.AdamW, {**OURS, "max_grad_norm": MAX_NORM}
    ),
}

COLOURS = dict(zip(CONTESTANTS, ("#d1495b", "#e0a458", "#7fb7cf", "#0b6e99"), strict=True))


def draw(results: pathlib.Path) -> None:
    """The learning curves of every training, beside the file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for training in json.loads(results.read_text(encoding="utf-8"))["trainings"]:
        name, curve = training["optimizer"], training["mean returns"]
        label = name if training["seed"] == 0 else None
        axes.plot(range(1, len(curve) + 1), curve, color=COLOURS[name], linewidth=1.8, alpha=0.85, label=label)
    axes.set_xlabel("rollout (2,048 steps of the environment)")
    axes.set_ylabel("mean return of its episodes")
    axes.set_title("CartPole-v1, PPO: one line per seed", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(results.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    written = whole_runs.main(
        "reinforcement",
        what="PPO of stable-baselines3 on CartPole-v1, whole trainings on one thread",
        quality=f"mean return of the last {LAST} rollouts",
        contestants=CONTESTANTS,
        steps=20_480,
    )
    draw(written)
