"""What each suite of the regression runner consists of: lists of commands. Standard library only."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fused_adamw.execute import DTYPES, ROOT, Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMPILERS = ("nvrtc", "ptx")
# Each line is one pytest process; the names are those of tests/*/test_*.py.
HOST = {
    "CPU operator": "cpu_kernel cpu_prefetch cpu_statistics float_mode launch_table memory moments plan select",
    "functional API and gradient guard": "storage step guarded_step gradient_norm",
    "generic AdamW": "generic_adamw",
    "torch API": "adamw_class adamw_memory adamw_moves adamw_refusals compiled contract disturbed_steps "
    "fake_tensors grad_scaler gradient_report hyperparameters masters memory_estimate memory_owners "
    "moment_forms peer_cases peer_interface report state_shown wrappers",
    "checkpoints": "checkpoint checkpoint_failures checkpoint_settings foreign_checkpoints quantized_checkpoints",
}
# Reasons for skips that say nothing against a pass: the machine is what it is.
MACHINE = (r"instruction[- ]set", r"x86-64", r"processor")
# These suites also run with other versions than the pinned ones, whose warnings are not ours. `make test` is strict.
LENIENT = ("-W", "default")
NVRTC_TARGETS = ("sm_80", "sm_90", "sm_100")
TRITON_TARGETS = (*NVRTC_TARGETS, "gfx942")


@dataclass(frozen=True)
class Choice:
    """The options of one call of the runner that shape its commands; see the runner's help."""

    compilers: tuple[str, ...] = COMPILERS
    dtype: str | None = None
    device: str = "cpu"
    elements: int = 2**24
    iterations: int = 20
    samples: int = 7
    amsgrad: bool = False
    bench_output: Path | None = None
    """Where ``bench`` leaves its measurements: the start of a file name."""


def python(*words: str) -> tuple[str, ...]:
    return (sys.executable, *words)


def pytest(*words: str) -> tuple[str, ...]:
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


def tests(names: str) -> tuple[str, ...]:
    return tuple(str(next((ROOT / "tests").glob(f"*/test_{name}.py")).relative_to(ROOT)) for name in names.split())


def oracle(choice: Choice) -> list[Task]:
    """The formula and the fixtures; no kernel of ours runs."""
    return [
        Task("oracle", "PyTorch, fixtures and reference", python("tools/fused_adamw/oracle.py", "--check"),
             needs=("torch of the fixtures",)),
        Task("oracle", "tolerances of the case table", pytest(*tests("cases")), needs=("torch", "pytest"), pytest=True),
    ]  # fmt: skip


def reference(choice: Choice) -> list[Task]:
    """Options, reference and plan: first where torch cannot be imported, then by their tests."""
    return [
        Task("reference", "without torch", python("tools/fused_adamw/without_torch.py"), needs=("numpy", "package")),
        Task("reference", "options, reference, plan",
             pytest(*tests("options reference moment_codes stats_plan gradient_norm")),
             needs=("package", "pytest"), pytest=True),
    ]  # fmt: skip


def host(choice: Choice) -> list[Task]:
    """Everything that computes on the CPU for its users."""
    commands = {name: tests(files) for name, files in HOST.items()}
    commands["PyTorch fixtures"] = (*tests("fixtures"), "-k", "not simulator")
    return [
        Task("host", name, pytest(*LENIENT, *words), compiler="cpu", needs=("operator", "pytest"), pytest=True,
             may_skip=MACHINE)
        for name, words in commands.items()
    ]  # fmt: skip


def build(choice: Choice) -> list[Task]:
    """Every kernel that the library can ask for, compiled ahead of time; none is run."""
    tasks = []
    if "nvrtc" in choice.compilers:
        tasks += [
            Task("build", f"nvrtc, {target}", python("tools/fused_adamw/aot_nvrtc.py", "--arch", target),
                 f"no device (for {target})", "nvrtc", needs=("nvrtc compiler",))
            for target in NVRTC_TARGETS
        ]  # fmt: skip
    if "ptx" in choice.compilers:
        tasks += [
            Task("build", f"ptx, {target}", python("tools/fused_adamw/aot_triton.py", "--target", target),
                 f"no device (for {target})", "ptx", needs=("package", "triton"),
                 environment={"TRITON_INTERPRET": None})
            for target in TRITON_TARGETS
        ]  # fmt: skip
    return tasks


