"""What tools/matrix.sh needs: its results' file, and stand-ins for libraries that a torch for CUDA links."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def loaded(path: str):
    specification = importlib.util.spec_from_file_location(pathlib.Path(path).stem, ROOT / path)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_pair_has_one_entry_the_last(tmp_path) -> None:
    output = tmp_path / "versions.json"
    for words in (
        ("3.12.1", "2.14.1", "1", "FAILED", "2 failed, 3100 passed, 1 error in 9s"),
        ("3.11.7", "2.9.0", "0", "passed", "7 passed, 2 skipped, 7 deselected in 371.87s (0:06:11)"),
        ("3.12.1", "2.14.1", "1", "passed", "3102 passed in 9s"),
        ("3.11.7", "2.14.1", "0", "FAILED", "ruda-optim was not built"),
    ):
        subprocess.run(
            [sys.executable, "tools/matrix_report.py", *words, "--output", str(output)], cwd=ROOT, check=True
        )
    report = json.loads(output.read_text())
    keys = ("torch", "python", "status", "passed", "failed", "errors", "skipped", "why")
    assert [tuple(one.get(key) for key in keys) for one in report["tried"]] == [
        ("2.9.0", "3.11.7", "passed", 7, 0, 0, 2, None),
        ("2.14.1", "3.11.7", "FAILED", None, None, None, None, "ruda-optim was not built"),
        ("2.14.1", "3.12.1", "passed", 3102, 0, 0, 0, None),
    ]
    text = loaded("docs/generate.py").versions_tried({"versions.json": report})
    assert "| 2.14.1 | 3.12.1 | **passed** | 3102 | 0 | 0 | stand-ins |" in text


def test_errors_of_a_run_are_counted() -> None:
    entry = loaded("tools/matrix_report.py").entry(
        "3.11.7", "2.13.0", False, "FAILED", "2 failed, 31 passed, 1 error in 9s"
    )
    assert (entry["failed"], entry["passed"], entry["errors"], entry["skipped"]) == (2, 31, 1, 0)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc on Linux")
def test_a_library_without_what_it_links_can_be_loaded_with_stand_ins(tmp_path) -> None:
    """Functions with and without a version, one of them needed as the library is loaded."""
    folder, away = tmp_path / "lib", tmp_path / "away"
    folder.mkdir()
    away.mkdir()

    def build(name: str, text: str, *words: str) -> None:
        (tmp_path / "source.c").write_text(text)
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(tmp_path / "source.c"), *words]
        subprocess.run(command, check=True)

    (tmp_path / "map").write_text("CUX_1 { global: *; };\n")
    versioned = f"-Wl,--version-script={tmp_path / 'map'}"
    build("libcux.so.1", "int cuxAnswer(void) { return 7; }", versioned, "-o", str(away / "libcux.so.1"))
    build("libcuy.so.2", "int cuyAnswer(void) { return 8; }", "-o", str(away / "libcuy.so.2"))
    text = "int cuxAnswer(void); int cuyAnswer(void); int (*table)(void) = cuyAnswer; int torch(void) "
    text += "{ return cuxAnswer() + table(); }"
    linked = [str(away / name) for name in ("libcux.so.1", "libcuy.so.2")]
    build("libtorch_x.so", text, *linked, f"-Wl,-rpath,{folder}", "-Wl,-z,now", "-o", str(folder / "libtorch_x.so"))
    program = f"import ctypes; print(ctypes.CDLL({str(folder / 'libtorch_x.so')!r}).torch())"
    before = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "cannot open shared object file" in before.stderr
    made = subprocess.run(
        [sys.executable, "tools/stand_ins.py", str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert made.stdout.split("\n")[:2] == ["a stand-in for libcux.so.1", "a stand-in for libcuy.so.2"]
    after = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert after.stdout == f"{2 * 100}\n", "no device, from both"
