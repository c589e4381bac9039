"""One training run of the demo: the step of each optimizer, the loop, and checkpoints that continue bit for bit."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from demo_text import DemoError, Text
from gpt import GPT
from torch import Tensor, nn
from tqdm import tqdm

import ruda_torch

if TYPE_CHECKING:
    from ruda_torch.report import GradientReport

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {
    "ruda": "ruda_torch.AdamW(fused_step=True)",
    "torch": "torch.optim.AdamW()",
    "torch-fused": "torch.optim.AdamW(fused=True)",
}
MOMENT_BYTES = {"float32": 8, "bfloat16": 4, "packed16": 2}
"""Of both moments of one element."""
CHECKPOINT_FORMAT = 3


@dataclass(frozen=True)
class Configuration:
    """Everything that decides the numbers of a run. A checkpoint continues under the same configuration only."""

    text: str
    """SHA-256 of the text."""
    dtype: str
    seed: int
    steps: int
    batch: int
    context: int
    layers: int
    width: int
    heads: int
    dropout: float
    lr: float
    weight_decay: float
    max_grad_norm: float
    """Infinity measures the norm and never clips."""
    moments: str = "float32"
    """How the fused step keeps them."""

    def model(self) -> GPT:
        """A new model; the same bits for the same seed."""
        torch.manual_seed(self.seed)
        model = GPT(self.context, self.layers, self.width, self.heads, self.dropout)
        return model.to(DTYPES[self.dtype])

    @property
    def poisoned_step(self) -> int:
        """The step, counted from 0, in which one element of one gradient is NaN, on purpose."""
        return self.steps // 2

    @property
    def poisoned_parameter(self) -> str:
        return f"blocks.{self.layers // 2}.mlp_in.weight"

    def lr_factor(self, step: int) -> float:
        """Linear warm-up over the first 5 % of the steps, then a cosine down to a tenth."""
        warmup = max(1, self.steps // 20)
        progress = (step - warmup) / max(1, self.steps - warmup)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1.0, max(0.0, progress))))


@dataclass
class History:
    """What a run recorded: one number per step, and the validation loss at some of them."""

    loss: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    clip_factor: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    layer_norms: list[list[float]] = field(default_factory=list)
    """Per step the gradient norm of each of ``layers_of(model)``; only of an optimizer that reports it."""
    skips: list[str] = field(default_factory=list)
    """What the optimizer had to say about skipped steps."""
    validation: list[tuple[int, float]] = field(default_factory=list)


def parameter_groups(parameters: dict[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; the vectors of the normalisations do not. With names, which reports show."""
    named = parameters.items()
    return [
        {"params": [(name, p) for name, p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def layers_of(model: nn.Module) -> list[str]:
    """Every module that has parameters of its own, in the order of the model."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))


class RudaStep:
    """The fused step: finite check, clipping, update and (for BF16) the half copy, all inside ``step()``."""

    def __init__(self, model: nn.Module, config: Configuration) -> None:
        groups = parameter_groups(dict(model.named_parameters()), config.weight_decay)
        self.optimizer = ruda_torch.AdamW(
            groups,
            lr=config.lr,
            betas=(0.9, 0.95),
            fused_step=True,
            max_grad_norm=config.max_grad_norm,
            moments=config.moments,
        )

    def __call__(self) -> tuple[float, float, bool]:
        """Update; returns gradient norm, clip factor, skipped."""
        optimizer = self.optimizer
        optimizer.step()
        return optimizer.last_grad_norm, optimizer.last_clip_factor, optimizer.last_step_skipped

    def report(self) -> GradientReport | None:
        """What the step saw of each gradient."""
        return self.optimizer.gradient_report()

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


class TorchStep:
    """What the fused step replaces, by hand: FP32 masters for a BF16 model, ``clip_grad_norm_``, torch's AdamW."""

    def __init__(self, model: nn.Module, config: Configuration, *, fused: bool) -> None:
        named = dict(model.named_parameters())
        self.parameters = list(named.values())
        if config.dtype != "fp32":
            named = {name: p.detach().float().requires_grad_() for name, p in named.items()}
        self.masters = list(named.values())
        self.half = config.dtype != "fp32"
        self.max_grad_norm = config.max_grad_norm
        groups = parameter_groups(named, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=fused or None)

    def __call__(self) -> tuple[float, float, bool]:
        if self.half:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = parameter.grad.float()
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm))
        if not math.isfinite(norm):
            return norm, 1.0, True
        self.optimizer.step()
        if self.half:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters, strict=True):
                    parameter.copy_(master)
        return norm, min(1.0, self.max_grad_norm / (norm + 1e-6)), False

    def report(self) -> GradientReport | None:
        """Torch's step keeps nothing of it."""
        return None

    def state(self) -> dict[str, Any]:
        masters = [m.detach() for m in self.masters] if self.half else []
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=False):  # no masters in FP32
                master.copy_(saved)


