"""What of an optimizer changes from step to step, where all that stands for it finds it; and what is around a step."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.optim import optimizer

from .engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

    from .settings import Settings


class Live:
    """What changes while an optimizer lives, held in one object.

    Lightning and Fabric wrap an optimizer in an object of a subclass of its class, which finds the attributes through
    ``__getattr__`` or in a copy of ``__dict__``. Either way it finds this object, so that what it reads is what the
    optimizer does, and what is assigned through it reaches the optimizer.
    """

    def __init__(self, owner: Optimizer, settings: Settings) -> None:
        self._owner = weakref.ref(owner)
        self.settings = settings
        self.engine = Engine(settings)
        self.begun = False  # whether the engine took over the step; see :func:`around_step`
        self.state_shown = True
        self.tensors_shared = True  # by a state dict: the tensors, not the dicts that hold them
        self.follow(owner.__dict__.get("param_groups", ()))

    def follow(self, groups: Iterable[dict[str, Any]]) -> None:
        """Note which parameters a compiled graph may name by their position. The lists are the groups' own."""
        groups = list(groups)
        self.engine.lists = [group["params"] for group in groups]
        self.parameter_ids = [id(parameter) for group in groups for parameter in group["params"]]

    def change(self, settings: Settings) -> None:
        self.settings = settings
        self.engine.configure(settings)

    @property
    def owner(self) -> Optimizer:
        owner = self._owner()
        assert owner is not None  # a wrapper holds what it wraps
        return owner


def around_step(func: Callable[..., Any], observed: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, the step of :class:`ruda_torch.AdamW`, through ``observed`` where a hook or a profiler wants to see it.

    What raises before the engine takes over, a hook or the closure, is told the ranks that would wait for this one.
    """

    @functools.wraps(func)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = func
        if (
            profiler._is_profiler_enabled
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or optimizer._global_optimizer_pre_hooks
            or optimizer._global_optimizer_post_hooks
        ):
            run = observed
        if torch.compiler.is_compiling():  # which does not go on after a try block that it had to leave
            return run(self, *args, **kwargs)
        live = self._live
        live.begun = False
        try:
            return run(self, *args, **kwargs)
        except Exception:
            if self._fused_step and not live.begun:
                live.engine.abandon(self.param_groups, getattr(self, "found_inf", None))
            raise

    return step
