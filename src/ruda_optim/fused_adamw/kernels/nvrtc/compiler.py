"""Compiles ``csrc/cuda.cu`` with NVRTC, one kernel instance at a time, and keeps the results on disk. Needs no driver.

An entry of the disk cache is named after a digest of everything that decides its contents: source, options,
architecture, compiler. It is written to a temporary file and renamed, so that processes which compile the same instance
at the same time do no harm, and it carries a digest of itself: a damaged entry is compiled again, never loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import tempfile
import warnings
from dataclasses import dataclass
from typing import Literal

CACHE_VARIABLE = "RUDA_CACHE_DIR"
SOURCE = "cuda.cu"
HEADERS = ("adamw_update.h", "cuda_memory.h", "gradient_stats.h", "half_bits.h", "moments.h", "table.h")
# Contraction off: one rounding per operation, the same bits as the CPU operator. NVRTC's division and square root are
# IEEE's and it keeps subnormal numbers unless told otherwise.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")

_CSRC = pathlib.Path(__file__).parents[1] / "csrc"
_MAGIC = b"ruda-optim cubin 1"


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel instance: machine code, and the name of the kernel in it."""

    code: bytes
    symbol: str


def missing_toolchain() -> str | None:
    """Why nothing can be compiled here, or ``None``."""
    try:
        toolchain()
    except ImportError as error:
        return (
            "the nvrtc backend needs cuda-bindings, which cannot be imported "
            f"({error}). Install it: pip install 'ruda-optim[fused-adamw-cuda]'"
        )
    except (OSError, RuntimeError) as error:
        return (
            "the nvrtc backend needs the library NVRTC, which cuda-bindings did not find "
            f"({str(error).strip().splitlines()[0]}). It comes with torch for CUDA and with CUDA; alone: "
            "pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12 (CUDA 12)"
        )
    return None


@functools.cache
def toolchain() -> str:
    """The compiler in words, for example ``NVRTC 13.0 (nvidia-cuda-nvrtc 13.0.88)``.

    Raises:
        ImportError: cuda-bindings is not installed.
        RuntimeError: NVRTC is not installed.
    """
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, result, "nvrtcVersion")
    # The library does not tell its patch release; the package that brings it does.
    names = ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}")
    found = [f"{name} {package.version}" for name in names for package in importlib.metadata.distributions(name=name)]
    return f"NVRTC {major}.{minor}" + (f" ({', '.join(found)})" if found else "")


def driver_too_old(driver_version: int) -> str | None:
    """Why a driver does not load what NVRTC compiles, or ``None``.

    Args:
        driver_version: what cuDriverGetVersion says, for example 12040 for CUDA 12.4.
    """
    from cuda.bindings import nvrtc

    result, major, _minor = nvrtc.nvrtcVersion()
    _check(nvrtc, result, "nvrtcVersion")
    driver_major, driver_minor = driver_version // 1000, driver_version % 1000 // 10
    if driver_major >= major:  # within a major version a driver loads what a later minor version compiles
        return None
    return (
        f"{toolchain()} compiles for drivers of CUDA {major}, and this machine's driver is of CUDA {driver_major}."
        f"{driver_minor}. Update the driver, install an NVRTC of CUDA {driver_major} (pip install "
        f"'cuda-bindings=={driver_major}.*' 'nvidia-cuda-nvrtc-cu{driver_major}', and uninstall nvidia-cuda-nvrtc), or "
        "set RUDA_CUDA_COMPILER=ptx"
    )


@functools.cache
def architecture(major: int, minor: int) -> str:
    """The ``sm_..`` to compile for, given a device's compute capability.

    Raises:
        ImportError: this NVRTC is too old for the device.
    """
    from cuda.bindings import nvrtc

    result, known = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, result, "nvrtcGetSupportedArchs")
    # Machine code for x.0 runs on every later x.y. Between two others there is no such rule: to CUDA 12, 10.1 is
    # another chip than the one that grew into 10.3.
    fitting = next((arch for arch in (10 * major + minor, 10 * major) if arch in known), None)
    if fitting is None:
        raise ImportError(
            f"{toolchain()} cannot compile for a device of compute capability {major}.{minor}; it knows "
            f"{', '.join(f'sm_{arch}' for arch in known)}. Install a newer cuda-bindings and NVRTC, or set "
            "RUDA_CUDA_COMPILER=ptx"
        )
    return f"sm_{fitting}"


