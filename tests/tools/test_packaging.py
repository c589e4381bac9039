"""What is shipped: the operator library's symbols, what importing does, the build without the operator."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest
import torch  # noqa: F401  the library's symbols resolve against it

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVELS = ("v4", "v3", "v2")

# Every function of torch that the library may need. Each is in torch 2.10, the oldest torch that ruda-optim accepts:
# look a new one up in that version's torch/csrc/stable/c/shim.h and torch/csrc/inductor/aoti_torch/c/shim.h first.
TORCH_2_10 = frozenset(
    """
    aoti_torch_abi_version aoti_torch_delete_library_object aoti_torch_delete_tensor_object
    aoti_torch_dtype_bfloat16 aoti_torch_dtype_float16 aoti_torch_dtype_float32 aoti_torch_dtype_float64
    aoti_torch_dtype_int16 aoti_torch_dtype_int32 aoti_torch_dtype_int64 aoti_torch_dtype_uint8 aoti_torch_dtype_bool
    aoti_torch_get_data_ptr aoti_torch_get_device_index aoti_torch_get_device_type aoti_torch_get_dim
    aoti_torch_get_dtype aoti_torch_get_layout aoti_torch_get_numel aoti_torch_get_size aoti_torch_get_sizes
    aoti_torch_get_storage_offset aoti_torch_get_stride aoti_torch_get_strides aoti_torch_is_contiguous
    aoti_torch_layout_strided aoti_torch_library_def aoti_torch_library_impl aoti_torch_library_init_def
    aoti_torch_library_init_fragment aoti_torch_library_init_impl
    torch_delete_list torch_get_const_data_ptr torch_get_mutable_data_ptr torch_get_num_threads torch_get_thread_idx
    torch_library_impl torch_list_get_item torch_list_size torch_parallel_for
    """.split()
)

# Of Python's stable ABI, whatever its version; weak, so that the library can be loaded without an interpreter.
PYTHON = frozenset(
    """
    PyCFunction_NewEx PyDict_GetItem PyDict_Next PyDict_Size PyErr_Clear PyErr_Occurred PyEval_RestoreThread
    PyEval_SaveThread PyFloat_AsDouble PyList_GetItem PyList_New PyList_SetItem PyList_Size PyLong_AsLongLong
    PyLong_AsVoidPtr PyLong_FromLongLong PyLong_FromVoidPtr PyObject_CallFunctionObjArgs PyObject_GetAttr
    PyObject_IsTrue PyTuple_GetItem Py_DecRef Py_IncRef _Py_NoneStruct _Py_TrueStruct
    """.split()
)

needs_binutils = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("nm") is None or shutil.which("objdump") is None,
    reason="reads ELF symbols with nm and objdump",
)
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction-set levels are x86-64 only")


def output(*command: str | pathlib.Path, **options: object) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


@pytest.fixture(scope="module")
def library() -> pathlib.Path:
    spec = importlib.util.find_spec("ruda_optim.fused_adamw.kernels._ops")
    assert spec is not None, "the operator library is not installed: run 'make venv'"
    assert spec.origin is not None
    path = pathlib.Path(spec.origin)
    symbols = output("nm", "--dynamic", "--undefined-only", path)
    if "__asan_" in symbols or "__tsan_" in symbols or "__ubsan_" in symbols:
        pytest.skip("a sanitizer build is not the library that is shipped")
    return path


@needs_binutils
def test_library_needs_nothing_newer_than_torch_2_10(library: pathlib.Path) -> None:
    lines = [line.split() for line in output("nm", "--dynamic", "--undefined-only", library).splitlines()]
    assert {name for kind, name in lines if kind in "wv"} >= PYTHON
    names = [name for _, name in lines if name not in PYTHON]
    # A symbol of glibc, libstdc++ or libgcc carries its version behind an @, unless torch's library defines it as well.
    # The other names come from torch.
    from_torch = {name for name in names if "@" not in name and not re.match(r"_ITM_|__gmon_start__|_ZN?K?St", name)}
    assert from_torch, "nm found no symbol of torch: the test does not see the right file"
    assert from_torch <= TORCH_2_10
    assert not [name for name in names if re.match(r"_?Py[A-Z_]", name)], "one library serves every Python"


@needs_binutils
def test_library_links_torch_and_no_second_openmp(library: pathlib.Path) -> None:
    dynamic = output("objdump", "--private-headers", library)
    needed = set(re.findall(r"NEEDED\s+(\S+)", dynamic))
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "omp" in name], "threads come from torch's own pool"
    assert not re.search(r"R(UN)?PATH", dynamic), "a run path would name a folder of the building machine"


@needs_binutils
def test_library_exports_nothing_but_the_host_functions(library: pathlib.Path) -> None:
    lines = output("nm", "--dynamic", "--defined-only", "--demangle", library).splitlines()
    functions = [line.split(maxsplit=2)[2] for line in lines if line.split()[1] in "TWi"]
    templates = ("std::", "__gnu_cxx::", "void std::")  # the last with the type that a template's name begins with
    ours = {name for name in functions if not name.startswith(templates)}
    names = ("active", "bind", "fits", "free", "near_written", "new", "note", "stepper", "watch")
    assert ours == {f"ruda_plan_{name}" for name in names}


@needs_binutils
@needs_x86
def test_only_our_own_functions_use_wide_registers(library: pathlib.Path) -> None:
    """A std:: or torch:: function compiled for x86-64-v4 and shared by the whole library would be an illegal
    instruction on an older processor."""
    code = output("objdump", "--disassemble", "--demangle", "--no-show-raw-insn", library)
    wide: set[str] = set()
    name = ""
    for line in code.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = header[1]
        elif "%ymm" in line or "%zmm" in line:
            wide.add(name)
    assert wide, "no vector code at all: the kernels were not vectorised, or the disassembly was not understood"
    # Template functions are listed with their return type in front: "void ruda::...".
    assert [name for name in sorted(wide) if not re.match(r"(\S+ )?ruda::", name)] == []


@needs_binutils
@needs_x86
@pytest.mark.parametrize("level", LEVELS)
def test_level_objects_share_no_function(level: str) -> None:
    """Each level exports its one entry point; any other global or weak one could merge with another's."""
    objects = sorted(ROOT.glob(f"build/py3-*/CMakeFiles/ruda_loops_{level}.dir/**/cpu_loops.cpp.o"))
    if not objects:
        pytest.skip(f"no {level} object in build/: not installed from this tree, or the compiler is too old for it")
    for path in objects:
        lines = output("nm", "--defined-only", "--demangle", path).splitlines()
        shared = [line.split(maxsplit=2)[1:] for line in lines if line.split()[1] in "TWVuBDRG"]
        assert shared, f"{path} defines no entry point"
        assert [name for _, name in shared if not name.startswith(f"ruda::{level}::")] == []
        assert [name for kind, name in shared if kind in "WVu"] == []


