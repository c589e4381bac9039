"""The Triton backend without a GPU: the interpreter (in a process of its own), the compiler, and the host path.

No test here runs a kernel on a device, and none shows that one would be right or fast there.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from fused_adamw import aot_triton
from ruda_optim.fused_adamw.errors import InvalidOption
from ruda_optim.fused_adamw.kernels.decision import DecisionMemory
from ruda_optim.fused_adamw.kernels.tables import COEFFICIENTS, Flag, LaunchTable, TensorMemory
from ruda_optim.fused_adamw.kernels.triton import launch as ptx_launch
from ruda_optim.fused_adamw.kernels.triton import update as ptx

HERE = pathlib.Path(__file__).parent
CPU = torch.device("cpu")
VERSION = "RUDA_PTX_VERSION"


# ------------------------------------------------------------------------------------------------------ the interpreter


@pytest.mark.slow
def test_the_interpreter_agrees_with_the_cpu_operator() -> None:
    """Runs tests that need TRITON_INTERPRET before Triton is imported."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    names = ("simulated_ptx.py", "test_decide.py", "test_split_tables.py", "../optimizer/test_torch_settings.py")
    files = [str(HERE / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_a_simulated_record_needs_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match=r"kernels\(simulate=True\) needs TRITON_INTERPRET=1"):
        ptx.kernels(simulate=True)


# --------------------------------------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("update", Flag.AMSGRAD),
        ("update", Flag.GRAD_BF16 | Flag.COPY_BF16 | Flag.SPLIT),
        ("update", Flag.GRAD_FP16 | Flag.COPY_BF16 | Flag.AMSGRAD | Flag.STRIDED),
        ("update", Flag.GRAD_BF16 | Flag.COPY_BF16 | Flag.SPLIT | Flag.MOMENTS_PACKED),
        ("update", Flag.MOMENTS_BF16 | Flag.AMSGRAD),
        ("update", ptx_launch.GENERAL_KIND),
        ("analyze", Flag.GRAD_BF16),
        ("analyze", ptx_launch.GENERAL_KIND),
        ("merge", True),
        ("decide", None),
    ],
    ids=str,
)
def test_compiled_kernels_are_what_they_should_be(name: str, kind: object, target: str) -> None:
    """Ten of the kernels of a target; `make gpu`'s and the runner's `build` suite compile all of them."""
    specialization = {
        "update": ptx_launch.update_specialization,
        "analyze": ptx_launch.analyze_specialization,
        "merge": ptx_launch.merge_specialization,
        "decide": lambda _: ptx_launch.DECIDE,
    }[name](int(kind) if isinstance(kind, Flag) else kind)
    assert (name, specialization) in aot_triton.specializations()
    assert aot_triton.problems(aot_triton.compile_one(name, specialization, target)) == []


def test_the_checks_of_compiled_kernels_can_fail() -> None:
    fact = aot_triton.compile_one("update", ptx_launch.update_specialization(0), "sm_90")
    assert aot_triton.problems(fact) == []
    for name, value in (("loads_128", 3), ("stores_128", 2), ("spills", 4), ("fused_multiply_add", 1), ("barriers", 1)):
        assert aot_triton.problems(fact | {name: value}), name
    assert aot_triton.problems(fact | {"registers": 81}) == ["registers is 81, at most 80"]


