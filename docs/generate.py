"""Writes docs/benchmarks.md and docs/status.md from benchmarks/results/*.json: every number there comes from a file.

A table inside another page, or the README, stands between ``<!-- from benchmarks/results/NAME.json -->`` and
``<!-- end -->``.

    python docs/generate.py

What a file is, its keys say:

- "comparisons": benchmarks/run.py, whole steps against peers.
- "seeds": benchmarks/accuracy.py, errors against FP64.
- "measured": benchmarks/communication.py, the sum over ranks; with "optimizers", benchmarks/offload.py.
- "trainings": benchmarks/whole_runs.py, whole trainings side by side; with "moments", of benchmarks/moments.py.
- "compiled": tools/fused_adamw/compile_report.py, device kernels compiled ahead of time; no benchmark.
- "tried": tools/matrix.sh, the core tests with other versions of Python and torch; no benchmark.
- "runs": tools/run_adamw_regressions.py, a list of {"suite", "task", "device", "compiler", "dtype",
  "status", "simulation"}.
- anything else is listed with its "what", so that no result is left out silently.

All of them say when and where they were made: "environment" with "date".
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
from typing import Any

Report = dict[str, Any]

DOCS = pathlib.Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = "<!-- Written by docs/generate.py from benchmarks/results. Do not edit. -->\n\n"

EMBEDDED = re.compile(
    r"(?P<begin><!-- from benchmarks/results/(?P<name>[\w.-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)

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
NO_BENCHMARKS = ("runs", "compiled", "tried")
WITHOUT_HARDWARE = ("oracle", "reference", "build", "simulate")
"""Suites that run no kernel of ours on a device."""


def load(folder: pathlib.Path = RESULTS) -> dict[str, Report]:
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def table(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def environment(report: Report) -> dict[str, Any]:
    found = report.get("environment", report)
    return found if isinstance(found, dict) else {}


def date(report: Report) -> str:
    return str(environment(report).get("date", "no date"))[:10]


def origin(name: str, report: Report, *, packages: tuple[str, ...] = ()) -> str:
    """File, date, machine and versions of a report, in one line; of all packages, or of those that are named."""
    about = environment(report)
    parts = [f"`benchmarks/results/{name}`", date(report)]
    parts += [str(about[key]) for key in ("gpu", "cpu") if about.get(key)][:1]
    if "threads" in about:
        parts.append(f"{about['threads']} threads")
    versions = about.get("versions", {})
    parts += [f"{package} {versions[package]}" for package in packages or versions if versions[package]]
    return ", ".join(parts) + ".\n"


def pictures(name: str) -> str:
    """The pictures that were drawn with a result file, whose name theirs begin with."""
    stems = [path.stem for path in RESULTS.glob("*.json")]

    def owner(picture: str) -> str:
        return max((stem for stem in stems if f"{picture}-".startswith(f"{stem}-")), key=len, default="")

    found = sorted(path.name for path in RESULTS.glob("*.png") if owner(path.stem) == name.removesuffix(".json"))
    return "".join(f"\n![{file.removesuffix('.png')}](../benchmarks/results/{file})\n" for file in found)


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def benchmarks(reports: dict[str, Report]) -> str:
    text = HEAD + BENCHMARK_INTRODUCTION
    shown = {name: report for name, report in reports.items() if report.keys().isdisjoint(NO_BENCHMARKS)}
    if not shown:
        return text + "\nNo result file has been committed yet. `make bench` writes one.\n"
    for name, report in shown.items():
        text += f"\n## {name.removesuffix('.json')}\n\n" + origin(name, report)
        if report.get("settings", {}).get("quick"):
            text += "\nA smoke test over tiny tensors: it shows that everything runs, and no speed.\n"
        elif "comparisons" in report:
            text += comparisons(name, report) + pictures(name)
        elif "seeds" in report:
            text += accuracy(report) + pictures(name)
        elif "measured" in report:
            text += (offload if "optimizers" in report else communication)(report) + pictures(name)
        elif "trainings" in report:
            text += trainings(report) + pictures(name)
        else:
            text += f"\n{report.get('what', 'See the file.')}\n" + pictures(name)
    return text


def comparisons(name: str, report: Report) -> str:
    text = ""
    for workload, about in report["workloads"].items():
        rows = [
            comparison_row(report, entry)
            for entry in report["comparisons"]
            if entry["workload"] == workload and entry["status"] == "measured"
        ]
        text += f"\n### {about['title']} {{ #{name.removesuffix('.json')}-{workload} }}\n\n"
        columns = ("Step", "Peer", "ours, ms", "peer, ms", "peer / ours (p20 to p80)", "ours / limit", "rounds")
        text += table(columns, rows) if rows else "Nothing was measured.\n"
    reasons: dict[tuple[str, str, str], int] = {}
    for entry in report["comparisons"]:
        if entry["status"] != "measured":
            key = (report["peers"][entry["peer"]], entry["status"], entry["reason"])
            reasons[key] = reasons.get(key, 0) + 1
    if reasons:
        rows = [(peer, status, reason, cells) for (peer, status, reason), cells in reasons.items()]
        text += "\nWithout a number:\n\n" + table(("Peer", "Status", "Reason", "Cells"), rows)
    return text


def comparison_row(report: Report, entry: dict[str, Any]) -> tuple[object, ...]:
    ratio = entry["ratio"]
    limit = entry.get("ours t/limit")
    return (
        report["variants"][entry["variant"]]["title"],
        report["peers"][entry["peer"]],
        f"{entry['ours ms']['median']:.3g}",
        f"{entry['peer ms']['median']:.3g}",
        f"{ratio['median']:.2f} ({ratio.get('p20', ratio['min']):.2f} to {ratio.get('p80', ratio['max']):.2f})",
        f"{limit['median']:.2f}" if limit else "",
        entry.get("rounds kept", ""),
    )


def accuracy(report: Report) -> str:
    """Errors after the last step, the worst seed of each optimizer."""
    seeds = list(report["seeds"].values())
    quantities = ("parameter", "update", "second moment")
    rows = []
    for optimizer in seeds[0]:
        last = [seed[optimizer][-1] for seed in seeds]
        rows.append((optimizer, last[0]["step"], *(f"{max(point[q] for point in last):.1e}" for q in quantities)))
    worst = f"{report['elements']} elements, {len(seeds)} seeds, the worst"
    text = f"\nRMS error against the FP64 reference, relative; {worst}.\n\n"
    return text + table(("Optimizer", "Steps", *quantities), rows)


def communication(report: Report) -> str:
    """Microseconds of the slowest rank, by number of processes."""
    kinds = report["kinds"]
    rows = [
        (
            row["processes"],
            *(f"{row[kind]['median']:.0f} ({row[kind]['min']:.0f} to {row[kind]['max']:.0f})" for kind in kinds),
        )
        for row in report["measured"]
    ]
    text = f"\nMicroseconds, median (least to most); {report['elements per rank']} elements on each rank.\n\n"
    text += table(("Processes", *kinds), rows)
    return text + "\n" + "".join(f"- {kind}: {meaning}\n" for kind, meaning in kinds.items())


def offload(report: Report) -> str:
    """Milliseconds of the slowest rank and resident bytes, by optimizer and number of processes."""
    measured = report["measured"]
    rows = []
    for name, what in report["optimizers"].items():
        cells = []
        for entry in measured:
            row = entry["optimizers"].get(name)
            cells += [f"{row['median ms']:.0f}", f"{row['times torch fused']:.2f}"] if row else ["", ""]
        bytes_each = [e["optimizers"][name]["resident bytes per element"] for e in measured if name in e["optimizers"]]
        rows.append((what, *cells, f"{statistics.median(bytes_each):.1f}" if bytes_each else ""))
    counts = [entry["processes"] for entry in measured]
    columns = [head for n in counts for head in (f"{n} proc., ms", "torch fused / this")]
    cores = environment(report).get("cores")
    text = f"""
{report["elements"]:,} elements over all processes, one thread each, on {cores} cores. Milliseconds of the slowest
process, medians; ratios to torch's fused step of the same round (clipped beside clipped). Bytes are what the processes
grew by, per element: parameters, gradients and state.

