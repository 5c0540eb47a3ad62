"""The held-out loss: cross entropy in nats per token on documents that are never trained on.

Every evaluation uses the same rows, so two losses differ only because the models differ. Student,
untrained student and teacher are all evaluated by the same function. Logits are kept in fp32 whatever the
dtype of the hidden states: rounding them to bf16 would hide the differences of interest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.data.batches import Batch
from engine.models.head import Head, operand_dtype, project, sum_dtype
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
    """Return the mean cross entropy in nats over the labelled tokens of `batches`, and their number.

    `begun` is called with the number of each batch, from 0, before its forward pass is launched;
    by then the previous batch is done except for its last kernels.
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
