"""Every kernel against what PyTorch's own AdamW computed: tools/fused_adamw/pytorch_fixtures.json.

Here the CPU operator at every level and the CUDA source on the host simulator; the Triton kernels in simulated_ptx.py,
hardware in test_cuda.py.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import fixture_runs
import pytest
from cases import FIXTURE_CASES

from fused_adamw import host_simulator
from ruda_optim.fused_adamw.kernels import cpu
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc

EVERY_FIXTURE = pytest.mark.parametrize("index", range(12), ids=[case.name for case in FIXTURE_CASES])


@pytest.mark.parametrize(
    ("level", "name"), [("4", "x86-64-v4"), ("3", "x86-64-v3"), ("2", "x86-64-v2"), ("0", "plain (no x86-64 level)")]
)
def test_cpu_operator_agrees_with_torch_at_every_level(level, name) -> None:
    environment = {**os.environ, "RUDA_CPU_LEVEL": level, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(pathlib.Path(fixture_runs.__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if f"got '{level}'" in done.stderr:
        pytest.skip(f"level {level} is not part of this build or not for this processor")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name


@pytest.fixture(scope="module")
def simulated():
    if host_simulator.unavailable() is not None:
        pytest.skip(host_simulator.unavailable())
    return nvrtc.record(host_simulator.NAME, host_simulator.HostLauncher(host_simulator.build(), seed=0))


@EVERY_FIXTURE
def test_cuda_source_on_the_host_simulator_agrees_with_torch(index, simulated) -> None:
    fixture_runs.check_fixture(simulated, index)


SCALED = [number for number, case in enumerate(FIXTURE_CASES) if case.gradient_scale != 1.0]


@pytest.mark.parametrize(
    ("index", "mistake"), [(index, "no correction") for index in range(12)] + [(index, "no scale") for index in SCALED]
)
def test_a_kernel_with_a_mistake_does_not_agree(index, mistake) -> None:
    """The bounds can fail."""
    right = cpu.kernels()

    def wrong(table, coefficients, inverse_scale, clip_factor):
        if mistake == "no correction":
            coefficients[:, 4:6] = 1.0
        right.adamw_scaled(table, coefficients, 1.0 if mistake == "no scale" else inverse_scale, clip_factor)

    with pytest.raises(AssertionError, match=r"step 1, .*elements out of bounds"):
        fixture_runs.check_fixture(replace(right, adamw_scaled=wrong), index)