def simulate(choice: Choice) -> list[Task]:
    """The device kernels over the case table without a device, against the reference and the CPU operator's bits."""
    tasks = []
    if "nvrtc" in choice.compilers:
        # The statistics tests include the check that a deleted barrier is noticed.
        files = tests("nvrtc nvrtc_statistics decide device_table split_tables torch_settings engine graphs fixtures")
        tasks.append(Task("simulate", "simulation: CUDA source on the host simulator", pytest(*files),
                          "simulation on a CPU", "nvrtc", needs=("operator", "simulator", "pytest"), pytest=True,
                          simulation=True, may_skip=MACHINE))  # fmt: skip
    if "ptx" in choice.compilers:
        tasks.append(Task("simulate", "simulation: Triton kernels in the interpreter",
                          pytest("tests/kernels/simulated_ptx.py", *tests("decide")), "simulation on a CPU", "ptx",
                          environment={"TRITON_INTERPRET": "1"}, needs=("operator", "triton", "pytest"), pytest=True,
                          may_skip=(r"the interpreter takes a minute",), simulation=True))  # fmt: skip
    return tasks


def cuda(choice: Choice) -> list[Task]:
    """The kernels on hardware, one process per compiler, so that a crash of one does not hide the other."""
    other_dtypes = [f"not {dtype}" for dtype in DTYPES if choice.dtype not in (None, dtype)]
    runs = [(name, f"tests with {name}", [f"not {other}" for other in COMPILERS if other != name], (name,))
            for name in choice.compilers]  # fmt: skip
    if set(choice.compilers) == set(COMPILERS):
        runs.append((None, "nvrtc against ptx", ["nvrtc and ptx"], COMPILERS))
    files = pytest(*LENIENT, *tests("cuda cuda_optimizer cuda_saving"))
    return [
        Task("cuda", name, (*files, "-k", " and ".join([*chosen, *other_dtypes])), "cuda", compiler, choice.dtype,
             {"TRITON_INTERPRET": None}, ("operator", "pytest", *backends), gpu=True, pytest=True,
             may_skip=(r"GiB of free device memory",))
        for compiler, name, chosen, backends in runs
    ]  # fmt: skip


def bench(choice: Choice) -> list[Task]:
    """The fused step against the staged baseline and torch's own fused optimizer."""
    dtype = choice.dtype or "fp32"
    tasks = []
    for compiler in choice.compilers if choice.device == "cuda" else ("cpu",):
        name = choice.device if compiler == "cpu" else f"{choice.device}-{compiler}"
        words = [
            "tools/fused_adamw/bench.py", "--device", choice.device, "--elements", str(choice.elements), "--dtype",
            dtype, "--iterations", str(choice.iterations), "--samples", str(choice.samples),
        ]  # fmt: skip
        words += ["--amsgrad"] * choice.amsgrad
        words += [] if compiler == "cpu" else ["--compiler", compiler]
        if choice.bench_output is not None:
            words += ["--output", f"{choice.bench_output}-{name}.json"]
        needs = ("operator",) if compiler == "cpu" else ("operator", compiler)
        tasks.append(Task("bench", f"fused against others, {name}", python(*words), choice.device, compiler, dtype,
                          {"TRITON_INTERPRET": None}, needs, gpu=compiler != "cpu"))  # fmt: skip
    return tasks


SUITES: dict[str, Callable[[Choice], list[Task]]] = {
    "oracle": oracle,
    "reference": reference,
    "host": host,
    "build": build,
    "simulate": simulate,
    "cuda": cuda,
    "bench": bench,
}
WITHOUT_GPU = ("oracle", "reference", "host", "build", "simulate")


def tasks(names: list[str], choice: Choice) -> list[Task]:
    """The tasks of several suites, in the order asked for."""
    return [task for name in dict.fromkeys(names) for task in SUITES[name](choice)]
