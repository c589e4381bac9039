"""Checkpoints of the fused optimizer: torch's form both ways, copied, and with the state's own dtypes."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import safetensors.torch
import torch
from cases import compare
from small_runs import adamw, clones, contents, model, run, saved_and_loaded

import ruda_torch

U = 2.0**-24
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ------------------------------------------------------------------------------------------------------ continuation


@pytest.mark.parametrize("how", ["in process", "torch.save"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(dtype, amsgrad, how):
    options = {"amsgrad": amsgrad, "max_grad_norm": 1.0}
    undisturbed = adamw(model(dtype), **options)
    run(undisturbed, 6)
    parameters = model(dtype)
    first = adamw(parameters, **options)
    run(first, 3)
    second = adamw(clones(parameters), **options)
    second.load_state_dict(saved_and_loaded(first.state_dict(), how))
    run(second, 3, first=3)
    assert contents(second) == contents(undisturbed)


@pytest.mark.parametrize("how", ["in process", "torch.save"])
def test_split_masters_resume_with_the_same_bits(how):
    undisturbed = adamw(model(torch.bfloat16), split_master=True)
    run(undisturbed, 6)
    parameters = model(torch.bfloat16)
    first = adamw(parameters, split_master=True)
    run(first, 3)
    second = adamw(clones(parameters), split_master=True)
    second.load_state_dict(saved_and_loaded(first.state_dict(), how))
    run(second, 3, first=3)
    assert contents(second) == contents(undisturbed)
    state = second.state[second.param_groups[0]["params"][0]]
    assert state["master_remainder"].dtype is torch.bfloat16
    assert "master" not in state


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("torch_first", [True, False], ids=["torch to ours", "ours to torch"])
def test_fp32_checkpoints_interchange_with_torch(torch_first, amsgrad):
    """The loaded state has the saved bits, and the next step is what the reading optimizer makes of them."""
    options = {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": amsgrad}
    classes = (torch.optim.AdamW, adamw) if torch_first else (adamw, torch.optim.AdamW)
    parameters = model()
    first = classes[0](parameters, **options)
    run(first, 3)
    second = classes[1](clones(parameters), **options)
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(saved)
    assert contents(second) == contents(first)
    assert {k: v for k, v in second.param_groups[0].items() if k in options} == options

    # The same step from the same bits by an optimizer of the reading class that was there all along.
    native = classes[1](clones(parameters), **options)
    run(native, 1, first=2)
    for p, x in zip(parameters, native.param_groups[0]["params"], strict=True):
        x.data.copy_(p.detach())
        native.state[x] = {name: value.clone() for name, value in first.state[p].items()}
    run(second, 1, first=3)
    run(native, 1, first=3)
    assert contents(second) == contents(native)

    # And it is the same algorithm: from equal bits, an update below 4 lr is 16 U off at most on either side; the decay
    # and the subtraction round up to three times, relative to the parameter.
    run(first, 1, first=3)
    for p, q in zip(parameters, second.param_groups[0]["params"], strict=True):
        bound = U * (3 * p.detach().double().abs() + 2 * 16 * 4e-2)
        compare("parameter", q, p.detach().double(), bound.numpy())
        assert first.state[p]["step"] == second.state[q]["step"] == 4


def test_torch_ignores_our_settings():
    optimizer = adamw(model(), max_grad_norm=2.0, check_finite=False)
    run(optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["ruda"] == {
        "format": 1,
        "hierarchical_stats": False,
        "max_grad_norm": 2.0,
        "check_finite": False,
        "moments": "float32",
        "split_master": None,
    }
    assert set(saved["param_groups"][0]) == set(torch.optim.AdamW(model()).state_dict()["param_groups"][0])
    for reader in (torch.optim.AdamW(model()), ruda_torch.AdamW(model())):
        ours = isinstance(reader, ruda_torch.AdamW)
        with pytest.warns(UserWarning, match="loses clipping") if ours else contextlib.nullcontext():
            reader.load_state_dict(copy.deepcopy(saved))
        assert "ruda" not in reader.state_dict()
        run(reader, 1)


def test_torch_drops_a_master_it_does_not_keep_up():
    """Torch casts the unknown key to BF16 and steps the parameter alone: back here, the parameter is what counts."""
    parameters = model(torch.bfloat16)
    ours = adamw(parameters, split_master=False)
    run(ours, 2)
    theirs = torch.optim.AdamW(parameters, lr=0.5)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for group in theirs.param_groups:
        group["lr"] = 0.5
    run(theirs, 1, first=2)
    back = adamw(parameters, split_master=False)
    back.load_state_dict(theirs.state_dict())
    assert "master" not in back.state[parameters[0]]
    before = parameters[0].detach().float()
    back.param_groups[0]["lr"] = 0.0
    run(back, 1, first=3)
    assert torch.equal(back.state[parameters[0]]["master"], before)
    assert torch.equal(parameters[0].float(), before)


@pytest.mark.parametrize("split", [False, True])
def test_an_fp32_parameter_is_its_own_master(split):
    half = model(torch.bfloat16)
    first = adamw(half, split_master=split)
    run(first, 1)
    whole = adamw([torch.nn.Parameter(p.detach().float()) for p in half])
    whole.load_state_dict(first.state_dict())
    assert not any(key.startswith("master") for state in whole.state.values() for key in state)
    run(whole, 1)


@pytest.mark.parametrize("split", [False, True])
def test_masters_are_made_when_the_first_step_needs_them(split):
    """Optimizer checkpoint first, model weights second: the master must come from the weights."""
    source = model(torch.bfloat16, seed=1)
    first = torch.optim.AdamW(source)
    run(first, 2)
    parameters = model(torch.bfloat16, seed=2)
    optimizer = adamw(parameters, split_master=split)
    optimizer.load_state_dict(first.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        for p, weights in zip(parameters, source, strict=True):
            p.copy_(weights)
    run(optimizer, 1)
    for p, weights in zip(parameters, source, strict=True):
        assert torch.equal(p, weights)
        assert split or torch.equal(optimizer.state[p]["master"], weights.float())
        assert not (split and optimizer.state[p]["master_remainder"].view(torch.int16).any())
        assert optimizer.state[p]["step"] == 3


# -------------------------------------------------------------------------------------------------- forms of the state


@pytest.mark.parametrize(
    "step",
    [
        3,
        3.0,
        torch.tensor(3),
        torch.tensor(3.0),
        torch.tensor([3.0]),
        torch.tensor([[3]]),
        torch.tensor(3.0).bfloat16(),
    ],
    ids=repr,
)
def test_step_counts_in_all_forms(step):
    optimizer = adamw(model())
    run(optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["step"] = step
    loaded = adamw(clones(optimizer.param_groups[0]["params"]))
    loaded.load_state_dict(saved)
    for state in loaded.state.values():
        assert (state["step"].dtype, state["step"].dim()) == (torch.float32, 0)
        if isinstance(step, torch.Tensor):
            assert state["step"].data_ptr() != step.data_ptr()
    run(optimizer, 1, first=3)
    run(loaded, 1, first=3)
    assert contents(loaded) == contents(optimizer)


def test_names_put_reordered_parameters_right():
    names, parameters = ("a", "b", "c", "d"), model()
    first = adamw(list(zip(names, parameters, strict=True)))
    run(first, 2)
    by_name = {name: contents_of(first, p) for name, p in zip(names, parameters, strict=True)}
    copies = dict(zip(names, clones(parameters), strict=True))
    second = adamw([(name, copies[name]) for name in reversed(names)])
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["param_names"] == list(reversed(names))
    for name, p in copies.items():
        assert contents_of(second, p) == by_name[name]
    run(second, 1)


def contents_of(optimizer, p):
    return {name: (value.dtype, value.tolist()) for name, value in optimizer.state[p].items()}


def test_foreign_names_leave_the_order_alone():
    """A wrapper's prefix, as data-parallel classes add it: as in torch, position decides and saved names stay."""
    first = adamw([(f"module.{i}", p) for i, p in enumerate(model())])
    run(first, 1)
    second = adamw([(f"{i}", p) for i, p in enumerate(clones(first.param_groups[0]["params"]))])
    second.load_state_dict(first.state_dict())
    assert contents(second) == contents(first)
    assert second.param_groups[0]["param_names"][0] == "module.0"


