"""A physics-informed network: a damped oscillator from its equation alone, with our step and with torch's.

    .venv/bin/python benchmarks/scientific.py    # three minutes on an idle machine

The network (2,241 parameters, 8 tensors) is the solution: it is trained on the residual of u'' + 2 d u' + w^2 u = 0 at
fixed times and on u(0) = 1, u'(0) = 0. Its quality is the RMS error against the exact solution.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ruda_torch
import whole_runs

DAMPING, FREQUENCY = 1.5, 12.0
MAX_NORM = 1.0
SETTINGS = {"lr": 3e-3, "weight_decay": 0.0}
WIDTH, POINTS = 32, 64


def exact(time: Tensor) -> Tensor:
    frequency = math.sqrt(FREQUENCY**2 - DAMPING**2)
    return torch.exp(-DAMPING * time) * (
        torch.cos(frequency * time) + DAMPING / frequency * torch.sin(frequency * time)
    )


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (1, WIDTH, WIDTH):
        layers += [nn.Linear(inputs, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module, time: Tensor) -> Tensor:
    u = model(time)
    (first,) = torch.autograd.grad(u.sum(), time, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), time, create_graph=True)
    residual = (second + 2 * DAMPING * first + FREQUENCY**2 * u) / FREQUENCY**2
    return residual.square().mean() + (u[0] - 1).square().sum() + (first[0] / FREQUENCY).square().sum()


def train(optimizer: type, settings: dict[str, Any], clip: bool, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = network()
    made = optimizer(model.parameters(), **SETTINGS, **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)
    time = torch.linspace(0, 1, POINTS).unsqueeze(1).requires_grad_()
    parameters = list(model.parameters())
    for _ in range(steps):
        made.zero_grad()
        loss = loss_of(model, time)
        loss.backward(inputs=parameters)
        if clip:
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        made.step()
        schedule.step()
    with torch.no_grad():
        error = (model(time) - exact(time)).square().mean().sqrt()
    return {"quality": float(error), "loss": float(loss.detach())}


CONTESTANTS = {
    "torch.optim.AdamW": partial(train, torch.optim.AdamW, {}, True),
    "torch.optim.AdamW(fused=True)": partial(train, torch.optim.AdamW, {"fused": True}, True),
    "ruda_torch.AdamW": partial(train, ruda_torch.AdamW, {"fused_step": True, "max_grad_norm": MAX_NORM}, False),
}

if __name__ == "__main__":
    whole_runs.main(
        "scientific",
        what="a physics-informed network of 2,241 parameters, gradients clipped, whole trainings on one thread",
        quality="RMS error against the exact solution",
        contestants=CONTESTANTS,
        steps=6_000,
    )
