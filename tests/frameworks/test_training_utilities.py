"""What torch offers around an optimizer: averaging, accumulation, activation checkpoints, compiled training steps.

Every run is compared with ``torch.optim.AdamW`` in the same loop; see :mod:`framework_runs` for the tolerance.
"""

from __future__ import annotations

import copy

import pytest
import torch
from framework_runs import (
    MAX_NORM,
    STEPS,
    TOLERANCE,
    Watch,
    assert_close,
    assert_same_bits,
    distance,
    loader,
    ours,
    regression,
    samples,
    theirs,
)
from torch.optim import swa_utils
from torch.utils import checkpoint


def train(model, optimizer, batches, *, clip=None, after=lambda: None, forward=None):
    """A plain loop. ``clip`` is torch's, returned are the norms that it saw."""
    norms = []
    for batch in batches:
        (forward or model)(**batch)["loss"].backward()
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        after()
    return norms


def unclipped():
    """What the same training gives without a clip, as the counter-example of each comparison."""
    model = regression()
    train(model, theirs(model), loader(samples()))
    return model


# ------------------------------------------------------------------------------------------------- averaged weights


def average(model, kind):
    if kind == "swa":
        return swa_utils.AveragedModel(model)
    return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_agree_with_those_over_torchs_adamw(kind) -> None:
    left, right = regression(), regression()
    averages = []
    for model, optimizer, clip in ((left, ours(left, max_grad_norm=MAX_NORM), None), (right, theirs(right), MAX_NORM)):
        averaged = average(model, kind)
        schedule = swa_utils.SWALR(optimizer, swa_lr=2e-2, anneal_epochs=6)

        def after(averaged=averaged, model=model, schedule=schedule):
            averaged.update_parameters(model)
            schedule.step()

        train(model, optimizer, loader(samples()), clip=clip, after=after)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-2)
        averages.append(averaged)
    assert_close(left, right, unclipped(), 2 * TOLERANCE)  # SWALR doubles the learning rate
    assert distance(averages[0], averages[1]) <= 2 * TOLERANCE
    assert distance(averages[0].module, left) > 100 * TOLERANCE, "the average is the model itself"


def test_update_bn_after_training() -> None:
    """Batch statistics of the averaged model; parameters were written by the kernel and are read by torch."""

    def run(make, clip):
        torch.manual_seed(0)
        # No bias before the batch norm: its gradient is nothing but rounding, which AdamW makes steps of full size of.
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
        )

        def forward(inputs, labels):
            return {"loss": torch.nn.functional.mse_loss(model(inputs).squeeze(-1), labels)}

        optimizer, averaged = make(model), swa_utils.AveragedModel(model)
        train(
            model,
            optimizer,
            loader(samples()),
            clip=clip,
            forward=forward,
            after=lambda: averaged.update_parameters(model),
        )
        stale = copy.deepcopy(averaged.module[1].running_mean)
        swa_utils.update_bn([batch["inputs"] for batch in loader(samples())], averaged)
        assert not torch.equal(averaged.module[1].running_mean, stale)
        return averaged.module

    left = run(lambda model: ours(model, max_grad_norm=MAX_NORM), None)
    assert_close(left, run(theirs, MAX_NORM), run(theirs, None))


# ----------------------------------------------------------------------------- weights that change outside the step


def half_run(dtype, steps=4, **settings):
    model = regression(dtype)
    optimizer = ours(model, **settings)
    train(model, optimizer, list(loader(samples()))[:steps])
    return model, optimizer


MASTERS = [
    pytest.param(torch.bfloat16, False, id="bfloat16"),
    pytest.param(torch.float16, False, id="float16"),
    pytest.param(torch.bfloat16, True, id="bfloat16, split"),
]


