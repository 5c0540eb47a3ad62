"""Decoder layers whose weights stay in their quantised blocks.

    PackedLinear      y = x W^T + b, W in blocks        in place of nn.Linear
    PackedEmbedding   the rows that are looked up       in place of nn.Embedding

A weight is dequantised before each matmul into a scratch buffer that all layers share
(`engine.kernels.linear`), and overwritten by the next one. A tied model has one `PackedMatrix` in
both places, and in its head (`engine.models.head.PackedHead`).

There is no `nn.Parameter` here: everything is a buffer, so an optimizer finds nothing, and an input
that requires a gradient is refused. Such a model is used for its outputs, or is the frozen base of
adapters, which compute their input's gradient themselves (`engine.models.adapted_linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engine.kernels.dequantize import dequantize_gathered
from engine.kernels.linear import (
    ROWS,
    Scratch,
    add_input_gradient,
    packed_linear,
    packed_linear_many,
)
from engine.models.decoder import Decoder
from engine.models.head import DenseHead, Head, LogitsHead, PackedHead
from engine.models.names import hf_names
from engine.models.transformers_decoder import TransformersDecoder
from engine.quant.planes import PackedMatrix


class _Packed(nn.Module):
    """A block-quantised matrix, held as one buffer of bytes."""

    def __init__(self, weight: PackedMatrix, scratch: Scratch) -> None:
        super().__init__()
        self._packed = weight
        self.scratch = scratch
        self.data: Tensor
        self.register_buffer("data", weight.data)

    @property
    def packed(self) -> PackedMatrix:
        # Recreate the matrix only after the module was moved, because it caches views of its planes.
        if self._packed.data is not self.data:
            self._packed = PackedMatrix(self._packed.type, *self._packed.shape, self.data)
        return self._packed

    def extra_repr(self) -> str:
        return f"{self._packed.type.name}, {self._packed.rows} x {self._packed.columns}"


# contract: cuda-q4k-frozen-teacher-v1
class PackedLinear(_Packed):
    """Maps (..., columns) to (..., rows) of `weight`, in the scratch's dtype. Raises
    InternalError for an input that requires a gradient.
    """

    def __init__(self, weight: PackedMatrix, scratch: Scratch) -> None:
        super().__init__(weight, scratch)
        self.bias: Tensor | None
        self.register_buffer("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias, self.scratch)

    def add_input_gradient(self, dy_NO: Tensor, dx_NI: Tensor | None) -> Tensor:
        """Return dx + dy W, in the memory of `dx_NI` if there is one: for the adapter of a frozen student."""
        return add_input_gradient(dy_NO, self.packed, self.scratch, dx_NI)

    def as_head(self) -> Head:
        return PackedHead(self.packed, self.scratch)

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return this layer's output and those of `others`, which have the same input. It is one
        matmul if all of them are packed and fit in the scratch.
        """
        layers = [self, *(layer for layer in others if isinstance(layer, PackedLinear))]
        biases = [layer.bias for layer in layers]
        present = [bias for bias in biases if bias is not None]
        if len(layers) <= len(others) or len(present) not in (0, len(biases)):
            return [self(x), *(layer(x) for layer in others)]
        bias = torch.cat(present) if present else None
        weights = [layer.packed for layer in layers]
        return packed_linear_many(x, weights, bias, self.scratch)


class PackedEmbedding(_Packed):
    """Maps token ids of any shape to rows of `weight`, in the scratch's dtype."""

    def forward(self, ids: Tensor) -> Tensor:
        out = torch.empty(
            ids.numel(), self.packed.columns, dtype=self.scratch.dtype, device=self.data.device
        )
        dequantize_gathered(self.packed, ids.flatten(), out)
        return out.view(*ids.shape, -1)


def tensor_names(decoder: Decoder) -> list[str]:
    """Return the names of the decoder's tensors: the engine's names, or those in the module that transformers runs. A
    tied head is not listed."""
    if isinstance(decoder, TransformersDecoder):
        return list(decoder.weight_names)
    return list(hf_names(decoder.config))


def stored_tensor(decoder: Decoder, name: str) -> Tensor | PackedMatrix:
    """Return the tensor `name` (our naming), dense or block-quantised. The head of a tied decoder
    is its embedding.
    """
    path, _, leaf = name.rpartition(".")
    if name == "head.weight" and decoder.head is None:
        path = "embed"
    owner = decoder.get_submodule(path)
    base = getattr(owner, "base", None)
    owner = base if isinstance(base, nn.Module) else owner  # the base of an adapter
    if leaf == "weight" and isinstance(owner, PackedLinear | PackedEmbedding):
        return owner.packed
    tensor = getattr(owner, leaf)
    assert isinstance(tensor, Tensor), name
    return tensor


def head_of(decoder: Decoder) -> Head:
    """Return the head of a decoder: dense, block-quantised or in 8 bits."""
    as_head: Callable[[], Head] | None = getattr(decoder.head, "as_head", None)
    if as_head is not None:
        return as_head()
    weight_VD = decoder.head_weight
    return LogitsHead(decoder.config.vocab_size) if weight_VD is None else DenseHead(weight_VD)


def reserve(scratch: Scratch, weight: PackedMatrix, *, whole: bool) -> None:
    """Reserve space in `scratch` for a weight. If not `whole`, reserve space only for its smallest slice:
    a head can be processed in any number of slices.
    """
    scratch.reserve(weight.rows if whole else min(ROWS, weight.rows), weight.columns)
