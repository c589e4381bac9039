"""How two optimizers are timed against each other, and how every timed step is proved right.

A round draws fresh gradients, gives both sides the same parameters and moments, restores the gradients before each side
(clipping rewrites them), times one whole step of each, and compares parameters and moments. The order alternates from
step to step. Rounds during which other processes used the machine are dropped.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from environment import ForeignLoad
from workloads import BETAS, EPSILON, LEARNING_RATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from contestants import Contestant
    from shared_data import Data
    from workloads import Variant

U = 2.0**-24  # FP32 unit roundoff
TINY = 2.0**-126  # below it FP32 products lose precision
NORM_TOLERANCE = 1e-3
"""Two FP32 norms of 10^8 elements may differ; more than this relative difference is an error, not rounding."""
CHUNK = 2**18  # elements compared at a time, so that temporaries stay in cache


class Mismatch(AssertionError):
    """Two optimizers disagree by more than rounding can explain, so neither time is worth anything."""


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: kept rounds wanted; at most three times as many are tried.
        steps: steps per round; None: as many as fill half a second, at most ten, or 200 of steps under a millisecond.
        max_foreign_load: a round is dropped when other processes used more than this share of all CPU time during it;
            None keeps every round.
    """

    rounds: int = 15
    steps: int | None = None
    max_foreign_load: float | None = 0.05


@dataclass(frozen=True)
class Round:
    """Milliseconds are means over the round's steps."""

    ours_ms: float
    peer_ms: float
    stream_gb_s: float | None
    foreign_load: float | None
    kept: bool


@dataclass
class Result:
    """All rounds of one comparison.

    Attributes:
        bytes_per_element: what each step must move at least.
        worst: per array, the largest difference seen, as a share of the tolerance.
        norm_difference: largest relative difference of the two gradient norms; 0 without clipping.
    """

    variant: Variant
    elements: int
    bytes_per_element: int
    steps: int
    rounds: list[Round] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    norm_difference: float = 0.0

    @property
    def kept(self) -> list[Round]:
        return [r for r in self.rounds if r.kept]

    def as_dict(self) -> dict[str, Any]:
        kept = self.kept
        found: dict[str, Any] = {
            "bytes per element": self.bytes_per_element,
            "steps per round": self.steps,
            "rounds kept": len(kept),
            "rounds dropped": len(self.rounds) - len(kept),
            "worst difference / tolerance": self.worst,
            "gradient norms differ by": self.norm_difference,
        }
        if kept:
            found["ratio"] = spread([r.peer_ms / r.ours_ms for r in kept])
            found["ours ms"] = spread([r.ours_ms for r in kept])
            found["peer ms"] = spread([r.peer_ms for r in kept])
        if kept and kept[0].stream_gb_s is not None:
            found["ours t/limit"] = spread([r.ours_ms / self.limit_ms(r) for r in kept])
            found["peer t/limit"] = spread([r.peer_ms / self.limit_ms(r) for r in kept])
            found["stream GB/s"] = spread([r.stream_gb_s for r in kept])
        found["rounds"] = [asdict(r) for r in self.rounds]
        return found

    def limit_ms(self, round_: Round) -> float:
        """The time that the least possible traffic takes at the stream rate of the same round."""
        return self.bytes_per_element * self.elements / (round_.stream_gb_s * 1e6)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 20th and 80th percentile, minimum and maximum; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p20": ordered[round(0.2 * last)],
        "p80": ordered[round(0.8 * last)],
        "min": ordered[0],
        "max": ordered[-1],
    }


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed_step(contestant: Contestant, device: torch.device) -> float:
    """Milliseconds of one whole step, everything the device does included."""
    synchronize(device)
    start = time.perf_counter()
    contestant.step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def stream_rate(buffer: Tensor) -> float:
    """GB/s of an in-place multiplication: each element read and written once."""
    times = []
    for _ in range(3):
        synchronize(buffer.device)
        start = time.perf_counter()
        buffer.mul_(1.0)
        synchronize(buffer.device)
        times.append(time.perf_counter() - start)
    return 2 * buffer.element_size() * buffer.numel() / statistics.median(times) / 1e9


def measure(ours: Contestant, peer: Contestant, data: Data, settings: Settings) -> Result:
    """Warm both sides, then run rounds until enough are kept.

    Raises:
        Mismatch: the results of a timed step differ.
    """
    data.draw()
    warm_ms = 0.0
    for contestant in (ours, peer):
        for _ in range(3):  # the first step allocates state and may compile
            data.restore()
            last = timed_step(contestant, data.device)
        warm_ms += last
    most = 10 if warm_ms > 2 else 200  # a single step of 50 us tells nothing
    steps = settings.steps or max(1, min(most, round(500 / warm_ms)))
    bytes_per_element = data.variant.bytes_with(data.gradient_dtype.itemsize)
    result = Result(data.variant, data.workload.elements, bytes_per_element, steps)
    buffer = torch.ones(min(data.workload.elements, 2**26), device=data.device) if data.workload.streams else None
    load = ForeignLoad()
    order = [ours, peer]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3 * settings.rounds):
            gc.collect()
            load.start()
            total = {ours: 0.0, peer: 0.0}
            for _ in range(steps):
                data.draw()
                # What is rounded cannot hold the other's moments; the other can hold what is rounded.
                (ours if peer.rounds else peer).take_state_of(peer if peer.rounds else ours)
                for contestant in order:
                    data.restore()
                    total[contestant] += timed_step(contestant, data.device)
                order.reverse()
                compare(ours, peer, data, result)
            rate = None if buffer is None else stream_rate(buffer)
            foreign = load.read()
            limit = settings.max_foreign_load
            kept = limit is None or foreign is None or foreign <= limit
            result.rounds.append(Round(total[ours] / steps, total[peer] / steps, rate, foreign, kept))
            if len(result.kept) >= settings.rounds:
                break
    finally:
        if collecting:
            gc.enable()
    return result


