"""A tensor kept in its stored quantised blocks, with the shape of its values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.quant.blocks import BlockType, row_bytes
from engine.quant.reference import dequantize


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A block-quantised tensor. `blocks` has the bytes of each row, and `shape` is the shape of the
    values: a matrix of shape (rows, row length) has blocks of shape (rows, row bytes). All other
    dimensions are equal.

    Raises `QuantError` if blocks do not fill a row.
    """

    blocks: Tensor = field(repr=False)
    """uint8; may be a view of a file."""
    type: BlockType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.shape and self.blocks.dtype == torch.uint8, (self.shape, self.blocks.dtype)
        expected = (*self.shape[:-1], row_bytes(self.type, self.shape[-1]))
        assert self.blocks.shape == expected, (self.shape, self.blocks.shape)

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def to(self, device: torch.device | str) -> QuantTensor:
        """Return the same blocks on `device`; nothing is dequantised."""
        return QuantTensor(blocks=self.blocks.to(device), type=self.type, shape=self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values as `dtype` of `shape`: float32 arithmetic, rounded once to `dtype`."""
        return dequantize(self.blocks, self.type, dtype=dtype)