def test_state_keeps_its_dtypes_and_the_layout_of_the_parameter():
    parameters = model(torch.float16)
    first = adamw(parameters, amsgrad=True)
    run(first, 1)
    saved = copy.deepcopy(first.state_dict())
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].double()
        entry["exp_avg_sq"] = entry["exp_avg_sq"].contiguous()
    second = adamw(clones(parameters), amsgrad=True)
    second.load_state_dict(saved)
    assert contents(second) == contents(first)
    p = second.param_groups[0]["params"][1]
    assert p.is_contiguous(memory_format=torch.channels_last)
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"):
        assert second.state[p][name].dtype is torch.float32
        assert second.state[p][name].stride() == p.stride()


def test_loading_copies_and_saving_does_not_change():
    parameters = model(torch.bfloat16)
    first = adamw(parameters)
    run(first, 1)
    saved = first.state_dict()
    saved["state"][0]["own"] = [torch.ones(2)]
    twin = copy.deepcopy(saved)
    second = adamw(clones(parameters))
    second.load_state_dict(saved)
    pointers = [
        {t.data_ptr() for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)}
        for optimizer in (first, second)
    ]
    assert not (pointers[0] & pointers[1]) - {0}  # 0: empty tensors
    assert second.state[second.param_groups[0]["params"][0]]["own"][0] is not saved["state"][0]["own"][0]
    run(second, 1)
    assert str(saved) == str(twin)  # neither loading nor the other optimizer's step wrote into the dict


