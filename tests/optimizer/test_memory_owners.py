"""Memory that a step writes belongs to one tensor of it; a tensor without memory is refused. Nothing changes then."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import same_bits
from no_memory import KINDS, without_memory

import ruda_torch
from ruda_optim.fused_adamw import AdamWState, InvalidTensor, adamw_step, gradient_stats, guarded_adamw_step
from ruda_optim.fused_adamw.options import AdamWOptions

SIZE = 40
SPLIT = pytest.param(torch.bfloat16, {"split_master": True}, id="split")
PLAIN = pytest.param(torch.float32, {}, id="float32")
MASTER = pytest.param(torch.float16, {}, id="master")


def parameters(count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(SIZE, dtype=dtype)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def fused(params, **settings) -> ruda_torch.AdamW:
    return ruda_torch.AdamW(params, lr=0.1, weight_decay=0.0, fused_step=True, **settings)


def refused(optimizer: ruda_torch.AdamW, message: str) -> None:
    """``step()`` raises, twice, and nothing that the optimizer holds has changed."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    held = [*everything, *(t for p in everything for t in optimizer.state.get(p, {}).values())]
    before = [tensor.detach().clone() for tensor in held]
    states = {p: dict(state) for p, state in optimizer.state.items()}
    for _ in range(2):
        with pytest.raises(InvalidTensor, match=message):
            optimizer.step()
    assert all(same_bits(now.detach(), old) for now, old in zip(held, before, strict=True))
    assert {p: dict(state) for p, state in optimizer.state.items()} == states


# -------------------------------------------------------------------------------------------------- shared memory


def test_two_parameters_over_one_storage_are_refused() -> None:
    memory = torch.zeros(SIZE)
    a, b = torch.nn.Parameter(memory), torch.nn.Parameter(memory)
    a.grad, b.grad = torch.ones(SIZE), torch.ones(SIZE)
    refused(fused([a, b]), r"parameter 0 of group 0 shares memory with parameter 1 of group 0; .*tie the Parameter")
    named = fused([{"params": [("enc.w", a)]}, {"params": [("dec.w", b)]}])
    refused(named, r"0 of group 0 \(enc.w\) shares memory with parameter 0 of group 1 \(dec.w\)")
    b.grad = None  # only one of them takes part
    fused([a, b]).step()


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (lambda m: m[:5], lambda m: m[4:], True),
        (lambda m: m[:5], lambda m: m[5:], False),
        (lambda m: m[:, 0], lambda m: m[:, 1], False),
        (lambda m: m[:, :3], lambda m: m[:, 2:], True),
        (lambda m: m[::2], lambda m: m[1::2].t(), False),
        (lambda m: m, lambda m: m[3, 3], True),
    ],
)
def test_slices_of_one_base(one, other, shared) -> None:
    base = torch.zeros(8, 8)
    a, b = torch.nn.Parameter(one(base)), torch.nn.Parameter(other(base))
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer = fused([a, b])
    if shared:
        refused(optimizer, "shares memory")
        return
    optimizer.step()
    torch.testing.assert_close((a.sum(), b.sum()), (torch.tensor(-0.1 * a.numel()), torch.tensor(-0.1 * b.numel())))
    assert base.count_nonzero() == a.numel() + b.numel()


@pytest.mark.parametrize(("dtype", "settings"), [PLAIN, MASTER, SPLIT])
def test_a_gradient_that_the_step_would_write_is_refused(dtype, settings) -> None:
    a, b = parameters(2, dtype)
    b.grad = a.data
    refused(fused([a, b], **settings), "parameter 0 of group 0 shares memory with the gradient of parameter 1")
    a.grad, b.grad = a.data, torch.ones_like(b)
    refused(fused([a, b], **settings), "parameter 0 of group 0 shares memory with the gradient of parameter 0")


def test_a_gradient_that_is_a_moment_is_refused() -> None:
    (a,) = parameters(1)
    optimizer = fused([a])
    optimizer.step()
    a.grad = optimizer.state[a]["exp_avg"]
    fresh = fused([a])
    fresh.state[a] = dict(optimizer.state[a])
    refused(fresh, "exp_avg of parameter 0 of group 0 shares memory with the gradient of parameter 0")


