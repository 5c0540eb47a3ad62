"""The tensors of a decoder by name, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from engine.models.decoder import Decoder


class Tensors(Mapping[str, Tensor]):
    """Parameters and buffers. Of a decoder in parts, a tensor is valid until one of another layer is
    asked for, and asking is a collective: every rank asks for the same in the same order.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._found = dict(decoder.named_parameters()) | dict(decoder.named_buffers())

    def __getitem__(self, name: str) -> Tensor:
        self._decoder.reach(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
