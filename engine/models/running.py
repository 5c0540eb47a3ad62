"""How the layers of a student are run: compiled, or with activation checkpointing.

    decoder.run_layer = run_layer                  eager: the reference
                        CompiledLayers(rows, T)    torch.compile, one compilation for all layers
                        checkpointed(run)          either of them, keeping only the layer's input

Compiling. The operations between matmuls (norms, RoPE, silu(gate) * up, residuals, casts of the
weights) become a few kernels. The layer is compiled instead of the model: all layers have the same
code and structure, so the compiler runs once, for seconds, and the modules, their names and their
weights stay unchanged.

A compilation is specific to shapes, and the one that matters is that of a training batch. So only a
batch of exactly that shape, with gradients, runs compiled; evaluations, checks and everything else
run the eager layers. So only the training step can wait for the compiler, and it warms up before it
begins (`engine.train.compile_student`). Document boundaries are dynamic in the compiled graph.

Checkpointing. The backward pass runs each layer's forward a second time, which adds a third to the
student's arithmetic, and only the input of each layer is kept between the passes.

A layer sharded by FSDP2 has hooks that gather its weights before its forward pass and
reduce-scatter its gradients in the backward pass. The compiled or checkpointed function then
replaces the layer's own `forward`, inside the hooks: the compiler sees no collective, and
recomputation gathers nothing again.
"""

from __future__ import annotations

import importlib.util
import shutil
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.models.decoder import Decoder, Layer, RunLayer, Sight, run_layer
from engine.runtime.ranks import is_fsdp

# Shapes: B rows, T tokens, D model width


def has_compiler(device: str) -> bool:
    """Whether torch.compile can generate code for `device` here: a C compiler, and Triton for a
    GPU.
    """
    c_compiler = any(shutil.which(name) for name in ("gcc", "cc", "clang", "g++"))
    return c_compiler and (device == "cpu" or importlib.util.find_spec("triton") is not None)


def without_hooks(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
    """Run the layer eagerly, without its hooks."""
    assert isinstance(layer, Layer)
    return Layer.forward(layer, x_BTD, sight)


class CompiledLayers:
    """Runs layers compiled, for training batches of `rows` rows of `length` tokens."""

    def __init__(self, rows: int, length: int, backend: str = "inductor") -> None:
        self.shape = (rows, length)

        def student_layer(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
            return without_hooks(layer, x_BTD, sight)

        # A graph break would silently leave part of the layer uncompiled.
        self._compiled: Any = torch.compile(
            student_layer, dynamic=False, fullgraph=True, backend=backend
        )

    def __call__(self, layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
        if x_BTD.shape[:2] != self.shape or not torch.is_grad_enabled():
            return without_hooks(layer, x_BTD, sight)
        out_BTD: Tensor = self._compiled(layer, x_BTD, sight)
        return out_BTD


def checkpointed(run: RunLayer) -> RunLayer:
    """Return a function that runs a layer and keeps only its input for the backward pass."""

    def again(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
        if not torch.is_grad_enabled():
            return run(layer, x_BTD, sight)
        # Layers draw no random numbers, so no RNG state needs restoring.
        out_BTD: Tensor = checkpoint(
            run, layer, x_BTD, sight, use_reentrant=False, preserve_rng_state=False
        )
        return out_BTD

    return again


def set_running(
    decoder: Decoder, *, compiled: CompiledLayers | None, packed: bool, checkpointing: bool
) -> None:
    """Apply the chosen compilation, attention and checkpointing to the decoder."""
    decoder.packed = packed
    sharded = any(is_fsdp(layer) for layer in decoder.layers)
    written = without_hooks if sharded else run_layer
    run: RunLayer = written if compiled is None else compiled
    run = checkpointed(run) if checkpointing else run
    decoder.run_layer = run_layer if sharded else run
    if sharded:
        for layer in decoder.layers:
            layer.forward = partial(run, layer)
