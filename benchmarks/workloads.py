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
        variants, peers: names of what is measured unless the command line says otherwise; None: all.
    """

    name: str
    title: str
    shapes: tuple[tuple[int, ...], ...]
    streams: bool = False
    variants: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None

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


def ppo_shapes(observations: int = 8, actions: int = 4, width: int = 64) -> tuple[tuple[int, ...], ...]:
    """What stable-baselines3's MlpPolicy makes for LunarLander: two bodies of two layers, policy head, value head."""
    body = ((width, observations), (width,), (width, width), (width,))
    return (*body, *body, (actions, width), (actions,), (1, width), (1,))


# A step so small that it is all overhead, as its users call it: torch as it comes, and torch as fast as it goes.
SMALL: dict[str, tuple[str, ...]] = {
    "variants": ("plain", "checked", "clip"),
    "peers": ("torch-default", "torch-fused", "functional"),
}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt2-124m", "GPT-2 124M (148 tensors)", gpt2_shapes(), streams=True),
        Workload("2000x256", "2,000 tensors of 256", ((256,),) * 2000),
        Workload("20000x16", "20,000 tensors of 16", ((16,),) * 20000),
        Workload("64m", "one tensor of 64M", ((8192, 8192),), streams=True),
        Workload("ppo", "PPO policy and value (12 tensors, 9,797 elements)", ppo_shapes(), **SMALL),
        Workload("64", "one tensor of 64 elements", ((64,),), **SMALL),
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
        split: the master is split: the parameter and 16 more bits, which only ours have.
        check_finite: our step looks for NaN and infinity although its peers do not.
    """

    name: str
    title: str
    amsgrad: bool = False
    max_norm: float | None = None
    scale: float | None = None
    half: bool = False
    check_finite: bool = False
    split: bool = False

    @property
    def bytes_per_element(self) -> int:
        """:meth:`bytes_with` gradients of the parameters' dtype."""
        return self.bytes_with(2 if self.half else 4)

    def bytes_with(self, gradient_bytes: int) -> int:
        """What a step must move at least, per element, with gradients of so many bytes.

        Each array is read once, and written once if it changes: FP32 parameter or master and moments. Beside an FP32
        master the half copy is written; of a split one both halves are read and written. Gradients are read twice where
        their norm, or a look at all of them, comes first.
        """
        passes = 2 if self.check_finite or self.max_norm is not None else 1
        return 24 + 8 * self.amsgrad + 2 * self.half - 2 * self.split + passes * gradient_bytes


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", "plain FP32"),
        Variant("checked", "plain FP32; ours also checks for NaN and infinity", check_finite=True),
        Variant("amsgrad", "AMSGrad", amsgrad=True),
        Variant("clip", "clip to norm 1", max_norm=MAX_NORM, check_finite=True),
        Variant("unscale-clip", "unscale, clip to norm 1", max_norm=MAX_NORM, scale=SCALE, check_finite=True),
        Variant("bf16", "BF16 with FP32 master", half=True),
        Variant("bf16-split", "BF16 with split master", half=True, split=True),
        Variant("bf16-clip", "BF16 with FP32 master, clip to norm 1", max_norm=MAX_NORM, half=True, check_finite=True),
    )
}
