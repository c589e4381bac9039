"""stable-baselines3: PPO with ``policy_kwargs`` alone changed, one clip, its learning-rate schedule, saving."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from framework_runs import assert_same_bits, distance

import ruda_torch

baselines = pytest.importorskip(
    "stable_baselines3", reason="stable-baselines3 is not installed (make test-integrations)"
)
pytestmark = pytest.mark.integration

STEPS = 128
ADAM = {"eps": 1e-5, "weight_decay": 0.0}
OURS = {**ADAM, "fused_step": True}
TOLERANCE = 3e-6
"""Four updates at lr 3e-4 from the same rollout. A parameter, below 2, is rounded to 6e-8 by each side; the update, of
at most 2 lr = 6e-4, has a relative error of 1e-3 where m is a small difference of large gradients: 4 * 7e-7."""


def ppo(optimizer=ruda_torch.AdamW, settings=OURS, **arguments):
    return baselines.PPO(
        "MlpPolicy",
        "CartPole-v1",
        **{"seed": 3, "n_steps": STEPS, "batch_size": 64, "n_epochs": 2, "device": "cpu", **arguments},
        policy_kwargs={"optimizer_class": optimizer, "optimizer_kwargs": settings},
    )


def norms_of(model) -> list[float]:
    """Filled with what the optimizer reports after each step."""
    norms = []
    model.policy.optimizer.register_step_post_hook(lambda optimizer, *_: norms.append(optimizer.last_grad_norm))
    return norms


@pytest.fixture(scope="module")
def unclipped():
    return ppo(torch.optim.AdamW, ADAM, max_grad_norm=math.inf).learn(STEPS)


@pytest.fixture(scope="module")
def theirs():
    return ppo(torch.optim.AdamW, ADAM).learn(STEPS)


def test_policy_kwargs_alone(theirs, unclipped) -> None:
    model = ppo()
    norms = norms_of(model)
    model.learn(STEPS)
    assert distance(model.policy, theirs.policy) <= TOLERANCE
    assert distance(model.policy, unclipped.policy) > 10 * TOLERANCE
    assert len(norms) == 4
    assert max(norms) <= 0.5, "PPO clipped first: this is what the page says about last_grad_norm"


def test_an_infinite_limit_leaves_the_clip_to_the_step(theirs, unclipped) -> None:
    model = ppo(settings={**OURS, "max_grad_norm": 0.5}, max_grad_norm=math.inf)
    norms = norms_of(model)
    model.learn(STEPS)
    assert max(norms) > 0.5
    assert distance(model.policy, theirs.policy) <= TOLERANCE
    assert distance(model.policy, unclipped.policy) > 10 * TOLERANCE


def test_ppo_without_its_clip(theirs) -> None:
    """What the page shows for those who want the time of PPO's clip back."""

    class ClippingInTheStep(baselines.PPO):
        def train(self):
            with mock.patch("torch.nn.utils.clip_grad_norm_", new=lambda *_: None):  # noqa: PT008 - a mock keeps calls
                super().train()

    with mock.patch.object(baselines, "PPO", ClippingInTheStep):
        model = ppo(settings={**OURS, "max_grad_norm": 0.5})
    model.learn(STEPS)
    assert distance(model.policy, theirs.policy) <= TOLERANCE
    assert torch.nn.utils.clip_grad_norm_.__module__.startswith("torch."), "put back after train()"


def test_a_schedule_of_the_learning_rate_reaches_the_step() -> None:
    model = ppo(learning_rate=lambda remaining: 1e-3 * remaining)
    model.learn(2 * STEPS)
    assert model.policy.optimizer.param_groups[0]["lr"] == 0.0


def test_a_saved_agent_continues_bit_for_bit(tmp_path) -> None:
    model = ppo()
    model.learn(STEPS)
    model.save(tmp_path / "agent")
    loaded = baselines.PPO.load(tmp_path / "agent", env=model.get_env(), device="cpu")
    assert isinstance(loaded.policy.optimizer, ruda_torch.AdamW)
    assert loaded.policy.optimizer.fused_step
    for agent in (model, loaded):
        torch.manual_seed(0)
        for parameter in agent.policy.parameters():
            parameter.grad = torch.randn_like(parameter)
        agent.policy.optimizer.step()
    assert_same_bits(model.policy.optimizer, loaded.policy.optimizer)
