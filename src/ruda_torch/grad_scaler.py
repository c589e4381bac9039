"""A loss scaler for :class:`ruda_torch.AdamW`: torch's, bounded, and without a second look at the gradients."""

from __future__ import annotations

import torch

from ruda_optim.fused_adamw import InvalidOption

MIN_SCALE = 2.0**-24
MAX_SCALE = 2.0**24


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose scale stays within [2^-24, 2^24].

    With a fused :class:`ruda_torch.AdamW` that checks gradients itself, ``step`` hands the scale to the optimizer and
    takes the verdict from it, so that scaling costs no pass over the gradients. With any other optimizer, and after
    ``unscale_``, it does what torch's does.

    Args:
        device: where the scale lives. Default ``"cpu"``.
        init_scale: in the bounds. Default 65536.
        growth_factor: > 1, applied after ``growth_interval`` steps without a skip. Default 2.
        backoff_factor: in (0, 1), applied after a skip. Default 0.5.
        growth_interval: Default 2000.
        enabled: False makes every method do nothing but the step itself. Default True.
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
        if not MIN_SCALE <= init_scale <= MAX_SCALE:
            raise InvalidOption(f"init_scale must be in [2^-24, 2^24], got {init_scale!r}")
        if not growth_factor > 1.0:
            raise InvalidOption(f"growth_factor must be > 1, got {growth_factor!r}")
        if not 0.0 < backoff_factor < 1.0:
            raise InvalidOption(f"backoff_factor must be in (0, 1), got {backoff_factor!r}")
        if not isinstance(growth_interval, int) or growth_interval < 1:
            raise InvalidOption(f"growth_interval must be an int >= 1, got {growth_interval!r}")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
