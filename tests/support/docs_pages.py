"""The pages of the documentation and the fenced blocks in them."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """What stands between two fences.

    Attributes:
        language: the first word after the fence.
        title: of the block, or "".
        body: without the fences' indentation.
        line: number of its first line in the page.
    """

    language: str
    title: str
    body: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        indent = len(match["indent"])
        body = "\n".join(line[indent:] for line in match["body"].splitlines())
        yield Block(language, title[1] if title else "", body, text.count("\n", 0, match.start()) + 2)


def prose(text: str) -> str:
    return FENCE.sub("", text)
