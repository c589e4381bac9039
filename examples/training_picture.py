"""The picture of the demo: do both learn the same, what went through each layer, how long does a step take?"""

from __future__ import annotations

import io
import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
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
    layers: list[str],
) -> bytes:
    """A PNG of the runs.

    Args:
        config: of all runs.
        histories: of the runs ``ruda`` and, unless the comparison was left out, ``torch``.
        milliseconds: median time per optimizer step of each method.
        unigram_entropy: of the validation text, nats per byte.
        parameters: of the model.
        layers: names, in the order of the norms in the history.
    """
    ours, compared = histories["ruda"], "torch" in histories
    # Left: loss, difference, norm, factor, over one axis of steps. Right: the layers over the same steps, times, notes.
    heights = [4.4] + [1.8] * compared + [1.8, 1.3]
    tall = max(4.4, 0.21 * len(layers))
    figure = Figure(figsize=(16, sum(heights) + 1.9), layout="constrained")
    figure.suptitle(
        f"Training a small GPT ({parameters:,} parameters, {config.dtype.upper()}) on English text, "
        f"{config.steps} steps, seed {config.seed}",
        fontsize=14, fontweight="bold",
    )  # fmt: skip
    sides = figure.add_gridspec(1, 2, width_ratios=(1, 1))
    grid = sides[0, 0].subgridspec(len(heights), 1, height_ratios=heights)
    left = [figure.add_subplot(grid[0])]
    left += [figure.add_subplot(grid[row], sharex=left[0]) for row in range(1, len(heights))]
    panels = iter(left)
    _losses(next(panels), histories, unigram_entropy)
    if compared:
        _difference(next(panels), ours.loss, histories["torch"].loss)
    _norm(next(panels), ours, config.max_grad_norm)
    _clip(next(panels), ours)
    for axes in left:
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=axes is left[-1])
    left[-1].set_xlabel("optimizer step")
    right = sides[0, 1].subgridspec(2, 1, height_ratios=(tall, max(2.6, sum(heights) - tall)))
    _layers(figure.add_subplot(right[0]), ours, layers)
    below = right[1].subgridspec(1, 2, width_ratios=(1, 1.15))
    _times(figure.add_subplot(below[0]), milliseconds, config)
    _notes(figure.add_subplot(below[1]), config, histories, unigram_entropy)
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


def _layers(axes: Axes, history: History, layers: list[str]) -> None:
    """One row per layer, one column per step, the norm of its gradient as a colour; what was not finite, in red."""
    norms = np.array(history.layer_norms).T
    seen = norms[np.isfinite(norms) & (norms > 0)]
    low, high = np.percentile(seen, [1, 99.9]) if seen.size else (0.1, 1.0)
    picture = axes.imshow(
        np.where(np.isfinite(norms), norms, np.nan),
        aspect="auto", interpolation="nearest", cmap="magma", norm=LogNorm(low, max(high, 1.01 * low)),
        extent=(0.5, norms.shape[1] + 0.5, len(layers) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(layers)), layers, fontsize=7.5)
    for row, column in np.argwhere(~np.isfinite(norms)):
        axes.axvline(column + 1, color="white", linewidth=0.8, alpha=0.7)
        axes.plot(column + 1, row, "X", color=ALARM, markersize=11, markeredgecolor="white", clip_on=False)
        axes.annotate(f"NaN in step {column + 1}: skipped", (column + 1, row), xytext=(9, 0), color="white",
                      textcoords="offset points", va="center", fontsize=9, fontweight="bold")  # fmt: skip
    axes.set_title("Gradient norm of every layer in every step, from gradient_report()", loc="left")
    axes.set_xlabel("optimizer step")
    axes.figure.colorbar(picture, ax=axes, pad=0.01, aspect=40, label="L2 norm")


def _norm(axes: Axes, history: History, max_grad_norm: float) -> None:
    steps = range(1, len(history.grad_norm) + 1)
    axes.plot(steps, history.grad_norm, color=RUDA, linewidth=1)
    if math.isfinite(max_grad_norm):
        axes.axhline(max_grad_norm, color=MUTED, linestyle="--", linewidth=1.2,
                     label=f"max_grad_norm = {max_grad_norm:g}")  # fmt: skip
        axes.legend(fontsize=9, loc="upper right")
    axes.set_yscale("log")
    axes.set_ylabel("L2 norm")
    axes.set_title("Gradient norm before clipping", loc="left")


def _clip(axes: Axes, history: History) -> None:
    steps = range(1, len(history.clip_factor) + 1)
    axes.plot(steps, history.clip_factor, color=RUDA, linewidth=1)
    skipped = [step for step, skip in zip(steps, history.skipped, strict=True) if skip]
    axes.plot(skipped, [1.0] * len(skipped), "v", color=ALARM, clip_on=False)
    axes.set_ylim(0, 1.15)
    axes.set_ylabel("factor")
    axes.set_title(f"Clip factor (1: not clipped); red: {len(skipped)} skipped", loc="left")


def _times(axes: Axes, milliseconds: dict[str, float], config: Configuration) -> None:
    for row, (method, value) in enumerate(milliseconds.items()):
        axes.barh(row, value, color=COLOURS[method], height=0.5)
        axes.annotate(f"{NAMES[method]}: {value:.3g} ms", (0, row - 0.3), xytext=(2, 2), textcoords="offset points",
                      va="bottom")  # fmt: skip
    axes.set_ylim(len(milliseconds) - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("milliseconds (shorter is better)")
    by_hand = " and FP32 masters" if config.dtype != "fp32" else ""
    axes.set_title(f"Time per optimizer step (median)\ntorch's includes clip_grad_norm_{by_hand}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _notes(axes: Axes, config: Configuration, histories: dict[str, History], unigram_entropy: float) -> None:
    lines = ["Validation loss at the end", ""]
    for method, history in histories.items():
        loss = history.validation[-1][1]
        lines += [NAMES[method], f"    {loss:.3f} nats = {loss / math.log(2):.3f} bits per byte"]
    lines += ["unigram entropy", f"    {unigram_entropy:.3f} nats = {unigram_entropy / math.log(2):.3f} bits per byte"]
    ours = histories["ruda"]
    clipped = sum(factor < 1.0 for factor in ours.clip_factor)
    lines += ["", f"{NAMES['ruda']}:", f"    {clipped} of {len(ours.loss)} steps clipped, {sum(ours.skipped)} skipped"]
    lines += [f"    {line}" for told in ours.skips[:3] for line in textwrap.wrap(told, 48)]
    if config.dtype != "fp32":
        lines += ["", f"Both train {config.dtype.upper()} parameters with masters."]
    axes.text(0.02, 0.98, "\n".join(lines), va="top", fontsize=9, linespacing=1.35, transform=axes.transAxes)
    axes.set_axis_off()
