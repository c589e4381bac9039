"""``ruda_optim.memory_estimate`` against the tensors that optimizers hold after a step, and the traffic model."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import ruda_torch
from ruda_optim import memory_estimate
from ruda_optim.fused_adamw import InvalidOption

ELEMENTS = 6000
HALF = ("float16", "bfloat16")


def sizes_after_a_step(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, int]:
    """Bytes of parameter, gradient, master and moments; all state but the step count is one of the two last."""
    optimizer.step()
    state = {name: tensor for name, tensor in optimizer.state[parameter].items() if name != "step"}
    master = sum(tensor.nbytes for name, tensor in state.items() if name.startswith("master"))
    sizes = {
        "parameter": parameter.nbytes,
        "gradient": parameter.grad.nbytes,
        "master": master,
        "moments": sum(tensor.nbytes for tensor in state.values()) - master,
    }
    return {**sizes, "total": sum(sizes.values())}


def parameter_of(dtype: str, gradient_dtype: str) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=getattr(torch, dtype)))
    parameter.grad_dtype = None
    parameter.grad = torch.ones(ELEMENTS, dtype=getattr(torch, gradient_dtype))
    return parameter


# What AdamW(moments=...) is tested with here.
MOMENTS = ("float32", "bfloat16", "packed16")
OURS = [
    (dtype, gradient, masters, moments, amsgrad)
    for dtype, masters in (("float32", "none"), ("float16", "fp32"), ("bfloat16", "fp32"), ("bfloat16", "split"))
    for gradient in (dtype, "float32" if dtype in HALF else "bfloat16")
    for moments in MOMENTS
    for amsgrad in (False, True)
]


@pytest.mark.parametrize(("dtype", "gradient", "masters", "moments", "amsgrad"), OURS)
def test_ours_is_what_the_optimizer_holds(dtype, gradient, masters, moments, amsgrad) -> None:
    parameter = parameter_of(dtype, gradient)
    optimizer = ruda_torch.AdamW(
        [parameter], amsgrad=amsgrad, fused_step=True, split_master=masters == "split", moments=moments
    )
    (expected,) = memory_estimate.estimate(
        dtype, gradient_dtype=gradient, masters=masters, moments=moments, amsgrad=amsgrad
    )
    assert sizes_after_a_step(optimizer, parameter) == expected.of(ELEMENTS)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_torchs_own_is_what_it_holds(dtype, amsgrad) -> None:
    parameter = parameter_of(dtype, dtype)
    optimizer = torch.optim.AdamW([parameter], amsgrad=amsgrad)
    (expected,) = (
        row
        for row in memory_estimate.estimate_others(dtype, amsgrad=amsgrad)
        if row.optimizer == "torch.optim.AdamW" and "autocast" not in row.keeps
    )
    assert sizes_after_a_step(optimizer, parameter) == expected.of(ELEMENTS)


@pytest.mark.parametrize(
    ("dtype", "masters", "amsgrad", "traffic"),
    [
        ("fp32", "none", False, (28, 20, 16)),
        ("fp32", "none", True, (36, 24, 20)),
        ("bf16", "split", False, (26, 18, 14)),
        ("bf16", "fp32", False, (30, 22, 18)),
        ("fp16", "fp32", False, (30, 22, 18)),
    ],
)
def test_traffic_is_that_of_the_kernels(dtype, masters, amsgrad, traffic) -> None:
    rows = memory_estimate.estimate(dtype, masters=masters, amsgrad=amsgrad)
    assert tuple(row.traffic for row in rows) == traffic


def test_state_in_bytes_an_element() -> None:
    """Parameter, master and moments of the mixed-precision page's table."""
    rows = memory_estimate.estimate("bfloat16", masters="split")
    assert [row.total - row.gradient for row in rows] == [12, 8, 6]


def moments_of(name: str, dtype: str, **options) -> list[float]:
    rows = memory_estimate.estimate_others(dtype, **options)
    return [float(row.moments) for row in rows if row.optimizer.split()[-1] == name]


def test_others_have_their_published_sizes() -> None:
    for dtype in ("float32", *HALF):
        assert set(moments_of("AdamW8bit", dtype)) == {2 + 2 * 4 / 256}
        assert moments_of("AdamW4bit", dtype) == [1 + 2 * 4 / 128]
        assert set(moments_of("FlashAdamW", dtype)) == {2.125}
        assert moments_of("DeepSpeedCPUAdam", dtype) == moments_of("FusedAdam", dtype) == [8]
    masters = {row.keeps: row.master for row in memory_estimate.estimate_others("bf16")}
    assert [masters[f"8-bit moments, groups of 32, {bits}-bit master"] for bits in (24, 32)] == [1, 2]
    assert {row.optimizer for row in memory_estimate.estimate_others(amsgrad=True)} == {"torch.optim.AdamW"}
    assert all(row.traffic is None and len(row.source) > 20 for row in memory_estimate.estimate_others("bf16"))


def test_defaults_give_every_choice() -> None:
    assert [len(memory_estimate.estimate(dtype)) for dtype in ("fp32", "fp16", "bf16")] == [3, 3, 6]
    assert memory_estimate.estimate("bf16") == memory_estimate.estimate("bfloat16", gradient_dtype="bf16")
    assert all(row.gradient == 4 for row in memory_estimate.estimate("bf16", gradient_dtype="fp32"))


def test_whole_bytes_round_up() -> None:
    rows = [row for row in memory_estimate.estimate_others("bf16") if "FlashAdamW" in row.optimizer]
    assert rows[0].of(5)["moments"] == math.ceil(5 * 2.125)
    assert rows[0].of("5")["total"] == 10 + 10 + 5 + 11


@pytest.mark.parametrize("given", ["8e9", 8e9, 8_000_000_000, "8_000_000_000"])
def test_number_of_parameters(given) -> None:
    assert memory_estimate.parameter_count(given) == 8_000_000_000


@pytest.mark.parametrize(
    "given", [0, -1, "0", "nan", math.nan, math.inf, "-inf", "many", "1/0", 1.5, "", None, 0.5, "1e999999999"]
)
def test_not_a_number_of_parameters(given) -> None:
    with pytest.raises(InvalidOption, match=r"must be whole and at least 1, for example 8e9, got"):
        memory_estimate.parameter_count(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp64"}, r"dtype must be one of float32, .*bf16, got 'fp64'"),
        ({"gradient_dtype": "int8"}, "gradient_dtype must be one of"),
        ({"moments": "int8"}, "moments must be one of float32, bfloat16, packed16, got 'int8'"),
        ({"masters": "fp8"}, "masters must be one of fp32, split, none, got 'fp8'"),
        ({"masters": "split"}, "an FP32 parameter is its own master"),
        ({"dtype": "fp16", "masters": "split"}, "masters must be fp32 for float16 parameters, got split: FP16 is not"),
        ({"dtype": "bf16", "masters": "none"}, "masters must be fp32 or split for bfloat16 parameters, got none"),
    ],
)
def test_what_does_not_exist_is_refused(options, message) -> None:
    with pytest.raises(InvalidOption, match=message):
        memory_estimate.estimate(**options)


def test_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None)\n"
        "from ruda_optim.cli import main; raise SystemExit(main(['memory', '--params', '1e6']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "ruda_torch.AdamW, packed16 moments" in result.stdout
