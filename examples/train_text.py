"""Train a small GPT on English text, once with the fused step and once with torch's AdamW, and draw both.

    python examples/train_text.py                 # `make demo`: about three minutes, with fewer steps where it is slow
    python examples/train_text.py --dtype bf16    # BF16 parameters and gradients, 32-bit masters
    python examples/train_text.py --resume        # continue after a kill, bit for bit

In the middle one element of one gradient is made NaN on purpose: the step is skipped, and the parameter is
named. Needs matplotlib and tqdm besides torch; `make venv` installs them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from demo_text import DemoError, Text, load_text
from pace import MOST, evaluations, measure, timing_steps
from training import MOMENT_BYTES, NAMES, Configuration, Run, option, read_checkpoint, write_atomically
from training_picture import draw

from ruda_optim.fused_adamw.storage import available


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = parse(argv)
    try:
        return demo(args)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a folder taken away: whatever the file system refuses while we write
        print(f"error: cannot write to {args.out}: {error.strerror or error}; choose another --out", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; add --resume to continue from the last checkpoint in {args.out}", file=sys.stderr)
        return 130


def demo(args: argparse.Namespace) -> int:
    """Train, compare, draw, report."""
    for backend in available():
        if backend.name == "cpu" and not backend.available:
            raise DemoError(backend.reason)
    started = time.perf_counter()
    text = load_text(args.text, args.context)
    config = Configuration(
        text=text.digest,
        **{name: getattr(args, name) for name in Configuration.__dataclass_fields__ if name != "text"},
    )
    prepare_folder(args.out)
    entropy = text.unigram_entropy
    parameters = sum(parameter.numel() for parameter in config.model().parameters())
    print(f"text:    {text.source}, {len(text.training):,} bytes to train on, {len(text.validation):,} to validate on")
    print(f"model:   {args.layers} layers of width {args.width}, {parameters:,} parameters in {args.dtype}")
    print(f"moments: {args.moments}, {MOMENT_BYTES[args.moments] * parameters:,} bytes in the fused step's state")
    print(f"unigram: {per_byte(entropy)}, the best that a model without context could do on the validation text")

    checkpoints = {method: args.out / f"checkpoint-{method}.pt" for method in ("ruda", "torch")}
    if args.resume and not checkpoints["ruda"].exists():
        raise DemoError(f"--resume needs {checkpoints['ruda']}, which does not exist; start without --resume")
    if args.steps is None:
        steps = (
            read_checkpoint(checkpoints["ruda"])["configuration"]["steps"]
            if args.resume
            else fitting(config, text, args)
        )
        config = replace(config, steps=steps)
    steps = config.steps
    evaluate_every = args.evaluate_every or max(1, steps // evaluations(steps))
    if not args.resume:
        for path in checkpoints.values():  # an old one must not pass for the other half of this run
            path.unlink(missing_ok=True)

    runs = {}
    for method in ("ruda", "torch") if args.compare else ("ruda",):
        run = Run(config, text, method)
        if args.resume and checkpoints[method].exists():
            run.load(checkpoints[method])
            print(f"resume:  {NAMES[method]} from step {run.step} of {steps}")
        if run.step < steps:
            run.train(steps, evaluate_every, checkpoints[method], args.checkpoint_every)
        runs[method] = run
    histories = {method: run.history for method, run in runs.items()}
    seconds = {method: history.optimizer_seconds for method, history in histories.items()}
    if args.compare:
        short = Run(config, text, "torch-fused")
        short.train(timing_steps(steps), steps)
        seconds["torch-fused"] = short.history.optimizer_seconds
    milliseconds = {method: 1e3 * statistics.median(values) for method, values in seconds.items()}

    picture = args.out / "training.png"
    write_atomically(picture, draw(config, histories, milliseconds, entropy, parameters, runs["ruda"].layers))
    report(runs, milliseconds, entropy)
    print(f"picture: {picture}, after {time.perf_counter() - started:.0f} s")
    return 0


def fitting(config: Configuration, text: Text, args: argparse.Namespace) -> int:
    """How many steps fit into ``--minutes``, and a line that says so."""
    pace, limit = measure(config, text), 60 * args.minutes
    steps = pace.steps(limit, compare=args.compare)
    seconds = pace.seconds(steps, compare=args.compare)
    why = "all of them" if steps == MOST else f"of {MOST}, as many as fit into --minutes {args.minutes:g}"
    if seconds > limit:
        why = f"the fewest that show anything; --minutes {args.minutes:g} is not enough for them here"
    print(
        f"time:    {1e3 * pace.step:.0f} ms a step on this machine: {steps} steps ({why}), about {seconds:.0f} s in all"
    )
    return steps


def report(runs: dict[str, Run], milliseconds: dict[str, float], entropy: float) -> None:
    """Print what came out: losses, times, skipped steps, and a text that the model writes."""
    model = runs["ruda"].model.eval()
    print("\nThe model continues 'The ':")
    print("  " + model.continue_text(b"The ", 240).decode(errors="replace").replace("\n", "\n  "))
    print("\nvalidation loss")
    for method, run in runs.items():
        loss = run.history.validation[-1][1]
        side = "below" if loss < entropy else "ABOVE"
        print(f"  {NAMES[method]:<34} {per_byte(loss)}, {abs(entropy - loss):.3f} nats {side} the unigram entropy")
    print("time per optimizer step (median)")
    for method, value in milliseconds.items():
        note = f", {timing_steps(runs['ruda'].step)} steps" if method == "torch-fused" else ""
        print(f"  {NAMES[method]:<34} {value:.3f} ms{note}")
    history = runs["ruda"].history
    clipped = sum(factor < 1 for factor in history.clip_factor)
    print(f"clipped {clipped} of {len(history.loss)} steps, skipped {sum(history.skipped)}")
    for told in history.skips:
        print(f"  {told}")


def per_byte(nats: float) -> str:
    """A loss in both units."""
    return f"{nats:.3f} nats ({nats / math.log(2):.3f} bits) per byte"


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` and see that files can be written there, before minutes are spent on training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise DemoError(f"--out must be a folder that can be written to; {folder}: {error.strerror}") from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="train on this file's bytes instead of Python's own help texts")
    add("--out", type=Path, default=Path("demo"), metavar="DIR", help="where the picture and the checkpoints go")
    add("--resume", action="store_true", help="continue the run whose checkpoints lie in --out, bit for bit")
    add("--no-compare", dest="compare", action="store_false", help="train with the fused step only, not with torch's")
    add("--dtype", choices=("fp32", "bf16"), default="fp32",
        help="of parameters and gradients; bf16 keeps FP32 masters, by hand for torch's AdamW")  # fmt: skip
    add("--max-grad-norm", type=float, default=1.0, metavar="NORM",
        help="clip all gradients to this global L2 norm; inf measures it and never clips")  # fmt: skip
    add("--moments", choices=tuple(MOMENT_BYTES), default="float32",
        help="how the fused step keeps its moments: 8, 4 or 2 bytes per element")  # fmt: skip
    add("--minutes", type=float, default=3.0, help="without --steps: how long the demo may take, about")
    add("--steps", type=int, help=f"optimizer steps of each run (None: as many as fit into --minutes, at most {MOST})")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS", help="write a checkpoint this often")
    add("--evaluate-every", type=int, metavar="STEPS",
        help="measure the validation loss this often (None: 2 to 10 times)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the initial weights, the order of the data and the dropout")
    add("--batch", type=int, default=16, help="contexts per step")
    add("--context", type=int, default=128, help="bytes that the model sees")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=128, help="channels, a multiple of --heads")
    add("--heads", type=int, default=4, help="attention heads per block")
    add("--dropout", type=float, default=0.0, help="dropout probability")
    add("--lr", type=float, default=3e-3, help="largest learning rate, after the warm-up")
    add("--weight-decay", type=float, default=0.1, help="decoupled weight decay of the matrices")
    args = parser.parse_args(argv)
    for name in ("steps", "checkpoint_every", "evaluate_every", "batch", "context", "layers", "width", "heads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"{option(name)} must be at least 1, got {getattr(args, name)}")
    for name, low, high in (("dropout", 0, 1), ("lr", 0, math.inf), ("weight_decay", 0, math.inf), ("minutes", 0, 1e6)):
        if not low <= getattr(args, name) < high:
            parser.error(f"{option(name)} must be at least {low} and below {high}, got {getattr(args, name)}")
    if not args.max_grad_norm >= 0:
        parser.error(f"--max-grad-norm must be at least 0, got {args.max_grad_norm}")
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    return args


if __name__ == "__main__":
    sys.exit(main())
