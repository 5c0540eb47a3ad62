"""Attention over packed documents, without a mask and without padding.

A mask (B, 1, T, T) is written once and read by every layer, and its kernel computes what it then hides.
Instead, the tokens of a batch are one long row of B*T tokens, cut where documents begin:

    documents    0 0 0 0 1 1 | 2 3 3 3 3 3        B = 2, T = 6
    starts       0       4     6 7         12     of S = 4 documents, and the end

and each document attends by itself (flash attention, which knows these cuts as `cu_seqlens`). Causal
within a document, which is all that a token may see. The work is that of the documents: many short ones
cost less than one long one.

`longest` is at least as long as every document. It decides how much the kernel launches and nothing of
what it computes. It is the length of an empty tensor, not a number: a number would be part of a
compiled graph, and a batch with another longest document would compile another.

The host knows where documents begin, because it cut the rows; a GPU would have to be asked, which
waits for it. So whoever makes a batch says so (`remember`), and otherwise the GPU is asked: slower and
equal. The oracle is the masked path of `engine.models.decoder`.

Covered: CUDA from capability 8 on, fp16 and bf16, heads of up to 256 in multiples of 8, grouped heads.
Documents must stand side by side in their row: one that returns after another is a document anew.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Shapes: B rows, T tokens, N = B*T, S documents, H query heads, K key/value heads, E width of a head,
# L a length that is at least that of every document

LEAST_CAPABILITY = (8, 0)
MOST_HEAD_DIM = 256
LENGTH_STEP = 128
"""The kernels' own block: a finer bound launches nothing less."""


class Packing(NamedTuple):
    """Where the documents of a batch begin."""

    starts_S: Tensor
    """int32 of S + 1: the first token of each document in the flat batch, and the end."""
    longest_L: Tensor
    """Empty but for its length L, in host memory."""


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What the host said of document tensors that are alive."""


def remember(documents_BT: Tensor, on_host_BT: NDArray[np.int64]) -> None:
    """Says which numbers `documents_BT`, on a GPU, holds; it must not be written to afterwards."""
    starts = torch.from_numpy(starts_of(on_host_BT))
    if documents_BT.is_cuda:
        starts = starts.pin_memory()
    longest = int(starts.diff().max())
    _KNOWN[documents_BT] = _packing(starts.to(documents_BT.device, non_blocking=True), longest)


def packing_of(documents_BT: Tensor) -> Packing:
    """Of a batch on any device; waits for a GPU where `remember` was not told."""
    if documents_BT in _KNOWN:
        known: Packing = _KNOWN[documents_BT]
        return known
    begins_N = begins(documents_BT).flatten()
    end = torch.full((1,), begins_N.numel(), device=begins_N.device)
    starts_S = torch.cat([begins_N.nonzero().squeeze(1), end]).int()
    return _packing(starts_S, documents_BT.shape[1])


def _packing(starts_S: Tensor, longest: int) -> Packing:
    longest = -(-longest // LENGTH_STEP) * LENGTH_STEP
    packing = Packing(starts_S, torch.empty(longest, dtype=torch.bool))
    # Lengths that a compiled graph must leave open. Where nobody compiles, nothing is loaded for it.
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        for tensor in packing:
            dynamo.mark_dynamic(tensor, 0)
    return packing


def starts_of(documents_BT: NDArray[np.int64]) -> NDArray[np.int32]:
    """The first token of each document in the flat batch, and the end: int32 of S + 1."""
    begins_BT = np.ones(documents_BT.shape, dtype=bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return np.append(np.flatnonzero(begins_BT), documents_BT.size).astype(np.int32)


def begins(documents_BT: Tensor) -> Tensor:
    """Whether a document begins at each token, bool (B, T)."""
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return begins_BT


def positions(documents_BT: Tensor) -> Tensor:
    """How many tokens of its document stand before each token, (B, T)."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    first_BT = torch.where(begins(documents_BT), place_T, 0).cummax(dim=1).values
    return place_T - first_BT


def attend_packed(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, packing: Packing) -> Tensor:
    """Causal attention within each document, (B, T, H, E)."""
    starts_S, longest = packing.starts_S, packing.longest_L.shape[0]
    y_NHE: Tensor = torch.ops.aten._flash_attention_forward(
        q_BTHE.flatten(0, 1),
        k_BTKE.flatten(0, 1),
        v_BTKE.flatten(0, 1),
        starts_S,
        starts_S,
        longest,
        longest,
        0.0,
        True,
        False,
    )[0]
    return y_NHE.view(q_BTHE.shape)
