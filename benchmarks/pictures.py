"""Results as pictures: how many times faster than each peer, and how near to the memory limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

if TYPE_CHECKING:
    import pathlib

FORMAT = {"dpi": 150, "bbox_inches": "tight"}


def draw(found: dict[str, Any], folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Write what the results allow and return the files."""
    measured = [entry for entry in found["comparisons"] if entry["status"] == "measured"]
    written = []
    if measured:
        written.append(_ratios(found, measured, folder / f"{name}-ratios.png"))
    if any("ours t/limit" in entry for entry in measured):
        written.append(_limits(found, measured, folder / f"{name}-limit.png"))
    return written


def _ratios(found: dict[str, Any], measured: list[dict[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """One panel per workload, one group of bars per variant, one bar per peer; whiskers from p20 to p80."""
    workloads = [key for key in found["workloads"] if any(entry["workload"] == key for entry in measured)]
    peers = [key for key in found["peers"] if any(entry["peer"] == key for entry in measured)]
    colours = dict(zip(peers, mpl.color_sequences["tab10"], strict=False))
    figure, axes = plt.subplots(len(workloads), 1, figsize=(11, 3.2 * len(workloads)), squeeze=False)
    for axis, workload in zip(axes[:, 0], workloads, strict=True):
        cells = {(e["variant"], e["peer"]): e["ratio"] for e in measured if e["workload"] == workload}
        variants = [key for key in found["variants"] if any(variant == key for variant, _ in cells)]
        position, ticks = 0.0, []
        for variant in variants:
            here = [peer for peer in peers if (variant, peer) in cells]
            for offset, peer in enumerate(here):
                ratio = cells[variant, peer]
                median = ratio["median"]
                axis.bar(position + offset, median, 0.9, color=colours[peer])
                whisker = [[median - ratio["p20"]], [ratio["p80"] - median]]
                axis.errorbar(position + offset, median, whisker, color="black", linewidth=0.8, capsize=2)
                axis.text(position + offset, ratio["p80"], f" {median:.2g}", ha="center", va="bottom", fontsize=7)
            ticks.append(position + (len(here) - 1) / 2)
            position += len(here) + 1
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(ticks, variants)
        axis.set_ylabel("peer time / our time")
        axis.set_title(found["workloads"][workload]["title"], loc="left", fontsize=10)
        axis.margins(y=0.15)
    bars = [plt.Rectangle((0, 0), 1, 1, color=colours[peer]) for peer in peers]
    figure.legend(bars, [found["peers"][peer] for peer in peers], ncol=min(len(peers), 6), loc="lower center",
                  fontsize=8, bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip
    figure.suptitle(f"Whole optimizer step, {_machine(found)}; above 1: ours is faster", fontsize=9, y=0.0, va="top")
    figure.tight_layout()
    figure.savefig(path, **FORMAT)
    plt.close(figure)
    return path


def _limits(found: dict[str, Any], measured: list[dict[str, Any]], path: pathlib.Path) -> pathlib.Path:
    """The roofline of a step that memory bounds: what share of the stream rate its least traffic reaches."""
    rows: list[tuple[str, str, float]] = []
    with_limit = [entry for entry in measured if "ours t/limit" in entry]
    for workload in found["workloads"]:
        for variant in found["variants"]:
            here = [e for e in with_limit if e["workload"] == workload and e["variant"] == variant]
            if not here:
                continue
            first = next((e for e in here if e["peer"] == "torch-fused"), here[0])
            label = f"{workload}, {variant}"
            rows.append((label, "ours", 100 / first["ours t/limit"]["median"]))
            rows += [(label, e["peer"], 100 / e["peer t/limit"]["median"]) for e in here]
    peers = [key for key in found["peers"] if any(peer == key for _, peer, _ in rows)]
    colours = dict(zip(peers, ("black", *mpl.color_sequences["tab10"]), strict=False))
    labels = list(dict.fromkeys(label for label, _, _ in rows))
    figure, axis = plt.subplots(figsize=(9, 1 + 0.45 * len(labels)))
    for label, peer, share in rows:
        marker = "D" if peer == "ours" else "o"
        axis.plot(share, labels.index(label), marker, color=colours[peer], markersize=8 if peer == "ours" else 6)
    axis.axvline(100, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.grid(axis="y", linewidth=0.3)
    axis.set_xlabel("percent of the stream rate (in-place multiplication, same round) that the least traffic reaches")
    handles = [plt.Line2D([], [], marker="D" if p == "ours" else "o", linestyle="", color=colours[p]) for p in peers]
    axis.legend(handles, [found["peers"][peer] for peer in peers], fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axis.set_title(_machine(found), fontsize=9)
    figure.savefig(path, **FORMAT)
    plt.close(figure)
    return path


def _machine(found: dict[str, Any]) -> str:
    about = found["environment"]
    where = about.get("gpu", f"{about['cpu']}, {about['threads']} threads")
    return f"{where}, torch {about['versions']['torch']}, {about['date'][:10]}"