"""
    return text + table(("Optimizer", *columns, "bytes"), rows)


def moment_trainings(report: Report) -> str:
    """What came out with each form of moments, and how far from FP32's with the same seed."""
    made = report["trainings"]
    found = {(e["beta2"], e["moments"], e["seed"]): e["quality"] for e in made}
    seeds = sorted({e["seed"] for e in made})
    rows: list[tuple[object, ...]] = []
    for beta2 in sorted({e["beta2"] for e in made}):
        exact = [found[beta2, "float32", seed] for seed in seeds]
        for form in dict.fromkeys(e["moments"] for e in made):
            values = [found[beta2, form, seed] for seed in seeds]
            away = [value - other for value, other in zip(values, exact, strict=True)]
            size = next(e["state bytes"] / e["parameters"] for e in made if e["moments"] == form)
            cells = (
                ("", "")
                if form == "float32"
                else (f"{statistics.fmean(away):+.4f}", f"{min(away):+.4f} to {max(away):+.4f}")
            )
            spread = f"{max(values) - min(values):.4f}"
            rows.append((beta2, form, f"{size:g}", ", ".join(f"{v:.4f}" for v in values), *cells, spread))
    what = report["what"][:1].upper() + report["what"][1:]
    text = f"""
{what} {made[0]["parameters"]:,} parameters, {report["steps"]:,} steps, {len(seeds)} seeds; {report["quality"]}. "Away"
is the difference from FP32 moments with the same seed, "spread" the largest difference between two seeds.

"""
    columns = ("beta2", "moments", "bytes", "came out, by seed", "away, mean", "away, each", "spread")
    return text + table(columns, rows)


