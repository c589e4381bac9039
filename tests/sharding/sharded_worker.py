"""Runs the checks of tests/sharded_*.py in one of several processes: python sharded_worker.py RANK WORLD FOLDER.

All ranks run the same checks in the same order. Each rank appends one JSON line per check to FOLDER/results-RANK.jsonl
and stops at the first failure, because the others would wait for it in the next collective.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import pathlib
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = (
    "sharded_layouts",
    "sharded_agreement",
    "sharded_experts",
    "sharded_reports",
    "sharded_surroundings",
    "sharded_checkpoints",
)
TIMEOUT = 60
"""Seconds after which a collective that some rank does not enter is an error."""


@dataclass(frozen=True)
class Check:
    """A function that runs on every rank, for one or more numbers of processes."""

    name: str
    worlds: tuple[int, ...]
    function: Callable[[Context], None]


@dataclass(frozen=True)
class Context:
    """What a check gets: its rank, the number of ranks, and a folder that all runs of a test session share."""

    rank: int
    world: int
    folder: pathlib.Path

    def mesh(self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("dp",)) -> Any:
        """A CPU mesh over all ranks; one dimension unless a shape is given."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self.world,) if shape is None else shape, mesh_dim_names=names)


CHECKS: list[Check] = []


def check(*worlds: int) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Register a check for these numbers of processes."""

    def register(function: Callable[[Context], None]) -> Callable[[Context], None]:
        CHECKS.append(Check(function.__name__, worlds, function))
        return function

    return register


def names(world: int) -> list[str]:
    """The checks for a number of processes, in the order in which they run."""
    for module in MODULES:
        importlib.import_module(module)
    return [some.name for some in CHECKS if world in some.worlds]


def main(rank: int, world: int, folder: pathlib.Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    timeout = dt.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    context = Context(rank, world, folder)
    with (folder / f"results-{world}-{rank}.jsonl").open("w", encoding="utf-8") as results:
        for some in CHECKS:
            if world not in some.worlds:
                continue
            error = None
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", module="ruda_|sharded_")
                    some.function(context)
            except Exception:
                error = traceback.format_exc()
                raise
            finally:
                print(json.dumps({"check": some.name, "error": error}), file=results, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["sharded_worker"] = sys.modules["__main__"]  # so that the checks register here
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
