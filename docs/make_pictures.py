"""Draws docs/pictures/*.svg: plain SVG text, no packages. The numbers are the traffic model of how-it-works.md.

python docs/make_pictures.py [FOLDER]
"""

from __future__ import annotations

import pathlib
import sys
from html import escape

INK, SOFT, BLUE, ORANGE, PAPER = "#24292f", "#8c959f", "#2f6fde", "#d9731a", "#ffffff"
FONT = 'font-family="system-ui, sans-serif"'

# Bytes per element of one step: (title, read, written). FP32 gradients; each array counted once per pass over it.
TRAFFIC = (
    ("fused AdamW", 16, 12),
    ("fused AdamW, clipped", 20, 12),
    ("fused AMSGrad", 20, 16),
    ("fused AMSGrad, clipped", 24, 16),
    ("BF16 parameter, FP32 master", 14, 14),
    ("BF16 parameter, split master", 14, 12),
)


def text(x: float, y: float, words: str, *, size: int = 14, anchor: str = "start", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = INK) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def picture(width: int, height: int, title: str, *parts: str) -> str:
    tip = (
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {FONT}>'
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join((head, f"<title>{escape(title)}</title>", tip, paper, *parts, "</svg>\n"))


def two_passes() -> str:
    parts = [
        box(20, 40, 150, 60, "#eef4ff"), text(95, 67, "gradients", anchor="middle"),
        text(95, 86, "of all groups", size=12, anchor="middle", fill=SOFT),
        arrow(170, 70, 222, 70),
        box(225, 40, 150, 60, "#fff4ea"), text(300, 67, "statistics", anchor="middle"),
        text(300, 86, "4 bytes an element", size=12, anchor="middle", fill=SOFT),
        arrow(375, 70, 427, 70),
        box(430, 40, 150, 60, "#fff4ea"), text(505, 67, "report, 12 bytes", anchor="middle"),
        text(505, 86, "bad, scale, sum", size=12, anchor="middle", fill=SOFT),
        arrow(505, 100, 505, 147),
        box(405, 150, 200, 60, "#f6f8fa"), text(505, 177, "one decision", anchor="middle"),
        text(505, 196, "skip, or a clip factor", size=12, anchor="middle", fill=SOFT),
        arrow(405, 180, 352, 180), text(378, 172, "go", size=12, anchor="middle", fill=SOFT),
        box(130, 150, 220, 60, "#eef4ff"), text(240, 177, "update, one launch", anchor="middle"),
        text(240, 196, "unscale, clip, decay, moments", size=12, anchor="middle", fill=SOFT),
        arrow(605, 180, 642, 180), text(650, 177, "skip:", size=13), text(650, 194, "nothing changes", size=13),
        text(20, 24, "Pass 1 reads the gradients. Pass 2 reads every array once, and writes what changes.", size=14),
        text(20, 235, "Without max_grad_norm and with check_finite=False there is no pass 1.", size=12, fill=SOFT),
    ]  # fmt: skip
    return picture(780, 250, "The two passes of a step", *parts)


def traffic() -> str:
    scale, left, row = 9.0, 230, 34
    parts = [text(20, 24, "Bytes of memory traffic per element and step (counted from the source, not measured)")]
    for index, (title, read, written) in enumerate(TRAFFIC):
        y = 44 + index * row
        parts += [
            text(left - 10, y + 16, title, anchor="end", size=13),
            f'<rect x="{left}" y="{y}" width="{read * scale:g}" height="22" fill="{BLUE}"/>',
            f'<rect x="{left + read * scale:g}" y="{y}" width="{written * scale:g}" height="22" fill="{ORANGE}"/>',
            text(left + (read + written) * scale + 8, y + 16, str(read + written), size=13),
        ]
    y = 54 + len(TRAFFIC) * row
    for index, (color, words) in enumerate(((BLUE, "read"), (ORANGE, "written"))):
        x = left + index * 90
        parts += [
            f'<rect x="{x}" y="{y}" width="14" height="14" fill="{color}"/>',
            text(x + 20, y + 12, words, size=13),
        ]
    return picture(680, y + 30, "Memory traffic per element", *parts)


def bits() -> str:
    columns = ("threads", "instruction set", "backend", "processes")
    same, last = "same bits", "last bits may differ"
    rows = (
        ("update, given one clip factor", (same, same, same, same)),
        ("norm and clip factor", (same, same, last, last)),
    )
    parts = [text(20, 24, "What has the same bits when this changes")]
    for column, title in enumerate(columns):
        parts.append(text(320 + column * 145, 54, title, anchor="middle", size=13, fill=SOFT))
    for index, (title, values) in enumerate(rows):
        y = 70 + index * 48
        parts.append(text(20, y + 22, title, size=13))
        for column, value in enumerate(values):
            fill = "#e6f4ea" if value == same else "#fff4ea"
            parts.append(box(255 + column * 145, y, 132, 34, fill, stroke=SOFT))
            parts.append(text(321 + column * 145, y + 22, value, anchor="middle", size=12))
    parts.append(text(20, 186, "A repeated run on one backend has the same bits throughout.", size=13))
    return picture(850, 200, "Where bits can differ", *parts)


PICTURES = {"two-passes.svg": two_passes, "traffic.svg": traffic, "bits.svg": bits}

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "pictures"
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
