"""The two kinds of master of a BF16 parameter: one becomes the other, and the kernel agrees about what both mean."""

from __future__ import annotations

import copy

import pytest
import torch
from small_runs import adamw, clones, master_of, model, run

from ruda_torch import masters


def interesting() -> torch.Tensor:
    """FP32 numbers by their bits: around every place where the rounding to BF16 turns, both signs, and the ends."""
    highs = torch.tensor([0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x42FF, 0x7F7E, 0x7F7F])
    lows = torch.tensor([0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    bits = ((highs[:, None] << 16) | lows).flatten()
    bits = torch.cat([bits, torch.randint(0, 0x7F800000, (10_000,))])
    return torch.cat([bits, bits - 2**31]).to(torch.int32).view(torch.float32)


def steps_between(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How many FP32 numbers apart, for numbers of one sign."""
    return (left.view(torch.int32).to(torch.int64) - right.view(torch.int32).to(torch.int64)).abs()


def test_a_remainder_gives_back_the_master_beside_its_rounded_parameter() -> None:
    master = interesting()
    parameter = master.bfloat16()  # to nearest even, as the kernel rounds beside an FP32 master
    joined = kernel_masters(parameter, masters.remainder_of(master))
    away = steps_between(joined, master)
    tie_rounded_down = (master.view(torch.int32) & 0x1FFFF) == 0x8000
    assert tie_rounded_down.any()
    assert (away == tie_rounded_down.to(torch.int64)).all()


def test_nothing_lies_beside_an_infinity() -> None:
    assert (masters.remainder_of(torch.tensor([torch.inf, -torch.inf])).view(torch.int16) == 0).all()


def test_a_joined_master_rounds_to_its_parameter() -> None:
    master = interesting()
    # As split_master of the kernel: rounded away from zero at ties, and the low half.
    bits = master.view(torch.int32)
    parameter = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    remainder = bits.to(torch.int16).view(torch.bfloat16)
    joined = masters.joined(parameter, remainder)
    assert torch.equal(joined.bfloat16().view(torch.int16), parameter.view(torch.int16))
    tie_rounds_down = (bits & 0x1FFFF) == 0x8000
    assert (steps_between(joined, master) == tie_rounds_down.to(torch.int64)).all()
    assert torch.equal(
        masters.remainder_of(joined).view(torch.int16)[~tie_rounds_down], bits.to(torch.int16)[~tie_rounds_down]
    )


def test_a_master_that_is_not_a_number_stays_none() -> None:
    """All bits below the parameter set: as an integer it would round up into another number."""
    master = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    remainder = masters.remainder_of(master)
    assert kernel_masters(master.bfloat16(), remainder).isnan().all()
    assert (
        masters.joined(
            torch.full((4,), torch.nan, dtype=torch.bfloat16),
            master.view(torch.int32).to(torch.int16).view(torch.bfloat16),
        )
        .isnan()
        .all()
    )


@pytest.mark.parametrize("written", [0.0, -0.0])
def test_a_zero_that_somebody_wrote_stays_near_zero(written) -> None:
    """Pruning and clamping write zeros into parameters whose remainder says "a little less"."""
    parameter = torch.full((3,), written, dtype=torch.bfloat16)
    remainder = torch.tensor([0x0001, -0x8000, -1], dtype=torch.int16).view(torch.bfloat16)
    for master in (kernel_masters(parameter, remainder), masters.joined(parameter, remainder)):
        assert (master.abs() < 2.0**-132).all()  # below the first BF16 number above zero, 2^-133, or on it


def kernel_masters(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """What the kernel takes a split master for: a step of size zero, without decay, leaves it as it was."""
    p = torch.nn.Parameter(parameter.clone())
    optimizer = adamw([p], lr=0.0, weight_decay=0.0, check_finite=False)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["master_remainder"] = remainder.clone()
    with torch.no_grad():
        p.copy_(parameter)
    optimizer.step()
    return master_of(p, optimizer.state[p])


@pytest.mark.parametrize("split", [False, True])
def test_a_checkpoint_of_the_other_kind_goes_on(split) -> None:
    """Both runs are the same but for the kind of master, and remain so after each loaded the other's checkpoint."""
    source = adamw(model(torch.bfloat16), split_master=split)
    run(source, 5)
    saved = copy.deepcopy(source.state_dict())
    target = adamw(clones(source.param_groups[0]["params"]), split_master=not split)
    target.load_state_dict(saved)
    keys = {key for entry in target.state.values() for key in entry}
    assert ("master" in keys, "master_remainder" in keys) == (split, not split)
    before = [master_of(p, source.state[p]) for p in source.param_groups[0]["params"]]
    after = [master_of(p, target.state[p]) for p in target.param_groups[0]["params"]]
    assert [p.stride() for p in after] == [p.stride() for p in before]
    for left, right in zip(before, after, strict=True):
        assert (steps_between(left, right) <= 1).all()
    run(source, 3, first=5)
    run(target, 3, first=5)
    for p, q in zip(source.param_groups[0]["params"], target.param_groups[0]["params"], strict=True):
        left, right = master_of(p, source.state[p]), master_of(q, target.state[q])
        # Nothing else differs than one FP32 step of a master, and three more updates cannot make much of it.
        torch.testing.assert_close(left, right, rtol=2.0**-20, atol=1e-12)
    back = adamw(clones(target.param_groups[0]["params"]), split_master=split)
    back.load_state_dict(target.state_dict())
    run(back, 1, first=8)


def test_what_each_dtype_keeps_by_default() -> None:
    for options, kept in (
        ({}, "master_remainder"),
        ({"split_master": True}, "master_remainder"),
        ({"split_master": False}, "master"),
    ):
        parameters = [
            torch.nn.Parameter(torch.ones(3, dtype=t)) for t in (torch.float32, torch.float16, torch.bfloat16)
        ]
        optimizer = adamw(parameters, **options)
        run(optimizer, 1)
        found = [[key for key in optimizer.state[p] if key.startswith("master")] for p in parameters]
        assert found == [[], ["master"], [kept]]


def test_a_remainder_is_nothing_to_an_fp16_parameter() -> None:
    source = adamw([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    run(source, 1)
    target = adamw([torch.nn.Parameter(torch.ones(3, dtype=torch.float16))])
    target.load_state_dict(source.state_dict())
    run(target, 1)
    (entry,) = target.state.values()
    assert "master" in entry
    assert "master_remainder" not in entry


@pytest.mark.parametrize("split", [False, True])
def test_masters_of_sharded_parameters_convert_too(monkeypatch, split) -> None:
    """One rank is enough: each one converts its own part and talks to nobody."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        layers = [torch.nn.Linear(7, 5, dtype=torch.bfloat16) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        for layer in layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        source, target = (
            adamw(layer.parameters(), split_master=s) for layer, s in zip(layers, (split, not split), strict=True)
        )
        for parameter in layers[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        source.step()
        for there, here in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            here._local_tensor.data.copy_(there._local_tensor)
        target.load_state_dict(source.state_dict())
        for left, right in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
            states = [
                {name: value.to_local() for name, value in optimizer.state[p].items() if name.startswith("master")}
                for optimizer, p in ((source, left), (target, right))
            ]
            assert [*states[0], *states[1]] == [
                ("master", "master_remainder")[split],
                ("master_remainder", "master")[split],
            ]
            found = [master_of(p.to_local(), state) for p, state in zip((left, right), states, strict=True)]
            assert (steps_between(*found) <= 1).all()
            right.grad = torch.ones_like(right)
        target.step()
    finally:
        torch.distributed.destroy_process_group()
