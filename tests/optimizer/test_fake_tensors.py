"""Parameters without memory, on meta or under FakeTensorMode: their state gets its shapes, and nothing is launched."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ruda_torch
from ruda_optim.fused_adamw import InvalidTensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_the_state_has_the_shapes_of_a_real_one(mode: str, dtype: torch.dtype) -> None:
    """As estimates of memory and checkpoint loaders ask for it; a second step finds what the first one left."""

    def states(place: contextlib.AbstractContextManager):
        with place:
            model = nn.Linear(3, 4, dtype=dtype)
            optimizer = ruda_torch.AdamW(model.parameters(), fused_step=True, amsgrad=True, max_grad_norm=1.0)
            for _ in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            for parameter in model.parameters():
                yield {key: (value.shape, value.dtype) for key, value in optimizer.state[parameter].items()}

    real = list(states(contextlib.nullcontext()))
    assert list(states(FakeTensorMode() if mode == "fake" else torch.device("meta"))) == real


def test_a_step_does_not_leave_half_of_the_parameters_out() -> None:
    real, meta = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    optimizer = ruda_torch.AdamW([real, meta], fused_step=True)
    for parameter in (real, meta):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InvalidTensor, match=r"parameter 1 of group 0 has no memory .*to_empty"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("known", [False, True], ids=["first step", "with a plan"])
def test_a_fake_gradient_of_a_real_parameter_is_refused(known: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ruda_torch.AdamW([parameter], fused_step=True)
    if known:
        parameter.grad = torch.ones(3)
        optimizer.step()
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameter.grad = torch.ones(3)
    with pytest.raises(InvalidTensor, match="the gradient of parameter 0 of group 0 must have memory of its own"):
        optimizer.step()
