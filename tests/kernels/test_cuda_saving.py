"""A checkpoint that is saved while the GPU still works on the step. Run by the suite ``cuda``, like test_cuda.py."""

from __future__ import annotations

import pytest
import torch
from cuda_runs import CPU, contents, give_gradients, optimizer_of, parameters_of, require
from test_nvrtc import assert_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("compiler", ["nvrtc", "ptx"])
def test_a_file_saved_right_after_a_step_holds_that_step(kind, compiler, tmp_path, monkeypatch) -> None:
    require(compiler)
    monkeypatch.setenv("RUDA_CUDA_COMPILER", compiler)
    sides = []
    for device in (DEVICE, CPU):
        parameters = parameters_of(kind, device)
        optimizer = optimizer_of(parameters, max_grad_norm=1e30)
        for seed in range(3):
            give_gradients(parameters, seed)
            if device is DEVICE:
                torch.cuda._sleep(50_000_000)  # tens of milliseconds: the file is asked for long before the step runs
            optimizer.step()
        file = tmp_path / f"{device.type}.pt"
        torch.save({"parameters": list(parameters), "optimizer": optimizer.state_dict()}, file)
        saved = torch.load(file, map_location="cpu", weights_only=True)
        restored = parameters_of(kind, CPU)
        with torch.no_grad():
            for parameter, value in zip(restored, saved["parameters"], strict=True):
                parameter.copy_(value)
        optimizer = optimizer_of(restored)
        optimizer.load_state_dict(saved["optimizer"])
        sides.append(contents(optimizer))
    assert_same_bits(*sides)
