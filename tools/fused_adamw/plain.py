"""What the runner prints with where rich is not installed: text."""

from __future__ import annotations

import re


def escape(text: str) -> str:
    """Nothing is markup here."""
    return text


class Console:
    """Prints."""

    def __init__(self, **_: object) -> None:
        pass

    def print(self, what: object, **_: object) -> None:
        """Without colours."""
        print(what, flush=True)


class Table:
    """Columns of text."""

    def __init__(self, **_: object) -> None:
        self._rows: list[list[str]] = [[]]

    def add_column(self, name: str, **_: object) -> None:
        """Another one."""
        self._rows[0].append(name)

    def add_row(self, *cells: str) -> None:
        """One cell per column; markup such as ``[green]`` is taken off."""
        self._rows.append([re.sub(r"\[/?[a-z ]*\]", "", cell) for cell in cells])

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in self._rows)
        return "\n".join(line.rstrip() for line in lines)
