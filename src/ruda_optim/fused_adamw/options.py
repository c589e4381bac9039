"""Hyperparameters of one AdamW / AMSGrad update, their checks, and the scalars a kernel receives.

Standard library only: the checks need no tensor and no torch. Symbols follow the formula of ``reference.py``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from .errors import InvalidOption, InvalidState, StepOverflow

MAX_STEP = 2**64 - 1
"""Largest one-based update number t."""

_FP32 = struct.Struct("<f")
_FP32_ROW = struct.Struct("<10f")
_FP32_MAX = 3.4028234663852886e38


def round_to_fp32(value: float) -> float:
    """The FP32 number nearest to ``value`` (ties to even), as a Python float; infinity where FP32 overflows."""
    try:
        return float(_FP32.unpack(_FP32.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def check_number(name: str, value: object, requirement: str, *, infinite: bool = False) -> float:
    """``value`` as a float if it is a real number, else :class:`InvalidOption`. A bool is not a number here.

    NaN is refused, and so is infinity unless ``infinite`` allows it.
    """
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidOption(
                f"{name} must be {requirement}, got {value!r} of type {type(value).__name__}; pass a Python number"
            )
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not (math.isfinite(value) or (infinite and math.isinf(value))):
        raise InvalidOption(
            f"{name} must be {requirement}, got {value!r}; "
            + ("NaN is not accepted" if infinite else "NaN and infinity are not accepted")
        )
    return value


def check_flag(name: str, value: object) -> None:
    """Raise :class:`InvalidOption` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise InvalidOption(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


def seed_of_step(step: int) -> int:
    """The 32 bits that the dither of low-precision moments takes from the step number: a hash of it modulo 2^32."""
    x = step & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


class StepCoefficients(NamedTuple):
    """The scalars of update number ``step``: ten floats that are FP32 values already, then two facts about the step.

    The first ten fields are one row of the kernels' coefficient table, in the order of ``Coefficients`` in
    ``kernels/csrc/adamw_update.h``. They are computed in FP64 and rounded once. ``inverse_scale`` is not part of the
    row: kernels receive it, like the clip factor, once per launch.
    """

    lr: float
    lr_weight_decay: float
    """lr * weight_decay"""
    one_minus_beta1: float
    one_minus_beta2: float
    inv_bias1: float
    """1 / (1 - beta1^step)"""
    inv_bias2: float
    """1 / (1 - beta2^step)"""
    epsilon: float
    gradient_sign: float
    """+1, or -1 to maximize"""
    seed_low: float
    """the low 16 bits of ``seed_of_step(step)``, as a number"""
    seed_high: float
    """the high 16 bits"""
    step: int
    """t, one-based"""
    inverse_scale: float
    """1 / gradient_scale"""

    @property
    def row(self) -> tuple[float, ...]:
        """The ten FP32 values of the coefficient table."""
        return self[:10]


@dataclass(frozen=True, slots=True)
class StepControl:
    """What may change from one update to the next without being a hyperparameter.

    Args:
        gradient_scale: stored gradients are ``gradient_scale`` times the true ones (loss scaling); they are multiplied
            by the FP32 value of its reciprocal. Finite, > 0, and the reciprocal must be finite and > 0 in FP32, which
            leaves about 3e-39 to 1.4e45. Default 1.
        skip_update: a flag on the host, supplied by the caller: True leaves everything as it is. Default False.

    Raises:
        InvalidOption: a value of the wrong type or outside its range.
    """

    gradient_scale: float = 1.0
    skip_update: bool = False

    def __post_init__(self) -> None:
        scale = check_number("gradient_scale", self.gradient_scale, "a finite number > 0")
        if scale <= 0.0:
            raise InvalidOption(f"gradient_scale must be a finite number > 0, got {scale!r}")
        if not 0.0 < round_to_fp32(1.0 / scale) <= _FP32_MAX:
            raise InvalidOption(
                f"gradient_scale must have a reciprocal that is finite and > 0 in FP32, got {scale!r}; "
                "use a scale between 3e-39 and 1.4e45"
            )
        check_flag("skip_update", self.skip_update)
        object.__setattr__(self, "gradient_scale", scale)

    @property
    def inverse_scale(self) -> float:
        """1 / gradient_scale, rounded to FP32."""
        return round_to_fp32(1.0 / self.gradient_scale)


_NO_CONTROL = StepControl()


class HyperparameterNames(NamedTuple):
    """What a caller calls the five numbers, for error messages."""

    lr: str
    beta1: str
    beta2: str
    epsilon: str
    weight_decay: str


_OPTION_NAMES = HyperparameterNames("learning_rate", "beta1", "beta2", "epsilon", "weight_decay")


def check_hyperparameters(
    lr: object, beta1: object, beta2: object, epsilon: object, weight_decay: object, names: HyperparameterNames
) -> tuple[float, float, float, float, float]:
    """The five numbers as floats, if :class:`AdamWOptions` takes them; else :class:`InvalidOption`."""
    lr = check_number(names.lr, lr, "a finite number >= 0")
    beta1 = check_number(names.beta1, beta1, "a number in [0, 1)")
    beta2 = check_number(names.beta2, beta2, "a number in [0, 1)")
    epsilon = check_number(names.epsilon, epsilon, "a finite number > 0")
    decay = check_number(names.weight_decay, weight_decay, "a finite number >= 0")
    if lr < 0.0:
        raise InvalidOption(f"{names.lr} must be a finite number >= 0, got {lr!r}; to climb, use maximize=True")
    # 1 - beta cannot vanish: it is exact in FP64 near 1, where it is at least 2^-53, and FP32 holds that.
    if not 0.0 <= beta1 < 1.0:
        raise InvalidOption(f"{names.beta1} must be a number in [0, 1), got {beta1!r}")
    if not 0.0 <= beta2 < 1.0:
        raise InvalidOption(f"{names.beta2} must be a number in [0, 1), got {beta2!r}")
    if epsilon <= 0.0:
        raise InvalidOption(f"{names.epsilon} must be a finite number > 0, got {epsilon!r}")
    if not 0.0 < round_to_fp32(epsilon) <= _FP32_MAX:
        raise InvalidOption(f"{names.epsilon} must be > 0 and finite in FP32 (1.4e-45 to 3.4e38), got {epsilon!r}")
    if decay < 0.0:
        raise InvalidOption(f"{names.weight_decay} must be a finite number >= 0, got {decay!r}")
    if round_to_fp32(lr) > _FP32_MAX:
        raise InvalidOption(f"{names.lr} must be finite in FP32 (at most 3.4e38), got {lr!r}")
    if round_to_fp32(lr * decay) > _FP32_MAX:
        raise InvalidOption(
            f"{names.lr} * {names.weight_decay} must be finite in FP32 (at most 3.4e38), "
            f"got {lr!r} * {decay!r}; lower one of them"
        )
    return lr, beta1, beta2, epsilon, decay


@dataclass(frozen=True, slots=True)
class AdamWOptions:
    """Hyperparameters of decoupled-weight-decay Adam. The defaults are RUDA's, not PyTorch's.

    Args:
        learning_rate: lr, finite, >= 0, finite in FP32. Default 1e-3.
        beta1: decay of the first moment, in [0, 1). Default 0.9.
        beta2: decay of the second moment, in [0, 1). Default 0.999.
        epsilon: added outside the square root; finite, > 0, and > 0 in FP32. Default 1e-5.
        weight_decay: finite, >= 0; ``learning_rate * weight_decay`` must be finite in FP32. Default 1e-4.
        amsgrad: divide by the running maximum of the uncorrected second moment. Default False.
        maximize: climb instead of descend: the gradient is negated, weight decay is not. Default False.
        moments: dtype of the state: "float32" or "bfloat16", which is rounded with a dither that is a hash of the
            element and the step number. Default "float32".

    Integers are taken as numbers (``beta1=0`` is 0.0); bools, strings, NaN and infinity are refused.

    Raises:
        InvalidOption: a value of the wrong type or outside its range.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-5
    weight_decay: float = 1e-4
    amsgrad: bool = False
    maximize: bool = False
    moments: str = "float32"

    def __post_init__(self) -> None:
        values = check_hyperparameters(
            self.learning_rate, self.beta1, self.beta2, self.epsilon, self.weight_decay, _OPTION_NAMES
        )
        check_flag("amsgrad", self.amsgrad)
        check_flag("maximize", self.maximize)
        if self.moments not in ("float32", "bfloat16"):
            packed = "; packed moments belong to ruda_torch.AdamW" if self.moments == "packed16" else ""
            raise InvalidOption(f"moments must be 'float32' or 'bfloat16', got {self.moments!r}{packed}")
        for name, value in zip(_OPTION_NAMES, values, strict=True):
            object.__setattr__(self, name, value)

    def prepare_step(self, completed_steps: int, control: StepControl = _NO_CONTROL) -> StepCoefficients:
        """The scalars of the update that follows ``completed_steps`` updates.

        ``control.skip_update`` does not matter here: whether to launch at all is the caller's decision.

        Args:
            completed_steps: t - 1, an int in [0, 2^64 - 2].
            control: gives ``inverse_scale``. Default: scale 1.

        Raises:
            InvalidState: ``completed_steps`` is not an int, or negative.
            StepOverflow: ``completed_steps`` is 2^64 - 1 or more.
        """
        if type(completed_steps) is not int or completed_steps < 0:
            raise InvalidState(f"completed_steps must be an int >= 0, got {completed_steps!r}")
        if completed_steps >= MAX_STEP:
            raise StepOverflow(
                f"completed_steps must be at most 2^64 - 2 so that the next step fits 64 bits, got {completed_steps}"
            )
        step = completed_steps + 1
        seed = seed_of_step(step)
        lr = self.learning_rate
        row = _FP32_ROW.unpack(
            _FP32_ROW.pack(
                lr,
                lr * self.weight_decay,
                1.0 - self.beta1,
                1.0 - self.beta2,
                1.0 / (1.0 - self.beta1**step),
                1.0 / (1.0 - self.beta2**step),
                self.epsilon,
                -1.0 if self.maximize else 1.0,
                seed & 0xFFFF,
                seed >> 16,
            )
        )
        return StepCoefficients._make((*row, step, control.inverse_scale))
