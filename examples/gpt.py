"""A small decoder-only transformer over bytes, in plain PyTorch: the model that ``train_text.py`` trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
"""One token per byte value."""


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised input and added back (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self._drop(self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """GPT-2's shape at a small size: learned positions, pre-norm blocks, the embedding also used as output matrix.

    Args:
        context: longest input, in bytes.
        layers, width, heads: number of blocks, channels, attention heads; ``width`` is a multiple of ``heads``.
        dropout: probability in [0, 1), in the residual branches and the attention weights. Default 0.
    """

    def __init__(self, context: int, layers: int, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)
        # Each block adds two branches to the residual stream; scaled so that its variance does not grow with depth.
        for block in self.blocks:
            for layer in (block.attention_out, block.mlp_out):
                nn.init.normal_(layer.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits ``(batch, length, 256)`` for int64 ``tokens`` ``(batch, length)``; with ``targets``, the mean
        cross-entropy in nats per byte, computed in FP32 whatever the model's dtype."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def continue_text(self, prompt: bytes, length: int, seed: int = 0) -> bytes:
        """``prompt`` and ``length`` further bytes, sampled at temperature 0.8."""
        random = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(length):
            logits = self(torch.tensor([text[-self.context :]]))[0, -1].float()
            text.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=random)))
        return bytes(text)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
