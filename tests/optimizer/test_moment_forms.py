"""``AdamW(moments=...)``: the bits of each form, its size, and checkpoints from every form into every other."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from moment_runs import FORMS, HARD, bits
from small_runs import adamw, clones, contents, master_of, model, run, saved_and_loaded

import ruda_torch
from ruda_optim.fused_adamw import AdamWOptions, AdamWState, InvalidOption, InvalidState, adamw_step, moment_codes
from ruda_optim.fused_adamw.options import seed_of_step
from ruda_torch import moments
from ruda_torch.moments import packed, unpacked

LOW = FORMS[1:]
STORES = [
    pytest.param(torch.float32, None, id="float32"),
    pytest.param(torch.float16, None, id="float16"),
    pytest.param(torch.bfloat16, False, id="bfloat16"),
    pytest.param(torch.bfloat16, None, id="split"),
]


def moments_of(state) -> list[torch.Tensor]:
    keys = ("exp_avg", "exp_avg_sq", "packed_moments", "max_exp_avg_sq")
    return [state[key] for key in keys if key in state]


def decoded(optimizer) -> list[torch.Tensor]:
    """Both moments and the maximum of every parameter, FP32."""
    found = []
    for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
        state = optimizer.state[parameter]
        packed_words = state.get("packed_moments")
        pair = (state["exp_avg"], state["exp_avg_sq"]) if packed_words is None else unpacked(packed_words)
        found += [
            moment.float() for moment in (*pair, *([state["max_exp_avg_sq"]] if "max_exp_avg_sq" in state else []))
        ]
    return found


def assert_equal(ones, others) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(bits(one), bits(other))


# ---------------------------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("dtype", "split"), STORES)
@pytest.mark.parametrize("form", LOW)
def test_a_step_is_that_of_float32_moments_and_stores_their_codes(form, dtype, split, amsgrad) -> None:
    """Before every step an optimizer with FP32 moments takes over what the words hold, exactly; then both step.

    The parameters must agree bit for bit, and the words be those of the specification for the other's new moments.
    """
    settings = {"max_grad_norm": 3.0, "split_master": split, "weight_decay": 0.1, "maximize": True, "amsgrad": amsgrad}
    low = adamw(model(dtype), moments=form, **settings)
    clipped = 0
    for step in range(1, 6):
        twin = adamw(clones(low.param_groups[0]["params"]), **settings)
        twin.load_state_dict(low.state_dict())
        befores = [
            parameter.detach().clone()
            if dtype is torch.float32
            else master_of(parameter, twin.state[parameter]).clone()
            if twin.state[parameter]
            else parameter.detach().float()
            for parameter in twin.param_groups[0]["params"]
        ]
        maxima = [twin.state[p].get("max_exp_avg_sq") for p in twin.param_groups[0]["params"]]
        maxima = [None if maximum is None else maximum.clone() for maximum in maxima]
        random = torch.Generator().manual_seed(step)
        for p, q in zip(low.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True):
            p.grad = (torch.randn(p.shape, generator=random) * 2).to(p.dtype)
            q.grad = p.grad.clone()
        low.step(grad_scale=2.0)
        twin.step(grad_scale=2.0)
        assert low.last_clip_factor == twin.last_clip_factor
        clipped += low.last_clip_factor < 1.0
        factor = np.float32(low.last_clip_factor)
        for p, q, before, maximum in zip(
            *(o.param_groups[0]["params"] for o in (low, twin)), befores, maxima, strict=True
        ):
            assert torch.equal(bits(p.detach()), bits(q.detach()))
            ours, exact = low.state[p], twin.state[q]
            assert ours["step"] == exact["step"] == step
            if "master" in ours or "master_remainder" in ours:
                assert torch.equal(master_of(p, ours), master_of(q, exact))
            g = q.grad.float().numpy() * np.float32(0.5) * (factor * np.float32(-1))
            r = moment_codes.dither(before.numpy(), g, seed_of_step(step))
            m, v = exact["exp_avg"].numpy(), exact["exp_avg_sq"].numpy()
            if form == "packed16":
                words = moment_codes.encode_packed(m, v, r)
                assert np.array_equal(ours["packed_moments"].view(torch.int16).numpy().view(np.uint16), words)
                stored = moment_codes.decode_packed(words)[1]
            else:
                m16, v16 = moment_codes.encode_bf16(m, v, r)
                for key, wanted in (("exp_avg", m16), ("exp_avg_sq", v16)):
                    assert np.array_equal(ours[key].view(torch.int16).numpy().view(np.uint16), wanted)
                stored = moment_codes.decode_bf16(v16)
            if amsgrad:
                old = np.zeros_like(stored) if maximum is None else maximum.numpy()
                assert np.array_equal(ours["max_exp_avg_sq"].float().numpy(), np.maximum(old, stored))
    assert clipped


@pytest.mark.parametrize(("amsgrad", "sizes"), [(False, (8, 4, 2)), (True, (12, 6, 4))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_state_takes_exactly_these_bytes_per_element(dtype, amsgrad, sizes) -> None:
    for form, size in zip(FORMS, sizes, strict=True):
        optimizer = adamw(model(dtype), moments=form, amsgrad=amsgrad)
        run(optimizer, 1)
        for parameter in optimizer.param_groups[0]["params"]:
            state = optimizer.state[parameter]
            assert sum(t.untyped_storage().nbytes() for t in moments_of(state)) == size * parameter.numel()
            others = set(state) - {"exp_avg", "exp_avg_sq", "packed_moments", "max_exp_avg_sq"}
            master = {torch.float32: set(), torch.float16: {"master"}, torch.bfloat16: {"master_remainder"}}[dtype]
            assert others == {"step"} | master


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("form", LOW)
def test_a_skipped_step_keeps_every_word(form, first) -> None:
    optimizer = adamw(model(torch.bfloat16), moments=form, amsgrad=True)
    if not first:
        run(optimizer, 2)
    before = contents(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups[0]["params"][1].grad[0] = torch.inf
    optimizer.step()
    assert optimizer.last_step_skipped
    if first:
        for state in optimizer.state.values():
            assert all(not t.view(torch.int16).any() for t in moments_of(state))
            assert state["step"] == 0
    else:
        assert contents(optimizer) == before


@pytest.mark.parametrize("form", LOW)
def test_what_the_gradients_lie_in_and_who_else_steps_changes_nothing(form) -> None:
    """Each parameter alone, with a gradient of another layout, has the bits that it has among the others."""
    together = adamw(model(), moments=form)
    run(together, 3)
    for index, parameter in enumerate(together.param_groups[0]["params"]):
        alone = model()[index]
        optimizer = adamw([alone], moments=form)
        for step in range(3):
            random = torch.Generator().manual_seed(1000 + step)
            gradients = [torch.randn(p.shape, generator=random) for p in model()]
            alone.grad = gradients[index].t().contiguous().t() if alone.dim() == 2 else gradients[index]
            optimizer.step()
        assert torch.equal(alone, parameter)
        assert_equal(moments_of(optimizer.state[alone]), moments_of(together.state[parameter]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", LOW)
def test_a_compiled_step_has_the_eager_bits(form, backend) -> None:
    torch._dynamo.reset()
    compiled, eager = (
        adamw(model(torch.bfloat16), moments=form, max_grad_norm=1.0, capturable=c) for c in (True, False)
    )
    step = torch.compile(compiled.step, backend=backend)
    for number in range(3):
        random = torch.Generator().manual_seed(number)
        for p, q in zip(compiled.param_groups[0]["params"], eager.param_groups[0]["params"], strict=True):
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
            q.grad = p.grad.clone()
        step()
        eager.step()
    assert contents(compiled) == contents(eager)


@pytest.mark.parametrize("form", LOW)
def test_the_functional_step_and_the_class_have_the_same_bits(form) -> None:
    parameter = torch.randn(257, generator=torch.Generator().manual_seed(3))
    state, options = None, AdamWOptions(1e-2, 0.9, 0.999, 1e-8, 0.01, moments="bfloat16")
    optimizer = adamw([torch.nn.Parameter(parameter.clone())], moments="bfloat16", lr=1e-2)
    kept = optimizer.param_groups[0]["params"][0]
    for _ in range(4):
        kept.grad = torch.randn(257)
        update = adamw_step(parameter, kept.grad, state, options)
        parameter, state = update.parameters, update.state
        optimizer.step()
    assert state.first_moment.dtype is state.second_moment.dtype is torch.bfloat16
    assert torch.equal(parameter, kept)
    assert_equal([state.first_moment, state.second_moment], moments_of(optimizer.state[kept]))


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_every_word_survives_every_form_and_torch() -> None:
    """All 65,536 words, as FP32 and as BF16 moments, through torch.optim.AdamW, and packed again."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    parameter = torch.nn.Parameter(torch.zeros(2**16))
    parameter.grad = torch.zeros(2**16)
    ours = adamw([parameter], moments="packed16", lr=0.0)
    ours.step()
    ours.state[parameter]["packed_moments"].view(torch.int16).copy_(words.view(torch.int16))
    saved = copy.deepcopy(ours.state_dict())
    for form in FORMS:
        other = adamw([torch.nn.Parameter(torch.zeros(2**16))], moments=form)
        other.load_state_dict(saved)
        assert_equal(decoded(other), list(unpacked(words)))
        theirs = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2**16))])
        theirs.load_state_dict(ruda_torch.unpack_moments(other.state_dict()))
        for source in (other, theirs):
            back = adamw([torch.nn.Parameter(torch.zeros(2**16))], moments="packed16")
            back.load_state_dict(copy.deepcopy(source.state_dict()))
            (state,) = back.state.values()
            assert torch.equal(state["packed_moments"].view(torch.int16), words.view(torch.int16))


