"""What the kernels of a step read and write, beside weights and caches: all of it on the device.

    Parts       what a product gave, in parts to be added
    Undivided   what is left of an RMS norm for whoever reads a product (`decode.py`)
    Out         where the inputs of the next product go: integers, or floats
    Heads       what attention of one layer has besides queries, keys and values
    Scratch     what attention leaves of each chunk (`decode_attend.py`)

Made before a graph is captured, and kept: a replay is the same work at the same addresses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels.small_m_inputs import BLOCK, Inputs, empty_inputs
from engine.kernels.small_m_table import Config

# Shapes: M rows of a step, K and N columns, P parts of a sum, C chunks, H query heads, E width of a head,
# R half of it, S slots, B blocks of 256 columns

CHUNK = 128
"""Tokens of a row's cache that one program looks at. A sum's order depends on it, so it is one number."""
OUT_TYPES = (torch.int8, torch.float32, torch.int32)
"""Whole numbers, their scales and sums."""


class Parts(NamedTuple):
    """A product's results: their sum over P is what it gave."""

    parts_PMN: Tensor
    """Of more rows than are run, where a product has more."""
    first: int = 0
    """The column that is number 0."""

    @property
    def tensor(self) -> Tensor:
        return self.parts_PMN.view(-1)[self.first :]

    @property
    def splits(self) -> int:
        return self.parts_PMN.shape[0]

    @property
    def rows(self) -> int:
        return self.parts_PMN.shape[1]

    @property
    def row_stride(self) -> int:
        return self.parts_PMN.shape[2]


def parts_of(blocks: int, config: Config) -> int:
    """How many parts a product of rows of `blocks` blocks leaves: of as many blocks each, but for the last."""
    each = -(-blocks // config.splits)
    return -(-blocks // each)


class Out(NamedTuple):
    """Rows for a product to multiply."""

    floats_MK: Tensor
    """Of more rows than are written, where a product has more."""
    codes: Inputs | None
    """Written instead, for a product with blocks."""

    @property
    def columns(self) -> int:
        return self.floats_MK.shape[1]

    def pointers(self) -> tuple[Tensor, ...]:
        # Without codes, pointers of their types that nobody follows.
        codes = self.codes or empty_inputs(1, BLOCK, self.floats_MK.device)
        return self.floats_MK, *codes


class Undivided(NamedTuple):
    """What is left to do for whoever reads the product of rows in blocks: to divide by the norm."""

    squares_MB: Tensor
    """float32, of each block."""
    columns: int
    eps: float


def empty_squares(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, triton.cdiv(columns, BLOCK), dtype=torch.float32, device=device)


class Heads(NamedTuple):
    """What attention of one layer needs besides its queries, keys and values."""

    biases: tuple[Tensor, Tensor, Tensor] | None
    """Of q, k, v, where the products have not added them."""
    norms: tuple[Tensor, Tensor] | None
    """Of q and k."""
    eps: float
    """Of those."""
    turns_S2R: Tensor
    """Cosines and sines of each position."""


class Scratch(NamedTuple):
    """What attention leaves of each chunk, to be joined."""

    sums_CMHE: Tensor
    """float32."""
    softmax_CMH2: Tensor
    """float32."""


def empty_scratch(
    rows: int, capacity: int, shared: int, heads: int, width: int, device: torch.device
) -> Scratch:
    """For rows of up to `capacity` tokens."""
    shape = (triton.cdiv(capacity, CHUNK), rows, heads)
    return Scratch(
        torch.empty(*shape, width, dtype=torch.float32, device=device),
        torch.empty(*shape, 2, dtype=torch.float32, device=device),
    )
