"""Small models in real weight files, with every matrix quantised in one block type."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.formats.apr_write import write_apr
from engine.formats.gguf_write import write_gguf
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import new_decoder
from engine.models.names import joined, names_for, permute_rows, rotated_heads, shifted
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.quantize import quantize
from engine.quant.tensor import QuantTensor

IDS = 101
"""Not a multiple of 16, so the last slice of the head is shorter."""


def make_config(family: str = "qwen2", tied: bool = False, **changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "family": family,
        "vocab_size": IDS,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": tied,
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


@torch.no_grad()
def lively(config: ModelConfig, seed: int = 0) -> Decoder:
    """Make a decoder with random weights, biases and norms, large enough that every part affects the logits."""
    decoder = new_decoder(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in decoder.parameters():
        parameter.add_(0.06 * torch.randn(parameter.shape, generator=generator))
    return decoder.eval()


def write(path: Path, decoder: Decoder, blocks: str, floats: str = "") -> Path:
    """Write the decoder as .gguf or .apr. Its matrices are quantised as `blocks`, except those whose name
    contains `floats`; q and k are in the order that the format's readers expect."""
    convention = path.suffix[1:]
    config = decoder.config
    names = names_for(convention, config)
    parts: list[tuple[str, Tensor | QuantTensor]] = []
    permuted = config.kind.turns_neighbours
    for ours, tensor in decoder.state_dict().items():
        found: Tensor | QuantTensor = tensor
        if tensor.dim() == 2 and not (floats and floats in ours):
            found = quantize(tensor, BLOCK_TYPES[blocks])
        if convention == "gguf":
            found = shifted(config, ours, found, 1)
        if permuted and (heads := rotated_heads(config, ours)):
            found = permute_rows(found, heads)
        parts.append((ours, found))
    tensors = joined(names, parts)
    if convention == "gguf":
        write_gguf(path, config=config.to_hf_dict(), tensors=tensors)
    else:
        metadata = {"rope_type": 0 if permuted else 2}
        write_apr(
            path,
            config=config.to_hf_dict(),
            tensors=tensors,
            tokenizer_json=None,
            metadata=metadata,
        )
    return path


def random_tokens(rows: int, length: int, ids: int = IDS) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    return torch.randint(ids, (rows, length), generator=generator)


def make_batch(rows: int, length: int, ids: int = IDS) -> Batch:
    """Make random rows of one document each; the last position of a row has no label."""
    tokens_BT = random_tokens(rows, length, ids).numpy()
    labels_BT = tokens_BT.copy()
    labels_BT[:, :-1] = tokens_BT[:, 1:]
    labels_BT[:, -1] = -100
    return Batch(
        tokens_BT=tokens_BT,
        documents_BT=tokens_BT * 0,
        labels_BT=labels_BT,
        row_ids=tokens_BT[:, 0] * 0,
    )