def test_contraction_and_approximation_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel with contraction on: the text has fused multiply-adds, and the check finds them."""

    def contracting(self: ptx_launch.Specialization, warp_size: int) -> dict[str, object]:
        return {"num_warps": ptx_launch.THREADS // warp_size, "enable_fp_fusion": True}

    monkeypatch.setattr(ptx_launch.Specialization, "options", contracting)
    fact = aot_triton.compile_one("update", ptx_launch.update_specialization(0), "sm_90")
    assert any("fused_multiply_add" in problem for problem in aot_triton.problems(fact))


# ---------------------------------------------------------------------------------------------------------- PTX version


@pytest.mark.parametrize(
    ("text", "arch", "newest", "version"),
    [("7.0", 80, 88, 70), ("8.8", 80, 88, 88), ("8.0", 90, 94, 80), ("9.4", 90, 94, 94), ("8.6", 100, 94, 86)],
)
def test_ptx_versions_that_are_taken(text: str, arch: int, newest: int, version: int) -> None:
    assert ptx_launch.parse_ptx_version(text, arch, newest) == version


@pytest.mark.parametrize("text", ["6.9", "8.9", "86", "8.60", "eight", "8.", ".6", " 8.6", "-8.6", "8.6.1", "٨.6"])
def test_ptx_versions_that_are_refused(text: str) -> None:
    with pytest.raises(
        InvalidOption, match=r"RUDA_PTX_VERSION must be a PTX version from 7\.0 to 8\.8 on sm_80 .* got"
    ):
        ptx_launch.parse_ptx_version(text, 80, 88)


@pytest.mark.parametrize(("text", "arch"), [("7.9", 90), ("8.5", 100), ("8.7", 121)])
def test_a_version_older_than_the_architecture_is_refused(text: str, arch: int) -> None:
    """LLVM would end the process."""
    with pytest.raises(InvalidOption, match=f"on sm_{arch}"):
        ptx_launch.parse_ptx_version(text, arch, 94)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"cannot be checked for sm_999; unset it .* Known: sm_75, sm_80"):
        ptx_launch.parse_ptx_version("8.6", 999, 94)


def test_ptx_version_is_nothing_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERSION, "8.6")
    with pytest.raises(InvalidOption, match="NVIDIA devices only"):
        ptx_launch.ptx_version("hip", "gfx942")
    monkeypatch.delenv(VERSION)
    assert ptx_launch.ptx_version("hip", "gfx942") is None


# ------------------------------------------------------------------------------------------------- host path, no device


class StubDriver:
    """Stands for Triton's driver: kernels are compiled for sm_90, and a launch is written down instead of made."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.loaded: list[str] = []
        self.sources: list[object] = []
        self.metadata: list[object] = []
        self.utils = types.SimpleNamespace(
            load_binary=self._load,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        )

    def _load(self, name: str, *_: object) -> tuple[object, ...]:
        self.loaded.append(name)
        return "module", "function", 32, 0, 1024

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> object:
        self.sources.append(source)
        self.metadata.append(metadata)

        def launcher(*arguments: object) -> None:
            self.launches.append(arguments)

        return launcher


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> StubDriver:
    from triton.runtime.driver import driver

    stub = StubDriver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(VERSION, raising=False)
    monkeypatch.setattr(driver, "_active", stub)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ptx_launch, "_compiled", {})
    for function in (ptx.update_kernel, ptx.analyze_kernel, ptx.merge_kernel, ptx.decide_kernel):
        function.device_caches.clear()
    yield stub
    for function in (ptx.update_kernel, ptx.analyze_kernel, ptx.merge_kernel, ptx.decide_kernel):
        function.device_caches.clear()


def table(count: int, numel: int = 16) -> tuple[LaunchTable, list[torch.Tensor]]:
    gradients = [torch.zeros(numel) for _ in range(count)]
    memories = [TensorMemory(g, *(torch.zeros(numel) for _ in range(3))) for g in gradients]
    return LaunchTable(memories, CPU), gradients


def test_host_path_only_nothing_is_compiled_anew_for_values_or_counts(stub: StubDriver) -> None:
    kernels = ptx.kernels()
    for count in (1, 16, 17):
        described, _gradients = table(count)
        for inverse_scale, clip in ((1.0, 1.0), (1, 1), (0.5, 0.25), (0, 0)):
            coefficients = torch.rand(count, COEFFICIENTS)
            kernels.adamw_scaled(described, coefficients, inverse_scale, clip)
            kernels.adamw_scaled(described, coefficients, inverse_scale, clip, decision=torch.zeros(3)[1:])
            kernels.analyze_gradient(described, torch.zeros(count * 3 + 1)[1:], inverse_scale)
            kernels.merge_gradient_stats(torch.zeros(count, 3), torch.zeros(3))
    assert sorted(stub.loaded) == ["analyze_kernel", "merge_kernel", "update_kernel"]
    assert len(stub.launches) == 3 * 4 * 4


