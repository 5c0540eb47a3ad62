"""Dequantisation in plain torch: the slow, exact way that every faster one is compared with.

The arithmetic is float32, in the order that fixes the last bit:

    Q4_K, Q5_K   (d * sc) * q - (dmin * mn)      each product and the difference rounded once
    Q6_K         (d * sc) * (q - 32)
    Q5_1         d * q + m
    Q4_0, Q5_0   d * (q - 8),  d * (q - 16)
    Q8_0         d * q

A fused multiply-add would round once instead of twice and change that bit, so products and sums are
separate operations here. Any other dtype is the float32 result rounded once to it.

NaN and infinity are values like others: a block whose d is NaN dequantises to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.blocks import BlockType, QuantError
from engine.quant.layout import LAYOUTS, unpack

# Shapes: R rows, C bytes of a row, L values of a row, N blocks, B bytes of a block, E values of a
# block, S sub-blocks of a block, K values of a sub-block

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Values worked on at once: what a processor's cache holds, and enough to keep a GPU busy. It
bounds the memory beside input and output to some 12 bytes for each of these values."""


def chunk_rows(values: int, device: torch.device, sizes: dict[str, int] = CHUNK_VALUES) -> int:
    """How many rows of `values` values to work on at once; at least one."""
    return max(1, sizes.get(device.type, sizes["cuda"]) // max(1, values))


# contract: block-formats-v1
def dequantize(
    blocks_u8: Tensor, type_: BlockType, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values in `blocks_u8`, uint8 of shape (..., row bytes), as `dtype` of shape (..., row
    length); a new tensor on the same device, also for the float types.

    Raises `QuantError` where rows are not whole blocks.
    """
    if blocks_u8.dtype != torch.uint8 or blocks_u8.ndim == 0:
        found = f"{blocks_u8.dtype} of shape {tuple(blocks_u8.shape)}"
        raise QuantError.expected(f"{type_.name} blocks", "bytes", "uint8 of rows", found)
    *lead, count = blocks_u8.shape
    if count % type_.block_bytes:
        raise QuantError.expected(
            f"{type_.name} blocks",
            f"shape {tuple(blocks_u8.shape)}",
            f"rows of a multiple of {type_.block_bytes} bytes",
            f"{count:,}, with {count % type_.block_bytes} left over",
        )
    values = count // type_.block_bytes * type_.block_size
    out = torch.empty(*lead, values, dtype=dtype, device=blocks_u8.device)
    if out.numel() == 0:
        return out
    rows_RC, out_RL = blocks_u8.reshape(-1, count), out.view(-1, values)
    step = chunk_rows(values, out.device)
    for first in range(0, len(rows_RC), step):
        part_RC = rows_RC[first : first + step]
        if type_.name in FLOATS:
            # A copy starts at an address that any dtype may be read from.
            part_RL = part_RC.clone(memory_format=torch.contiguous_format).view(FLOATS[type_.name])
        else:
            blocks_NB = part_RC.reshape(-1, type_.block_bytes)
            part_RL = _dequantize_blocks(blocks_NB, type_).view(-1, values)
        out_RL[first : first + step] = part_RL
    return out


def _dequantize_blocks(blocks_NB: Tensor, type_: BlockType) -> Tensor:
    layout = LAYOUTS[type_.name]
    parts = unpack(blocks_NB, type_)
    value_NE = parts.code_NE.to(torch.float32)
    if layout.zero:
        value_NE.sub_(layout.zero)
    d_N = parts.d_N.to(torch.float32)
    value_NSK = value_NE.view(len(value_NE), -1, layout.sub_block)
    if parts.scale_NS is None:
        value_NSK.mul_(d_N[:, None, None])
    else:
        value_NSK.mul_((d_N[:, None] * parts.scale_NS)[:, :, None])
    if parts.second_N is not None:
        second_N = parts.second_N.to(torch.float32)
        if parts.min_NS is None:
            value_NSK.add_(second_N[:, None, None])
        else:
            value_NSK.sub_((second_N[:, None] * parts.min_NS)[:, :, None])
    return value_NE
