"""Does this machine compute rightly? Every kernel against the FP64 reference over a small table.

The table is the package's own and small enough for a bug report; the tests of the repository go much further.

How far a right FP32 result may be from the reference, elementwise, in units of u = 2^-24 (one rounding). Each step is
compared with one FP64 step from the very FP32 numbers that the kernel started from, so errors of earlier steps do not
enter. The inputs are made so that nothing cancels: the gradient of an element keeps its sign, and beta1, beta2 >= 0.5.

- g: reciprocal of the scale, its product, the product with the clip factor: 3.
- m + c1 (g - m): g and m have one sign, so |g - m| is at most the larger of them; c1 |g| <= |m_new|, and c1 |m| <=
  |m_new| because c1 <= beta1. The error of g: 3; difference, coefficient, product: 3; the sum: 1. Together 7.
- v + c2 (gg - v): likewise, with 2 * 3 + 1 = 7 in gg: 7 + 3 + 1 = 11. A running maximum is no worse than its arguments.
- root: coefficient and product of the correction make 13 of v's 11; the root halves that and rounds: 7.5. Epsilon and
  the sum: 1. Denominator: 8.5.
- numerator: m's 7, two coefficients, two products: 11. Quotient q: 11 + 8.5 + 1, at most 21.
- p - (decay p + q): 21 |q|; coefficient, product and sum: 3 decay |p|, and |q| in the sum; the difference: |p_new|.

Products of two errors are below 1e-4 of these numbers, hence the last factor.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .fused_adamw import (
    AdamWOptions,
    AdamWState,
    GradientGuardOptions,
    StepControl,
    adamw_step,
    gradient_stats,
    guarded_adamw_step,
    moment_codes,
    reference,
    storage,
)
from .fused_adamw.options import seed_of_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    Progress = Callable[[int, int, str], None]
    Timing = Callable[[torch.device], list[dict[str, Any]]]

U = 2.0**-24 * (1.0 + 1e-4)
COMPILER_VARIABLE = "RUDA_CUDA_COMPILER"
STEPS = 4
# Odd and small, one block, and enough for several statistics rows and all threads.
SIZES = (7, 1025, 200_003)


@dataclass(frozen=True)
class Check:
    """One situation. ``run`` returns the largest error as a share of what is allowed: right means at most 1."""

    name: str
    run: Callable[[torch.device], float]


def run(timing: Timing | None, progress: Progress) -> dict[str, Any]:
    """Check and time every backend that can run here.

    Args:
        timing: what to time on a device that was found right; None: nothing.
        progress: called as ``(done, total, what)`` before each piece of work.

    Returns:
        Plain values: ``checks``, ``timings``, and ``passed``, which is True if something was checked and all is right.
    """
    places = _places()
    total = len(places) * (len(CHECKS) + (timing is not None))
    checks: list[dict[str, Any]] = []
    timings: list[dict[str, Any]] = []
    done = 0
    for where, device, compiler in places:
        with _compiler(compiler):
            for check in CHECKS:
                progress(done, total, f"{where}: {check.name}")
                checks.append({"where": where, "case": check.name, **_outcome(check, device)})
                done += 1
            # Only what was just found right is worth timing.
            if timing is not None and all(entry["passed"] for entry in checks if entry["where"] == where):
                progress(done, total, f"{where}: timing")
                timings += [{"where": where, **found} for found in timing(device)]
            done += timing is not None
    passed = bool(checks) and all(entry["passed"] for entry in checks)
    return {"checks": checks, "timings": timings, "passed": passed}


def _places() -> list[tuple[str, torch.device, str | None]]:
    """Name, device and compiler of every backend that can run here."""
    places: list[tuple[str, torch.device, str | None]] = []
    for backend in storage.available():
        if not backend.available:
            continue
        if backend.name == "cpu":
            places.append(("cpu", torch.device("cpu"), None))
        else:
            places += [
                (f"cuda:{index} {backend.name}", torch.device("cuda", index), backend.name)
                for index in range(torch.cuda.device_count())
            ]
    return places


@contextmanager
def _compiler(name: str | None) -> Iterator[None]:
    """Choose the compiler of an accelerator through the variable that users set; None leaves it alone."""
    before = os.environ.get(COMPILER_VARIABLE)
    if name is not None:
        os.environ[COMPILER_VARIABLE] = name
    try:
        yield
    finally:
        if name is not None:
            if before is None:
                del os.environ[COMPILER_VARIABLE]
            else:
                os.environ[COMPILER_VARIABLE] = before


def _outcome(check: Check, device: torch.device) -> dict[str, Any]:
    try:
        worst = check.run(device)
    except Exception as error:  # noqa: BLE001  a kernel that cannot be built or launched is a finding, whatever it raises
        return {"passed": False, "worst": None, "error": f"{type(error).__name__}: {error}"}
    return {"passed": worst <= 1.0, "worst": worst, "error": None}


# ---- the table -------------------------------------------------------------------------------------------------------


def _parameter(size: int, device: torch.device) -> Tensor:
    values = np.random.default_rng(size).standard_normal(size)
    return torch.tensor(values, dtype=torch.float32, device=device)


def _gradient(size: int, step: int, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Magnitudes from 1e-3 to 10 that change from step to step, signs that do not, and some zeros."""
    random = np.random.default_rng((size, step))
    values = 10.0 ** random.uniform(-3.0, 1.0, size)
    values[1::3] *= -1.0
    values[::11] = 0.0
    return torch.tensor(values * scale, dtype=torch.float32).to(dtype).to(device)


