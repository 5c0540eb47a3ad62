"""Runs the layers of a frozen decoder under torch.compile, with one compilation for all layers.

The gain is memory traffic between matmuls: norms, RoPE, silu(gate) * up, residuals, and in fp8 the
rounding of activations are each read and written once instead of about ten times. One layer is
compiled and its code serves all layers, so compiling takes seconds, not minutes. A Q4_K_M file has
two kinds of layers (they differ in their block types), which takes two compilations.

A compilation is specific to shapes. The batch size is dynamic and the sequence length is fixed. A
batch of one row needs a second program, which is compiled only if the run trains on single rows.
Every other shape runs the eager layers, which are slower and give the same output except for
rounding. So no batch of a step, an evaluation or a check ever waits for the compiler. `warm_up`
compiles before the first step, on rows of the run, and compares the output with that of the eager
layers.

Each block-quantised matmul is one opaque custom op, so that torch.compile does not trace into it: a
`PackedLinear` launches our own kernels and writes into a scratch buffer that all layers share, so
tracing would meet pointers and Python state. The custom op exposes only its output shape to the
compiler; what lies between two of them (norms, RoPE, silu(gate) * up, residuals) becomes a few
kernels. The computation itself is `engine.kernels.linear`, unchanged.

The quantised codes are passed as tensor arguments, so that all layers whose matrices have the same
block types share one compilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.data.batches import Batch
from engine.errors import TrainingFailed
from engine.kernels.dequantize import dequantize_rows
from engine.kernels.linear import Scratch, packed_linear
from engine.models.attention import remember
from engine.models.decoder import AttentionInputs, Decoder, run_layer
from engine.models.frozen import join
from engine.models.packed import PackedLinear
from engine.models.transformers_decoder import moved
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix
from engine.teachers.protocol import Teacher

# Shapes: B rows, T tokens, D model width, M rows of activations, N rows of all weights together

# Relative error of one rounding of the matmul operands.
ROUNDING = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}

_SCRATCHES: dict[int, Scratch] = {}
"""Scratch buffers by number, because a custom op can take an integer but no Python object. There is
one per device and dtype.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The output of the compiled layers compared with that of the eager layers, on the same rows."""

    relative_rms: float
    """Relative RMS difference of the last hidden states."""
    allowed: float


class CompiledForward:
    """Runs the compiled layers of a frozen decoder on rows of `length` tokens."""

    def __init__(self, length: int, *, single: bool = False, backend: str = "inductor") -> None:
        self.length = length
        self.single = single
        self.enabled = True
        """False runs the eager layers, for a comparison."""

        # A separate function, so that torch keeps its compilations apart from those of a student's
        # layers.
        def teacher_layer(
            layer: nn.Module, x_BTD: Tensor, attention_inputs: AttentionInputs
        ) -> Tensor:
            return run_layer(layer, x_BTD, attention_inputs)

        # A graph break would silently leave part of the layer uncompiled.
        self._compiled: Any = torch.compile(teacher_layer, fullgraph=True, backend=backend)

    def __call__(
        self, layer: nn.Module, x_BTD: Tensor, attention_inputs: AttentionInputs
    ) -> Tensor:
        rows, length = x_BTD.shape[:2]
        serves = length == self.length and (rows > 1 or self.single)
        if not self.enabled or not serves or torch.is_grad_enabled():
            return run_layer(layer, x_BTD, attention_inputs)
        for tensor in (
            x_BTD,
            attention_inputs.cos_XT1R,
            attention_inputs.sin_XT1R,
            attention_inputs.mask_B1TT,
        ):
            if tensor is not None and tensor.shape[0] == rows > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        out_BTD: Tensor = self._compiled(layer, x_BTD, attention_inputs)
        return out_BTD


def compile_layers(decoder: Decoder, length: int, *, single: bool = False) -> None:
    """Set up the layers of a frozen decoder to be compiled at their first use.

    Dense layers that share an input are joined, and block-quantised layers become custom ops.
    `single` compiles for batches of one row too.
    """
    join(decoder)
    make_opaque(decoder)
    decoder.run_layer, decoder.compiled = CompiledForward(length, single=single), True


def warm_up(
    teacher: Teacher, decoder: Decoder, batch: Batch, rows: int, precision: str
) -> Compared:
    """Compile the layers by running `teacher` on `rows` rows taken from `batch`, which has at least
    one. `compile_layers` was called on its decoder before.

    Raises TrainingFailed if compiled and eager output differ by more than rounding explains.
    """
    run = decoder.run_layer
    assert isinstance(run, CompiledForward)
    chosen_B = np.arange(rows) % len(batch.tokens_BT)
    device = decoder.norm.weight.device
    tokens_BT, documents_BT = (
        torch.from_numpy(np.ascontiguousarray(host_BT[chosen_B])).to(device)
        for host_BT in (batch.tokens_BT, batch.documents_BT)
    )
    # Run once like an evaluation and once like a step, which records the document boundaries first
    # (`remember`): tensors made inside and outside of inference mode need separate compilations.
    teacher.hidden(tokens_BT, documents_BT)
    remember(documents_BT, batch.documents_BT[chosen_B])
    found_BTD = teacher.hidden(tokens_BT, documents_BT).float()
    run.enabled = False
    try:
        wanted_BTD = teacher.hidden(tokens_BT, documents_BT).float()
        error = _apart(found_BTD, wanted_BTD)
        # Each layer adds two rounded branches to the residual, and roundings accumulate like a
        # random walk.
        layers = decoder.config.num_hidden_layers
        allowed = max(2e-4, 4 * ROUNDING[precision] * math.sqrt(2 * layers))
        if error > allowed:
            # Some models, of random weights above all, carry a rounding further than that.
            with moved(decoder, ROUNDING[precision]):
                moved_BTD = teacher.hidden(tokens_BT, documents_BT).float()
            allowed = max(allowed, _apart(moved_BTD, wanted_BTD))
    finally:
        run.enabled = True
    if not error <= allowed:
        raise TrainingFailed(
            f"teacher.compile: compiled output differs from eager: hidden states differ by "
            f"{error:.2g} (relative); expected at most {allowed:.2g}",
            hint="--set teacher.compile=off runs the layers uncompiled",
        )
    return Compared(relative_rms=error, allowed=allowed)


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@torch.library.custom_op("apr::packed_products", mutates_args=())
def packed_products(
    x: Tensor,
    data: Sequence[Tensor],
    types: str,
    rows: Sequence[int],
    bias: Tensor | None,
    scratch: int,
) -> Tensor:
    """Return x (..., K) times each matrix, with the outputs concatenated; `types` are
    comma-separated block type names.
    """
    shared, columns = _SCRATCHES[scratch], x.shape[-1]
    weights = [
        PackedMatrix(BLOCK_TYPES[name], count, columns, part)
        for name, count, part in zip(types.split(","), rows, data, strict=True)
    ]
    together = sum(rows)
    if len(weights) > 1 and shared.fitting(together, columns) == together:
        joined_NK = shared.take(together, columns)
        for weight, part_NK in zip(weights, torch.split(joined_NK, list(rows)), strict=True):
            dequantize_rows(weight, part_NK, 0, weight.rows)
        return F.linear(x, joined_NK, bias)
    biases = [None] * len(weights) if bias is None else torch.split(bias, list(rows))
    outputs = [
        packed_linear(x, weight, part, shared) for weight, part in zip(weights, biases, strict=True)
    ]
    return torch.cat(outputs, dim=-1)


@packed_products.register_fake
def _packed_shape(
    x: Tensor,
    data: Sequence[Tensor],
    types: str,
    rows: Sequence[int],
    bias: Tensor | None,
    scratch: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(rows))


class OpaqueLinear(PackedLinear):
    """A `PackedLinear` that the compiler sees as one custom op."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__(layer.packed, layer.scratch)
        self.register_buffer("bias", layer.bias)
        self.number = id(layer.scratch)
        _SCRATCHES[self.number] = layer.scratch
        self.type_name = layer.packed.type.name
        self.rows = layer.packed.rows

    def forward(self, x: Tensor) -> Tensor:
        return _products(x, [self], self.bias)

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        layers = [self, *(layer for layer in others if isinstance(layer, OpaqueLinear))]
        known = [layer.bias for layer in layers if layer.bias is not None]
        if len(layers) <= len(others) or len(known) not in (0, len(layers)):
            return [self(x), *(layer(x) for layer in others)]
        out = _products(x, layers, torch.cat(known) if known else None)
        return torch.split(out, [layer.rows for layer in layers], dim=-1)


def _products(x: Tensor, layers: Sequence[OpaqueLinear], bias: Tensor | None) -> Tensor:
    first = layers[0]
    out: Tensor = packed_products(
        x,
        [layer.data for layer in layers],
        ",".join(layer.type_name for layer in layers),
        [layer.rows for layer in layers],
        bias,
        first.number,
    )
    return out


def make_opaque(decoder: Decoder) -> None:
    """Replace each `PackedLinear` of the layers with an `OpaqueLinear`."""
    for name, layer in list(decoder.layers.named_modules()):
        if isinstance(layer, PackedLinear):
            decoder.layers.set_submodule(name, OpaqueLinear(layer))
