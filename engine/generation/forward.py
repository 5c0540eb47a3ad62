"""Run the forward passes of generation: prompts, whose keys and values go into the KV cache, and decode steps with one
token of every slot.

    NativeForward         our decoder with a paged cache, on any device; the reference implementation
    TransformersForward   a model of transformers with its own cache, one sequence at a time

A step always runs all slots, idle ones included, and the shape of a prompt's matmuls depends only on the prompt's
length and on the number of slots. So the shapes do not depend on what the other slots run, and neither does a
sequence: on a CPU it is bit-identical.

On a CPU a prompt is run by itself, in parts of PART tokens. On a GPU several prompts share one pass of a
fixed number of tokens, packed (`engine.models.attention`), where the dtype allows that.

On a GPU with Triton, attention reads the pages of the cache by a kernel (`engine.kernels.paged_attention`). Elsewhere
pages are gathered and torch computes attention, for all sequences with the same number of pages together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.generation.pages import PagedCache
from engine.generation.size import PAGE, pages_for
from engine.models.attention import Packing, attend_packed
from engine.models.decoder import Decoder, LayerCache
from engine.models.fused import has_kernels
from engine.models.head import logits_of
from engine.models.packed import head_of
from engine.models.transformers_decoder import TransformersDecoder

# Shapes: B slots, N prompts, T tokens of a pass, D model width, V vocabulary, H query heads,
# K key/value heads, E width of a head, P pages, S pages or tokens of one sequence

PART = 2048
"""Number of tokens of a prompt that are run at once on a CPU."""
PACK_PER_SLOT, PACK_MIN, PACK_MAX = 64, 256, 4096
"""Number of tokens of a packed pass over prompts: per slot, minimum and maximum of a pass."""
MAX_PACKED_PROMPTS = 64
"""Largest number of prompts in a packed pass."""


class Start(NamedTuple):
    """A prompt to run."""

    slot: int
    """Slot in whose pages the prompt's keys and values are stored."""
    tokens: Sequence[int]
    pages: Sequence[int]


