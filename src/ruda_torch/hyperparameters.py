"""A group's hyperparameters: one reading and one check, for the constructor, a group, an assignment and a checkpoint.

A hyperparameter is whatever torch computes with: a Python or NumPy number, or an array or tensor of one element. Betas
are any sequence of two of them (a tuple, a list, an OmegaConf ``ListConfig``, an array).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from numbers import Real
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import AdamWOptions, InvalidOption
from ruda_optim.fused_adamw.binding import GROUP_KEYS
from ruda_optim.fused_adamw.options import HyperparameterNames, check_hyperparameters

from .members import check_parameter_dtype
from .settings import check_group_keys, check_group_switches, check_switches

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = HyperparameterNames("lr", "betas[0]", "betas[1]", "eps", "weight_decay")
"""What a caller calls the five numbers."""
_PLACEHOLDERS = (0.0, 0.0, 0.0, 1.0, 0.0)
"""In range, whatever the others are."""


def hyperparameters(group: dict[str, Any], number: int | None = None) -> tuple[Any, ...]:
    """The five values of group ``number`` as they stand there, in the order of :data:`NAMES`.

    Raises:
        InvalidOption: betas that are not two.
    """
    return (group["lr"], *_pair(group["betas"], number), group["eps"], group["weight_decay"])


def group_options(number: int | None, group: dict[str, Any], *, look: bool = True) -> AdamWOptions:
    """A group's hyperparameters, checked.

    Args:
        number: the group's, for error messages; None for the constructor's arguments.
        group: lr, betas, eps, weight_decay; amsgrad and maximize are False where they are missing.
        look: read the value of a tensor, which waits for its device. False lets a tensor stand for some number in
            range: whoever copies its value on the device must not trust the options about it.

    Raises:
        InvalidOption: what is wrong, with the group's number.
    """
    values = hyperparameters(group, number)
    if not all(type(value) is float for value in values):
        named = zip(NAMES, values, _PLACEHOLDERS, strict=True)
        values = tuple(_number(f"{_where(number)}{n}", v, unread=None if look else p) for n, v, p in named)
    lr, beta1, beta2, epsilon, decay = values
    amsgrad, maximize = _flag(group.get("amsgrad", False)), _flag(group.get("maximize", False))
    try:
        try:
            return AdamWOptions(lr, beta1, beta2, epsilon, decay, amsgrad, maximize)
        except InvalidOption:
            check_hyperparameters(lr, beta1, beta2, epsilon, decay, NAMES)  # says it with the caller's names
            raise
    except InvalidOption as error:
        raise InvalidOption(f"{_where(number)}{error}") from None


def check_arguments(switches: dict[str, Any], hyperparameters: dict[str, Any]) -> tuple[Any, Any]:
    """Check what the constructor is given for the fused step, and return the betas in the form that torch keeps."""
    check_switches("", switches)
    group_options(None, hyperparameters)
    return float_betas(hyperparameters["betas"])


def check_new_group(number: int, group: dict[str, Any], defaults: dict[str, Any], *, capturable: bool) -> None:
    """What the fused step asks of a group before torch takes it: switches, hyperparameters, parameter dtypes.

    A group that passes has its betas and parameters in the form in which torch will keep them.
    """
    check_group_switches(number, group, capturable=capturable)
    group_options(number, {**defaults, **group})
    params = group["params"]
    if not isinstance(params, (torch.Tensor, set)):  # torch refuses a set
        group["params"] = params = list(params)  # an iterator yields its parameters once
    for index, entry in enumerate([params] if isinstance(params, torch.Tensor) else params):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        # What is frozen takes part in no step, and may be anything.
        if isinstance(parameter, torch.Tensor) and parameter.requires_grad:
            check_parameter_dtype(f"parameter {index} of group {number}", parameter)
    if "betas" in group:
        group["betas"] = float_betas(group["betas"])


def float_betas(betas: Any) -> tuple[Any, Any]:
    """A tuple of floats and tensors, as torch's constructor and checkpoints want them."""
    first, second = (beta if isinstance(beta, torch.Tensor) else float(beta) for beta in _pair(betas, None))
    return first, second


class Hyperparameters:
    """The options of every group, read at each step and built again when a value changed.

    Looking takes less than a microsecond per group: while a group holds the very same numbers, nothing is compared.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Any, ...], bool, AdamWOptions]] = {}

    def read(self, number: int, group: dict[str, Any], *, look: bool = True) -> AdamWOptions:
        """As :func:`group_options`; the same object while the values stay the same."""
        values = (len(group), *(group[key] for key in GROUP_KEYS[1:]))
        known = self._known.get(number)
        if known is not None and known[0] and known[1] is look and all(map(is_, known[0], values)):
            return known[2]
        check_group_keys(number, group)  # a key more shows as another length
        options = group_options(number, group, look=look)
        if known is not None and known[2] == options:
            options = known[2]
        # The very same list, tensor or array may hold another number at the next step.
        kept = type(group["betas"]) is tuple and all(
            isinstance(value, Real) or (isinstance(value, torch.Tensor) and not look)
            for value in hyperparameters(group, number)
        )
        self._known[number] = (values if kept else (), look, options)
        return options

    def values(self, groups: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]] | None:
        """What was read: of each group its length and the values of ``GROUP_KEYS[1:]``.

        None if some of it can become another number without becoming another object.
        """
        known = [self._known[number][0] for number in range(len(groups))]
        return known if all(known) and all(type(group) is dict for group in groups) else None


def _pair(betas: Any, number: int | None) -> tuple[Any, Any]:
    if type(betas) is tuple and len(betas) == 2:
        return betas
    if not isinstance(betas, (str, bytes, Mapping, Set)):
        try:
            if len(betas) == 2:
                return betas[0], betas[1]
        except (TypeError, IndexError, KeyError):
            pass
    raise InvalidOption(f"{_where(number)}betas must be two numbers in [0, 1), got {betas!r}")


def _number(what: str, value: Any, *, unread: float | None) -> Any:
    """A number out of a tensor or an array; anything else as it is, for the check of ranges to judge.

    A tensor with one element is ``unread`` where that is a number.
    """
    if isinstance(value, Real) or not hasattr(value, "item"):
        return value
    is_tensor = isinstance(value, torch.Tensor)
    if unread is not None and is_tensor and value.numel() == 1:
        return unread
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):  # torch's and NumPy's ways to say that there is more than one
        shape = tuple(getattr(value, "shape", ()))
        kind = "a tensor" if is_tensor else type(value).__name__
        raise InvalidOption(f"{what} must be one number, got {kind} of shape {shape}") from None


def _flag(value: Any) -> Any:
    """0, 1 and NumPy's bools as the bools that they are; anything else as it is, for the check to judge."""
    return value if type(value) is bool or value not in (0, 1) else bool(value)


def _where(number: int | None) -> str:
    return "" if number is None else f"group {number}: "
