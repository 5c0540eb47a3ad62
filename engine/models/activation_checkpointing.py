"""Choose the function that runs the layers of a student: with or without activation checkpointing.

    decoder.run_layer = run_layer            the reference
                        checkpointed(run)    keeps only the layer's input

With checkpointing only the input of each layer is kept for the backward pass, which runs each layer's forward pass
again. This adds a third to the student's arithmetic.

A layer sharded by FSDP2 has hooks that gather its weights before its forward pass and
reduce-scatter its gradients in the backward pass. The checkpointed function then replaces the layer's own
`forward`, inside the hooks: recomputation gathers nothing again.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.models.decoder import AttentionInputs, Decoder, Layer, RunLayer, run_layer
from engine.models.transformers_decoder import TransformersDecoder
from engine.runtime.ranks import is_fsdp

# Shapes: B rows, T tokens, D model width


def without_hooks(layer: nn.Module, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
    """Run the layer eagerly, without its hooks."""
    assert isinstance(layer, Layer)
    return Layer.forward(layer, x_BTD, attention_inputs)


def checkpointed(run: RunLayer) -> RunLayer:
    """Return a function that runs a layer and keeps only its input for the backward pass."""

    def run_checkpointed(
        layer: nn.Module, x_BTD: Tensor, attention_inputs: AttentionInputs
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return run(layer, x_BTD, attention_inputs)
        # Layers draw no random numbers, so no RNG state needs restoring.
        out_BTD: Tensor = checkpoint(
            run, layer, x_BTD, attention_inputs, use_reentrant=False, preserve_rng_state=False
        )
        return out_BTD

    return run_checkpointed


def _run_chosen(layers: nn.ModuleList, run: RunLayer, run_others: RunLayer) -> RunLayer:
    """Return a function that runs `layers` by `run`, and others by `run_others`."""
    chosen = {id(layer) for layer in layers}

    def run_either(layer: nn.Module, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
        return (run if id(layer) in chosen else run_others)(layer, x_BTD, attention_inputs)

    return run_either


def configure_layers(
    decoder: Decoder,
    *,
    packed: bool,
    checkpointing: bool,
    kept_layers: int = 0,
) -> None:
    """Apply the chosen attention and checkpointing to the decoder. With checkpointing, the last
    `kept_layers` keep their activations nevertheless: the backward pass frees them before it recomputes any layer.
    """
    decoder.packed = packed
    if isinstance(decoder, TransformersDecoder):
        decoder.checkpoint_layers(checkpointing, kept_layers)
        return
    sharded = any(is_fsdp(layer) for layer in decoder.layers)
    run: RunLayer = without_hooks if sharded else run_layer
    if checkpointing:
        run = _run_chosen(
            decoder.layers[: len(decoder.layers) - kept_layers], checkpointed(run), run
        )
    decoder.run_layer = run_layer if sharded else run
    if sharded:
        for layer in decoder.layers:
            layer.forward = partial(run, layer)
