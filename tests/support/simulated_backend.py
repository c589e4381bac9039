"""The device backend that this process can simulate on a CPU, so that one file of tests serves both of them.

Triton's interpreter where ``TRITON_INTERPRET=1`` was set when the process started, as ``tests/kernels/test_ptx.py``
does; else ``csrc/cuda.cu`` on the host simulator. Nothing that runs through here has seen a GPU.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from fused_adamw import host_simulator

if TYPE_CHECKING:
    from ruda_optim.fused_adamw.kernels import Kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Why nothing can be simulated, or ``None``."""
    return None if INTERPRETED else host_simulator.unavailable()


@functools.cache
def kernels() -> Kernels:
    """The record."""
    if INTERPRETED:
        from ruda_optim.fused_adamw.kernels.triton import update

        return update.kernels(simulate=True)
    return host_simulator.kernels()
