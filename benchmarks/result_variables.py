"""The environment variables that change what is measured or tested. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

PREFIXES = (
    "RUDA_", "TRITON_", "CUDA_", "NVRTC_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "HSA_",
    "PYTORCH_", "TORCH", "ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "GLOO_",
    "MALLOC_", "GLIBC_", "LD_", "DYLD_", "PYTEST_", "HYPOTHESIS_",
)  # fmt: skip
NAMES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONPATH",
         "PYTHONWARNINGS", "PYTHONMALLOC")  # fmt: skip
OWN = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT",
       "PYTEST_XDIST_TESTRUNUID")  # fmt: skip
"""pytest's word to the code under test, not ours to it."""


def result_variables() -> dict[str, str]:
    """Those that are set, by name. In their values the repository is ``.`` and the home folder ``~``."""
    return {
        name: portable(value)
        for name, value in sorted(os.environ.items())
        if (name.startswith(PREFIXES) or name in NAMES) and name not in OWN
    }


def portable(value: str) -> str:
    home = str(Path.home())
    value = value.replace(str(Path(__file__).resolve().parents[1]), ".")
    return value if home == "/" else value.replace(home, "~")
