"""Read the tensors of a decoder in any storage format, and check that they are finite and not constant."""

# Shapes: D, E widths; N requested rows; U rows without repeats

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.audit.reference import RopeScaling, Shape, Weight
from engine.checks.context import Context
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.packed import stored_tensor, tensor_names
from engine.quant.planes import PackedMatrix, dequantize_rows_reference, take_rows
from engine.verdict import Answer, Numbers

SAMPLED_ROWS = 64
"""Number of rows of a tensor that are checked."""
LISTED = 3
"""Maximum number of faults in a message."""


def held(decoder: Decoder, name: str) -> Tensor | PackedMatrix:
    """Return the tensor `name`, dense or block-quantised; the head of a tied decoder is its embedding.

    In a decoder with sharded layers it is valid until a tensor of another layer is requested.
    """
    decoder.gather_for(name)
    return stored_tensor(decoder, name)


def rows_of(stored: Tensor | PackedMatrix, first: int, count: int) -> Tensor:
    """Return some rows in fp32. Quantised blocks are dequantised by the reference, never by a kernel."""
    if isinstance(stored, Tensor):
        return stored.detach()[first : first + count].float()
    out = torch.empty(count, stored.columns, dtype=torch.float32, device=stored.device)
    dequantize_rows_reference(stored, out, first, count)
    return out


def whole(decoder: Decoder, name: str) -> Tensor:
    """Return a tensor in fp32."""
    stored = held(decoder, name)
    return rows_of(stored, 0, stored.shape[0])


def weights_of(decoder: Decoder) -> Weight:
    """Return the weights of a decoder for the references of the audit."""

    def weight(name: str, rows_N: Tensor | None = None) -> Tensor:
        if rows_N is None:
            return whole(decoder, name)
        tensor = held(decoder, name)
        if isinstance(tensor, Tensor):
            return tensor.detach()[rows_N].float()
        rows_U, which_N = torch.unique(rows_N, return_inverse=True)
        return rows_of(take_rows(tensor, rows_U), 0, len(rows_U))[which_N]

    return weight


def shape_of(config: ModelConfig) -> Shape:
    """Return the shape of a decoder for the references of the audit."""
    scaling, long = config.rope_scaling, config.long_rope
    return Shape(
        layers=config.num_hidden_layers,
        intermediate_size=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        theta=config.rope_theta,
        bias=config.attention_bias,
        qk_norm=config.qk_norm,
        tied=config.tie_word_embeddings,
        window=config.sliding_window,
        qk_norm_whole=config.kind.qk_norm_whole,
        post_norms=config.kind.has_post_norms,
        layers_without_rope=config.layers_without_rope,
        rotary_dim=config.rotary_dim,
        short_factors=() if long is None else long.short_factor,
        long_factors=() if long is None else long.long_factor,
        short_positions=0 if long is None else long.original_max_position_embeddings,
        attention_factor=1.0 if long is None else long.angle_factor(config.max_position_embeddings),
        activation=config.kind.activation,
        pre_norms=config.kind.has_pre_norms,
        norm_offset=config.kind.norm_offset,
        embedding_scale=math.sqrt(config.hidden_size) if config.kind.embeddings_scaled else 1.0,
        query_scalar=config.query_pre_attn_scalar or 0,
        layers_without_window=config.layers_without_window,
        local_theta=config.rope_local_base_freq,
        position_factor=config.rope_factor,
        rope_scaling=None
        if scaling is None
        else RopeScaling(
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original=scaling.original_max_position_embeddings,
        ),
    )


def _faults(decoder: Decoder, whose: str) -> Iterator[str]:
    weight = weights_of(decoder)
    for name in tensor_names(decoder):
        shape = held(decoder, name).shape
        every = max(1, shape[0] // SAMPLED_ROWS) if len(shape) > 1 else 1
        rows = weight(name, torch.arange(0, shape[0], every))
        low, high = (float(value) for value in torch.aminmax(rows))
        if not bool(rows.isfinite().all()):
            yield f"{whose}: {name} has NaN or infinity"
        # Norms of ones and biases of zeros are common initial values; a matrix is never constant.
        elif rows.ndim == 2 and low == high:
            yield f"{whose}: {name} is {low:g} everywhere"


@torch.no_grad()
def weights_alive(context: Context) -> Answer:
    models = {"student": context.student}
    if context.teacher_decoder is not None:
        models["teacher"] = context.teacher_decoder
    faults = [fault for whose, decoder in models.items() for fault in _faults(decoder, whose)]
    tensors = sum(len(tensor_names(decoder)) for decoder in models.values())
    numbers = Numbers(tensors=tensors, faults=len(faults))
    if faults:
        rest = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        return numbers.failed("; ".join(faults[:LISTED]) + rest)
    return numbers.passed(
        f"{tensors} tensors are finite and no matrix is constant, in up to {SAMPLED_ROWS} rows of each"
    )
