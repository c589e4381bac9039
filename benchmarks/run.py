"""Our whole step against its peers, side by side: a table, a JSON file with every round, and pictures.

What a step does and how it is timed: workloads.py, contestants.py, protocol.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import environment
import pictures
import protocol
import report
from comparison import compare
from contestants import DEFAULT_PEERS, PEERS
from workloads import QUICK_WORKLOADS, VARIANTS, WORKLOADS

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
QUICK_PEERS = ("torch-fused", "staged-eager")


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny tensors, two rounds, no noise gate")
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, *QUICK_WORKLOADS], help="default: all; may be repeated"
    )
    parser.add_argument(
        "--variant", action="append", choices=VARIANTS, help="default: those of the workload; may be repeated"
    )
    parser.add_argument(
        "--peer",
        action="append",
        choices=[name for name in PEERS if name != "ours"],
        help="default: those of the workload; may be repeated",
    )
    parser.add_argument("--rounds", type=int, help="kept rounds per cell (default 15)")
    parser.add_argument(
        "--max-foreign-load",
        type=float,
        default=0.05,
        help="drop a round when other processes used more than this share of all CPU time (default 0.05)",
    )
    parser.add_argument("--name", help="file name of the results, without ending (default: the device, or quick)")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder (default benchmarks/results)")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    device = torch.device(arguments.device)
    quick = arguments.quick
    names = dict.fromkeys(arguments.workload or (QUICK_WORKLOADS if quick else WORKLOADS))
    workloads = [{**WORKLOADS, **QUICK_WORKLOADS}[name] for name in names]
    cells = [
        (workload, VARIANTS[variant], peer)
        for workload in workloads
        for variant in arguments.variant or workload.variants or VARIANTS
        for peer in arguments.peer or workload.peers or (QUICK_PEERS if quick else DEFAULT_PEERS)
    ]
    variants = [variant for variant in VARIANTS.values() if any(variant is cell[1] for cell in cells)]
    peers = [name for name in PEERS if name == "ours" or any(name == cell[2] for cell in cells)]
    if quick:
        settings = protocol.Settings(arguments.rounds or 2, steps=1, max_foreign_load=None)
    else:
        settings = protocol.Settings(arguments.rounds or 15, max_foreign_load=arguments.max_foreign_load)
    name = arguments.name or ("quick" if quick else device.type)

    console = Console()
    if not console.is_terminal:
        console.width = 120  # a log is as wide as it needs to be
    found = {
        "format": 1,
        "what": "whole optimizer steps; ratio = peer ms / ours ms, paired per round; above 1 ours is faster",
        "environment": environment.describe(device, environment.command_line("run.py")),
        "settings": {"rounds": settings.rounds, "max foreign load": settings.max_foreign_load, "quick": quick},
        "workloads": {w.name: {"title": w.title, "elements": w.elements} for w in workloads},
        "variants": {v.name: {"title": v.title, "bytes per element": v.bytes_per_element} for v in variants},
        "peers": {name: PEERS[name].title for name in peers},
        "comparisons": [],
    }
    console.print(report.heading(found))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cells))
        for workload, group in itertools.groupby(cells, key=lambda cell: cell[0]):
            for _, variant, peer in group:
                progress.update(task, description=f"{workload.name}, {variant.name}, {peer}")
                found["comparisons"].append(compare(workload, variant, peer, device, settings))
                progress.advance(task)
            console.print(report.table(found, workload.name))
    for line in report.footnotes(found):
        console.print(line)

    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
    written = [path, *pictures.draw(found, arguments.output, name)]
    console.print("written: " + ", ".join(str(file) for file in written), soft_wrap=True)
    return 1 if any(entry["status"] in ("mismatch", "failed") for entry in found["comparisons"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
