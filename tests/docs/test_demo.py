"""The demo at a size that takes seconds: it learns, draws, resumes bit for bit, and says what is wrong."""

from __future__ import annotations

import math
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import demo_text
import pace
import train_text
import training

if TYPE_CHECKING:
    from collections.abc import Iterator

TINY = (
    "--layers 1 --width 16 --heads 2 --context 16 --batch 4 --steps 8 --checkpoint-every 3 --evaluate-every 4".split()
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from more threads, and loses seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: pathlib.Path) -> pathlib.Path:
    """8 kB of real text, so that validation takes no time."""
    path = tmp_path / "text.txt"
    path.write_bytes(demo_text._pydoc_text()[:8000])
    return path


def load(path: pathlib.Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same_bits(left: Any, right: Any, where: str = "checkpoint") -> None:
    """Everything in two checkpoints, NaN included; measured times are the one thing that may differ."""
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            if key != "optimizer_seconds":
                assert_same_bits(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_same_bits(*pair, f"{where}[{i}]")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert left.shape == right.shape, where
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), where
    else:
        assert repr(left) == repr(right), where


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dtype", "bf16", "--max-grad-norm", "0.5"],
        ["--max-grad-norm", "inf", "--no-compare"],
        ["--dtype", "bf16", "--moments", "packed16", "--no-compare"],
    ],
    ids=["fp32", "bf16", "not clipped, not compared", "packed moments"],
)
def test_runs_and_draws(
    tmp_path: pathlib.Path, text: pathlib.Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    out = tmp_path / "demo"
    assert train_text.main([*TINY, *options, "--text", str(text), "--out", str(out)]) == 0
    printed, progress = capsys.readouterr()
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"validation loss\n +ruda_torch\.AdamW\(fused_step=True\) +\d\.\d+ nats \(\d\.\d+ bits\)", printed)
    assert "unigram" in printed
    assert "tokens/s" in progress
    assert "loss " in progress
    assert ("torch.optim.AdamW(fused=True)" in printed) is ("--no-compare" not in options)
    named = (
        "step 5 skipped: not finite is the gradient of blocks.0.mlp_in.weight, one element of it made NaN on purpose"
    )
    assert printed.count(named) == 2, "when it happens, and at the end"
    assert not list(out.glob("*.partial"))
    checkpoint = load(out / "checkpoint-ruda.pt")
    assert checkpoint["step"] == 8
    history = checkpoint["history"]
    assert len(history["loss"]) == 8
    assert history["skipped"] == [step == 4 for step in range(8)]
    assert all(math.isfinite(loss) for loss in history["loss"])
    limit = float(options[options.index("--max-grad-norm") + 1]) if "--max-grad-norm" in options else 1.0
    finite = [(n, f) for n, f in zip(history["grad_norm"], history["clip_factor"], strict=True) if math.isfinite(n)]
    assert len(finite) == 7
    # min(limit / (norm + 1e-6), 1) in FP64, rounded to FP32.
    assert [f for _, f in finite] == pytest.approx([min(limit / (n + 1e-6), 1.0) for n, _ in finite], rel=2**-24)
    assert (min(f for _, f in finite) < 1) is (limit < math.inf)
    # The layers' norms are those of the whole gradient, layer by layer; the poisoned one alone is not finite.
    assert [sum(map(math.isinf, norms)) for norms in history["layer_norms"]] == [step == 4 for step in range(8)]
    for norms, total in zip(history["layer_norms"], history["grad_norm"], strict=True):
        assert math.hypot(*norms) == pytest.approx(total, rel=1e-5)  # statistics in FP32
    stored = {"packed_moments"} if "packed16" in options else {"exp_avg", "exp_avg_sq"}
    assert all(stored < set(state) for state in checkpoint["optimizer"]["state"].values())
    if "--no-compare" not in options:
        assert load(out / "checkpoint-torch.pt")["history"]["skipped"] == history["skipped"]


