"""Runs the tasks of the regression suites one by one and writes down what happened. Standard library only.

A task is one command. Its status: ``passed``; ``failed``; ``timeout``; ``interrupted``, when the runner was told to
end; ``blocked``, when a tool is missing, or when tests were skipped for a reason that the task does not allow. A
blocked task proves nothing: it is never a pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, BLOCKED, TIMEOUT, INTERRUPTED = "passed", "failed", "blocked", "timeout", "interrupted"
EXIT_CODES = {PASSED: 0, FAILED: 1, BLOCKED: 3, TIMEOUT: 4}  # 2 is a wrong command line
# Short names, and how test names say that a test is about a gradient of this dtype; cases.py names the cases.
DTYPES = {
    short: re.compile(rf"\b(?:{short}\b|{long} gradient\b|gradient [^,]*, {long}\b)")
    for short, long in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"))
}
DTYPE_NAMES = {short.replace("fp", "f"): short for short in DTYPES}
"""Other names of the same dtypes."""
LOG_CHARACTERS = 200_000  # kept of one task's output: its first and its last half
_OFFLINE = {
    "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "http_proxy": "http://127.0.0.1:9",  # the discard port: a download fails at once instead of succeeding unseen
    "https_proxy": "http://127.0.0.1:9",
}


@dataclass(frozen=True)
class Task:
    """One command of a suite.

    Attributes:
        suite, name: what it is called in tables and reports.
        command: the words of the command line.
        device: ``cpu``, ``cuda``, or in words where nothing of ours runs on either.
        compiler: ``cpu``, ``nvrtc``, ``ptx`` or None.
        dtype: of the gradients, where the task is about one.
        environment: variables to set; a value of None removes one.
        needs: names of tools in the probe's answer.
        gpu: without one the task has failed, not merely been blocked.
        simulation: results come from a simulator or an interpreter and say nothing about hardware.
        pytest: the command is pytest: its results are read test by test.
        may_skip: patterns of reasons for which a test may be skipped without blocking the task.
    """

    suite: str
    name: str
    command: tuple[str, ...]
    device: str = "cpu"
    compiler: str | None = None
    dtype: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    gpu: bool = False
    simulation: bool = False
    pytest: bool = False
    may_skip: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What became of a task."""

    task: Task
    status: str
    reason: str = ""
    started: str = ""
    duration: float = 0.0
    returncode: int | None = None
    log: str = ""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Variables that were set for the command; None: one that was taken away."""
    tests: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """Reasons for skips, with how many tests gave them."""
    by_dtype: dict[str, str] = field(default_factory=dict)
    """The status of the tests about one gradient dtype, where test names tell it."""

    def as_dict(self) -> dict[str, Any]:
        task = self.task
        return {
            "suite": task.suite,
            "task": task.name,
            "status": self.status,
            "reason": portable(self.reason),
            "simulation": task.simulation,
            "command": " ".join(portable(word) for word in task.command),
            "environment": {key: value and portable(value) for key, value in self.environment.items()},
            "started": self.started,
            "duration s": round(self.duration, 2),
            "exit code": self.returncode,
            "tests": self.tests,
            "skipped": self.skipped,
            "log": self.log,
        }

    def rows(self, gpu: str | None) -> list[dict[str, Any]]:
        """The task for the status table, and its tests about each gradient dtype. ``gpu``: the device's name."""
        task = self.task
        device = gpu or "no GPU" if task.device == "cuda" else task.device
        row = {"suite": task.suite, "task": task.name, "device": device, "compiler": task.compiler}
        rest = {"simulation": task.simulation, "duration s": round(self.duration, 2)}
        statuses = self.by_dtype | {task.dtype: self.status}
        return [{**row, "dtype": dtype, "status": status, **rest} for dtype, status in statuses.items()]


class Stop:
    """Whether the runner was told to end. Inside ``with``, a signal is noted in ``signal`` and does nothing else.

    Nothing is raised where it arrives: no process is started and then forgotten, no file is left half written.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.signal = signal.Signals(number)

    @property
    def reason(self) -> str:
        return "" if self.signal is None else f"ended by {self.signal.name}"


def call(
    command: Iterable[str], environment: Mapping[str, str], log: BinaryIO, timeout: float, stop: Stop
) -> int | None:
    """Run a command until it ends, ``timeout`` seconds are over or the runner was told to end.

    Returns:
        The exit code; None if it had to be ended. Whatever it started has ended too.
    """
    deadline = time.monotonic() + timeout
    process = subprocess.Popen(
        list(command),
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a process group: what it starts ends with it
    )
    try:
        while True:
            left = deadline - time.monotonic()
            try:
                return process.wait(max(0.0, min(left, 0.2)))
            except subprocess.TimeoutExpired:
                if left <= 0 or stop.signal is not None:
                    return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its whole group: politely, and after five seconds for certain."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def probe(stop: Stop, python: str = sys.executable) -> dict[str, Any] | None:
    """The answer of probe.py: ``missing`` (tool -> reason or None) and ``environment``. None: told to end."""
    command = [python, str(Path(__file__).with_name("probe.py"))]
    with tempfile.TemporaryFile() as log:
        returncode = call(command, variables({}), log, 600.0, stop)
        log.seek(0)
        printed = log.read().decode(errors="replace")
    if stop.signal is not None:
        return None
    if returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{printed}")
    return json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))


def variables(changes: Mapping[str, str | None], *, offline: bool = False) -> dict[str, str]:
    """The environment of a task: this process's, the tools on the module path, and the task's own changes."""
    found = dict(os.environ)
    paths = [str(ROOT / "tools"), *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    found["PYTHONUNBUFFERED"] = "1"
    if offline:
        found.update(_OFFLINE)
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def obstacle(task: Task, missing: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Status and reason of a task that cannot start here, or None."""
    if task.gpu and missing["gpu"] is not None:
        return FAILED, f"the suite '{task.suite}' {missing['gpu']}; run it where there is one, or leave it out"
    for tool in task.needs:
        if missing[tool] is not None:
            return BLOCKED, str(missing[tool])
    return None


