"""What is measured: sets of tensor shapes, and what a step does besides the update."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
SCALE = 65536.0


@dataclass(frozen=True)
class Workload:
    """A named set of parameter shapes.

    Attributes:
        streams: the arrays are far larger than any cache, so that comparing with memory bandwidth means something.
    """

    name: str
    title: str
    shapes: tuple[tuple[int, ...], ...]
    streams: bool = False

    @property
    def elements(self) -> int:
        return sum(map(prod, self.shapes))


def gpt2_shapes(
    layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024
) -> tuple[tuple[int, ...], ...]:
    """Parameter shapes of GPT-2 in the order of its modules; the output head is the token embedding."""
    shapes: list[tuple[int, ...]] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,)]  # layer norm
        shapes += [(width, 3 * width), (3 * width,), (width, width), (width,)]  # attention
        shapes += [(width,), (width,)]  # layer norm
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]  # feed-forward
    return (*shapes, (width,), (width,))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt2-124m", "GPT-2 124M (148 tensors)", gpt2_shapes(), streams=True),
        Workload("2000x256", "2,000 tensors of 256", ((256,),) * 2000),
        Workload("20000x16", "20,000 tensors of 16", ((16,),) * 20000),
        Workload("64m", "one tensor of 64M", ((8192, 8192),), streams=True),
    )
}
QUICK_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny-gpt", "tiny GPT (28 tensors)", gpt2_shapes(layers=2, width=16, vocabulary=64, context=16)),
        Workload("50x16", "50 tensors of 16", ((16,),) * 50),
    )
}


@dataclass(frozen=True)
class Variant:
    """What one whole step does.

    Attributes:
        max_norm: gradients are clipped to this global norm.
        scale: gradients are stored multiplied by this and unscaled in the step, which also checks that they are finite.
        half: parameters and gradients are BF16, with an FP32 master; the step writes master and BF16 parameter.
        check_finite: our step looks for NaN and infinity although its peers do not.
        bytes_per_element: what a step must move at least: each array read once and written once if it changes;
            gradients twice where their norm comes first.
    """

    name: str
    title: str
    bytes_per_element: int
    amsgrad: bool = False
    max_norm: float | None = None
    scale: float | None = None
    half: bool = False
    check_finite: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", "plain FP32", 28),
        Variant("checked", "plain FP32; ours also checks for NaN and infinity", 32, check_finite=True),
        Variant("amsgrad", "AMSGrad", 36, amsgrad=True),
        Variant("clip", "clip to norm 1", 32, max_norm=MAX_NORM, check_finite=True),
        Variant("unscale-clip", "unscale, clip to norm 1", 32, max_norm=MAX_NORM, scale=SCALE, check_finite=True),
        Variant("bf16", "BF16 with FP32 master", 28, half=True),
        Variant("bf16-clip", "BF16 with FP32 master, clip to norm 1", 30, max_norm=MAX_NORM, half=True,
                check_finite=True),
    )
}  # fmt: skip
