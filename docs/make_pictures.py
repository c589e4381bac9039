"""Draws docs/pictures/*.svg: plain SVG text, no packages. The numbers are the traffic model of how-it-works.md.

python docs/make_pictures.py [FOLDER]
"""

from __future__ import annotations

import pathlib
import sys
from html import escape

INK, SOFT, BLUE, ORANGE, PAPER = "#24292f", "#8c959f", "#2f6fde", "#d9731a", "#ffffff"
WIDTH = 440  # of every picture: not much more than a phone's, so that its words stay readable there
FONT = 'font-family="system-ui, sans-serif"'

# Bytes per element of one step: (title, read, written). FP32 gradients; each array counted once per pass over it.
TRAFFIC = (
    ("fused AdamW", 16, 12),
    ("fused AdamW, clipped", 20, 12),
    ("fused AMSGrad", 20, 16),
    ("fused AMSGrad, clipped", 24, 16),
    ("BF16 parameter, FP32 master", 14, 14),
    ("BF16 parameter, split master", 14, 12),
    ("FP32, moments in BF16", 12, 8),
    ("FP32, moments packed", 10, 6),
    ("BF16, split master, BF16 moments", 10, 8),
    ("BF16, split master, packed", 8, 6),
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
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT}>'
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join((head, f"<title>{escape(title)}</title>", tip, paper, *parts, "</svg>\n"))


def two_passes() -> str:
    parts = [
        text(20, 24, "Pass 1 reads the gradients. Pass 2 reads every"),
        text(20, 44, "array once, and writes what changes."),
        box(20, 62, 160, 60, "#eef4ff"), text(100, 89, "gradients", anchor="middle"),
        text(100, 108, "of all groups", size=12, anchor="middle", fill=SOFT),
        arrow(180, 92, 247, 92),
        box(250, 62, 170, 60, "#fff4ea"), text(335, 89, "statistics", anchor="middle"),
        text(335, 108, "4 bytes an element", size=12, anchor="middle", fill=SOFT),
        arrow(335, 122, 335, 157),
        box(250, 160, 170, 60, "#f6f8fa"), text(335, 187, "one decision", anchor="middle"),
        text(335, 206, "skip, or a clip factor", size=12, anchor="middle", fill=SOFT),
        arrow(250, 190, 203, 190), text(226, 182, "go", size=12, anchor="middle", fill=SOFT),
        box(20, 160, 180, 60, "#eef4ff"), text(110, 187, "update, one launch", anchor="middle"),
        text(110, 206, "clip, decay, moments", size=12, anchor="middle", fill=SOFT),
        arrow(335, 220, 335, 243), text(335, 260, "skip: nothing changes", size=13, anchor="middle"),
        text(20, 286, "No pass 1 with check_finite=False and no max_grad_norm.", size=12, fill=SOFT),
    ]  # fmt: skip
    return picture(WIDTH, 300, "The two passes of a step", *parts)


def traffic() -> str:
    scale, left, row = 4.8, 215, 34
    parts = [text(20, 24, "Bytes of memory traffic per element and step"),
             text(20, 42, "counted from the source, not measured", size=12, fill=SOFT)]  # fmt: skip
    for index, (title, read, written) in enumerate(TRAFFIC):
        y = 60 + index * row
        parts += [
            text(left - 10, y + 16, title, anchor="end", size=13),
            f'<rect x="{left}" y="{y}" width="{read * scale:g}" height="22" fill="{BLUE}"/>',
            f'<rect x="{left + read * scale:g}" y="{y}" width="{written * scale:g}" height="22" fill="{ORANGE}"/>',
            text(left + (read + written) * scale + 8, y + 16, str(read + written), size=13),
        ]
    y = 70 + len(TRAFFIC) * row
    for index, (color, words) in enumerate(((BLUE, "read"), (ORANGE, "written"))):
        x = left + index * 90
        parts += [
            f'<rect x="{x}" y="{y}" width="14" height="14" fill="{color}"/>',
            text(x + 20, y + 12, words, size=13),
        ]
    return picture(WIDTH, y + 30, "Memory traffic per element", *parts)


def bits() -> str:
    columns = ("threads", "instruction set", "backend", "processes")
    same, last = "same bits", "last bits differ"
    rows = (
        ("update, given one clip factor", (same, same, same, same)),
        ("norm and clip factor", (same, same, last, last)),
    )
    parts = [text(15, 24, "What may happen to the bits when this changes")]
    for column, title in enumerate(columns):
        parts.append(text(64 + column * 104, 52, title, anchor="middle", size=12, fill=SOFT))
    for index, (title, values) in enumerate(rows):
        y = 62 + index * 68
        parts.append(text(15, y + 16, title, size=13))
        for column, value in enumerate(values):
            fill = "#e6f4ea" if value == same else "#fff4ea"
            parts.append(box(15 + column * 104, y + 24, 98, 30, fill, stroke=SOFT))
            parts.append(text(64 + column * 104, y + 43, value, anchor="middle", size=12))
    parts.append(text(15, 212, "A repeated run on one backend has the same bits throughout.", size=13))
    return picture(WIDTH, 226, "Where bits can differ", *parts)


PICTURES = {"two-passes.svg": two_passes, "traffic.svg": traffic, "bits.svg": bits}

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "pictures"
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
