"""A loss scaler for :class:`ruda_torch.AdamW`: torch's, bounded, and without a second look at the gradients."""

from __future__ import annotations

from typing import Any

import torch

from ruda_optim.fused_adamw import InvalidOption

from .adamw import AdamW

MIN_SCALE = 2.0**-24
MAX_SCALE = 2.0**24
_HANDED_OVER = ("grad_scale", "found_inf")  # what torch's step() sets on an optimizer that scales by itself


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose scale stays within [2^-24, 2^24].

    With a fused :class:`ruda_torch.AdamW` that checks gradients itself (``check_finite=True``), ``step`` hands it the
    scale and takes the verdict from its ``last_step_skipped``, so that scaling costs no pass over the gradients and
    leaves them as backward produced them. With any other optimizer, and after ``unscale_``, it does what torch's does.
    An optimizer none of whose parameters has a gradient is stepped quietly, where torch's raises. ``state_dict``
    interchanges with torch's.

    Args:
        device: type of the device that scaled losses live on, ``"cpu"`` or ``"cuda"``. Default ``"cpu"``.
        init_scale: in [2^-24, 2^24]. Default 65536.
        growth_factor: > 1, applied after ``growth_interval`` steps without a skip. Default 2.
        backoff_factor: in (0, 1), applied after a skip. Default 0.5.
        growth_interval: >= 1. Default 2000.
        enabled: False makes every method do nothing but the step itself. Default True.

    Raises:
        InvalidOption (a ValueError): a value outside its range.
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        _check_scale("init_scale", init_scale)
        if not growth_factor > 1.0:
            raise InvalidOption(f"growth_factor must be > 1, got {growth_factor!r}")
        if not 0.0 < backoff_factor < 1.0:
            raise InvalidOption(f"backoff_factor must be in (0, 1), got {backoff_factor!r}")
        if not isinstance(growth_interval, int) or growth_interval < 1:
            raise InvalidOption(f"growth_interval must be an int >= 1, got {growth_interval!r}")
        super().__init__(device, float(init_scale), growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place.

        torch refuses FP16 gradients here, because small ones would vanish; ``max_grad_norm`` of the fused step clips
        them without this call.
        """
        super().unscale_(optimizer)
        if self.is_enabled() and not self._checks(optimizer):
            self._record_check(optimizer)  # no gradients: nothing was seen, and nothing was not finite

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer with unscaled gradients, or skip if one of them is not finite.

        Args:
            optimizer: any optimizer.
            args, kwargs: passed on to its ``step``.

        Returns:
            What the optimizer's step returned; None if it was not called.
        """
        if not (self.is_enabled() and isinstance(optimizer, AdamW) and optimizer.fused_step):
            return super().step(optimizer, *args, **kwargs)
        before = {name: getattr(optimizer, name) for name in _HANDED_OVER if hasattr(optimizer, name)}
        try:
            result = super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch leaves its own values behind; the next attempt would multiply by the scale twice.
            for name in _HANDED_OVER:
                vars(optimizer).pop(name, None)
            vars(optimizer).update(before)
            raise
        if optimizer.last_step_skipped:
            for found in self._checks(optimizer).values():
                found.fill_(1.0)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Back off after a skip, grow after enough steps without one, and stay within the bounds.

        Args:
            new_scale: sets the scale instead; a number or a tensor with one element, in [2^-24, 2^24].
        """
        if not self.is_enabled():
            return
        if new_scale is not None:
            new_scale = new_scale.item() if isinstance(new_scale, torch.Tensor) else new_scale
            _check_scale("new_scale", new_scale)
            new_scale = float(new_scale)
        super().update(new_scale)
        scale = self._get_scale_async()
        if scale is not None:
            scale.clamp_(MIN_SCALE, MAX_SCALE)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a scaler of this class or of torch's; a scale out of bounds becomes the nearer bound."""
        if self.is_enabled() and "scale" in state_dict:
            scale = min(max(float(state_dict["scale"]), MIN_SCALE), MAX_SCALE)
            state_dict = {**state_dict, "scale": scale}
        super().load_state_dict(state_dict)

    # The three methods below touch what torch keeps private. If a later torch stops calling _check_inf_per_device, its
    # own pass runs and the results stay the same; a test notices the extra pass.

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:  # type: ignore[override]
        """Called by torch's step() for an optimizer that scales by itself, to look for infinities."""
        if isinstance(optimizer, AdamW) and optimizer.fused_step and optimizer.settings.check_finite:
            return self._record_check(optimizer)
        return super()._check_inf_per_device(optimizer) or self._record_check(optimizer)

    def _checks(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """What has been found in this iteration, per device."""
        checks: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return checks

    def _record_check(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """Note that nothing was found so far; step() corrects it when the optimizer skips."""
        scale, _ = self._check_scale_growth_tracker("step")
        checks = {scale.device: torch.zeros((), dtype=torch.float32, device=scale.device)}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = checks
        return checks


def _check_scale(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and MIN_SCALE <= value <= MAX_SCALE):  # type: ignore[operator]
        raise InvalidOption(f"{name} must be a number in [2^-24, 2^24], got {value!r}")
