"""The text of the demo: where it comes from, how it is split, and how well bytes alone predict it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1


class DemoError(Exception):
    """Something the person who started the demo can mend; shown as one line without a traceback."""


@dataclass(frozen=True)
class Text:
    """A text as int64 byte values, cut once: the end is never trained on."""

    source: str
    training: Tensor
    validation: Tensor
    digest: str

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the validation bytes' own distribution, in nats per byte: the lowest loss that any model which
        ignores context can reach on them."""
        total = len(self.validation)
        return -sum(n / total * math.log(n / total) for n in Counter(self.validation.tolist()).values())


def load_text(path: Path | None, context: int) -> Text:
    """``path``, or the help texts of Python's own ``pydoc``, split into 90 % training and 10 % validation text.

    Raises:
        DemoError: the file cannot be read, or one of the two parts is shorter than ``context + 1`` bytes.
    """
    if path is None:
        source, data = "pydoc_data.topics", _pydoc_text()
    else:
        source = str(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DemoError(f"--text must name a readable file; {path}: {error.strerror}") from None
    cut = len(data) - int(len(data) * VALIDATION_SHARE)
    if min(cut, len(data) - cut) < context + 1:
        needed = math.ceil((context + 1) / VALIDATION_SHARE)
        raise DemoError(
            f"the text must have at least {needed:,} bytes, so that {VALIDATION_SHARE:.0%} of it fill one context of "
            f"{context} bytes; {source} has {len(data):,}. Use a longer text or a smaller --context"
        )
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return Text(source, values[:cut], values[cut:], hashlib.sha256(data).hexdigest())


def _pydoc_text() -> bytes:
    """Each paragraph once: many topics repeat parts of others, and what is validated on must not be trained on."""
    paragraphs = (paragraph for topic in topics.values() for paragraph in topic.split("\n\n"))
    return "\n\n".join(dict.fromkeys(p for p in paragraphs if p.strip())).encode()
