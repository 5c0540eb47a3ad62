"""Activation checkpointing: less is kept for the backward pass, and no bit of a gradient changes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.activation_checkpointing import checkpointed, configure_layers
from engine.models.decoder import Decoder, run_layer
from engine.models.load import new_decoder
from tests.support.budgets import config
from tests.support.decoders import gradients_of, sample_tokens


def kept_bytes(decoder: Decoder) -> int:
    """Of the storages that the graph of one forward pass holds, the weights' own left out."""
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.hidden(*sample_tokens(4))
    return sum(kept.values())


def test_checkpointed_layers_keep_less_and_give_the_same_bits() -> None:
    decoder = new_decoder(config(layers=4), 0)
    expected, gradients = gradients_of(decoder)
    whole = kept_bytes(decoder)
    decoder.run_layer = checkpointed(run_layer)
    found, again_gradients = gradients_of(decoder)
    assert torch.equal(found, expected)
    assert all(torch.equal(again_gradients[n], g) for n, g in gradients.items())
    assert kept_bytes(decoder) < 0.5 * whole


def test_the_last_layers_may_keep_what_they_compute() -> None:
    decoder = new_decoder(config(layers=4), 0)
    _, gradients = gradients_of(decoder)
    kept = []
    for layers in (0, 2, 4):
        configure_layers(decoder, packed=False, checkpointing=True, kept_layers=layers)
        _, again_gradients = gradients_of(decoder)
        assert all(torch.equal(again_gradients[n], g) for n, g in gradients.items())
        kept.append(kept_bytes(decoder))
    none, half, whole = kept
    assert abs(half - (none + whole) / 2) < 0.05 * whole and none < half < whole
