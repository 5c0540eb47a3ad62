"""Hold the KV cache in pages of 64 tokens.

A sequence has a list of pages, which need not be adjacent: its token at position p is in entry p % 64
of its page p // 64. A sequence gets all pages that it may need when it begins, and releases them when it
ends, so it cannot run out of pages. Sequences with the same prompt share the pages that the prompt
fills completely; their further pages are separate.

Page 0 belongs to no sequence: idle slots write to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.generation.size import PAGE
from engine.models.config import ModelConfig

# Shapes: L layers, P pages, K key/value heads, E width of a head, B slots, S pages of a slot, T tokens


class PagePool:
    """The free pages, and the number of sequences that hold each other page."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages."""
        taken = [self._free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from each page; a page without holders is free again."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


class PagedCache:
    """The keys and values of all layers, and the page table of each slot."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        slots: int,
        slot_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = (config.num_key_value_heads, PAGE, config.head_dim)
        # Zeros, because attention multiplies masked values by 0, and 0 times NaN is NaN.
        self.pages_L2PKTE = torch.zeros(
            config.num_hidden_layers, 2, pages, *heads, dtype=dtype, device=device
        )
        self.table_BS = torch.zeros(slots, slot_pages, dtype=torch.int32, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer, each (P, K, T, E)."""
        keys, values = self.pages_L2PKTE[index]
        return keys, values

    def copy(self, from_pages: Sequence[int], to_pages: Sequence[int]) -> None:
        """Copy pages of all layers."""
        if from_pages:
            device = self.pages_L2PKTE.device
            source, target = torch.tensor([from_pages, to_pages], device=device)
            self.pages_L2PKTE[:, :, target] = self.pages_L2PKTE[:, :, source]

    def set_tables(self, slots: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Write the page tables of some slots."""
        width = self.table_BS.shape[1]
        rows = [[*row, *[0] * (width - len(row))] for row in pages]
        device = self.table_BS.device
        slot_N = torch.tensor(list(slots), device=device)
        self.table_BS[slot_N] = torch.tensor(rows, dtype=torch.int32, device=device)
