"""Compiles every Triton kernel that the library can ask for, without a GPU, and checks what came out.

    python tools/fused_adamw/aot_triton.py [--target sm_90 --target gfx942 ...] [--json FILE]

For the runner: ``facts()`` compiles and returns one dictionary per kernel, ``problems(fact)`` says what is wrong with
one. Checked: no spills and no stack, register ceilings, exact numbers of 128-bit and 64-bit accesses, no contraction,
no approximate division or root, no flush of subnormals, no access by generic address, no barrier in an update.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fused_adamw.machine_code import disassemble, wide_loop

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")  # of the suite `build`; tools/gpu_matrix.sh compiles for more

# The types of each kernel's arguments, as Triton's launch path derives them: nothing is specialized on a value.
_I64, _F32, _F64, _INT, _FLOAT = "*i64", "*fp32", "*fp64", "i32", "fp32"
_ARGUMENTS = {
    "update": (_I64, _I64, _I64, _F32, _F32, _INT, _INT),
    "analyze": (_I64, _I64, _I64, _F32, _F32, _INT, _INT, _INT, _FLOAT),
    "merge": (_F32, _F32, _INT, _INT),
    "decide": (_I64, _F64, _F64, _F32, _I64, _F32, _F32, _F32, _F32, *(_INT,) * 6, _FLOAT),
}

# Ceilings per thread. 256 threads of 80 registers leave room for three programs on a multiprocessor of 65,536, of 128
# for two: enough 128-bit loads in flight to fill the memory.
_REGISTERS = {"update": 80, "analyze": 128, "merge": 64, "decide": 64}

# One program decides: what a function saves on the stack around an FP64 division costs nothing there. An update may put
# two numbers aside before its loop.
_STACK = {"decide": 16, "update": 8}

_ABSENT = ("spills", "other_vectors", "fused_multiply_add", "approximate", "flush_subnormals")
_ABSENT += ("generic_access",)

# The general update holds every kind's values at once. It walks strided tensors too, and there it calls a 64-bit
# division, which saves registers on the stack. Two programs fit a multiprocessor from 86 to 128 registers. ptxas stops
# at 80 for sm_80, and reads one number from the stack in each round of the loop.
_GENERAL_UPDATE = {"registers": 128, "stack_bytes": 16, "stack_in_loop": 1}


def specializations() -> list[tuple[str, Any]]:
    """(kernel name, specialization) for everything the library can ask for."""
    from ruda_optim.fused_adamw.kernels.triton import launch as ptx_launch

    return [(name, one) for name, many in ptx_launch.every_specialization().items() for one in many]


def compile_one(name: str, specialization: Any, target: str) -> dict[str, Any]:
    """Compiles one kernel and counts what matters in its PTX or AMDGCN text and in its machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ruda_optim.fused_adamw.kernels.triton import launch as ptx_launch
    from ruda_optim.fused_adamw.kernels.triton import update as ptx

    if ptx_launch.interpreted(ptx.FUNCTIONS):
        raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled; unset it")
    nvidia = target.startswith("sm_")
    amd_warp = 32 if target.startswith("gfx1") else 64
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, amd_warp)
    function = getattr(ptx.FUNCTIONS, name)
    constants = dict(specialization.constants)
    types = (*_ARGUMENTS[name], *("constexpr" for _ in constants))
    signature = dict(zip(function.arg_names, types, strict=True))
    source = ASTSource(function, signature, constants, {})
    compiled = triton.compile(source, target=gpu, options=specialization.options(gpu.warp_size))
    fact = {"kernel": name, "target": target, "constants": constants, "triton": triton.__version__}
    fact["shared_bytes"] = compiled.metadata.shared
    fact.update(_nvidia_facts(compiled.asm) if nvidia else _amd_facts(compiled.asm))
    return fact


