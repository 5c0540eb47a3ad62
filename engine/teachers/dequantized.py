"""The teacher as dense weights: whatever the file held, the matrix products are plain dense ones
(cuBLAS on a GPU).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.decoder import Decoder

# Shapes: B rows, T tokens, D teacher width, W teacher vocabulary


class DequantizedTeacher:
    """A frozen decoder. `eval` and `requires_grad_(False)` are applied here, so a caller cannot
    forget them.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder.eval().requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        return self.decoder.hidden(tokens_BT, documents_BT)

    def head_weight(self) -> Tensor:
        return self.decoder.head_weight
