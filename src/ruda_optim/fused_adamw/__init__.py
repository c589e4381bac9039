"""The fused AdamW / AMSGrad step as functions over tensors: ``ruda_optim.fused_adamw``.

Options, statistics plans and the FP64 reference work without torch. Names that need torch or NumPy are resolved on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors as errors
from . import stats_plan as stats_plan
from .errors import DifferentDevice as DifferentDevice
from .errors import FusedAdamWError as FusedAdamWError
from .errors import InvalidOption as InvalidOption
from .errors import InvalidState as InvalidState
from .errors import InvalidTensor as InvalidTensor
from .errors import NonFiniteGradients as NonFiniteGradients
from .errors import ShapeMismatch as ShapeMismatch
from .errors import StepOverflow as StepOverflow
from .gradient_norm import GradientDecision as GradientDecision
from .gradient_norm import GradientGuardOptions as GradientGuardOptions
from .gradient_norm import GradientStats as GradientStats
from .gradient_norm import NonFinitePolicy as NonFinitePolicy
from .options import AdamWOptions as AdamWOptions
from .options import StepCoefficients as StepCoefficients
from .options import StepControl as StepControl
from .state import AdamWState as AdamWState
from .state import AdamWUpdate as AdamWUpdate
from .stats_plan import StatsPlan as StatsPlan

if TYPE_CHECKING:
    from . import reference as reference
    from . import storage as storage
    from .step import GuardedUpdate as GuardedUpdate
    from .step import adamw_step as adamw_step
    from .step import gradient_stats as gradient_stats
    from .step import guarded_adamw_step as guarded_adamw_step

__all__ = [
    "AdamWOptions",
    "AdamWState",
    "AdamWUpdate",
    "DifferentDevice",
    "FusedAdamWError",
    "GradientDecision",
    "GradientGuardOptions",
    "GradientStats",
    "GuardedUpdate",
    "InvalidOption",
    "InvalidState",
    "InvalidTensor",
    "NonFiniteGradients",
    "NonFinitePolicy",
    "ShapeMismatch",
    "StatsPlan",
    "StepCoefficients",
    "StepControl",
    "StepOverflow",
    "adamw_step",
    "errors",
    "gradient_stats",
    "guarded_adamw_step",
    "reference",
    "stats_plan",
    "storage",
]

_FROM_STEP = ("GuardedUpdate", "adamw_step", "gradient_stats", "guarded_adamw_step")
_SUBMODULES = ("reference", "storage")


def __getattr__(name: str) -> Any:
    if name in _FROM_STEP:
        return getattr(import_module(f"{__name__}.step"), name)
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
