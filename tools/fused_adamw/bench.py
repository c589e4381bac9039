"""The suite ``bench``: our step, in place and out of place, against the staged baseline and torch's fused AdamW.

    python tools/fused_adamw/bench.py --device cpu --elements 1048576 --output FILE

The protocol is that of benchmarks/protocol.py: both sides warmed, identical state, alternating order, synchronized and
compared after every step. On an accelerator also: update bandwidth as a share of the device's copy bandwidth, and the
host's time per step. The output has the form that benchmarks/run.py writes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import environment
import protocol
import ruda_torch
from comparison import compare
from contestants import HYPERPARAMETERS, PEERS, Contestant
from fused_adamw.execute import DTYPE_NAMES, portable
from fused_adamw.probe import smi
from ruda_optim.fused_adamw import storage
from shared_data import Data
from staged import StagedAdamW
from workloads import MAX_NORM, VARIANTS, WORKLOADS, Variant, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PEER = "torch-fused"
GPT2_STEPS = 3  # at most, per sample: comparing 124 million elements takes far longer than a step
GIB_OF_PARAMETERS = Workload("1gib", "one tensor of 1 GiB", ((2**28,),), streams=True)
SMALL = Workload("148x16", "148 tensors of 16", ((16,),) * 148)
TIMED_STEPS = 10
HOST_STEPS = 50
HARDWARE = ("cpu", "nvrtc", "ptx")
GOALS = {
    "update bandwidth / copy bandwidth": 0.92,
    "torch fused with clip_grad_norm_ / ours, GPT-2 124M": 1.4,
    "torch fused / ours, host time per step": 1.0,
}


def backend_of(device: torch.device, compiler: str | None) -> str:
    """The name of the backend that will be measured.

    Raises:
        RuntimeError: a simulator or an interpreter would run, or another compiler than was asked for.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET is set: an interpreter's times are no benchmark; unset it")
    name = storage.select(device).name
    if name not in HARDWARE or name != (compiler or name):
        raise RuntimeError(
            f"the backend is {name!r}; a benchmark needs {compiler or ' or '.join(HARDWARE)} on hardware"
        )
    return name


@contextlib.contextmanager
def cuda_compiler(name: str | None) -> Iterator[None]:
    """Choose the compiler of our CUDA kernels for a while; None leaves the choice as it is."""
    variable = "RUDA_CUDA_COMPILER"
    before = os.environ.get(variable)
    if name is not None:
        os.environ[variable] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


def variants_of(dtype: str, *, amsgrad: bool) -> list[Variant]:
    """Without and with clipping. ``bf16``: BF16 parameters with FP32 masters; torch's fused step has no mixed form."""
    found = [VARIANTS[name] for name in (("bf16", "bf16-clip") if dtype == "bf16" else ("plain", "clip"))]
    if not amsgrad:
        return found
    return [
        dataclasses.replace(variant, name=f"{variant.name}-amsgrad", title=f"{variant.title}, AMSGrad", amsgrad=True)
        for variant in found
    ]


def functional_variants(dtype: str, *, amsgrad: bool) -> tuple[Variant, Variant]:
    """FP32 parameters with a gradient of any dtype: the plain update, and the guarded one with clipping."""
    suffix = f"{dtype} gradient{', AMSGrad' * amsgrad}"
    return (
        Variant("update", f"plain update, {suffix}", amsgrad=amsgrad),
        Variant("guarded", f"clip to norm 1, {suffix}", amsgrad=amsgrad, max_norm=MAX_NORM, check_finite=True),
    )


