"""Compiles every kernel instance of ``csrc/cuda.cu`` that the library can ask for, and reads what came out.

Needs NVRTC, no driver and no GPU. Registers, stack and spills come from the assembler's report; the kind of each
arithmetic operation and of each memory access from PTX; the width of the accesses in the machine code from nvdisasm,
where there is one, else from PTX. Nothing is executed, so nothing here says that a kernel is right or fast.

    python tools/fused_adamw/aot_nvrtc.py [--arch sm_90] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from typing import TYPE_CHECKING

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fused_adamw import machine_code
from ruda_optim.fused_adamw.kernels.nvrtc import compiler as nvrtc_compiler
from ruda_optim.fused_adamw.kernels.nvrtc import launch as nvrtc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")  # of the suite `build`; tools/gpu_matrix.sh compiles for more
# Per thread. A multiprocessor has 65,536 registers: four blocks of 256 threads at 64, three at 80, two at 128. The
# general kernels may have 128: three blocks of them spill on sm_100, and a large table seldom takes them.
REGISTERS = {"update<-1": 128, "update": 64, "analyze<-1": 128, "analyze": 80, "merge": 64, "decide": 64}

# In PTX. An fma that nobody wrote is a contraction; the power function of `decide` is made of FP64 ones.
_FMA_FP32 = re.compile(r"\bfma\.rn(?:\.ftz)?\.(?:f32|f16|bf16)")
_APPROXIMATE = re.compile(r"\b(?:div\.(?:full|approx)|(?:rcp|rsqrt|sqrt)\.approx(?:\.ftz)?\.f32|\w+\.ftz\.f32)\S*")
_GENERIC = re.compile(
    r"^\s*(?:@!?%\w+\s+)?(?:ld|st)\.(?:volatile\.)?(?!volatile|global|param|shared|const|local)\S*", re.MULTILINE
)
_WIDE_PTX = {
    kind: rf"\b{operation}\.global(?:\.\w+)*\.(?:v4\.[fbu]32|v2\.[fbu]64)\b"
    for kind, operation in (("loads", "ld"), ("stores", "st"))
}
# In machine code. LD and ST without a letter after them go by a generic address.
_WIDE_SASS = {"loads": r"\bLDG\.E\.128\b", "stores": r"\bSTG\.E\.128\b"}
_GENERIC_SASS = re.compile(r"\s(?:LD|ST)(?:\.[A-Z0-9_.]+)?\s")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the compiler made of one instance."""

    instance: str
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    loads_128: int
    stores_128: int
    widths_from: str
    """``sass`` or ``ptx``."""
    instructions_per_element: float | None
    """Of an update, once around the loop over aligned memory; ``None`` without nvdisasm. Counted, not timed."""
    problems: tuple[str, ...]
    """What is not as it should be; empty if the instance passed."""


def missing() -> str | None:
    """Why nothing can be compiled here, or ``None``."""
    return nvrtc_compiler.missing_toolchain()


def expected_accesses(instance: str) -> tuple[int, int]:
    """How many 128-bit loads and stores the instance must have: each array once, in the loop over aligned memory."""
    name, arguments = re.fullmatch(r"ruda::(\w+)(?:<(.*)>)?", instance).groups()
    if name == "update":
        gradient, store, amsgrad, moments = (int(argument) for argument in arguments.split(","))
        words = 2 - (moments == 2) + (amsgrad != 0)  # moments and the maximum
        if elements_at_a_time(instance) == 8:
            return words + 3, words + 2
        fp32 = (store != 3) + (0 if moments else words)  # the parameter unless it is split
        return fp32 + (gradient in (-1, 0)), fp32
    if (
        name == "analyze"
    ):  # 32 elements per thread: 8 loads of four FP32 or 4 of eight 16-bit numbers; both if undecided
        return {0: 8, 1: 4, 2: 4, -1: 12}[int(arguments)], 0
    return 0, 0


