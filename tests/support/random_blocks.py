"""Random quantised matrices for tests of matmuls with few rows, and the error of a matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.blocks import BLOCK_TYPES, BlockType, row_bytes
from engine.quant.tensor import QuantTensor
from evidence.bench.random_weights import random_blocks

PACKAGE_SCALES = {
    "IQ1_S": 0,
    "IQ2_XXS": 0,
    "IQ2_XS": 0,
    "IQ2_S": 0,
    "IQ3_XXS": 0,
    "IQ3_S": 0,
    "TQ1_0": 52,
    "TQ2_0": 64,
}
"""Where the fp16 scale of a block is, in types that the package `gguf` decodes. IQ1_M has it in the
top nibbles of its last four words, and NVFP4 has four 8-bit floats.
"""


def random_matrix(name: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Make blocks whose scales differ by a factor of 3, each with its own minimum. Those that the
    package `gguf` decodes have a scale of 2^-9, and NVFP4 one of 2^-6.
    """
    generator = torch.Generator().manual_seed(seed)
    if BLOCK_TYPES[name].by_package:
        return _of_the_package(BLOCK_TYPES[name], rows, columns, generator)
    weight = random_blocks(BLOCK_TYPES[name], (rows, columns), generator)
    blocks = weight.blocks.view(-1, weight.type.block_bytes)
    layout = weight.type.in_blocks
    starts = [layout.d] if layout.second is None else [layout.d, layout.second]
    for start in starts if layout.d_bits == 16 else ():
        halves = blocks[:, start : start + 2].contiguous().view(torch.float16)
        halves *= 0.5 + torch.rand(halves.shape, generator=generator)
        blocks[:, start : start + 2] = halves.view(torch.uint8)
    return weight


def _of_the_package(
    type_: BlockType, rows: int, columns: int, generator: torch.Generator
) -> QuantTensor:
    shape = (rows, row_bytes(type_, columns))
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    blocks_NB = raw.view(-1, type_.block_bytes)
    half = torch.tensor([0x00, 0x18], dtype=torch.uint8)
    if type_.name == "NVFP4":
        blocks_NB[:, :4] = 8
    elif type_.name == "IQ1_M":
        # Nibbles 0, 0, 8 and 1, the lowest first.
        tops = torch.tensor([0x00, 0x00, 0x80, 0x10], dtype=torch.uint8)
        blocks_NB[:, 49::2] = blocks_NB[:, 49::2] & 15 | tops
    else:
        start = PACKAGE_SCALES[type_.name]
        blocks_NB[:, start : start + 2] = half
    return QuantTensor(blocks=raw, type=type_, shape=(rows, columns))


def error(y_MN: Tensor, x_MK: Tensor, weight: QuantTensor, bias_N: Tensor | None) -> float:
    w_NK = weight.dequantize().double()
    expected = x_MK.double() @ w_NK.t()
    # Relative to the terms that are summed, not to the sum, which may be near 0 by chance.
    size = (x_MK.double().square() @ w_NK.square().t()).sqrt().norm()
    if bias_N is not None:
        expected += bias_N.double()
    return float((y_MN.double() - expected).norm() / size)
