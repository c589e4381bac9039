"""A small regression that every training framework runs, and what two runs of it are compared by.

Importing this file keeps the Hugging Face libraries off the network, so import it before them.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

import torch

import ruda_torch

STEPS = 12
BATCH = 8
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
MAX_NORM = 1.0
"""Some batches' gradients are longer, some shorter; see :func:`samples`."""

TOLERANCE = 2e-5
"""Two FP32 AdamW runs of the regression may differ by this much in a parameter, none of which exceeds 2.

Per step: both optimizers round the parameter (at most 1.2e-7 each) and an update below 3 lr = 0.03 some ten times
(0.03 * 10 * 6e-8 = 2e-8): 2.6e-7 together, 3.1e-6 over 12 steps. A parameter that is off changes its gradient, and the
next updates by lr / sqrt(v) * curvature of it: (1 + 0.15)^12 = 5 at most here. A run with another clip differs by more
than 100 times the tolerance (each comparison checks that).
"""


class Regression(torch.nn.Module):
    """A small model with the calling convention of Hugging Face models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, inputs, labels):
        outputs = self.layers(inputs.to(self.layers[0].weight.dtype)).squeeze(-1)
        loss = torch.nn.functional.mse_loss(outputs.float(), labels)
        return {"loss": loss, "logits": outputs}


def regression(dtype: torch.dtype = torch.float32) -> Regression:
    """The same start each time."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = Regression().to(dtype)
    torch.random.set_rng_state(state)
    return model


def samples(count: int = STEPS * BATCH, bad_batch: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Inputs and targets; the targets' size differs from batch to batch, so that clipping cuts some batches only.

    Args:
        count: how many.
        bad_batch: number of a batch whose targets are NaN.
    """
    random = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        inputs = torch.randn(8, generator=random)
        size = (0.2, 1.0, 5.0)[number // BATCH % 3]
        target = size * inputs[:3].sum().sin()
        if bad_batch is not None and number // BATCH == bad_batch:
            target = target * torch.nan
        found.append({"inputs": inputs, "labels": target})
    return found


def loader(data: list[dict[str, torch.Tensor]], batch_size: int = BATCH) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def ours(model: torch.nn.Module, **settings) -> ruda_torch.AdamW:
    return ruda_torch.AdamW(model.parameters(), **{**SETTINGS, "fused_step": True, **settings})


def theirs(model: torch.nn.Module, **settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{**SETTINGS, **settings})


def distance(left: torch.nn.Module, right: torch.nn.Module) -> float:
    """The largest difference of any parameter or buffer."""
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)


def assert_close(left: torch.nn.Module, right: torch.nn.Module, unlike: torch.nn.Module, atol: float = TOLERANCE):
    """Two trained models agree; a third, trained without the clip, would not have passed."""
    assert distance(left, right) <= atol
    assert distance(left, unlike) > 100 * atol


def assert_same_bits(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    """Parameters and state agree bit for bit."""
    pairs = list(zip(left.param_groups, right.param_groups, strict=True))
    assert pairs
    for one, other in pairs:
        for mine, yours in zip(one["params"], other["params"], strict=True):
            tensors = {"parameter": mine, **left.state[mine]}, {"parameter": yours, **right.state[yours]}
            assert tensors[0].keys() == tensors[1].keys()
            for name in tensors[0]:
                assert torch.equal(*(integers(tensor[name]) for tensor in tensors)), name


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, to compare them: stored as BF16, a split master's remainder may look like NaN."""
    return tensor.detach().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Watch:
    """Records what each step of an optimizer of ours was given: norm and bits of the gradients.

    Attributes:
        norms: the global norm of the gradients on entry of each step, in FP64.
        reported: ``last_grad_norm`` after it.
        factors: ``last_clip_factor`` after it.
        skipped: ``last_step_skipped`` after it.
    """

    def __init__(self, optimizer: ruda_torch.AdamW) -> None:
        self.norms: list[float] = []
        self.reported: list[float] = []
        self.factors: list[float] = []
        self.skipped: list[bool] = []
        optimizer.register_step_post_hook(self._after)

    def _after(self, optimizer, *_):
        # The step does not write gradients, so what is there afterwards is what it was given.
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(sum(gradient.double().square().sum() for gradient in gradients).sqrt()))
        self.reported.append(optimizer.last_grad_norm)
        self.factors.append(optimizer.last_clip_factor)
        self.skipped.append(optimizer.last_step_skipped)

    def check_one_clip(self, given: list[float], max_norm: float = MAX_NORM) -> None:
        """The optimizer alone clipped: it saw the norms that backward produced, and cut the long ones.

        Args:
            given: the norms of a run that does not clip in the optimizer, before its clip. Two runs drift apart, and
                norms are sums: 1e-4 relative.
        """
        assert len(given) == len(self.reported)
        for seen, reported, factor, other in zip(self.norms, self.reported, self.factors, given, strict=True):
            assert abs(reported - seen) <= 1e-6 * seen  # FP32 squares, 193 of them: far fewer than 16 ulps
            assert abs(reported - other) <= 1e-4 * other
            assert abs(factor - min(max_norm / (reported + 1e-6), 1.0)) <= 1e-7
        assert min(self.factors) < 1.0 == max(self.factors), "the data must have both kinds of batches"
