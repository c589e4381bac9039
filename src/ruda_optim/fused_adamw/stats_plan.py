"""How many statistics rows are merged where: integers only, no tensors, no torch.

The first pass over the gradients writes one row of three FP32 per chunk. A merge turns up to ``FAN_IN`` neighbouring
rows into one; merges repeat until at most ``FAN_IN`` rows are left, and a final merge turns those into the report. The
plan depends on the number of rows alone, so the order of every sum is fixed and a run repeats bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidOption

FAN_IN = 1024
"""Rows merged into one."""
MAX_ROWS = 4 * FAN_IN * FAN_IN
"""4,194,304: the most rows a plan takes. Two stages bring them down to four."""
ROW_ELEMENTS = 3
"""FP32 numbers per row: scale, sum of (g / scale)^2, bad."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One merge launch."""

    input_rows: int
    output_rows: int
    """ceil(input_rows / FAN_IN)"""
    output_offset: int
    """Where the output rows start in the scratch memory, in FP32 elements."""


@dataclass(frozen=True, slots=True)
class StatsPlan:
    """The merges between the first rows and the final report. Build it with :meth:`new`."""

    rows: int
    """Rows of the first pass."""
    stages: tuple[Stage, ...]
    """In order. The first reads the first rows, each later one the output of the one before; none for <= 1024 rows."""
    scratch_elements: int
    """FP32 elements of scratch for all stages, without the first rows and the report; at most 12,300."""
    final_rows: int
    """Rows that the final merge reads: 1 to 1024."""

    @classmethod
    def new(cls, rows: int) -> StatsPlan:
        """The plan for ``rows`` first rows.

        Raises:
            InvalidOption: ``rows`` is not an int in [1, 4194304].
        """
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS:
            raise InvalidOption(
                f"rows must be an int in [1, {MAX_ROWS}], got {rows!r}; use larger chunks for fewer rows"
            )
        stages = []
        scratch, remaining = 0, rows
        while remaining > FAN_IN:
            merged = -(-remaining // FAN_IN)
            stages.append(Stage(input_rows=remaining, output_rows=merged, output_offset=scratch))
            scratch += merged * ROW_ELEMENTS
            remaining = merged
        return cls(rows=rows, stages=tuple(stages), scratch_elements=scratch, final_rows=remaining)

    @property
    def scratch_bytes(self) -> int:
        """``scratch_elements`` in bytes; at most 49,200."""
        return 4 * self.scratch_elements
