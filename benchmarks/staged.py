"""The staged baseline: AdamW as four kernels per tensor (five with AMSGrad), for benchmarks only.

Each stage is a plain torch expression that torch.compile turns into one kernel: first moment, second moment, [maximum,]
denominator, parameter. They move 12 + 12 [+ 12] + 8 + 16 bytes per element, 48 in all, 60 with AMSGrad; the fused step
moves 28 and 36.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor


def _first_moment(m: Tensor, g: Tensor, weight: Tensor) -> None:
    m.copy_(m + weight * (g.float() - m))


def _second_moment(v: Tensor, g: Tensor, weight: Tensor) -> None:
    wide = g.float()
    v.copy_(v + weight * (wide * wide - v))


def _maximum(v_max: Tensor, v: Tensor) -> None:
    v_max.copy_(torch.maximum(v_max, v))


def _denominator(out: Tensor, v: Tensor, inverse_bias: Tensor, epsilon: Tensor) -> None:
    out.copy_((v * inverse_bias).sqrt() + epsilon)


def _parameter(p: Tensor, m: Tensor, denominator: Tensor, decay: Tensor, rate: Tensor) -> None:
    p.copy_(p - (decay * p + rate * m / denominator))


STAGES = (_first_moment, _second_moment, _maximum, _denominator, _parameter)


class StagedAdamW:
    """AdamW in stages, as far as a benchmark needs it: one group, FP32 parameters, every parameter has a gradient.

    Args:
        compiled: one kernel per stage through torch.compile. False runs the same expressions eagerly, in more kernels:
            for tests of the arithmetic.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        amsgrad: bool = False,
        compiled: bool = True,
    ) -> None:
        self._parameters = list(params)
        self._lr, self._betas, self._epsilon, self._decay = lr, betas, eps, weight_decay
        self._amsgrad = amsgrad
        self._steps = 0
        self._stages = [torch.compile(stage, fullgraph=True, dynamic=True) if compiled else stage for stage in STAGES]
        largest = max(parameter.numel() for parameter in self._parameters)
        self._scratch = torch.empty(largest, dtype=torch.float32, device=self._parameters[0].device)
        keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        self.state = {p: {key: torch.zeros_like(p, requires_grad=False) for key in keys} for p in self._parameters}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        self._steps += 1
        first_moment, second_moment, maximum, denominator, update = self._stages
        beta1, beta2 = self._betas
        # Scalars travel as tensors, so that a new value never compiles anything again.
        weight1, weight2, inverse_bias2, epsilon, decay, rate = torch.tensor(
            [
                1 - beta1,
                1 - beta2,
                1 / (1 - beta2**self._steps),
                self._epsilon,
                self._lr * self._decay,
                self._lr / (1 - beta1**self._steps),
            ],
            dtype=torch.float32,
        ).unbind()
        for parameter in self._parameters:
            # Without its gradient, whose dtype may be another: torch.compile does not take that.
            p, g = parameter.data.view(-1), parameter.grad.view(-1)
            m, v, *rest = (tensor.view(-1) for tensor in self.state[parameter].values())
            scratch = self._scratch[: p.numel()]
            first_moment(m, g, weight1)
            second_moment(v, g, weight2)
            for v_max in rest:
                maximum(v_max, v)
                v = v_max
            denominator(scratch, v, inverse_bias2, epsilon)
            update(p, m, scratch, decay, rate)


@contextlib.contextmanager
def cuda_compiler(name: str | None) -> Iterator[None]:
    """Choose the compiler of our CUDA kernels for a while; None leaves the choice as it is."""
    variable = "RUDA_CUDA_COMPILER"
    before = os.environ.get(variable)
    if name is not None:
        os.environ[variable] = name
    try:
        yield
    finally:
        if name is not None:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


def bench(
    device: str | torch.device,
    *,
    elements: int = 2**24,
    dtype: str = "float32",
    amsgrad: bool = False,
    compiler: str | None = None,
    iterations: int = 20,
    samples: int = 7,
    compiled: bool = True,
    max_foreign_load: float | None = None,
) -> dict[str, Any]:
    """The fused step against the staged baseline on one tensor.

    Args:
        device: where to run.
        elements: size of the tensor.
        dtype: of the gradient (``float32``, ``float16`` or ``bfloat16``); parameter and moments are FP32.
        amsgrad: five stages instead of four.
        compiler: ``nvrtc`` or ``ptx`` on NVIDIA; None: the default.
        iterations: steps per sample; results are compared after every one of them.
        samples: measured rounds.
        compiled: see :class:`StagedAdamW`.
        max_foreign_load: drop rounds in which other processes used more than this share of the CPUs.

    Returns:
        Plain values: the environment, the arguments, and per variant the median, minimum and maximum of wall
        milliseconds per step, with all rounds.

    Raises:
        protocol.Mismatch: the two disagree by more than rounding can explain.
    """
    import environment
    import protocol
    from contestants import PEERS, Contestant
    from workloads import Variant, Workload

    device = torch.device(device)
    variant = Variant("amsgrad" if amsgrad else "plain", "staged baseline", 36 if amsgrad else 28, amsgrad=amsgrad)
    workload = Workload("bench", f"one tensor of {elements}", ((elements,),), streams=elements >= 2**24)
    with cuda_compiler(compiler):
        data = protocol.Data(workload, variant, device, gradient_dtype=getattr(torch, dtype))
        pair = (
            Contestant(PEERS["ours"], data, variant),
            Contestant(PEERS["staged" if compiled else "staged-eager"], data, variant),
        )
        settings = protocol.Settings(rounds=samples, steps=iterations, max_foreign_load=max_foreign_load)
        result = protocol.measure(*pair, data, settings)
    return {
        "environment": environment.describe(device, environment.command_line("staged.py")),
        "arguments": {"elements": elements, "dtype": dtype, "amsgrad": amsgrad, "compiler": compiler,
                      "iterations": iterations, "samples": samples, "compiled": compiled},
        "launches per tensor": {"fused": 1, "staged": 4 + amsgrad},
        "bytes per element": {"fused": 36 if amsgrad else 28, "staged": 60 if amsgrad else 48},
        "fused": protocol.spread([r.ours_ms for r in result.kept]),
        "staged": protocol.spread([r.peer_ms for r in result.kept]),
        **result.as_dict(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The fused step against the staged baseline, as JSON.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--amsgrad", action="store_true")
    parser.add_argument("--compiler", choices=("nvrtc", "ptx"))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--samples", type=int, default=7)
    print(json.dumps(bench(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
