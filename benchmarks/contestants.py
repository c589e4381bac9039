"""The optimizers that are compared, each used as its users use it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import ruda_torch
from out_of_place import OutOfPlaceAdamW
from ruda_optim.fused_adamw import AdamWOptions, GradientGuardOptions
from ruda_torch import masters
from ruda_torch.moments import unpacked
from staged import StagedAdamW
from workloads import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shared_data import Data
    from workloads import Variant

HYPERPARAMETERS: dict[str, Any] = {
    "lr": LEARNING_RATE,
    "betas": BETAS,
    "eps": EPSILON,
    "weight_decay": WEIGHT_DECAY,
}
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"}
PACKED = {"packed": "packed_moments", "max_exp_avg_sq": "max_exp_avg_sq"}


@dataclass(frozen=True)
class Peer:
    """One optimizer: how to make it, where it keeps its moments, what it cannot do.

    Attributes:
        module: what it is imported from; not found means not installed.
        make: ``(parameters, variant) -> optimizer``.
        moments: state keys under our names.
        amsgrad: it has AMSGrad.
        bare: it is no optimizer of torch's kind, which could be scaled or have masters beside it.
        clips: by itself, inside its step.
        devices: torch device types it runs on.
        fp32_coefficients: it forms 1 - beta or 1 - beta^t in FP32, which the tolerance must allow for.
        debiased: its moments are stored divided by 1 - beta^t.
        form: how ours keeps its moments; all but "float32" round what they store.
    """

    name: str
    title: str
    module: str
    make: Callable[[list[Tensor], Variant], Any]
    moments: dict[str, str]
    amsgrad: bool = False
    bare: bool = False
    clips: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    fp32_coefficients: bool = False
    debiased: bool = False
    form: str | None = None

    def obstacle(self, variant: Variant, device: torch.device) -> str | None:
        """Why this peer cannot run here, or None."""
        if device.type not in self.devices:
            return f"does not run on {device.type}"
        if variant.amsgrad and not self.amsgrad:
            return "has no AMSGrad"
        if variant.split and self.form is None:
            return "has no split masters"
        if self.bare and (variant.half or variant.scale is not None):
            return "takes FP32 parameters and no loss scale"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed (see benchmarks/requirements.txt)"
        return None


def _ours(form: str) -> Callable[[list[Tensor], Variant], Any]:
    def make(parameters: list[Tensor], variant: Variant) -> Any:
        return ruda_torch.AdamW(
            parameters, **HYPERPARAMETERS, amsgrad=variant.amsgrad, fused_step=True, max_grad_norm=variant.max_norm,
            check_finite=variant.check_finite, moments=form,
            **({"split_master": variant.split} if variant.half else {}),
        )  # fmt: skip

    return make


def _functional(parameters: list[Tensor], variant: Variant) -> OutOfPlaceAdamW:
    beta1, beta2 = BETAS
    options = AdamWOptions(LEARNING_RATE, beta1, beta2, EPSILON, WEIGHT_DECAY, variant.amsgrad)
    guard = GradientGuardOptions(variant.max_norm) if variant.check_finite else None
    return OutOfPlaceAdamW(parameters, options, guard)


def _torch(**implementation: bool) -> Callable[[list[Tensor], Variant], Any]:
    def make(parameters: list[Tensor], variant: Variant) -> Any:
        return torch.optim.AdamW(parameters, **HYPERPARAMETERS, amsgrad=variant.amsgrad, **implementation)

    return make


def _staged(compiled: bool) -> Callable[[list[Tensor], Variant], Any]:
    def make(parameters: list[Tensor], variant: Variant) -> Any:
        return StagedAdamW(parameters, **HYPERPARAMETERS, amsgrad=variant.amsgrad, compiled=compiled)

    return make


def deepspeed(parameters: list[Tensor], hyperparameters: dict[str, Any]) -> Any:
    """DeepSpeed's CPU optimizer, with decoupled weight decay."""
    # It compiles its operator on first use and looks for ninja on the path, where a virtual environment need not be.
    os.environ["PATH"] = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")))
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, **hyperparameters, adamw_mode=True)


