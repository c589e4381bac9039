"""What of an optimizer changes from step to step, where every object that stands for the optimizer finds it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        self.begun = False  # whether the engine took over the step; see ``AdamW.profile_hook_step``
        self.state_shown = True
        self.tensors_shared = True  # by a state dict: the tensors, not the dicts that hold them
        self.follow(owner.__dict__.get("param_groups", ()))

    def follow(self, groups: Iterable[dict[str, Any]]) -> None:
        """Note which parameters a compiled graph may name by their position. The lists are the groups' own."""
        groups = list(groups)
        self.lists = [group["params"] for group in groups]
        self.parameter_ids = [id(parameter) for group in groups for parameter in group["params"]]

    def change(self, settings: Settings) -> None:
        self.settings = settings
        self.engine.configure(settings)

    @property
    def owner(self) -> Optimizer:
        owner = self._owner()
        assert owner is not None  # a wrapper holds what it wraps
        return owner
