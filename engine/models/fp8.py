"""Linear layers with fp8 matmuls: half the bytes and twice the throughput of bf16.

The format is e4m3: four exponent bits, three mantissa bits, values up to 448, relative rounding
error at most 1/16. Each row of a matrix is scaled so that its largest value is 448:

    scale_r = max_c |a_rc| / 448        code_rc = e4m3(a_rc * (1 / scale_r))

Weights are quantised once, when they are loaded, with one scale per output. Activations are
quantised before each matmul, with one scale per token, so that an outlier in one token costs the
other tokens no precision:

    y_mn = scale_m scale_n (sum_k code_mk code_nk) + bias_n

The tensor cores accumulate in fp32; a product of two codes is exact in it. Layers with the same
input (q, k, v; gate, up) quantise it once and run as one matmul.

There is no `nn.Parameter` here and no gradient of a weight: such a model is used for its outputs, or is the
frozen base of adapters, whose inputs have a gradient (`Fp8Linear.add_input_gradient`). Source of the
scheme: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), and its rowwise form in
`torch._scaled_mm`. Not covered: e5m2, scales of blocks inside a row, matrices whose sides are not
multiples of 16, which the tensor cores do not support.

**The head** (`round_head`), if it is not the embedding, has one scale for all of its weights and one for all
hidden states. Both are powers of two: the tensor cores then return fp32 logits, and the dequantised values are exact in
bf16. The output of the last norm is bounded, |y_i| <= sqrt(D) max |w|, so the scale is known without reading hidden
states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import InternalError
from engine.models.decoder import Decoder, FeedForward, Layer, RMSNorm
from engine.models.fused import has_kernels
from engine.models.head import Head, Slices, logits_of, multiply
from engine.models.names import TOGETHER

if TYPE_CHECKING:
    from engine.kernels.compiler import Variant

# Shapes: M rows of activations, K columns, N rows of a weight, F feed-forward width, G = 2 F

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value of a code."""
SMALLEST_SCALE = 1e-12
"""Scale of an all-zero row, whose codes are zeros whatever the scale."""
LARGEST_ROW = 32768
"""Copy of the limit in `engine.kernels.fp8_quantise`, for machines without Triton; a test checks
that both are equal.
"""
MULTIPLE = 16
"""Number of which both sides of a weight must be multiples."""
SLICE_ROWS = 16384
"""Number of rows of a head that are dequantised at a time."""


def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (M, K) and scales (M, 1) in fp32. A row that contains NaN or infinity
    dequantises to NaN, so that the error stays visible.
    """
    values_MK = x_MK.float()
    # A multiplication, because GPU and CPU divisions differ in the last bit: values half-way
    # between two codes are common in bf16, and the last bit of the scale decides how they round.
    scale_M1 = values_MK.abs().amax(dim=-1, keepdim=True) * (1 / LARGEST)
    scale_M1 = scale_M1.clamp(min=SMALLEST_SCALE)
    # Rounding can leave values above 448, which the cast alone turns into 448 or NaN, depending on
    # the version.
    codes_MK = (values_MK * scale_M1.reciprocal()).clamp(-LARGEST, LARGEST).to(DTYPE)
    return codes_MK, scale_M1


def dequantise_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of the codes, rounded to `dtype`."""
    return (codes.float() * scale).to(dtype)


