"""Short training runs of a few small parameters, and everything they leave behind, for tests that compare runs."""

from __future__ import annotations

import io
import itertools

import torch

import ruda_torch

# A matrix, a channels_last convolution, an empty tensor, a scalar.
SHAPES = ((17, 5), (4, 3, 3, 2), (0,), ())


def model(dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]
    parameters[1].data = parameters[1].data.to(memory_format=torch.channels_last)
    return parameters


def adamw(parameters, **options):
    return ruda_torch.AdamW(parameters, **{"lr": 1e-2, "fused_step": True, **options})


def run(optimizer, steps, first=0):
    """Steps with gradients that depend on the step's number alone."""
    for step in range(first, first + steps):
        random = torch.Generator().manual_seed(1000 + step)
        for p in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
        optimizer.step()


def clones(parameters):
    return [torch.nn.Parameter(p.detach().clone()) for p in parameters]


def contents(optimizer):
    """Parameters and state as bytes and shapes, in order."""
    found = []
    for p in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
        state = optimizer.state.get(p, {})
        for name, tensor in [("parameter", p.detach()), *sorted(state.items())]:
            found.append((name, tensor.dtype, tuple(tensor.shape), raw_bytes(tensor)))
    return found


def raw_bytes(tensor):
    """Every bit of a tensor, in logical order."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integer).numpy().tobytes()


def master_of(parameter, state):
    """The FP32 value of a half parameter, whichever kind of master it has."""
    if "master" in state:
        return state["master"]
    low = state["master_remainder"].view(torch.int16).to(torch.int32)
    return ((parameter.detach().view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def saved_and_loaded(saved, how):
    if how == "in process":
        return saved
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