def _nvidia_facts(asm: dict[str, Any]) -> dict[str, Any]:
    text = asm["ptx"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    facts = {
        "loads_128": count(r"\bld\.global[\w.:]*\.v4\.b32"),
        "stores_128": count(r"\bst\.global[\w.:]*\.v4\.b32"),
        "loads_64": count(r"\bld\.global[\w.:]*\.v2\.b32"),
        "stores_64": count(r"\bst\.global[\w.:]*\.v2\.b32"),
        "other_vectors": count(r"\b(?:ld|st)\.global[\w.:]*\.v(?:8\.|[24]\.b(?!32))"),
        "fused_multiply_add": count(r"\b(?:fma|mad)\.\w+\.f\d\d"),
        "approximate": count(r"\b(?:div\.full|div\.approx|sqrt\.approx|rcp\.approx|rsqrt\.approx)"),
        "flush_subnormals": count(r"\.ftz\b"),
        "generic_access": count(r"\b(?:ld|st)\.(?!global|shared|param|const|local)"),
        "barriers": count(r"\bbar\.sync"),
    }
    machine_code = disassemble(asm["cubin"])
    loop = None if machine_code is None else wide_loop(machine_code)
    facts["instructions_per_element"] = None if loop is None else loop.instructions / 4  # a thread takes four at a time
    facts["stack_in_loop"] = 0 if loop is None else loop.local
    return facts | _resource_usage(asm["cubin"])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed)}
    # ptxas puts what it spills on the stack.
    return {"registers": numbers["REG"], "stack_bytes": numbers["STACK"] + numbers["LOCAL"], "spills": numbers["LOCAL"]}


