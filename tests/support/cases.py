"""The one table of cases for tests, the regression runner and benchmarks; their inputs, expected values and tolerances.

Inputs are NumPy arrays from a seeded generator, so every consumer sees the same numbers; only :func:`to_torch` needs
torch. Expected values come from the FP64 reference. Tolerances are elementwise and derived: :func:`expected` carries a
rounding error bound through the steps, operation by operation, next to the FP64 values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import frexp
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ruda_optim.fused_adamw import reference
from ruda_optim.fused_adamw.gradient_norm import GradientGuardOptions
from ruda_optim.fused_adamw.options import AdamWOptions, StepControl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("contiguous", "misaligned", "every second", "transposed", "channels_last")


@dataclass(frozen=True)
class Case:
    """One situation with a name a human can say. Layouts are those of :func:`to_torch`."""

    name: str
    shape: tuple[int, ...]
    gradient_dtype: str = "float32"
    parameter_dtype: str = "float32"
    options: AdamWOptions = field(default_factory=AdamWOptions)
    steps: int = 5
    layout: str = "contiguous"
    """Of the parameter, and of the moments with it."""
    gradient_layout: str = "contiguous"
    gradient_scale: float = 1.0
    max_norm: float | None = None
    """Clip by the norm of this one gradient; None: no guard."""
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def control(self) -> StepControl:
        return StepControl(self.gradient_scale)

    @property
    def guard(self) -> GradientGuardOptions | None:
        return None if self.max_norm is None else GradientGuardOptions(max_norm=self.max_norm)


# Larger than the defaults, so that every term of the formula moves the result by many ulps.
_STRONG = {"learning_rate": 1e-2, "weight_decay": 0.1, "epsilon": 1e-8}


def _table() -> tuple[Case, ...]:
    cases = []
    for dtype in DTYPES:
        for amsgrad in (False, True):
            for maximize in (False, True):
                options = AdamWOptions(**_STRONG, amsgrad=amsgrad, maximize=maximize)
                name = f"{dtype} gradient{', amsgrad' * amsgrad}{', maximize' * maximize}, 1025"
                cases.append(Case(name, (1025,), dtype, options=options))
    for numel in (1, 7, 1024, 1025, 4096, 5000, 20000):
        for dtype in DTYPES:
            options = AdamWOptions(**_STRONG, amsgrad=dtype == "bfloat16")
            cases.append(Case(f"{numel} elements, {dtype} gradient", (numel,), dtype, options=options, seed=1))
    for name, changes in {
        "default options": {},
        "beta1 0": {**_STRONG, "beta1": 0},
        "beta2 0": {**_STRONG, "beta2": 0},
        "beta2 0.1": {**_STRONG, "beta2": 0.1},
        "both betas 0, amsgrad": {**_STRONG, "beta1": 0, "beta2": 0, "amsgrad": True},
        "beta1 above beta2": {**_STRONG, "beta1": 0.95, "beta2": 0.5},
        "betas near 1": {**_STRONG, "beta1": 0.9999, "beta2": 0.999999},
        "no weight decay": {**_STRONG, "weight_decay": 0},
        "learning rate 0": {**_STRONG, "learning_rate": 0},
        "decay stronger than the parameter": {**_STRONG, "learning_rate": 0.5, "weight_decay": 3.0},
        "epsilon 1": {**_STRONG, "epsilon": 1},
    }.items():
        cases.append(Case(name, (1025,), options=AdamWOptions(**changes), seed=2))
    for dtype in DTYPES:
        options = AdamWOptions(**_STRONG, amsgrad=True)
        cases += [
            Case(f"100 steps, {dtype} gradient", (33,), dtype, options=options, steps=100, seed=3),
            Case(f"scale 1024, {dtype} gradient", (1025,), dtype, options=options, gradient_scale=1024.0, seed=4),
            Case(f"scale 1000, {dtype} gradient", (1025,), dtype, options=options, gradient_scale=1000.0, seed=4),
            Case(f"clip 1, {dtype} gradient", (5000,), dtype, options=options, max_norm=1.0, seed=5),
            Case(f"clip 0, {dtype} gradient", (7,), dtype, options=options, max_norm=0.0, seed=5),
            Case(f"scale 3000, clip 0.1, {dtype} gradient", (1025,), dtype, options=options, gradient_scale=3000.0,
                 max_norm=0.1, seed=6),
            Case(f"misaligned, {dtype} gradient", (1025,), dtype, options=options, layout="misaligned",
                 gradient_layout="misaligned", seed=7),
            Case(f"misaligned parameter only, {dtype} gradient", (5000,), dtype, options=options, layout="misaligned",
                 seed=7),
            Case(f"every second column, {dtype} gradient", (4, 6), dtype, options=options, layout="every second",
                 seed=8),
            Case(f"gradient is every second column, {dtype}", (40, 33), dtype, options=options,
                 gradient_layout="every second", seed=8),
            Case(f"both transposed, {dtype} gradient", (40, 33), dtype, options=options, layout="transposed",
                 gradient_layout="transposed", seed=9),
            Case(f"parameter transposed, {dtype} gradient", (4, 6), dtype, options=options, layout="transposed",
                 seed=9),
            Case(f"parameter channels_last, {dtype} gradient", (8, 4, 3, 3), dtype, options=options,
                 layout="channels_last", seed=10),
            Case(f"gradient channels_last, {dtype}", (8, 4, 3, 3), dtype, options=options,
                 gradient_layout="channels_last", seed=10),
            Case(f"size-1 dimensions, {dtype} gradient", (1, 5, 1, 7), dtype, options=options, layout="channels_last",
                 seed=11),
        ]  # fmt: skip
    for parameter_dtype in ("float16", "bfloat16"):
        for dtype in DTYPES:
            for amsgrad in (False, True):
                options = AdamWOptions(**_STRONG, amsgrad=amsgrad)
                name = f"{parameter_dtype} parameter, {dtype} gradient{', amsgrad' * amsgrad}"
                cases.append(Case(name, (1025,), dtype, parameter_dtype, options, seed=12))
        cases.append(Case(f"{parameter_dtype} parameter, clip and scale", (5000,), parameter_dtype, parameter_dtype,
                          AdamWOptions(**_STRONG), gradient_scale=1024.0, max_norm=1.0, seed=13))  # fmt: skip
    return tuple(cases)


CASES = _table()
FLAT_CASES = tuple(  # what adamw_step takes: FP32, contiguous (possibly misaligned), no guard
    case
    for case in CASES
    if case.parameter_dtype == "float32"
    and case.max_norm is None
    and {case.layout, case.gradient_layout} <= {"contiguous", "misaligned"}
)


def _fixtures() -> tuple[Case, ...]:
    """Every third has a loss scale: one each of the four kinds of step, among all gradient dtypes."""
    cases = []
    for number, (dtype, amsgrad, maximize) in enumerate(product(DTYPES, (False, True), (False, True))):
        options = AdamWOptions(**_STRONG, amsgrad=amsgrad, maximize=maximize)
        scale = 1.0 if number % 3 else 128.0
        name = f"{dtype} gradient{', amsgrad' * amsgrad}{', maximize' * maximize}{', scale 128' * (scale == 128.0)}"
        cases.append(Case(name, (19,), dtype, options=options, gradient_scale=scale, seed=14))
    return tuple(cases)


FIXTURE_CASES = _fixtures()  # what tools/fused_adamw/pytorch_fixtures.json holds


# --------------------------------------------------------------------------------------------------- inputs


def round_to(values: Array, dtype: str) -> NDArray[np.float32]:
    """``values`` rounded to ``dtype`` (nearest, ties to even), held in FP32. Finite values only."""
    wide = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return wide
    if dtype == "float16":
        return wide.astype(np.float16).astype(np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def initial_parameter(case: Case) -> NDArray[np.float32]:
    """Values of the parameter's dtype: normal with standard deviation 1, some of them exact zeros."""
    values = np.random.default_rng((case.seed, 0)).standard_normal(case.shape)
    values.reshape(-1)[3::17] = 0.0
    return round_to(values, case.parameter_dtype)