def _array(tensor: Tensor) -> reference.Array:
    return np.asarray(tensor.double().cpu().numpy())


def _share(actual: Tensor, target: reference.Array, allowed: reference.Array) -> float:
    """Largest |actual - target| / allowed; equality gives 0 where nothing is allowed. NaN is infinitely wrong."""
    error = np.abs(_array(actual) - target)
    share = np.where(error == 0.0, 0.0, error / np.maximum(allowed, 1e-300))
    return float(np.nan_to_num(share, nan=np.inf).max(initial=0.0))


def _compare_step(
    options: AdamWOptions,
    control: StepControl,
    clip_factor: float,
    parameter: Tensor,
    gradient: Tensor,
    before: AdamWState | None,
    parameter_after: Tensor,
    after: AdamWState,
) -> float:
    """One step of the kernel against one step of the reference from the same numbers; bounds as derived above."""
    old = None
    if before is not None:
        maximum = before.max_second_moment
        old = reference.ReferenceState(
            before.step,
            _array(before.first_moment),
            _array(before.second_moment),
            None if maximum is None else _array(maximum),
        )
    p = _array(parameter)
    target, state = reference.adamw(p, _array(gradient), old, options, control, clip_factor)
    if state is None or after.step != state.step:
        return float("inf")
    decay = options.learning_rate * options.weight_decay
    quotient = np.abs(target - p) + decay * np.abs(p)
    shares = [
        _share(after.first_moment, state.first_moment, 7 * U * np.abs(state.first_moment)),
        _share(after.second_moment, state.second_moment, 11 * U * state.second_moment),
        _share(parameter_after, target, U * (22 * quotient + 3 * decay * np.abs(p) + np.abs(target))),
    ]
    if options.amsgrad:
        if after.max_second_moment is None or state.max_second_moment is None:
            return float("inf")
        shares.append(_share(after.max_second_moment, state.max_second_moment, 11 * U * state.max_second_moment))
    return max(shares)


def _update(options: AdamWOptions, dtype: torch.dtype, scale: float = 1.0) -> Callable[[torch.device], float]:
    """:func:`adamw_step`, out of place."""

    def check(device: torch.device) -> float:
        control, worst = StepControl(scale), 0.0
        for size in SIZES:
            parameter, state = _parameter(size, device), None
            for step in range(STEPS):
                gradient = _gradient(size, step, scale, dtype, device)
                result = adamw_step(parameter, gradient, state, options, control)
                if result.state is None or not result.updated:
                    return float("inf")
                share = _compare_step(
                    options, control, 1.0, parameter, gradient, state, result.parameters, result.state
                )
                worst, parameter, state = max(worst, share), result.parameters, result.state
        return worst

    return check


def _guarded(device: torch.device) -> float:
    """:func:`guarded_adamw_step` over all sizes at once; the kernel's own factor goes to the reference."""
    options, control, guard = AdamWOptions(**_STRONG), StepControl(1000.0), GradientGuardOptions(max_norm=1.0)
    parameters: list[Tensor] = [_parameter(size, device) for size in SIZES]
    states: list[AdamWState | None] = [None] * len(SIZES)
    worst = 0.0
    for step in range(STEPS):
        gradients = [_gradient(size, step, 1000.0, torch.bfloat16, device) for size in SIZES]
        result = guarded_adamw_step(list(zip(parameters, gradients, states, strict=True)), options, control, guard)
        for i, update in enumerate(result.updates):
            if update.state is None or not 0.0 < result.decision.clip_factor < 1.0:
                return float("inf")
            share = _compare_step(
                options, control, result.decision.clip_factor, parameters[i], gradients[i], states[i],
                update.parameters, update.state,
            )  # fmt: skip
            worst, parameters[i], states[i] = max(worst, share), update.parameters, update.state
    return worst


def _norm(dtype: torch.dtype) -> Callable[[torch.device], float]:
    """:func:`gradient_stats`.

    A square carries 2 * 3 + 1 roundings (two of unscaling, one of the division by the scale, doubled, and its own). A
    sum of positive numbers in FP32 adds as many roundings as the longest chain of additions, which a backend keeps far
    below the 4,096 allowed here; each of three merges adds 4. The root halves all of it.
    """

    def check(device: torch.device) -> float:
        gradients = [_gradient(size, 1, 1000.0, dtype, device) for size in SIZES]
        got = gradient_stats(gradients, 1000.0)
        wanted = reference.gradient_stats([g.float().cpu().numpy() for g in gradients], 1000.0)
        if not got.all_finite:
            return float("inf")
        return abs(got.total_norm - wanted.total_norm) / (0.5 * (7 + 4096 + 12) * U * wanted.total_norm)

    return check


