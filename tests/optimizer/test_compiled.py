"""``torch.compile`` of the step: one graph, the eager step's bits, nothing compiled anew for new hyperparameters."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import ruda_torch
from ruda_optim import fused_adamw
from ruda_optim.fused_adamw import InvalidState

SHAPES = ((5, 3), (7,), (0,), (33,))
# Inductor itself still imports a deprecated part of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def _parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.float32, torch.float32, torch.bfloat16)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def _bits(optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += [parameter.detach(), *optimizer.state.get(parameter, {}).values()]
    return [tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_step_has_one_graph_and_the_eager_bits(backend):
    compiled_parameters, eager_parameters = _parameters(), _parameters()
    options = {"lr": 1e-2, "fused_step": True, "max_grad_norm": 1.0}
    compiled = ruda_torch.AdamW(compiled_parameters, **options)
    eager = ruda_torch.AdamW(eager_parameters, **options)
    counter = CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True)
    def step():
        compiled.step()

    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for left, right in zip(compiled_parameters, eager_parameters, strict=True):
            left.grad = torch.randn(left.shape, generator=generator).to(left.dtype)
            right.grad = left.grad.clone()
        for optimizer in (compiled, eager):
            optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * number, 0.99)
        step()
        eager.step()
        assert _bits(compiled) == _bits(eager)
        assert compiled.last_grad_norm == eager.last_grad_norm
    assert counter.frame_count == 1, "new learning rates and betas must not compile a new graph"


def test_a_compiled_step_skips_non_finite_gradients():
    parameters = _parameters()
    optimizer = ruda_torch.AdamW(parameters, fused_step=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step():
        optimizer.step()

    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    step()
    before = _bits(optimizer)
    parameters[1].grad[-1] = float("nan")
    step()
    assert optimizer.last_step_skipped
    assert optimizer.skipped_steps == 1
    assert _bits(optimizer) == before


def test_a_frozen_parameter_stays_out_of_the_graph():
    parameters = _parameters()
    optimizer = ruda_torch.AdamW(parameters, fused_step=True)
    frozen = parameters[0].detach().clone()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step():
        optimizer.step()

    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    step()
    assert torch.equal(parameters[0], frozen)
    assert parameters[0] not in optimizer.state
    assert optimizer.state[parameters[1]]["step"] == 1


def test_a_step_with_a_scale_of_its_own_leaves_the_graph():
    compiled_parameters, eager_parameters = _parameters(), _parameters()
    compiled, eager = (ruda_torch.AdamW(p, fused_step=True) for p in (compiled_parameters, eager_parameters))

    @torch.compile(backend="eager")
    def step(scale):
        compiled.step(grad_scale=scale)

    for scale in (4.0, 8.0):
        for left, right in zip(compiled_parameters, eager_parameters, strict=True):
            left.grad = torch.full_like(left, scale)
            right.grad = torch.ones_like(right)
        step(scale)
        eager.step()
        assert _bits(compiled) == _bits(eager)


def test_the_functions_break_the_graph():
    """They read addresses and branch on values: a compiled function runs them between its graphs."""
    options = fused_adamw.AdamWOptions()
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(50, generator=generator) for _ in range(2))
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter)
    def everything(p, g):
        g = g * 2
        norm = fused_adamw.gradient_stats([g]).total_norm
        one = fused_adamw.adamw_step(p, g, None, options)
        two = fused_adamw.guarded_adamw_step([(one.parameters, g, one.state)], options)
        return norm, two.updates[0].parameters * 2

    norm, result = everything(p, g)
    assert counter.frame_count >= 1, "there was no graph to break"
    one = fused_adamw.adamw_step(p, g * 2, None, options)
    two = fused_adamw.guarded_adamw_step([(one.parameters, g * 2, one.state)], options)
    assert norm == fused_adamw.gradient_stats([g * 2]).total_norm
    assert torch.equal(result, two.updates[0].parameters * 2)


# From torch 2.14 on, opcheck asks its own copies of the parameters, which are no leaves, for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_opcheck():
    parameters = _parameters()
    optimizer = ruda_torch.AdamW(parameters, fused_step=True)
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    arguments = (optimizer._number, [0, 1, 2, 3], parameters, gradients)
    torch.library.opcheck(torch.ops.ruda_torch.adamw_step.default, arguments)


def test_no_cuda_graph_is_made_of_it_unasked():
    """A replay would take no look at hyperparameters, gradients or a loss scale."""
    assert torch.Tag.cudagraph_unsafe in torch.ops.ruda_torch.adamw_step.default.tags


def test_the_operator_names_what_is_missing():
    parameters = _parameters()
    optimizer = ruda_torch.AdamW(parameters, fused_step=True)
    number = optimizer._number
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    del optimizer
    gc.collect()
    with pytest.raises(InvalidState, match="no longer exists; keep the optimizer alive"):
        torch.ops.ruda_torch.adamw_step(number, [0, 1, 2, 3], parameters, gradients)

    optimizer = ruda_torch.AdamW(parameters, fused_step=True)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(InvalidState, match="parameter groups changed after the step was compiled"):
        torch.ops.ruda_torch.adamw_step(optimizer._number, [0], parameters[:1], gradients[:1])