def comparisons(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All pairs of this run, in the form of benchmarks/run.py."""
    tensor = Workload("bench", f"one tensor of {arguments.elements}", ((arguments.elements,),),
                      streams=arguments.elements >= 2**24)  # fmt: skip
    plan = [(tensor, arguments.iterations)]
    if device.type != "cpu":
        plan.append((WORKLOADS["gpt2-124m"], min(arguments.iterations, GPT2_STEPS)))
    dtype = getattr(torch, DTYPES[arguments.dtype])
    settings = protocol.Settings(rounds=arguments.samples, steps=arguments.iterations, max_foreign_load=None)
    entries = []
    functional = functional_variants(arguments.dtype, amsgrad=arguments.amsgrad)
    for variant in functional:
        for ours, peer in (("ours", "staged"), ("functional", "staged"), ("ours", "functional")):
            if peer == "staged" and variant.max_norm is not None and dtype is not torch.float32:
                continue  # clip_grad_norm_ of half gradients rounds the norm to their dtype: another result
            entries.append(compare(tensor, variant, peer, device, settings, ours=ours, gradient_dtype=dtype))
    variants = variants_of(arguments.dtype, amsgrad=arguments.amsgrad)
    for workload, steps in plan:
        for variant in variants:
            if arguments.dtype == "fp16":
                reason = "torch's fused step takes gradients of the parameter's dtype alone"
                entries.append({"workload": workload.name, "variant": variant.name, "peer": PEER, "status": "not run",
                                "reason": reason})  # fmt: skip
                continue
            entries.append(compare(workload, variant, PEER, device, dataclasses.replace(settings, steps=steps)))
    size = dtype.itemsize
    sizes = {v.name: {"title": v.title, "bytes per element": v.bytes_with(size)} for v in (*functional, *variants)}
    return {
        "workloads": {w.name: {"title": w.title, "elements": w.elements} for w, _ in plan},
        "variants": sizes,
        "peers": {name: PEERS[name].title for name in ("ours", "functional", "staged", PEER)},
        "staged bytes per element": StagedAdamW.bytes_per_element(size, amsgrad=arguments.amsgrad),
        "comparisons": entries,
    }


# ------------------------------------------------------------------------------------------------- accelerators only


def device_ms(call: Callable[[], object], samples: int) -> dict[str, float] | None:
    """Milliseconds of the device per call: events around batches of calls, the host running ahead."""
    for _ in range(3):
        call()
    found = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(TIMED_STEPS):
            call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / TIMED_STEPS)
    return protocol.spread(found)


def bandwidth(device: torch.device, samples: int) -> dict[str, Any]:
    """GB/s of the update of 1 GiB of parameters, and of a copy of 1 GiB; bytes read and written both count."""
    variant = VARIANTS["plain"]
    data = Data(GIB_OF_PARAMETERS, variant, device)
    ours, peer = (Contestant(PEERS[name], data, variant) for name in ("ours", PEER))
    protocol.measure(ours, peer, data, protocol.Settings(rounds=1, steps=2, max_foreign_load=None))  # it is right
    elements = GIB_OF_PARAMETERS.elements
    times = {"update": device_ms(ours.step, samples), "torch fused update": device_ms(peer.step, samples)}
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    times["copy"] = device_ms(lambda: target.copy_(source), samples)
    moved = {"update": 28 * elements, "torch fused update": 28 * elements, "copy": 8 * elements}
    rates = {name: moved[name] / (spread["median"] * 1e6) for name, spread in times.items()}
    return {
        "ms": times,
        "GB/s": rates,
        "update / copy": rates["update"] / rates["copy"],
        "torch fused update / copy": rates["torch fused update"] / rates["copy"],
    }


def host_us(step: Callable[[], object]) -> dict[str, float] | None:
    """Microseconds until ``step`` returns, the device idle before."""
    found = []
    for number in range(HOST_STEPS + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if number >= 5:
            found.append((time.perf_counter() - start) * 1e6)
    return protocol.spread(found)


def capturable_step(data: Data) -> Callable[[], object]:
    """Our step that leaves the decision to the device, with clipping."""
    return ruda_torch.AdamW(
        data.parameters(), **HYPERPARAMETERS, fused_step=True, max_grad_norm=MAX_NORM, capturable=True
    ).step


def host_times(device: torch.device) -> dict[str, Any]:
    """Host time per step in microseconds.

    Our clipped step waits for its 12-byte report, so it is measured over tensors so small that the device's own time is
    next to nothing.
    """
    found: dict[str, Any] = {}
    for workload, names in ((WORKLOADS["gpt2-124m"], ("plain",)), (SMALL, ("plain", "clip"))):
        for name in names:
            data = Data(workload, VARIANTS[name], device)
            data.draw()
            data.restore()
            sides = {side: Contestant(PEERS[side], data, VARIANTS[name]).step for side in ("ours", PEER)}
            if name == "clip":
                sides["ours, capturable"] = capturable_step(data)
            found[f"{workload.name}, {name}"] = {side: host_us(step) for side, step in sides.items()}
    return found


def goals(found: dict[str, Any]) -> dict[str, Any]:
    """What was aimed at and what was measured; nothing here passes or fails a run."""
    values = {"update bandwidth / copy bandwidth": found["bandwidth"]["update / copy"]}
    for entry in found["comparisons"]:
        if (entry["workload"], entry["variant"], entry["status"]) == ("gpt2-124m", "clip", "measured"):
            values["torch fused with clip_grad_norm_ / ours, GPT-2 124M"] = entry["ratio"]["median"]
    times = found["host time us"]["gpt2-124m, plain"]
    values["torch fused / ours, host time per step"] = times[PEER]["median"] / times["ours"]["median"]
    return {name: {"goal": GOALS[name], "measured": value, "met": value >= GOALS[name]}
            for name, value in values.items()}  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """The result for people."""
    told = []
    for entry in found["comparisons"]:
        own, peer = (found["peers"][entry.get(side, side)] for side in ("ours", "peer"))
        title = f"{entry['workload']}, {entry['variant']}, {own} against {peer}"
        if entry["status"] != "measured":
            told.append(f"{title}: {entry['status']}: {entry['reason']}")
            continue
        ours, peer, ratio = (entry[key] for key in ("ours ms", "peer ms", "ratio"))
        told.append(f"{title}: ours {ours['median']:.3f} ms ({ours['min']:.3f} to {ours['max']:.3f}), peer "
                    f"{peer['median']:.3f} ms ({peer['min']:.3f} to {peer['max']:.3f}), peer / ours "
                    f"{ratio['median']:.2f}")  # fmt: skip
    for name, goal in found.get("goals", {}).items():
        told.append(f"goal {goal['goal']} for {name}: {goal['measured']:.3f}{'' if goal['met'] else ' (not met)'}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiler", choices=("nvrtc", "ptx"), help="on cuda; default: the library's choice")
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        type=lambda text: DTYPE_NAMES.get(text, text),
        default="fp32",
        help="of the gradients; f32, f16 are other names",
    )
    parser.add_argument("--iterations", type=int, default=20, help="steps per sample")
    parser.add_argument("--samples", type=int, default=7, help="measured rounds")
    parser.add_argument("--amsgrad", action="store_true")
    parser.add_argument("--output", type=Path, help="write the JSON here; default: print the lines only")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with cuda_compiler(arguments.compiler):
        backend = backend_of(device, arguments.compiler)
        about = environment.describe(device, sys.argv)
        about["command"] = portable(str(about["command"]))
        about["device"] = backend if device.type == "cpu" else f"{device.type}-{backend}"
        found: dict[str, Any] = {
            "format": 1,
            "what": "whole optimizer steps; ratio = peer ms / ours ms, paired per round; above 1 ours is faster",
            "backend": backend,
            "environment": about,
            "settings": {key: value for key, value in vars(arguments).items() if key != "output"},
            **comparisons(arguments, device),
        }
        if device.type != "cpu":
            found["bandwidth"] = bandwidth(device, arguments.samples)
            found["host time us"] = host_times(device)
            found["nvidia-smi after the run"] = smi()
            if arguments.dtype == "fp32" and not arguments.amsgrad:
                found["goals"] = goals(found)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(found)))
    wrong = [entry for entry in found["comparisons"] if entry["status"] in ("mismatch", "failed")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
