"""A small model whose matrices are of any block types, written by the `gguf` package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.names import names_for
from tests.support.packed_models import IDS, lively, make_config
from tests.support.random_blocks import random_matrix


def written(path: Path, types: Sequence[str], vocab_size: int = IDS) -> Decoder:
    """Write a Qwen2 with its matrices in `types`, in turn, and return the decoder that has the
    values which the package gives for them.
    """
    layers = max(2, math.ceil((len(types) - 2) / 7))
    decoder = lively(make_config(num_hidden_layers=layers, vocab_size=vocab_size))
    config = decoder.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    names = names_for("gguf", config)
    state: dict[str, Tensor] = {}
    turns = itertools.cycle(types)
    for place, (ours, tensor) in enumerate(decoder.state_dict().items()):
        state[ours] = tensor
        if tensor.dim() == 1:
            writer.add_tensor(names[ours], tensor.numpy())
            continue
        kind = next(turns)
        raw = random_matrix(kind, *tensor.shape, seed=place).blocks.numpy()
        type_ = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(names[ours], raw, raw_dtype=type_)
        state[ours] = torch.from_numpy(gguf.quants.dequantize(raw, type_))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoder.load_state_dict(state)
    return decoder