@pytest.mark.parametrize("how", ["in process", "weights_only"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", [*FORMS, "torch"])
def test_any_form_loads_into_any_form(before, after, amsgrad, how) -> None:
    parameters = model()
    if before == "torch":
        source = torch.optim.AdamW(parameters, lr=1e-2, amsgrad=amsgrad)
    else:
        source = adamw(parameters, moments=before, amsgrad=amsgrad)
    run(source, 3)
    saved = saved_and_loaded(copy.deepcopy(source.state_dict()), how)
    target = adamw(clones(parameters), moments=after, amsgrad=amsgrad)
    target.load_state_dict(saved)
    for parameter in target.param_groups[0]["params"]:
        for moment in moments_of(target.state[parameter]):
            assert moment.shape == parameter.shape
            assert moment.stride() == parameter.stride()
            assert moment.dtype is (torch.float32 if after == "float32" else torch.bfloat16)
    exact = decoded(source)
    found = decoded(target)
    # From FP32 each form rounds to nearest: BF16 by half a unit of 8 bits, words by the code's worst case. What a word
    # holds is a BF16 number, and a BF16 number an FP32 number, so upwards nothing is lost.
    order = {"packed16": 0, "bfloat16": 1, "float32": 2, "torch": 2}
    if order[after] >= order[before]:
        assert_equal(found, exact)
    else:
        number = 3 if amsgrad else 2
        for m, v, m_old, v_old in zip(
            found[::number], found[1::number], exact[::number], exact[1::number], strict=True
        ):
            if after == "bfloat16":
                torch.testing.assert_close(m, m_old, rtol=2.0**-8, atol=0)
                torch.testing.assert_close(v, v_old, rtol=2.0**-8, atol=0)
            else:  # half of the steps of 1/4 and 1/8, and the linear part's half step of a 2^-7th of the scale
                torch.testing.assert_close(v, v_old, rtol=0.125, atol=0)
                bound = m_old.abs() / 16 + 2.0**-8 * 2 * v_old.sqrt() + 1e-30
                assert ((m - m_old).abs() <= bound).all()
        if amsgrad:
            assert all((x - y).abs().le(2.0**-8 * y).all() for x, y in zip(found[2::3], exact[2::3], strict=True))
    run(target, 2, first=3)
    assert all(state["step"] == 5 for state in target.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["in process", "weights_only"])
@pytest.mark.parametrize("form", LOW)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(form, how, dtype) -> None:
    parameters = model(dtype)
    optimizer = adamw(parameters, moments=form, max_grad_norm=1.0)
    run(optimizer, 3)
    saved = saved_and_loaded(copy.deepcopy(optimizer.state_dict()), how)
    resumed = adamw(clones(parameters), moments=form)
    resumed.load_state_dict(saved)
    assert resumed.settings == optimizer.settings
    for each in (optimizer, resumed):
        run(each, 3, first=3)
    assert contents(resumed) == contents(optimizer)


@pytest.mark.parametrize("form", LOW)
def test_copies_go_on_with_the_same_bits(form) -> None:
    parameters = model(torch.bfloat16)
    optimizer = adamw(parameters, moments=form)
    run(optimizer, 2)
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    others.append(torch.load(buffer, weights_only=False))
    run(optimizer, 2, first=2)
    for other in others:
        assert other.settings.moments == form
        assert f"moments: {form}" in repr(other)
        run(other, 2, first=2)
        assert contents(other) == contents(optimizer)


@pytest.mark.parametrize("form", LOW)
def test_torchs_step_goes_on_from_unpacked_moments(form) -> None:
    """Into torch's class and into ours without the fused step; from the same parameters both must step alike."""
    parameters = model()
    ours = adamw(parameters, moments=form)
    run(ours, 3)
    saved = copy.deepcopy(ours.state_dict())  # torch's loader shares what it need not cast
    kept = contents(ours)
    theirs = torch.optim.AdamW(clones(parameters), lr=1e-2)
    theirs.load_state_dict(copy.deepcopy(ruda_torch.unpack_moments(saved)))
    unfused = ruda_torch.AdamW(clones(parameters), lr=1e-2)
    with pytest.warns(UserWarning, match="check for NaN"):
        unfused.load_state_dict(saved)
    assert contents(ours) == kept
    assert_equal(decoded(theirs), decoded(ours))
    for each in (theirs, unfused):
        run(each, 2, first=3)
    assert_equal(list(theirs.param_groups[0]["params"]), list(unfused.param_groups[0]["params"]))


def test_unpacking_leaves_everything_else_as_it_is() -> None:
    optimizer = adamw(model(torch.bfloat16), moments="packed16", amsgrad=True)
    run(optimizer, 2)
    saved = optimizer.state_dict()
    saved["state"][0]["mine"] = "kept"
    saved["state"]["somebody"] = [1, 2]
    found = ruda_torch.unpack_moments(saved)
    assert list(found["state"][0]) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_remainder", "mine"]
    assert found["state"]["somebody"] == [1, 2]
    assert found["param_groups"] is saved["param_groups"]
    assert "packed_moments" in saved["state"][0]
    again = ruda_torch.unpack_moments(found)
    assert all(again["state"][key] is found["state"][key] for key in found["state"])


@pytest.mark.parametrize("form", LOW)
def test_amsgrad_can_be_turned_on_and_off(form) -> None:
    parameters = model()
    plain = adamw(parameters, moments=form)
    run(plain, 2)
    on = adamw(clones(parameters), moments=form, amsgrad=True)
    on.load_state_dict(ruda_torch.convert_amsgrad(plain.state_dict(), amsgrad=True))
    found = decoded(on)
    assert_equal(found[1::3], found[2::3])  # the maximum starts at the second moment
    run(on, 1, first=2)
    off = adamw(clones(parameters), moments=form)
    off.load_state_dict(ruda_torch.convert_amsgrad(on.state_dict(), amsgrad=False))
    run(off, 1, first=3)


def test_packing_hard_numbers_saturates_and_never_fails() -> None:
    hard = torch.tensor(HARD, dtype=torch.float32)
    m, v = (grid.flatten().contiguous() for grid in torch.meshgrid(hard, hard, indexing="ij"))
    first, second = unpacked(packed(m, v))
    assert first.isfinite().all()
    assert second.isfinite().all()
    assert (second >= 0).all()
    assert (first[second == 0] == 0).all()


def test_large_tensors_are_packed_piece_by_piece(monkeypatch) -> None:
    m, v = torch.randn(1000), torch.rand(1000)
    whole = packed(m, v)
    monkeypatch.setattr(moments, "_CHUNK", 7)
    assert torch.equal(packed(m.view(10, 100), v.view(10, 100)).flatten().view(torch.int16), whole.view(torch.int16))


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("value", ["packed", "bf16", torch.bfloat16, None, 16, ["packed16"]])
def test_only_the_three_names_are_taken(value) -> None:
    with pytest.raises(InvalidOption, match="moments must be 'float32', 'bfloat16' or 'packed16', got"):
        adamw(model(), moments=value)


def test_torchs_step_keeps_moments_as_torch_does() -> None:
    with pytest.raises(InvalidOption, match="moments='packed16' needs fused_step=True"):
        ruda_torch.AdamW(model(), moments="packed16")
    with pytest.raises(InvalidOption, match="group 0: moments is no option of a group"):
        adamw([{"params": model(), "moments": "packed16"}])


@pytest.mark.parametrize("value", ["packed16", "bf16", None, torch.bfloat16])
def test_the_functional_step_takes_two_of_them(value) -> None:
    with pytest.raises(InvalidOption, match="moments must be 'float32' or 'bfloat16', got"):
        AdamWOptions(moments=value)


@pytest.mark.parametrize(("own", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_functional_step_refuses_a_state_of_the_other_dtype(own, other) -> None:
    parameter = torch.ones(3)
    state = adamw_step(parameter, parameter, None, AdamWOptions(moments=other)).state
    with pytest.raises(InvalidState, match=f"state.first_moment must be {own} for moments='{own}', got {other}"):
        adamw_step(parameter, parameter, state, AdamWOptions(moments=own))
    step, *parts = state.into_parts()
    converted = AdamWState.from_parts(step, *(None if p is None else p.to(getattr(torch, own)) for p in parts))
    adamw_step(parameter, parameter, converted, AdamWOptions(moments=own))


def test_moments_of_one_state_have_one_dtype() -> None:
    from ruda_optim.fused_adamw import InvalidTensor

    with pytest.raises(InvalidTensor, match="second_moment must have the dtype of first_moment"):
        AdamWState(1, torch.ones(3), torch.ones(3).bfloat16())


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("packed16", lambda s: s.pop("packed_moments"), "must have step and packed_moments, got step"),
        (
            "packed16",
            lambda s: s.update(packed_moments=s["packed_moments"].float()),
            "must be bfloat16, got torch.float32",
        ),
        (
            "bfloat16",
            lambda s: s.update(exp_avg=s["exp_avg"].float()),
            "exp_avg of .* must be bfloat16, got torch.float32",
        ),
        ("bfloat16", lambda s: s.update(packed_moments=s.pop("exp_avg")), "must have step, exp_avg and exp_avg_sq"),
        ("bfloat16", lambda s: s.update(packed_moments=s["exp_avg"].clone()), "in two forms .*; keep exp_avg and exp_"),
        ("packed16", lambda s: s.update(exp_avg=s["packed_moments"].float()), "in two forms .*; keep packed_moments"),
    ],
)
def test_a_state_of_another_form_is_refused_before_anything_changes(form, change, message) -> None:
    optimizer = adamw(model(), moments=form)
    run(optimizer, 1)
    change(optimizer.state[optimizer.param_groups[0]["params"][0]])
    before = contents(optimizer)
    with pytest.raises(InvalidState, match=message):
        run(optimizer, 1, first=1)
    assert contents(optimizer) == before


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_with_two_forms_of_one_state_is_refused(form) -> None:
    source = adamw(model(), moments="packed16")
    run(source, 1)
    saved = source.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(17, 5)
    target = adamw(model(), moments=form)
    with pytest.raises(InvalidState, match=r"in two forms \(packed_moments, exp_avg\), .*; drop one of them"):
        target.load_state_dict(saved)
    assert not target.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.float(), "packed_moments of parameter 0 of group 0 must be the bits of a bfloat16 tensor, got"),
        (lambda w: w.view(torch.int16), "must be the bits of a bfloat16 tensor, got torch.int16"),
        (lambda _: 3.0, "must be a tensor, got float"),
        (lambda w: w[1:], r"must have the parameter's shape \(17, 5\), got \(16, 5\)"),
    ],
)
def test_words_that_were_changed_on_the_way_are_refused(change, message) -> None:
    source = adamw(model(), moments="packed16")
    run(source, 1)
    saved = source.state_dict()
    saved["state"][0]["packed_moments"] = change(saved["state"][0]["packed_moments"])
    target = adamw(model(seed=1), moments="packed16")
    run(target, 1)
    before = contents(target)
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(saved)
    assert contents(target) == before
    if "shape" not in message:
        with pytest.raises(InvalidState, match="packed_moments of parameter 0 must be"):
            ruda_torch.unpack_moments(saved)