def test_learns_more_than_byte_frequencies_and_agrees_with_torch(tmp_path: pathlib.Path) -> None:
    text = demo_text.load_text(None, 32)
    config = training.Configuration(text.digest, "fp32", 0, 150, 16, 32, 1, 64, 2, 0.0, 1e-2, 0.1, 1.0)
    runs = [training.Run(config, text, method) for method in ("ruda", "torch")]
    for run in runs:
        run.train(150, 150)
    for run in runs:
        assert run.validation_loss() < text.unigram_entropy - 0.3
    # The first loss is of the same weights on the same bytes. Ten steps amplify rounding errors (1e-7) by little.
    ours, theirs = (run.history.loss for run in runs)
    assert ours[0] == theirs[0]
    assert ours[:10] == pytest.approx(theirs[:10], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ["--dropout", "0.2"],
        ["--dtype", "bf16", "--max-grad-norm", "0.5"],
        ["--moments", "packed16"],
    ],
    ids=str,
)
def test_resume_continues_bit_for_bit(
    tmp_path: pathlib.Path, text: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    command = [*TINY, *options, "--text", str(text), "--out"]
    assert train_text.main([*command, str(tmp_path / "whole")]) == 0

    class Killed(BaseException):
        pass

    train_step = training.Run.train_step

    def dies(method: str, at: int) -> None:
        def step(run: training.Run) -> None:
            if run.method == method and run.step == at:
                raise Killed
            train_step(run)

        monkeypatch.setattr(training.Run, "train_step", step)

    out = tmp_path / "broken"
    for resume, (method, at) in enumerate([("ruda", 5), ("torch", 4)]):
        dies(method, at)
        with pytest.raises(Killed):
            train_text.main([*command, str(out), *["--resume"] * resume])
    assert load(out / "checkpoint-torch.pt")["step"] == 3
    monkeypatch.setattr(training.Run, "train_step", train_step)
    assert train_text.main([*command, str(out), "--resume"]) == 0
    for name in ("checkpoint-ruda.pt", "checkpoint-torch.pt"):
        assert_same_bits(load(tmp_path / "whole" / name), load(out / name), name)


# ---- the time that it promises ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("step", [0.001, 0.03, 0.2, 1.0])
def test_as_many_steps_as_fit_and_no_more(step: float, compare: bool) -> None:
    measured = pace.Pace(step, validation=8 * step)
    steps = measured.steps(180.0, compare=compare)
    assert steps % 10 == 0
    assert measured.seconds(steps, compare=compare) <= 180.0
    assert steps == pace.MOST or measured.seconds(steps + 10, compare=compare) > 180.0


def test_too_slow_a_machine_gets_the_fewest_steps() -> None:
    measured = pace.Pace(step=60.0, validation=500.0)
    assert measured.steps(180.0, compare=True) == pace.FEWEST
    assert measured.seconds(pace.FEWEST, compare=True) > 180.0


def test_without_steps_it_measures_says_so_and_resumes_the_same_run(
    tmp_path: pathlib.Path, text: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pace, "MOST", 30)
    monkeypatch.setattr(train_text, "MOST", 30)
    command = [*TINY, "--text", str(text), "--out", str(tmp_path / "demo"), "--no-compare"]
    del command[command.index("--steps") : command.index("--steps") + 2]
    assert train_text.main([*command, "--minutes", "100"]) == 0
    assert re.search(
        r"ms a step on this machine: 30 steps \(all of them\), about \d+ s in all", capsys.readouterr().out
    )
    assert train_text.main([*command, "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "from step 30 of 30" in printed
    assert "a step on this machine" not in printed
    assert train_text.main([*command, "--minutes", "0"]) == 0
    assert "20 steps (the fewest that show anything; --minutes 0 is not enough" in capsys.readouterr().out


def test_interrupted_write_keeps_the_old_checkpoint(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    training.write_atomically(path, b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(training.os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            training.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    training.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command that must fail."""
    assert train_text.main([*TINY, *arguments]) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    return message


def test_errors_of_text_and_folder(
    tmp_path: pathlib.Path, text: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "demo")]
    assert "No such file" in failing([*out, "--text", str(tmp_path / "missing")], capsys)
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 169)
    message = failing([*out, "--text", str(short)], capsys)
    assert "must have at least 170 bytes" in message
    assert "has 169" in message
    assert "--out must be a folder that can be written to" in failing(["--text", str(text), "--out", str(text)], capsys)


def test_errors_of_resume(tmp_path: pathlib.Path, text: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    command = ["--text", str(text), "--out", str(out), "--no-compare"]
    assert "start without --resume" in failing([*command, "--resume"], capsys)
    assert train_text.main([*TINY, *command]) == 0
    capsys.readouterr()
    message = failing([*command, "--resume", "--lr", "0.5", "--steps", "9"], capsys)
    assert "--steps 8 (now 9), --lr 0.003 (now 0.5)" in message
    text.write_bytes(text.read_bytes()[1:])
    assert "another --text" in failing([*command, "--resume"], capsys)
    (out / "checkpoint-ruda.pt").write_bytes(b"not a checkpoint")
    assert "is not a readable checkpoint" in failing([*command, "--resume"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--width 30 --heads 4", "--width must be a multiple of --heads, got 30 and 4"),
        ("--max-grad-norm nan", "--max-grad-norm must be at least 0, got nan"),
        ("--dropout 1", "--dropout must be at least 0 and below 1, got 1.0"),
        ("--dtype fp8", "invalid choice: 'fp8'"),
    ],
)
def test_errors_of_options(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_text.main(arguments.split())
    assert message in capsys.readouterr().err
