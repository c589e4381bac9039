"""The optimizer in host memory: ``fully_shard`` with ``CPUOffloadPolicy``, time and resident memory of its step.

    .venv/bin/python benchmarks/offload.py --output benchmarks/results/offload.json

1, 2 and 4 processes share one model and the cores of this machine, one thread each. Every optimizer has parameters of
its own. Ours keeps BF16 parameters with split masters; the others keep FP32 parameters, which are their masters, as
``MixedPrecisionPolicy`` wants them. Each round times one step of every optimizer, all ranks starting from a barrier;
the slowest rank counts. The GPU that computes gradients is not part of it: gradients are random numbers in host memory,
in the parameters' dtype.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import gc
import json
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

import contestants
import environment
import ruda_torch

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NORM = 1.0
WIDTH = 1024
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
OURS = ("float32", "bfloat16", "packed16")
COMPARED = {
    "torch loop": ("torch.optim.AdamW(foreach=False)", False),
    "torch fused": ("torch.optim.AdamW(fused=True)", False),
    "DeepSpeedCPUAdam": ("DeepSpeedCPUAdam on each rank's part", False),
    **{form: (f"ruda_torch.AdamW(moments={form!r}), BF16 with split masters", False) for form in OURS},
    "torch fused, clipped": ("torch.optim.AdamW(fused=True) after clip_grad_norm_", True),
    "packed16, clipped": ("ruda_torch.AdamW(moments='packed16', max_grad_norm=1.0)", True),
}
"""Name, what it is, and whether it clips."""


def resident() -> int:
    """Bytes of this process in memory, without what it has freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _model(elements: int, dtype: torch.dtype, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    layers = max(1, elements // (4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH, bias=False, dtype=dtype) for _ in range(layers)))
    policy = CPUOffloadPolicy(pin_memory=False)
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    for parameter in model.parameters():
        gradient = torch.empty_like(parameter, requires_grad=False)
        gradient.to_local().normal_()  # type: ignore[attr-defined]
        parameter.grad = gradient
    return model


def _step(name: str, model: nn.Module) -> Callable[[], object]:
    parameters = list(model.parameters())
    form, _, clipped = name.partition(", ")
    if form in OURS:
        norm = MAX_NORM if clipped else None
        return ruda_torch.AdamW(
            parameters, fused_step=True, moments=form, check_finite=bool(clipped), max_grad_norm=norm, **SETTINGS
        ).step
    if form == "DeepSpeedCPUAdam":
        parts = [parameter.detach().to_local() for parameter in parameters]  # type: ignore[attr-defined]
        for part, parameter in zip(parts, parameters, strict=True):
            part.grad = parameter.grad.to_local()  # type: ignore[union-attr]
        return contestants.deepspeed(parts, SETTINGS).step  # type: ignore[no-any-return]
    fused = form == "torch fused"
    optimizer = torch.optim.AdamW(parameters, foreach=None if fused else False, fused=fused or None, **SETTINGS)
    if not clipped:
        return optimizer.step

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()

    return clip_and_step


def _measure(rank: int, world: int, elements: int, rounds: int, folder: str) -> None:
    """One process: writes its seconds per round and its resident bytes, by optimizer."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=dt.timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {"seconds": {}, "bytes": {}, "refused": {}}
    models, steps = [], {}
    for name in COMPARED:
        before = resident()
        model = _model(elements, torch.bfloat16 if name.partition(", ")[0] in OURS else torch.float32, mesh)
        try:
            step = _step(name, model)
        except ImportError as error:
            found["refused"][name] = str(error)
            del model  # now, not where the next one counts
            continue
        for _ in range(2):
            step()
        found["bytes"][name] = resident() - before
        models.append(model)
        steps[name] = step
        found["seconds"][name] = []
    names = list(steps)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            found["seconds"][name].append(time.perf_counter() - start)
    pathlib.Path(folder, f"{world}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, elements: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per step of the slowest rank, the ratio to torch's fused step of its round, bytes of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_measure, (world, elements, rounds, folder), nprocs=world, start_method="spawn")
        files = [pathlib.Path(folder, f"{world}-{rank}.json") for rank in range(world)]
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    slowest = {
        name: [max(t) for t in zip(*(r["seconds"][name] for r in ranks), strict=True)] for name in ranks[0]["seconds"]
    }
    rows = {}
    for name, seconds in slowest.items():
        other = slowest["torch fused, clipped" if COMPARED[name][1] else "torch fused"]
        rows[name] = {
            "median ms": round(1e3 * statistics.median(seconds), 2),
            "min ms": round(1e3 * min(seconds), 2),
            "max ms": round(1e3 * max(seconds), 2),
            "times torch fused": round(statistics.median(o / s for o, s in zip(other, seconds, strict=True)), 2),
            "resident bytes per element": round(sum(rank["bytes"][name] for rank in ranks) / elements, 2),
        }
    return {"processes": world, "refused": ranks[0]["refused"], "optimizers": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON file to write")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    parser.add_argument(
        "--elements", type=int, default=2**26, help="of the model, on all ranks together (default 2^26)"
    )
    arguments = parser.parse_args()
    layers = max(1, arguments.elements // (4 * WIDTH * WIDTH))
    elements = layers * 4 * WIDTH * WIDTH
    found: dict[str, Any] = {
        "format": 1,
        "what": "milliseconds per step of the slowest rank; resident bytes per element of parameters, gradients and "
        "state, over all ranks",
        "environment": environment.describe(torch.device("cpu"), environment.command_line("offload.py")),
        "elements": elements,
        "threads per process": 1,
        "rounds": arguments.rounds,
        "optimizers": {name: what for name, (what, _) in COMPARED.items()},
        "measured": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for world in arguments.processes:
        found["measured"].append(measure(world, elements, arguments.rounds))
        print(
            f"{world} processes", json.dumps(found["measured"][-1]["refused"]) * bool(found["measured"][-1]["refused"])
        )
        for name, row in found["measured"][-1]["optimizers"].items():
            print(f"  {name:<22} {row['median ms']:9.2f} ms  {row['times torch fused']:6.2f}  "
                  f"{row['resident bytes per element']:6.2f} bytes")  # fmt: skip
        # After every count: what was measured stays, whatever happens to the rest.
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