def _skip(device: torch.device) -> float:
    """One NaN in one tensor: the guard keeps every tensor of the group."""
    parameters = [_parameter(size, device) for size in SIZES]
    gradients = [_gradient(size, 0, 1.0, torch.float16, device) for size in SIZES]
    gradients[-1][-1] = float("nan")
    entries = [(parameter, gradient, None) for parameter, gradient in zip(parameters, gradients, strict=True)]
    result = guarded_adamw_step(entries, AdamWOptions())
    kept = all(update.parameters is p for update, p in zip(result.updates, parameters, strict=True))
    return 0.0 if result.decision.skip_update and kept else float("inf")


def _half_copy(dtype: torch.dtype) -> Callable[[torch.device], float]:
    """In place, with the half copy that the kernel writes: exactly the FP32 master, rounded to nearest even."""

    def check(device: torch.device) -> float:
        master = _parameter(SIZES[-1], device)
        copy = master.to(dtype)
        gradient = _gradient(SIZES[-1], 0, 1.0, dtype, device)
        memory = storage.TensorMemory(
            gradient, master, torch.zeros_like(master), torch.zeros_like(master), copy=copy, first=True
        )
        expected = adamw_step(master.clone(), gradient, None, AdamWOptions()).parameters
        table = storage.LaunchTable([memory], device)
        storage.adamw_scaled(table, storage.coefficient_table([AdamWOptions().prepare_step(0)]))
        right = torch.equal(master, expected) and torch.equal(copy, master.to(dtype))
        return 0.0 if right else float("inf")

    return check


def _words(packed: bool) -> Callable[[torch.device], float]:
    """Moments in 16 bits: the parameter of a step with FP32 moments of the same values, and the codes of those."""

    def check(device: torch.device) -> float:
        gradient = _gradient(SIZES[1], 0, 1.0, torch.float32, device)
        before = adamw_step(_parameter(SIZES[1], device), gradient, None, _PLAIN)
        state = before.state
        if state is None:
            return float("inf")
        first, second = (moment.cpu().numpy() for moment in (state.first_moment, state.second_moment))
        if packed:
            stored = [moment_codes.encode_packed(first, second)]
            pair = moment_codes.decode_packed(stored[0])
        else:
            stored = list(moment_codes.encode_bf16(first, second, moment_codes.NEAREST))
            pair = (moment_codes.decode_bf16(stored[0]), moment_codes.decode_bf16(stored[1]))
        moments = [torch.from_numpy(word.view(np.int16)).view(torch.bfloat16).to(device) for word in stored]
        parameter = before.parameters.clone()
        table = storage.LaunchTable(
            [storage.TensorMemory(gradient, parameter, moments[0], None if packed else moments[1])], device
        )
        storage.adamw_scaled(table, storage.coefficient_table([_PLAIN.prepare_step(1)]))
        exact = AdamWState(1, *(torch.from_numpy(moment).to(device) for moment in pair))
        after = adamw_step(before.parameters, gradient, exact, _PLAIN)
        if after.state is None or not torch.equal(parameter, after.parameters):
            return float("inf")
        dither = moment_codes.dither(before.parameters.cpu().numpy(), gradient.cpu().numpy(), seed_of_step(2))
        new = (after.state.first_moment.cpu().numpy(), after.state.second_moment.cpu().numpy())
        codes = [moment_codes.encode_packed(*new, dither)] if packed else moment_codes.encode_bf16(*new, dither)
        found = [moment.view(torch.int16).cpu().numpy().view(np.uint16) for moment in moments]
        return 0.0 if all(np.array_equal(*both) for both in zip(found, codes, strict=True)) else float("inf")

    return check


# Larger than the defaults, so that every term of the formula moves the result by many units.
_STRONG: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "epsilon": 1e-8}
_PLAIN, _ALL = AdamWOptions(**_STRONG), AdamWOptions(**_STRONG, amsgrad=True, maximize=True)

CHECKS = (
    Check("update, FP32 gradient", _update(_PLAIN, torch.float32)),
    Check("update, FP16 gradient, scale 1024", _update(_PLAIN, torch.float16, 1024.0)),
    Check("update, BF16 gradient, scale 1000", _update(_PLAIN, torch.bfloat16, 1000.0)),
    Check("update, FP32 gradient, AMSGrad, maximize", _update(_ALL, torch.float32)),
    Check("update, BF16 gradient, AMSGrad, maximize, scale 1000", _update(_ALL, torch.bfloat16, 1000.0)),
    Check("update, clipped to norm 1, BF16 gradient, scale 1000", _guarded),
    Check("update in place with FP16 copy", _half_copy(torch.float16)),
    Check("update in place with BF16 copy", _half_copy(torch.bfloat16)),
    Check("moments in BF16", _words(packed=False)),
    Check("packed moments", _words(packed=True)),
    Check("gradient norm, FP32", _norm(torch.float32)),
    Check("gradient norm, BF16", _norm(torch.bfloat16)),
    Check("one NaN skips the whole group", _skip),
)
