"""The picture of the demo: do both optimizers learn the same, and how long does a step take?"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from training import NAMES, Configuration, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUDA, TORCH, FUSED, ALARM, MUTED = "#0b6e99", "#d1495b", "#e0a458", "#c1121f", "#555555"
COLOURS = {"ruda": RUDA, "torch": TORCH, "torch-fused": FUSED}


def draw(
    config: Configuration,
    histories: dict[str, History],
    milliseconds: dict[str, float],
    unigram_entropy: float,
    parameters: int,
) -> bytes:
    """A PNG of the runs.

    Args:
        config: of all runs.
        histories: of the runs ``ruda`` and, unless the comparison was left out, ``torch``.
        milliseconds: median time per optimizer step of each method.
        unigram_entropy: of the validation text, nats per byte.
        parameters: of the model.
    """
    compared, clipped = "torch" in histories, config.max_grad_norm is not None
    heights = [4.4] + [1.8] * compared + [1.8, 1.3] * clipped
    figure = Figure(figsize=(13, sum(heights) + 1.5), layout="constrained")
    figure.suptitle(
        f"Training a small GPT ({parameters:,} parameters, {config.dtype.upper()}) on English text, "
        f"{config.steps} steps, seed {config.seed}",
        fontsize=14, fontweight="bold",
    )  # fmt: skip
    grid = figure.add_gridspec(len(heights), 2, width_ratios=(1.9, 1), height_ratios=heights)
    left = [figure.add_subplot(grid[0, 0])]
    left += [figure.add_subplot(grid[row, 0], sharex=left[0]) for row in range(1, len(heights))]
    panels = iter(left)
    _losses(next(panels), histories, unigram_entropy)
    if compared:
        _difference(next(panels), histories["ruda"].loss, histories["torch"].loss)
    if clipped:
        _norm(next(panels), histories["ruda"], config.max_grad_norm)
        _clip(next(panels), histories["ruda"])
    for axes in left:
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=axes is left[-1])
    left[-1].set_xlabel("optimizer step")
    _times(figure.add_subplot(grid[0, 1]), milliseconds, config)
    if len(heights) > 1:
        _notes(figure.add_subplot(grid[1:, 1]), config, histories, unigram_entropy)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _losses(axes: Axes, histories: dict[str, History], unigram_entropy: float) -> None:
    # Ours wide and pale, torch's thin and on top: two equal lines of one width would look like one.
    styles = {"ruda": {"linewidth": 6.0, "alpha": 0.35}, "torch": {"linewidth": 1.0}}
    for method, history in histories.items():
        steps = range(1, len(history.loss) + 1)
        axes.plot(steps, history.loss, color=COLOURS[method], label=f"training, {NAMES[method]}", **styles[method])
    for method, marker, size in (("ruda", "o", 10), ("torch", "x", 6)):
        if method in histories:
            steps, losses = zip(*histories[method].validation, strict=True)
            axes.plot(steps, losses, marker, color=COLOURS[method], markersize=size, markeredgewidth=1.8,
                      markerfacecolor="white", label=f"validation, {NAMES[method]}", zorder=3)  # fmt: skip
    axes.axhline(unigram_entropy, color=MUTED, linestyle="--", linewidth=1.2,
                 label=f"unigram entropy {unigram_entropy:.2f}: the best without context")  # fmt: skip
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Loss, both optimizers from the same seed" if len(histories) > 1 else "Loss", loc="left")
    axes.legend(fontsize=9)


def _difference(axes: Axes, ruda: list[float], torch: list[float]) -> None:
    differences = [abs(ours - theirs) for ours, theirs in zip(ruda, torch, strict=True)]
    axes.plot(range(1, len(differences) + 1), differences, ".", color=MUTED, markersize=3)
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(0, 10)
    axes.set_ylabel("difference\n(nats per byte)")
    axes.set_yticks([0, 1e-6, 1e-4, 1e-2, 1])
    axes.set_title("How far apart the two training losses are (rounding errors that training amplifies)", loc="left")


def _norm(axes: Axes, history: History, max_grad_norm: float) -> None:
    steps = range(1, len(history.grad_norm) + 1)
    axes.plot(steps, history.grad_norm, color=RUDA, linewidth=1)
    axes.axhline(max_grad_norm, color=MUTED, linestyle="--", linewidth=1.2, label=f"max_grad_norm = {max_grad_norm:g}")
    axes.set_yscale("log")
    axes.set_ylabel("L2 norm")
    axes.set_title("Gradient norm before clipping", loc="left")
    axes.legend(fontsize=9, loc="upper right")


def _clip(axes: Axes, history: History) -> None:
    steps = range(1, len(history.clip_factor) + 1)
    axes.plot(steps, history.clip_factor, color=RUDA, linewidth=1)
    skipped = [step for step, skip in zip(steps, history.skipped, strict=True) if skip]
    axes.plot(skipped, [1.0] * len(skipped), "v", color=ALARM, clip_on=False)
    axes.set_ylim(0, 1.15)
    axes.set_ylabel("factor")
    marks = ", each a red triangle" if skipped else ""
    axes.set_title(f"Clip factor (1 = not clipped); {len(skipped)} steps skipped{marks}", loc="left")


def _times(axes: Axes, milliseconds: dict[str, float], config: Configuration) -> None:
    for row, (method, value) in enumerate(milliseconds.items()):
        axes.barh(row, value, color=COLOURS[method], height=0.5)
        axes.annotate(f"{NAMES[method]}: {value:.3g} ms", (0, row - 0.3), xytext=(2, 2), textcoords="offset points",
                      va="bottom")  # fmt: skip
    axes.set_ylim(len(milliseconds) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds (shorter is better)")
    by_hand = ["FP32 masters"] * (config.dtype != "fp32") + ["clip_grad_norm_"] * (config.max_grad_norm is not None)
    note = f"\ntorch's includes {' and '.join(by_hand)}" if by_hand else ""
    axes.set_title(f"Time per optimizer step (median){note}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _notes(axes: Axes, config: Configuration, histories: dict[str, History], unigram_entropy: float) -> None:
    lines = ["Validation loss at the end", ""]
    for method, history in histories.items():
        loss = history.validation[-1][1]
        lines += [NAMES[method], f"    {loss:.3f} nats = {loss / math.log(2):.3f} bits per byte"]
    lines += ["unigram entropy", f"    {unigram_entropy:.3f} nats = {unigram_entropy / math.log(2):.3f} bits per byte"]
    if config.max_grad_norm is not None:
        ours = histories["ruda"]
        clipped = sum(factor < 1.0 for factor in ours.clip_factor)
        lines += ["", f"{NAMES['ruda']}: of {len(ours.loss)} steps,"]
        lines += [f"    {clipped} clipped, {sum(ours.skipped)} skipped (non-finite gradients)"]
    if config.dtype != "fp32":
        lines += ["", f"Both hold {config.dtype.upper()} parameters and FP32 masters."]
    axes.text(0.02, 0.98, "\n".join(lines), va="top", fontsize=10.5, linespacing=1.4, transform=axes.transAxes)
    axes.set_axis_off()
