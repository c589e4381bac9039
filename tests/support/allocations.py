"""What a call allocates in tensor memory, and which operators it calls: recorded by torch's profiler, not assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable


class Recorded(NamedTuple):
    result: Any
    allocations: list[int]
    """Bytes of every allocation, freed again or not, in order."""
    operators: list[str]
    """Names of all operators, such as ``ruda_optim::adamw_scaled``."""

    def count(self, operator: str) -> int:
        return self.operators.count(f"ruda_optim::{operator}")


def record(call: Callable[[], Any]) -> Recorded:
    """Run ``call`` under the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.events()
    allocations = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return Recorded(result, allocations, [event.name() for event in events if event.name() != "[memory]"])
