"""Choose the type of each tensor of a converted file.

    quant     matrices                                          norms, biases
    f32       F32                                               F32
    bf16      BF16                                              F32; BF16 in safetensors
    q8_0      Q8_0                                              F32
    q6_k      Q6_K                                              F32
    q4_k_m    Q4_K; Q6_K where an error costs more              F32

q4_k_m has Q6_K for these matrices:

    - the head, which is the embedding if it is tied
    - v and down in the first and the last eighth of the layers, and in every third layer between
    - v in all layers of a model of 80 layers, where eight query heads share it
    - q, k and v of a family whose files have them as one tensor

This is llama.cpp's mixture, with Q6_K instead of Q5_K. If the row length is not a multiple of 256, Q5_0 replaces
Q4_K and Q8_0 replaces Q6_K; if it is no multiple of 32 either, F16 replaces any block type, as in llama.cpp.

Of the block types, an .apr file has only Q4_K and Q6_K; rows whose length is not a multiple of 256 stay F32 there.
Safetensors have no block types. A quant is refused if the format lacks its types.

No torch.
"""

from __future__ import annotations

from engine.errors import UsageError
from engine.models.config import ModelConfig
from engine.models.names import expected_tensors, hf_names
from engine.quant.blocks import BLOCK_TYPES, QUANTS, TYPES_OF, BlockType, fallback

_SHARED_V_LAYERS = 80


def tensor_types(config: ModelConfig, quant: str, format_: str) -> dict[str, BlockType]:
    """Return our tensor name -> type. Raises `UsageError` for a quant that the format lacks."""
    matrix = QUANTS[quant]
    if matrix not in TYPES_OF[format_]:
        having = [name for name, kind in QUANTS.items() if kind in TYPES_OF[format_]]
        raise UsageError(
            f"quant: {format_} — expected {', '.join(having)}, found {quant}",
            hint="a .gguf file has it" if format_ != "gguf" else None,
        )
    shapes = expected_tensors(config)
    types = {}
    for our_name, hf in hf_names(config).items():
        shape = shapes[hf]
        type_name = "F32" if format_ != "safetensors" else matrix
        if len(shape) == 2:
            type_name = _type_in_mixture(config, our_name) if quant == "q4_k_m" else matrix
        types[our_name] = _fitting_type(type_name, shape[-1], format_)
    return types


def _type_in_mixture(config: ModelConfig, our_name: str) -> str:
    """Return the type of a matrix in q4_k_m."""
    head = "embed.weight" if config.tie_word_embeddings else "head.weight"
    if our_name == head:
        return "Q6_K"
    if config.kind.fused and our_name.endswith(
        tuple(f".attention.{projection}.weight" for projection in "qkv")
    ):
        return "Q6_K"
    layers = config.num_hidden_layers
    if our_name.endswith(".attention.v.weight") and layers == _SHARED_V_LAYERS:
        return "Q6_K"
    if our_name.endswith((".attention.v.weight", ".mlp.down.weight")):
        return "Q6_K" if _more_bits(int(our_name.split(".")[1]), layers) else "Q4_K"
    return "Q4_K"


def _more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fitting_type(type_name: str, row_values: int, format_: str) -> BlockType:
    """Return the type for rows of a given length in a format."""
    kind = BLOCK_TYPES[type_name]
    if format_ != "apr":
        return fallback(kind, row_values)
    return kind if row_values % kind.block_size == 0 else BLOCK_TYPES["F32"]
