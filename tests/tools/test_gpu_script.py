"""``make gpu`` without a GPU: what it says when something is missing, and a rehearsal of everything but the kernels."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "gpu.sh"


def script(python: object, out: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [str(SCRIPT), str(python), str(out)], env=environment, capture_output=True, text=True, check=False
    )


def without(tmp_path: pathlib.Path, *modules: str) -> dict[str, str]:
    """Variables that make modules look as if they were not installed."""
    hide = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n"
    finder = (
        "import importlib.util as util\nreal = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name in {modules!r} else real(name, *rest)\n"
    )
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(hide + finder)
    return {"PYTHONPATH": str(folder)}


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = script(sys.executable, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"tools/gpu.sh: torch {torch.__version__} sees no GPU (it is built without CUDA)"
    assert done.stderr.splitlines() == [said]


@pytest.mark.parametrize("modules", [("torch",), ("pytest", "hypothesis")])
def test_what_python_lacks_is_named_with_the_command_that_brings_it(tmp_path: pathlib.Path, modules) -> None:
    done = script(sys.executable, tmp_path, **without(tmp_path, *modules))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"lacks {', '.join(modules)}: {sys.executable} -m pip install {' '.join(modules)}")


def test_a_python_that_is_not_there(tmp_path: pathlib.Path) -> None:
    done = script("no-such-python", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("tools/gpu.sh: 'no-such-python' is not found")


@pytest.mark.integration
def test_a_rehearsal(tmp_path: pathlib.Path) -> None:
    """In a copy of the sources, without rich: build, runner, report and resumption; suites that need no GPU."""
    work, out = tmp_path / "work", tmp_path / "out"
    copied = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout
    for name in filter(None, copied.decode().split("\0")):
        if (ROOT / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes((ROOT / name).read_bytes())
            (work / name).chmod((ROOT / name).stat().st_mode)
    variables = {
        **os.environ,
        **without(tmp_path, "rich"),
        "RUDA_GPU_SUITES": "--suite reference --suite bench --device cpu --elements 4096 --iterations 2 --samples 3",
    }
    command = [str(work / "tools" / "gpu.sh"), sys.executable, str(out)]
    for again in (False, True):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("passed before" in done.stdout) == again
        report = json.loads((out / ("gpu-2.json" if again else "gpu.json")).read_text())
        assert (report["status"], report["complete"]) == ("passed", True)
        assert {run["suite"] for run in report["runs"]} == {"reference", "bench"}
    assert all(path.is_file() for path in out.iterdir()), "one folder, flat"
    assert len(list(out.glob("*-bench-*.json"))) == 1, "what passed is not measured again"
