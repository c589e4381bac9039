"""The fused step under ``torch.compile``: one operator in the graph, whatever the optimizer holds.

Eager steps call the engine directly. Inside a compiled function the step becomes ``ruda_torch::adamw_step``, which
names its optimizer by a number and receives the active parameters and their gradients; hyperparameters are read when
it runs, so that a new learning rate compiles nothing anew. Moments and step counters belong to the optimizer alone:
no other operator of the graph may touch them, and the graph does not mention them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from ruda_optim.fused_adamw import InvalidState

from . import sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .adamw import AdamW

_optimizers: weakref.WeakValueDictionary[int, AdamW] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

_LIBRARY = torch.library.Library("ruda_torch", "DEF")
_SCHEMA = "adamw_step(int optimizer, int[] positions, Tensor(a!)[] params, Tensor[] grads) -> ()"
# Not for a CUDA graph that torch.compile makes by itself: the host looks at hyperparameters and tensors at every step.
_LIBRARY.define(_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))


def register(optimizer: AdamW) -> int:
    """A number that names ``optimizer`` in compiled graphs for as long as it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


def step(number: int, parameters: Sequence[Tensor], grad_scale: float | Tensor | None) -> None:
    """Trace one step of optimizer ``number``. ``parameters`` are those of all groups, in order.

    DTensors leave the graph for their step: an operator over them would need a rule for how it splits. So does a step
    with a loss scale of its own: the operator would have to take a number or a tensor.
    """
    if grad_scale is not None or any(map(sharding.crosses_ranks, parameters)):
        _eager_step(number, grad_scale)
        return
    positions = [position for position, parameter in enumerate(parameters) if parameter.grad is not None]
    active = [parameters[position] for position in positions]
    if active:
        gradients = [parameter.grad for parameter in active]
        torch.ops.ruda_torch.adamw_step(number, positions, active, gradients)


# As torch.optim does: torch.compiler.disable would import the compiler together with this module.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _eager_step(number: int, grad_scale: float | Tensor | None) -> None:
    _optimizers[number]._run(grad_scale=grad_scale)


@torch.library.impl(_LIBRARY, "adamw_step", "CompositeExplicitAutograd")
def _adamw_step(number: int, positions: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    optimizer = _optimizers.get(number)
    if optimizer is None:
        raise InvalidState(
            f"ruda_torch::adamw_step got optimizer number {number}, which no longer exists; keep the optimizer alive "
            "as long as the compiled function that steps it"
        )
    optimizer.run_compiled(positions, params, grads)


@torch.library.register_fake("ruda_torch::adamw_step", lib=_LIBRARY)
def _(number: int, positions: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The step returns nothing and changes no shape."""
