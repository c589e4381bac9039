"""Sharded training on this machine: real processes that talk over gloo, one start per number of processes.

The checks are functions in tests/sharded_*.py; each is reported here as a test of its own. A process that hangs is
ended and fails the tests it did not get to.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import sharded_worker

TESTS = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.distributed
LIMIT = 600
"""Seconds that all checks of one number of processes may take together; they need about 60 on two idle cores."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(world)``: what each check on this many processes said, per rank. 4 ranks save what 2 and 1 load."""
    folder = tmp_path_factory.mktemp("sharding")
    done: dict[int, dict[str, list[str | None]]] = {}

    def results(world: int) -> dict[str, list[str | None]]:
        for needed in (4, world):
            if needed not in done:
                done[needed] = _run(needed, folder)
        return done[world]

    return results


def _run(world: int, folder: pathlib.Path) -> dict[str, list[str | None]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), *sys.path]))}
    environment.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    logs = [(folder / f"log-{world}-{rank}").open("w", encoding="utf-8") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "sharded_worker.py"), str(rank), str(world), str(folder)],
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        for process in processes:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # what is missing in the results fails below
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    results: dict[str, list[str | None]] = {}
    for rank in range(world):
        path = folder / f"results-{world}-{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for entry in map(json.loads, lines):
            results.setdefault(entry["check"], []).append(entry["error"])
    codes = [process.returncode for process in processes]
    if any(codes):
        tails = [(folder / f"log-{world}-{rank}").read_text(encoding="utf-8")[-1500:] for rank in range(world)]
        results["end"] = [f"rank {rank} ended with {codes[rank]}: {tails[rank]}" for rank in range(world)]
    return results


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in (4, 2, 1) for name in [*sharded_worker.names(world), "end"]]
)
def test_sharded_training(runs, world: int, name: str) -> None:
    results = runs(world)
    if name == "end":
        assert "end" not in results, "\n".join(map(str, results["end"]))
        return
    errors = [error for error in results.get(name, []) if error is not None]
    assert not errors, "\n".join(errors)
    assert len(results.get(name, [])) == world, "some rank did not get to this check; see the first failure"
