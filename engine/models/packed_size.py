"""Compute how much of a weight file stays block-quantised, from its header alone and without
torch.

The sizes are those after `engine.models.load`: block-quantised matrices stay in their blocks, all other
tensors become floats, and one scratch buffer holds, as floats, the largest matrices of a layer that
share an input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import WeightsError
from engine.formats.weights import TensorInfo, WeightFile
from engine.models.config import ModelConfig
from engine.models.names import TOGETHER, embedding_and_head, parts
from engine.quant.blocks import BLOCK_TYPES, BlockType, group_rows

SCRATCH_LIMIT_BYTES = 260 << 20
"""Copy of the limit in `engine.kernels.linear`, for code without torch; a test checks that they are
equal.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSize:
    """Sizes of a packed decoder's contents on its device."""

    matrices: int
    """Number of matrices that stay in blocks; if 0, there is nothing to pack."""
    block_bytes: int
    float_values: int
    """Number of values that become floats."""
    layers: tuple[tuple[int, int], ...]
    """For each layer, the bytes of its blocks and the number of values that become floats."""
    scratch_values: int
    """Number of values of the largest block-quantised matrices of a layer that are multiplied
    together.
    """

    def weight_bytes(self, float_bytes: int) -> int:
        """Return the size of the weights in bytes, with floats of `float_bytes` each."""
        return self.block_bytes + self.float_values * float_bytes

    def layer_bytes(self, float_bytes: int) -> tuple[int, ...]:
        """Return the size of each layer's weights in bytes."""
        return tuple(blocks + floats * float_bytes for blocks, floats in self.layers)

    def scratch_bytes(self, float_bytes: int) -> int:
        return min(self.scratch_values * float_bytes, SCRATCH_LIMIT_BYTES)


def packed_size(config: ModelConfig, weights: WeightFile) -> PackedSize:
    """Return the sizes of the decoder in `weights` after `load_packed_decoder`. Padding of up to 16
    bytes per plane of a matrix is not included.
    """
    if not config.native:  # safetensors, which have no blocks
        return PackedSize(matrices=0, block_bytes=0, float_values=0, layers=(), scratch_values=0)
    ends = embedding_and_head(weights.convention)
    matrices = block_bytes = float_values = 0
    packed: dict[str, int] = {}
    layers = [[0, 0] for _ in range(config.num_hidden_layers)]
    for ours, name, shape, _ in parts(config, weights.convention):
        info = weights.tensors[name]
        kind = stays_packed(info)
        count = math.prod(shape)
        path = ours.split(".")
        layer = layers[int(path[1])] if path[0] == "layers" else [0, 0]
        if kind is None:
            float_values += count
            layer[1] += count
            continue
        matrices += 1
        group = group_rows(kind)
        padded = math.ceil(shape[0] / group) * group
        size = padded * math.prod(shape[1:]) // kind.block_size * kind.block_bytes
        block_bytes += size
        layer[0] += size
        if name not in ends:
            packed[ours.removesuffix(".weight")] = count
    groups = (
        [f"layers.{layer}.{name}" for name in group]
        for layer in range(config.num_hidden_layers)
        for group in TOGETHER
    )
    # Matrices with the same input are multiplied together if all are packed.
    together = [
        sum(map(packed.__getitem__, group)) for group in groups if packed.keys() >= {*group}
    ]
    return PackedSize(
        matrices=matrices,
        block_bytes=block_bytes,
        float_values=float_values,
        layers=tuple((blocks, floats) for blocks, floats in layers),
        scratch_values=max((*packed.values(), *together), default=0),
    )


def stays_packed(info: TensorInfo) -> BlockType | None:
    """Return the block type that a tensor keeps. None if it becomes floats: a vector, a float type,
    or rows that are padded to whole blocks, as an .apr may have them.
    """
    kind = BLOCK_TYPES.get(info.dtype)
    if kind is None or kind.layout is None or len(info.shape) != 2:
        return None
    return kind if info.shape[1] % kind.block_size == 0 else None


def without_blocks(where: object) -> WeightsError:
    """Return the error for a file without a matrix that can stay in blocks."""
    return WeightsError.expected(
        "quantized teacher",
        where,
        "a GGUF or .apr file with matrices in blocks",
        "floats alone",
        hint="`engine convert TEACHER teacher.gguf --quant q4_k_m` makes one, and "
        "teacher.backend=dequantized runs this one",
    )
