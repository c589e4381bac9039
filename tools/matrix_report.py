"""Adds what tools/matrix.sh found out about a pair of versions to benchmarks/results/versions.json.

    python tools/matrix_report.py PYTHON TORCH STAND_INS STATUS WORDS [--output FILE]

PYTHON and TORCH are versions, STAND_INS 1 if tools/stand_ins.py took the place of NVIDIA's libraries, STATUS what the
tool calls it, and WORDS the last line of pytest, or why nothing ran. An earlier entry of the pair is replaced. Standard
library only.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "versions.json"
WHAT = "The core tests with other versions of Python and torch, on a CPU."
COUNTS = ("passed", "failed", "errors", "skipped")


def entry(python: str, torch: str, stand_ins: bool, status: str, words: str) -> dict[str, Any]:
    found = {
        name.rstrip("s"): int(count) for count, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", words)
    }
    counts = {name: found.get(name.rstrip("s"), 0) for name in COUNTS} if found else {"why": words}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"python": python, "torch": torch, "stand-ins for CUDA's libraries": stand_ins, "status": status, **counts,
            "date": date, "machine": platform.machine()}  # fmt: skip


def added(report: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    kept = [old for old in report.get("tried", []) if (old["python"], old["torch"]) != (new["python"], new["torch"])]
    tried = sorted([*kept, new], key=lambda one: [_numbers(one["torch"]), _numbers(one["python"])])
    return {"what": WHAT, "environment": {"date": new["date"]}, "tried": tried}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("python", "torch", "stand_ins", "status", "words"):
        parser.add_argument(name)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
    new = entry(given.python, given.torch, given.stand_ins == "1", given.status, given.words)
    given.output.write_text(json.dumps(added(before, new), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