def test_host_path_only_the_launch_asks_for_what_the_ahead_of_time_check_compiles(stub: StubDriver) -> None:
    kernels = ptx.kernels()
    described, _gradients = table(2)
    kernels.adamw_scaled(described, torch.rand(2, COEFFICIENTS), 1.0, 1.0)
    kernels.analyze_gradient(described, torch.zeros(2, 3), 1.0)
    kernels.merge_gradient_stats(torch.zeros(2, 3), torch.zeros(3))
    memory = DecisionMemory(
        torch.zeros(1, 8, dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(4),
        torch.zeros(2, dtype=torch.int64),
    )
    kernels.decide(described, memory, torch.zeros(2, COEFFICIENTS), None, 1.0, measured=False, check_finite=True)
    assert len(stub.sources) == 4
    for source, name in zip(stub.sources, ("update", "analyze", "merge", "decide"), strict=True):
        types_ = tuple(type_ for type_ in source.signature.values() if type_ != "constexpr")
        assert types_ == aot_triton._ARGUMENTS[name]
        assert not any(source.attrs.values())  # no promise about a value or an address
    assert not any(metadata.enable_fp_fusion for metadata in stub.metadata)


def test_host_path_only_arguments_of_a_launch(stub: StubDriver) -> None:
    """Grid, stream, function, then every parameter of the kernel in order, its constants included."""
    described, _gradients = table(3, ptx_launch.UPDATE_CHUNK + 1)
    ptx.kernels().adamw_scaled(described, torch.rand(3, COEFFICIENTS), 0.5, 1.0)
    ((x, y, z, _stream, function, _packed, _metadata, _enter, _exit, *arguments),) = stub.launches
    assert (x, y, z, function) == (6, 1, 1, "function")
    assert len(arguments) == len(ptx.update_kernel.arg_names)
    assert arguments[5:7] == [3, 0]
    assert arguments[7:] == list(dict(ptx_launch.update_specialization(0).constants).values())


def test_host_path_only_the_ptx_version_reaches_the_compiler(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERSION, "8.0")
    described, _gradients = table(1)
    ptx.kernels().adamw_scaled(described, torch.rand(1, COEFFICIENTS), 1.0, 1.0)
    (compiled,) = ptx_launch._compiled.values()
    assert ".version 8.0\n" in compiled.asm["ptx"]


def test_host_path_only_a_bad_ptx_version_reaches_no_compiler(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERSION, "7.9")
    described, _gradients = table(1)
    with pytest.raises(InvalidOption, match=r"from 8\.0 to .* on sm_90"):
        ptx.kernels().adamw_scaled(described, torch.rand(1, COEFFICIENTS), 1.0, 1.0)
    assert stub.loaded == []


def test_host_path_only_without_a_compiled_object_the_public_path_is_taken(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(ptx.update_kernel).warmup

    def nothing(self: object, *arguments: object, **options: object) -> None:
        real(self, *arguments, **options)

    monkeypatch.setattr(type(ptx.update_kernel), "warmup", nothing)
    described, _gradients = table(1)
    for _ in range(2):
        ptx.kernels().adamw_scaled(described, torch.rand(1, COEFFICIENTS), 0.5, 1.0)
    assert stub.loaded == ["update_kernel"]
    (launch, again) = stub.launches
    assert launch[:3] == again[:3] == (1, 1, 1)
    assert list(launch[14:16]) == [1, 0]


# --------------------------------------------------------------------------------------------------------- availability


def test_unavailable_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert "built without CUDA and without ROCm" in ptx.unavailable()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no CUDA or ROCm device is visible" in ptx.unavailable()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ptx.unavailable() is None


def test_without_triton_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "ruda_optim.fused_adamw.kernels."
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("triton", "triton.update", "triton.launch", "triton.memory", "triton.statistics"):
        monkeypatch.delitem(sys.modules, package + name)
    with pytest.raises(ImportError, match="comes with torch for CUDA and for ROCm"):
        importlib.import_module(package + "triton")
