"""The console command: ``info``, ``check`` and ``memory``, their exit codes, what they say of what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import ruda_torch
from ruda_optim import __version__, cli, self_check
from ruda_optim.fused_adamw import storage
from ruda_torch import step_times


def test_module_prints_the_report_by_default() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "ruda_optim"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith(f"ruda-optim {__version__}, torch ")
    assert {line.split()[0] for line in result.stdout.splitlines() if line[:1].isalpha()} >= {"cpu", "nvrtc", "ptx"}


def test_console_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="ruda-optim")
    assert entry.load() is cli.main


def test_info_gives_a_reason_for_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert cli.main([]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert facts["threads"] >= 1
    for backend in facts["backends"]:
        assert len(backend["detail"]) > 10
        assert " ".join(backend["detail"].split()) in printed
    assert cli.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


def none_available() -> tuple[storage.Availability, ...]:
    return (storage.Availability("cpu", False, "built without its C++ operator; install a compiler"),)


@pytest.mark.parametrize("command", ["info", "check"])
def test_nothing_can_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(storage, "available", none_available)
    assert cli.main([command]) == 1
    printed = capsys.readouterr().out
    assert "built without its C++ operator; install a compiler" in printed
    assert ("nothing was checked" in printed) is (command == "check")


def test_refused_instruction_set_is_a_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("RUDA_CPU_LEVEL must be one of 3, 2 on this machine; got '9'\nC++ stack")

    monkeypatch.setattr(storage, "cpu_level", refuse)
    cli.main(["info", "--json"])
    (cpu,) = [b for b in json.loads(capsys.readouterr().out)["backends"] if b["name"] == "cpu"]
    assert cpu == {
        "name": "cpu",
        "available": False,
        "detail": "RUDA_CPU_LEVEL must be one of 3, 2 on this machine; got '9'",
    }


def test_check_passes_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--elements", "16000", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    on_cpu = [check for check in report["checks"] if check["where"] == "cpu"]
    assert [check["case"] for check in on_cpu] == [check.name for check in self_check.CHECKS]
    assert all(0 <= check["worst"] <= 1 for check in on_cpu)
    # A bound that no result comes near would not notice a wrong one.
    assert max(check["worst"] for check in on_cpu) > 0.1
    timed = [timing for timing in report["timings"] if timing["where"] == "cpu"]
    assert [timing["method"] for timing in timed] == [
        "ruda_torch.AdamW, finite check", "torch.optim.AdamW(fused=True)",
        "ruda_torch.AdamW, clipping", "clip_grad_norm_, torch.optim.AdamW(fused=True)",
    ]  # fmt: skip
    assert all(timing["milliseconds"] > 0 for timing in timed)
    assert [timing["times_ours"] for timing in timed[::2]] == [1.0, 1.0]
    assert all(timing["times_ours"] > 0 for timing in timed)
    printed = cli.check_text({**report, "checks": on_cpu})
    assert "all 13 checks passed" in printed
    assert "One step of 16 x 1,000 FP32 elements" in printed


def test_timing_is_of_whole_steps_in_turn_with_the_gradients_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and torch's alternate, and torch's clipping does not shrink the gradient of the next round."""
    turns: list[tuple[str, float]] = []

    def watched(kind: type, name: str) -> None:
        original = kind.step

        def step(self: torch.optim.Optimizer, *arguments: Any) -> Any:
            turns.append((name, float(self.param_groups[0]["params"][0].grad[0])))
            return original(self, *arguments)

        monkeypatch.setattr(kind, "step", step)

    watched(torch.optim.AdamW, "torch")
    watched(ruda_torch.AdamW, "ours")
    step_times.time_steps(torch.device("cpu"), 16_000)
    rounds = step_times.ROUNDS + 2
    assert [name for name, _ in turns[:4]] == ["ours", "torch", "torch", "ours"]
    assert len(turns) == 4 * rounds
    assert all(gradient == pytest.approx(step_times.GRADIENT) for name, gradient in turns if name == "ours")
    clipped = {gradient for name, gradient in turns[2 * rounds :] if name == "torch"}
    assert len(clipped) == 1, "every round clips the same gradient"
    assert clipped.pop() < step_times.GRADIENT


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, 1.0 + 1e-6), (1, 1.0 + 1e-5), (2, 1.0 + 2e-6), (6, float("nan"))],
    ids=["learning rate", "decay", "first moment", "NaN"],
)
def test_check_notices_a_wrong_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, index: int, value: float
) -> None:
    """A coefficient off by a few units in the last place is what a miscompiled kernel may look like."""
    from ruda_optim.fused_adamw import step

    def slightly_wrong(steps: Any) -> Any:
        table = storage.coefficient_table(steps)
        table[:, index] *= value
        return table

    monkeypatch.setattr(step, "coefficient_table", slightly_wrong)
    assert cli.main(["check", "--elements", "16000"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "checks failed: please report this" in printed
    assert "One step of" not in printed, "what is wrong is not timed"


def test_a_kernel_that_raises_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("cannot compile")

    monkeypatch.setattr(self_check, "adamw_step", broken)
    assert cli.main(["check", "--elements", "0"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: cannot compile" in printed
    assert "ok" in printed, "the other checks still run"


@pytest.mark.parametrize(
    "arguments", [["check", "--elements", "-1"], ["nonsense"], ["info", "extra"], ["memory"]], ids=str
)
def test_unknown_command_lines(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "usage: ruda-optim" in capsys.readouterr().err


def test_memory_prints_what_it_says_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "--params", "8e9", "--dtype", "bf16"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 8_000_000_000
    assert (report["dtype"], report["gradient_dtype"], report["amsgrad"]) == ("bfloat16", "bfloat16", False)
    ours = {entry["keeps"]: entry for entry in report["optimizers"] if entry["optimizer"] == "ruda_torch.AdamW"}
    assert len(ours) == 6
    smallest = ours["packed16 moments, split master"]
    assert smallest["bytes"]["total"] == 64_000_000_000
    assert smallest["bytes_per_element"]["total"] == 8
    assert smallest["traffic_per_element"] == 14
    assert cli.main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "8,000,000,000 parameters in bfloat16, gradients in bfloat16"
    assert max(map(len, printed)) <= 120
    for entry in report["optimizers"]:
        (line,) = [line for line in printed if line.startswith(f"{entry['optimizer']}, {entry['keeps']} [")]
        sizes = [f"{size / 2**30:.2f}" for size in entry["bytes"].values()]
        assert line.partition("]")[2].split()[:5] == sizes
        number = line.partition("]")[0].rpartition("[")[2]
        assert f"[{number}] {entry['source']}" in printed


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["--masters", "split", "--moments", "packed16", "--dtype", "bf16"], ["packed16 moments, split master"]),
        (["--moments", "float32", "--grad-dtype", "bf16", "--amsgrad"], ["float32 moments"]),
        (["--dtype", "fp16", "--masters", "fp32", "--moments", "bfloat16"], ["bfloat16 moments, FP32 master"]),
    ],
)
def test_memory_of_one_choice(capsys: pytest.CaptureFixture[str], words: list[str], rows: list[str]) -> None:
    assert cli.main(["memory", "--params", "10", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [e["keeps"] for e in report["optimizers"] if e["optimizer"] == "ruda_torch.AdamW"] == rows
    assert report["amsgrad"] is ("--amsgrad" in words)
    assert report["gradient_dtype"] == ("float16" if "fp16" in words else "bfloat16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--params", "nan"], "must be whole and at least 1"),
        (["--params", "0"], "must be whole and at least 1"),
        (["--params", "8e9", "--dtype", "int8"], "dtype must be one of"),
        (["--params", "8e9", "--masters", "split"], "an FP32 parameter is its own master"),
    ],
)
def test_memory_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(["memory", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ruda-optim memory: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_missing_torch_is_one_sentence(tmp_path: Any) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    result = subprocess.run(
        [sys.executable, "-c", "from ruda_optim.cli import main; raise SystemExit(main(['info']))"],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("ruda-optim needs torch and NumPy: No module named 'torch'")
    assert len(result.stderr.strip().splitlines()) == 1
