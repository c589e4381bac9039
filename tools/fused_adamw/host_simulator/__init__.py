"""Runs ``csrc/cuda.cu``, unchanged, on the CPU: a simulation, for tests and the runner. Never selected as a backend.

The kernels are compiled by g++ against a header that supplies the CUDA language (``simulator.h``) and are called
through the launch code of ``kernels/nvrtc/launch.py``, tables, block maps and packed arguments included. What is not
exercised: NVRTC, the driver, streams, the FP16 conversion instructions, and anything about speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
from typing import TYPE_CHECKING

from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

    from ruda_optim.fused_adamw.kernels import Kernels

NAME = "nvrtc (host simulation)"
CSRC = pathlib.Path(nvrtc.__file__).parents[1] / "csrc"
_HERE = pathlib.Path(__file__).parent
# Contraction off, as in every backend. -fno-strict-aliasing: vectors of elements are read through pack types.
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing",
          "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")  # fmt: skip


class SimulationError(RuntimeError):
    """A kernel broke a rule of CUDA, for example a barrier that not every thread of the block reaches."""


def unavailable() -> str | None:
    """Why nothing can be simulated here, or ``None``."""
    if shutil.which(_compiler()) is None:
        return f"the host simulator needs a C++ compiler, and {_compiler()!r} is not found; install g++ or set CXX"
    return None


def kernels(source: str | None = None, instances: Sequence[str] | None = None, seed: int = 0) -> Kernels:
    """The kernels of ``csrc/cuda.cu`` as a record for CPU tensors, under the name ``NAME``.

    Args:
        source: the text to compile instead of ``csrc/cuda.cu``; its headers are the library's.
        instances: the kernel instances to build. Default: every one that the library can ask for.
        seed: decides in which order the warps of a block run.
    """
    return nvrtc.record(NAME, HostLauncher(build(source, instances), seed))


class HostLauncher:
    """Runs each launch to its end before it returns."""

    def __init__(self, library: pathlib.Path, seed: int) -> None:
        self._simulate = ctypes.CDLL(str(library)).simulate
        self._simulate.restype = ctypes.c_char_p
        self._simulate.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint)
        self._arguments = nvrtc.PackedArguments()
        self._seed = seed
        self.launched: list[str] = []

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Nothing to do: a CPU is always the current device."""
        return contextlib.nullcontext()

    def __call__(self, device: torch.device, instance: str, blocks: int, *arguments: float) -> None:
        self.launched.append(instance)
        # ctypes releases the interpreter lock, and the simulator has one set of fibers.
        with _LOCK:
            address = self._arguments.pack(arguments)
            error = self._simulate(_spelled(instance).encode(), blocks, nvrtc.THREADS, address, self._seed)
        if error:
            raise SimulationError(f"{instance}: {error.decode()}")


_LOCK = threading.Lock()


def build(source: str | None = None, instances: Sequence[str] | None = None) -> pathlib.Path:
    """The shared library with these instances, compiled unless it is there already. Arguments: see :func:`kernels`.

    Raises:
        SimulationError: the compiler refused it; the message holds its output.
    """
    source = (CSRC / "cuda.cu").read_text(encoding="utf-8") if source is None else source
    names = nvrtc.instances() if instances is None else instances
    lines = "".join(f"INSTANCE({_has_barriers(name)}, {_spelled(name)})\n" for name in names)
    texts = [source, lines, *_FLAGS, _compiler()]
    texts += [path.read_text(encoding="utf-8") for path in sorted((*CSRC.glob("*.h"), *_HERE.glob("simulator.*")))]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    library = pathlib.Path(tempfile.gettempdir()) / f"ruda-optim-simulator-{os.getuid()}" / f"{digest}.so"
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    if library.parent.stat().st_uid != os.getuid():
        raise SimulationError(f"{library.parent} belongs to another user; set TMPDIR to a directory of your own")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        work = pathlib.Path(folder)
        (work / "kernels.cu").write_text(source, encoding="utf-8")
        (work / "instances.inc").write_text(lines, encoding="utf-8")
        command = [
            _compiler(), *_FLAGS, f"-I{CSRC}", f'-DRUDA_CUDA_SOURCE="{work / "kernels.cu"}"',
            f'-DRUDA_INSTANCES="{work / "instances.inc"}"', str(_HERE / "simulator.cpp"), "-o", str(work / "built.so"),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SimulationError(f"{' '.join(command)}\n{result.stderr}")
        (work / "built.so").replace(library)
    return library


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _spelled(instance: str) -> str:
    """As the preprocessor spells the name when it turns it into a string."""
    return instance.replace(" ", "").replace(",", ", ")


def _has_barriers(instance: str) -> str:
    return "false" if "update" in instance else "true"
