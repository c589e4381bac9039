"""The sharding page's first program, changed for torchrun as the page says, and started by its command."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import sys

import pytest
from docs_pages import DOCS, blocks


@pytest.mark.distributed
def test_the_page_runs_under_torchrun(tmp_path: pathlib.Path) -> None:
    parts = list(blocks((DOCS / "sharding.md").read_text(encoding="utf-8")))
    program, prints = parts[0].body, parts[1].body
    replaced = next(block.body for block in parts if block.title == "needs torchrun")
    start = program.index("dist.init_process_group(")
    end = program.index("\n", program.index("mesh = init_device_mesh("))
    (tmp_path / "train.py").write_text(program[:start] + replaced + program[end:] + "\ndist.destroy_process_group()\n")
    command = shlex.split(next(block.body for block in parts if block.language == "sh").replace(" 4 ", " 2 "))
    assert command[0] == "torchrun"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    # Both processes write to one pipe, and the end of a line may come after the other's words.
    assert sorted(result.stdout.replace("\n", "")) == sorted(2 * prints.replace("\n", ""))
