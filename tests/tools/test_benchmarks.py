"""The benchmark's protocol: it times only what it has proved right. Nothing here asserts a speed."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import accuracy
import contestants
import protocol
import run
from comparison import compare
from contestants import DEFAULT_PEERS, PEERS, Contestant
from shared_data import Data
from staged import StagedAdamW
from workloads import QUICK_WORKLOADS, VARIANTS, WORKLOADS, Variant, Workload, gpt2_shapes

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = Workload("small", "small", ((3, 5), (7,), (64, 9), (16,)))
ONE_ROUND = protocol.Settings(rounds=1, steps=2, max_foreign_load=None)


def pair(peer: contestants.Peer, variant: str) -> tuple[Contestant, Contestant, Data]:
    data = Data(SMALL, VARIANTS[variant], CPU)
    return Contestant(PEERS["ours"], data, VARIANTS[variant]), Contestant(peer, data, VARIANTS[variant]), data


def test_gpt2_has_the_published_number_of_parameters() -> None:
    assert len(gpt2_shapes()) == 148
    assert WORKLOADS["gpt2-124m"].elements == 124_439_808


def test_ppo_has_the_parameters_of_a_small_policy_and_its_value() -> None:
    """An observation of 8 numbers, 4 actions: two bodies of two layers of 64, and two heads."""
    workload = WORKLOADS["ppo"]
    assert len(workload.shapes) == 12
    assert workload.elements == 2 * (8 * 64 + 64 + 64 * 64 + 64) + (4 * 64 + 4) + (64 + 1)
    assert WORKLOADS["64"].elements == 64


@pytest.mark.parametrize(
    ("variant", "gradient_bytes", "ours", "staged"),
    [
        (Variant("", ""), 4, 28, 48),
        (Variant("", "", amsgrad=True), 4, 36, 60),
        (Variant("", ""), 2, 26, 44),
        (Variant("", "", amsgrad=True), 2, 34, 56),
        (Variant("", "", max_norm=1.0), 4, 32, None),
        (Variant("", "", check_finite=True), 2, 28, None),
        (Variant("", "", half=True), 2, 28, None),
    ],
)
def test_bytes_per_element_follow_the_dtype_of_the_gradient(variant, gradient_bytes, ours, staged) -> None:
    assert variant.bytes_with(gradient_bytes) == ours
    if staged is not None:
        assert StagedAdamW.bytes_per_element(gradient_bytes, amsgrad=variant.amsgrad) == staged


def test_small_workloads_meet_torch_as_it_comes_and_fused() -> None:
    for name in ("ppo", "64"):
        workload = WORKLOADS[name]
        assert set(workload.peers) == {"torch-default", "torch-fused", "functional"}
        for variant in workload.variants:
            for peer in workload.peers:
                found = compare(workload, VARIANTS[variant], peer, CPU, ONE_ROUND)
                assert found["status"] == "measured", found
    assert "torch-default" not in DEFAULT_PEERS, "on a CPU it is the for-loop"


@pytest.mark.parametrize(("step_ms", "steps"), [(0.05, 200), (5.0, 10), (50.0, 5), (1000.0, 1)])
def test_a_round_of_small_steps_has_many(step_ms: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer, data = pair(PEERS["torch-loop"], "plain")
    timed = protocol.timed_step
    monkeypatch.setattr(protocol, "timed_step", lambda *sides: (timed(*sides), step_ms)[1])
    settings = protocol.Settings(rounds=1, max_foreign_load=None)
    assert protocol.measure(ours, peer, data, settings).as_dict()["steps per round"] == steps


@pytest.mark.parametrize(
    ("words", "count"), [(["--variant", "clip", "--peer", "torch-default"], 1), ([], 9)], ids=["chosen", "its own"]
)
def test_selected_cells_and_no_others_are_run(words: list[str], count: int, tmp_path: pathlib.Path) -> None:
    assert run.main(["--quick", "--output", str(tmp_path), "--workload", "64", *words]) == 0
    found = json.loads((tmp_path / "quick.json").read_text(encoding="utf-8"))
    cells = {(entry["workload"], entry["variant"], entry["peer"]) for entry in found["comparisons"]}
    assert len(cells) == len(found["comparisons"]) == count
    assert ("64", "clip", "torch-default") in cells
    assert set(found["variants"]) == {variant for _, variant, _ in cells}
    assert set(found["peers"]) == {"ours"} | {peer for _, _, peer in cells}
    assert (tmp_path / "quick-ratios.png").stat().st_size > 1000


@pytest.mark.slow
def test_quick_run_writes_table_json_and_pictures(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # tiny tensors; leaves the machine to the other tests
    command = [sys.executable, "benchmarks/run.py", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "quick.json").read_text(encoding="utf-8"))
    assert found["environment"]["versions"]["torch"] == torch.__version__
    cells = {(entry["workload"], entry["variant"], entry["peer"]): entry for entry in found["comparisons"]}
    assert len(cells) == len(QUICK_WORKLOADS) * len(VARIANTS) * 2
    for (_, variant, peer), entry in cells.items():
        if variant == "bf16-split":
            assert (entry["status"], entry["reason"]) == ("not run", "has no split masters")
            continue
        if peer == "staged-eager" and variant not in ("plain", "checked", "amsgrad", "clip"):
            assert entry["status"] == "not run"
            assert "takes FP32 parameters and no loss scale" in entry["reason"]
            continue
        assert entry["status"] == "measured", entry
        assert entry["rounds kept"] == len(entry["rounds"]) == 2
        wanted = {"parameter", "exp_avg", "exp_avg_sq"}
        wanted |= {"max_exp_avg_sq"} if variant == "amsgrad" else set()
        wanted |= {"copy"} if variant.startswith("bf16") else set()
        assert set(entry["worst difference / tolerance"]) == wanted
        assert max(entry["worst difference / tolerance"].values()) <= 1
    assert (tmp_path / "quick-ratios.png").stat().st_size > 1000
    assert "tiny GPT" in done.stdout


@pytest.mark.parametrize("variant", ["plain", "amsgrad", "clip", "unscale-clip", "bf16", "bf16-clip"])
def test_a_wrong_peer_is_caught(variant: str) -> None:
    def wrong(parameters: list[torch.Tensor], chosen: object) -> torch.optim.Optimizer:
        changed = {
            **contestants.HYPERPARAMETERS,
            "weight_decay": 0.02,
        }  # off by lr * 0.01 * p, 1e-5 of p: 20 tolerances
        return torch.optim.AdamW(parameters, **changed, amsgrad=VARIANTS[variant].amsgrad)

    ours, peer, data = pair(replace(PEERS["torch-loop"], name="wrong", make=wrong), variant)
    with pytest.raises(protocol.Mismatch, match=r"parameter of wrong differs from ours by .* times the tolerance"):
        protocol.measure(ours, peer, data, ONE_ROUND)


def test_a_peer_that_clips_by_another_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer, data = pair(PEERS["torch-loop"], "clip")
    monkeypatch.setattr(peer, "norm", lambda: 2 * ours.norm())
    with pytest.raises(protocol.Mismatch, match="gradient norm"):
        protocol.measure(ours, peer, data, ONE_ROUND)


def test_nan_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer, data = pair(PEERS["torch-loop"], "plain")
    fields = peer.fields

    def poisoned() -> dict[str, list[torch.Tensor]]:
        found = fields()
        found["exp_avg"] = [tensor.clone() for tensor in found["exp_avg"]]
        found["exp_avg"][-1].view(-1)[-1] = torch.nan
        return found

    monkeypatch.setattr(peer, "fields", poisoned)
    with pytest.raises(protocol.Mismatch, match="exp_avg of torch-loop"):
        protocol.measure(ours, peer, data, ONE_ROUND)


def test_noisy_rounds_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([0.5, 0.01, 0.2, 0.04, 0.9, 0.9, 0.9, 0.9, 0.9])
    monkeypatch.setattr(protocol.ForeignLoad, "read", lambda self: next(loads))
    ours, peer, data = pair(PEERS["torch-fused"], "plain")
    settings = protocol.Settings(rounds=3, steps=1, max_foreign_load=0.05)
    found = protocol.measure(ours, peer, data, settings).as_dict()
    assert found["rounds kept"] == 2
    assert found["rounds dropped"] == 7
    assert [r["foreign_load"] for r in found["rounds"] if r["kept"]] == [0.01, 0.04]
    ratios = [r["peer_ms"] / r["ours_ms"] for r in found["rounds"] if r["kept"]]
    assert found["ratio"]["median"] == pytest.approx(sum(ratios) / 2)


def test_both_sides_start_each_step_alike_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer, data = pair(PEERS["torch-foreach"], "clip")
    turns = []
    timed = protocol.timed_step

    def watched(contestant: Contestant, device: torch.device) -> float:
        assert torch.equal(torch.cat([g.view(-1) for g in data.gradients]), data.source)
        turns.append(contestant.name)
        return timed(contestant, device)

    monkeypatch.setattr(protocol, "timed_step", watched)
    protocol.measure(ours, peer, data, protocol.Settings(rounds=2, steps=1, max_foreign_load=None))
    a, b = "ours", "torch-foreach"
    assert turns == [a, a, a, b, b, b, a, b, b, a]


def test_a_missing_peer_is_named_with_its_reason() -> None:
    absent = replace(PEERS["torchao"], module="package_that_does_not_exist")
    assert "package_that_does_not_exist is not installed" in str(absent.obstacle(VARIANTS["plain"], CPU))
    assert PEERS["deepspeed"].obstacle(VARIANTS["amsgrad"], CPU) == "has no AMSGrad"
    assert PEERS["deepspeed"].obstacle(VARIANTS["plain"], torch.device("cuda")) == "does not run on cuda"


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "peer"), [("ours", "staged-eager"), ("functional", "staged-eager"), ("ours", "functional")]
)
def test_staged_baseline_and_functional_step_agree_with_the_class(ours, peer, dtype, amsgrad) -> None:
    variant = Variant("update", "", amsgrad=amsgrad)
    found = compare(SMALL, variant, peer, CPU, ONE_ROUND, ours=ours, gradient_dtype=dtype)
    assert found["status"] == "measured", found
    assert found["bytes per element"] == 24 + 8 * amsgrad + dtype.itemsize
    assert found.get("ours", "ours") == ours


@pytest.mark.parametrize("variant", ["checked", "clip"])
def test_guarded_step_agrees_with_the_class_and_with_torch(variant: str) -> None:
    assert compare(SMALL, VARIANTS[variant], "functional", CPU, ONE_ROUND)["status"] == "measured"
    found = compare(SMALL, VARIANTS[variant], "torch-loop", CPU, ONE_ROUND, ours="functional")
    assert found["status"] == "measured", found
    scaled = compare(SMALL, VARIANTS["unscale-clip"], "functional", CPU, ONE_ROUND)
    assert (scaled["status"], scaled["reason"]) == ("not run", "takes FP32 parameters and no loss scale")


def test_the_functional_step_allocates_what_it_returns() -> None:
    data = Data(SMALL, VARIANTS["clip"], CPU)
    contestant = Contestant(PEERS["functional"], data, VARIANTS["clip"])
    data.draw(), data.restore()
    contestant.step()
    before = [tensor.data_ptr() for tensors in contestant.fields().values() for tensor in tensors]
    kept = contestant.fields()  # keeps their memory from being used again
    contestant.step()
    after = [tensor.data_ptr() for tensors in contestant.fields().values() for tensor in tensors]
    assert not set(before) & set(after), kept


def test_accuracy_is_measured_against_fp64(tmp_path: pathlib.Path) -> None:
    seeds = {0: accuracy.run(1000, 10, seed=0), 1: accuracy.run(1000, 10, seed=1, amsgrad=True)}
    for seed in seeds.values():
        for name in ("ours", "torch-fused"):
            assert [point["step"] for point in seed[name]] == list(range(1, 11))
            # FP32 keeps about seven digits of an update that moves each element by some 5 % of its size per step.
            assert 0 < seed[name][-1]["update"] < 1e-4
    accuracy.draw({"seeds": seeds}, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_whole_trainings_are_written_with_what_came_out(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "benchmarks/scientific.py", "--seeds=2", "--steps=20", f"--output={tmp_path / 'a.json'}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    found = json.loads((tmp_path / "a.json").read_text())
    made = found["trainings"]
    names = [entry["optimizer"] for entry in made]
    assert names[:3] == [names[5], *names[3:5]], "the order rotates"
    assert found["ours"] == names[2] == "ruda_torch.AdamW"
    for entry, other in ((made[0], made[2]), (made[1], made[2])):
        # The same start, 20 steps of lr 3e-3 at most, FP32: two formulas part by rounding alone.
        assert entry["quality"] == pytest.approx(other["quality"], rel=1e-3)
        assert entry["seconds"] > 0


@pytest.mark.parametrize("case", ["text", "embedding"])
def test_trainings_with_each_form_of_moments(case: str, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "moments.json"
    command = [sys.executable, "benchmarks/moments.py", case, "--seeds=1", "--steps=2", f"--output={output}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    made = json.loads(output.read_text())["trainings"]
    assert [entry["moments"] for entry in made] == ["float32", "bfloat16", "packed16"] * 2
    for entry, size in zip(made, (8, 4, 2) * 2, strict=True):
        assert entry["state bytes"] == size * entry["parameters"]
        # Two steps of a thousandth part the forms by little; without a step the loss would be that of the start.
        assert entry["quality"] == pytest.approx(made[0]["quality"], rel=0.05)
        assert entry["quality"] < (math.log(256) if case == "text" else entry["training loss"][0] + 1)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_offloaded_step_is_measured(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "offload.json"
    command = [sys.executable, "benchmarks/offload.py", "--processes", "2", "--rounds=2", f"--elements={2**23}"]
    subprocess.run([*command, f"--output={output}"], cwd=ROOT, check=True, timeout=300)
    found = json.loads(output.read_text())
    (measured,) = found["measured"]
    rows = measured["optimizers"]
    assert rows.keys() | measured["refused"].keys() == found["optimizers"].keys()
    assert {"torch fused", "float32", "bfloat16", "packed16"} <= rows.keys()
    for row in rows.values():
        assert 0 < row["min ms"] <= row["median ms"] <= row["max ms"]
        assert row["times torch fused"] > 0
    # Parameters, gradients and state: 14 and 8 bytes by design; a process also keeps tables and pages of its own.
    assert rows["packed16"]["resident bytes per element"] < rows["float32"]["resident bytes per element"]


@pytest.mark.distributed
def test_the_sum_over_ranks_is_measured(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "communication.json"
    command = [sys.executable, "benchmarks/communication.py", "--processes=1", "--rounds=2", f"--output={output}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    found = json.loads(output.read_text())
    assert all(found["measured"][0][kind]["median"] > 0 for kind in found["kinds"])
