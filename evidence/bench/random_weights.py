"""Weights of a real shape without a file: random blocks in the types of a Q4_K_M file.

Codes and the scales of sub-blocks are random bytes, so that they are no easier than in a real file (a GPU
multiplies zeros faster). The fp16 scales of a block are set so that weights have the usual standard deviation
of about 0.02. The outputs of such a model are noise; their cost is real.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.export.mixture import tensor_types
from engine.formats.weights import OpenFile, TensorInfo, WeightFile
from engine.models.config import ModelConfig
from engine.models.names import expected_tensors, names_for
from engine.quant.blocks import BlockType, row_bytes
from engine.quant.reference import dequantize
from engine.quant.tensor import QuantTensor

STD = 0.02
"""Standard deviation of the weights."""


class RandomWeights(WeightFile):
    """Weights whose tensors are created on `device` when they are read."""

    path = Path("random weights")
    format = "gguf"
    convention = "gguf"
    warnings = ()
    metadata: Mapping[str, Any] = {}
    _files: Mapping[Path, OpenFile] = {}

    def __init__(self, config: ModelConfig, quant: str, device: torch.device) -> None:
        self.config, self.device = config, device
        self.generator = torch.Generator(device=device).manual_seed(0)
        types = tensor_types(config, quant, "gguf")
        self.types = {name: types[ours] for ours, name in names_for("gguf", config).items()}
        self.tensors = {
            name: TensorInfo(
                name=name,
                dtype=type_.name,
                shape=shape,
                file=self.path,
                start=0,
                bytes=math.prod(shape) // type_.block_size * type_.block_bytes,
            )
            for name, shape in expected_tensors(config, "gguf").items()
            for type_ in (self.types[name],)
        }

    def get(self, name: str) -> Tensor | QuantTensor:
        type_, shape = self.types[name], self.tensors[name].shape
        if len(shape) == 1:
            # Norms near one, biases near zero.
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            drawn = torch.randn(shape, generator=self.generator, device=self.device)
            return middle + STD * drawn
        if type_.block_size == 1:
            drawn = torch.randn(shape, generator=self.generator, device=self.device)
            return STD * drawn
        return random_blocks(type_, shape, self.generator)

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_hf_dict()

    def tokenizer_json(self) -> bytes | None:
        return None


def random_blocks(
    type_: BlockType, shape: tuple[int, ...], generator: torch.Generator
) -> QuantTensor:
    """Make random blocks on the generator's device, with values of standard deviation `STD`."""
    layout = type_.in_blocks
    blocks = torch.randint(
        0,
        256,
        (*shape[:-1], row_bytes(type_, shape[-1])),
        dtype=torch.uint8,
        generator=generator,
        device=generator.device,
    )
    blocks_NB = blocks.view(-1, type_.block_bytes)
    starts = [layout.d] if layout.second is None else [layout.d, layout.second]
    scale = STD / _deviation(type_, starts, blocks_NB[:256].clone())
    for start in starts:
        half = torch.tensor([scale], dtype=torch.float16, device=blocks.device)
        blocks_NB[:, start : start + 2] = half.view(torch.uint8)
    return QuantTensor(blocks=blocks, type=type_, shape=shape)


def _deviation(type_: BlockType, starts: list[int], sample_NB: Tensor) -> float:
    """Return the standard deviation of the values of some blocks whose fp16 scales are set to 1."""
    scale_bytes = torch.ones(1, dtype=torch.float16, device=sample_NB.device).view(torch.uint8)
    for start in starts:
        sample_NB[:, start : start + len(scale_bytes)] = scale_bytes
    return float(dequantize(sample_NB, type_).std())