def _deepspeed(parameters: list[Tensor], variant: Variant) -> Any:
    return deepspeed(parameters, HYPERPARAMETERS)


def _torchao(parameters: list[Tensor], variant: Variant) -> Any:
    from torchao.optim import _AdamW  # FP32 moments; the public classes quantize them, which is another result

    return _AdamW(parameters, **HYPERPARAMETERS, amsgrad=variant.amsgrad)


def _optimi(parameters: list[Tensor], variant: Variant) -> Any:
    import optimi

    return optimi.AdamW(parameters, **HYPERPARAMETERS)


def _bitsandbytes(parameters: list[Tensor], variant: Variant) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW32bit(parameters, **HYPERPARAMETERS)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "ruda_torch.AdamW", "ruda_torch", _ours("float32"), MOMENTS, amsgrad=True, clips=True,
             form="float32"),
        Peer("bfloat16", "ours, moments=bfloat16", "ruda_torch", _ours("bfloat16"), MOMENTS, amsgrad=True, clips=True,
             form="bfloat16"),
        Peer("packed16", "ours, moments=packed16", "ruda_torch", _ours("packed16"), PACKED, amsgrad=True, clips=True,
             form="packed16"),
        Peer("functional", "adamw_step, out of place", "ruda_optim", _functional, MOMENTS, amsgrad=True, bare=True,
             clips=True),
        Peer("torch-fused", "torch fused", "torch", _torch(fused=True), MOMENTS, amsgrad=True),
        Peer("torch-default", "torch default", "torch", _torch(), MOMENTS, amsgrad=True),
        Peer("torch-foreach", "torch foreach", "torch", _torch(foreach=True), MOMENTS, amsgrad=True),
        Peer("torch-loop", "torch for-loop", "torch", _torch(foreach=False, fused=False), MOMENTS, amsgrad=True),
        Peer("deepspeed", "DeepSpeedCPUAdam", "deepspeed", _deepspeed, MOMENTS, devices=("cpu",),
             fp32_coefficients=True),
        Peer("torchao", "torchao", "torchao", _torchao, MOMENTS, amsgrad=True, fp32_coefficients=True),
        Peer("optimi", "optimi", "optimi", _optimi, MOMENTS, fp32_coefficients=True, debiased=True),
        Peer("bitsandbytes", "bitsandbytes", "bitsandbytes", _bitsandbytes,
             {"exp_avg": "state1", "exp_avg_sq": "state2"}, fp32_coefficients=True),
        Peer("staged", "staged (compiled)", "torch", _staged(True), MOMENTS, amsgrad=True, bare=True),
        Peer("staged-eager", "staged (eager)", "torch", _staged(False), MOMENTS, amsgrad=True, bare=True),
    )
}  # fmt: skip
DEFAULT_PEERS = tuple(name for name in PEERS if name not in ("ours", "torch-default", "staged-eager"))


