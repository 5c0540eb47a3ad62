"""Load decoders whose layers are in fp8 (`engine.models.fp8`).

The decoder is built on the meta device. Its tensors arrive in the order of the forward pass, as floats of `dtype`. As
soon as a layer is complete, its matrices are quantised and the floats are freed. So only one layer at a time exists as
floats, together with the codes (one byte per weight), and a model that fits in 8 bits can be loaded. Embedding and
norms stay floats.

A watcher is called before and after each layer is quantised. This is how the error of fp8 is
measured without ever holding the whole model as floats (`engine.teachers.fp8`).

Block-quantised weights are first dequantised to `dtype`, as in every other backend, and then
quantised to fp8, so that the error is measured against the model that the other backends run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from engine.errors import BadInput
from engine.formats.open import opened
from engine.formats.weights import WeightFile
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.fp8 import MULTIPLE, round_layer, round_matrices
from engine.models.load import Loaded, layer_wise_decoder_of
from engine.models.read_config import config_of


class LayerWatcher(Protocol):
    """Observer that is called with each layer in order, once the embedding is loaded."""

    def before(self, decoder: Decoder, layer: nn.Module) -> None:
        """Called with `layer` as floats."""
        ...

    def after(self, decoder: Decoder, layer: nn.Module) -> None:
        """Called with the same layer, quantised."""
        ...


def load_fp8_decoder(
    source: str | Path | WeightFile,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    *,
    watcher: LayerWatcher | None = None,
    loaded: Loaded | None = None,
) -> Decoder:
    """Load the decoder from a model folder, a weight file or an open one, with its layers in fp8 on
    `device` and everything else in `dtype`.

    `loaded` is called with each layer once it is quantised. Raises `WeightsError`, and BadInput for
    sides that are not multiples of 16.
    """

    def quantise_layer(decoder: Decoder, layer: nn.Module) -> None:
        if watcher is not None:
            watcher.before(decoder, layer)
        round_layer(layer)
        if watcher is not None:
            watcher.after(decoder, layer)
        if loaded is not None:
            loaded(decoder, layer)

    with opened(source) as weights:
        refuse_sides(config_of(weights))
        return layer_wise_decoder_of(weights, dtype, device, quantise_layer)


def load_fp8_base(
    source: str | Path | WeightFile, dtype: torch.dtype, device: str | torch.device
) -> Decoder:
    """Load the frozen base of adapters, with the matrices of its layers in fp8. Raises `WeightsError` and BadInput."""

    def quantise_layer(_: Decoder, layer: nn.Module) -> None:
        modules = layer.named_modules()
        firsts = {name: float(m.weight[0, 0]) for name, m in modules if isinstance(m, nn.Linear)}
        round_matrices(layer)
        for name, first in firsts.items():
            layer.get_submodule(name).first = first  # type: ignore[assignment]

    with opened(source) as weights:
        refuse_sides(config_of(weights), "student.adapter_base", "floats")
        return layer_wise_decoder_of(weights, dtype, device, quantise_layer)


def refuse_sides(
    config: ModelConfig, setting: str = "teacher.precision", other: str = "bf16"
) -> None:
    """Raise BadInput if the tensor cores cannot multiply the layers' matrices in fp8; `other` is a value of `setting`
    that supports any shape."""
    sides = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query width": config.num_attention_heads * config.head_dim,
        "key width": config.num_key_value_heads * config.head_dim,
    }
    unfit = [f"{name} {side}" for name, side in sides.items() if side % MULTIPLE]
    if unfit:
        raise BadInput.expected(
            setting,
            "fp8",
            f"matrices whose sides are multiples of {MULTIPLE}",
            ", ".join(unfit),
            hint=f"{setting}={other} takes any shape",
        )
