"""ruda-optim: AdamW and AMSGrad whose whole update is one kernel.

``ruda_optim.AdamW`` is the generic optimizer, built from plain tensor operations; the fused functional API lives in
:mod:`ruda_optim.fused_adamw`, the ``torch.optim`` class in :mod:`ruda_torch`. Importing this package imports neither
torch nor NumPy, compiles nothing and touches no device: names that need torch are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adamw import AdamW as AdamW
    from .adamw import AdamWConfig as AdamWConfig

__version__ = "0.1.0"
__all__ = ["AdamW", "AdamWConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("AdamW", "AdamWConfig"):
        from . import adamw

        return getattr(adamw, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
