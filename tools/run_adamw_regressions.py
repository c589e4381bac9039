"""The regression suites of the fused AdamW, each as one command with an honest exit code.

    python tools/run_adamw_regressions.py                          # all that needs no GPU
    python tools/run_adamw_regressions.py --suite cuda --compiler both
    python tools/run_adamw_regressions.py --suite build --dry-run

Suites:
  oracle     the formula and the PyTorch fixtures; runs no kernel of ours
  reference  options, reference and plan, and the proof that they import no torch
  host       CPU operator, functional and torch API, generic AdamW, gradient guard
  build      every device kernel compiled ahead of time for sm_80, sm_90, sm_100 and gfx942; none is run
  simulate   Triton interpreter and CUDA source on a host simulator: a simulation, no hardware
  cuda       the kernels on hardware; fails without a GPU
  bench      fused step against the staged baseline and torch's fused step; --compiler asks for a GPU

Exit codes: 0 all passed; 1 something failed; 2 wrong command line; 3 nothing failed, but something was blocked (a tool
is missing); 4 something ran out of time; 128 + n ended by signal n. Every run has a JSON file of its own from its first
second: command lines, variables, source hashes, versions, logs, durations and statuses, "running" at first. What a task
started never outlives the runner.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError:  # a machine that has a GPU and little else
    from fused_adamw.plain import Console, Table, escape

from fused_adamw import execute, run_report, suites
from fused_adamw.execute import BLOCKED, DTYPE_NAMES, DTYPES, EXIT_CODES, FAILED, INTERRUPTED, PASSED, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_REPORT = execute.ROOT / "build" / "regressions.json"
COLOURS = {PASSED: "green", FAILED: "bold red", BLOCKED: "yellow", TIMEOUT: "red", INTERRUPTED: "bold red"}


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an option."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        return value

    return number


def seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return number


def parse(argv: list[str]) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--suite",
        action="append",
        choices=[*suites.SUITES, "all"],
        metavar="SUITE",
        help="one of the suites below, or all of them; may be repeated (default: those without a GPU)",
    )
    parser.add_argument(
        "--compiler",
        choices=[*suites.COMPILERS, "both"],
        help="of the device kernels, for build, simulate, cuda and bench (default: both)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="for bench (default: cuda where a compiler is named, else cpu)"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        type=lambda text: DTYPE_NAMES.get(text, text),
        help="of the gradients, for cuda (default: all) and bench (fp32); f32, f16 are other names",
    )
    parser.add_argument(
        "--elements",
        type=at_least(1),
        default=suites.Choice.elements,
        help="for bench: elements of the tensor (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations",
        type=at_least(1),
        default=suites.Choice.iterations,
        help="for bench: steps per sample, each compared with the other side (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=at_least(3),
        default=suites.Choice.samples,
        help="for bench: measured rounds, at least 3 (default: %(default)s)",
    )
    parser.add_argument("--amsgrad", action="store_true", help="for bench: AMSGrad")
    parser.add_argument("--offline", action="store_true", help="downloads fail at once; no suite needs one")
    parser.add_argument(
        "--timeout", type=seconds, default=1800.0, help="seconds that each command may take (default: %(default)g)"
    )
    parser.add_argument("--budget", type=seconds, help="seconds for all commands together (default: no limit)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="take over what passed in the last report of the same name, if its sources and tools are those of today",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    parser.add_argument(
        "--report",
        type=Path,
        default=DEFAULT_REPORT,
        metavar="FILE",
        help="the JSON report (default: build/regressions.json); where there is one already, the new one gets a number "
        "in its name; bench writes its numbers beside it",
    )
    return parser.parse_args(argv)  # fmt: skip


def choice_of(arguments: argparse.Namespace, report: Path) -> suites.Choice:
    return suites.Choice(
        compilers=suites.COMPILERS if arguments.compiler in (None, "both") else (arguments.compiler,),
        dtype=arguments.dtype,
        device=arguments.device or ("cuda" if arguments.compiler else "cpu"),
        elements=arguments.elements,
        iterations=arguments.iterations,
        samples=arguments.samples,
        amsgrad=arguments.amsgrad,
        bench_output=report.resolve().with_name(f"{report.stem}-bench"),
    )


def dry_run(console: Console, tasks: list[execute.Task]) -> None:
    for task in tasks:
        console.print(f"{task.suite}: {task.name}", style="bold", markup=False)
        changes = "".join(f"{name}={value} " for name, value in task.environment.items() if value is not None)
        console.print(f"    {execute.portable(changes + shlex.join(task.command))}", markup=False, soft_wrap=True)
    console.print(f"{len(tasks)} commands; nothing was run")


def show(console: Console, outcomes: list[execute.Outcome]) -> None:
    table = Table(title_justify="left")
    for column in ("suite", "task", "status", "s", "tests passed"):
        table.add_column(column, justify="right" if column in ("s", "tests passed") else "left", overflow="fold")
    for outcome in outcomes:
        table.add_row(
            outcome.task.suite,
            escape(outcome.task.name),
            f"[{COLOURS[outcome.status]}]{outcome.status}[/]",
            f"{outcome.duration:.1f}",
            str(outcome.tests.get(PASSED, 0)) if outcome.tests else "",
        )
    console.print(table)


def run_all(
    console: Console,
    tasks: list[execute.Task],
    arguments: argparse.Namespace,
    report: run_report.Report,
    stop: execute.Stop,
    before: run_report.Before | None,
) -> None:
    """Run the tasks one by one until they are done or the runner is told to end."""
    found = execute.probe(stop)
    if found is None:
        return
    report.found(found)
    begin = time.monotonic()
    said = ""
    for number, task in enumerate(tasks, start=1):
        if stop.signal is not None:
            return
        console.print(f"[{number}/{len(tasks)}] {task.suite}: {task.name}", markup=False)
        for name in sorted(name for name, value in task.environment.items() if value is None and name in os.environ):
            console.print(f"    {name}={os.environ[name]} is set here, and is taken away for this task", markup=False)
        taken_over = None if before is None else before.outcome(task, report)
        if taken_over is not None:
            report.add(taken_over)
            console.print(f"    passed before, {taken_over.started}", markup=False, style=COLOURS[PASSED])
            continue
        report.begin(task)
        left = float("inf") if arguments.budget is None else arguments.budget - (time.monotonic() - begin)
        timeout = min(arguments.timeout, left)
        outcome = execute.run(task, found["missing"], timeout, stop, offline=arguments.offline)
        report.add(outcome)
        # Several tasks may have one and the same obstacle: it is told once.
        reason = "as before" if outcome.reason == said and outcome.status != PASSED else outcome.reason
        said = outcome.reason
        line = f"    {outcome.status} after {outcome.duration:.1f} s{': ' * bool(reason)}{reason}"
        console.print(line, markup=False, style=COLOURS[outcome.status])
        if outcome.status in (FAILED, TIMEOUT) and outcome.log:
            console.print("\n".join(f"    | {line}" for line in outcome.log.splitlines()[-40:]), markup=False)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = parse(words)
    names = arguments.suite or list(suites.WITHOUT_GPU)
    names = list(suites.SUITES) if "all" in names else names
    console = Console(soft_wrap=not sys.stdout.isatty())
    if arguments.dry_run:
        dry_run(console, suites.tasks(names, choice_of(arguments, arguments.report)))
        return 0
    with execute.Stop() as stop:
        before = run_report.last(arguments.report) if arguments.resume else None
        path = run_report.claim(arguments.report)
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        options["report"] = path.name
        report = run_report.Report(path, ["tools/run_adamw_regressions.py", *words], options)
        try:
            run_all(console, suites.tasks(names, choice_of(arguments, path)), arguments, report, stop, before)
        except BaseException as error:
            report.finish(f"{type(error).__name__}: {error}")
            raise
        report.finish(stop.reason)
    show(console, report.outcomes)
    reason = f" ({stop.reason})" * bool(stop.reason)
    console.print(f"{report.status}{reason}; report: {path}", markup=False, soft_wrap=True)
    return EXIT_CODES[report.status] if stop.signal is None else 128 + stop.signal


if __name__ == "__main__":
    sys.exit(main())
