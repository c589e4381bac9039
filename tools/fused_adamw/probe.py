"""What this machine has, as one JSON object: versions, devices, and for each tool that is missing the reason.

The runner starts it in a process of its own, so that the runner itself imports neither torch nor a compiler.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "numpy", "ruda-optim", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "pytest",
            "hypothesis", "matplotlib", "rich")  # fmt: skip
# `-i 0`: the device that the suites use, unless CUDA_VISIBLE_DEVICES says otherwise.
_SMI = "driver_version,name,power.draw,power.limit,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu"


def importable(name: str) -> str | None:
    """Why a module cannot be imported, or None."""
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  a broken installation fails in any way it likes
        return f"{name} cannot be imported: {type(error).__name__}: {error}"
    return None


def missing_tools() -> dict[str, str | None]:
    """By tool, why it cannot be used here, or None. ``torch`` first: most others need it."""
    found = {name: importable(name) for name in ("torch", "numpy", "pytest", "hypothesis", "triton", "matplotlib")}
    if found["torch"] is not None:
        reason = found["torch"]
        return {**found, "operator": reason, "nvrtc compiler": reason, "simulator": reason, "gpu": reason,
                "nvrtc": reason, "ptx": reason, "torch of the fixtures": reason}  # fmt: skip
    import torch

    sys.path.insert(0, str(TOOLS))
    found["torch of the fixtures"] = other_torch()
    found["package"] = importable("ruda_optim")
    if found["package"] is not None:
        reason = found["package"]
        return {**found, "operator": reason, "nvrtc compiler": reason, "simulator": reason, "gpu": reason,
                "nvrtc": reason, "ptx": reason}  # fmt: skip
    from fused_adamw import host_simulator
    from ruda_optim.fused_adamw import storage
    from ruda_optim.fused_adamw.kernels.nvrtc import compiler as nvrtc_compiler

    backends = {entry.name: None if entry.available else entry.reason for entry in storage.available()}
    found["operator"] = backends["cpu"]
    found["nvrtc"], found["ptx"] = backends["nvrtc"], backends["ptx"]
    found["nvrtc compiler"] = nvrtc_compiler.missing_toolchain()
    found["simulator"] = host_simulator.unavailable()
    found["gpu"] = None
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "sees no device" if built else "is built without CUDA"
        found["gpu"] = f"needs a GPU that torch can use, and this machine has none: torch {torch.__version__} {why}"
    return found


def other_torch() -> str | None:
    """Why the fixtures of the oracle cannot be compared with this torch, or None."""
    import torch

    wanted = json.loads((TOOLS / "fused_adamw" / "pytorch_fixtures.json").read_text(encoding="utf-8")).get("torch")
    release = torch.__version__.partition("+")[0]
    return None if wanted == release else f"the fixtures were made with torch {wanted}, this is torch {release}"


def environment(tools: dict[str, str | None]) -> dict[str, Any]:
    """Machine and versions."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES},
        "gpu": None,
    }
    if tools["torch"] is None:
        import torch

        found["threads"] = torch.get_num_threads()
        found["cuda"] = torch.version.cuda
        if tools["gpu"] is None:
            properties = torch.cuda.get_device_properties(0)
            found["gpu"] = properties.name
            found["gpu memory"] = properties.total_memory
            found["compute capability"] = f"{properties.major}.{properties.minor}"
            found["nvidia-smi"] = smi()
    return found


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def smi() -> dict[str, str] | None:
    """Driver, clocks and power of the first GPU, as nvidia-smi prints them; None without nvidia-smi."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(_SMI.split(","), (value.strip() for value in printed.split(",")), strict=False))


def main() -> None:
    tools = missing_tools()
    print(json.dumps({"missing": tools, "environment": environment(tools)}))


if __name__ == "__main__":
    main()
