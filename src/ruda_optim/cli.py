"""The console command ``ruda-optim``: ``info`` says what this machine can run, ``check`` whether it computes rightly,
``memory`` what a model of a given size needs.

Plain text on purpose: the package depends on torch and NumPy alone, and a bug report should paste well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from . import __version__, memory_estimate
from .fused_adamw.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_CODES = """exit code:
  0  info: something can run here.   check: everything that can run here was checked and is right.   memory: printed.
  1  info: nothing can run here.     check: a result is wrong, a kernel failed, or nothing could be checked.
  2  the command line was not understood; memory: a value that does not exist or does not fit the others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code.

    Args:
        argv: arguments without the program's name. Default: those of the process.
    """
    args = _parse(argv)
    if args.command == "memory":
        return _memory(args)
    try:
        facts = machine()
    except ImportError as error:
        print(f"ruda-optim needs torch and NumPy: {error}. Install them: pip install torch numpy", file=sys.stderr)
        return 1
    if args.command == "info":
        good = any(backend["available"] for backend in facts["backends"])
        print(json.dumps(facts, indent=2) if args.json else info_text(facts))
        return 0 if good else 1
    # This command stands above both packages; its line in the import contracts says so.
    from ruda_torch.step_times import time_steps

    from . import self_check

    timing = functools.partial(time_steps, elements=args.elements) if args.elements > 0 else None
    report = {**facts, **self_check.run(timing, _progress)}
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2) if args.json else f"{info_text(facts)}\n\n{check_text(report)}")
    return 0 if report["passed"] else 1


def machine() -> dict[str, Any]:
    """Versions, threads, devices, and each backend with the reason where it cannot run. Compiles nothing."""
    import numpy as np
    import torch

    from .fused_adamw import storage

    backends: list[dict[str, Any]] = []
    for backend in storage.available():
        entry = {"name": backend.name, "available": backend.available, "detail": backend.reason}
        if backend.name == "cpu" and backend.available:
            try:
                entry["detail"] = f"instruction set {storage.cpu_level()}"
            except RuntimeError as error:  # the library is there but refuses: an old processor, a wrong variable
                entry.update(available=False, detail=str(error).partition("\n")[0])
        backends.append(entry)
    return {
        "ruda_optim": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "devices": ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("RUDA_")},
        "backends": backends,
    }


def info_text(facts: dict[str, Any]) -> str:
    """The report of ``info`` for people."""
    lines = [
        ", ".join(
            [
                f"ruda-optim {facts['ruda_optim']}",
                f"torch {facts['torch']}",
                f"NumPy {facts['numpy']}",
                f"Python {facts['python']}",
                facts["system"],
            ]
        ),
        f"threads: {facts['threads']}   devices: {', '.join(facts['devices'])}",
    ]
    lines += [f"environment: {name}={value}" for name, value in facts["environment"].items()]
    lines.append("")
    for backend in facts["backends"]:
        status = "ready" if backend["available"] else "not here"
        lines += _row(f"{backend['name']:<6} {status:<9} ", backend["detail"])
    return "\n".join(lines)


def check_text(report: dict[str, Any]) -> str:
    """The report of ``check`` for people, below that of ``info``."""
    lines = ["Against the FP64 reference (largest error, as a share of what FP32 rounding allows)", ""]
    for result in report["checks"]:
        worst = "" if result["worst"] is None else f"{result['worst']:.2f}"
        verdict = "ok" if result["passed"] else "WRONG"
        lines += _row(f"{result['where']:<13} {verdict:<6} {worst:>6}  ", result["case"])
        lines += [] if result["error"] is None else _row(" " * 15, result["error"])
    if report["timings"]:
        first = report["timings"][0]
        what = f"{first['tensors']} x {first['elements_per_tensor']:,} FP32 elements"
        lines += ["", f"One step of {what}, median, and its time relative to ours in the same round", ""]
    for timing in report["timings"]:
        lines.append(
            f"{timing['where']:<13} {timing['milliseconds']:9.3f} ms {timing['times_ours']:5.2f}  {timing['method']}"
        )
    if report["timings"]:
        lines += ["", "(rough figures: whatever else runs here takes part)"]
    failed = sum(not result["passed"] for result in report["checks"])
    if not report["checks"]:
        verdict = "nothing was checked: no backend can run here (see the reasons above)"
    elif failed:
        verdict = f"{failed} of {len(report['checks'])} checks failed: please report this with the whole output"
    else:
        verdict = f"all {len(report['checks'])} checks passed"
    return "\n".join([*lines, "", verdict])


def memory_text(report: dict[str, Any]) -> str:
    """The report of ``memory`` for people: one line for each optimizer, then the sources."""
    entries = report["optimizers"]
    largest = max(entry["bytes"]["total"] for entry in entries)
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20) if largest >= 2**20 else ("bytes", 1)
    what = f"{report['parameters']:,} parameters in {report['dtype']}, gradients in {report['gradient_dtype']}"
    lines = [
        what + (", AMSGrad" if report["amsgrad"] else ""),
        "",
        f"{'':<64}{unit:>40}{'bytes/element':>15}",
        f"{'':<64}{'param':>8}{'grad':>8}{'master':>8}{'moments':>8}{'sum':>8}{'sum':>9}{'step':>6}",
    ]
    sources = list(dict.fromkeys(entry["source"] for entry in entries))
    for entry in entries:
        sizes = "".join(f"{size / scale:>8.{2 if scale > 1 else 0}f}" for size in entry["bytes"].values())
        traffic = "" if entry["traffic_per_element"] is None else f"{entry['traffic_per_element']:>6g}"
        name = f"{entry['optimizer']}, {entry['keeps']} [{sources.index(entry['source']) + 1}]"
        lines.append(f"{name:<64}{sizes}{entry['bytes_per_element']['total']:>9.4g}{traffic}")
    lines += ["", *(line for number, source in enumerate(sources, 1) for line in _row(f"[{number}] ", source)), ""]
    notes = (
        "step: what a step reads and writes, by its source; a finite check or clipping reads the gradients once more. "
        "Arithmetic, not a measurement: activations, workspace, a framework's own copies and what small tensors keep "
        "in FP32 are not in it."
    )
    return "\n".join([*lines, *_row("", notes)])


def _memory(args: argparse.Namespace) -> int:
    try:
        count = memory_estimate.parameter_count(args.params)
        common = {"gradient_dtype": args.grad_dtype, "amsgrad": args.amsgrad}
        rows = [
            *memory_estimate.estimate(args.dtype, masters=args.masters, moments=args.moments, **common),
            *memory_estimate.estimate_others(args.dtype, **common),
        ]
    except InvalidOption as error:
        print(f"ruda-optim memory: {error}", file=sys.stderr)
        return 2
    report = {
        "parameters": count,
        "dtype": memory_estimate.SHORT_DTYPES.get(args.dtype, args.dtype),
        "gradient_dtype": memory_estimate.SHORT_DTYPES.get(
            args.grad_dtype or args.dtype, args.grad_dtype or args.dtype
        ),
        "amsgrad": args.amsgrad,
        "optimizers": [
            {
                "optimizer": row.optimizer,
                "keeps": row.keeps,
                "bytes": row.of(count),
                "bytes_per_element": {
                    name: float(getattr(row, name)) for name in ("parameter", "gradient", "master", "moments", "total")
                },
                "traffic_per_element": None if row.traffic is None else float(row.traffic),
                "source": row.source,
            }
            for row in rows
        ],
    }
    print(json.dumps(report, indent=2) if args.json else memory_text(report))
    return 0


def _row(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _progress(done: int, total: int, what: str) -> None:
    """On a terminal one line that is written over and over; elsewhere nothing, so that logs stay short."""
    if sys.stderr.isatty():
        print(f"\r\033[K[{done}/{total}] {what}", end="", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ruda-optim",
        description="AdamW and AMSGrad in one fused step: what runs on this machine, and does it compute rightly?",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ruda-optim {__version__}")
    for_machines = argparse.ArgumentParser(add_help=False)
    for_machines.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{info,check,memory}")
    commands.add_parser(
        "info", parents=[for_machines], help="versions, devices, backends and why the others cannot run (the default)"
    )
    check = commands.add_parser(
        "check",
        parents=[for_machines],
        help="compare the kernels of this machine's devices with the FP64 reference; time a step of ruda_torch.AdamW "
        "beside torch's fused one",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "--elements",
        type=int,
        default=8_388_608,
        help="elements to time a step over; 0: time nothing (default 8388608)",
    )
    memory = commands.add_parser(
        "memory",
        parents=[for_machines],
        help="bytes for parameters, gradients, masters and moments, beside other optimizers; needs no torch",
        epilog="example:\n  ruda-optim memory --params 8e9 --dtype bf16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    memory.add_argument("--params", required=True, help="how many parameters the model has, for example 8e9")
    memory.add_argument("--dtype", default="fp32", help="of the parameters: fp32, fp16 or bf16 (default fp32)")
    memory.add_argument("--grad-dtype", help="of the gradients (default: that of the parameters)")
    memory.add_argument("--masters", help="fp32, split or none (default: every kind that the dtype has)")
    memory.add_argument("--moments", help="float32, bfloat16 or packed16 (default: all)")
    memory.add_argument("--amsgrad", action="store_true", help="with the running maximum of the second moment")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in ([], ["--json"]):
        arguments.insert(0, "info")
    args = parser.parse_args(arguments)
    if args.command == "check" and args.elements < 0:
        parser.error(f"--elements must be at least 0, got {args.elements}")
    return args
