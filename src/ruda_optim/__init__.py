"""ruda-optim: AdamW and AMSGrad whose whole update is one kernel.

The optimizer class is :class:`ruda_torch.AdamW`, the functional API :mod:`ruda_optim.fused_adamw`, and the generic
optimizer, built from plain tensor operations, :mod:`ruda_optim.generic`. Importing this package imports neither torch
nor NumPy, compiles nothing and touches no device.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in ("AdamW", "AdamWConfig"):
        raise ImportError(
            f"ruda_optim has no {name}: use `from ruda_torch import AdamW` for the optimizer that trains models "
            "(AdamW(params, lr=..., fused_step=True)), or `from ruda_optim.generic import AdamW, AdamWConfig` for the "
            "generic one, built from plain tensor operations"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
