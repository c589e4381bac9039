"""RUDA_CPU_PREFETCH: other timing, the same bits, and a clear word for anything else."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "support" / "kernel_runs.py"


def run(prefetch: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RUDA_CPU_PREFETCH": prefetch}
    command = [sys.executable, str(SCRIPT), "2"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_prefetching_changes_no_bit():
    digests = [run(prefetch) for prefetch in ("0", "1")]
    assert [digest.returncode for digest in digests] == [0, 0], [digest.stderr for digest in digests]
    assert digests[0].stdout == digests[1].stdout
    assert digests[0].stdout.strip()


@pytest.mark.parametrize("prefetch", ["yes", "2"])
def test_other_values_are_refused(prefetch):
    answer = run(prefetch)
    assert answer.returncode != 0
    assert f"RUDA_CPU_PREFETCH must be 0 or 1; got '{prefetch}'" in answer.stderr
