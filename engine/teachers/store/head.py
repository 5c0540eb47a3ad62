"""The head of a teacher without the rest of it.

With stored hidden states a run needs the teacher's output matrix and nothing else of it: 1.1 GB of the
15 GB of a 7B teacher in bf16. It is read as `engine.models.load` and `load_packed` read it, from the one
tensor of the file that holds it: of a tied model, the embedding.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.formats.open import open_weights
from engine.kernels.linear import Scratch
from engine.models.config import config_of
from engine.models.head import DenseHead, Head
from engine.models.load import as_floats, check_tied, non_finite, refuse_non_finite
from engine.models.names import check_fits, embedding_and_head
from engine.models.packed import PackedHead, reserve
from engine.quant.planes import PackedMatrix, pack
from engine.quant.tensor import QuantTensor


def load_head(path: str | Path, *, packed: bool, dtype: torch.dtype, device: torch.device) -> Head:
    """The head of the model in `path`: where `packed`, in the blocks of the file if it has any.

    Raises WeightsError.
    """
    with open_weights(Path(path)) as weights:
        config = config_of(weights)
        check_fits(config, weights, weights.path, weights.convention)
        check_tied(config, weights)
        embedding, head = embedding_and_head(weights.convention)
        name = embedding if config.tie_word_embeddings else head
        source = weights.get(name)
        if packed and isinstance(source, QuantTensor):
            # Whether its scales are finite was checked when the store was made of the same bytes.
            matrix = pack(source.to(device))
            matrix = PackedMatrix(matrix.type, *matrix.shape, matrix.data.clone())
            scratch = Scratch(device, dtype)
            reserve(scratch, matrix, whole=False)
            return PackedHead(matrix, scratch)
        values = as_floats(source, dtype, device)
        refuse_non_finite(weights.path, non_finite(name, source, values))
    return DenseHead(values)
