"""The fused AdamW / AMSGrad step as a PyTorch optimizer class."""

from ruda_optim import __version__ as __version__

from .adamw import AdamW as AdamW
from .checkpoint import convert_amsgrad as convert_amsgrad
from .grad_scaler import GradScaler as GradScaler
from .moments import unpack_moments as unpack_moments
from .report import SkippedStepsWarning as SkippedStepsWarning
from .sharding import mark_distinct as mark_distinct

__all__ = ["AdamW", "GradScaler", "SkippedStepsWarning", "convert_amsgrad", "mark_distinct", "unpack_moments"]
