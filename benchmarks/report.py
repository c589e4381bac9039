"""Results as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def heading(found: dict[str, Any]) -> str:
    about = found["environment"]
    where = about.get("gpu", f"{about['cpu']}, {about['threads']} threads, {about['cpu level']}")
    return f"{where}; torch {about['versions']['torch']}"


def table(found: dict[str, Any], workload: str) -> Table:
    """One row per variant and peer that ran."""
    made = Table(title=found["workloads"][workload]["title"], title_justify="left")
    for column in ("variant", "peer"):
        made.add_column(column, no_wrap=True)
    for column in ("ours ms", "peer ms", "ratio (p20-p80)", "t/limit ours", "peer", "rounds", "dropped"):
        made.add_column(column, justify="right")
    before = None
    for entry in found["comparisons"]:
        if entry["workload"] != workload or entry["status"] != "measured":
            continue
        variant = entry["variant"]
        ratio = entry["ratio"]
        made.add_row(
            variant if variant != before else "",
            found["peers"][entry["peer"]],
            f"{entry['ours ms']['median']:.3g}",
            f"{entry['peer ms']['median']:.3g}",
            f"{ratio['median']:.2f} ({ratio['p20']:.2f}-{ratio['p80']:.2f})",
            _median(entry, "ours t/limit"),
            _median(entry, "peer t/limit"),
            str(entry["rounds kept"]),
            str(entry["rounds dropped"]),
        )
        before = variant
    return made


def footnotes(found: dict[str, Any]) -> list[str]:
    """Why the other cells hold no number; cells with one reason in one line."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in found["comparisons"]:
        if entry["status"] != "measured":
            key = (entry["peer"], entry["status"], entry["reason"])
            reasons.setdefault(key, []).append(f"{entry['workload']}/{entry['variant']}")
    lines = []
    for (peer, status, reason), cells in reasons.items():
        where = ", ".join(cells[:3]) + (", ..." if len(cells) > 3 else "")
        lines.append(f"{found['peers'][peer]}: {status}: {reason} ({len(cells)} cells: {where})")
    return lines


def _median(entry: dict[str, Any], key: str) -> str:
    return f"{entry[key]['median']:.2f}" if entry.get(key) else ""
