"""Writes docs/benchmarks.md and docs/status.md from benchmarks/results/*.json: every number there comes from a file.

    python docs/generate.py

A file with "runs" is a report of tools/run_adamw_regressions.py: a list of {"suite", "device", "compiler", "dtype",
"status"}. A file with "results" is a report of benchmarks/run.py: a list of {"workload", "variant", "peer", "ratio",
"ours ms", "peer ms"}, or with "skipped" and no times. Both say where and when they were made: "environment" with
"date". Anything else in the folder is an error, so that no result is left out silently.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = "<!-- Written by docs/generate.py from benchmarks/results. Do not edit. -->\n\n"

# What the project wants to have measured: device, compiler, what is known without a result file.
UNTESTED = "not yet measured on hardware"
WANTED = (
    ("CPU x86-64", "cpu", "tests run on every commit; no result file yet"),
    ("CPU aarch64", "cpu", UNTESTED),
    ("CPU macOS", "cpu", UNTESTED),
    ("NVIDIA", "nvrtc", UNTESTED),
    ("NVIDIA", "ptx", UNTESTED),
    ("AMD", "ptx", UNTESTED),
)
DTYPES = ("fp32", "fp16", "bf16")


def load() -> dict[str, dict[str, Any]]:
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    for name, report in found.items():
        if not isinstance(report, dict) or not ("runs" in report or "results" in report):
            raise SystemExit(f"{name} has neither 'runs' nor 'results'; see docs/generate.py for the two forms")
    return found


def date(report: dict[str, Any]) -> str:
    return str(report.get("environment", report).get("date", "no date"))[:10]


def machine(report: dict[str, Any]) -> str:
    environment = report.get("environment", report)
    return str(environment.get("gpu") or environment.get("cpu") or environment.get("device") or "unknown machine")


def table(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def benchmarks(reports: dict[str, dict[str, Any]]) -> str:
    text = HEAD + BENCHMARK_INTRODUCTION
    measured = {name: report for name, report in reports.items() if "results" in report}
    if not measured:
        return text + "\nNo result file has been committed yet. `make bench` writes one.\n"
    for name, report in measured.items():
        text += f"\n## {name.removesuffix('.json')}\n\n"
        environment = report.get("environment", {})
        versions = ", ".join(f"{key} {value}" for key, value in (environment.get("versions") or {}).items() if value)
        text += f"`benchmarks/results/{name}`, {date(report)}, {machine(report)}"
        text += f", {environment['threads']} threads" if "threads" in environment else ""
        text += f". {versions}.\n\n" if versions else ".\n\n"
        rows = [benchmark_row(entry) for entry in report["results"]]
        text += table(("Workload", "Step", "Peer", "ours, ms", "peer, ms", "peer / ours (20 % to 80 %)"), rows)
    return text


def benchmark_row(entry: dict[str, Any]) -> tuple[object, ...]:
    start = (entry["workload"], entry["variant"], entry["peer"])
    ratio = entry.get("ratio")
    if ratio is None:
        return (*start, "", "", entry.get("skipped", "no round was quiet enough"))
    times = (f"{entry[key]['median']:.3g}" for key in ("ours ms", "peer ms"))
    return (*start, *times, f"{ratio['median']:.2f} ({ratio['p20']:.2f} to {ratio['p80']:.2f})")


def status(reports: dict[str, dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = []
    devices = set()
    for name, report in reports.items():
        for run in report.get("runs", []):
            devices.add((str(run.get("device")), str(run.get("compiler"))))
            what = (run.get("suite"), run.get("device"), run.get("compiler") or "", run.get("dtype") or "")
            rows.append((*what, f"**{run.get('status')}**", date(report), f"`{name}`"))
    text = HEAD + STATUS_INTRODUCTION + "\n## Committed results\n\n"
    if rows:
        text += table(("Suite", "Device", "Compiler", "dtype", "Status", "Date", "File"), rows)
    else:
        text += "None yet. `tools/` and `make bench` write them to `benchmarks/results/`.\n"
    text += "\n## Wanted, and not in a result file\n\n"
    wanted = [
        (device, compiler, ", ".join(DTYPES), known)
        for device, compiler, known in WANTED
        if not any(known_compiler == compiler and fits(device, name) for name, known_compiler in devices)
    ]
    text += table(("Device", "Compiler", "dtypes", "What is known"), wanted) if wanted else "Nothing is missing.\n"
    return text


def fits(wanted: str, device: str) -> bool:
    """Whether a run on ``device`` is one of those in the row ``wanted``."""
    if wanted.startswith("CPU"):
        return (device == "cpu" and wanted == "CPU x86-64") or wanted.split()[1].lower() in device.lower()
    return wanted.lower() in device.lower()


BENCHMARK_INTRODUCTION = """# Benchmarks

Every number on this page comes from a file under `benchmarks/results/`. A speed that has no file is not claimed.

How a measurement is made:

- Both optimizers start each step from the same parameters, moments and gradients. The order alternates.
- After every step, parameters and moments are compared element by element with a derived tolerance. A peer that
  computes something else is not timed.
- A row is the whole `step()`: what lies between `backward()` and the next forward pass. For a peer that includes the
  `clip_grad_norm_`, the unscaling and the copies to FP32 masters which it needs around its step.
- Rounds in which other processes used the machine are dropped and counted in the file.
- A ratio above 1 means that ours took less time. Ratios come from pairs of the same round; absolute times of different
  machines or days do not compare.
"""

STATUS_INTRODUCTION = """# Status

What was run where. A row names the file that proves it. Results of a simulator or an interpreter are in the suite
`simulate` and say nothing about hardware.

`passed` means that the suite ran and held. `blocked` means that a tool or a device was missing: it is not a pass.
"""


def pages() -> dict[str, str]:
    reports = load()
    return {"benchmarks.md": benchmarks(reports), "status.md": status(reports)}


if __name__ == "__main__":
    for page, written in pages().items():
        (DOCS / page).write_text(written, encoding="utf-8")