class Contestant:
    """One optimizer with parameters of its own, over the shared gradients, and its whole step.

    Ours does everything in its step, with ``ruda_torch.GradScaler`` where gradients are scaled. A peer unscales with
    torch's GradScaler, clips with torch's ``clip_grad_norm_``, and keeps FP32 masters of BF16 parameters beside the
    model, casting gradients in and parameters out, as training loops do.
    """

    def __init__(self, peer: Peer, data: Data, variant: Variant) -> None:
        self.name = peer.name
        self.fp32_coefficients = peer.fp32_coefficients
        self.steps = 0
        self._peer, self._variant, self._gradients = peer, variant, data.gradients
        self._inside = peer.clips
        self._ours = peer.form is not None
        self.rounds = peer.form in ("bfloat16", "packed16")
        self._model = data.parameters()
        self._masters: list[Tensor] = self._model
        if variant.half and not self._ours:
            self._masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in self._model]
            for master in self._masters:
                master.grad = torch.empty_like(master)
        self.optimizer = peer.make(self._masters, variant)
        self._scaler = None
        if variant.scale is not None:
            scaler = ruda_torch.GradScaler if self._ours else torch.amp.GradScaler
            self._scaler = scaler(data.device.type, init_scale=variant.scale, growth_interval=10**9)
            self._scaler.scale(torch.ones((), device=data.device))  # makes the scale, which a training loop's loss does
        self._norm: Tensor | None = None

    def step(self) -> None:
        """One whole step: what lies between ``backward()`` and the next forward pass."""
        self.steps += 1
        casts = self._masters is not self._model
        if casts:
            torch._foreach_copy_([master.grad for master in self._masters], self._gradients)
        if not self._inside and self._variant.max_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            self._norm = torch.nn.utils.clip_grad_norm_(self._masters, self._variant.max_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        if casts:
            with torch.no_grad():
                torch._foreach_copy_(self._model, self._masters)

    def norm(self) -> float:
        """The gradient norm that the last step clipped by."""
        return self.optimizer.last_grad_norm if self._norm is None else float(self._norm)

    def fields(self) -> dict[str, list[Tensor]]:
        """Parameters (FP32), moments and half copies after a step, in the formula's terms."""
        found = self._memory()
        if self.rounds:
            words = found.pop("packed", None)
            pairs = [] if words is None else [unpacked(tensor) for tensor in words]
            found |= {"exp_avg": [m for m, _ in pairs], "exp_avg_sq": [v for _, v in pairs]} if pairs else {}
            found |= {key: [t.float() for t in found[key]] for key in MOMENTS if key in found}
        if self._variant.split:
            pair = zip(found["copy"], found.pop("remainder"), strict=True)
            found["parameter"] = [masters.joined(copy, remainder) for copy, remainder in pair]
        if self._peer.debiased:
            for key, beta in zip(("exp_avg", "exp_avg_sq"), BETAS, strict=True):
                found[key] = torch._foreach_mul(found[key], 1 - beta**self.steps)
        return found

    def rounding(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """How far what is stored may lie from the new moments ``own``: a whole step of the dithered code."""
        if not self.rounds:
            return {}
        m, v = own["exp_avg"].abs(), own["exp_avg_sq"]
        if self._peer.form == "bfloat16":
            found = {"exp_avg": m * 2.0**-7, "exp_avg_sq": v * 2.0**-7}
        else:  # an eighth of m, or of a sixteenth of the root of the stored v, which lies up to a quarter above v
            found = {"exp_avg": (m + (1.25 * v).sqrt() / 16) / 8, "exp_avg_sq": v / 4 + 2.0**-91}
        found = {key: bound * (1 + 2.0**-10) for key, bound in found.items()}  # the other FP32 m and v end elsewhere
        return found | {"max_exp_avg_sq": found["exp_avg_sq"]} if self._variant.amsgrad else found

    @torch.no_grad()
    def take_state_of(self, other: Contestant) -> None:
        """Continue from another contestant's parameters and moments."""
        if self.steps != other.steps:
            raise AssertionError(f"{self.name} has made {self.steps} steps, {other.name} {other.steps}")
        values = other.fields() | other._memory()  # a split master's halves as they are
        if other.rounds:
            values |= {key: value for key, value in other.fields().items() if key in MOMENTS}
        for key, memory in self._memory().items():
            torch._foreach_copy_(memory, values[key])
            if self._peer.debiased and key in self._peer.moments:
                beta = BETAS[0] if key == "exp_avg" else BETAS[1]
                torch._foreach_div_(memory, 1 - beta**self.steps)

    def _memory(self) -> dict[str, list[Tensor]]:
        # Past the attribute: a training loop does not ask for the state, and once somebody did, or took a state dict,
        # our steps look whether it was changed (see AdamW.state).
        state = vars(self.optimizer)["state"] if self._ours else self.optimizer.state
        found = {
            name: [state[parameter][key] for parameter in self._masters]
            for name, key in self._peer.moments.items()
            if name != "max_exp_avg_sq" or self._variant.amsgrad
        }
        if self._variant.half:
            found["copy"] = [parameter.detach() for parameter in self._model]
        if self._variant.split:
            return found | {"remainder": [state[parameter]["master_remainder"] for parameter in self._model]}
        if self._variant.half and self._ours:
            return found | {"parameter": [state[parameter]["master"] for parameter in self._model]}
        return found | {"parameter": [parameter.detach() for parameter in self._masters]}
