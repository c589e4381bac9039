"""The C++ library: where it lies, and its operators.

The library is found as a module (so an editable install, a wheel and a source tree all work) and loaded with
``torch.ops.load_library`` on first use; importing this file loads nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


def unavailable() -> str | None:
    """Why the CPU operator cannot run, or ``None``."""
    if path() is None:
        return (
            "ruda-optim was built without its C++ operator, which the fused step needs on the CPU. Install a C++ "
            "compiler (Debian: apt-get install g++) and reinstall: pip install "
            "--no-build-isolation --force-reinstall ruda-optim"
        )
    return None


def path() -> str | None:
    """The library's file, or ``None`` for a package that was built without it."""
    spec = importlib.util.find_spec(f"{__package__}._ops")
    return None if spec is None else spec.origin


@functools.cache
def operators() -> Any:
    """The namespace of C++ operators, loaded once.

    Raises:
        ImportError: the package was built without the operator.
    """
    reason = unavailable()
    if reason is not None:
        raise ImportError(reason)
    torch.ops.load_library(path())
    return torch.ops.ruda_optim


def level() -> int:
    """The instruction-set level in use: 4, 3 or 2 for x86-64-v4, v3, v2; 0 for the plain build."""
    return int(operators().cpu_level.default(torch.empty(0, device="cpu")))
