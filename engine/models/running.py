"""How the layers of a student are run: compiled, or with activations made again in the backward pass.

    decoder.run_layer = run_layer                  as written: the oracle
                        CompiledLayers(rows, T)    torch.compile, one compilation for all layers
                        checkpointed(run)          either, keeping its input alone

Compiling. What lies between products (norms, rotations, silu(gate) * up, residuals, casts of the weights)
becomes a few kernels. A layer is compiled and not the model: all layers have one code and one structure,
so the compiler works once, for seconds, and the modules, their names and their weights stay what they
are.

A compilation belongs to a shape, and the one that matters is that of a training batch. So only a batch
of exactly that shape, with gradients, is run by it; evaluations, checks and anything else go through the
layers as written. Nothing but the step can then wait for a compiler, and the step warms up before it
begins (`engine.train.compile_student`). Where documents begin is left open in the compiled graph.

Checkpointing. Backward runs each layer a second time, for a third more of the forward's arithmetic, and
between the passes only the input of each layer is kept.

A layer that FSDP2 shards has hooks that gather its weights before its forward pass and share out their
gradients in the backward pass. What is compiled or made again is then put between the hooks, as the
layer's own `forward`: no compiler sees a collective, and recomputing gathers nothing anew.
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
    """Whether torch.compile can make code for `device` here: Triton and a C compiler for a GPU."""
    c_compiler = any(shutil.which(name) for name in ("gcc", "cc", "clang", "g++"))
    return c_compiler and (device == "cpu" or importlib.util.find_spec("triton") is not None)


def without_hooks(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
    """The layer as it is written, and nothing that hangs on it."""
    assert isinstance(layer, Layer)
    return Layer.forward(layer, x_BTD, sight)


class CompiledLayers:
    """Runs layers compiled, for training batches of `rows` rows of `length` tokens."""

    def __init__(self, rows: int, length: int, backend: str = "inductor") -> None:
        self.shape = (rows, length)

        def student_layer(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
            return without_hooks(layer, x_BTD, sight)

        # A break of the graph would hide what was not compiled.
        self._compiled: Any = torch.compile(
            student_layer, dynamic=False, fullgraph=True, backend=backend
        )

    def __call__(self, layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
        if x_BTD.shape[:2] != self.shape or not torch.is_grad_enabled():
            return without_hooks(layer, x_BTD, sight)
        out_BTD: Tensor = self._compiled(layer, x_BTD, sight)
        return out_BTD


def checkpointed(run: RunLayer) -> RunLayer:
    """Runs a layer so that only its input is kept for the backward pass."""

    def again(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
        if not torch.is_grad_enabled():
            return run(layer, x_BTD, sight)
        # No layer draws random numbers, so none need be put back.
        out_BTD: Tensor = checkpoint(
            run, layer, x_BTD, sight, use_reentrant=False, preserve_rng_state=False
        )
        return out_BTD

    return again


def set_running(
    decoder: Decoder, *, compiled: CompiledLayers | None, packed: bool, checkpointing: bool
) -> None:
    """Puts what was chosen into effect."""
    decoder.packed = packed
    sharded = any(is_fsdp(layer) for layer in decoder.layers)
    written = without_hooks if sharded else run_layer
    run: RunLayer = written if compiled is None else compiled
    run = checkpointed(run) if checkpointing else run
    decoder.run_layer = run_layer if sharded else run
    if sharded:
        for layer in decoder.layers:
            layer.forward = partial(run, layer)
