"""Proximal policy optimization of stable-baselines3 on CartPole, whole trainings, with our step and with torch's.

    make test-integrations PYTEST_ARGS=--collect-only    # installs stable-baselines3
    .venv/bin/python benchmarks/reinforcement.py         # five minutes on an idle machine

What is timed is all of ``learn()``: environment, rollouts, and the updates, of which the optimizer is a part.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import stable_baselines3
import torch
from stable_baselines3.common.callbacks import BaseCallback

import ruda_torch
import whole_runs

MAX_NORM = 0.5  # PPO's own default
ADAM = {"eps": 1e-5, "weight_decay": 0.0}  # PPO's own default is Adam, which is AdamW without decay
OURS = {**ADAM, "fused_step": True}


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
        "quality": phases.curve[-1],
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

if __name__ == "__main__":
    whole_runs.main(
        "reinforcement",
        what="PPO of stable-baselines3 on CartPole-v1, whole trainings on one thread",
        quality="mean return of the episodes that ended in the last rollout",
        contestants=CONTESTANTS,
        steps=20_480,
    )