class Forward(Protocol):
    """The forward passes that a generation needs."""

    def start(self, starts: Sequence[Start]) -> Tensor:
        """Run prompts and return the logits (N, V) of their next tokens."""
        ...

    def step(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        """Run each slot's token (int64) at its position (int32; negative: idle) and return the logits
        (B, V) of the next ones.
        """
        ...

    def refresh(self) -> None:
        """Update the forward pass's copies of the model's weights, if it has any."""
        ...


def device_of(decoder: Decoder) -> torch.device:
    """Return the device of a decoder's weights."""
    ours = not isinstance(decoder, TransformersDecoder)
    weight = decoder.norm.weight if ours else decoder.embed.weight
    assert isinstance(weight, Tensor)
    return weight.device


class NativeForward:
    """Our decoder on a paged cache."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._device = cache.table_BS.device
        slots = len(cache.table_BS)
        self._kernels = has_kernels(device_of(decoder))
        self._packs = self._kernels and cache.pages_L2PKTE.dtype != torch.float32
        self._pack_tokens = min(PACK_MAX, max(PACK_MIN, PACK_PER_SLOT * slots))
        self._prompts = min(slots, MAX_PACKED_PROMPTS)

    def start(self, starts: Sequence[Start]) -> Tensor:
        if not self._packs:
            return torch.cat([self._run_prompt(start) for start in starts])
        logits = [self._run_pack(pack) for pack in _packs(starts, self._pack_tokens, self._prompts)]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def step(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        caches: list[LayerCache]
        if self._kernels:
            caches = self._kernel_caches(position_B)
        else:
            caches = self._torch_caches(position_B[:, None].long(), self._cache.table_BS)
        position_B1 = position_B.clamp(min=0)[:, None].long()
        hidden_B1D = self._decoder.hidden_with_cache(
            token_B[:, None], position_B1, position_B1 + 1, caches
        )
        return self._logits(hidden_B1D[:, 0])

    def refresh(self) -> None:
        """Do nothing: there are no copies of the weights."""

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        """Return logits in fp32 if the GPU's matmul can return them: in 16 bits log-probabilities would be too
        imprecise."""
        if self._device.type == "cpu":
            return self._decoder.logits_of(hidden_ND)
        return logits_of(hidden_ND, head_of(self._decoder), self._decoder.config.vocab_size)

    def _kernel_caches(self, position_B: Tensor) -> list[LayerCache]:
        return [
            _PagedLayer(*self._cache.layer(index), self._cache.table_BS, position_B)
            for index in range(len(self._decoder.layers))
        ]

    def _run_prompt(self, start: Start) -> Tensor:
        """Run one prompt in parts, and return its logits (1, V)."""
        tokens_1T = torch.tensor([list(start.tokens)], device=self._device)
        pages_1S = torch.tensor([list(start.pages)], device=self._device)
        total = tokens_1T.shape[1]
        position_1T = torch.arange(total, device=self._device)[None]
        length_11 = torch.full_like(position_1T[:, :1], total)
        for first in range(0, total, PART):
            part = slice(first, first + PART)
            caches = self._torch_caches(position_1T[:, part], pages_1S)
            hidden_1TD = self._decoder.hidden_with_cache(
                tokens_1T[:, part], position_1T[:, part], length_11, caches
            )
        return self._logits(hidden_1TD[:, -1])

    def _torch_caches(self, position_BT: Tensor, pages_BS: Tensor) -> list[LayerCache]:
        at_BT = position_BT.clamp(min=0)
        page_BT = pages_BS.long().gather(1, at_BT // PAGE)
        page_BT = torch.where(position_BT < 0, 0, page_BT)
        groups = _group_by_pages(position_BT, pages_BS)
        return [
            _TorchLayer(*self._cache.layer(index), page_BT, at_BT % PAGE, groups)
            for index in range(len(self._decoder.layers))
        ]

    def _run_pack(self, starts: Sequence[Start]) -> Tensor:
        """Run prompts in one pass and return their logits (N, V)."""
        sizes = [len(start.tokens) for start in starts]
        total = max(self._pack_tokens, -(-sum(sizes) // PACK_MIN) * PACK_MIN)
        padding = total - sum(sizes)
        tokens = [token for start in starts for token in start.tokens] + [0] * padding
        position = [index for size in sizes for index in range(size)] + list(range(padding))
        length = [size for size in sizes for _ in range(size)] + [max(padding, 1)] * padding
        pages = [
            page
            for start, size in zip(starts, sizes, strict=True)
            for page in _page_of_each_token(start.pages, size)
        ]
        pages += [0] * padding
        ends = [0]
        # Add empty documents up to a fixed number, so that no shape depends on the number of prompts.
        for size in [*sizes, padding, *[0] * (self._prompts - len(sizes))]:
            ends.append(ends[-1] + size)
        last_tokens = [end - 1 for end in ends[1 : 1 + len(sizes)]]
        last_tokens += [0] * (self._prompts - len(last_tokens))
        rows = torch.tensor([tokens, position, length, pages], device=self._device)
        tokens_1T, position_1T, length_1T, page_1T = (row[None] for row in rows)
        starts_S = torch.tensor(ends, dtype=torch.int32, device=self._device)
        packing = Packing(starts_S, total)
        caches: list[LayerCache] = [
            _PackedLayer(*self._cache.layer(index), page_1T, position_1T % PAGE, packing)
            for index in range(len(self._decoder.layers))
        ]
        hidden_1TD = self._decoder.hidden_with_cache(tokens_1T, position_1T, length_1T, caches)
        last_N = torch.tensor(last_tokens, device=self._device)
        logits_NV = self._logits(hidden_1TD[0, last_N])
        return logits_NV[: len(starts)]


def _packs(starts: Sequence[Start], tokens: int, prompts: int) -> list[list[Start]]:
    """Split prompts into passes of at most `tokens` tokens and `prompts` prompts. A longer prompt gets its own pass."""
    packs: list[list[Start]] = []
    left = 0
    for start in starts:
        size = len(start.tokens)
        if not packs or size > left or len(packs[-1]) == prompts:
            packs.append([])
            left = tokens
        packs[-1].append(start)
        left -= size
    return packs


def _page_of_each_token(pages: Sequence[int], tokens: int) -> list[int]:
    """Return the page of each of the first `tokens` tokens."""
    return [page for page in pages[: pages_for(tokens)] for _ in range(PAGE)][:tokens]


class _PackedLayer:
    """Cache of a layer for prompts packed in one row: attention to the row's keys, which are also stored in the
    pages."""

    def __init__(
        self, keys: Tensor, values: Tensor, page_1T: Tensor, place_1T: Tensor, packing: Packing
    ) -> None:
        self._keys, self._values = keys, values
        self._page_1T, self._place_1T, self._packing = page_1T, place_1T, packing

    def attend(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:  # fmt: skip
        self._keys[self._page_1T, :, self._place_1T] = k_BTKE
        self._values[self._page_1T, :, self._place_1T] = v_BTKE
        return attend_packed(q_BTHE, k_BTKE, v_BTKE, self._packing, scale=scale, window=window)


class _PagedLayer:
    """Cache of a layer for one token of each slot: attention to the slot's pages by the engine's kernel."""

    def __init__(self, keys: Tensor, values: Tensor, table_BS: Tensor, position_B: Tensor) -> None:
        self._cache = (keys, values, table_BS, position_B)

    def attend(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:  # fmt: skip
        from engine.kernels import paged_attention  # which needs triton

        qkv_BN = torch.cat([q_BTHE[:, 0], k_BTKE[:, 0], v_BTKE[:, 0]], dim=1).flatten(1)
        paged_attention.place(qkv_BN, None, 0.0, None, *self._cache)
        y_BHE = torch.zeros_like(q_BTHE[:, 0])
        paged_attention.attend(qkv_BN, *self._cache, y_BHE, scale=scale, window=window)
        return y_BHE[:, None]


class _Group(NamedTuple):
    """Sequences with the same number of pages."""

    row_N: Tensor
    pages_NS: Tensor
    place_N1T1: Tensor
    """The tokens' positions."""


def _group_by_pages(position_BT: Tensor, pages_BS: Tensor) -> list[_Group]:
    last = position_BT[:, -1].tolist()
    counts = [0 if position < 0 else pages_for(position + 1) for position in last]
    groups = []
    for count in sorted(set(counts) - {0}):
        rows = [row for row, row_count in enumerate(counts) if row_count == count]
        row_N = torch.tensor(rows, device=position_BT.device)
        place_N1T1 = position_BT[row_N][:, None, :, None]
        groups.append(_Group(row_N, pages_BS[row_N, :count].long(), place_N1T1))
    return groups


class _TorchLayer:
    """Cache of a layer with attention by torch: the pages of each sequence are gathered."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        page_BT: Tensor,
        place_BT: Tensor,
        groups: list[_Group],
    ) -> None:
        self._keys, self._values, self._groups = keys, values, groups
        self._page_BT, self._place_BT = page_BT, place_BT

    def attend(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:  # fmt: skip
        self._keys[self._page_BT, :, self._place_BT] = k_BTKE
        self._values[self._page_BT, :, self._place_BT] = v_BTKE
        y_BTHE = torch.zeros_like(q_BTHE)
        q_BHTE = q_BTHE.transpose(1, 2)
        for row_N, pages_NS, place_N1T1 in self._groups:
            k_NKSE, v_NKSE = (
                pages[pages_NS].transpose(1, 2).flatten(2, 3)
                for pages in (self._keys, self._values)
            )
            slot_S = torch.arange(k_NKSE.shape[2], device=k_NKSE.device)
            visible_N1TS = slot_S <= place_N1T1
            if window is not None:
                visible_N1TS &= slot_S > place_N1T1 - window
            y_NHTE = F.scaled_dot_product_attention(
                q_BHTE[row_N],
                k_NKSE,
                v_NKSE,
                attn_mask=visible_N1TS,
                enable_gqa=q_BHTE.shape[1] != k_NKSE.shape[1],
                scale=scale,
            )
            y_BTHE[row_N] = y_NHTE.transpose(1, 2)
        return y_BTHE


class TransformersForward:
    """A model that transformers runs, with one of transformers' caches for each slot."""

    def __init__(self, decoder: TransformersDecoder, slots: int) -> None:
        self._model: Any = decoder.model
        weight: Tensor = decoder.embed.weight  # type: ignore[assignment]
        self._device = weight.device
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._pasts: list[Any] = [None] * slots

    def start(self, starts: Sequence[Start]) -> Tensor:
        for start in starts:
            self._tokens[start.slot], self._pasts[start.slot] = [], None
        return torch.stack([self._next(start.slot, list(start.tokens)) for start in starts])

    def step(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        busy = (position_B >= 0).nonzero()[:, 0].tolist()
        logits = {slot: self._next(slot, [int(token_B[slot])]) for slot in busy}
        blank_V = torch.zeros_like(next(iter(logits.values())))
        return torch.stack([logits.get(slot, blank_V) for slot in range(len(self._tokens))])

    def refresh(self) -> None:
        """Do nothing: there are no copies of the weights."""

    def _next(self, slot: int, new: list[int]) -> Tensor:
        self._tokens[slot] += new
        cache: dict[str, Any] = {}
        if self._pasts[slot] is None:
            new = self._tokens[
                slot
            ]  # no cache yet, or a model without a cache: run all tokens again
        else:
            cache["past_key_values"] = self._pasts[slot]
        tokens_BT = torch.tensor([new], device=self._device)
        out = self._model(input_ids=tokens_BT, use_cache=True, return_dict=True, **cache)
        self._pasts[slot] = getattr(out, "past_key_values", None)
        logits_V: Tensor = out.logits[0, -1]
        return logits_V
