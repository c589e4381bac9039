"""Optimizers side by side: ruda_torch.AdamW, torch's AdamW in FP64, and the derived bound between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cases import Case, Follower, as_array, check, compare, round_to
from kernel_runs import same_bits

import ruda_torch
from ruda_optim.fused_adamw import AdamWOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

STRONG = {"lr": 1e-2, "weight_decay": 0.1}
SHAPES = ((3, 5), (1000,), (), (2, 0), (1, 7, 1))


def value(number: float | Tensor) -> float:
    return float(number)


def options_of(group: dict[str, Any]) -> AdamWOptions:
    """A torch parameter group's hyperparameters."""
    beta1, beta2 = map(value, group["betas"])
    return AdamWOptions(
        value(group["lr"]),
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def gradient_for(shape: Sequence[int], seed: object, dtype: str = "float32") -> np.ndarray:
    """Magnitudes from 1e-3 to 10, values of ``dtype``."""
    random = np.random.default_rng(seed)
    return round_to(random.standard_normal(shape) * 10.0 ** random.uniform(-3, 1, shape), dtype)


def bits_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of every parameter and state tensor, in order."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [tensor.detach().clone() for tensor in (parameter, *state.values()) if torch.is_tensor(tensor)]
    return found


def assert_same(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    """Parameters and state agree bit for bit."""
    ours, theirs = bits_of(left), bits_of(right)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert same_bits(one, other)


class Twins:
    """The same groups of parameters under ruda_torch.AdamW (FP32) and torch.optim.AdamW (FP64).

    Args:
        groups: ``(shapes, hyperparameters)`` per parameter group.
        settings: passed to both optimizers.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[tuple[int, ...]], dict[str, Any]]], **settings: Any) -> None:
        self.seed = 0
        self.followers: dict[Tensor, Follower] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.largest: dict[tuple[Tensor, str], np.ndarray] = {}
        both = [self.new_group(shapes, extra) for shapes, extra in groups]
        self.ours = ruda_torch.AdamW([ours for ours, _ in both], fused_step=True, **settings)
        self.theirs = torch.optim.AdamW([theirs for _, theirs in both], foreach=False, **settings)

    def new_group(self, shapes: Sequence[tuple[int, ...]], extra: dict[str, Any]) -> tuple[dict, dict]:
        """A group for each optimizer, for their constructors or ``add_param_group``."""
        pairs = []
        for shape in shapes:
            start = round_to(np.random.default_rng(len(self.pairs)).standard_normal(shape), "float32")
            ours = torch.nn.Parameter(torch.from_numpy(start.copy()))
            theirs = torch.nn.Parameter(torch.from_numpy(start.astype(np.float64)))
            self.followers[theirs] = Follower(Case(f"parameter {len(self.pairs)}", tuple(shape)), start)
            self.largest[theirs, "parameter"] = np.abs(start.astype(np.float64))
            pairs.append((ours, theirs))
            self.pairs.append(pairs[-1])
        return {"params": [o for o, _ in pairs], **extra}, {"params": [t for _, t in pairs], **extra}

    def backward(self, active: Sequence[int] | None = None) -> None:
        """New gradients for the parameters at the positions ``active`` (all of them by default), None for the rest."""
        self.seed += 1
        for index, (ours, theirs) in enumerate(self.pairs):
            ours.grad = theirs.grad = None
            if (active is None or index in active) and ours.requires_grad:
                gradient = gradient_for(ours.shape, (self.seed, index))
                ours.grad = torch.from_numpy(gradient.copy())
                theirs.grad = torch.from_numpy(gradient.astype(np.float64))

    def step(self, active: Sequence[int] | None = None) -> None:
        """Gradients, one step of both, and the comparison."""
        self.backward(active)
        self.ours.step()
        self.theirs.step()
        self.compare()

    def compare(self) -> None:
        """After a step: every element within the bound of the reference, and the reference torch's to FP64 rounding."""
        for group in self.theirs.param_groups:
            for theirs in group["params"]:
                ours = next(one for one, other in self.pairs if other is theirs)
                if theirs.grad is None:
                    continue
                follower = self.followers[theirs]
                want = follower.step(as_array(theirs.grad), options_of(group))
                name = follower.case.name
                found, torchs = self.ours.state[ours], self.theirs.state[theirs]
                keys = [key for key in want.values if key != "parameter"]
                # Two correct FP64 implementations: some 20 roundings per step, each relative to a value that the
                # element has had, or is about to have.
                for key, tensor in (("parameter", theirs), *((key, torchs[key]) for key in keys)):
                    largest = np.maximum(self.largest.get((theirs, key), 0.0), np.abs(want.values[key]))
                    self.largest[theirs, key] = largest
                    bound = 20 * 2.0**-53 * want.step * largest
                    compare(f"{name}, {key}, torch in FP64", tensor, want.values[key], bound)
                if follower.parameter.size:
                    check(follower.case, want, {"parameter": ours, **{key: found[key] for key in keys}})
                assert found["step"] == torchs["step"] == want.step


def model() -> torch.nn.Module:
    """A small network with weights, biases and normalization."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9), torch.nn.Tanh(), torch.nn.Linear(9, 4))


def backward(net: torch.nn.Module, seed: int) -> torch.Tensor:
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    loss = net(inputs).square().sum()
    loss.backward()
    return loss


def groups() -> Twins:
    """Groups that differ in every hyperparameter, two of them without elements."""
    return Twins(
        [
            (SHAPES, {}),
            ([], {"lr": 0.5}),
            ([(40, 40), (3,)], {"lr": 3e-3, "betas": (0.7, 0.9), "weight_decay": 0.0}),
            ([(65,)], {"amsgrad": True, "eps": 1e-4}),
            ([(0,)], {}),
            ([(9, 2)], {"maximize": True, "amsgrad": True, "lr": torch.tensor(0.02, dtype=torch.float64)}),
        ],
        **STRONG,
    )
