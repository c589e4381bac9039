"""Whole trainings side by side: each seed once with every optimizer, in an order that rotates, into one JSON file.

Beside the time on the clock stands the processor time, which other processes disturb much less: a training runs on one
thread, so on an idle machine the two are the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Training = Callable[[int, int], dict[str, Any]]
    """Trains with a seed for a number of steps; returns what came out, a number called ``quality`` among it."""

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def main(
    script: str,
    what: str,
    quality: str,
    contestants: dict[str, Training],
    steps: int,
    arguments: Sequence[str] | None = None,
) -> pathlib.Path:
    """Run everything, print a line for each training, write ``results/<script>.json``; returns that path.

    Args:
        script: file name without suffix.
        what: the case, for ``--help`` and the file.
        quality: what the number of that name is.
        contestants: name and training; the last one is ours, which the others are compared with.
        steps: the default of ``--steps``.
        arguments: the command line, by default the process's own.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--seeds", type=int, default=3, help="trainings per optimizer (default 3)")
    parser.add_argument("--steps", type=int, default=steps, help=f"of each training (default {steps:,})")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / f"{script}.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # models this small lose time to a second thread, whoever steps
    found: dict[str, Any] = {
        "environment": environment.describe(
            torch.device("cpu"), environment.command_line(pathlib.Path(sys.argv[0]).name)
        ),
        "what": what,
        "quality": quality,
        "steps": args.steps,
        "ours": list(contestants)[-1],
        "trainings": [],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for training in run(contestants, args.seeds, args.steps):
        found["trainings"].append(training)
        # After every training: what was measured stays, whatever happens to the rest.
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written: {args.output}")
    return args.output


def run(contestants: dict[str, Training], seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """The trainings, one after the other; one short training of each goes before and does not count."""
    for train in contestants.values():
        train(0, max(1, steps // 20))
    names = list(contestants)
    for seed in range(seeds):
        shift = seed % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            load = environment.ForeignLoad()
            wall, processor = time.perf_counter(), time.process_time()
            found = contestants[name](seed, steps)
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            print(f"seed {seed}  {name:<42} {processor:7.2f} s  quality {found['quality']:.4g}", flush=True)
            yield {
                "optimizer": name,
                "seed": seed,
                "seconds": wall,
                "processor seconds": processor,
                "foreign load": load.read(),
                **found,
            }
