"""``torch.optim.AdamW`` with an opt-in fused step."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from ruda_optim.fused_adamw import InvalidState

from . import checkpoint, compiled
from .hyperparameters import check_arguments, check_new_group
from .live import Live, around_step
from .report import GradientReport, UpdateReport, update_report
from .settings import Settings, check_grad_scale, check_group_keys, check_served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim.optimizer import ParamsT, StateDict


class AdamW(torch.optim.AdamW):
    """AdamW / AMSGrad; with ``fused_step=True`` one kernel updates all parameters of all groups.

    Every tool that knows ``torch.optim.AdamW`` knows this class: parameter groups, state, schedulers and checkpoints
    keep torch's form. With ``fused_step=False`` (the default) it is torch's own optimizer.

    Args:
        params: parameters or parameter groups. The fused step takes FP32, FP16 and BF16 parameters of any layout; FP16
            parameters get an FP32 master, BF16 parameters 16 more bits each. A frozen parameter may be anything.
        lr: learning rate, float or one-element tensor, >= 0. Read at every step, like ``betas``. Default 1e-3.
        betas: decay of the two moments, each in [0, 1). Default (0.9, 0.999).
        eps: added outside the square root, > 0. Default 1e-8.
        weight_decay: decoupled, >= 0. Default 1e-2.
        amsgrad: divide by the running maximum of the uncorrected second moment. Default False.
        maximize: climb instead of descend. Default False.
        foreach: torch's, for ``fused_step=False`` only.
        fused: likewise.
        differentiable: likewise.
        capturable: torch's switch for CUDA graphs. The fused step is always fit for capture: nothing is read on the
            host during a step, and ``last_*`` wait for the device when they are read. Default False.
        fused_step: use the fused kernels. What they cannot do raises; nothing falls back. Default False.
        hierarchical_stats: merge gradient statistics in stages with bounded scratch (needs ``fused_step``). Recommended
            on accelerators. Default False.
        max_grad_norm: clip all gradients of all groups to this global L2 norm inside the update (needs ``fused_step``);
            0 removes the gradients' effect, infinity measures and never clips, None does not clip. Gradients themselves
            are never rewritten. Default None.
        check_finite: with ``fused_step``: one NaN or infinity anywhere skips the whole step. Default True.
        moments: how the state keeps both moments (needs ``fused_step``): "float32" in 8 bytes per element, "bfloat16"
            in 4, "packed16" in 2, both in one word under ``packed_moments``. The step computes in FP32 and rounds what
            it stores with a dither that is a hash of the element and the step number, so a run repeats bit for bit in
            any layout and on any number of threads and ranks. AMSGrad's maximum takes 4 bytes, or 2 in the last two
            forms. Default "float32".
        split_master: None or True keeps the masters of BF16 parameters as the parameter plus 16 bits, False in FP32,
            two bytes per element more (needs ``fused_step``). A parameter with a split master is rounded with ties away
            from zero. FP16 parameters always get an FP32 master. Default None.

    None of these settings goes into a parameter group.

    Attributes:
        last_step_skipped: whether the last step was skipped.
        last_grad_norm: global L2 norm of the last step's gradients, unscaled, before clipping; infinity if something
            was not finite, NaN if no statistics were asked for.
        last_clip_factor: the factor that the last step multiplied its gradients by; 1 without clipping.
        last_group_norms: the same norm per parameter group.
        skipped_steps: steps skipped since this object was made.

    Raises:
        InvalidOption (a ValueError): a hyperparameter out of its range, or a setting that needs ``fused_step=True``.
        InvalidTensor (a TypeError): a parameter that the fused step does not take, with its group and index.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101); Reddi et al. 2018 for AMSGrad; torch.optim.AdamW for the order.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        fused_step: bool = False,
        hierarchical_stats: bool = False,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        moments: str = "float32",
        split_master: bool | None = None,
    ) -> None:
        settings = Settings(hierarchical_stats, max_grad_norm, check_finite, moments, split_master)
        check_served(settings, fused_step=fused_step)
        torchs: dict[str, Any] = {"foreach": foreach, "fused": fused, "differentiable": differentiable}
        if fused_step:
            betas = check_arguments(torchs, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._fused_step = bool(fused_step)
        self._capturable = bool(capturable)
        self._start(settings)
        numbers = (lr, betas, eps, weight_decay, amsgrad)
        super().__init__(params, *numbers, maximize=maximize, capturable=capturable, **torchs)
        # Torch's constructor assigned an empty state and kept nothing of it.
        self._live.state_shown = self._live.tensors_shared = False
        self._announce_scaling()

    def _start(self, settings: Settings) -> None:
        self._live = Live(self, settings)
        self._number = compiled.register(self)

    def _announce_scaling(self) -> None:
        """Tell torch.amp.GradScaler that step() takes grad_scale and found_inf and does not want unscaled gradients."""
        if self._fused_step:
            self._step_supports_amp_scaling = True

    # ---- settings ----------------------------------------------------------------------------------------------------

    @property
    def fused_step(self) -> bool:
        return self._fused_step

    @property
    def settings(self) -> Settings:
        """``hierarchical_stats``, ``max_grad_norm``, ``check_finite``, ``moments`` and ``split_master``."""
        return self._live.settings

    @property
    def max_grad_norm(self) -> float | None:
        """May be assigned between steps."""
        return self._live.settings.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        settings = replace(self._live.settings, max_grad_norm=value)
        check_served(settings, fused_step=self._fused_step)
        self._live.change(settings)

    @property
    def state(self) -> Any:
        """Torch's state: a dict per parameter.

        Whoever is handed it may put other tensors into it at any later time, so from then on every step looks whether
        it did. Until then there is nothing to look for, which matters to models of thousands of small tensors.
        """
        self._live.state_shown = True
        return self._live.owner.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise InvalidState(f"the optimizer's state must be a dict, got {type(value).__name__}")
        self._live.state_shown = True  # whoever assigned it has it
        self._live.owner.__dict__["state"] = value

    # ---- what the last step did --------------------------------------------------------------------------------------

    @property
    def last_step_skipped(self) -> bool:
        outcome = self._live.engine.last(self.param_groups)
        return outcome is not None and outcome.skipped

    @property
    def last_grad_norm(self) -> float:
        outcome = self._live.engine.last(self.param_groups)
        return math.nan if outcome is None else outcome.grad_norm

    @property
    def last_clip_factor(self) -> float:
        outcome = self._live.engine.last(self.param_groups)
        return 1.0 if outcome is None else outcome.clip_factor

    @property
    def last_group_norms(self) -> tuple[float, ...]:
        outcome = self._live.engine.last(self.param_groups)
        return () if outcome is None else outcome.group_norms()

    @property
    def skipped_steps(self) -> int:
        return self._live.engine.skipped_steps

    def gradient_report(self, *, whole: bool = False) -> GradientReport:
        """The gradients of the last step, parameter by parameter.

        Merged from the statistics of the step when it is called, and only then waits for the device.

        Args:
            whole: of sharded parameters, False tells of this rank's part. True tells of all ranks' parts; then every
                rank must call it. Default False.

        Returns:
            One line per parameter that had a gradient: name, group, index, elements, norm (unscaled, before clipping),
            largest magnitude, whether all of it was finite. ``str()`` is a table. Empty before the first step.

        Raises:
            InvalidState: the last step took no statistics.
        """
        outcome = self._live.engine.last(self.param_groups)
        return GradientReport(()) if outcome is None else outcome.gradients(self.param_groups, whole=whole)

    def update_report(self) -> UpdateReport:
        """How far the last step moved each parameter, relative to its size; see
        :func:`ruda_torch.report.update_report`. Costs a pass over parameters and moments."""
        return update_report(self)

    # ---- the step ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch's method of the same name does."""
        if isinstance(param_group, dict):  # anything else is torch's to refuse
            number = len(self.param_groups)
            check_group_keys(number, param_group)
            if self._fused_step:
                check_new_group(number, param_group, self.defaults, capturable=self._capturable)
        super().add_param_group(param_group)
        self._live.follow(self.param_groups)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """What torch puts around ``step``: hooks, and a range for the profiler.

        Opening a range that nobody records takes longer than updating a small model, so it is left out then.
        """
        return around_step(func, torch.optim.Optimizer.profile_hook_step(func))

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float | Tensor | None = None
    ) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients enabled, before anything
                else.
            grad_scale: with ``fused_step=True``: what the gradients were multiplied by (loss scaling), finite and > 0;
                a number or a tensor with one element, which is not waited for on an accelerator. The step divides by
                it before it measures and clips, and the gradients stay as they are. A GradScaler hands its scale over
                by itself; this one is a further factor then. Default None, the factor 1.

        Returns:
            What the closure returned, or None.

        Raises:
            FusedAdamWError: with ``fused_step=True``, something does not fit; parameters and state are as before.
        """
        if grad_scale is not None:
            check_grad_scale(grad_scale, fused_step=self._fused_step)
        if not self._fused_step:
            return _torch_step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            with torch.no_grad():
                compiled.step(self._number, [p for group in self._live.engine.lists for p in group], grad_scale)
        else:
            self._run(grad_scale=grad_scale)
        return loss

    def _run(
        self,
        gradients: list[Tensor | None] | None = None,
        targets: list[list[Tensor]] | None = None,
        grad_scale: float | Tensor | None = None,
    ) -> None:
        live = self._live
        live.begun = True
        scale = getattr(self, "grad_scale", None)  # what a GradScaler hands over
        if grad_scale is not None:
            scale = grad_scale if scale is None else scale * grad_scale
        state = self.__dict__["state"]
        watched = state if live.state_shown else live.tensors_shared or None
        found_inf = getattr(self, "found_inf", None)
        live.engine.run(self.param_groups, state, scale, found_inf, watched, gradients, targets)

    def run_compiled(self, positions: Sequence[int], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Run the step that a compiled graph contains; see :mod:`ruda_torch.compiled`. Not for direct use.

        Args:
            positions: which parameters of all groups are active.
            params, grads: their memory and their gradients, possibly the graph's copies.
        """
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        if [id(parameter) for parameter in everything] != self._live.parameter_ids:
            raise InvalidState(
                "the parameter groups changed after the step was compiled; call torch.compiler.reset() and compile "
                "again"
            )
        gradients: list[Tensor | None] = [None] * len(everything)
        stand_ins = [parameter.detach() for parameter in everything]
        for position, param, grad in zip(positions, params, grads, strict=True):
            gradients[position] = grad
            stand_ins[position] = param.detach()
        if all(t.data_ptr() == p.data_ptr() for t, p in zip(stand_ins, everything, strict=True)):
            self._run(gradients)
            return
        following = iter(stand_ins)
        self._run(gradients, [[next(following) for _ in group["params"]] for group in self.param_groups])

    def __repr__(self) -> str:
        """Torch's text, with this class's settings above the groups."""
        text = super().__repr__()
        if not self._fused_step:
            return text
        opening, _, groups = text.partition("\n")
        own = {"fused_step": True, "capturable": self._capturable, **asdict(self._live.settings)}
        return "\n".join([opening, *(f"    {name}: {own[name]}" for name in sorted(own)), groups])

    # ---- saving and loading ------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Torch's state dict; with ``fused_step=True`` also this class's settings under the key ``ruda``."""
        if not self._fused_step:
            return super().state_dict()
        self._live.engine.check_ranks()
        self._live.engine.check_whole()
        shown = self._live.state_shown
        saved = super().state_dict()
        if not (self._optimizer_state_dict_pre_hooks or self._optimizer_state_dict_post_hooks):
            # Torch hands out the state's own dicts; with copies of them, nobody can put other tensors into the state.
            # What is no plain dict is somebody's own, and goes out as it is.
            entries = saved["state"]
            saved["state"] = {key: dict(entry) if type(entry) is dict else entry for key, entry in entries.items()}
            if all(type(entry) is dict for entry in entries.values()):
                self._live.state_shown = shown
        self._live.tensors_shared = True
        saved[checkpoint.KEY] = checkpoint.settings_entry(self._live.settings)
        return saved

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint of this class or of ``torch.optim.AdamW``.

        Everything is checked before anything is replaced, and tensors are copied. Hyperparameters, ``max_grad_norm``
        and ``check_finite`` come from the checkpoint; which step runs (``fused_step``, ``capturable``, ...) and the
        form of moments and masters stay what they are: the state is converted.

        Raises:
            ValueError: groups or shapes that do not fit, with the parameter's name; a checkpoint that disagrees about
                ``amsgrad`` (see :func:`ruda_torch.convert_amsgrad`).
        """
        if self._live.owner is not self:  # called through a wrapper, which would load into itself
            self._live.owner.load_state_dict(state_dict)
            return
        if not self._fused_step:
            super().load_state_dict(checkpoint.for_torch(state_dict))
            checkpoint.warn_of_loss(state_dict)
            return
        shown = self._live.state_shown
        settings = checkpoint.load(self, super().load_state_dict, state_dict)
        if not (self._optimizer_load_state_dict_pre_hooks or self._optimizer_load_state_dict_post_hooks):
            self._live.state_shown = shown
        self._live.change(settings)
        self._live.engine.restored()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            checkpoint.KEY: {
                "fused_step": self._fused_step,
                "capturable": self._capturable,
                **asdict(self._live.settings),
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        own = state.pop(checkpoint.KEY, None)
        if own is not None:  # unpickling or copying; load_state_dict passes groups and state alone
            own = dict(own)
            self._fused_step, self._capturable = own.pop("fused_step"), own.pop("capturable")
            self._start(Settings(**own))  # torch's method looks at the state already
        super().__setstate__(state)
        self._live.follow(self.param_groups)
        if own is not None:
            self._announce_scaling()


def _torch_step(optimizer: AdamW, closure: Callable[[], float] | None) -> float | None:
    """Torch's own step. Its hooks and profiler range already run around ours, so its wrapper, if any, is taken off."""
    step = torch.optim.AdamW.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step(optimizer, closure)  # type: ignore[no-any-return]
