"""Random quantised matrices for tests of matmuls with few rows, and the error of a matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.blocks import BLOCK_TYPES
from engine.quant.tensor import QuantTensor
from evidence.bench.random_weights import random_blocks


def random_matrix(name: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Make blocks whose scales differ by a factor of 3, each with its own minimum."""
    generator = torch.Generator().manual_seed(seed)
    weight = random_blocks(BLOCK_TYPES[name], (rows, columns), generator)
    blocks = weight.blocks.view(-1, weight.type.block_bytes)
    layout = weight.type.in_blocks
    starts = [layout.d] if layout.second is None else [layout.d, layout.second]
    for start in starts:
        halves = blocks[:, start : start + 2].contiguous().view(torch.float16)
        halves *= 0.5 + torch.rand(halves.shape, generator=generator)
        blocks[:, start : start + 2] = halves.view(torch.uint8)
    return weight


def error(y_MN: Tensor, x_MK: Tensor, weight: QuantTensor, bias_N: Tensor | None) -> float:
    w_NK = weight.dequantize().double()
    expected = x_MK.double() @ w_NK.t()
    # Relative to the terms that are summed, not to the sum, which may be near 0 by chance.
    size = (x_MK.double().square() @ w_NK.square().t()).sqrt().norm()
    if bias_N is not None:
        expected += bias_N.double()
    return float((y_MN.double() - expected).norm() / size)
