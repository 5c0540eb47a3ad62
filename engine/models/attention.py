"""Compute attention over packed documents, without a mask and without padding.

A mask (B, 1, T, T) would be written once and read by every layer, and its kernel computes scores
that the mask then hides. Instead, the tokens of a batch form one sequence of B*T tokens, split at
the document boundaries:

    documents    0 0 0 0 1 1 | 2 3 3 3 3 3        B = 2, T = 6
    starts       0       4     6 7         12     of S = 4 documents, and the end

Each document attends only to itself, causally (variable-length flash attention, which takes the
boundaries as `cu_seqlens`). The work is that of the documents: many short ones cost less than one
long one.

`longest` is an upper bound of the documents' lengths. It determines how many blocks the kernel
launches, not the result.

Two kernels compute this: torch's flash attention, and cuDNN's (`engine.kernels.cudnn_attention`) where a
`Packing` has `ragged`.

The host knows the boundaries, because it packed the rows; reading them back from a GPU would
synchronise. So the code that makes a batch records them with `record_documents`. Boundaries that are not recorded are
read from the GPU, which is slower and gives the same result. The reference implementation is attention with a mask in
`engine.models.decoder`.

Covered: CUDA from capability 8.0 on, fp16 and bf16, head widths up to 256 in multiples of 8, GQA, sliding windows. The
tokens of a document must be contiguous in their row: a document that returns after another one counts as a new
document.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from engine.kernels import cudnn_attention
from engine.kernels.cudnn_attention import Ragged

# Shapes: B rows, T tokens, N = B*T, S documents, H query heads, K key/value heads, E width of a head,
# L a length that is at least that of every document

MIN_CAPABILITY = (8, 0)
"""Lowest compute capability with packed attention."""
MAX_HEAD_DIM = 256
LENGTH_STEP = 128
"""Multiple to which `longest` is rounded up, in tokens: the kernels' block size, so that no more blocks are
launched."""


class Packing(NamedTuple):
    """The document boundaries of a batch."""

    starts_S: Tensor
    """int32, (S + 1): first token of each document in the flattened batch, and the end."""
    longest: int
    """Upper bound of the documents' lengths, in tokens."""
    ragged: Ragged | None = None
    """The same documents for cuDNN; None for torch's kernel."""


_PACKINGS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Boundaries recorded by `record_documents`, for document tensors that are still alive."""


_STARTS_ON_HOST: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The same boundaries in host memory."""


def record_documents(documents_BT: Tensor, on_host_BT: NDArray[np.int64]) -> None:
    """Record the values of `documents_BT`, which may be on a GPU. It must not be written to
    afterwards.
    """
    on_host_S = starts_of(on_host_BT)
    _STARTS_ON_HOST[documents_BT] = on_host_S
    starts = torch.from_numpy(on_host_S)
    if documents_BT.is_cuda:
        starts = starts.pin_memory()
    longest = int(starts.diff().max())
    _PACKINGS[documents_BT] = _packing(starts.to(documents_BT.device, non_blocking=True), longest)


def packing_of(documents_BT: Tensor) -> Packing:
    """Return the packing of a batch on any device. Synchronises with a GPU unless `record_documents` was
    called.
    """
    if documents_BT in _PACKINGS:
        packing: Packing = _PACKINGS[documents_BT]
        return packing
    begins_N = begins(documents_BT).flatten()
    end = torch.full((1,), begins_N.numel(), device=begins_N.device)
    starts_S = torch.cat([begins_N.nonzero().squeeze(1), end]).int()
    return _packing(starts_S, documents_BT.shape[1])


def starts_on_host(documents_BT: Tensor) -> list[int]:
    """Return the first token of each document in the flattened batch, and the end. Synchronises with a GPU unless
    `record_documents` was called.
    """
    if documents_BT in _STARTS_ON_HOST:
        starts_S: NDArray[np.int32] = _STARTS_ON_HOST[documents_BT]
    else:
        starts_S = starts_of(documents_BT.cpu().numpy())
    starts: list[int] = starts_S.tolist()
    return starts


def _packing(starts_S: Tensor, longest: int) -> Packing:
    longest = -(-longest // LENGTH_STEP) * LENGTH_STEP
    return Packing(starts_S, longest)


def starts_of(documents_BT: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the first token of each document in the flattened batch, and the end: int32 of S + 1."""
    begins_BT = np.ones(documents_BT.shape, dtype=bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return np.append(np.flatnonzero(begins_BT), documents_BT.size).astype(np.int32)


def begins(documents_BT: Tensor) -> Tensor:
    """Return whether a document begins at each token, bool (B, T)."""
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return begins_BT


def positions(documents_BT: Tensor) -> Tensor:
    """Return the position of each token in its document, (B, T)."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    first_BT = torch.where(begins(documents_BT), index_T, 0).cummax(dim=1).values
    return index_T - first_BT


def lengths(documents_BT: Tensor) -> Tensor:
    """Return how many tokens the document of each token has, (B, T)."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    ends_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    ends_BT[:, :-1] = documents_BT[:, 1:] != documents_BT[:, :-1]
    last_BT = torch.where(ends_BT, index_T, documents_BT.shape[1]).flip(1).cummin(1).values.flip(1)
    return last_BT - index_T + positions(documents_BT) + 1


def attend_packed(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    packing: Packing,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Return causal attention within each document, (B, T, H, E).

    Scores are multiplied by `scale`, or 1/sqrt(E); a token attends to at most `window` tokens, itself included.
    """
    starts_S, longest, ragged = packing
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BTHE, k_BTKE, v_BTKE))
    if ragged is not None and cudnn_attention.takes(q_NHE, k_NKE):
        out_NHE = cudnn_attention.attend(q_NHE, k_NKE, v_NKE, ragged, scale=scale, window=window)
        return out_NHE.view(q_BTHE.shape)
    y_NHE: Tensor = torch.ops.aten._flash_attention_forward(
        q_NHE,
        k_NKE,
        v_NKE,
        starts_S,
        starts_S,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        # Number of earlier tokens that a token attends to.
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return y_NHE.view(q_BTHE.shape)
