"""Decoders whose matrices stay in the blocks of their file.

The decoder is the same one, built on the meta device. Then each of its layers is replaced by what
the file holds for it:

    a matrix in blocks              PackedLinear or PackedEmbedding: the blocks, on the device
    floats, and vectors in blocks   the layer itself, frozen, with dense values of `dtype`

Tensor by tensor: blocks travel as they are, have their rows put in order where the convention has
another (`permute_rows`: whole rows move), and are packed on the device. No weight is ever there as
floats but in the scratch, which is as large as the largest
matrices of a layer that are multiplied together: q, k and v, or gate and up.

A head of its own that is tied is refused as in `engine.models.load`; the tied head is the embedding
itself, one matrix for both. NaN and infinity are refused: in blocks they can only be in the halves
that scale them, so those alone are read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.formats.open import open_weights
from engine.formats.weights import WeightFile
from engine.kernels.linear import Kernel, Scratch
from engine.models.config import config_of
from engine.models.decoder import Decoder
from engine.models.freeze import hold
from engine.models.load import as_floats, non_finite, refuse_non_finite, sources
from engine.models.load_layers import Loaded, announcing
from engine.models.names import TOGETHER, check_fits
from engine.models.packed import PackedEmbedding, PackedLinear, reserve
from engine.models.packed_size import packed_size, without_blocks
from engine.quant.blocks import LAYOUTS
from engine.quant.planes import PackedMatrix, pack
from engine.quant.tensor import QuantTensor


def load_packed_decoder(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    kernel: Kernel = "auto",
    loaded: Loaded | None = None,
) -> Decoder:
    """The decoder in a GGUF or .apr file, its matrices in their blocks on `device`, computing in
    `dtype`. `kernel` says how products are made (`engine.kernels.linear`); `loaded` is given each layer
    once it is whole.

    Raises `WeightsError`, also for a file without a matrix in blocks.
    """
    with open_weights(Path(path)) as weights:
        return packed_decoder_of(weights, dtype, device, kernel=kernel, loaded=loaded)


def packed_decoder_of(
    weights: WeightFile,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    kernel: Kernel = "auto",
    loaded: Loaded | None = None,
) -> Decoder:
    """As `load_packed_decoder`, from an open file."""
    config = config_of(weights)
    check_fits(config, weights, weights.path, weights.convention)
    if not packed_size(config, weights).matrices:
        raise without_blocks(weights.path)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    decoder.eval()
    scratch = Scratch(torch.device(device), dtype)
    problems: list[str] = []
    for ours, name, source in announcing(decoder, sources(weights, config), loaded):
        path, _, leaf = ours.rpartition(".")
        if isinstance(source, QuantTensor) and len(source.shape) == 2:
            on_device = source.to(device)
            problems.extend(_non_finite_blocks(name, on_device))
            _replace(decoder, path, pack(on_device), scratch, kernel)
        else:
            values = as_floats(source, dtype, device)
            problems.extend(non_finite(name, source, values))
            hold(decoder.get_submodule(path), leaf, values)
    refuse_non_finite(weights.path, problems)
    embedding: object = decoder.embed
    if config.tie_word_embeddings and isinstance(embedding, PackedEmbedding):
        decoder.head = PackedLinear(embedding.packed, scratch, kernel=kernel)
    for layer in decoder.layers:
        for group in TOGETHER:
            layers: list[object] = [layer.get_submodule(name) for name in group]
            packed = [each.packed for each in layers if isinstance(each, PackedLinear)]
            if len(packed) == len(group):
                scratch.reserve(sum(weight.rows for weight in packed), packed[0].columns)
    scratch.take(1, 1)  # the memory is taken while the model is loaded, not by the first step
    return decoder


def _replace(
    decoder: Decoder, path: str, weight: PackedMatrix, scratch: Scratch, kernel: Kernel
) -> None:
    """Puts the layer that computes with `weight` in the place of the dense one."""
    reserve(scratch, weight, whole=path not in ("embed", "head"))
    if path == "embed":
        decoder.set_submodule(path, PackedEmbedding(weight, scratch))
    else:
        decoder.set_submodule(path, PackedLinear(weight, scratch, kernel=kernel))


def _non_finite_blocks(name: str, weight: QuantTensor) -> list[str]:
    """What is wrong with a matrix's values, with the share. Synchronizes the device.

    Codes and the scales of sub-blocks are integers, so a value is NaN or infinite where a half of
    its block is.
    """
    layout = LAYOUTS[weight.type.name]
    blocks_NB = weight.blocks.reshape(-1, weight.type.block_bytes)
    starts = [layout.d] if layout.second is None else [layout.d, layout.second]
    halves: list[Tensor] = [
        blocks_NB[:, at : at + 2].contiguous().view(torch.float16) for at in starts
    ]
    if bool(torch.cat(halves).isfinite().all()):
        return []
    return non_finite(name, weight, weight.dequantize())