def _amd_facts(asm: dict[str, Any]) -> dict[str, int]:
    text, llvm = asm["amdgcn"], asm["llir"]
    contraction = r"\bcontract\b|\bfast\b|llvm\.fmuladd"
    if "amdgcn.rsq" not in llvm:  # Triton 3.6 writes a root out, as rsq refined by fma: docs/gpu-compilers.md
        contraction += r"|llvm\.fma"

    def count(pattern: str, where: str = text) -> int:
        return len(re.findall(pattern, where))

    def field(name: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{name}:\s*(\d+)", text))

    return {
        "loads_128": count(r"\bglobal_load_dwordx4\b"),
        "stores_128": count(r"\bglobal_store_dwordx4\b"),
        "loads_64": count(r"\bglobal_load_dwordx2\b"),
        "stores_64": count(r"\bglobal_store_dwordx2\b"),
        "other_vectors": 0,
        # The machine's division and root are correctly rounded sequences of v_fma; contraction shows in the LLVM text.
        "fused_multiply_add": count(contraction, llvm),
        "approximate": count(r"!fpmath|\barcp\b|\bafn\b|amdgcn\.(?:rcp|sqrt)", llvm),
        "flush_subnormals": count(r"denormal-fp-math[\w-]*\"=\"(?!ieee)", llvm),
        "generic_access": count(r"\bflat_(?:load|store)"),
        "stack_in_loop": 0,  # not looked for: a stack at all is private memory
        "barriers": count(r"\bs_barrier\b"),
        "registers": field("vgpr_count"),
        "stack_bytes": field("private_segment_fixed_size"),
        # Scalar registers are put into vector registers, not into memory: no spill in that sense.
        "spills": field("vgpr_spill_count"),
    }


def expected_accesses(kernel: str, constants: dict[str, int]) -> dict[str, int] | None:
    """Vector accesses that a kernel must have, exactly; ``None`` where elements are not what it moves."""
    from ruda_optim.fused_adamw.kernels.tables import Flag
    from ruda_optim.fused_adamw.kernels.triton.launch import GENERAL_KIND

    if kernel not in ("update", "analyze"):
        return None
    narrow = bool(constants["KIND"] & (Flag.MOMENTS_BF16 | Flag.MOMENTS_PACKED))
    moments = 1 if constants["KIND"] & Flag.MOMENTS_PACKED else 2
    if constants["KIND"] & GENERAL_KIND:
        # One access per type that a gradient or a copy may have; the flags leave one of them.
        if kernel == "analyze":
            return {"loads_128": 2 + 1 + 1, "stores_128": 0}
        if narrow:
            return {"loads_128": 2, "stores_128": 1, "stores_64": 3 + moments + 1}
        return {"loads_128": 5, "stores_128": 4, "stores_64": 3}
    kind = Flag(constants["KIND"])
    half_gradient = bool(kind & (Flag.GRAD_FP16 | Flag.GRAD_BF16))
    if kind & Flag.STRIDED:
        return {"loads_128": 0, "stores_128": 0}
    if kernel == "analyze":
        # 32 elements a thread.
        return {"loads_128": 4 if half_gradient else 8, "stores_128": 0, "loads_64": 0, "stores_64": 0}
    # Four elements a thread: 128 bits of FP32, 64 bits of a half type.
    split, copy = bool(kind & Flag.SPLIT), bool(kind & (Flag.COPY_FP16 | Flag.COPY_BF16))
    state = moments + bool(kind & Flag.AMSGRAD)
    wide = (not split) + (0 if narrow else state)
    words = copy + split + (state if narrow else 0)
    return {
        "loads_128": wide + (not half_gradient),
        "stores_128": wide,
        "loads_64": half_gradient + words,
        "stores_64": words,
    }


def problems(fact: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel; empty if nothing is."""
    from ruda_optim.fused_adamw.kernels.triton.launch import GENERAL_KIND

    wrong = [f"{name} is {fact[name]}, must be 0" for name in _ABSENT if fact[name] != 0]
    ceilings = {
        "registers": _REGISTERS[fact["kernel"]],
        "stack_bytes": _STACK.get(fact["kernel"], 0),
        "stack_in_loop": 0,
    }
    if fact["kernel"] == "update" and fact["constants"]["KIND"] & GENERAL_KIND:
        ceilings = _GENERAL_UPDATE
    wrong += [f"{name} is {fact[name]}, at most {most}" for name, most in ceilings.items() if fact[name] > most]
    if fact["kernel"] == "update" and (fact["barriers"] or fact["shared_bytes"]):
        wrong.append(f"an update with {fact['barriers']} barriers and {fact['shared_bytes']} bytes of shared memory")
    for name, number in (expected_accesses(fact["kernel"], fact["constants"]) or {}).items():
        if fact[name] != number:
            wrong.append(f"{name} is {fact[name]}, must be {number}")
    return wrong


def facts(targets: tuple[str, ...] = TARGETS) -> list[dict[str, Any]]:
    """One dictionary per specialization and target; set ``TRITON_CACHE_DIR`` to an empty folder to compile afresh."""
    return [compile_one(name, one, target) for target in targets for name, one in specializations()]


def main() -> int:
    """Compiles, prints one line per kernel, and returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", help=f"an architecture; default: {', '.join(TARGETS)}")
    parser.add_argument("--json", type=Path, help="write the facts to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        collected = facts(tuple(arguments.target or TARGETS))
    failed = 0
    for fact in collected:
        wrong = problems(fact)
        failed += bool(wrong)
        constants = " ".join(f"{key}={value}" for key, value in fact["constants"].items())
        print(
            f"{'FAIL' if wrong else 'ok':4} {fact['target']:7} {fact['kernel']:8} registers {fact['registers']:3} "
            f"128-bit {fact['loads_128']}/{fact['stores_128']} 64-bit {fact['loads_64']}/{fact['stores_64']} "
            f"instructions an element {fact.get('instructions_per_element') or '-'} {constants}"
        )
        for line in wrong:
            print(f"     {line}")
    print(f"{len(collected)} kernels, {failed} with problems")
    if arguments.json:
        arguments.json.write_text(
            json.dumps([fact | {"problems": problems(fact)} for fact in collected], indent=1) + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
