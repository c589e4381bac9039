"""Error against FP64 over many steps: torch's optimizers and ours, as JSON and a picture.

All start from the same FP32 parameters and see the same FP32 gradients; the yardstick is the FP64 reference. The errors
are those of the optimizers' arithmetic alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import environment
from contestants import HYPERPARAMETERS, PEERS
from ruda_optim.fused_adamw import AdamWOptions, reference
from workloads import VARIANTS

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CONTESTANTS = ("torch-fused", "torch-foreach", "ours")


def recorded_steps(last: int) -> list[int]:
    """Step numbers spread evenly on a logarithmic axis."""
    return sorted({round(x) for x in np.geomspace(1, last, 40)})


def run(elements: int, steps: int, seed: int, *, amsgrad: bool = False) -> dict[str, list[dict[str, float]]]:
    """Per optimizer and recorded step: errors of parameters, updates and second moments.

    Gradients are normal; each element has a typical size of its own between 1e-4 and 1. ``parameter``: RMS of
    (p - p64) / RMS of p64. ``update``: RMS of (p - p64) / RMS of (p64 - p64 at the start). ``second moment``: RMS of
    (v - v64) / RMS of v64.
    """
    random = np.random.default_rng(seed)
    start = (0.02 * random.standard_normal(elements)).astype(np.float32)
    size = 10.0 ** random.uniform(-4, 0, elements)
    variant = VARIANTS["amsgrad" if amsgrad else "plain"]
    parameters, optimizers = {}, {}
    for name in CONTESTANTS:
        parameters[name] = torch.nn.Parameter(torch.from_numpy(start.copy()))
        optimizers[name] = PEERS[name].make([parameters[name]], variant)
    beta1, beta2 = HYPERPARAMETERS["betas"]
    options = AdamWOptions(
        HYPERPARAMETERS["lr"], beta1, beta2, HYPERPARAMETERS["eps"], HYPERPARAMETERS["weight_decay"], amsgrad
    )
    exact, state = start.astype(np.float64), None
    wanted = set(recorded_steps(steps))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for step in track(range(1, steps + 1), description=f"seed {seed}", transient=True):
        gradient = (size * random.standard_normal(elements)).astype(np.float32)
        exact, state = reference.adamw(exact, gradient, state, options)
        for name, optimizer in optimizers.items():
            parameters[name].grad = torch.from_numpy(gradient)
            optimizer.step()
            if step in wanted:
                p = parameters[name].detach().numpy()
                v = optimizer.state[parameters[name]]["exp_avg_sq"].numpy()
                error = rms(p - exact)
                found[name].append(
                    {
                        "step": step,
                        "parameter": error / rms(exact),
                        "update": error / rms(exact - start),
                        "second moment": rms(v - state.second_moment) / rms(state.second_moment),
                    }
                )
    return found


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, quantity in zip(axes, ("update", "second moment"), strict=True):
        for name, colour in zip(CONTESTANTS, ("tab:blue", "tab:orange", "black"), strict=True):
            for number, seed in enumerate(found["seeds"].values()):
                points = seed[name]
                axis.loglog(
                    [point["step"] for point in points],
                    [point[quantity] for point in points],
                    color=colour,
                    label=PEERS[name].title if number == 0 else None,
                )
        axis.set_xlabel("step")
        axis.set_title(f"RMS error of the {quantity} against FP64, relative")
        axis.grid(linewidth=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=100_003)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--amsgrad", action="store_true")
    parser.add_argument("--name", default="accuracy")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    found = {
        "format": 1,
        "what": "RMS errors against the FP64 reference, relative; see benchmarks/accuracy.py",
        "environment": environment.describe(torch.device("cpu"), environment.command_line("accuracy.py")),
        "elements": arguments.elements,
        "seeds": {
            seed: run(arguments.elements, arguments.steps, seed, amsgrad=arguments.amsgrad)
            for seed in range(arguments.seeds)
        },
    }
    shown = Table(title=f"RMS error after {arguments.steps} steps, worst of {arguments.seeds} seeds")
    for column in ("optimizer", "parameter", "update", "second moment"):
        shown.add_column(column)
    for name in CONTESTANTS:
        last = [seed[name][-1] for seed in found["seeds"].values()]
        shown.add_row(
            PEERS[name].title, *(f"{max(e[key] for e in last):.2e}" for key in ("parameter", "update", "second moment"))
        )
    Console().print(shown)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{arguments.name}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
