"""The CUDA C++ backend: ``csrc/cuda.cu``, compiled by NVRTC when it is first used."""

from __future__ import annotations

from .launch import kernels as kernels
from .launch import unavailable as unavailable