@pytest.mark.parametrize(
    ("dtype", "settings", "key"),
    [
        *((torch.float32, {"amsgrad": True}, key) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")),
        (torch.float16, {}, "master"),
        (torch.bfloat16, {"split_master": True}, "master_remainder"),
    ],
)
def test_state_that_two_parameters_share_is_refused(dtype, settings, key) -> None:
    a, b = parameters(2, dtype)
    optimizer = fused([a, b], **settings)
    optimizer.step()
    optimizer.state[b][key] = optimizer.state[a][key].detach()
    refused(optimizer, f"^{key} of parameter 0 of group 0 shares memory with {key} of parameter 1 of group 0")
    optimizer.state[b][key] = optimizer.state[a][key].clone()
    optimizer.step()


def test_state_that_is_the_parameter_is_refused() -> None:
    a, b = parameters(2)
    optimizer = fused([a, b])
    optimizer.step()
    optimizer.state[a]["exp_avg"] = b.data
    refused(optimizer, "parameter 1 of group 0 shares memory with exp_avg of parameter 0")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("what", ["parameter", "other", "exp_avg", "exp_avg_sq"])
def test_a_gradient_that_becomes_written_memory_later_is_refused(what, strided) -> None:
    a, b = (torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    gradient = torch.ones(4, 6).t() if strided else torch.ones(6, 4)
    a.grad, b.grad = gradient, gradient.clone()
    optimizer = fused([a, b])
    for _ in range(3):
        optimizer.step()
    written = {"parameter": b.data, "other": a.data, **optimizer.state[b]}[what]
    b.grad = written.view(4, 6).t() if strided else written
    refused(optimizer, "shares memory with the gradient of parameter 1 of group 0")
    b.grad = gradient
    optimizer.step()
    assert (optimizer.state[b]["step"], optimizer.last_step_skipped) == (4, False)


@pytest.mark.parametrize("strided", [False, True])
def test_gradients_between_written_memory_may_move(strided) -> None:
    """Rows of one base, or every second element of it, hold parameters and gradients in turn."""
    base = torch.ones(6, 8)
    places = [base[:, i] for i in range(8)] if strided else list(base)
    a, b = torch.nn.Parameter(places[0]), torch.nn.Parameter(places[2])
    optimizer = fused([a, b])
    other = [torch.nn.Parameter(torch.ones(a.shape)) for _ in range(2)]
    apart = fused(other)
    for step in range(4):
        a.grad, b.grad = places[1 + step % 2 * 2], places[4 + step % 2]
        other[0].grad, other[1].grad = torch.ones(a.shape), torch.ones(a.shape)
        optimizer.step()
        apart.step()
    assert same_bits(a.data.contiguous(), other[0].data)
    assert same_bits(b.data.contiguous(), other[1].data)
    assert (torch.stack(places[3:]) == 1).all()


def test_gradients_may_share_memory_with_each_other() -> None:
    a, b, c, d = parameters(4)
    b.grad = a.grad
    optimizer, apart = fused([a, b]), fused([c, d])
    optimizer.step()
    apart.step()
    assert same_bits(a.data, c.data)
    assert same_bits(b.data, d.data)


def test_the_functional_step_writes_nothing_and_takes_aliases() -> None:
    ones = torch.ones(SIZE)
    options = AdamWOptions()
    aliased = adamw_step(ones, ones, AdamWState(1, ones, ones), options)
    apart = adamw_step(ones, ones.clone(), AdamWState(1, ones.clone(), ones.clone()), options)
    assert same_bits(aliased.parameters, apart.parameters)
    assert (ones == 1).all()


# ------------------------------------------------------------------------------------------------- without memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "settings"), [PLAIN, MASTER, SPLIT])
def test_a_parameter_or_gradient_without_memory_is_refused(kind, dtype, settings) -> None:
    a, b = parameters(2, dtype)
    nowhere = torch.nn.Parameter(without_memory(kind, b), requires_grad=False)
    nowhere.grad = torch.ones(SIZE, dtype=dtype)
    untouched = a.detach().clone()
    optimizer = fused([a, nowhere], **settings)
    for _ in range(2):
        with pytest.raises(InvalidTensor, match=r"^parameter 1 of group 0 must have memory of its own"):
            optimizer.step()
    assert not optimizer.state
    b.grad = without_memory(kind, b)
    optimizer = fused([a, b], **settings)
    for _ in range(2):
        with pytest.raises(InvalidTensor, match=r"^the gradient of parameter 1 of group 0 must have memory of its own"):
            optimizer.step()
    assert not optimizer.state
    assert same_bits(a.detach(), untouched)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "settings", "key"),
    [
        *((torch.float32, {"amsgrad": True}, key) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")),
        (torch.float16, {}, "master"),
        (torch.bfloat16, {"split_master": True}, "master_remainder"),
    ],
)
def test_state_without_memory_is_refused(kind, dtype, settings, key) -> None:
    a, b = parameters(2, dtype)
    optimizer = fused([a, b], **settings)
    optimizer.step()
    kept = [a.detach().clone(), b.detach().clone()]
    optimizer.state[b][key] = without_memory(kind, optimizer.state[b][key])
    if (kind, key) == ("cut short", "step"):
        return  # one number fits what is left
    with pytest.raises(InvalidTensor, match=f"{key} of parameter 1 of group 0 must have memory of its own"):
        optimizer.step()
    assert same_bits(a.detach(), kept[0])
    assert same_bits(b.detach(), kept[1])


@pytest.mark.parametrize("what", ["parameter", "gradient", "state"])
def test_memory_that_is_freed_between_steps_is_noticed(what) -> None:
    a, b = parameters(2)
    optimizer = fused([a, b])
    optimizer.step()
    optimizer.step()
    kept = a.detach().clone()
    lost = {"parameter": b, "gradient": b.grad, "state": optimizer.state[b]["exp_avg_sq"]}[what]
    lost.untyped_storage().resize_(0)
    with pytest.raises(InvalidTensor, match="parameter 1 of group 0 must have memory of its own"):
        optimizer.step()
    assert same_bits(a.detach(), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_the_functional_api_refuses_tensors_without_memory(kind) -> None:
    options = AdamWOptions()
    ones = torch.ones(SIZE)
    nowhere = without_memory(kind, ones)
    for parameter, gradient, first, second, name in (
        (nowhere, ones, ones, ones, "parameters"),
        (ones, nowhere, ones, ones, "gradients"),
        (ones, ones, nowhere, ones, "state.first_moment"),
        (ones, ones, ones, nowhere, "state.second_moment"),
    ):
        state = AdamWState(1, first, second)
        with pytest.raises(InvalidTensor, match=rf"^{name} must have memory of its own"):
            adamw_step(parameter, gradient, state, options)
        with pytest.raises(InvalidTensor, match=rf"^entries\[0\].{name} must have memory of its own"):
            guarded_adamw_step([(parameter, gradient, state)], options)
    with pytest.raises(InvalidTensor, match=r"^gradients\[1\] must have memory of its own"):
        gradient_stats([ones, nowhere])