def test_unknown_keys_are_kept():
    optimizer = adamw(model())
    run(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["curvature"] = torch.arange(3)
    saved["state"][0]["note"] = {"seen": 5}
    saved["state"]["shared"] = {"round": 7}
    saved["param_groups"][0]["tag"] = "body"
    saved["extra"] = 1
    loaded = adamw(model())
    loaded.load_state_dict(saved)
    again = loaded.state_dict()
    assert again["state"][0]["curvature"].tolist() == [0, 1, 2]
    assert again["state"][0]["note"] == {"seen": 5}
    assert loaded.state["shared"] == {"round": 7}
    assert again["param_groups"][0]["tag"] == "body"
    run(loaded, 2)
    assert loaded.state["shared"] == {"round": 7}
    assert loaded.state_dict()["state"][0]["curvature"].tolist() == [0, 1, 2]


# -------------------------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_round_trip(dtype, tmp_path):
    """Tensors go into the file as ``index.name``, everything else into its metadata as JSON."""
    first = adamw(model(dtype), amsgrad=True, max_grad_norm=1.0)
    run(first, 2)
    saved = first.state_dict()
    tensors = {f"{key}.{name}": t.contiguous() for key, entry in saved["state"].items() for name, t in entry.items()}
    rest = {name: value for name, value in saved.items() if name != "state"}
    safetensors.torch.save_file(tensors, tmp_path / "optimizer.safetensors", metadata={"rest": json.dumps(rest)})

    with safetensors.safe_open(tmp_path / "optimizer.safetensors", framework="pt") as file:
        loaded = json.loads(file.metadata()["rest"])
        loaded["state"] = {}
        for name in file.keys():  # noqa: SIM118 - not a dict
            key, field = name.split(".")
            loaded["state"].setdefault(int(key), {})[field] = file.get_tensor(name)
    second = adamw(clones(first.param_groups[0]["params"]), amsgrad=True)
    second.load_state_dict(loaded)
    assert contents(second) == contents(first)
    assert second.max_grad_norm == 1.0
    run(first, 1, first=2)
    run(second, 1, first=2)
    assert contents(second) == contents(first)
