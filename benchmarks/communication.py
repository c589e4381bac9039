"""What the one sum over ranks costs a step: measured with 1, 2 and 4 processes over gloo, and a model for more.

Every process holds the same number of elements, so that without communication all columns would be equal. Each round
times one step of every kind, all ranks starting from a barrier; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import environment
import ruda_torch
from ruda_torch import ranks as shared

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((256, 256),) * 15 + ((1024, 1024),) + ((256,),) * 16
"""One rank's part: 2.0 million elements in 32 tensors."""
KINDS = {
    "update": "sharded parameters, no statistics",
    "local": "plain tensors of the same size, statistics of this process alone",
    "global": "sharded parameters, statistics and the sum over ranks",
    "sum": "the sum over ranks by itself",
}


def message_bytes(groups: int) -> int:
    """Bytes of the sum: FP64 squares and bad rows per parameter group, and five numbers that check the step."""
    return 8 * (5 + 2 * groups)


def modelled_seconds(
    ranks: int, hop_seconds: float, *, algorithm: str, groups: int = 2, bandwidth: float = 1e9
) -> float:
    """A model, not a measurement, of one small all_reduce.

    Args:
        ranks: W.
        hop_seconds: time for a message of a few bytes to get from one rank to another.
        algorithm: ``"tree"``: up and down a binary tree, 2 ceil(log2 W) hops, as NCCL does for small messages between
            nodes; ``"ring"``: 2 (W - 1) hops.
        groups: parameter groups.
        bandwidth: bytes per second of the slowest link; at these sizes it hardly matters.
    """
    if ranks == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(ranks)) if algorithm == "tree" else 2 * (ranks - 1)
    return hops * (hop_seconds + message_bytes(groups) / bandwidth)


def _parameters(world: int, sharded: bool) -> list[nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    made = []
    for shape in SHAPES:
        part, gradient = torch.randn(shape), torch.randn(shape)
        if sharded:
            part, gradient = (DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in (part, gradient))
        parameter = nn.Parameter(part)
        parameter.grad = gradient
        made.append(parameter)
    return made


def _steps(world: int) -> dict[str, Callable[[], object]]:
    """One function per kind; its call is what is timed."""

    def optimizer(sharded: bool, **options: Any) -> ruda_torch.AdamW:
        parameters = _parameters(world, sharded)
        groups = [{"params": parameters[:16]}, {"params": parameters[16:], "weight_decay": 0.0}]
        return ruda_torch.AdamW(groups, fused_step=True, **options)

    guarded = optimizer(True, max_grad_norm=1.0)
    ranks = shared.find(guarded.param_groups, guarded=True)
    assert ranks is not None
    numbers = torch.ones(message_bytes(2) // 8, dtype=torch.float64)
    return {
        "update": optimizer(True, check_finite=False).step,
        "local": optimizer(False, max_grad_norm=1.0).step,
        "global": guarded.step,
        "sum": lambda: ranks.sum(numbers),
    }


def _measure(rank: int, world: int, rounds: int, threads: int, folder: str) -> None:
    """One process: writes its seconds per kind and round."""
    torch.set_num_threads(threads)
    store = dist.FileStore(os.path.join(folder, f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=dt.timedelta(minutes=2))
    steps = _steps(world)
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(rounds + 3):
        for kind, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number >= 3:  # the first rounds allocate state and tables
                seconds[kind].append(time.perf_counter() - start)
    pathlib.Path(folder, f"{world}-{rank}.json").write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, rounds: int, threads: int) -> dict[str, Any]:
    """Median and extremes, in microseconds, of the slowest rank's time per round."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_measure, (world, rounds, threads, folder), nprocs=world, start_method="spawn")
        files = [pathlib.Path(folder, f"{world}-{rank}.json") for rank in range(world)]
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found: dict[str, Any] = {"processes": world, "threads per process": threads, "rounds": rounds}
    for kind in KINDS:
        slowest = [max(times) * 1e6 for times in zip(*(rank[kind] for rank in ranks), strict=True)]
        found[kind] = {
            "median": round(statistics.median(slowest), 1),
            "min": round(min(slowest), 1),
            "max": round(max(slowest), 1),
        }
    return found


def model_table() -> dict[str, Any]:
    """The model for up to 1024 ranks, for two assumed hop times."""
    return {
        "what": "a model, not a measurement: microseconds of one all_reduce per step",
        "message bytes (two parameter groups)": message_bytes(2),
        "rows": [
            {
                "ranks": ranks,
                **{
                    f"{algorithm}, {hop * 1e6:.0f} us per hop": round(
                        modelled_seconds(ranks, hop, algorithm=algorithm) * 1e6, 1
                    )
                    for algorithm in ("tree", "ring")
                    for hop in (5e-6, 20e-6)
                },
            }
            for ranks in (1, 2, 4, 8, 64, 256, 1024)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON file to write")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds (default 50)")
    parser.add_argument("--threads", type=int, default=1, help="threads per process (default 1)")
    arguments = parser.parse_args()
    found = {
        "format": 1,
        "what": "microseconds per call of the slowest rank, gloo on one machine; every rank holds the same elements",
        "environment": environment.describe(torch.device("cpu"), environment.command_line("communication.py")),
        "elements per rank": sum(math.prod(shape) for shape in SHAPES),
        "tensors per rank": len(SHAPES),
        "kinds": KINDS,
        "measured": [measure(world, arguments.rounds, arguments.threads) for world in arguments.processes],
        "model": model_table(),
    }
    for row in found["measured"]:
        numbers = "  ".join(f"{kind} {row[kind]['median']:9.1f}" for kind in KINDS)
        print(f"{row['processes']} processes, median us: {numbers}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    partial = arguments.output.with_suffix(".json.partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
