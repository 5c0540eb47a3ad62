"""The held-out loss: cross entropy in nats per token on documents that are never trained on.

Every evaluation uses the same rows, so two losses differ only because the models differ. Student,
untrained student and teacher are all evaluated by the same function. Logits are kept in fp32 whatever the
dtype of the hidden states: rounding them to bf16 would hide small differences between models.

To illustrate the loss, `greedy_continuation` continues one fixed held-out prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.data.batches import Batch
from engine.models.head import Head, logits_of, operand_dtype, project, sum_dtype
from engine.plan.memory import EVAL_CHUNK_ROWS

# Shapes: B rows, T tokens, N labelled tokens, D width, V vocabulary


@torch.inference_mode()
def heldout_loss(
    hidden: Callable[[Tensor, Tensor], Tensor],
    head: Head,
    batches: Sequence[Batch],
    device: torch.device,
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    *,
    begun: Callable[[int], None] = lambda number: None,
) -> tuple[float, int]:
    """Return the mean cross entropy in nats over the labelled tokens of `batches`, and the number of these tokens.

    `begun` is called with the number of each batch, from 0, before its forward pass is launched. At that time all
    but the last kernels of the previous batch have finished.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for number, batch in enumerate(batches):
        begun(number)
        tokens_BT, documents_BT, labels_BT = batch.to_torch(device)
        with autocast():
            hidden_BTD = hidden(tokens_BT, documents_BT)
        labels_N = labels_BT.flatten()
        kept = (labels_N >= 0).nonzero().squeeze(1)
        dtype = operand_dtype(hidden_BTD)
        hidden_ND = hidden_BTD.flatten(0, 1)[kept].to(dtype)
        slices = head.slices(head.vocab_size, dtype)
        labels_N = labels_N[kept]
        count += len(kept)
        for start in range(0, len(kept), EVAL_CHUNK_ROWS):
            chunk_ND = hidden_ND[start : start + EVAL_CHUNK_ROWS]
            logits_NV = chunk_ND.new_empty(len(chunk_ND), head.vocab_size, dtype=sum_dtype(dtype))
            project(logits_NV, chunk_ND, slices)
            total += F.cross_entropy(
                logits_NV, labels_N[start : start + EVAL_CHUNK_ROWS], reduction="sum"
            ).double()
    return (float(total) / count if count else float("nan")), count


MAX_PROMPT = 16
"""Largest length of a prompt, in tokens."""


def prompt_of(heldout: Sequence[Batch]) -> list[int]:
    """Return a prompt from the first held-out batch: tokens of one document that end at a labelled position. This is
    the first prompt of MAX_PROMPT tokens, or the longest if there is none of that length."""
    best: list[int] = []
    for batch in heldout[:1]:
        for tokens_T, documents_T, labels_T in zip(
            batch.tokens_BT, batch.documents_BT, batch.labels_BT, strict=True
        ):
            for position in (labels_T >= 0).nonzero()[0].tolist()[: 4 * MAX_PROMPT]:
                first = max(0, position + 1 - MAX_PROMPT)
                in_document = documents_T[first : position + 1] == documents_T[position]
                prompt = tokens_T[first : position + 1][in_document].tolist()
                if len(prompt) > len(best):
                    best = prompt
                if len(best) == MAX_PROMPT:
                    return best
    return best


@torch.inference_mode()
def greedy_continuation(
    hidden: Callable[[Tensor, Tensor], Tensor],
    head: Head,
    prompt: Sequence[int],
    guess: Sequence[int],
    device: torch.device,
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[int]:
    """Return the greedy continuation of `prompt`, with as many tokens as `guess`.

    Jacobi decoding (Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding",
    2023): each forward pass over the whole row replaces every token of the continuation by the most likely one, until
    no token changes. The k-th token is final after at most k passes; repetitive text and a good `guess` need fewer.
    """
    # A guess that another model generated may contain ids beyond this vocabulary.
    row = [*prompt, *(min(token, head.vocab_size - 1) for token in guess)]
    tokens_BT = torch.tensor([row], device=device)
    documents_BT = torch.zeros_like(tokens_BT)
    for _ in range(len(guess) + 1):
        with autocast():
            hidden_ND = hidden(tokens_BT, documents_BT)[0, len(prompt) - 1 : -1]
        tokens_N = logits_of(hidden_ND, head, head.vocab_size).argmax(1)
        if torch.equal(tokens_N, tokens_BT[0, len(prompt) :]):
            break
        tokens_BT[0, len(prompt) :] = tokens_N
    tokens: list[int] = tokens_BT[0, len(prompt) :].tolist()
    return tokens
