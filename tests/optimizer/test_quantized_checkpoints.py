"""Moments in 8 and 4 bits, in the forms of bitsandbytes and torchao: their numbers, and what is refused.

The states here are made by hand from the published formats, and what they mean is computed element by element in
Python. tests/frameworks/test_integrations_quantized.py holds the same converters against the libraries.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from quantized_states import Quantized, looked_up, random_codes, random_scales
from small_runs import adamw

import ruda_torch
from ruda_optim.fused_adamw import InvalidState, moment_codes
from ruda_torch import migration

GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "params": [0], "initial_lr": 0.5}
SIGNED = torch.linspace(-1, 1, 256)
UNSIGNED = torch.linspace(0, 1, 256) ** 2


# --------------------------------------------------------------------------------------------------------- bitsandbytes


def bitsandbytes_entry(shape: tuple[int, ...], block: int) -> dict:
    blocks = math.ceil(math.prod(shape) / block)
    return {
        "step": 7,
        "state1": random_codes(*shape, seed=1),
        "state2": random_codes(*shape, seed=2, low=1),  # no second moment of 0
        "qmap1": SIGNED.clone(),
        "qmap2": UNSIGNED.clone(),
        "absmax1": random_scales(blocks, 3),
        "absmax2": random_scales(blocks, 4),
    }


def bitsandbytes_saved(entry: dict, nested: bool = True) -> dict:
    if nested:
        entry = {
            "step": entry["step"],
            "__bnb_optimizer_quant_state__": {name: value for name, value in entry.items() if name != "step"},
        }
    group = {**GROUP, "alpha": 0.0, "t_alpha": None, "t_beta3": None}
    return {"state": {0: entry}, "param_groups": [copy.deepcopy(group)]}


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((4, 1024), 256), ((33, 131), 256), ((2048, 3), 2048), ((5, 1000), 2048), ((10,), 256), ((300,), 256), ((), 256)],
    ids=str,
)
def test_bitsandbytes_numbers(shape, block, nested) -> None:
    entry = bitsandbytes_entry(shape, block)
    converted = migration.from_bitsandbytes(bitsandbytes_saved(entry, nested))
    (state,) = converted["state"].values()
    assert state["step"] == 7.0
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        assert state[name].shape == shape
        assert state[name].dtype is torch.float32
        expected = looked_up(entry[f"state{number}"].numpy(), entry[f"qmap{number}"], entry[f"absmax{number}"], block)
        assert state[name].reshape(-1).tolist() == expected


# -------------------------------------------------------------------------------------------------------------- torchao


SHAPE = (64, 66)
ELEMENTS = math.prod(SHAPE)
FP8 = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()


def torchao_moment(form: str, unsigned: bool, seed: int) -> tuple[Quantized, list[float]]:
    """A moment, and the numbers that it stands for."""
    block = {"8bit": 264, "4bit": 132, "fp8": 264}[form]
    scales = random_scales(ELEMENTS // block, seed)
    values = UNSIGNED if unsigned else SIGNED
    if form == "4bit":
        codes = random_codes(ELEMENTS // 2, seed=seed)
        values = values[15::16].clone()
        nibbles = np.stack([codes.numpy() // 16, codes.numpy() % 16], axis=-1)
        return Quantized(SHAPE, codes, scales, values), looked_up(nibbles, values, scales, block)
    if form == "fp8":
        codes = random_codes(*SHAPE, seed=seed, low=1, high=127)  # neither zero, nor negative, nor NaN
        codes = codes if unsigned else codes | (random_codes(*SHAPE, seed=seed + 1) & 128)
        return Quantized(SHAPE, codes.view(torch.float8_e4m3fn), scales), looked_up(codes.numpy(), FP8, scales, block)
    codes = random_codes(*SHAPE, seed=seed, low=1)
    return Quantized(SHAPE, codes, scales, values.clone()), looked_up(codes.numpy(), values, scales, block)


def torchao_saved(entry: dict, **group: object) -> dict:
    return {"state": {0: entry}, "param_groups": [{**GROUP, "lr": torch.tensor(1e-2), "amsgrad": False, **group}]}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("form", ["8bit", "4bit", "fp8"])
def test_torchao_numbers(form, amsgrad) -> None:
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    made = {name: torchao_moment(form, name != "exp_avg", seed) for seed, name in enumerate(names)}
    entry = {"step": torch.tensor(7.0), **{name: moment for name, (moment, _) in made.items()}}
    converted = migration.from_torchao(torchao_saved(entry, amsgrad=amsgrad))
    (state,) = converted["state"].values()
    assert set(state) == {"step", *names}
    for name, (_, expected) in made.items():
        assert state[name].shape == SHAPE
        assert state[name].reshape(-1).tolist() == expected
    (group,) = converted["param_groups"]
    assert type(group["lr"]) is float
    assert group["lr"] == np.float32(1e-2)
    assert group["amsgrad"] is amsgrad
    assert group["initial_lr"] == 0.5
    optimizer = adamw([torch.nn.Parameter(torch.ones(SHAPE))], amsgrad=amsgrad)
    optimizer.load_state_dict(converted)
    (live,) = optimizer.state.values()
    assert all(torch.equal(live[name], state[name]) for name in names)


def test_torchaos_small_tensors_are_taken_over_in_fp32() -> None:
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.ones(5).bfloat16(), "exp_avg_sq": torch.ones(5).bfloat16()}
    (state,) = migration.from_torchao(torchao_saved(entry))["state"].values()
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32


# ---------------------------------------------------------------------------------------------------- into an optimizer


def continued(saved: dict, shape: tuple[int, ...], gradient: torch.Tensor, **options) -> torch.Tensor:
    """How far one step of an optimizer that loaded this moves parameters of 0."""
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = adamw([parameter], **options)
    optimizer.load_state_dict(saved)
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("form", ["bfloat16", "packed16"])
def test_it_loads_into_moments_of_16_bits(form) -> None:
    """As the nearest codes of the FP32 numbers that it converts to."""
    saved = migration.from_bitsandbytes(bitsandbytes_saved(bitsandbytes_entry((33, 131), 256)))
    exact = saved["state"][0]
    parameter = torch.nn.Parameter(torch.zeros(33, 131))
    optimizer = adamw([parameter], moments=form)
    optimizer.load_state_dict(saved)
    state = optimizer.state[parameter]
    if form == "bfloat16":
        assert all(torch.equal(state[key], exact[key].bfloat16()) for key in ("exp_avg", "exp_avg_sq"))
    else:
        words = moment_codes.encode_packed(exact["exp_avg"].numpy(), exact["exp_avg_sq"].numpy())
        assert np.array_equal(state["packed_moments"].view(torch.int16).numpy().view(np.uint16), words)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert state["step"] == 8


def test_converted_state_trains_on_in_ours_as_in_torchs() -> None:
    saved = bitsandbytes_saved(bitsandbytes_entry((8, 600), 256))
    moved = {}
    for kind, options in ((ruda_torch.AdamW, {"fused_step": True}), (torch.optim.AdamW, {})):
        parameter = torch.nn.Parameter(torch.ones(8, 600))
        optimizer = kind([parameter], **options)
        optimizer.load_state_dict(migration.from_bitsandbytes(saved))
        parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        moved[kind] = parameter.detach()
    torch.testing.assert_close(moved[ruda_torch.AdamW], moved[torch.optim.AdamW], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_take_it_in_fp32(dtype) -> None:
    converted = migration.from_bitsandbytes(bitsandbytes_saved(bitsandbytes_entry((8, 600), 256)))
    half = torch.nn.Parameter(torch.ones(8, 600, dtype=dtype))
    optimizer = adamw([half])
    optimizer.load_state_dict(converted)
    assert torch.equal(optimizer.state[half]["exp_avg"], converted["state"][0]["exp_avg"])


def zero_divisors(source: str) -> dict:
    """Two blocks; in the second one, every second moment was rounded to 0 and no first moment was."""
    if source == "bitsandbytes":
        entry = bitsandbytes_entry((512,), 256)
        entry["state1"].fill_(255)
        entry["state2"][256:] = 0
        return migration.from_bitsandbytes(bitsandbytes_saved(entry))
    first, second = (torchao_moment("8bit", unsigned, 1)[0] for unsigned in (False, True))
    first.codes.fill_(255)
    second.codes[32:] = 0
    return migration.from_torchao(torchao_saved({"step": 7, "exp_avg": first, "exp_avg_sq": second}))


@pytest.mark.parametrize("source", ["bitsandbytes", "torchao"])
def test_no_step_divides_by_a_second_moment_that_was_rounded_to_zero(source) -> None:
    converted = zero_divisors(source)
    (state,) = converted["state"].values()
    shape = state["exp_avg"].shape
    zero = state["exp_avg_sq"] == 0
    assert 0 < int(zero.sum()) < zero.numel()
    assert torch.equal(state["exp_avg"] == 0, zero)
    for gradient in (0.0, 1e-12, 1e-3):
        moved = continued(converted, shape, torch.full(shape, gradient), lr=1e-2)
        # Unrepaired: lr * m / eps, a million times lr. Now (1 - beta1) / sqrt(1 - beta2) = 1 at most, times the bias
        # corrections of step 8, sqrt(1 - 0.99^8) / (1 - 0.9^8) = 0.49.
        assert moved[zero].abs().max() <= 1e-2 * 0.5
        if gradient == 0.0:
            assert moved[zero].abs().max() == 0


def test_the_maximum_is_a_divisor_too() -> None:
    first, second, maximum = (torchao_moment("8bit", number > 0, number)[0] for number in range(3))
    first.codes.fill_(255)
    second.codes.fill_(0)
    maximum.codes[32:] = 0
    entry = {"step": 7, "exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": maximum}
    (state,) = migration.from_torchao(torchao_saved(entry, amsgrad=True))["state"].values()
    assert torch.equal(state["exp_avg"] == 0, state["max_exp_avg_sq"] == 0)
    assert bool((state["exp_avg"] != 0).any())


@pytest.mark.parametrize("source", ["bitsandbytes", "torchao"])
def test_the_checkpoint_itself_stays_as_it_is(source) -> None:
    first, second = (torchao_moment("8bit", unsigned, 1)[0] for unsigned in (False, True))
    entry = bitsandbytes_entry((300,), 256)
    tensors = [*list(entry.values())[1:], first.codes, first.scale, second.codes, second.scale]
    before = [tensor.clone() for tensor in tensors]
    if source == "bitsandbytes":
        migration.from_bitsandbytes(bitsandbytes_saved(entry))
    else:
        migration.from_torchao(torchao_saved({"step": 1, "exp_avg": first, "exp_avg_sq": second}))
    assert all(map(torch.equal, tensors, before))


def test_loading_unconverted_state_names_the_converter() -> None:
    optimizer = adamw([torch.nn.Parameter(torch.ones(SHAPE))])
    moment = torchao_moment("8bit", True, 1)[0]
    with pytest.raises(InvalidState, match=r"load ruda_torch.migration.from_torchao\(state_dict\), which"):
        optimizer.load_state_dict(torchao_saved({"step": 1, "exp_avg": torch.ones(SHAPE), "max_exp_avg_sq": moment}))
    with pytest.raises(InvalidState, match=r"from_bitsandbytes\(state_dict\), which"):
        optimizer.load_state_dict(bitsandbytes_saved(bitsandbytes_entry(SHAPE, 256)))


# -------------------------------------------------------------------------------------------------------------- refused

DAMAGED = {
    "not blockwise": ({"absmax1": None, "max1": torch.ones(1)}, r"has no absmax1, only .*\(block_wise=False\)"),
    "one in FP32": ({"state2": torch.ones(600)}, "must hold uint8 codes for 256 values, got torch.float32"),
    "no map": ({"qmap2": None}, "but has no qmap2"),
    "a short map": ({"qmap1": SIGNED[:16]}, r"uint8 codes for 256 values, got torch.uint8 for \(16,\) values"),
    "too few scales": ({"absmax1": torch.ones(2)}, r"a scale for every 256 or 2048 of 600 elements, got shape \(2,\)"),
    "different shapes": ({"state2": random_codes(599, seed=1)}, r"of one shape, got \(600,\) and \(599,\)"),
    "AdEMAMix": ({"state1": random_codes(2, 600, seed=1)}, "is it an AdamW checkpoint"),
    "NaN scale": ({"absmax1": torch.tensor([1.0, math.nan, 1.0])}, "the first moment of parameter 0 .* is not finite"),
    "infinite scale": ({"absmax2": torch.tensor([1.0, 1.0, math.inf])}, "the second moment of .* is not finite"),
    "signed second moment": ({"qmap2": SIGNED}, "the second moment of .* has values below 0"),
    "not contiguous": (
        {name: random_codes(30, 20, seed=1).t() for name in ("state1", "state2")},
        r"the moments of parameter 0 .* must be contiguous, got strides \(1, 20\) and \(1, 20\)",
    ),
    "no step": ({"step": None}, "has no step"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bitsandbytes_state_is_refused(name) -> None:
    change, message = DAMAGED[name]
    entry = {**bitsandbytes_entry((600,), 256), **change}
    with pytest.raises(InvalidState, match=message):
        migration.from_bitsandbytes(bitsandbytes_saved(entry))


def changed(**attributes) -> Quantized:
    moment = torchao_moment("8bit", True, 1)[0]
    for name, value in attributes.items():
        setattr(moment, name, value)
    return moment


UNKNOWN = {
    "another form": (
        changed(codes=torch.ones(SHAPE)),
        "of a form that is not known here: torchao's Quantized with torch",
    ),
    "a 2-bit form": (changed(codes=random_codes(ELEMENTS // 4, seed=1)), "is of a form that is not known here"),
    "no codes": (changed(codes=None), "must hold codes and a list of scales, got torchao's Quantized"),
    "scales of another shape": (changed(scale=torch.ones(4, 4)), "must hold codes and a list of scales"),
    "unequal blocks": (changed(scale=torch.ones(7)), r"equal blocks of them, got 4224 and 7"),
    "no scales": (changed(scale=torch.ones(0)), r"equal blocks of them, got 4224 and 0"),
    "a short map": (changed(qmap=SIGNED[:16]), r"for 256 values, got torch.uint8 for \(16,\) values"),
    "negative": (changed(qmap=SIGNED), "the second moment of parameter 0 .* has values below 0"),
    "another shape": (torch.ones(3), r"must have one shape, got \(64, 66\), \(3,\)"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_torchao_state_is_refused(name) -> None:
    second, message = UNKNOWN[name]
    entry = {"step": 7, "exp_avg": torchao_moment("8bit", False, 1)[0], "exp_avg_sq": second}
    with pytest.raises(InvalidState, match=message):
        migration.from_torchao(torchao_saved(entry))


def test_amsgrad_without_its_maximum_is_refused() -> None:
    entry = {"step": 7, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    with pytest.raises(InvalidState, match="has no max_exp_avg_sq, only step, exp_avg, exp_avg_sq"):
        migration.from_torchao(torchao_saved(entry, amsgrad=True))


@pytest.mark.parametrize("convert", [migration.from_torchao, migration.from_bitsandbytes, migration.from_apex])
def test_a_converter_names_what_it_was_given(convert) -> None:
    with pytest.raises(InvalidState, match="as a model's state dict does; load that with"):
        convert(torch.nn.Linear(2, 2).state_dict())
    with pytest.raises(InvalidState, match="must be an optimizer's state dict, got list"):
        convert([1])
