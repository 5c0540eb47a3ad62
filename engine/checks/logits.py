"""Compute logits of a few tokens and their cross entropies.

Logits are computed CHUNK tokens at a time: with a vocabulary of 152k a chunk has 150 MiB in fp32.
"""

# Shapes: B rows, T tokens, N tokens, V vocabulary, D width

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.checks.context import Context
from engine.data.batches import Batch
from engine.data.tokens import TokenStream
from engine.models.head import Head, logits_of

CHUNK = 256
"""Number of tokens whose logits are in memory at a time."""
TOKENS = 512
"""Number of tokens on which models are evaluated: the standard error of a mean of 2 nats is then about 0.1."""

COUNTED = 1 << 25
"""Maximum number of training tokens that are counted for frequencies."""

Hidden = Callable[[Tensor, Tensor], Tensor]


def few_rows(batch: Batch, tokens: int = TOKENS) -> Batch:
    """Return the first rows of a batch that make up about `tokens` tokens; at least one row."""
    return next(batch.split(max(1, tokens // batch.tokens_BT.shape[1])))


def student_hidden(context: Context) -> Hidden:
    def hidden(tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        with torch.no_grad(), context.autocast():
            return context.student.hidden(tokens_BT, documents_BT)

    return hidden


def hidden_of(hidden: Hidden, batch: Batch, device: torch.device) -> Tensor:
    """Return the hidden states of a batch, (N, D)."""
    tokens_BT, documents_BT, _ = batch.to_torch(device)
    return hidden(tokens_BT, documents_BT).flatten(0, 1)


@torch.no_grad()
def cross_entropy(hidden_ND: Tensor, head: Head, columns: int, targets_N: Tensor) -> float:
    """Return the mean cross entropy in nats; negative targets are ignored."""
    total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
    for first in range(0, len(hidden_ND), CHUNK):
        logits_NV = logits_of(hidden_ND[first : first + CHUNK], head, columns)
        part_N = targets_N[first : first + CHUNK].to(logits_NV.device)
        total += F.cross_entropy(logits_NV, part_N.clamp(min=-1), ignore_index=-1, reduction="sum")
    count = int((targets_N >= 0).sum())
    return float(total) / count if count else math.nan


def token_frequencies(train: TokenStream, targets_N: Tensor, columns: int) -> float:
    """Return the cross entropy, in nats, of predicting each target from token frequencies alone.

    The frequencies are those of the training text, with one added to every count.
    """
    counts_V = torch.zeros(columns, dtype=torch.float64)
    for first in range(0, min(len(train), COUNTED), 1 << 22):
        part = torch.from_numpy(train.tokens[first : first + (1 << 22)].astype("int64"))
        counts_V += torch.bincount(part, minlength=columns)[:columns]
    counts_V += 1
    log_share_V = (counts_V / counts_V.sum()).log()
    targets_N = targets_N[targets_N >= 0].cpu()
    return float(-log_share_V[targets_N].mean()) if len(targets_N) else math.nan
