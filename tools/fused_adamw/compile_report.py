"""Puts what ``aot_nvrtc.py --json`` and ``aot_triton.py --json`` wrote into one file, which docs/generate.py shows.

    python tools/fused_adamw/compile_report.py FOLDER [--output benchmarks/results/gpu-compiled.json]

FOLDER holds one file per compiler and architecture, as tools/gpu_matrix.sh leaves them. Everything is compiled and
counted, and nothing was run: no line of the result says that a kernel is right or fast on a device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]
WHAT = "Every device kernel compiled ahead of time by each compiler for each architecture; compiled, not run."
COUNTED = "sm_90"
"""The architecture whose instructions per element are kept."""
STUDY = {"decode, dither and encode of packed16": 46, "update of FP32 moments": 52}
"""Instructions an element that the sketches before these kernels took, counted in the same way."""
FORMS = ("float32", "bfloat16", "packed16")
_GRADIENTS, _STORES = ("float32", "float16", "bfloat16"), ("float32", "float16", "bfloat16", "split")
# Bits of kernels/tables.py's Flag, which imports torch.
_GRAD, _COPY = {0: 0, 1: 1, 2: 2}, {0: 0, 4: 1, 8: 2, 72: 3}
_AMSGRAD, _STRIDED, _FORM, _GENERAL = 16, 128, {0: 0, 512: 1, 1024: 2}, 1 << 20


def described(fact: dict[str, Any]) -> dict[str, Any]:
    """What both tools say of a kernel, in the same words."""
    if "instance" in fact:
        name, arguments = re.fullmatch(r"ruda::(\w+)(?:<(.*)>)?", fact["instance"]).groups()
        toolchain, version = fact["toolchain"].split("(")[0].split(), fact["instance"]
        kind = None
        if name == "update" and not arguments.startswith("-1"):
            gradient, store, amsgrad, form = (int(word) for word in arguments.split(","))
            kind = _kind(gradient, store, amsgrad, form)
        general = name in ("update", "analyze") and arguments.startswith("-1")
        return {"compiler": "NVRTC", "version": toolchain[1], "target": fact["arch"], "kernel": name, "name": version,
                "general": general, "kind": kind, "spill_bytes": fact["spill_bytes"]}  # fmt: skip
    flags = fact["constants"].get("KIND", 0)
    kind = None
    if fact["kernel"] == "update" and not flags & (_GENERAL | _STRIDED):
        kind = _kind(_GRAD[flags & 3], _COPY[flags & 76], int(bool(flags & _AMSGRAD)), _FORM[flags & 1536])
    name = " ".join([fact["kernel"], *(f"{key}={value}" for key, value in fact["constants"].items())])
    return {"compiler": "Triton", "version": fact["triton"], "target": fact["target"], "kernel": fact["kernel"],
            "name": name, "general": bool(flags & _GENERAL), "kind": kind, "spill_bytes": fact["spills"]}  # fmt: skip


def _kind(gradient: int, store: int, amsgrad: int, form: int) -> dict[str, str]:
    return {"gradient": _GRADIENTS[gradient], "parameter": _STORES[store], "amsgrad": bool(amsgrad),
            "moments": FORMS[form]}  # fmt: skip


def summary(facts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One entry per compiler and architecture, and instructions per element of each update for ``COUNTED``."""
    compiled: dict[tuple[str, str, str], dict[str, Any]] = {}
    counts: list[dict[str, Any]] = []
    for fact in facts:
        about = described(fact)
        key = about["compiler"], about["version"], about["target"]
        entry = compiled.setdefault(
            key,
            {"compiler": key[0], "version": key[1], "target": key[2], "kernels": 0, "registers": {}, "stack_bytes": 0,
             "spill_bytes": 0, "problems": {}},
        )  # fmt: skip
        entry["kernels"] += 1
        group = f"general {about['kernel']}" if about["general"] else about["kernel"]
        entry["registers"][group] = max(entry["registers"].get(group, 0), fact["registers"])
        for name, value in (("stack_bytes", fact["stack_bytes"]), ("spill_bytes", about["spill_bytes"])):
            entry[name] = max(entry[name], value)
        if fact["problems"]:
            entry["problems"][about["name"]] = list(fact["problems"])
        count = fact.get("instructions_per_element")
        if about["kind"] and about["target"] == COUNTED and count is not None:
            counts.append({"compiler": key[0], "version": key[1], **about["kind"], "instructions": count})
    return {"what": WHAT, "compiled": list(compiled.values()), "counted on": COUNTED, "study": STUDY,
            "instructions per element": counts}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-compiled.json")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*-*-*.json"))
    if not files:
        print(f"no result in {options.folder}: tools/gpu_matrix.sh makes them", file=sys.stderr)
        return 2
    facts = [fact for path in files for fact in json.loads(path.read_text(encoding="utf-8"))]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = {"environment": {"date": date}, **summary(facts)}
    report["compiled"].sort(key=lambda entry: (entry["compiler"], entry["version"], entry["target"]))
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = sum(len(entry["problems"]) for entry in report["compiled"])
    print(f"{options.output}: {len(facts)} kernels in {len(files)} files, {failed} with problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
