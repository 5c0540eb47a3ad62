"""Decoders whose layers multiply in 8-bit floats, out of any weight file.

The decoder is the same one, built on the meta device. Its tensors come in the order of the forward
pass, as floats of `dtype`; as soon as a layer is whole, its matrices are rounded to codes and the
floats are gone. So beside the codes, one byte a number, there is one layer as floats at a time: a
teacher that fits in 8 bits can be loaded. Embedding, head and norms stay floats.

A watcher sees each layer twice, before and after it is rounded: that is how the cost of rounding is
measured without the model ever being there as floats (`engine.teachers.fp8`).

Blocks become floats of `dtype` first, as in every other backend, and those are rounded: what is
compared with is the model that the other backends run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from engine.errors import BadInput
from engine.formats.open import open_weights
from engine.formats.weights import WeightFile
from engine.models.config import ModelConfig, config_of
from engine.models.decoder import Decoder
from engine.models.fp8 import MULTIPLE, round_layer
from engine.models.load_layers import Loaded, layer_wise_decoder_of


class LayerWatcher(Protocol):
    """Sees the layers in order, once the embedding is there."""

    def before(self, decoder: Decoder, layer: nn.Module) -> None:
        """`layer` as floats."""
        ...

    def after(self, decoder: Decoder, layer: nn.Module) -> None:
        """The same, rounded."""
        ...


def load_fp8_decoder(
    path: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    *,
    watcher: LayerWatcher | None = None,
    loaded: Loaded | None = None,
) -> Decoder:
    """The decoder in a model folder or weight file, its layers in 8-bit floats on `device`, all else in
    `dtype`. `loaded` is given each layer once it is rounded. Raises `WeightsError`, and BadInput for sides
    that are no multiples of 16.
    """
    with open_weights(Path(path)) as weights:
        return fp8_decoder_of(weights, dtype, device, watcher=watcher, loaded=loaded)


def fp8_decoder_of(
    weights: WeightFile,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    *,
    watcher: LayerWatcher | None = None,
    loaded: Loaded | None = None,
) -> Decoder:
    """As `load_fp8_decoder`, from an open file."""
    refuse_sides(config_of(weights))

    def round_whole(decoder: Decoder, layer: nn.Module) -> None:
        if watcher is not None:
            watcher.before(decoder, layer)
        round_layer(layer)
        if watcher is not None:
            watcher.after(decoder, layer)
        if loaded is not None:
            loaded(decoder, layer)

    return layer_wise_decoder_of(weights, dtype, device, round_whole)


def refuse_sides(config: ModelConfig) -> None:
    """BadInput where the matrix unit does not take the layers' matrices in 8-bit floats."""
    sides = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query width": config.num_attention_heads * config.head_dim,
        "key width": config.num_key_value_heads * config.head_dim,
    }
    wrong = [f"{name} {side}" for name, side in sides.items() if side % MULTIPLE]
    if wrong:
        raise BadInput.expected(
            "teacher.precision",
            "fp8",
            f"matrices whose sides are multiples of {MULTIPLE}",
            ", ".join(wrong),
            hint="teacher.precision=bf16 takes any shape",
        )