def make_step(method: str, model: nn.Module, config: Configuration) -> RudaStep | TorchStep:
    """The update of ``method``, a key of ``NAMES``."""
    if method == "ruda":
        return RudaStep(model, config)
    return TorchStep(model, config, fused=method == "torch-fused")


class Run:
    """A model, its optimizer, and everything else that a checkpoint must hold to continue bit for bit."""

    def __init__(self, config: Configuration, text: Text, method: str) -> None:
        self.config, self.text, self.method = config, text, method
        self.model = config.model()
        self.update = make_step(method, self.model, config)
        self.layers = layers_of(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.update.optimizer, config.lr_factor)
        self.order = torch.Generator().manual_seed(config.seed)
        torch.manual_seed(config.seed)  # dropout starts alike whatever was drawn before
        self.step = 0
        self.history = History()

    def train(self, until: int, evaluate_every: int, checkpoint: Path | None = None, checkpoint_every: int = 0) -> None:
        """Train up to step ``until``, with a progress bar; write ``checkpoint`` at the start, as often as asked, and at
        the end."""
        if self.step == 0 and checkpoint is not None:
            self.save(checkpoint)
        tokens = self.config.batch * self.config.context
        # In a log file a line every ten seconds will do.
        interval = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(total=until, initial=self.step, desc=NAMES[self.method], unit="step", mininterval=interval) as bar:
            start, first = time.perf_counter(), self.step
            while self.step < until:
                self.train_step()
                history, seconds = self.history, time.perf_counter() - start
                if self.step % evaluate_every == 0 or self.step == until:
                    history.validation.append((self.step, self.validation_loss()))
                if checkpoint is not None and (self.step == until or self.step % checkpoint_every == 0):
                    self.save(checkpoint)
                validation = f", val {history.validation[-1][1]:.3f}" if history.validation else ""
                rate = (self.step - first) * tokens / seconds
                bar.set_postfix_str(f"loss {history.loss[-1]:.3f}{validation}, {rate:,.0f} tokens/s", refresh=False)
                bar.update()
        if math.isnan(self.history.loss[-1]):
            raise DemoError(f"training diverged: the loss is NaN at step {self.step}; use a smaller --lr")

    def train_step(self) -> None:
        """One batch forward, backward, and into the optimizer; recorded in ``history``."""
        config, data = self.config, self.text.training
        starts = torch.randint(len(data) - config.context, (config.batch, 1), generator=self.order)
        windows = data[starts + torch.arange(config.context + 1)]
        self.model.train()
        loss = self.model(windows[:, :-1], windows[:, 1:])
        self.model.zero_grad()
        loss.backward()
        if self.step == config.poisoned_step:
            self.model.get_parameter(config.poisoned_parameter).grad[0, 0] = math.nan
        before = time.perf_counter()
        norm, factor, skipped = self.update()
        seconds = time.perf_counter() - before
        if not skipped:
            self.scheduler.step()
        self.step += 1
        history = self.history
        history.loss.append(loss.item())
        history.optimizer_seconds.append(seconds)
        history.grad_norm.append(norm)
        history.clip_factor.append(factor)
        history.skipped.append(skipped)
        report = self.update.report()
        if report is not None:
            history.layer_norms.append(self._layer_norms(report))
            if skipped:
                self._tell(report)

    def _layer_norms(self, report: GradientReport) -> list[float]:
        squares = dict.fromkeys(self.layers, 0.0)
        for line in report:
            squares[line.name.rpartition(".")[0]] += line.norm**2
        return [math.sqrt(square) for square in squares.values()]

    def _tell(self, report: GradientReport) -> None:
        names = ", ".join(str(line) for line in report.not_finite)
        purpose = ", one element of it made NaN on purpose" * (self.step - 1 == self.config.poisoned_step)
        told = f"step {self.step} skipped: not finite is the gradient of {names}{purpose}"
        self.history.skips.append(told)
        tqdm.write(told)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the whole validation text in nats per byte, context by context."""
        self.model.eval()
        data, context = self.text.validation, self.config.context
        length = (len(data) - 1) // context * context
        inputs, targets = data[:length].view(-1, context), data[1 : length + 1].view(-1, context)
        total = 0.0
        for x, y in zip(inputs.split(64), targets.split(64), strict=True):
            total += self.model(x, y).item() * y.numel()
        return total / length

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint that replaces the old one whole or not at all."""
        saved = {
            "format": CHECKPOINT_FORMAT,
            "configuration": vars(self.config),
            "threads": torch.get_num_threads(),
            "step": self.step,
            "model": self.model.state_dict(),
            **self.update.state(),
            "scheduler": self.scheduler.state_dict(),
            "data_order": self.order.get_state(),
            "random": torch.get_rng_state(),
            "history": vars(self.history),
        }
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        write_atomically(path, buffer.getvalue())

    def load(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            DemoError: the file is no checkpoint of this demo, or was made with other options.
        """
        saved = read_checkpoint(path)
        old, new = saved["configuration"], vars(self.config)
        differing = [name for name in new if old.get(name) != new[name]]
        if differing:
            options = ", ".join(
                "another --text" if name == "text" else f"{option(name)} {old.get(name)} (now {new[name]})"
                for name in differing
            )
            raise DemoError(
                f"{path} was made with {options}; resume with the same options, or leave out --resume to start again"
            )
        if saved["threads"] != torch.get_num_threads():
            print(
                f"note: {path} was made with {saved['threads']} threads, torch now uses {torch.get_num_threads()}; "
                "sums in the model are split differently, so that the last bits may differ",
                file=sys.stderr,
            )
        self.model.load_state_dict(saved["model"])
        self.update.load(saved)
        self.scheduler.load_state_dict(saved["scheduler"])
        self.order.set_state(saved["data_order"])
        torch.set_rng_state(saved["random"])
        self.step = saved["step"]
        self.history = History(**saved["history"])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What :meth:`Run.save` wrote.

    Raises:
        DemoError: the file is no checkpoint of this demo.
    """
    try:
        saved = torch.load(path, weights_only=True)
        known = saved["format"] == CHECKPOINT_FORMAT
    except Exception as error:  # noqa: BLE001  whatever a damaged file makes of torch.load
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DemoError(f"{path} is not a readable checkpoint ({reason}); start without --resume") from None
    if not known:
        raise DemoError(f"{path} must have checkpoint format {CHECKPOINT_FORMAT}, got {saved['format']!r}")
    return saved


def option(name: str) -> str:
    """The command-line option that sets ``name``."""
    return "--" + name.replace("_", "-")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` so that a kill or a power cut leaves the old file or the new one, never a part.

    The temporary file lies in the same folder (a rename is atomic within one file system only) and has a fixed name, so
    that a killed run leaves at most one behind, which the next write takes over.
    """
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # the rename itself must reach the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
