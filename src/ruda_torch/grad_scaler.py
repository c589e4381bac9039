"""A loss scaler for :class:`ruda_torch.AdamW`: torch's, bounded, and without a second look at the gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from ruda_optim.fused_adamw import InvalidOption
from ruda_optim.fused_adamw.options import check_number, round_to_fp32

from .adamw import AdamW

_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_HANDED_OVER = ("grad_scale", "found_inf")  # what torch's step() sets on an optimizer that scales by itself


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose scale stays within [min_scale, max_scale].

    With a fused :class:`ruda_torch.AdamW` that checks gradients itself (``check_finite=True``), ``step`` hands it the
    scale and takes the verdict from its ``last_step_skipped``, so that scaling costs no pass over the gradients and
    leaves them as backward produced them. With any other optimizer, and after ``unscale_``, it does what torch's does.
    An optimizer none of whose parameters has a gradient is stepped quietly, where torch's raises. ``state_dict``
    interchanges with torch's.

    Args:
        device: type of the device that scaled losses live on, ``"cpu"`` or ``"cuda"``. Default ``"cpu"``.
        init_scale: in [min_scale, max_scale]. Default 65536.
        growth_factor: finite, above 1, applied after ``growth_interval`` steps without a skip. Default 2.
        backoff_factor: in (0, 1), applied after a skip. Default 0.5.
        growth_interval: at least 1. Default 2000.
        enabled: False makes every method do nothing but the step itself. Default True.
        min_scale: least scale, finite, positive. Default 2^-24.
        max_scale: largest scale, likewise. Default 2^24.

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
        *,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
    ) -> None:
        if not isinstance(device, (str, torch.device)):
            raise InvalidOption(
                f"device must be a device type such as 'cpu' or 'cuda', got {device!r}; the scale is the second "
                f"argument: GradScaler(init_scale={device!r})"
            )
        self._min_scale = _scale("min_scale", min_scale)
        self._max_scale = _scale("max_scale", max_scale)
        if self._min_scale > self._max_scale:
            raise InvalidOption(f"min_scale must be <= max_scale, got {min_scale!r} and {max_scale!r}")
        init_scale = self._bounded("init_scale", init_scale)
        device = device.type if isinstance(device, torch.device) else device
        growth = _growth_factor(growth_factor), _backoff_factor(backoff_factor), _growth_interval(growth_interval)
        super().__init__(device, init_scale, *growth, enabled)

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
            *args: passed on to its ``step``.
            **kwargs: likewise.

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
            new_scale: sets the scale instead; a number or a tensor with one element, in [min_scale, max_scale].
        """
        if not self.is_enabled():
            return
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor):
                if new_scale.numel() != 1:
                    raise InvalidOption(f"new_scale must be one number, got a tensor of shape {tuple(new_scale.shape)}")
                new_scale = new_scale.item()
            new_scale = self._bounded("new_scale", new_scale)
        super().update(new_scale)
        scale = self._get_scale_async()
        if scale is not None:
            scale.clamp_(self._min_scale, self._max_scale)

    def set_growth_factor(self, new_factor: float) -> None:
        super().set_growth_factor(_growth_factor(new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        super().set_backoff_factor(_backoff_factor(new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        super().set_growth_interval(_growth_interval(new_interval))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a scaler of this class or of torch's; a scale out of bounds becomes the nearer bound.

        Raises:
            InvalidOption (a ValueError): a value that no scaler has, such as a scale that is NaN; nothing changed then.
        """
        if self.is_enabled() and state_dict:
            missing = [name for name in _STATE if name not in state_dict]
            if missing:
                raise InvalidOption(f"the state of a GradScaler must hold {', '.join(_STATE)}; missing: {missing}")
            scale = check_number("scale", state_dict["scale"], "a number >= 0", infinite=True)
            if scale < 0.0:
                raise InvalidOption(f"scale must be a number >= 0, got {scale!r}")
            _growth_factor(state_dict["growth_factor"])
            _backoff_factor(state_dict["backoff_factor"])
            _growth_interval(state_dict["growth_interval"])
            tracker = state_dict["_growth_tracker"]
            if not _is_int(tracker) or tracker < 0:
                raise InvalidOption(f"_growth_tracker must be an int >= 0, got {tracker!r}")
            state_dict = {**state_dict, "scale": min(max(scale, self._min_scale), self._max_scale)}
        super().load_state_dict(state_dict)

    def _bounded(self, name: str, value: object) -> float:
        scale = _scale(name, value)
        if not self._min_scale <= scale <= self._max_scale:
            raise InvalidOption(
                f"{name} must be in [min_scale, max_scale] = [{self._min_scale!r}, {self._max_scale!r}], got {value!r}"
            )
        return scale

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


def _scale(name: str, value: object) -> float:
    scale = check_number(name, value, "a finite number > 0")
    if not 0.0 < round_to_fp32(scale) < math.inf:  # the scale lives in FP32
        raise InvalidOption(f"{name} must be a number > 0 and finite in FP32, got {value!r}")
    return scale


def _growth_factor(value: object) -> float:
    factor = check_number("growth_factor", value, "a finite number > 1")
    if not factor > 1.0:
        raise InvalidOption(f"growth_factor must be a finite number > 1, got {value!r}")
    return factor


def _backoff_factor(value: object) -> float:
    factor = check_number("backoff_factor", value, "a number in (0, 1)")
    if not 0.0 < factor < 1.0:
        raise InvalidOption(f"backoff_factor must be a number in (0, 1), got {value!r}")
    return factor


def _growth_interval(value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise InvalidOption(f"growth_interval must be an int >= 1, got {value!r}")
    return int(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