IMPORT_CHECK = """
import sys
import numpy, torch

before = set(sys.modules)
events = []
quiet = False
FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir", "os.rename")
def watch(event, arguments):
    if event in FORBIDDEN or (event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        if "__pycache__" not in str(arguments[0]):
            events.append((event, str(arguments[0])))
sys.addaudithook(watch)

import {package}

assert not events, events
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not loaded & {{"triton", "cuda", "ctypes.util"}}, loaded
assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("package", ["ruda_optim", "ruda_optim.fused_adamw", "ruda_torch"])
def test_import_compiles_nothing_and_touches_no_device(package: str) -> None:
    result = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", IMPORT_CHECK.format(package=package)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_metadata_promises_what_the_design_does() -> None:
    metadata = importlib.metadata.metadata("ruda-optim")
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == {"fused-adamw", "fused-adamw-device", "fused-adamw-cuda"}
    runtime = [line for line in metadata.get_all("Requires-Dist") if "extra" not in line]
    assert sorted(runtime) == ["numpy", "torch>=2.10"]
    extras = [line.partition(";")[0].strip() for line in metadata.get_all("Requires-Dist") if "extra" in line]
    # Of what torch brings and pins itself, nothing is pinned or doubled: see pyproject.toml.
    assert extras == ["cuda-bindings"]


@pytest.mark.parametrize("package", ["ruda_optim", "ruda_torch"])
def test_packages_are_typed(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert any((pathlib.Path(folder) / "py.typed").is_file() for folder in spec.submodule_search_locations or [])


def test_wheel_without_the_operator_is_pure_python(tmp_path: pathlib.Path) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index",
            "--config-settings=cmake.define.RUDA_BUILD_OPS=OFF",
            f"--config-settings=build-dir={tmp_path / 'build'}", f"--wheel-dir={tmp_path}", str(ROOT),
        ],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("ruda_optim-*.whl")
    names = output(sys.executable, "-m", "zipfile", "-l", wheel)
    assert "ruda_optim/fused_adamw/options.py" in names
    assert "csrc/adamw_update.h" in names, "the device backends compile this header at run time"
    assert ".so " not in names


def test_missing_torch_is_one_sentence(tmp_path: pathlib.Path) -> None:
    """cmake/find_torch.py in an interpreter without site-packages: no torch, no traceback."""
    result = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "cmake" / "find_torch.py"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("torch is not installed for ")
    assert "pip install" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_build_that_pip_isolates_says_so_and_not_that_torch_is_missing(tmp_path: pathlib.Path) -> None:
    """Pip keeps the interpreter and takes its packages off the module path, by a sitecustomize of its own."""
    site = tmp_path / "pip-build-env-abc" / "site"
    site.mkdir(parents=True)
    hide = "import sys\nsys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
    (site / "sitecustomize.py").write_text(hide)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}
    result = subprocess.run(
        [sys.executable, ROOT / "cmake" / "find_torch.py"],
        env=environment, capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("torch is installed (")
    assert "this build is isolated and cannot see the torch" in result.stderr
    assert "then 'pip install --no-build-isolation .'" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("builds-v0/.tmp1", "this build is isolated .* then 'uv pip install --no-build-isolation .'"),
        ("build-env-x1", "this build is isolated .* then 'python -m build --no-isolation'"),
        ("mine", "torch is not installed for "),
    ],
)
def test_a_build_in_an_environment_of_its_own_says_so(folder: str, message: str, tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / folder], check=True)
    python = tmp_path / folder / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [python, ROOT / "cmake" / "find_torch.py"],
        env=environment, capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert re.match(message, result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("python", "cxx", "message"),
    [
        ("no-such-python", None, "'no-such-python' was not found: install Python 3.10 or newer"),
        (sys.executable, "no-such-compiler", "CXX is 'no-such-compiler', which was not found"),
        (sys.executable, "false", "'false' cannot compile a C++17 program"),
    ],
)
def test_prerequisites_are_checked_in_sentences(python: str, cxx: str | None, message: str) -> None:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"} | ({} if cxx is None else {"CXX": cxx})
    result = subprocess.run(
        [ROOT / "tools" / "check_prerequisites.sh", python],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.strip().splitlines()) == 1
