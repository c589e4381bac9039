"""One cell of the benchmark's table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import protocol
from contestants import PEERS, Contestant
from shared_data import Data

if TYPE_CHECKING:
    import torch

    from workloads import Variant, Workload


def compare(
    workload: Workload,
    variant: Variant,
    peer: str,
    device: torch.device,
    settings: protocol.Settings,
    *,
    ours: str = "ours",
    gradient_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """One cell of the table. A peer that cannot run, or is wrong, gives its reason instead of numbers.

    Args:
        ours: who stands on our side, by its name in ``PEERS``; any but the class is named in the result.
        gradient_dtype: default: that of the parameters.
    """
    entry: dict[str, Any] = {"workload": workload.name, "variant": variant.name, "peer": peer}
    entry |= {} if ours == "ours" else {"ours": ours}
    for name in (ours, peer):
        obstacle = PEERS[name].obstacle(variant, device)
        if obstacle is not None:
            return {**entry, "status": "not run", "reason": obstacle}
    try:
        data = Data(workload, variant, device, gradient_dtype)
        own, other = (Contestant(PEERS[name], data, variant) for name in (ours, peer))
        result = protocol.measure(own, other, data, settings)
    except protocol.Mismatch as error:
        return {**entry, "status": "mismatch", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - a peer may fail in any way of its own, and the others go on
        return {**entry, "status": "failed", "reason": f"{type(error).__name__}: {error}"}
    status = "measured" if result.kept else "too noisy"
    reason = {} if result.kept else {"reason": "other processes used the machine during every round"}
    return {**entry, "status": status, **reason, **result.as_dict()}
