"""Checkpoints of other optimizers: the converted state continues their run.

The peers run where they are installed (benchmarks/requirements.txt); states in their documented form are tested always.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import ruda_torch
from ruda_optim.fused_adamw import InvalidState
from ruda_torch import migration

HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
U = 2.0**-24


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7,), (3, 5))]


def step_with(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def torch_run(steps: int) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    params = parameters()
    optimizer = torch.optim.AdamW(params, **HYPER)
    for seed in range(steps):
        step_with(optimizer, params, seed)
    return params, optimizer


def documented_state(source: str) -> tuple[list[torch.nn.Parameter], dict]:
    """A run of three steps, its state written in the peer's own form."""
    params, optimizer = torch_run(3)
    saved = optimizer.state_dict()
    state = {key: {name: entry[name] for name in ("exp_avg", "exp_avg_sq")} for key, entry in saved["state"].items()}
    group = {name: HYPER[name] for name in ("lr", "eps", "weight_decay")} | {"params": [0, 1], "initial_lr": 0.5}
    if source == "apex":
        group |= {"betas": HYPER["betas"], "bias_correction": True, "step": 3}
    elif source == "deepspeed":
        group |= {"betas": HYPER["betas"], "bias_correction": True, "amsgrad": False}
        state = {key: {"step": 3, **entry} for key, entry in state.items()}
    elif source == "bitsandbytes":
        group |= {"betas": HYPER["betas"], "alpha": 0.0, "t_alpha": None, "t_beta3": None}
        state = {
            key: {"step": 3, "__bnb_optimizer_quant_state__": {"state1": e["exp_avg"], "state2": e["exp_avg_sq"]}}
            for key, e in state.items()
        }
    else:
        group |= {"beta1": 0.9, "beta2": 0.99, "decouple_wd": True, "decouple_lr": False, "max_lr": None}
        group |= {"kahan_sum": None, "triton": False, "gradient_release": False, "setup": True}
        group |= {"foreach": True, "step": torch.tensor(3, dtype=torch.int32)}
        state = {
            key: {
                "exp_avg": e["exp_avg"] / (1 - 0.9**3),
                "exp_avg_sq": e["exp_avg_sq"] / (1 - 0.99**3),
                "kahan_comp": None,
            }
            for key, e in state.items()
        }
    return params, {"state": state, "param_groups": [group]}


