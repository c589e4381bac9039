"""The outside judge of the formula: what PyTorch's own AdamW computes on a CPU, written down once and checked.

    python tools/fused_adamw/oracle.py --write-fixtures    # run torch, write pytorch_fixtures.json
    python tools/fused_adamw/oracle.py --check             # run torch again; torch, file and FP64 reference must agree

The file holds 12 cases (3 gradient dtypes x AMSGrad x maximize, a third of them with loss scale 128), 5 steps each:
FP32 parameters, gradients as they are stored (scaled, rounded to the gradient dtype) and all results. torch gets the
gradients unscaled, in FP32. Arrays are strings of hexadecimal floats, so no digit is lost. No kernel of this project
runs here; :func:`targets` is what the tests of kernels compare with. :func:`load` needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from cases import FIXTURE_CASES, Case, Expected, check, expected, initial_parameter, stored_gradient  # noqa: E402

FIXTURES = Path(__file__).with_name("pytorch_fixtures.json")
FORMAT = 2
REGENERATE = "regenerate it: python tools/fused_adamw/oracle.py --write-fixtures"


class FixtureError(RuntimeError):
    """The fixture file is missing, of another format, made by another torch, or holds other cases than the table."""


def pack(values: Any) -> str:
    """An array as hexadecimal floats, in C order."""
    return " ".join(float(x).hex() for x in np.asarray(values, dtype=np.float64).reshape(-1))


def unpack(text: str) -> np.ndarray:
    """The inverse of :func:`pack`, as one-dimensional FP64; every FP32 value comes back exactly."""
    return np.array([float.fromhex(word) for word in text.split()])


def head(case: Case) -> dict[str, Any]:
    """What tells one case from another, as plain numbers."""
    options = case.options
    return {
        "name": case.name,
        "gradient_dtype": case.gradient_dtype,
        "gradient_scale": case.gradient_scale,
        "learning_rate": options.learning_rate,
        "beta1": options.beta1,
        "beta2": options.beta2,
        "epsilon": options.epsilon,
        "weight_decay": options.weight_decay,
        "amsgrad": options.amsgrad,
        "maximize": options.maximize,
    }


def run_torch(case: Case) -> list[dict[str, np.ndarray]]:
    """All steps of ``case`` by ``torch.optim.AdamW``, single-tensor form, FP32 on the CPU."""
    import torch

    options = case.options
    parameter = torch.nn.Parameter(torch.from_numpy(initial_parameter(case).copy()))
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        amsgrad=options.amsgrad,
        maximize=options.maximize,
        foreach=False,
        fused=False,
    )
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options.amsgrad
    steps = []
    for step in range(1, case.steps + 1):
        # A scale of 128 is a power of two, so this division is exact.
        parameter.grad = torch.from_numpy(stored_gradient(case, step).copy()) / case.gradient_scale
        optimizer.step()
        state = optimizer.state[parameter]
        values = {"parameter": parameter.detach(), **{name: state[name] for name in names}}
        steps.append({name: value.numpy().copy() for name, value in values.items()})
    return steps


def record(case: Case) -> dict[str, Any]:
    """One case of the file: its head, inputs and torch's results."""
    return {
        **head(case),
        "initial_parameter": pack(initial_parameter(case)),
        "gradients": [pack(stored_gradient(case, step)) for step in range(1, case.steps + 1)],
        "results": [{name: pack(value) for name, value in step.items()} for step in run_torch(case)],
    }


def load(path: Path = FIXTURES, *, torch_version: str | None = None) -> list[dict[str, Any]]:
    """The cases of a fixture file, in the order of ``FIXTURE_CASES``; arrays still packed.

    Args:
        path: the file.
        torch_version: if given, the release (such as ``"2.13.0"``) the file must have been made with.

    Raises:
        FixtureError: with the command that puts it right.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FixtureError(f"{path.name} is missing; {REGENERATE}") from None
    except json.JSONDecodeError as error:
        raise FixtureError(f"{path.name} is not JSON ({error}); {REGENERATE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise FixtureError(f"{path.name} must have format {FORMAT}, got {found!r}; {REGENERATE}")
    if torch_version is not None and content.get("torch") != torch_version:
        raise FixtureError(
            f"{path.name} was made with torch {content.get('torch')!r}, this is torch {torch_version!r}; "
            f"install that version, or {REGENERATE}"
        )
    stored: list[dict[str, Any]] = content["cases"]
    heads = [{key: entry.get(key) for key in head(FIXTURE_CASES[0])} for entry in stored]
    if heads != [head(case) for case in FIXTURE_CASES]:
        raise FixtureError(f"{path.name} does not hold the cases of tests/support/cases.py; {REGENERATE}")
    return stored


def check_against_reference(case: Case, entry: dict[str, Any]) -> None:
    """Raise AssertionError unless the stored inputs are the table's and every stored result lies within its bound."""
    assert entry["initial_parameter"] == pack(initial_parameter(case)), f"{case}: other initial parameter; {REGENERATE}"
    for step, text in enumerate(entry["gradients"], start=1):
        assert text == pack(stored_gradient(case, step)), f"{case}, step {step}: other gradient; {REGENERATE}"
    for want, results in zip(expected(case, literal=True), entry["results"], strict=True):
        check(case, want, {name: unpack(text) for name, text in results.items()})


def targets(case: Case, entry: dict[str, Any]) -> list[Expected]:
    """Torch's result after each step, and how far a kernel of ours may be from it.

    Both are FP32: ours lies within its bound of the FP64 value and torch's, in the textbook form, within that form's
    bound. The two are therefore at most the sum of the bounds apart.
    """
    return [
        ours._replace(
            values={name: unpack(text) for name, text in results.items()},
            bounds={name: ours.bounds[name] + torchs.bounds[name] for name in results},
        )
        for ours, torchs, results in zip(expected(case), expected(case, literal=True), entry["results"], strict=True)
    ]


def release() -> str:
    """The running torch's release number, without its build tag."""
    import torch

    return torch.__version__.partition("+")[0]


def write(path: Path) -> None:
    content = {"format": FORMAT, "torch": release(), "cases": [record(case) for case in FIXTURE_CASES]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {len(FIXTURE_CASES)} cases to {path.name}")


def check_file(path: Path) -> None:
    """File and a fresh run of torch both agree with the FP64 reference. Their bits may differ between processors."""
    equal = total = 0
    for case, entry in zip(FIXTURE_CASES, load(path, torch_version=release()), strict=True):
        check_against_reference(case, entry)
        fresh = record(case)
        check_against_reference(case, fresh)
        for stored_step, fresh_step in zip(entry["results"], fresh["results"], strict=True):
            for name in stored_step:
                pairs = list(zip(stored_step[name].split(), fresh_step[name].split(), strict=True))
                equal += sum(a == b for a, b in pairs)
                total += len(pairs)
    print(f"{len(FIXTURE_CASES)} cases agree with the FP64 reference; {equal} of {total} values repeat torch's bits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write-fixtures", action="store_true", help="run torch and write the file")
    action.add_argument("--check", action="store_true", help="run torch and compare with the file and the reference")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="the file (default: beside this script)")
    arguments = parser.parse_args()
    try:
        write(arguments.fixtures) if arguments.write_fixtures else check_file(arguments.fixtures)
    except (FixtureError, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
