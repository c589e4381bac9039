"""The one sum over ranks of a step with sharded parameters. What crosses ranks never visits the host.

It is a few FP64 numbers: the squares of each parameter group, and what tells whether all ranks see the same step. Every
rank takes its decision from that sum alone, where the sum is: on the device.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ruda_optim.fused_adamw import InvalidState

from .sharding import misplaced_gradients, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch import Tensor

    from .ranks import Ranks

_SIGNATURE_BITS = 18
"""So that the sum of squared signatures of 100,000 ranks stays an exact FP64 integer."""
_ROOM = 8
"""Messages have room for a multiple of so many groups, so that ranks which disagree seldom differ in length as well: a
process group ends the process then."""
_COPIES_DIFFER = 2.0**-10
"""Copies have the same squares but for roundings; this much of all squares, weighted, are not copies."""
_ANOTHER_OPTIMIZER = (
    "the {size} ranks do not have the same parameter groups (their number, the shapes and dtypes of the parameters, "
    "whether gradient statistics are asked for); nothing was updated. Build the optimizer alike on every rank; where "
    "ranks hold different stages of a model, give each set of ranks a mesh of its own"
)
_ANOTHER_STEP = (
    "the {size} ranks do not have gradients for the same parameters (or not with the same placements, or not the same "
    "max_grad_norm, check_finite and moments), so an update would make them drift apart; nothing was updated. Let "
    "every rank run the same layers, or clear or zero-fill the gradients of the layers that some ranks did not run"
)


@dataclass(frozen=True)
class GlobalStatistics:
    """What all ranks know after the sum, on the device of the ranks; only ``check`` and ``group_norms`` wait for it.

    Attributes:
        report: FP64 ``(3,)``: bad (0 or 1), scale 1, sum of squares of all finite elements.
        skip: FP32 ``(1,)``, above 0 on all ranks or on none: some rank was told to skip (``found_inf``), some rank
            failed, or the ranks do not see the same step. Nothing may be updated then.
        group_squares, group_bad: FP64 ``(g,)``: the same per parameter group.
        ranks, elements: whose sum it is, and what their parts must add up to.
        said, expected: FP64 ``(6,)``: skip requests, failures, signatures, their squares, elements, weighted squares of
            copies: the sum, and what it is when all is well.
        disagreement: what it means that signatures differ.
    """

    report: Tensor
    skip: Tensor
    group_squares: Tensor
    group_bad: Tensor
    ranks: Ranks
    elements: int
    said: Tensor
    expected: Tensor
    disagreement: str = _ANOTHER_STEP

    def check(self) -> None:
        """Raise :class:`InvalidState` on every rank where ``skip`` stands for an error; waits for the device."""
        requests, failures, *signatures, counted, _ = self.said.tolist()
        expected, size = self.expected.tolist(), self.ranks.size
        if failures > 0.0:
            raise InvalidState(
                f"{failures:.0f} of {size} ranks could not take this step; nothing was updated on this one. The error "
                "on that rank says why"
            )
        if signatures != expected[2:4]:
            raise InvalidState(self.disagreement.format(size=size))
        if requests > 0.0:  # a rank that is told to skip need not look at its gradients
            return
        if abs(counted - expected[4]) > _slack(self.elements, size):
            raise InvalidState(
                f"the parts of the parameters on all {size} ranks add up to {counted / size:.15g} elements, the "
                f"parameters have {self.elements}: they do not live on the same ranks (pipeline stages?). Give each "
                "set of ranks a mesh of its own, or use check_finite=False and max_grad_norm=None"
            )
        if self.skip.item() > 0.0:
            raise InvalidState(
                f"gradients of plain tensors, or of DTensors on fewer than all {size} ranks, count as copies of each "
                "other, but have different norms on different ranks; nothing was updated. Average them over the ranks "
                "if they are copies; tell ruda_torch.mark_distinct if each rank has parameters of its own (experts)"
            )

    def group_norms(self) -> tuple[float, ...]:
        """The L2 norm of each group; infinity where something is not finite."""
        pairs = zip(self.group_bad.tolist(), self.group_squares.tolist(), strict=True)
        return tuple(math.inf if bad > 0.0 else math.sqrt(squares) for bad, squares in pairs)


def _slack(elements: int, size: int) -> float:
    """How far the sum of the parts may be from ``size * elements``: the rounding of sums beyond 2^53."""
    return size * (0.25 + elements * 2.0**-45)


class Reduction:
    """The one sum over ranks of a step; every rank takes part in it exactly once, come what may.

    Leaving the ``with`` block by an exception before the sum takes part with an error mark, so that the other ranks
    raise too instead of waiting for this one. Whether there is a sum is settled by parameters and settings alone.

    Args:
        ranks: the ranks that take part.
        groups: number of parameter groups.
        enabled: False: nothing has to be summed, and nobody takes part.
        settings: what else must be the same on all ranks, in words.
    """

    def __init__(self, ranks: Ranks, groups: int, *, enabled: bool, settings: str = "") -> None:
        self.ranks = ranks
        self.enabled = enabled and not ranks.outside
        self._groups = groups
        self._settings = settings
        self._signature = 0
        self._done = not self.enabled

    def __enter__(self) -> Reduction:
        if self.enabled and self.ranks.agreed != self._groups:
            self._signature = _signature(f"{self._groups} {self.ranks.structure}")
            self._exchange(room=_ROOM, disagreement=_ANOTHER_OPTIMIZER).check()
            self._done = False  # the sum itself is still to come
            self._signature = 0
            self.ranks.agreed = self._groups
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not self._done:
            self._exchange(failed=True)

    def abandon(self) -> None:
        """Take part for a rank that raised before its step began. What the others say is of no interest any more."""
        with contextlib.suppress(InvalidState), self:
            raise InvalidState

    def settle(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], where: Callable[[int], str]
    ) -> list[Tensor | None]:
        """This rank's part of each gradient, split as its parameter is.

        A gradient with other placements (``Partial``: each rank holds a summand) is redistributed, but only after all
        ranks have said that they see the same such gradients; for that alone a step waits for the device.

        Args:
            parameters, gradients: of all groups, None for a parameter without one.
            where: names a parameter by its position, for errors.
        """
        misplaced = misplaced_gradients(parameters, gradients, where)
        pairs = zip(parameters, gradients, strict=True)
        active = bytes(gradient is not None for parameter, gradient in pairs if self.ranks.counts(parameter))
        self._signature = _signature(f"{active!r} {misplaced} {self._settings}")
        if misplaced and self.enabled:
            self._exchange().check()
            self._done = False  # the sum itself is still to come
        return settled(parameters, gradients, misplaced)

    def run(
        self, parameters: Sequence[Tensor] | None, sums: Sequence[Tensor], skip: Tensor | float | None = None
    ) -> GlobalStatistics:
        """Sum over ranks, without waiting for the device.

        On a CPU call ``check()`` of the result before anything is updated. On an accelerator ``skip`` holds the update
        back on every rank; ``check()`` may come later, inside the next step's ``with`` block.

        Args:
            parameters: those that ``sums`` describe; None when there are no statistics.
            sums: from :meth:`Shares.sums`, one per device of this rank.
            skip: above 0, this rank was told that a gradient is not finite (``found_inf``): a number, or one element on
                any device.
        """
        elements, own = (0, 0.0) if parameters is None else self.ranks.elements(parameters)
        return self._exchange(elements, own, sums, skip)

    def _exchange(
        self,
        elements: int = 0,
        own: float = 0.0,
        sums: Sequence[Tensor] = (),
        skip: Tensor | float | None = None,
        *,
        failed: bool = False,
        room: int | None = None,
        disagreement: str = _ANOTHER_STEP,
    ) -> GlobalStatistics:
        ranks, h = self.ranks, self._signature
        g = self._groups if room is None else 0
        room = -(-max(g, 1) // _ROOM) * _ROOM if room is None else room
        told = float(skip > 0.0) if isinstance(skip, (int, float)) else 0.0
        numbers = ranks.constant(told, failed, h, h * h, own, *[0.0] * (1 + 2 * room)).clone()
        for part in sums:
            numbers[5 : 6 + 2 * g] += part.to(ranks.device)
        if isinstance(skip, torch.Tensor):
            numbers[:1] = (skip.detach().reshape(1) > 0).to(ranks.device)
        self._done = True  # also if this fails: there is no second try
        numbers = ranks.sum(numbers)
        said, squares, bad = numbers[:6], numbers[6 : 6 + g] / ranks.size, (numbers[6 + g : 6 + 2 * g] > 0.0).double()
        any_bad = bad.any().double().reshape(1)
        # The signatures are equal if their sum and the sum of their squares are those of W times this rank's: then
        # the sum of (signature - h)^2 is zero. If they are not, no rank finds both.
        expected = ranks.constant(0.0, 0.0, ranks.size * h, ranks.size * h * h, ranks.size * elements, 0.0)
        total = squares.sum().reshape(1)
        # What is not finite is left out of the squares, so they need not be those of copies then.
        slack = total * (_COPIES_DIFFER * ranks.size) + any_bad * torch.finfo(torch.float64).max
        tolerance = torch.cat([ranks.constant(0.0, 0.0, 0.0, 0.0, _slack(elements, ranks.size)), slack])
        return GlobalStatistics(
            report=torch.cat([any_bad, ranks.constant(1.0), total]),
            skip=((said - expected).abs() > tolerance).any().float().reshape(1),
            group_squares=squares,
            group_bad=bad,
            ranks=ranks,
            elements=elements,
            said=said,
            expected=expected,
            disagreement=disagreement,
        )


def _signature(text: str) -> int:
    return zlib.crc32(text.encode()) % 2**_SIGNATURE_BITS
