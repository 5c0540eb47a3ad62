"""Activation checkpointing: less is kept for the backward pass, and no bit of a gradient changes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.activation_checkpointing import checkpointed
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