def run(task: Task, missing: Mapping[str, str | None], timeout: float, stop: Stop, *, offline: bool = False) -> Outcome:
    """Run one task to its end, for ``timeout`` seconds, or until the runner was told to end."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    hindered = obstacle(task, missing)
    if hindered is not None:
        return Outcome(task, *hindered, started=started, environment=dict(task.environment))
    if timeout <= 0:
        return Outcome(task, TIMEOUT, "not started: the time for all tasks is over", started=started)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command, changes = list(task.command), dict(task.environment)
        if task.pytest:
            command.append(f"--junitxml={results}")
            changes["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed here takes no part
        log_path = Path(folder) / "log"
        begin = time.monotonic()
        with log_path.open("wb") as log:
            returncode = call(command, variables(changes, offline=offline), log, timeout, stop)
        outcome = Outcome(task, PASSED, "", started, time.monotonic() - begin, returncode, environment=changes)
        outcome.log = shortened(portable(log_path.read_text(encoding="utf-8", errors="replace"), folder))
        if returncode is None and stop.signal is not None:
            outcome.status, outcome.reason = INTERRUPTED, stop.reason
        elif returncode is None:
            outcome.status, outcome.reason = TIMEOUT, f"still running after {timeout:.0f} s"
        elif task.pytest:
            judge_tests(outcome, results)
        elif returncode != 0:
            outcome.status, outcome.reason = FAILED, f"exit code {returncode}: {last_line(outcome.log)}"
    return outcome


def judge_tests(outcome: Outcome, results: Path) -> None:
    """Status and counts of a pytest run, from its exit code and its result file."""
    if not results.exists():
        outcome.status = FAILED
        outcome.reason = f"pytest ended with exit code {outcome.returncode} and left no results"
        return
    statuses: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    dtypes: dict[str, set[str]] = {}
    failures = []
    for case in ET.parse(results).iter("testcase"):
        name = case.get("name", "")
        status = PASSED
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            status = FAILED
            failures.append(name)
        elif skip is not None:
            reason = skip.get("message", "")
            skipped[reason] += 1
            allowed = any(re.search(pattern, reason) for pattern in outcome.task.may_skip)
            status = "skipped" if allowed else BLOCKED
        statuses[status] += 1
        for dtype, pattern in DTYPES.items():
            if pattern.search(name):
                dtypes.setdefault(dtype, set()).add(status)
    outcome.tests, outcome.skipped = dict(statuses), dict(skipped)
    outcome.by_dtype = {dtype: worst(dtypes[dtype]) for dtype in DTYPES if dtype in dtypes}
    if statuses[FAILED]:
        outcome.status = FAILED
        outcome.reason = f"{statuses[FAILED]} of {statuses.total()} tests failed: {', '.join(failures[:5])}"
    elif outcome.returncode != 0:
        outcome.status = FAILED
        outcome.reason = f"pytest ended with exit code {outcome.returncode}: {last_line(outcome.log)}"
    elif statuses[BLOCKED]:
        outcome.status = BLOCKED
        reasons = sorted(reason for reason in skipped if not any(re.search(p, reason) for p in outcome.task.may_skip))
        outcome.reason = f"{statuses[BLOCKED]} tests could not run: {'; '.join(reasons)}"
    elif not statuses[PASSED]:
        outcome.status, outcome.reason = BLOCKED, "no test ran"
    else:
        outcome.reason = f"{statuses[PASSED]} tests" + (f", {statuses['skipped']} skipped" * bool(statuses["skipped"]))


def worst(statuses: Iterable[str]) -> str:
    """Failed before interrupted, timeout, blocked; passed only if nothing is worse and something passed."""
    found = set(statuses)
    order = (FAILED, INTERRUPTED, TIMEOUT, BLOCKED, PASSED)
    return next((status for status in order if status in found), BLOCKED)


def portable(text: str, scratch: str | None = None) -> str:
    """Without the paths of this machine, so that a report can be published and compared."""
    places = {str(ROOT): ".", sys.executable: "python", sys.prefix: "<python>", sys.base_prefix: "<python>",
              tempfile.gettempdir(): "<tmp>", str(Path.home()): "~"}  # fmt: skip
    if scratch:
        places[scratch] = "<scratch>"
    for place in sorted(places, key=len, reverse=True):
        if place not in ("/", "/usr", "/usr/local"):  # too general: they are in many paths of no interest
            text = text.replace(place, places[place])
    return text


def shortened(text: str) -> str:
    if len(text) <= LOG_CHARACTERS:
        return text
    half = LOG_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
