"""One layer's cache, read by our kernel: what the decoder's own step uses on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import paged_attention

# Shapes: B slots, T one token, H query heads, K key/value heads, E width of a head, S pages, N columns


class PagedLayer:
    def __init__(self, keys: Tensor, values: Tensor, table_BS: Tensor, position_B: Tensor) -> None:
        self._keys, self._values, self._table_BS = keys, values, table_BS
        self._position_B = position_B

    def attend(
        self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:  # fmt: skip
        qkv_BHE = torch.cat([q_BTHE[:, 0], k_BTKE[:, 0], v_BTKE[:, 0]], dim=1)
        qkv_BN = qkv_BHE.flatten(1)
        cache = (self._keys, self._values, self._table_BS, self._position_B)
        paged_attention.place(qkv_BN, None, 0.0, None, *cache)
        y_BHE = torch.zeros_like(q_BTHE[:, 0])
        paged_attention.attend(qkv_BN, *cache, y_BHE, scale=scale, window=window)
        return y_BHE[:, None]
