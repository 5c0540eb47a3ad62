"""Make an unsharded copy of a decoder that is sharded over ranks."""

from __future__ import annotations

import torch

from engine.models.decoder import Decoder
from engine.runtime.ranks import is_shard, whole


def is_sharded(decoder: Decoder) -> bool:
    return any(is_shard(parameter) for parameter in decoder.parameters())


def empty_copy(decoder: Decoder) -> Decoder:
    """Return an unsharded decoder of the same shapes on the same device, with uninitialised weights."""
    with torch.device("meta"):
        copy = Decoder(decoder.config)
    copy.to_empty(device=next(decoder.parameters()).device)
    copy.packed, copy.cudnn = decoder.packed, decoder.cudnn
    return copy.train(decoder.training)


@torch.no_grad()
def gather_weights(source: Decoder, target: Decoder) -> None:
    """Copy the weights of a sharded decoder to an unsharded one. A collective."""
    for target_parameter, parameter in zip(target.parameters(), source.parameters(), strict=True):
        target_parameter.copy_(whole(parameter))
