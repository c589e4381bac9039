"""NVRTC without a driver, the disk cache, and why the backend may be unavailable. Nothing here runs on a GPU."""

from __future__ import annotations

import builtins
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch

from fused_adamw import aot_nvrtc, machine_code
from ruda_optim.fused_adamw import kernels
from ruda_optim.fused_adamw.kernels.nvrtc import compiler as nvrtc_compiler
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc
from ruda_optim.fused_adamw.kernels.tables import Flag

_missing = nvrtc_compiler.missing_toolchain()
needs_nvrtc = pytest.mark.skipif(_missing is not None, reason=str(_missing))

INSTANCE = "ruda::merge<true>"  # the quickest to compile
ARCH = "sm_90"


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("RUDA_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch):
    """A function after whose call nothing may be compiled."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"compiled again: {arguments}")

    return lambda: monkeypatch.setattr(nvrtc_compiler, "compile_instance", refuse)


# ------------------------------------------------------------------------------------------------------ compilation


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    "instance", ["ruda::update<0, 0, 1, 0>", "ruda::update<-1, -1, -1, 0>", "ruda::analyze<2>", "ruda::decide<0>"]
)
def test_compiles_without_a_driver(instance: str, arch: str) -> None:
    compiled, log = nvrtc_compiler.compile_instance(instance, arch)
    assert compiled.code.startswith(b"\x7fELF")
    assert compiled.symbol.encode() in compiled.code
    assert "error" not in log


@needs_nvrtc
def test_a_source_that_nvrtc_refuses_is_an_error_with_its_log(cache: pathlib.Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"cannot compile ruda::missing<1> of cuda\.cu for sm_90(.|\n)*no member"
    ) as error:
        nvrtc_compiler.cubin("ruda::missing<1>", ARCH)
    assert "RUDA_CUDA_COMPILER=ptx" in str(error.value)
    assert not cache.exists()


@needs_nvrtc
def test_the_architecture_is_the_devices_or_the_first_of_its_major_version() -> None:
    assert nvrtc_compiler.architecture(9, 0) == "sm_90"
    assert nvrtc_compiler.architecture(8, 6) == "sm_86"
    with pytest.raises(ImportError, match=r"capability 99\.0; it knows sm_\d+.*RUDA_CUDA_COMPILER=ptx"):
        nvrtc_compiler.architecture(99, 0)


@needs_nvrtc
@pytest.mark.parametrize(
    ("known", "capability", "chosen"),
    [
        ([90, 100, 101, 120], (10, 3), "sm_100"),  # NVRTC 12.8 calls another chip 10.1
        ([90, 100, 101, 120], (12, 1), "sm_120"),
        ([80, 86, 87, 89], (8, 9), "sm_89"),
        ([80, 86, 87], (8, 9), "sm_80"),
    ],
)
def test_the_architecture_is_never_another_chips(known, capability, chosen, monkeypatch) -> None:
    from cuda.bindings import nvrtc as bindings

    monkeypatch.setattr(bindings, "nvrtcGetSupportedArchs", lambda: (bindings.nvrtcResult.NVRTC_SUCCESS, known))
    assert nvrtc_compiler.architecture.__wrapped__(*capability) == chosen


# -------------------------------------------------------------------------------------------------------- disk cache


@needs_nvrtc
def test_a_second_request_is_read_from_the_disk(cache: pathlib.Path, no_compiler) -> None:
    first = nvrtc_compiler.cubin(INSTANCE, ARCH)
    no_compiler()
    assert nvrtc_compiler.cubin(INSTANCE, ARCH) == first
    assert [path.suffix for path in cache.iterdir()] == [".cubin"]


DAMAGE = {
    "emptied": lambda entry: b"",
    "cut short": lambda entry: entry[: len(entry) // 2],
    "one bit flipped": lambda entry: entry[:-100] + bytes([entry[-100] ^ 1]) + entry[-99:],
    "symbol changed": lambda entry: entry.replace(b"merge", b"purge", 1),
    "another format": lambda entry: b"something else\n" + entry,
    "not text at all": lambda entry: b"\xff\n\xfe\n\xfd",
}


@needs_nvrtc
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_compiled_again(damage: str, cache: pathlib.Path, no_compiler) -> None:
    first = nvrtc_compiler.cubin(INSTANCE, ARCH)
    (path,) = cache.iterdir()
    intact = path.read_bytes()
    path.write_bytes(DAMAGE[damage](intact))
    again = nvrtc_compiler.cubin(INSTANCE, ARCH)
    assert again.symbol == first.symbol
    assert again.code.startswith(b"\x7fELF")
    no_compiler()
    assert nvrtc_compiler.cubin(INSTANCE, ARCH) == again


@needs_nvrtc
def test_everything_that_decides_the_result_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return nvrtc_compiler._key(INSTANCE, ARCH)

    keys = {key(), nvrtc_compiler._key("ruda::merge<false>", ARCH), nvrtc_compiler._key(INSTANCE, "sm_80")}
    changes = {
        "OPTIONS": (*nvrtc_compiler.OPTIONS, "--extra-device-vectorization"),
        "toolchain": lambda: "NVRTC 99.0",
        "sources": lambda: nvrtc_compiler_sources | {"table.h": "changed"},
    }
    nvrtc_compiler_sources = nvrtc_compiler.sources()
    for name, value in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc_compiler, name, value)
            keys.add(key())
    assert len(keys) == 3 + len(changes)


REQUEST = f"""
import sys
from ruda_optim.fused_adamw import kernels
from ruda_optim.fused_adamw.kernels.nvrtc import compiler as nvrtc_compiler
nvrtc_compiler.toolchain()
print("ready", flush=True)
sys.stdin.readline()
print(nvrtc_compiler.cubin({INSTANCE!r}, {ARCH!r}).symbol, flush=True)
"""


@needs_nvrtc
def test_processes_that_compile_the_same_instance_do_not_disturb_each_other(cache: pathlib.Path, no_compiler) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", REQUEST], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # all of them wait here, so that they compile at the same time
        worker.stdin.write("go\n")
        worker.stdin.flush()
    symbols = {worker.communicate(timeout=120)[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    assert len(symbols) == 1
    assert [path.suffix for path in cache.iterdir()] == [".cubin"], "one entry, and no temporary file left"
    no_compiler()
    assert {nvrtc_compiler.cubin(INSTANCE, ARCH).symbol + "\n"} == symbols


@needs_nvrtc
def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RUDA_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match=r"could not be stored .*Set RUDA_CACHE_DIR"):
        compiled = nvrtc_compiler.cubin(INSTANCE, ARCH)
    assert compiled.code.startswith(b"\x7fELF")


@needs_nvrtc
def test_a_user_without_a_home_directory_costs_a_warning(monkeypatch) -> None:
    """The arbitrary user of a container: no entry in the user database, and no HOME."""

    def nobody(_uid: int) -> object:
        raise KeyError

    for name in ("HOME", "RUDA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.warns(RuntimeWarning, match=r"could not be stored .*no home directory.*Set RUDA_CACHE_DIR"):
        compiled = nvrtc_compiler.cubin(INSTANCE, ARCH)
    assert compiled.code.startswith(b"\x7fELF")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere/home")
    monkeypatch.delenv("RUDA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert nvrtc_compiler.cache_directory() == pathlib.Path("/somewhere/home/.cache/ruda-optim")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert nvrtc_compiler.cache_directory() == pathlib.Path("/somewhere/cache/ruda-optim")
    monkeypatch.setenv("RUDA_CACHE_DIR", "/somewhere/else")
    assert nvrtc_compiler.cache_directory() == pathlib.Path("/somewhere/else")


# ------------------------------------------------------------------------------------------------------ availability


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, cuda: str | None = None, hip: str | None = None, devices: int = 0
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


def test_without_cuda_bindings_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda="13.0", devices=1)
    real = builtins.__import__

    def refuse(name: str, *arguments: object, **keywords: object) -> types.ModuleType:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **keywords)

    nvrtc_compiler.toolchain.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    reason = nvrtc.unavailable()
    assert reason is not None
    assert "needs cuda-bindings" in reason
    assert "pip install 'ruda-optim[fused-adamw-cuda]'" in reason


def test_without_the_library_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda="13.0", devices=1)

    def not_found() -> str:
        raise RuntimeError("Failure finding libnvrtc.so\nand many more lines")

    monkeypatch.setattr(nvrtc_compiler, "toolchain", not_found)
    reason = nvrtc.unavailable()
    assert reason is not None
    assert "needs the library NVRTC" in reason
    assert "(Failure finding libnvrtc.so)" in reason
    assert "pip install nvidia-cuda-nvrtc" in reason


@needs_nvrtc
def test_reasons_that_lie_with_torch_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, hip="6.4", devices=1)
    assert "serves NVIDIA only" in str(nvrtc.unavailable())
    pretend(monkeypatch)
    assert "a torch that is built with CUDA" in str(nvrtc.unavailable())
    pretend(monkeypatch, cuda="13.0")
    assert "needs an NVIDIA device, and torch sees none" in str(nvrtc.unavailable())
    pretend(monkeypatch, cuda="13.0", devices=1)
    monkeypatch.setattr(nvrtc, "_driver_version", lambda: None)
    assert nvrtc.unavailable() is None


@needs_nvrtc
@pytest.mark.parametrize(("compiler", "driver"), [(12, 12040), (12, 13000), (13, 13000)])
def test_a_driver_loads_what_its_major_version_compiles(compiler, driver, monkeypatch) -> None:
    from cuda.bindings import nvrtc as bindings

    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (bindings.nvrtcResult.NVRTC_SUCCESS, compiler, 5))
    assert nvrtc_compiler.driver_too_old(driver) is None


@needs_nvrtc
def test_a_driver_of_an_earlier_major_version_is_told_before_anything_is_compiled(monkeypatch) -> None:
    """Its machine code would not load: a reason to install something, and for the unset rule to take ptx."""
    from cuda.bindings import nvrtc as bindings

    monkeypatch.setattr(bindings, "nvrtcVersion", lambda: (bindings.nvrtcResult.NVRTC_SUCCESS, 13, 5))
    pretend(monkeypatch, cuda="12.8", devices=1)
    monkeypatch.setattr(nvrtc, "_driver_version", lambda: 12040)
    reason = str(nvrtc.unavailable())
    assert "compiles for drivers of CUDA 13, and this machine's driver is of CUDA 12.4. Update the driver" in reason
    assert "'cuda-bindings==12.*' 'nvidia-cuda-nvrtc-cu12'" in reason
    monkeypatch.delenv(kernels.CUDA_COMPILER_VARIABLE, raising=False)
    assert kernels.cuda_compiler() == "ptx"


# --------------------------------------------------------------------------------------------------------- instances


def test_every_instance_that_a_table_can_ask_for_is_listed() -> None:
    known = nvrtc.instances()
    assert len(known) == len(set(known)) == 3 * (3 * 4 * 2 + 1) + 4 + 2 + 1
    stores = (Flag(0), Flag.COPY_FP16, Flag.COPY_BF16, Flag.COPY_BF16 | Flag.SPLIT)
    for gradient in (Flag(0), Flag.GRAD_FP16, Flag.GRAD_BF16):
        for store in stores:
            for amsgrad in (Flag(0), Flag.AMSGRAD):
                for moments in (Flag(0), Flag.MOMENTS_BF16, Flag.MOMENTS_PACKED):
                    for place in (Flag(0), Flag.ALIGNED, Flag.STRIDED, Flag.FIRST):
                        flags = int(gradient | store | amsgrad | moments | place)
                        assert nvrtc.update_instance({flags}) in known
                        assert nvrtc.statistics_instance({flags}) in known


@pytest.mark.parametrize(
    ("kinds", "update", "statistics"),
    [
        ({Flag(0)}, "0, 0, 0, 0", "0"),
        ({Flag(0), Flag.ALIGNED}, "0, 0, 0, 0", "0"),
        ({Flag.MOMENTS_BF16}, "0, 0, 0, 1", "0"),
        ({Flag.MOMENTS_PACKED | Flag.ALIGNED, Flag.MOMENTS_PACKED | Flag.FIRST}, "-1, -1, -1, 2", "0"),
        ({Flag.GRAD_BF16 | Flag.COPY_BF16 | Flag.SPLIT | Flag.AMSGRAD}, "2, 3, 1, 0", "2"),
        ({Flag.GRAD_FP16, Flag.GRAD_BF16}, "-1, -1, -1, 0", "-1"),
        ({Flag(0), Flag.AMSGRAD}, "-1, -1, -1, 0", "0"),
        ({Flag.STRIDED}, "-1, -1, -1, 0", "-1"),
        ({Flag.FIRST | Flag.ALIGNED}, "-1, -1, -1, 0", "0"),
    ],
)
def test_which_instance_serves_which_tables(kinds: set[Flag], update: str, statistics: str) -> None:
    assert nvrtc.update_instance({int(kind) for kind in kinds}) == f"ruda::update<{update}>"
    assert nvrtc.statistics_instance({int(kind) for kind in kinds}) == f"ruda::analyze<{statistics}>"


# ------------------------------------------------------------------------------------- what the compiler made of them


@needs_nvrtc
@pytest.mark.parametrize(
    ("instance", "arch"),
    [
        ("ruda::update<2, 2, 1, 0>", "sm_80"),
        ("ruda::update<2, 3, 0, 1>", "sm_100"),
        ("ruda::update<-1, -1, -1, 2>", "sm_100"),
        ("ruda::update<-1, -1, -1, 0>", "sm_90"),
        ("ruda::analyze<-1>", "sm_100"),
        ("ruda::decide<0>", "sm_90"),
    ],
)
def test_compiled_code_is_as_it_should_be(instance: str, arch: str) -> None:
    """A sample; tools/fused_adamw/aot_nvrtc.py and the suite `build` check every instance."""
    assert aot_nvrtc.check(instance, arch).problems == ()


@needs_nvrtc
@pytest.mark.parametrize("instance", ["ruda::update<0, 2, 1, 0>", "ruda::analyze<2>"])
def test_without_nvdisasm_the_widths_come_from_ptx(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "disassembler", lambda: None)
    facts = aot_nvrtc.check(instance, "sm_100")
    assert (facts.widths_from, facts.problems) == ("ptx", ())


@needs_nvrtc
@pytest.mark.skipif(machine_code.disassembler() is None, reason="no nvdisasm")
def test_what_moments_in_two_bytes_cost_in_instructions() -> None:
    """Decode, dither and encode took 46 an element in a sketch; loads and stores become fewer."""
    counts = [
        aot_nvrtc.check(f"ruda::update<0, 0, 0, {moments}>", "sm_90").instructions_per_element for moments in range(3)
    ]
    assert counts[0] <= 54
    assert counts[0] < counts[1] < counts[2] <= counts[0] + 46
    assert aot_nvrtc.check("ruda::merge<true>", "sm_90").instructions_per_element is None


FAULTS = {
    "contraction": ("adamw_update.h", "const float gg = g * g;", "const float gg = __fmaf_rn(g, g, 0.0f);"),
    "approximate arithmetic": ("adamw_update.h", "return __fdiv_rn(a, b)", "return __fdividef(a, b)"),
    "generic address": ("cuda_memory.h", "__builtin_assume(__isGlobal(p));", ""),
    "loads and": ("cuda.cu", "kNarrow && AMSGRAD == 0 ? 8 : 4;", "2;"),
    "bytes spilled": ("cuda.cu", "constexpr int kUpdateBlocks = 4;", "constexpr int kUpdateBlocks = 8;"),
}


@needs_nvrtc
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, sound, unsound = FAULTS[fault]
    texts = dict(nvrtc_compiler.sources())
    assert sound in texts[name]
    texts[name] = texts[name].replace(sound, unsound)
    monkeypatch.setattr(nvrtc_compiler, "sources", lambda: texts)
    problems = aot_nvrtc.check("ruda::update<0, 3, 1, 0>", "sm_100").problems
    assert any(fault in problem for problem in problems), problems
