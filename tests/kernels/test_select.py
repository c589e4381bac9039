"""Which record of kernels a device gets."""

from __future__ import annotations

import types

import pytest
import torch

from ruda_optim.fused_adamw import InvalidOption, kernels

CUDA = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which backends were asked whether they can run; all say yes, and their record is their name."""
    asked: list[str] = []

    def backend(name: str, _package: str) -> object:
        asked.append(name)
        return types.SimpleNamespace(unavailable=lambda: None, kernels=lambda: name)

    monkeypatch.setattr(kernels.importlib, "import_module", backend)
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_on_cuda", {})
    monkeypatch.delenv(kernels.CUDA_COMPILER_VARIABLE, raising=False)
    return asked


def test_a_backend_is_asked_once(asked: list[str]) -> None:
    """A step selects several times; the answer of a backend that is absent costs a third of a millisecond."""
    assert kernels.select(CUDA) == ".nvrtc"
    count = len(asked)
    assert count
    for _ in range(5):
        assert kernels.select(CUDA) == kernels.select(torch.device("cuda", 1)) == ".nvrtc"
    assert len(asked) == count


def test_the_variable_is_heard_at_every_call(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.select(CUDA) == ".nvrtc"
    monkeypatch.setenv(kernels.CUDA_COMPILER_VARIABLE, "ptx")
    assert kernels.select(CUDA) == ".triton"
    assert kernels.select(CUDA, "nvrtc") == ".nvrtc", "an argument comes first"
    for _ in range(2):
        monkeypatch.setenv(kernels.CUDA_COMPILER_VARIABLE, "gcc")
        with pytest.raises(InvalidOption, match="RUDA_CUDA_COMPILER must be one of nvrtc, ptx; got 'gcc'"):
            kernels.select(CUDA)