def trainings(report: Report) -> str:
    """Per optimizer: seconds, the ratio to ours (the last one) with the same seed, what came out."""
    if "moments" in report["trainings"][0]:
        return moment_trainings(report)
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for entry in report["trainings"]:
        by_name.setdefault(entry["optimizer"], {})[entry["seed"]] = entry
    ours = by_name[report["ours"]]
    parts = [key for key in ("rollouts", "updates") if key in report["trainings"][0]]

    def spread(values: list[float], digits: str) -> str:
        low, high = min(values), max(values)
        return f"{statistics.median(values):{digits}} ({low:{digits}} to {high:{digits}})"

    def ratios(mine: dict[int, dict[str, Any]]) -> list[float]:
        return [mine[seed]["processor seconds"] / ours[seed]["processor seconds"] for seed in mine if seed in ours]

    rows = [
        (
            name,
            spread([entry["seconds"] for entry in mine.values()], ".1f"),
            spread([entry["processor seconds"] for entry in mine.values()], ".1f"),
            *(f"{statistics.median(entry[part] for entry in mine.values()):.1f}" for part in parts),
            "" if mine is ours else spread(ratios(mine), ".2f"),
            ", ".join(f"{mine[seed]['quality']:.3g}" for seed in sorted(mine)),
        )
        for name, mine in by_name.items()
    ]
    loads = [entry["foreign load"] for entry in report["trainings"] if entry.get("foreign load") is not None]
    busy = f" Other processes used {statistics.median(loads):.0%} of the machine's processors." if loads else ""
    what = report["what"][:1].upper() + report["what"][1:]
    text = f"""
{what}, {report["steps"]:,} steps, {len(ours)} seeds. Seconds, median (least to most), on the clock and of processor
time, which are the same on an idle machine; the ratio is of processor time, with the same seed.{busy} What came out is
the {report["quality"]}, seed by seed.

"""
    columns = ("Optimizer", "clock, s", "processor, s", *(f"{part}, s" for part in parts), "times ours", "came out")
    return text + table(columns, rows)


# ---- status ----------------------------------------------------------------------------------------------------------


