"""A run of the demo that is killed again and again ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
KILLED_RUNS = ROOT / "tests" / "support" / "killed_runs.py"
# BF16 with split masters, clipping, and dropout, whose random numbers must continue too. Tiny, and many checkpoints.
DEMO = (
    "--no-compare --dtype bf16 --max-grad-norm 1.0 --dropout 0.1 --checkpoint-every 2 --evaluate-every 1000 "
    "--batch 2 --context 16 --layers 1 --width 16 --heads 2"
).split()


def run(folder, seed, kills, steps, moments):
    """The final checkpoint of a run with so many kills, and what was printed about them."""
    arguments = [*DEMO, "--steps", str(steps), "--moments", moments, "--text", str(ROOT / "README.md")]
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "support" / "killed_runs.py"),
            str(folder),
            str(seed),
            str(kills),
            *arguments,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return torch.load(folder / "checkpoint-ruda.pt", weights_only=True), result.stdout


def differences(left, right, where=""):
    """Paths of the entries that differ, but for the measured times."""
    if isinstance(left, dict):
        if set(left) != set(right):
            return [f"{where}: keys {set(left) ^ set(right)}"]
        return [
            d
            for key in left
            if key != "optimizer_seconds"
            for d in differences(left[key], right[key], f"{where}/{key}")
        ]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{where}: lengths {len(left)}, {len(right)}"]
        return [d for i, pair in enumerate(zip(left, right, strict=True)) for d in differences(*pair, f"{where}/{i}")]
    if not isinstance(left, torch.Tensor):
        return [] if repr(left) == repr(right) else [where]
    # Bit for bit: the 16 bits beside a BF16 parameter are typed BF16 and may spell NaN, which equals nothing.
    bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
    return [] if torch.equal(*bits) else [where]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the runs")
@pytest.mark.parametrize(
    ("seed", "kills", "steps", "moments"),
    [
        (0, 6, 40, "packed16"),
        *(
            pytest.param(seed, 40, 300, moments, marks=pytest.mark.slow)
            for seed, moments in enumerate(("float32", "bfloat16", "packed16"), 1)
        ),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path, seed, kills, steps, moments):
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, _ = run(tmp_path / "undisturbed", seed, 0, steps, moments)
    killed, printed = run(tmp_path / "killed", seed, kills, steps, moments)
    assert printed.count("killed ") == kills
    assert "written" in printed or "replace" in printed or "fsync" in printed
    assert undisturbed["step"] == killed["step"] == steps
    assert differences(undisturbed, killed) == []
    names = {key for state in killed["optimizer"]["state"].values() for key in state}
    kept = {"packed_moments"} if moments == "packed16" else {"exp_avg", "exp_avg_sq"}
    assert names == {"step", *kept, "master_remainder"}
