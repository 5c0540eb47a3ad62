"""How much of a weight file stays in blocks, read from its header alone, without torch.

`engine.models.load` does what this says: matrices in blocks stay in them, everything else
becomes floats, and one scratch holds the largest matrices of a layer that have one input as floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import WeightsError
from engine.formats.weights import TensorInfo, WeightFile
from engine.models.config import ModelConfig
from engine.models.names import TOGETHER, embedding_and_head, names_for
from engine.quant.blocks import BLOCK_TYPES, BlockType, group_rows

SCRATCH_LIMIT_BYTES = 260 << 20
"""That of `engine.kernels.linear`, here for where torch is not; a test holds it to the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSize:
    """What a packed decoder holds on its device."""

    matrices: int
    """How many stay in blocks; with none there is nothing to pack."""
    block_bytes: int
    float_values: int
    """Values that become floats."""
    layers: tuple[tuple[int, int], ...]
    """Of each layer, the bytes of its blocks and the values that become floats."""
    scratch_values: int
    """Values of the largest matrices of a layer that are multiplied together, from blocks."""

    def weight_bytes(self, float_bytes: int) -> int:
        """Of the weights, with floats of `float_bytes` each."""
        return self.block_bytes + self.float_values * float_bytes

    def layer_bytes(self, float_bytes: int) -> tuple[int, ...]:
        """Of each layer's weights."""
        return tuple(blocks + floats * float_bytes for blocks, floats in self.layers)

    def scratch_bytes(self, float_bytes: int) -> int:
        return min(self.scratch_values * float_bytes, SCRATCH_LIMIT_BYTES)


def packed_size(config: ModelConfig, weights: WeightFile) -> PackedSize:
    """What the decoder in `weights` takes as `load_packed_decoder` holds it. Up to 16 bytes a plane
    of a matrix are not counted.
    """
    ends = embedding_and_head(weights.convention)
    matrices = block_bytes = float_values = 0
    packed: dict[str, int] = {}
    layers = [[0, 0] for _ in range(config.num_hidden_layers)]
    for ours, name in names_for(weights.convention, config).items():
        info = weights.tensors[name]
        kind = stays_packed(info)
        count = math.prod(info.shape)
        place = ours.split(".")
        layer = layers[int(place[1])] if place[0] == "layers" else [0, 0]
        if kind is None:
            float_values += count
            layer[1] += count
            continue
        matrices += 1
        group = group_rows(kind)
        padded = math.ceil(info.shape[0] / group) * group
        size = padded * math.prod(info.shape[1:]) // kind.block_size * kind.block_bytes
        block_bytes += size
        layer[0] += size
        if name not in ends:
            packed[ours.removesuffix(".weight")] = count
    groups = (
        [f"layers.{layer}.{name}" for name in group]
        for layer in range(config.num_hidden_layers)
        for group in TOGETHER
    )
    # Matrices with one input are multiplied together where all are packed.
    together = [sum(map(packed.__getitem__, one)) for one in groups if packed.keys() >= {*one}]
    return PackedSize(
        matrices=matrices,
        block_bytes=block_bytes,
        float_values=float_values,
        layers=tuple((blocks, floats) for blocks, floats in layers),
        scratch_values=max((*packed.values(), *together), default=0),
    )


def stays_packed(info: TensorInfo) -> BlockType | None:
    """The type of the blocks that a tensor stays in; None for one that becomes floats: a vector, or
    rows that are padded to whole blocks, as an .apr may have them.
    """
    kind = BLOCK_TYPES.get(info.dtype)
    if kind is None or kind.block_size == 1 or len(info.shape) != 2:
        return None
    return kind if info.shape[1] % kind.block_size == 0 else None


def without_blocks(where: object) -> WeightsError:
    """The refusal of a file that has no matrix in blocks."""
    return WeightsError.expected(
        "quantized teacher",
        where,
        "a GGUF or .apr file with matrices in blocks",
        "floats alone",
        hint="`engine convert TEACHER teacher.gguf --quant q4_k_m` makes one, and "
        "teacher.backend=dequantized runs this one",
    )
