"""The errors of :mod:`ruda_optim.fused_adamw`.

Every error is a :class:`FusedAdamWError` and also the builtin exception that a caller would expect, so both
``except FusedAdamWError`` and ``except ValueError`` work. All of them are raised before anything is allocated, launched
or changed.
"""

from __future__ import annotations


class FusedAdamWError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidOption(FusedAdamWError, ValueError):
    """A hyperparameter, factor, flag or count has the wrong type or lies outside its range."""


class InvalidTensor(FusedAdamWError, TypeError):
    """Not a tensor, or a dtype, layout or aliasing that the operation does not take."""


class ShapeMismatch(FusedAdamWError, ValueError):
    """Tensors that belong together differ in shape; nothing is broadcast."""


class DifferentDevice(FusedAdamWError, ValueError):
    """Tensors that belong together live on different devices."""


class InvalidState(FusedAdamWError, ValueError):
    """An optimizer state that no completed update can have produced, or one that does not fit the options."""


class StepOverflow(FusedAdamWError, OverflowError):
    """The step count would leave the range of an unsigned 64-bit integer."""


class NonFiniteGradients(FusedAdamWError, FloatingPointError):
    """A gradient holds NaN or infinity and the guard's policy is ``NonFinitePolicy.ERROR``."""
