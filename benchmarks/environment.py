"""The machine and the software a measurement belongs to, and how busy others keep the machine."""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import platform
import subprocess
import sys
import time
from importlib import metadata

import torch

from result_variables import result_variables

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER_PACKAGES = ("deepspeed", "torchao", "torch-optimi", "bitsandbytes")


class ForeignLoad:
    """Share of all CPU time that went to other processes (or to the hypervisor's other guests) since ``start``."""

    def __init__(self) -> None:
        self._available = pathlib.Path("/proc/stat").exists()
        self.start()

    def start(self) -> None:
        self._before = self._read()

    def read(self) -> float | None:
        """Between 0 and 1; None where the system does not tell."""
        if not self._available:
            return None
        busy, own, wall = (now - then for now, then in zip(self._read(), self._before, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    def _read(self) -> tuple[float, float, float]:
        if not self._available:
            return 0.0, 0.0, 0.0
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(field) for field in stat.readline().split()[1:]]
        user, nice, system, _idle, _iowait, interrupts, soft, steal = fields[:8]  # guest time is part of user and nice
        busy = (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return busy, times.user + times.system, time.monotonic()


def describe(device: torch.device, command: list[str]) -> dict[str, object]:
    """Date, machine, versions and command line, as plain values for JSON."""
    from ruda_optim.fused_adamw.kernels import cpu

    found: dict[str, object] = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *command]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu level": f"x86-64-v{cpu.level()}" if cpu.level() else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "ruda-optim", "numpy", "triton", *PEER_PACKAGES)},
        "variables": result_variables(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["cuda"] = torch.version.cuda
        found["nvidia-smi"] = _run("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv")
    return found


def command_line(script: str) -> list[str]:
    """This process's command, with the script as the repository names it."""
    return [f"benchmarks/{script}", *sys.argv[1:]]


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        seen: dict[str, str] = {}
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            seen.setdefault(key.strip(), value.strip())
        if "model name" in seen:
            return f"{seen['model name']} (family {seen.get('cpu family')}, model {seen.get('model')})"
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    return _run("git", "-C", str(ROOT), *arguments)


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
