"""Decoders that are frozen, loaded layer by layer.

The decoder is built on the meta device, and its tensors come in the order of the forward pass. As soon as
a layer is whole it is given to whoever asked for it: to be rounded (`engine.models.fp8_load`), or to be
shared out over several GPUs (`engine.teachers.sharded`). So a model can be loaded of which no more than
one layer would fit as it lies in its file.

Everything is a buffer from the beginning: what is frozen has no `nn.Parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from engine.formats.weights import WeightFile
from engine.models.config import config_of
from engine.models.decoder import Decoder
from engine.models.freeze import hold
from engine.models.load import as_floats, non_finite, refuse_non_finite, sources
from engine.quant.tensor import QuantTensor

Loaded: TypeAlias = Callable[[Decoder, nn.Module], None]
"""Given a decoder that is being loaded and its next layer, which is whole."""
Source: TypeAlias = tuple[str, str, Tensor | QuantTensor]


def layer_wise_decoder_of(
    weights: WeightFile,
    dtype: torch.dtype,
    device: str | torch.device,
    loaded: Loaded,
) -> Decoder:
    """The decoder in an open weight file of any format as floats of `dtype`, frozen; `loaded` is given
    each of its layers. Raises `WeightsError`.
    """
    config = config_of(weights)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    decoder.eval()
    problems: list[str] = []
    for ours, name, source in announcing(decoder, sources(weights, config), loaded):
        path, _, leaf = ours.rpartition(".")
        values = as_floats(source, dtype, device)
        problems.extend(non_finite(name, source, values))
        hold(decoder.get_submodule(path), leaf, values)
    refuse_non_finite(weights.path, problems)
    return decoder


def announcing(
    decoder: Decoder, found: Iterator[Source], loaded: Loaded | None
) -> Iterator[Source]:
    """The same, and `loaded` is called when what comes after a layer's last tensor is asked for."""
    before: str | None = None
    for ours, name, source in found:
        here = layer_named(ours)
        if before is not None and here != before and loaded is not None:
            loaded(decoder, decoder.get_submodule(before))
        before = here
        yield ours, name, source
    if before is not None and loaded is not None:
        loaded(decoder, decoder.get_submodule(before))


def layer_named(ours: str) -> str | None:
    """`layers.3` of `layers.3.mlp.up.weight`; None outside of layers."""
    first, _, rest = ours.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "layers" else None
