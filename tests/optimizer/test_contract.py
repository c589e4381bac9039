"""Promises of docs/contract.md that no other test holds."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_runs import same_bits

import ruda_torch
from ruda_optim.fused_adamw import (
    AdamWOptions,
    GradientGuardOptions,
    StepControl,
    adamw_step,
    guarded_adamw_step,
)

SHAPES = ((33, 7), (64,), (), (1000,), (1,))  # vectors begin at other elements in the bucket than in the tensors
SCALED = StepControl(gradient_scale=8.0)


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_flattened_bucket_gets_the_bits_of_its_tensors(amsgrad) -> None:
    """By the class and by both functions. Each is given the same clip factor: 1, since no norm reaches the limit."""
    options = AdamWOptions(amsgrad=amsgrad)
    guard = GradientGuardOptions(max_norm=1e30)
    starts = draw(0)
    apart: list[torch.Tensor] = [torch.nn.Parameter(start.clone()) for start in starts]
    bucket = torch.nn.Parameter(flat(starts))
    optimizers = [
        ruda_torch.AdamW(parameters, amsgrad=amsgrad, fused_step=True, max_grad_norm=1e30)
        for parameters in (apart, [bucket])
    ]
    entries = [[(start, None) for start in starts], [(flat(starts), None)]]
    singles = [list(rows) for rows in entries]
    for seed in range(1, 4):
        gradients = draw(seed)
        sides = (gradients, [flat(gradients)])
        for parameter, gradient in zip(apart, gradients, strict=True):
            parameter.grad = gradient.clone()
        bucket.grad = flat(gradients)
        for optimizer in optimizers:
            optimizer.step()
        assert same_bits(flat(apart).detach(), bucket.detach())

        for side, given in enumerate(sides):
            rows = [(p, g, state) for (p, state), g in zip(entries[side], given, strict=True)]
            updates = guarded_adamw_step(rows, options, SCALED, guard).updates
            entries[side] = [(update.parameters, update.state) for update in updates]
            updates = [adamw_step(p, g, s, options) for (p, s), g in zip(singles[side], given, strict=True)]
            singles[side] = [(update.parameters, update.state) for update in updates]
        for rows in (entries, singles):
            assert same_bits(flat([p for p, _ in rows[0]]), rows[1][0][0])
            for moment in ("first_moment", "second_moment"):
                assert same_bits(flat([getattr(s, moment) for _, s in rows[0]]), getattr(rows[1][0][1], moment))


def test_a_count_at_the_end_of_fp32_stays_and_changes_no_bit() -> None:
    """0.999 to the power of 2^24 is below 1e-7000: both corrections are 1, whatever the count."""
    results = []
    for count in (2.0**24, 2.0**24 - 64):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 100))
        optimizer = ruda_torch.AdamW([parameter], fused_step=True)
        for step in range(4):
            parameter.grad = torch.linspace(2, -1, 100) * (step + 1)
            optimizer.step()
            if step == 0:
                saved = optimizer.state_dict()
                saved["state"][0]["step"] = torch.tensor(count)
                optimizer.load_state_dict(saved)
        results.append((float(optimizer.state[parameter]["step"]), parameter.detach()))
    assert [count for count, _ in results] == [2.0**24, 2.0**24 - 61]
    assert same_bits(results[0][1], results[1][1])


def stepped(dtype: torch.dtype = torch.float32, **settings) -> tuple[torch.nn.Linear, ruda_torch.AdamW]:
    layer = torch.nn.Linear(40, 30, dtype=dtype)
    optimizer = ruda_torch.AdamW(layer.parameters(), fused_step=True, max_grad_norm=1.0, **settings)
    for _ in range(2):
        give_gradients(layer)
        optimizer.step()
    return layer, optimizer


def give_gradients(layer: torch.nn.Module, value: float = 1.0) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, value)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bfloat16, {}), (torch.bfloat16, {"split_master": False}), (torch.float16, {})],
    ids=["split master", "BF16 with FP32 master", "FP16"],
)
def test_a_half_parameter_that_somebody_wrote_is_what_the_step_starts_from(dtype, settings) -> None:
    """Through ``.data``, which leaves no trace. The other elements keep the low bits of their masters."""
    written = stepped(dtype, **settings)
    untouched = copy.deepcopy(written)
    written[0].weight.data[3:5] = 2.0
    for layer, optimizer in (written, untouched):
        give_gradients(layer)
        optimizer.step()
    one, other = (layer.weight.detach().float() for layer, _ in (written, untouched))
    # One step of lr 1e-3 and 1 % decay from 2: at most 0.002 away, and rounded to a neighbour of 2.
    assert float((one[3:5] - 2.0).abs().max()) <= 2.0 * torch.finfo(dtype).eps
    assert same_bits(one[:3], other[:3])
    assert same_bits(one[5:], other[5:])
