"""The tests for CUDA hardware run through without any, on the host simulator: a simulation, see ``cuda_runs``."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from fused_adamw import host_simulator

HERE = pathlib.Path(__file__).parent


@pytest.mark.integration
@pytest.mark.skipif(host_simulator.unavailable() is not None, reason=str(host_simulator.unavailable()))
def test_the_tests_for_hardware_pass_on_the_simulator() -> None:
    environment = os.environ | {"RUDA_REHEARSAL": "1"}
    files = [str(HERE / name) for name in ("test_cuda.py", "test_cuda_optimizer.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