def still_step(model, optimizer):
    """A step that moves nothing: no gradient, no learning rate."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    optimizer.step()


@pytest.mark.parametrize(("dtype", "split"), MASTERS)
def test_weights_that_somebody_loads_are_what_the_next_step_starts_from(dtype, split) -> None:
    model, optimizer = half_run(dtype, split_master=split)
    new = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(new)
    still_step(model, optimizer)
    loaded = regression(dtype)
    loaded.load_state_dict(new)
    assert distance(model, loaded) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_master_keeps_its_low_bits_where_nobody_wrote(dtype) -> None:
    model, optimizer = half_run(dtype, split_master=False, check_finite=False)
    weight = model.layers[0].weight
    before = {p: optimizer.state[p]["master"].clone() for p in model.parameters()}
    assert not torch.equal(before[weight].to(dtype).float(), before[weight]), "there are no low bits to keep"
    weight.data[0] = 0.75  # through .data, which leaves no trace in the version counter
    weight.data[1, 0] = torch.nan
    still_step(model, optimizer)
    expected = before[weight].clone()
    expected[0], expected[1, 0] = 0.75, torch.nan
    for parameter in model.parameters():
        wanted = expected if parameter is weight else before[parameter]
        found = optimizer.state[parameter]["master"]
        assert torch.equal(found.nan_to_num(nan=77.0), wanted.nan_to_num(nan=77.0))


@pytest.mark.parametrize("split", [False, True])
def test_sharded_weights_that_somebody_wrote_are_what_the_next_step_starts_from(monkeypatch, split) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = regression(torch.bfloat16)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        optimizer = ours(model, split_master=split)

        def step():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

        step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        wanted = [parameter.full_tensor().clone() for parameter in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        step()
        for parameter, value in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(parameter.full_tensor(), value)
            assert split or torch.equal(optimizer.state[parameter]["master"].full_tensor(), value.float())
    finally:
        torch.distributed.destroy_process_group()


def test_swapping_an_average_in_and_out_between_steps_changes_nothing() -> None:
    """For an evaluation: the masters never see it."""
    runs = []
    for swap in (False, True):
        model = regression(torch.bfloat16)
        optimizer = ours(model)
        averaged = average(model, "ema")

        def after(model=model, averaged=averaged, swap=swap):
            averaged.update_parameters(model)
            if swap:
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict(averaged.module.state_dict())
                assert distance(model, averaged.module) == 0.0
                model.load_state_dict(kept)

        train(model, optimizer, loader(samples()), after=after)
        runs.append(optimizer)
    assert_same_bits(*runs)


def test_continuing_from_an_average_starts_there() -> None:
    model, optimizer = half_run(torch.bfloat16, split_master=False)
    averaged = average(model, "swa")
    train(model, optimizer, list(loader(samples()))[:4], after=lambda: averaged.update_parameters(model))
    model.load_state_dict(averaged.module.state_dict())
    start = {p: p.detach().double() for p in model.parameters()}
    train(model, optimizer, list(loader(samples()))[:1])
    # |m / sqrt(v)| after bias correction is below 2 here; weight decay takes lr * 0.1 of a weight below 1.
    limit = 1e-2 * (2 + 0.1)
    for parameter, before in start.items():
        assert float((optimizer.state[parameter]["master"].double() - before).abs().max()) < limit


# ---------------------------------------------------------------------------- accumulation, activation checkpoints


def test_gradient_accumulation() -> None:
    left, right, whole = regression(), regression(), regression()
    optimizers = ours(left, max_grad_norm=MAX_NORM), theirs(right)
    watch, norms = Watch(optimizers[0]), []
    for number, batch in enumerate(loader(samples(), batch_size=2), 1):
        for model in (left, right):
            (model(**batch)["loss"] / 4).backward()
        if number % 4 == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(right.parameters(), MAX_NORM)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    watch.check_one_clip(norms)
    assert_close(left, right, unclipped())
    train(whole, ours(whole, max_grad_norm=MAX_NORM), loader(samples()))
    assert distance(left, whole) <= TOLERANCE  # four means of two are the mean of eight


def test_one_bad_micro_batch_skips_the_accumulated_step() -> None:
    model = regression()
    optimizer = ours(model)
    watch = Watch(optimizer)
    for number, batch in enumerate(loader(samples(bad_batch=2), batch_size=4), 1):
        model(**batch)["loss"].backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert watch.skipped == [False, True, *[False] * 4]
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_give_the_same_bits(reentrant) -> None:
    runs = []
    for recompute in (False, True):
        model = regression()
        optimizer = ours(model, max_grad_norm=MAX_NORM)

        def forward(inputs, labels, model=model, recompute=recompute):
            if not recompute:
                return model(inputs, labels)
            hidden = checkpoint.checkpoint(model.layers[:2], inputs.clone().requires_grad_(), use_reentrant=reentrant)
            return {"loss": torch.nn.functional.mse_loss(model.layers[2](hidden).squeeze(-1), labels)}

        train(model, optimizer, loader(samples()), forward=forward)
        runs.append(optimizer)
    assert_same_bits(*runs)
    right = regression()
    train(right, theirs(right), loader(samples()), clip=MAX_NORM)
    assert_close(model, right, unclipped())


# --------------------------------------------------------------------------------------- compiled model and step


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Inductor itself still imports a deprecated part of torch, and Dynamo reads .grad of the loss, whoever optimizes.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_model_backward_and_step_in_one_compiled_function(compiler, backend) -> None:
    model, right = regression(), regression()
    optimizer = ours(model, max_grad_norm=MAX_NORM)
    watch = Watch(optimizer)

    @torch.compile(backend=backend)
    def training_step(inputs, labels):
        loss = model(inputs, labels)["loss"]
        loss.backward()
        optimizer.step()
        return loss

    for batch in loader(samples()):
        training_step(**batch)
        optimizer.zero_grad()
    norms = train(right, theirs(right), loader(samples()), clip=MAX_NORM)
    watch.check_one_clip(norms)
    assert len(watch.skipped) == STEPS
    assert_close(model, right, unclipped())