def cubin(instance: str, arch: str) -> Cubin:
    """The kernel ``instance``, for example ``ruda::update<0, 0, 1, 0>``, for ``arch``, from the disk or from NVRTC.

    Raises:
        RuntimeError: NVRTC refused the source; the message holds its log.
    """
    directory = cache_directory()
    if directory is None:
        _warn_uncached("this user has no home directory")
        return compile_instance(instance, arch)[0]
    path = directory / f"{_key(instance, arch)}.cubin"
    found = _read(path)
    if found is None:
        found, _ = compile_instance(instance, arch)
        _write(path, found)
    return found


def compile_instance(
    instance: str, arch: str, options: tuple[str, ...] = (), *, form: Literal["cubin", "ptx"] = "cubin"
) -> tuple[Cubin, str]:
    """Compiles one instance and returns it with NVRTC's log. Does not touch the disk cache.

    Args:
        instance: a name expression of ``csrc/cuda.cu``.
        arch: ``sm_..``.
        options: more options, after ``OPTIONS``.
        form: ``"ptx"`` returns PTX in place of machine code, to be read and not to be loaded.
    """
    from cuda.bindings import nvrtc

    texts = sources()
    result, program = nvrtc.nvrtcCreateProgram(
        texts[SOURCE].encode(),
        SOURCE.encode(),
        len(HEADERS),
        [texts[name].encode() for name in HEADERS],
        [name.encode() for name in HEADERS],
    )
    _check(nvrtc, result, "nvrtcCreateProgram")
    try:
        (result,) = nvrtc.nvrtcAddNameExpression(program, instance.encode())
        _check(nvrtc, result, "nvrtcAddNameExpression")
        arguments = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in (*OPTIONS, *options))]
        (compiled,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        result, size = nvrtc.nvrtcGetProgramLogSize(program)
        _check(nvrtc, result, "nvrtcGetProgramLogSize")
        log = bytes(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.rstrip(b"\0").decode(errors="replace")
        if compiled != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(
                f"{toolchain()} cannot compile {instance} of {SOURCE} for {arch}. RUDA_CUDA_COMPILER=ptx avoids this "
                f"compiler. Its log:\n{text}"
            )
        read_size, read = {
            "cubin": (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
            "ptx": (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
        }[form]
        result, size = read_size(program)
        _check(nvrtc, result, read_size.__name__)
        code = bytes(size)
        (result,) = read(program, code)
        _check(nvrtc, result, read.__name__)
        result, symbol = nvrtc.nvrtcGetLoweredName(program, instance.encode())
        _check(nvrtc, result, "nvrtcGetLoweredName")
        return Cubin(code, symbol.decode()), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def sources() -> dict[str, str]:
    """The texts that make up the program, by file name."""
    return {name: (_CSRC / name).read_text(encoding="utf-8") for name in (SOURCE, *HEADERS)}


def cache_directory() -> pathlib.Path | None:
    """Where compiled kernels are kept: ``$RUDA_CACHE_DIR``, else ``$XDG_CACHE_HOME/ruda-optim``, else
    ``~/.cache/ruda-optim``. ``None`` for a user without a home, as containers have."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "ruda-optim"
    except RuntimeError:
        return None


def _key(instance: str, arch: str) -> str:
    parts = [sources(), OPTIONS, arch, instance, toolchain()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read(path: pathlib.Path) -> Cubin | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    magic, digest, body = [*entry.split(b"\n", 2), b"", b""][:3]
    if magic != _MAGIC or digest.decode(errors="replace") != hashlib.sha256(body).hexdigest():
        return None
    symbol, _, code = body.partition(b"\n")
    return Cubin(code, symbol.decode())


def _write(path: pathlib.Path, compiled: Cubin) -> None:
    body = compiled.symbol.encode() + b"\n" + compiled.code
    entry = b"\n".join((_MAGIC, hashlib.sha256(body).hexdigest().encode(), body))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
            try:
                file.write(entry)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        _warn_uncached(f"{path.parent}: {error.strerror}")


def _warn_uncached(reason: str) -> None:
    warnings.warn(
        f"compiled kernels could not be stored in a file ({reason}), so every process will compile them again. Set "
        f"{CACHE_VARIABLE} to a directory that can be written",
        RuntimeWarning,
        stacklevel=3,
    )


def _check(nvrtc: object, result: object, call: str) -> None:
    if int(result) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"{call} failed: {result!s}")