def stored_gradient(case: Case, step: int) -> NDArray[np.float32]:
    """The gradient of the one-based ``step`` as it stands in memory: scaled, and a value of the gradient's dtype.

    Magnitudes spread over 1e-4 to 10 and change from step to step; some elements are exact zeros, so that a first
    moment decays alone and an element without any gradient divides by epsilon alone.
    """
    random = np.random.default_rng((case.seed, step))
    values = random.standard_normal(case.shape) * 10.0 ** random.uniform(-4, 1, case.shape)
    values.reshape(-1)[1::5] *= step % 2
    values.reshape(-1)[5::23] = 0.0
    return round_to(np.clip(values * case.gradient_scale, -6e4, 6e4), case.gradient_dtype)


def to_torch(values: Array, dtype: str = "float32", layout: str = "contiguous") -> Any:
    """A torch tensor with these values, in a layout.

    ``contiguous``; ``misaligned``: contiguous, one element past the start of its storage; ``every second``: every
    second column of a base twice as wide, whose other columns hold 77; ``transposed``: dense with the dimensions
    reversed in memory; ``channels_last``: 4-D.
    """
    import torch

    source = torch.from_numpy(np.array(values, dtype=np.float32)).to(getattr(torch, dtype))
    shape = tuple(source.shape)
    if layout == "contiguous":
        return source
    if layout == "misaligned":
        target = torch.full((source.numel() + 1,), 77.0, dtype=source.dtype)[1:].view(shape)
    elif layout == "every second":
        target = torch.full((*shape[:-1], 2 * shape[-1]), 77.0, dtype=source.dtype)[..., ::2]
    elif layout == "transposed":
        target = torch.empty(shape[::-1], dtype=source.dtype).permute(*reversed(range(len(shape))))
    elif layout == "channels_last":
        target = torch.empty(shape, dtype=source.dtype, memory_format=torch.channels_last)
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return target.copy_(source)


