"""RUDA_CPU_PREFETCH: other timing, the same bits, and a clear word for anything else."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ruda_optim.fused_adamw.kernels import library

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for an instruction of x86-64")
def test_the_compiler_kept_every_prefetch() -> None:
    """A function that only prefetches has no effect to a compiler, which may drop its calls: a fifth of the speed.

    A stretch of 64 elements has 4 lines of each FP32 array and 2 of each in 16 bits. FP32 moments: 4 arrays, 5 with
    AMSGrad. BF16: 2 of FP32 and 2 or 3 in 16 bits; packed: 2 and 1 or 2; both of them in two copies of the loop.
    """
    lines = 4 * (4 + 5) + 2 * (2 * 4 + 2 * 2 + 2 * 4 + 3 * 2) + 2 * (2 * 4 + 1 * 2 + 2 * 4 + 2 * 2)
    levels = 3
    code = pathlib.Path(library.path()).read_bytes()
    found = sum(code[at + 2] >> 6 != 3 and code[at + 2] >> 3 & 7 < 4 for at in _places(code, b"\x0f\x18"))
    assert found >= lines * levels


def _places(code: bytes, needle: bytes) -> Iterator[int]:
    at = code.find(needle)
    while 0 <= at < len(code) - 2:
        yield at
        at = code.find(needle, at + 1)