def status(reports: dict[str, Report]) -> str:
    rows: list[tuple[object, ...]] = []
    covered = set()
    for name, report in reports.items():
        for run in report.get("runs", []):
            simulated = run.get("simulation") or run.get("suite") in WITHOUT_HARDWARE
            if run.get("status") == "passed" and not simulated:
                covered.add((str(run.get("device")), str(run.get("compiler"))))
            what = [run.get(column) or "" for column in ("suite", "task", "device", "compiler", "dtype")]
            outcome = f"**{run.get('status')}**" + " (simulation)" * bool(run.get("simulation"))
            rows.append((*what, outcome, date(report), f"`{name}`"))
    text = HEAD + STATUS_INTRODUCTION + "\n## Committed results\n\n"
    columns = ("Suite", "Task", "Device", "Compiler", "dtype", "Status", "Date", "File")
    text += table(columns, rows) if rows else "None yet; they are JSON files in `benchmarks/results/`.\n"
    text += versions_tried(reports)
    missing = [
        (device, compiler, ", ".join(DTYPES), known)
        for device, compiler, known in WANTED
        if not any(compiler == done and fits(device, name) for name, done in covered)
    ]
    text += "\n## Wanted, and not in a result file\n\n"
    return text + (table(("Device", "Compiler", "dtypes", "What is known"), missing) if missing else "Nothing.\n")


def versions_tried(reports: dict[str, Report]) -> str:
    """The core tests with other versions of Python and torch."""
    rows = [
        (one["torch"], one["python"], f"**{one['status']}**", *(one.get(key, "") for key in ("passed", "failed")),
         one.get("skipped", ""), "stand-ins" if one["stand-ins for CUDA's libraries"] else "", one["date"][:10],
         one.get("note", ""))
        for report in reports.values()
        for one in report.get("tried", [])
    ]  # fmt: skip
    if not rows:
        return ""
    columns = ("torch", "Python", "Status", "passed", "failed", "skipped", "CUDA's libraries", "Date", "Note")
    return (
        "\n## Versions of Python and torch\n\n"
        "`tools/matrix.sh`, on a CPU: the tests of the functional API, the optimizer and the CPU operator without the\n"
        "slow ones. With stand-ins: a torch built for CUDA whose NVIDIA libraries `tools/stand_ins.py` replaced.\n\n"
        + table(columns, rows)
    )


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
- "adamw_step, out of place" is our own functional API, which makes new parameters and moments at every step: one call
  per tensor, or `guarded_adamw_step` for all of them where the step checks or clips.
- Rounds in which other processes used the machine are dropped and counted in the file.
- A ratio above 1 means that ours took less time. Beside the median stand the 20th and 80th percentiles, or the extremes
  where few rounds were made. Ratios come from pairs of the same round; absolute times of different
  machines or days do not compare.
- "ours / limit" is our time divided by the time that the least possible memory traffic takes, at the rate of a plain
  in-place multiplication measured in the same round. It is left out where the tensors fit into the cache.
"""

STATUS_INTRODUCTION = """# Status

What was run where. A row names the file that proves it. The suites `build` and `simulate` compile and simulate: they
say nothing about hardware.

`passed` means that the suite ran and held. `blocked` means that a tool or a device was missing: it is not a pass.
"""


# ---- tables inside other pages ---------------------------------------------------------------------------------------

FIRST_SCREEN = (  # of the README: workload, variant, what a reader calls it; the last is one that ours loses
    ("20000x16", "clip", "20,000 tensors of 16: clip, update"),
    ("2000x256", "clip", "2,000 tensors of 256: clip, update"),
    ("gpt2-124m", "bf16-clip", "GPT-2 124M, BF16 with FP32 masters: clip, update"),
    ("gpt2-124m", "unscale-clip", "GPT-2 124M, FP32: unscale, clip, update"),
    ("gpt2-124m", "checked", "GPT-2 124M, FP32: update; ours also checks for NaN"),
)


def first_screen(report: Report) -> str:
    """A few whole steps against torch's fused one."""
    entries = {(e["workload"], e["variant"]): e for e in report["comparisons"] if e["peer"] == "torch-fused"}
    rows: list[tuple[object, ...]] = []
    for workload, variant, words in FIRST_SCREEN:
        entry = entries[workload, variant]
        ours, theirs, ratio = (entry[key]["median"] for key in ("ours ms", "peer ms", "ratio"))
        rows.append((words, f"{theirs:.3g}", f"{ours:.3g}", f"**{ratio:.2f}**"))
    return "\n" + table(("A whole step", "torch fused, ms", "ours, ms", "torch / ours"), rows)