def elements_at_a_time(instance: str) -> int | None:
    """How many elements a thread of an update takes in one access; ``None`` for another kernel."""
    found = re.fullmatch(r"ruda::update<(.*)>", instance)
    if found is None:
        return None
    gradient, store, amsgrad, moments = (int(argument) for argument in found[1].split(","))
    return 8 if moments and gradient > 0 and store == 3 and not amsgrad else 4  # eight: all memory is 16 bits wide


def check(instance: str, arch: str) -> Facts:
    """Compiles one instance and examines it."""
    compiled, log = nvrtc_compiler.compile_instance(instance, arch, ("--ptxas-options=-v",))
    ptx = nvrtc_compiler.compile_instance(instance, arch, form="ptx")[0].code.decode()
    # The kernel's own lines come first; a function that it calls, like the power, follows with lines of its own.
    registers = _number(r"Used (\d+) registers", log)
    stack, *spills = (max(map(int, re.findall(rf"(\d+) bytes {what}", log))) for what in
                      ("stack frame", "spill stores", "spill loads"))  # fmt: skip
    disassembled = machine_code.disassemble(compiled.code)
    text, patterns = (ptx, _WIDE_PTX) if disassembled is None else (disassembled, _WIDE_SASS)
    loads, stores = (len(re.findall(patterns[kind], text)) for kind in ("loads", "stores"))

    elements = elements_at_a_time(instance)
    loop = None if disassembled is None or elements is None else machine_code.wide_loop(disassembled)

    problems = []
    ceiling = next(most for kind, most in REGISTERS.items() if instance.startswith(f"ruda::{kind}"))
    if registers > ceiling:
        problems.append(f"{registers} registers, at most {ceiling}")
    if stack or any(spills):
        problems.append(f"{stack} bytes of stack, {sum(spills)} bytes spilled; both must be 0")
    if (loads, stores) != expected_accesses(instance):
        wanted = "{} loads and {} stores".format(*expected_accesses(instance))
        problems.append(f"{loads} loads and {stores} stores of 128 bits; must be {wanted}")
    for what, pattern, searched in (
        ("contraction", _FMA_FP32, ptx),
        ("approximate arithmetic", _APPROXIMATE, ptx),
        ("generic address", _GENERIC, ptx),
        ("generic address in machine code", _GENERIC_SASS, disassembled or ""),
    ):
        found = sorted({match.strip() for match in pattern.findall(searched)})
        if found:
            problems.append(f"{what}: {', '.join(found)}")
    return Facts(instance, arch, registers, stack, sum(spills), loads, stores,
                 "ptx" if disassembled is None else "sass",
                 loop and loop.instructions / elements, tuple(problems))  # fmt: skip


def check_all(architectures: Sequence[str] = ARCHITECTURES, instances: Sequence[str] | None = None) -> Iterator[Facts]:
    """:func:`check` for every instance (default: all that the library can ask for) and architecture."""
    for arch in architectures:
        for instance in nvrtc.instances() if instances is None else instances:
            yield check(instance, arch)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no line like {pattern!r}:\n{text}")
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", action="append", help=f"default: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--json", type=pathlib.Path, help="write the facts to this file")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    facts = list(check_all(options.arch or ARCHITECTURES))
    if options.json:
        toolchain = nvrtc_compiler.toolchain()
        rows = [dataclasses.asdict(fact) | {"toolchain": toolchain} for fact in facts]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for fact in facts:
        state = "; ".join(fact.problems) or "ok"
        count = fact.instructions_per_element or "-"
        print(f"{fact.arch:7} {fact.instance:30} {fact.registers:3} registers, 128-bit loads {fact.loads_128:2}, "
              f"stores {fact.stores_128} ({fact.widths_from}), instructions an element {count}: {state}")  # fmt: skip
    print(f"{len(facts)} kernels, {sum(bool(fact.problems) for fact in facts)} with problems")
    return 1 if any(fact.problems for fact in facts) else 0


if __name__ == "__main__":
    sys.exit(main())
