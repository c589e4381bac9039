"""NVIDIA machine code as nvdisasm prints it: how many instructions the loop over whole vectors takes.

Counted in text, not measured: a count says which of two kernels does more, not how long either takes.
"""

from __future__ import annotations

import heapq
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

_SECTION = re.compile(r"^\.text\.(\S+):$", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?\S+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_TARGET = re.compile(r"\.L_x_\w+")
_WIDE_STORE = re.compile(r"STG\.E(?:\.\w+)*\.(?:64|128)\b")
_LOCAL = re.compile(r"(?:LDL|STL)\b")


class Loop(NamedTuple):
    """The loop of a kernel that stores whole vectors."""

    instructions: int
    """Once around, on the shortest way."""
    local: int
    """Accesses to the stack: registers that were spilled where it costs."""


def disassembler() -> str | None:
    """An nvdisasm: on the path, in the CUDA toolkit, or the one that Triton brings."""
    places = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    candidates = [shutil.which("nvdisasm"), *(f"{place}/bin/nvdisasm" for place in places)]
    candidates += [f"{entry}/triton/backends/nvidia/bin/nvdisasm" for entry in sys.path]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def disassemble(code: bytes) -> str | None:
    """The machine code as text, or ``None`` if there is no nvdisasm or it does not know the architecture."""
    program = disassembler()
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        result = subprocess.run([program, "-c", str(path)], capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else None


def wide_loop(text: str) -> Loop | None:
    """The loop that stores whole vectors, in the kernel that comes first in ``text``; ``None`` without such a loop.

    The shortest way around leaves out what is called for unusual numbers, such as the exact division of a subnormal.
    """
    code, labels = _read(text)
    found: list[tuple[int, Loop]] = []  # wide stores, and the loop
    for end, (name, operands, _) in enumerate(code):
        target = _TARGET.search(operands) if name.startswith("BRA") else None
        begin = labels.get(target[0], end + 1) if target else end + 1
        if begin <= end:  # a branch backwards
            names = [other for other, _, _ in code[begin : end + 1]]
            stores, local = (sum(kind.match(other) is not None for other in names) for kind in (_WIDE_STORE, _LOCAL))
            around = _shortest(code, labels, begin, end)
            if stores and around is not None:
                found.append((-stores, Loop(around, local)))
    # Several ways back, or a loop inside another: the one that stores most in the fewest instructions.
    return min(found)[1] if found else None


def _read(text: str) -> tuple[list[tuple[str, str, bool]], dict[str, int]]:
    """(name, operands, whether conditional) of each instruction of the first kernel, and where each label stands."""
    sections = [*_SECTION.finditer(text)]
    begin = sections[0].end() if sections else 0
    end = sections[1].start() if len(sections) > 1 else len(text)
    code: list[tuple[str, str, bool]] = []
    labels: dict[str, int] = {}
    for line in text[begin:end].splitlines():
        label, instruction = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append((instruction[2], instruction[3], instruction[1] is not None))
    return code, labels


def _shortest(code: list[tuple[str, str, bool]], labels: dict[str, int], begin: int, end: int) -> int | None:
    """The fewest instructions from ``begin`` to ``end``, both counted, without leaving what lies between them."""
    best = {begin: 1}
    waiting = [(1, begin)]
    while waiting:
        count, at = heapq.heappop(waiting)
        if at == end:
            return count
        if count > best[at]:
            continue
        name, operands, conditional = code[at]
        following = [at + 1]
        if name.startswith("BRA"):
            # A predicate among the operands makes a branch conditional too: BRA.U !UP0, `(.L_x_1)
            target = _TARGET.search(operands)
            conditional = conditional or re.search(r"\bU?P\d", operands) is not None
            following = [labels[target[0]]] * (target is not None) + [at + 1] * conditional
        elif name.startswith(("EXIT", "RET")) and not conditional:
            following = []
        for other in following:
            if begin <= other <= end and count + 1 < best.get(other, len(code) + 1):
                best[other] = count + 1
                heapq.heappush(waiting, (count + 1, other))
    return None
