"""The Triton backend, for CUDA (direct PTX) and ROCm devices."""

from __future__ import annotations

from .update import kernels as kernels
from .update import unavailable as unavailable