COUNTED_KINDS = (  # gradient, parameter, amsgrad, what a reader calls it
    ("float32", "float32", False, "FP32"),
    ("float32", "float32", True, "FP32, AMSGrad"),
    ("float32", "split", False, "FP32 gradient, BF16 parameter with a split master"),
    ("bfloat16", "split", False, "BF16 gradient and parameter, split master"),
    ("float16", "float16", False, "FP16 gradient and parameter, FP32 master"),
)
FORMS = ("float32", "bfloat16", "packed16")


def compiled(report: Report) -> str:
    """What compilers made of the device kernels; nothing of it was run."""
    rows: list[tuple[object, ...]] = []
    versions = dict.fromkeys((entry["compiler"], entry["version"]) for entry in report["compiled"])
    for compiler, version in versions:
        entries = [e for e in report["compiled"] if (e["compiler"], e["version"]) == (compiler, version)]
        most = {group: max(e["registers"].get(group, 0) for e in entries) for group in entries[0]["registers"]}
        failed = [f"{len(e['problems'])} on {e['target']}" for e in entries if e["problems"]]
        targets = sorted((e["target"] for e in entries), key=lambda target: (len(target), target))
        kernels = "/".join(str(count) for count in sorted({e["kernels"] for e in entries}))
        registers = " / ".join(str(most.get(group, "-")) for group in ("update", "general update", "analyze"))
        spilled = f"{max(e['stack_bytes'] for e in entries)} / {max(e['spill_bytes'] for e in entries)}"
        rows.append(
            (f"{compiler} {version}", ", ".join(targets), kernels, registers, spilled, ", ".join(failed) or "0")
        )
    columns = ("Compiler", "Compiled for, not run", "kernels", "registers: update / general / statistics",
               "bytes: stack / spilled", "not as they should be")  # fmt: skip
    return "\n" + table(columns, rows) + "\n" + counted(report)


def counted(report: Report) -> str:
    """Instructions per element of some updates, beside those of the sketches."""
    rows: list[tuple[object, ...]] = []
    counts = {
        (e["compiler"], e["version"], e["gradient"], e["parameter"], e["amsgrad"], e["moments"]): e["instructions"]
        for e in report["instructions per element"]
    }
    newest = dict(sorted(key[:2] for key in counts))
    for compiler, version in newest.items():
        for gradient, parameter, amsgrad, words in COUNTED_KINDS:
            found = [counts.get((compiler, version, gradient, parameter, amsgrad, form)) for form in FORMS]
            if None not in found:
                added = f"{found[2] - found[0]:+.3g}"
                rows.append((f"{compiler} {version}", words, *(f"{count:.4g}" for count in found), added))
    study = "; ".join(f"{what}: {count}" for what, count in report["study"].items())
    columns = ("Compiler", "Update", *FORMS, "packed16 - float32")
    return (
        f"Instructions an element of the loop over whole vectors, counted in code for {report['counted on']} on the\n"
        f"shortest way around, with the moments as named. The study before the kernels counted: {study}.\n\n"
        + table(columns, rows)
    )


def pages() -> dict[str, str]:
    """Text by path, relative to docs/."""
    reports = load()
    names = (*(path.name for path in DOCS.glob("*.md")), "../README.md")
    embedded = {name: with_results((DOCS / name).read_text(encoding="utf-8"), reports) for name in names}
    return {**embedded, "benchmarks.md": benchmarks(reports), "status.md": status(reports)}


def with_results(text: str, reports: dict[str, Report]) -> str:
    """A page with the tables that it asks for."""

    def filled(match: re.Match[str]) -> str:
        report = reports.get(match["name"])
        if report is None:
            found = "\nNot measured yet.\n"
        elif "compiled" in report:
            found = "\n" + origin(match["name"], report) + compiled(report)
        elif "comparisons" in report:
            found = first_screen(report) + "\n" + origin(match["name"], report, packages=("torch",))
        else:
            shown = trainings if "trainings" in report else offload
            found = "\n" + origin(match["name"], report) + shown(report)
        return f"{match['begin']}{found}\n{match['end']}"

    return EMBEDDED.sub(filled, text)


if __name__ == "__main__":
    for page, written in pages().items():
        (DOCS / page).write_text(written, encoding="utf-8")