def matmul(
    codes_MK: Tensor,
    scale_M1: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the matmul (M, N) in `dtype`. On a CPU it is the same sum over the same codes in fp32,
    which is the reference for the GPU.
    """
    if codes_MK.device.type != "cuda":
        out_MN = (codes_MK.float() @ weight_NK.float().t()) * scale_M1 * scale_N
        return (out_MN if bias_N is None else out_MN + bias_N.float()).to(dtype)
    return torch._scaled_mm(
        codes_MK,
        weight_NK.t(),
        scale_a=scale_M1,
        scale_b=scale_N[None],
        bias=bias_N,
        out_dtype=dtype,
        use_fast_accum=False,  # fast accumulation keeps fewer bits and is no faster
    )


def gated_rows_reference(joined_MG: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of silu(gate) * up, with gate and up concatenated: the plain
    implementation, which runs anywhere and is the reference for `engine.kernels.fp8_quantise`.
    """
    gate_MF, up_MF = joined_MG.float().chunk(2, dim=-1)
    return quantise_rows(F.silu(gate_MF) * up_MF)


def to_codes(x_MK: Tensor, *, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Return the result of `quantise_rows`, or of `gated_rows_reference`; in one pass if there is a kernel for it."""
    fits = x_MK.shape[1] // (1 + gated) <= LARGEST_ROW
    if fits and has_kernels(x_MK.device):
        from engine.kernels.fp8_quantise import to_fp8

        codes_MF, scale_M1 = to_fp8(x_MK.contiguous(), gated=gated)
        return codes_MF.view(DTYPE), scale_M1
    return gated_rows_reference(x_MK) if gated else quantise_rows(x_MK)


class Rounded(NamedTuple):
    """Quantised rows that are passed to linear layers instead of a tensor of this shape and dtype."""

    codes_MK: Tensor
    scale_M1: Tensor
    shape: torch.Size
    dtype: torch.dtype


def normed_codes(
    y_BTD: Tensor | None, x_BTD: Tensor, norm: RMSNorm, dtype: torch.dtype
) -> tuple[Tensor, Rounded]:
    """Return x + y, and its norm quantised as the next matmuls read it."""
    from engine.kernels.fp8_quantise import norm_to_fp8

    x_MD = x_BTD.flatten(0, 1)
    y_MD = None if y_BTD is None else y_BTD.flatten(0, 1)
    sum_MD = x_MD if y_MD is None else torch.empty_like(x_MD)
    codes_MD, scale_M1 = norm_to_fp8(y_MD, x_MD, norm.weight, norm.eps, sum_MD)
    return sum_MD.view(x_BTD.shape), Rounded(codes_MD.view(DTYPE), scale_M1, x_BTD.shape, dtype)


def round_norms(decoder: Decoder) -> None:
    """Let norms that run in the engine's kernels (`engine.models.fused`) return quantised rows for the next matmuls."""
    fits = decoder.config.hidden_size <= LARGEST_ROW
    for layer in decoder.layers:
        if isinstance(layer, Layer) and layer.normed is not None and fits:
            layer.normed = normed_codes


def kernels_of(decoder: nn.Module) -> list[Variant]:
    """Return every kernel that the layers of a decoder in fp8 launch."""
    layers = [module for module in decoder.modules() if isinstance(module, Fp8Linear)]
    if not layers or not has_kernels(layers[0].codes.device):
        return []
    from engine.kernels.fp8_quantise import norm_variant, takes, variant

    norms = [
        norm_variant(module.attention_norm.weight.shape[0], torch.bfloat16, add=add)
        for module in decoder.modules()
        if isinstance(module, Layer)
        and module.normed is normed_codes
        and module.attention_norm is not None
        for add in (False, True)
    ]
    gated = {id(module.down) for module in decoder.modules() if isinstance(module, Fp8FeedForward)}
    columns_and_gated = {(layer.codes.shape[1], id(layer) in gated) for layer in layers}
    rows = [
        variant(columns, torch.bfloat16, gated=is_gated)
        for columns, is_gated in sorted(columns_and_gated)
        if takes(columns)
    ]
    return list(dict.fromkeys([*norms, *rows]))


class Fp8Linear(nn.Module):
    """y = x W^T + b with W and x in fp8 and y in the dtype of x."""

    def __init__(self, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self.first: float | None = None
        """The weight in the first row and column before rounding; an adapter's file has it, to detect a wrong base."""
        # Stored as uint8: not every build of torch can compare, hash or sample fp8 tensors.
        self.codes: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("codes", codes_NK.view(torch.uint8))
        self.register_buffer("scale", scale_N)
        self.register_buffer("bias", bias_N)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight (N, K) in bf16; recomputed at each access, for checks."""
        return dequantise_rows(self.codes.view(DTYPE), self.scale[:, None], torch.bfloat16)

    def extra_repr(self) -> str:
        return f"e4m3, {self.codes.shape[0]} x {self.codes.shape[1]}"

    def forward(self, x: Tensor | Rounded) -> Tensor:
        return _multiply(x, self.codes, self.scale, self.bias)

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return this layer's output and those of `others`, which have the same input."""
        rounded = Rounded(*to_codes(x.reshape(-1, x.shape[-1])), x.shape, x.dtype)
        return [layer(rounded) for layer in (self, *others)]

    def add_input_gradient(self, dy_NO: Tensor, dx_NI: Tensor | None) -> Tensor:
        """Return dx + dy W, in the memory of `dx_NI` if there is one: for the adapter of a frozen student."""
        scaled_NO, codes_OI = (
            dy_NO * self.scale.to(dy_NO.dtype),
            self.codes.view(DTYPE).to(dy_NO.dtype),
        )
        return scaled_NO @ codes_OI if dx_NI is None else dx_NI.addmm_(scaled_NO, codes_OI)


class Fp8Together(Fp8Linear):
    """The first of several layers with the same input: it quantises the input once, and runs one matmul
    for all of them.
    """

    def __init__(self, layers: Sequence[Fp8Linear]) -> None:
        codes = torch.cat([layer.codes for layer in layers])
        scale = torch.cat([layer.scale for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        rows = [layer.codes.shape[0] for layer in layers]
        joined = torch.cat(biases) if biases else None
        if len(biases) not in (0, len(rows)):
            raise InternalError("fp8: expected a bias in all layers with one input or in none")
        # Each layer holds a view into the joined tensors, so the values exist once.
        parts = zip(layers, torch.split(codes, rows), torch.split(scale, rows), strict=True)
        for layer, codes_NK, scale_N in parts:
            layer.codes, layer.scale = codes_NK, scale_N
        if joined is not None:
            for layer, bias_N in zip(layers, torch.split(joined, rows), strict=True):
                layer.bias = bias_N
        first = layers[0]
        super().__init__(first.codes, first.scale, first.bias)
        self.rows = rows
        self.joined_codes, self.joined_scale, self.joined_bias = codes, scale, joined

    def together(self, x: Tensor | Rounded, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return this layer's output and those of `others`."""
        out = _multiply(x, self.joined_codes, self.joined_scale, self.joined_bias)
        return torch.split(out, self.rows, dim=-1)


class Fp8FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), with the input of `down` quantised in the same pass that
    computes it.
    """

    def __init__(self, gate: Fp8Together, up: Fp8Linear, down: Fp8Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x_BTD: Tensor | Rounded) -> Tensor:
        gate, down = self.gate, self.down
        joined_BTG = _multiply(x_BTD, gate.joined_codes, gate.joined_scale, None)
        codes_MF, scale_M1 = to_codes(joined_BTG.flatten(0, -2), gated=True)
        y_MD = matmul(codes_MF, scale_M1, down.codes.view(DTYPE), down.scale, None, x_BTD.dtype)
        return y_MD.view(x_BTD.shape)


def _multiply(
    x: Tensor | Rounded, codes_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None
) -> Tensor:
    if isinstance(x, Rounded):
        codes_MK, scale_M1 = x.codes_MK, x.scale_M1
    else:
        codes_MK, scale_M1 = to_codes(x.reshape(-1, x.shape[-1]))
    out_MN = matmul(codes_MK, scale_M1, codes_NK.view(DTYPE), scale_N, bias_N, x.dtype)
    return out_MN.view(*x.shape[:-1], out_MN.shape[-1])


def fp8_linear(weight_NK: Tensor, bias_N: Tensor | None) -> Fp8Linear:
    """Quantise a dense weight and return its layer."""
    codes_NK, scale_N1 = quantise_rows(weight_NK)
    return Fp8Linear(codes_NK, scale_N1.squeeze(1), bias_N)


@torch.no_grad()
def round_matrices(layer: nn.Module) -> None:
    """Replace each `nn.Linear` of a decoder layer with an `Fp8Linear`."""
    for name, linear in list(layer.named_modules()):
        if isinstance(linear, nn.Linear):
            bias = linear.bias
            rounded = fp8_linear(linear.weight, None if bias is None else bias.detach())
            layer.set_submodule(name, rounded)


@torch.no_grad()
def round_layer(layer: nn.Module) -> None:
    """Round the matrices of a frozen decoder layer, and join those with the same input."""
    round_matrices(layer)
    for group in TOGETHER:
        parts: list[Fp8Linear] = [layer.get_submodule(name) for name in group]  # type: ignore[misc]
        layer.set_submodule(group[0], Fp8Together(parts))
    mlp: FeedForward = layer.mlp  # type: ignore[assignment]
    # Only silu has a kernel that quantises; with other activations `down` quantises its input itself.
    if mlp.activation is F.silu:
        layer.mlp = Fp8FeedForward(mlp.gate, mlp.up, mlp.down)  # type: ignore[arg-type]


class Fp8Output(nn.Module):
    """An output matrix in fp8, for hidden states of at most `largest`."""

    def __init__(self, weight_VD: Tensor, largest: float) -> None:
        super().__init__()
        self.scale = _power_of_two(float(weight_VD.abs().amax()))
        self.input_scale = _power_of_two(largest)
        self.codes: Tensor
        self.register_buffer("codes", _to_codes(weight_VD, self.scale).view(torch.uint8))

    @property
    def weight(self) -> Tensor:
        """The dequantised weight (V, D) in bf16; recomputed at each access, for checks."""
        return _values(self.codes, self.scale, torch.bfloat16)

    def as_head(self) -> Head:
        return Fp8Head(self)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_NV = logits_of(x_BTD.flatten(0, -2), self.as_head(), len(self.codes))
        return logits_NV.view(*x_BTD.shape[:-1], -1).to(x_BTD.dtype)


class Fp8Head:
    """The head of an `Fp8Output`."""

    def __init__(self, output: Fp8Output) -> None:
        self._output = output

    @property
    def vocab_size(self) -> int:
        return len(self._output.codes)

    @property
    def width(self) -> int:
        return self._output.codes.shape[1]

    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        return Fp8Slices(self._output, first, columns, dtype)


@dataclass(frozen=True, slots=True)
class Fp8Slices:
    output: Fp8Output
    first: int
    columns: int
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(self.first, self.columns, SLICE_ROWS):
            codes_RD = self.output.codes[first : min(first + SLICE_ROWS, self.columns)]
            yield first, _values(codes_RD, self.output.scale, self.dtype)

    def operand(self, hidden_ND: Tensor) -> Tensor:
        scale = self.output.input_scale
        return _values(_to_codes(hidden_ND, scale), scale, hidden_ND.dtype)

    def project(self, out_NV: Tensor, hidden_ND: Tensor, scale: float) -> None:
        output, codes_VD = self.output, self.output.codes[self.first : self.columns].view(DTYPE)
        fits = len(codes_VD) % MULTIPLE == 0 and out_NV.is_contiguous()
        if not out_NV.is_cuda or not fits or out_NV.dtype != torch.float32:
            operand_ND = self.operand(hidden_ND)
            for first, weight_RD in self:
                column = first - self.first
                part_NR = out_NV[:, column : column + len(weight_RD)]
                multiply(part_NR, operand_ND, weight_RD.t(), scale=scale)
            return
        torch._scaled_mm(
            _to_codes(hidden_ND, output.input_scale),
            codes_VD.t(),
            scale_a=torch.full((), output.input_scale * scale, device=out_NV.device),
            scale_b=torch.full((), output.scale, device=out_NV.device),
            out_dtype=torch.float32,
            use_fast_accum=False,
            out=out_NV,
        )


def _power_of_two(largest: float) -> float:
    """Return the smallest power of two that scales `largest` to at most half of the largest code."""
    return 2.0 ** math.ceil(math.log2(max(largest, SMALLEST_SCALE) * 2 / LARGEST))


def _to_codes(x: Tensor, scale: float) -> Tensor:
    return (x * (1 / scale)).to(DTYPE)


def _values(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return codes.view(DTYPE).to(dtype) * scale


@torch.no_grad()
def round_head(decoder: Decoder) -> None:
    """Replace the head of a decoder with an `Fp8Output`, unless it is the embedding or its sides are no multiples of
    MULTIPLE.
    """
    head = decoder.head
    if not isinstance(head, nn.Linear) or any(side % MULTIPLE for side in head.weight.shape):
        return
    largest = math.sqrt(decoder.config.hidden_size) * float(decoder.norm.factor_D.abs().amax())
    decoder.head = Fp8Output(head.weight, largest)