SOURCES = {
    "apex": migration.from_apex,
    "deepspeed": migration.from_deepspeed,
    "bitsandbytes": migration.from_bitsandbytes,
    "optimi": migration.from_optimi,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", ["torch", "ruda"])
def test_converted_state_is_that_of_the_run(source: str, target: str) -> None:
    params, saved = documented_state(source)
    converted = SOURCES[source](saved)
    make = torch.optim.AdamW if target == "torch" else ruda_torch.AdamW
    own = {} if target == "torch" else {"fused_step": True}
    loaded = make([torch.nn.Parameter(p.detach().clone()) for p in params], **own)
    loaded.load_state_dict(converted)
    _, expected = torch_run(3)
    assert loaded.param_groups[0]["initial_lr"] == 0.5
    for name, value in HYPER.items():
        assert loaded.param_groups[0][name] == value
    # A round trip through optimi's form is a division and a multiplication: two roundings of the value.
    tolerance = 2 * 2 * U if source == "optimi" else 0.0
    mine, theirs = loaded.state_dict()["state"], expected.state_dict()["state"]
    for key, entry in theirs.items():
        assert mine[key]["step"] == 3.0
        assert mine[key]["step"].dtype is torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[key][name], entry[name], rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("source", SOURCES)
def test_input_is_not_changed(source: str) -> None:
    _, saved = documented_state(source)
    _, again = documented_state(source)
    SOURCES[source](saved)
    assert str(saved) == str(again)


def test_optimi_decoupled_learning_rate() -> None:
    _, saved = documented_state("optimi")
    saved["param_groups"][0].update(decouple_lr=True, max_lr=1e-2, weight_decay=1e-4)
    assert migration.from_optimi(saved)["param_groups"][0]["weight_decay"] == pytest.approx(1e-2, rel=1e-15)


def with_change(source: str, change: dict, entry: dict | None = None) -> dict:
    _, saved = documented_state(source)
    saved["param_groups"][0].update(change)
    if entry is not None:
        saved["state"][0] = entry
    return saved


QUANTIZED = {"step": 1, "state1": torch.zeros(7, dtype=torch.uint8), "state2": torch.zeros(7, dtype=torch.uint8)}
CHANNELS_LAST = {"step": 1, "state1": torch.zeros(5, 3).t(), "state2": torch.zeros(5, 3).t()}
TWO_FIRST = {"step": 1, "state1": torch.zeros(2, 7), "state2": torch.zeros(7)}
REFUSED = [
    ("apex", with_change("apex", {"bias_correction": False}), "bias_correction=False"),
    ("apex", with_change("apex", {"step": None}), "has no step"),
    ("apex", with_change("apex", {"betas": 0.9}), "two betas"),
    ("deepspeed", with_change("deepspeed", {"amsgrad": True}), "keeps no maximum"),
    ("deepspeed", with_change("deepspeed", {}, {"step": 1, "momentum": 0}), "has no exp_avg, only step, momentum"),
    ("deepspeed", with_change("deepspeed", {"params": [0]}), "parameters of no group"),
    ("bitsandbytes", with_change("bitsandbytes", {}, QUANTIZED), "has no qmap1, absmax1"),
    ("bitsandbytes", with_change("bitsandbytes", {}, TWO_FIRST), "one first and one second moment"),
    ("bitsandbytes", with_change("bitsandbytes", {}, CHANNELS_LAST), "must be contiguous, got strides"),
    ("optimi", with_change("optimi", {"decouple_wd": False}), "adds weight decay"),
    ("optimi", torch_run(1)[1].state_dict(), "has no beta1"),
]


@pytest.mark.parametrize(("source", "saved", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_other_states_are_refused(source: str, saved: dict, message: str) -> None:
    with pytest.raises(InvalidState, match=message):
        SOURCES[source](saved)


# A peer is imported in a process of its own: some of them start compilers, threads and warnings when imported.
CONTINUE = """
import sys, torch
sys.path.insert(0, {tests!r})
import ruda_torch
from ruda_torch import migration
from test_migration import HYPER, parameters, step_with

{imports}
params = parameters()
peer = {make}
for seed in range(3):
    step_with(peer, params, seed)
mine = [torch.nn.Parameter(p.detach().clone()) for p in params]
ours = ruda_torch.AdamW(mine, fused_step=True)
ours.load_state_dict(migration.from_{source}(peer.state_dict()))
assert ours.param_groups[0]["weight_decay"] == HYPER["weight_decay"]
step_with(peer, params, 3)
step_with(ours, mine, 3)
# One step from the same state. A peer forms 1 - beta and 1 - beta^t in FP32 and errs there by up to 4 u / (1 - beta)
# relative: 400 u for the second moment, half of that after the root; 40 u for the first. The division by 1 - beta^t and
# some ten roundings add less than 30 u. Relative to the update, at most about lr; the parameter itself rounds twice.
u = 2.0**-24
for a, b in zip(mine, params):
    update = 1e-2 * 1.5 + 1e-2 * 0.1 * b.abs()
    assert torch.all((a - b).abs() <= 300 * u * update + 2 * u * b.abs()), (a - b).abs().max()
"""

PEERS = {
    "deepspeed": (
        "from deepspeed.ops.adam import DeepSpeedCPUAdam",
        "DeepSpeedCPUAdam(params, **HYPER, adamw_mode=True)",
    ),
    "bitsandbytes": ("import bitsandbytes", "bitsandbytes.optim.AdamW32bit(params, **HYPER)"),
    "optimi": ("import optimi", "optimi.AdamW(params, **HYPER)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", PEERS)
def test_continues_the_real_peer(source: str) -> None:
    if importlib.util.find_spec(source) is None:
        pytest.skip(f"{source} is not installed (see benchmarks/requirements.txt)")
    imports, make = PEERS[source]
    code = CONTINUE.format(tests=str(pathlib.Path(__file__).parent), imports=imports, make=make, source=source)
    path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")))
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
