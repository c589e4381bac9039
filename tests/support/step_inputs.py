"""What the tests of the functional step pass in: good tensors, and a table of bad ones with their errors."""

from __future__ import annotations

import numpy as np
import torch

from ruda_optim.fused_adamw import (
    AdamWOptions,
    AdamWState,
    DifferentDevice,
    InvalidOption,
    InvalidState,
    InvalidTensor,
    ShapeMismatch,
    StepControl,
    StepOverflow,
)

OPTIONS = AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8)
AMSGRAD = AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8, amsgrad=True)
MAX_STEP = 2**64 - 1


def filled(value: float, *shape: int, **how) -> torch.Tensor:
    return torch.full(shape or (5,), value, **how)


def state_of(step: int = 3, *, amsgrad: bool = False, shape: tuple[int, ...] = (5,)) -> AdamWState:
    first, second, maximum = (torch.full(shape, value) for value in (0.1, 0.2, 0.3))
    return AdamWState(step, first, second, maximum if amsgrad else None)


def parts(update) -> dict[str, torch.Tensor]:
    """An update's tensors by the names of ``cases.FIELDS``."""
    _, first, second, maximum = update.state.into_parts()
    found = {"parameter": update.parameters, "exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": maximum}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


SPARSE = torch.eye(5).to_sparse()
NEGATED = torch.zeros(5, dtype=torch.complex64).conj().imag
STRIDED = torch.zeros(10)[::2]
META = torch.zeros(5, device="meta")

# (parameters, gradients, state, options) with None for what is right, error, message
BAD_TENSORS = [
    ("no parameters", {"parameters": None}, InvalidTensor, r"parameters must be a float32 tensor, got NoneType"),
    ("array", {"parameters": np.zeros(5)}, InvalidTensor, r"parameters must be a float32 tensor, got ndarray"),
    ("FP64 parameters", {"parameters": filled(1.0, dtype=torch.float64)}, InvalidTensor, r"float32, got torch.float64"),
    ("half parameters", {"parameters": filled(1.0, dtype=torch.bfloat16)}, InvalidTensor, r"float32, got torch.bfloat"),
    ("strided parameters", {"parameters": STRIDED}, InvalidTensor, r"contiguous; got shape \(5,\) with strides \(2,\)"),
    ("sparse parameters", {"parameters": SPARSE}, InvalidTensor, r"dense tensor, got layout torch.sparse_coo"),
    ("negated parameters", {"parameters": NEGATED}, InvalidTensor, r"lazily negated view; call .resolve_neg\(\)"),
    ("list of gradients", {"gradients": [0.0] * 5}, InvalidTensor, r"gradients must be a float32, .* got list"),
    ("FP64 gradients", {"gradients": filled(1.0, dtype=torch.float64)}, InvalidTensor, r"float16, bfloat16, got"),
    ("integer gradients", {"gradients": torch.zeros(5, dtype=torch.int32)}, InvalidTensor, r"got torch.int32"),
    ("sparse gradients", {"gradients": SPARSE}, InvalidTensor, r"gradients must be a dense .* call .to_dense\(\)"),
    ("oneDNN gradients", {"gradients": torch.eye(5).to_mkldnn()}, InvalidTensor, r"got layout torch._mkldnn"),
    ("negated gradients", {"gradients": NEGATED}, InvalidTensor, r"gradients is a lazily negated view"),
    ("too few gradients", {"gradients": torch.zeros(4)}, ShapeMismatch, r"shape \(5,\), got \(4,\); nothing is"),
    ("scalar gradient", {"gradients": torch.zeros(())}, ShapeMismatch, r"got \(\); nothing is broadcast"),
    ("column of gradients", {"gradients": torch.zeros(5, 1)}, ShapeMismatch, r"got \(5, 1\)"),
    ("gradients elsewhere", {"gradients": META}, DifferentDevice, r"gradients must be on .* cpu, got meta"),
    ("all on meta", {"parameters": META, "gradients": META}, InvalidTensor, r"on a CPU, .* got 'meta'"),
    ("state tuple", {"state": (1, filled(1.0), filled(1.0))}, InvalidState, r"state must be AdamWState or None, got"),
    ("state of another shape", {"state": state_of(shape=(6,))}, ShapeMismatch, r"state.first_moment .* got \(6,\)"),
    (
        "state elsewhere",
        {"state": AdamWState(1, META, META)},
        DifferentDevice,
        r"state.first_moment must be on the parameters' device cpu, got meta",
    ),
    (
        "strided moment",
        {"state": AdamWState(1, filled(1.0), STRIDED)},
        InvalidTensor,
        r"state.second_moment must be contiguous, got strides \(2,\)",
    ),
    (
        "strided maximum",
        {"state": AdamWState(1, filled(1.0), filled(1.0), STRIDED), "options": AMSGRAD},
        InvalidTensor,
        r"state.max_second_moment must be contiguous",
    ),
    ("negated moment", {"state": AdamWState(1, NEGATED, filled(1.0))}, InvalidTensor, r"first_moment is a lazily neg"),
    ("no maximum", {"state": state_of(), "options": AMSGRAD}, InvalidState, r"no max_second_moment, which amsgrad"),
    ("a maximum", {"state": state_of(amsgrad=True)}, InvalidState, r"max_second_moment, which amsgrad=False"),
    ("options dict", {"options": {"lr": 1}}, InvalidOption, r"options must be AdamWOptions, got dict"),
    ("control bool", {"control": True}, InvalidOption, r"control must be StepControl, got bool"),
    ("overflow", {"state": state_of(MAX_STEP)}, StepOverflow, r"at most 2\^64 - 2"),
]  # fmt: skip
GOOD = {
    "parameters": filled(1.0),
    "gradients": filled(1.0),
    "state": None,
    "options": OPTIONS,
    "control": StepControl(),
}
