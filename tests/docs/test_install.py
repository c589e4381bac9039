"""A stranger's first minutes: the lines of the README in an empty folder and a new environment, then its code."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest
from docs_pages import DOCS, ROOT, blocks

PAGES = (ROOT / "README.md", DOCS / "index.md")
ADDRESS = "<address of this repository>"


def install_lines(page: pathlib.Path) -> str:
    return next(block.body for block in blocks(page.read_text(encoding="utf-8")) if block.language == "sh")


def run(*command: str | pathlib.Path, cwd: pathlib.Path, path: str) -> str:
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_both_pages_give_the_same_lines() -> None:
    assert install_lines(PAGES[0]) == install_lines(PAGES[1])
    assert install_lines(PAGES[0]).startswith(f"git clone {ADDRESS} ruda-optim\n")


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs git and a clone of it")
def test_pasted_lines_work(tmp_path: pathlib.Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path, path=os.environ["PATH"])
    python = tmp_path / "venv" / "bin" / "python"
    # The lines want torch in the environment. Ours is borrowed, with the build tools, in place of a download: a path
    # file adds the folder, and not what the path files inside of it add, such as the editable install of this source.
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path, path=os.environ["PATH"])
    (pathlib.Path(site.strip()) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    folder = tmp_path / "empty"
    folder.mkdir()
    path = f"{python.parent}:{os.environ['PATH']}"
    output = run("bash", "-ec", install_lines(PAGES[0]).replace(ADDRESS, f"'{ROOT}'"), cwd=folder, path=path)
    assert "checks passed" in output

    for page in PAGES:
        parts = list(blocks(page.read_text(encoding="utf-8")))
        program = "\n".join(block.body for block in parts if block.language == "python")
        expected = "".join(f"{block.body}\n" for block in parts if block.title == "prints")
        where = "import ruda_torch, sys; assert ruda_torch.__file__.startswith(sys.prefix), ruda_torch.__file__\n"
        printed = run(python, "-W", "error", "-c", where + program, cwd=tmp_path, path=path)
        assert not expected or printed == expected