# -------------------------------------------------------------------------------- expected values and bounds

U = 2.0**-24  # FP32 unit roundoff: one operation errs by at most U times its result
TINY = 2.0**-149  # smallest FP32 number: an underflowing product or quotient errs by at most half of it
_HALF = {"float32": (0.0, 0.0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
FIELDS = ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy")


class Expected(NamedTuple):
    """FP64 values after one step and, for each element, the largest error a correct FP32 implementation can make.

    Keys are those of ``FIELDS``. ``parameter`` is the FP32 value (the master of a half parameter), ``copy`` its half
    copy.
    """

    step: int
    clip_factor: float
    values: dict[str, NDArray[np.float64]]
    bounds: dict[str, NDArray[np.float64]]


def norm_relative_bound(chain: int = 1, levels: int = 3) -> float:
    """Largest relative error of a total norm computed from FP32 statistics rows.

    To first order, in units of U. A term (g / scale)^2: two roundings unscale g (the reciprocal, the product) and one
    divides, all doubled by the square, which rounds once more: 7. Adding the terms of a row: ``chain``, the longest
    run of FP32 additions any term passes through (1 if sums are FP64 and rounded once). Each of ``levels`` merges: the
    ratio of the scales, doubled because it multiplies twice, two products, then ``chain`` additions. All terms are
    positive, so the bounds add up without cancellation; the square root halves them.
    """
    return 0.5 * U * (7 + chain + levels * (4 + chain)) * 1.01


@lru_cache(maxsize=256)
def expected(case: Case, *, literal: bool = False, norm_error: float = 0.0) -> tuple[Expected, ...]:
    """What each step of ``case`` must give, and how far an FP32 implementation may be from it.

    Args:
        case: the case.
        literal: False bounds the kernels' form ``m += (1-b1)*(g-m)``, taken from the nearer end, and
            ``p -= lr*wd*p + ...``. True bounds the textbook form that torch and the generic AdamW use:
            ``m = b1*m + (1-b1)*g`` (or lerp), ``p = p*(1-lr*wd) - ...``.
        norm_error: relative error of the norm behind the clip factor, ``norm_relative_bound(...)`` where kernels
            compute it, 0 where the implementation is given the factor in ``Expected.clip_factor``.
    """
    follower = Follower(case, initial_parameter(case), literal=literal, norm_error=norm_error)
    return tuple(follower.step(stored_gradient(case, step)) for step in range(1, case.steps + 1))


class Follower:
    """FP64 values and bounds of one parameter, step by step; see :func:`expected` for the arguments.

    ``case`` gives the parameter's dtype, gradient scale and guard, and the options where ``step`` names no others.
    """

    def __init__(self, case: Case, parameter: Array, *, literal: bool = False, norm_error: float = 0.0) -> None:
        self.case = case
        self.parameter = np.asarray(parameter, dtype=np.float64)
        self.state: reference.ReferenceState | None = None
        self._errors = dict.fromkeys(
            ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), np.zeros(self.parameter.shape)
        )
        self._empty_steps = 0
        self._literal = literal
        self._norm_error = norm_error

    def step(self, gradient: Array, options: AdamWOptions | None = None) -> Expected:
        """One step with the stored ``gradient`` and, as in a schedule, its own ``options``."""
        case = self.case if options is None else replace(self.case, options=options)
        before, old = self.parameter, self.state
        if before.size == 0:  # no update is counted where nothing can be updated; torch's class counts one
            self._empty_steps += 1
            half = case.parameter_dtype != "float32"
            names = ("parameter", "exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * case.options.amsgrad, *["copy"] * half)
            values = dict.fromkeys(names, before)
            return Expected(self._empty_steps, 1.0, values, dict(values))
        clip = 1.0
        if case.guard is not None:
            clip = reference.gradient_stats([gradient], case.gradient_scale).decision(case.guard).clip_factor
        self.parameter, self.state = reference.adamw(before, gradient, old, case.options, case.control, clip)
        clip_error = 0.0 if clip in (0.0, 1.0) or self._norm_error == 0.0 else self._norm_error + 2 * U
        self._errors = _propagate(
            case, before, gradient, clip, old, self.parameter, self.state, self._errors, self._literal, clip_error
        )
        values = {"parameter": self.parameter, "exp_avg": self.state.first_moment}
        values["exp_avg_sq"] = self.state.second_moment
        if case.options.amsgrad:
            values["max_exp_avg_sq"] = self.state.max_second_moment
        bounds = {key: self._errors[key] for key in values}
        if case.parameter_dtype != "float32":
            # Rounding a value off by e to a half type: e, plus half an ulp of the half type at the larger magnitude.
            relative, absolute = _HALF[case.parameter_dtype]
            error = self._errors["parameter"]
            values["copy"] = self.parameter
            bounds["copy"] = error + relative * (np.abs(self.parameter) + error) + absolute
        return Expected(self.state.step, clip, values, bounds)


def _lerp_roundings(beta: float) -> float:
    """Roundings of a step from ``old`` to ``x`` by ``c = 1 - beta``, in units of U * |x - old|, without the last sum.

    Below 1/2, ``old + c*(x - old)``: the difference, the coefficient and the product err relative to c. From 1/2 on,
    ``x - (1-c)*(x - old)``: the difference and the product err relative to 1 - c; 1 - c itself is exact in FP32, but
    carries the absolute error of c, which was rounded.
    """
    c = 1.0 - beta
    if c <= 0.5:
        return 3 * c
    return 2 * beta + abs((1.0 - float(np.float32(c))) - beta) / U


def _carried(beta: float) -> float:
    """The share of an old moment's error that stays: of a tiny beta, 1 - FP32(1 - beta) may be many times U larger."""
    return max(beta, 1.0 - float(np.float32(1.0 - beta)))


def _propagate(
    case: Case,
    p: Array,
    stored: Array,
    clip: float,
    old: reference.ReferenceState | None,
    p_new: Array,
    new: reference.ReferenceState,
    errors: Mapping[str, Array],
    literal: bool,
    clip_error: float,
) -> dict[str, Array]:
    """Bounds after one step from those before it: a running error analysis in units of U, first order.

    Each line is (error carried in) + (roundings of this line) * U * (magnitude they round) + TINY per product that can
    underflow. A coefficient that was rounded from FP64 to FP32 counts as one rounding of its product. An old moment
    larger than the new one enters through the magnitudes being added, so cancellation is covered. ``slack`` covers the
    products of two small errors.
    """
    slack = 1.0 + 2.0**-10
    o = case.options
    b1, b2, t = o.beta1, o.beta2, new.step
    c1, c2 = 1.0 - b1, 1.0 - b2
    m_old, v_old = (np.zeros_like(p), np.zeros_like(p)) if old is None else (old.first_moment, old.second_moment)
    e_p, e_m, e_v, e_max = (errors[k] for k in ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))

    # g: the reciprocal and its product, exact for a power of two; the product with the clip factor, exact for 0 and 1.
    roundings = (0 if frexp(case.gradient_scale)[0] == 0.5 else 2) + (0 if clip in (0.0, 1.0) else 1)
    g = np.abs(stored.astype(np.float64)) / case.gradient_scale * clip
    e_g = (roundings * U + clip_error) * g + 2 * TINY
    signed = np.where(stored < 0, -g, g) * (-1.0 if o.maximize else 1.0)
    # g*g: the error of g counts twice; one rounding.
    gg = g * g
    e_gg = 2 * g * e_g + U * gg + TINY

    if literal:  # b1*m + c1*g: coefficient, product (and, in lerp, a difference) on either side, then the sum
        m_round, v_round = 3 * (b1 * np.abs(m_old) + c1 * g), 3 * (b2 * v_old + c2 * gg)
    else:
        m_round, v_round = _lerp_roundings(b1) * np.abs(signed - m_old), _lerp_roundings(b2) * np.abs(gg - v_old)
    e_m = _carried(b1) * e_m + c1 * e_g + U * (m_round + np.abs(new.first_moment)) + 2 * TINY
    e_v = _carried(b2) * e_v + c2 * e_gg + U * (v_round + new.second_moment) + 2 * TINY
    v_used, e_used = new.second_moment, e_v
    if new.max_second_moment is not None:  # a maximum is as wrong as the worse of its arguments
        e_max = np.maximum(e_max, e_v)
        v_used, e_used = new.max_second_moment, e_max

    # sqrt(v_hat): correction and product; |sqrt(x + e) - sqrt(x)| <= e / sqrt(x) and <= sqrt(e); one rounding.
    inv_bias1, inv_bias2 = 1.0 / (1.0 - b1**t), 1.0 / (1.0 - b2**t)
    v_hat = v_used * inv_bias2
    e_hat = inv_bias2 * e_used + 2 * U * v_hat + TINY
    root = np.sqrt(v_hat)
    e_root = np.minimum(np.sqrt(e_hat), e_hat / np.maximum(root, 1e-300)) + U * root
    # Denominator: epsilon's own rounding, the sum. Numerator lr * (m * inv_bias1): two coefficients, two products.
    denominator = root + o.epsilon
    e_denominator = e_root + U * (o.epsilon + denominator)
    numerator = o.learning_rate * inv_bias1 * np.abs(new.first_moment)
    e_numerator = o.learning_rate * inv_bias1 * e_m + 4 * U * numerator + (1 + o.learning_rate) * TINY
    # A form that loses a small v, as v + c2 * (gg - v) does for beta2 near 0, has no bound.
    assert np.all(e_denominator < 0.5 * denominator), f"{case}: too ill-conditioned for an FP32 comparison"
    quotient = numerator / denominator
    e_quotient = (e_numerator + quotient * e_denominator) / (denominator - e_denominator) + U * quotient + TINY

    decay = o.learning_rate * o.weight_decay
    if literal:  # p * (1 - lr*wd): the factor, the product
        p_round = 2 * np.abs(p * (1.0 - decay)) + np.abs(p_new)
    else:  # lr*wd*p: coefficient, product; the sum with the quotient; the subtraction
        p_round = 2 * decay * np.abs(p) + (decay * np.abs(p) + quotient) + np.abs(p_new)
    e_p = abs(1.0 - decay) * e_p + e_quotient + U * p_round + 2 * TINY
    names = ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return {name: slack * e for name, e in zip(names, (e_p, e_m, e_v, e_max), strict=True)}


# ----------------------------------------------------------------------------------------------- comparison


def as_array(value: Any) -> NDArray[np.float64]:
    """A NumPy array, or a torch tensor of any dtype, device and layout, as FP64 in logical order."""
    if not isinstance(value, np.ndarray) and hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def check(case: Case, want: Expected, actual: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError unless every element of every field lies within its bound.

    Args:
        want: one step of :func:`expected`.
        actual: by the names of ``FIELDS``, arrays or tensors. All fields of ``want`` must be there, and no others.
        extra: allowances to add, by field: the other side's ``bounds`` when ``actual`` is compared with an FP32 result.
    """
    assert set(actual) == set(want.values), f"{case}: fields {sorted(actual)}, expected {sorted(want.values)}"
    for name, value in actual.items():
        bound = want.bounds[name] + (extra or {}).get(name, 0.0)
        compare(f"{case}, step {want.step}, {name}", value, want.values[name], bound)


def compare(what: str, actual: Any, target: Any, bound: Any) -> None:
    """Raise AssertionError unless ``|actual - target| <= bound`` everywhere and the shapes agree; NaN never passes."""
    got, want = as_array(actual), as_array(target)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    wrong = ~(np.abs(got - want) <= limit)
    if wrong.any():
        with np.errstate(all="ignore"):
            excess = np.where(wrong, np.nan_to_num(np.abs(got - want) / limit, nan=np.inf), 0.0)
        worst = np.unravel_index(int(np.argmax(excess)), want.shape)
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {want.size} elements out of bounds; worst at {tuple(map(int, worst))}: "
            f"got {got[worst]!r}, expected {want[worst]!r} +- {limit[worst]:.3e}, off by {got[worst] - want[worst]:.3e}"
        )