@torch.no_grad()
def compare(ours: Contestant, peer: Contestant, data: Data, result: Result) -> None:
    """Check one step that both sides made from the same state with the same gradients, element by element.

    Tolerances, to first order, for two FP32 implementations whose forms of the formula may differ:

    - second moment: a sum of two positive terms. Scale, clip and square round the gradient's term 7 times (with the
      relative difference c of the clip factors twice), coefficients, products and sums 5 times: 12 U v each side.
    - first moment: the same without the square, relative to M = (|m| + (1 - beta1) |g|) / beta1, which is at least
      |m_old| and covers cancellation: 14 U M each side, and c M.
    - update d = lr m_hat / (sqrt(v_hat) + eps): the error of m carried through, half the relative error of v, and at
      most 12 roundings each side. The maximum of AMSGrad is exact, so v_max behaves like v.
    - parameter: 4 roundings of |p| + |d| each side. A half copy adds half an ulp of BF16 (2^-8 relative) each side.
    - moments that are rounded where they are stored lie a step of their code further away; the parameter does not.
    - a peer that forms 1 - beta or 1 - beta^t in FP32 errs there by up to 4 U / (1 - beta), relative.
    """
    clip, norm_difference = 1.0, 0.0
    if data.variant.max_norm is not None:
        own, other = ours.norm(), peer.norm()
        norm_difference = abs(own - other) / own
        if not norm_difference <= NORM_TOLERANCE:
            raise Mismatch(f"{peer.name} has gradient norm {other}, {ours.name} has {own}")
        clip = min(1.0, data.variant.max_norm / (own + 1e-6))
        result.norm_difference = max(result.norm_difference, norm_difference)
    factor = clip / (data.variant.scale or 1.0)
    beta1, beta2 = BETAS
    coefficient1, coefficient2 = (
        4 * U / (1 - beta) if peer.fp32_coefficients or ours.fp32_coefficients else 0.0 for beta in BETAS
    )
    inverse_bias1, inverse_bias2 = 1 / (1 - beta1**ours.steps), 1 / (1 - beta2**ours.steps)
    second_order = 1 + 2 * norm_difference
    relative_v = 24 * U + 2 * norm_difference * second_order + coefficient2
    relative_m = 28 * U + norm_difference * second_order + coefficient1
    own_fields, peer_fields = ours.fields(), peer.fields()
    for gradient, own, other in _chunks(data.source, own_fields, peer_fields):
        m, v = own["exp_avg"], own["exp_avg_sq"]
        v_used = own.get("max_exp_avg_sq", v)
        g = gradient.float().abs_().mul_(factor)
        tolerance = {"exp_avg": relative_m * (m.abs() + (1 - beta1) * g) / beta1 + TINY}
        for key in own.keys() & {"exp_avg_sq", "max_exp_avg_sq"}:
            tolerance[key] = relative_v * own[key] + TINY
        denominator = (v_used * inverse_bias2).sqrt_().add_(EPSILON)
        step_size = LEARNING_RATE * inverse_bias1 / denominator
        d = step_size * m.abs()
        p = own["parameter"].abs()
        tolerance["parameter"] = (
            8 * U * (p + d)
            + step_size * tolerance["exp_avg"]
            + d * (0.5 * relative_v + 24 * U + coefficient1 + coefficient2)
            + TINY
        )
        for key, bound in peer.rounding(own).items():
            tolerance[key] = tolerance[key] + bound
        if "copy" in own:
            tolerance["copy"] = tolerance["parameter"] + 2.0**-7 * p
        for key, bound in tolerance.items():
            worst = float((own[key].float() - other[key].float()).abs_().div_(bound).max())
            if not worst <= 1.0:  # also catches NaN
                raise Mismatch(
                    f"{key} of {peer.name} differs from {ours.name} by {worst:.3g} times the tolerance in the variant "
                    f"{data.variant.name} at step {ours.steps}"
                )
            result.worst[key] = max(result.worst.get(key, 0.0), worst)


def _chunks(
    source: Tensor, own: dict[str, list[Tensor]], other: dict[str, list[Tensor]]
) -> Iterator[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """The same elements of all arrays, flat, a cache-sized piece at a time; many small tensors are joined first."""
    sizes = [tensor.numel() for tensor in own["parameter"]]
    position = first = 0
    while first < len(sizes):
        last, count = first + 1, sizes[first]
        while last < len(sizes) and count + sizes[last] <= CHUNK:
            count += sizes[last]
            last += 1

        def flat(tensors: list[Tensor], span: slice = slice(first, last)) -> Tensor:
            parts = [tensor.detach().view(-1) for tensor in tensors[span]]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        a, b = ({key: flat(tensors) for key, tensors in fields.items()} for fields in (own, other))
        for begin in range(0, count, CHUNK):
            end = min(begin + CHUNK, count)
            yield (
                source[position + begin : position + end],
                {key: tensor[begin:end] for key, tensor in a.items()},
                {key: tensor[begin:end] for key, tensor in b.items()},
            )
        position += count
        first = last
