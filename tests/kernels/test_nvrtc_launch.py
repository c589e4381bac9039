"""Host path only: how a kernel is loaded and launched, against a driver that does nothing but write down its calls.

The real cuda-bindings package calls a stand-in for libcuda, so names, signatures and the packing of arguments are those
of a GPU machine; no kernel runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from ruda_optim.fused_adamw.kernels.nvrtc import compiler as nvrtc_compiler
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc

_missing = nvrtc_compiler.missing_toolchain()
pytestmark = [
    pytest.mark.skipif(_missing is not None, reason=str(_missing)),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, to compile the stand-in for libcuda"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch would load the stand-in for libcuda"),
]

INSTANCE = "ruda::update<0, 0, 1, 0>"
DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static __thread void* context;
int cuCtxGetCurrent(void** out) { *out = context; return 0; }
int cuDevicePrimaryCtxRetain(void** out, int device) { *out = (void*)(intptr_t)(0x100 + device); return 0; }
int cuCtxSetCurrent(void* in) { context = in; printf("context %p\n", in); return 0; }
int cuLibraryLoadData(void** library, const char* code, void* a, void* b, unsigned n, void* c, void* d, unsigned m) {
  printf("load %.3s %u %u\n", code + 1, n, m);
  *library = (void*)0x11;
  return 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  printf("kernel %p %s\n", library, name);
  *kernel = (void*)0x22;
  return 0;
}
int cuGetErrorString(int error, const char** text) { *text = "the stand-in refuses"; return 0; }
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** p, void** extra) {
  printf("launch %p %u,%u,%u %u,%u,%u %u %p", kernel, gx, gy, gz, bx, by, bz, shared, stream);
  for (int i = 0; i < 6; ++i) printf(" %llx", *(unsigned long long*)p[i]);
  printf(" %d %g\n", *(int*)p[6], *(float*)p[7]);
  return gx == 99 ? 1 : extra != 0;
}
int cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
#define ENTRY(f) if (strcmp(name, #f) == 0) *out = (void*)f;
  *out = 0;
  ENTRY(cuCtxGetCurrent) ENTRY(cuDevicePrimaryCtxRetain) ENTRY(cuCtxSetCurrent) ENTRY(cuLibraryLoadData)
  ENTRY(cuLibraryGetKernel) ENTRY(cuGetErrorString) ENTRY(cuLaunchKernel)
  if (strcmp(name, "cuGetProcAddress") == 0) *out = (void*)cuGetProcAddress_v2;
  if (status) *status = *out == 0;
  setvbuf(stdout, 0, _IONBF, 0);
  return *out ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, 0);
}
"""
PROGRAM = f"""
import threading, types
import torch
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda index: (9, 0)
torch.cuda.current_stream = lambda index: types.SimpleNamespace(cuda_stream=0x5000 + index)
launch = nvrtc.CudaLauncher()
def go(blocks, *arguments):
    device = torch.device("cuda")
    with launch.on(device):
        launch(device, {INSTANCE!r}, blocks, *arguments)
go(3, 2**63 + 1, 0x20, 0x30, 4, 0x50, 0x60, 1, 0.1)
go(2**31 - 1, 1, 2, 3, 4, 5, 6, 0, 0.5)
thread = threading.Thread(target=go, args=(7, 1, 2, 3, 4, 5, 6, 0, 0.5))
thread.start()
thread.join()
torch.cuda.current_stream = lambda index: types.SimpleNamespace(cuda_stream=0)
go(5, 1, 2, 3, 4, 5, 6, 0, 0.5)
try:
    go(99, 1, 2, 3, 4, 5, 6, 0, 0.5)
except RuntimeError as error:
    print("error", error, flush=True)
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the stand-in wrote down while the program above ran."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    build = ["gcc", "-shared", "-fPIC", str(folder / "driver.c"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(build, check=True, capture_output=True, text=True)
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "RUDA_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    # NVRTC looks for a driver as well, and a stand-in is not enough for it: compile before there is one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUDA_CACHE_DIR", environment["RUDA_CACHE_DIR"])
        nvrtc_compiler.cubin(INSTANCE, "sm_90")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_host_path_only_a_kernel_is_loaded_once(calls: list[str]) -> None:
    assert [line for line in calls if line.startswith("load")] == ["load ELF 0 0"]
    (kernel,) = (line for line in calls if line.startswith("kernel"))
    assert kernel.startswith("kernel 0x11 _ZN4ruda6updateILi0ELi0ELi1E")


def test_host_path_only_launches_carry_their_arguments(calls: list[str]) -> None:
    launches = [line for line in calls if line.startswith("launch")]
    legacy = "0x1"  # torch's default stream by its handle; 0 would be whatever cuda-bindings was told
    assert launches == [
        f"launch 0x22 {blocks},1,1 {nvrtc.THREADS},1,1 0 {stream} {arguments}"
        for blocks, stream, arguments in (
            (3, "0x5000", "8000000000000001 20 30 4 50 60 1 0.1"),
            (2**31 - 1, "0x5000", "1 2 3 4 5 6 0 0.5"),
            (7, "0x5000", "1 2 3 4 5 6 0 0.5"),
            (5, legacy, "1 2 3 4 5 6 0 0.5"),
            (99, legacy, "1 2 3 4 5 6 0 0.5"),
        )
    ]


def test_host_path_only_every_thread_gets_a_context(calls: list[str]) -> None:
    assert [line for line in calls if line.startswith("context")] == ["context 0x100"] * 2


def test_host_path_only_a_refused_launch_is_an_error(calls: list[str]) -> None:
    assert calls[-1] == f"error launching {INSTANCE} on cuda:0, 99 blocks, failed: the stand-in refuses"
