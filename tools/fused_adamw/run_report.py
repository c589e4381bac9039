"""The JSON file that one call of the regression runner leaves. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fused_adamw.execute import INTERRUPTED, PASSED, ROOT, Outcome, Task, portable, worst
from result_variables import result_variables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 1
_DECIDES = ("variables", "versions", "gpu", "cuda", "cpu", "python")  # of a report's environment
RUNNING = "running"
SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".json", ".toml", ".txt", ".sh", ".cmake")
SOURCE_FOLDERS = ("src", "tests", "tools", "benchmarks", "cmake")


def source_hashes() -> dict[str, str]:
    """SHA-256 of every file that decides what was run, by its path in the repository."""
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]
    for folder in SOURCE_FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCE_SUFFIXES and path.is_file()]
    results = ROOT / "benchmarks" / "results"
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
        if results not in path.parents
    }


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def claim(wanted: Path) -> Path:
    """An empty new file: ``wanted``, or a name with a number where a report, or the numbers of one, already are."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = wanted if number == 1 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        number += 1
        if any(other.name.startswith(f"{path.stem}-bench-") for other in path.parent.iterdir()):
            continue
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return path


class Before:
    """An earlier report, whose passed tasks need not be run again.

    Args:
        content: what it says.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def outcome(self, task: Task, now: Report) -> Outcome | None:
        """What became of a task, if it passed and nothing that decides it has changed."""
        then = self._content
        if not now.same(then):
            return None
        command = _without_output(" ".join(map(portable, task.command)))
        for entry in then["tasks"]:
            same = (entry["suite"], entry["task"]) == (task.suite, task.name)
            if same and entry["status"] == PASSED and _without_output(entry["command"]) == command:
                dtypes = {
                    row["dtype"]: row["status"]
                    for row in then["runs"]
                    if (row["suite"], row["task"]) == (task.suite, task.name) and row["dtype"] != task.dtype
                }
                return Outcome(
                    task, PASSED, entry["reason"], entry["started"], entry["duration s"], entry["exit code"],
                    entry["log"], entry["environment"], entry["tests"], entry["skipped"], dtypes,
                )  # fmt: skip
        return None


def _without_output(command: str) -> str:
    """The numbers of a benchmark lie beside the report of their run."""
    return re.sub(r" --output \S+", "", command)


def last(wanted: Path) -> Before | None:
    """The newest report of this name, numbered or not, if there is one that can be read."""
    named = re.compile(rf"{re.escape(wanted.stem)}(-\d+)?{re.escape(wanted.suffix)}")
    found = [path for path in wanted.parent.glob(f"*{wanted.suffix}") if named.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(ValueError):  # cut off before it had anything to say
            return Before(json.loads(path.read_text(encoding="utf-8")))
    return None


class Report:
    """Written from the first second (``running``) and anew after each task, so that a killed run leaves its part.

    Args:
        path: where to write: a file of this run's own, see :func:`claim`.
        command: the runner's command line.
        options: its options.
    """

    def __init__(self, path: Path, command: list[str], options: Mapping[str, Any]) -> None:
        self._path = path
        self._running: str | None = None
        self._status = RUNNING
        self._reason = ""
        self.outcomes: list[Outcome] = []
        uncommitted = git("status", "--porcelain", "--untracked-files=no")
        self._head: dict[str, Any] = {
            "format": FORMAT,
            "what": "a run of tools/run_adamw_regressions.py",
            "environment": {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": " ".join(["python", *map(portable, command)]),
                "commit": git("rev-parse", "HEAD"),
                "uncommitted changes": None if uncommitted is None else bool(uncommitted),
                "variables": result_variables(),
                "gpu": None,
            },
            "missing": {},
            "options": dict(options),
        }
        self._write()
        self._head["sources"] = source_hashes()

    @property
    def status(self) -> str:
        return self._status

    def found(self, answer: Mapping[str, Any]) -> None:
        """Take in the probe's answer."""
        self._head["environment"].update(answer["environment"])
        self._head["missing"] = {tool: portable(why) for tool, why in answer["missing"].items() if why is not None}
        self._write()

    def same(self, then: Mapping[str, Any]) -> bool:
        """Whether an earlier report is of the same sources, tools, variables and device."""
        environment = {key: value for key, value in self._head["environment"].items() if key in _DECIDES}
        return (
            all(then.get(key) == self._head[key] for key in ("format", "sources", "missing"))
            and {key: then["environment"].get(key) for key in environment} == environment
        )

    def begin(self, task: Task) -> None:
        self._running = f"{task.suite}: {task.name}"
        self._write()

    def add(self, outcome: Outcome) -> None:
        self._running = None
        self.outcomes.append(outcome)
        self._write()

    def finish(self, interruption: str = "") -> None:
        """The last word. ``interruption``: why the run ended before its tasks did."""
        self._status = INTERRUPTED if interruption else worst(outcome.status for outcome in self.outcomes)
        self._reason = interruption
        self._write()

    def _write(self) -> None:
        gpu = self._head["environment"]["gpu"]
        content = {
            **self._head,
            "complete": self._status not in (RUNNING, INTERRUPTED),
            "status": self._status,
            "reason": portable(self._reason),
            "running": self._running,
            "runs": [row for outcome in self.outcomes for row in outcome.rows(gpu)],
            "tasks": [outcome.as_dict() for outcome in self.outcomes],
        }
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self._path)
