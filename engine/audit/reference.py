"""A training step in plain torch, written from the papers: a decoder, the distillation loss, clipping, AdamW and its
schedule.

These are the references of the audit, written to be read. They share no code with the code that they judge: this file
imports nothing of the engine. Decoders and logits are computed in fp32, sums and updates in float64.

    decoder     Qwen2, Qwen3, Llama, Mistral, SmolLM3, OLMo 2, Phi-3, Gemma 3: RMS norms before attention and mlp,
                after them or both, rotary embeddings on the halves of a head or of its first 2 R elements (some
                layers have none), grouped-query attention, silu(gate) * up or gelu(gate) * up. The mask excludes other
                documents, later tokens, and tokens outside a sliding window. A pair (x[i], x[i + R]) of a head is the
                complex number z = x[i] + i x[i + R], which position p rotates by its angle: z e^{i p theta^(-i/R)}
    loss        alpha CE + (1 - alpha) T^2 D(p, q), p and q at temperature T (Hinton et al., 2015); the gradient of the
                logits is autograd's
    update      AdamW (Loshchilov & Hutter, 2019): m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,
                w = w - lr (m' / (sqrt(v') + eps) + decay w),  with m' = m / (1 - b1^t), v' = v / (1 - b2^t)

Gradients of a decoder are computed layer by layer, last layer first, so that only one layer's are in memory at a
time.
"""

# Shapes: B rows, T tokens of a row or of a document, N all tokens, D width, H query heads, K key/value heads,
# E width of a head, R rotary pairs of it, V vocabulary, C tokens of a chunk, M labelled tokens

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100
"""Label of a position without a target."""
ATTENTION_WEIGHTS = 1 << 20
"""Default number of attention weights of one head, over all rows, in memory at a time."""
FP32_ROUNDING = 2.0**-24
"""Maximum relative error of one rounding to fp32."""
SCORE_ROUNDINGS = 4
"""Number of roundings in the difference of an attention score and the log-sum-exp of its row."""

HEAD_ROWS = 8192
"""Number of head rows converted to fp32 at a time."""


class Weight(Protocol):
    """The weights of a decoder."""

    def __call__(self, name: str, rows_N: Tensor | None = None) -> Tensor:
        """Return a tensor, or some rows of it, in fp32."""
        ...


HeadRows = Callable[[int, int], Tensor]
"""Function that returns `count` rows of a head, from row `first` on, rounded as in the matmul to logits."""


def LOGITS(first: int, count: int) -> Tensor:
    """Mark a model without a head, whose hidden states are its logits."""
    raise NotImplementedError


# The decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's scaling of low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int
    """Number of positions of the original pretraining context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Hyperparameters of a decoder that its weights do not determine."""

    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    bias: bool
    """Whether q, k and v have biases."""
    qk_norm: bool
    tied: bool
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """Number of tokens that a token attends to, itself included; None for all."""
    layers_without_rope: tuple[int, ...] = ()
    """Indices of the layers without rotary embeddings."""
    rotary_dim: int = 0
    """Number of leading elements of a head with rotary embeddings; 0 for all."""
    qk_norm_whole: bool = False
    """Whether q is normalised over all its heads together, and k likewise."""
    pre_norms: bool = True
    """Whether the inputs of attention and mlp are normalised."""
    post_norms: bool = False
    """Whether the outputs of attention and mlp are normalised."""
    norm_offset: float = 0.0
    """Constant added to a norm's weight to form its factor."""
    activation: str = "silu"
    """silu or gelu_pytorch_tanh."""
    embedding_scale: float = 1.0
    query_scalar: float = 0.0
    """Number whose square root divides the attention scores; 0 for the width of a head."""
    layers_without_window: tuple[int, ...] = ()
    """Indices of the layers without a sliding window."""
    local_theta: float | None = None
    """`theta` of the layers with a sliding window, if it differs."""
    position_factor: float = 1.0
    """Divisor of the positions in layers that use `theta`."""
    short_factors: tuple[float, ...] = ()
    """Divisors of each rotary pair's frequency in documents of up to `short_positions` tokens (LongRoPE, 2024)."""
    long_factors: tuple[float, ...] = ()
    """Divisors of each rotary pair's frequency in longer documents."""
    short_positions: int = 0
    attention_factor: float = 1.0
    """Factor of the cosines and sines."""

    def window_of(self, layer: int) -> int | None:
        return None if layer in self.layers_without_window else self.window


@dataclass(frozen=True, slots=True)
class Forward:
    """The tensors of a forward pass that the backward pass needs."""

    tokens_N: Tensor
    documents_BT: Tensor
    turns: dict[bool, Tensor]
    """Rotations e^{i p f} of each position in its document and each pair, (N, R): False for layers without a window,
    True for those with one."""
    inputs: list[Tensor]
    """Inputs of each layer and of the final norm, (N, D) each."""
    hidden_ND: Tensor
    """Hidden states after the final norm."""
    rounding: float = 0.0
    """Relative size of the rounding errors that were added; the backward pass adds the same."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A LoRA adapter of a matrix W: W + scale B A is used in its place."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """The decoder of this file.

    With adapters, the weights are W + s B A (`merged`), and only the gradients of A and B are returned: dA = s B^T dW
    and dB = s dW A^T.
    """

    shape: Shape
    weight: Weight
    adapters: Mapping[str, LowRank] = field(default_factory=dict)
    """Adapters by the name of their matrix."""
    attention_weights: int = ATTENTION_WEIGHTS
    """Number of attention weights of one head, over all rows, in memory at a time; at least those of one query."""

    @torch.no_grad()
    def forward(
        self, tokens_BT: Tensor, documents_BT: Tensor, *, keep: bool = False, rounding: float = 0.0
    ) -> Forward:
        """Return the hidden states of some rows and, with `keep`, the inputs of the layers.

        The tokens of a document must be contiguous, and no two rows may share a document. With `rounding`, every
        number that a 16-bit model would round is multiplied by 1 + `rounding` or 1 - `rounding`, so that the change
        of the hidden states shows the effect of rounding alone. If `rounding` is that of fp32, the pass is computed
        in float64, because the sums of an fp32 matmul round as much as the stored numbers, and more if their terms
        cancel.
        """
        shape, weight = self.shape, _widened(self.weight, rounding)
        lengths = [
            length
            for documents_T in documents_BT.cpu()
            for length in torch.unique_consecutive(documents_T, return_counts=True)[1].tolist()
        ]
        turns = {
            windowed: torch.cat(
                [_rotations(shape, length, tokens_BT.device, windowed) for length in lengths]
            )
            for windowed in (False, True)
        }
        tokens_N = tokens_BT.flatten()
        x_ND = weight("embed.weight", tokens_N) * shape.embedding_scale
        inputs = []
        for index in range(shape.layers):
            if keep:
                inputs.append(x_ND)
            parts = {name: weight(f"layers.{index}.{name}") for name in _names(shape)}
            x_ND = self._layer(index, x_ND, documents_BT, turns, parts, rounding)
        if keep:
            inputs.append(x_ND)
        hidden_ND = _norm(shape, x_ND, weight("norm.weight"))
        return Forward(tokens_N, documents_BT, turns, inputs, hidden_ND, rounding)

    def backward(
        self, passes: Sequence[Forward], upstream: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the gradient of every tensor but the head, summed over the passes, last layer first.

        `upstream` is the gradient of each pass's hidden states, (N, D). Passes must have kept their inputs.
        """
        gradients = self._backward(passes, upstream)
        if not self.adapters:
            yield from gradients
            return
        for name, gradient_OI in gradients:
            if (adapter := self.adapters.get(name)) is not None:
                stem, wide = name.removesuffix(".weight"), gradient_OI.dtype
                yield f"{stem}.lora_A", adapter.scale * adapter.b_OR.to(wide).T @ gradient_OI
                yield f"{stem}.lora_B", adapter.scale * gradient_OI @ adapter.a_RI.to(wide).T

    def _backward(
        self, passes: Sequence[Forward], upstream: Sequence[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        shape, weight = self.shape, _widened(self.weight, passes[0].rounding)
        flows = [flow_ND.to(weight("norm.weight").dtype) for flow_ND in upstream]

        def part_backward(
            index: int, prefix: str, names: Sequence[str], run: Callable[..., Tensor]
        ) -> Iterator[tuple[str, Tensor]]:
            weights = {name: weight(prefix + name).detach().requires_grad_() for name in names}
            sums = [torch.zeros_like(weight_) for weight_ in weights.values()]
            for number, pass_ in enumerate(passes):
                x_ND = pass_.inputs[index].detach().requires_grad_()
                with torch.enable_grad():
                    # A scalar whose gradient is the upstream gradient: autograd on a scalar imports no compiler.
                    # A rounding factor of the forward pass is also a factor of the backward pass.
                    y_ND = run(x_ND, pass_.documents_BT, pass_.turns, weights, pass_.rounding)
                    scalar_loss = (y_ND * flows[number]).sum()
                flows[number], *gradients = torch.autograd.grad(
                    scalar_loss, [x_ND, *weights.values()]
                )
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
            yield from ((prefix + name, total) for name, total in zip(names, sums, strict=True))

        yield from part_backward(
            shape.layers,
            "",
            ["norm.weight"],
            lambda x_ND, _, __, parts, ___: _norm(shape, x_ND, parts["norm.weight"]),
        )
        for index in reversed(range(shape.layers)):
            yield from part_backward(
                index, f"layers.{index}.", _names(shape), functools.partial(self._layer, index)
            )
        embedding = torch.zeros_like(weight("embed.weight"))
        for pass_, flow_ND in zip(passes, flows, strict=True):
            embedding.index_add_(0, pass_.tokens_N, flow_ND * shape.embedding_scale)
        yield "embed.weight", embedding

    def _layer(self, index: int, *arguments: Any) -> Tensor:
        return _layer(self.shape, index, self.attention_weights, *arguments)


def merged(weight: Weight, adapters: Mapping[str, LowRank]) -> Weight:
    """Return weights with adapters added, in the dtype of the weights."""

    def adapted(name: str, rows_N: Tensor | None = None) -> Tensor:
        base = weight(name, rows_N)
        if (adapter := adapters.get(name)) is None:
            return base
        b_OR = adapter.b_OR if rows_N is None else adapter.b_OR[rows_N]
        return base + adapter.scale * b_OR.to(base.dtype) @ adapter.a_RI.to(base.dtype)

    return adapted


def _widened(weight: Weight, rounding: float) -> Weight:
    if not 0 < rounding <= FP32_ROUNDING:
        return weight
    return lambda name, rows_N=None: weight(name, rows_N).double()


def _perturbed(x: Tensor, share: float) -> Tensor:
    if not share:
        return x
    return torch.addcmul(x, x, _signs(x.numel(), x.device).view(x.shape), value=share)


@functools.lru_cache(maxsize=8)
def _signs(count: int, device: torch.device) -> Tensor:
    """Return 1 or -1 for each index, from one bit of its multiplicative hash."""
    places = torch.arange(count, device=device) * 2654435761
    return (2 * (places >> 15 & 1) - 1).to(torch.float32)


def _names(shape: Shape) -> list[str]:
    """Return the names of a layer's tensors, relative to the layer."""
    return [
        *(f"mlp.{name}.weight" for name in ("gate", "up", "down")),
        *(f"attention.{name}.weight" for name in "qkvo"),
        *(f"attention.{name}.bias" for name in "qkv" if shape.bias),
        *(f"attention.{name}_norm.weight" for name in "qk" if shape.qk_norm),
        *(f"{name}_norm.weight" for name in ("attention", "mlp") if shape.pre_norms),
        *(f"{name}_out_norm.weight" for name in ("attention", "mlp") if shape.post_norms),
    ]


def _layer(
    shape: Shape,
    index: int,
    attention_weights: int,
    x_ND: Tensor,
    documents_BT: Tensor,
    turns: dict[bool, Tensor],
    parts: Mapping[str, Tensor],
    rounding: float = 0.0,
) -> Tensor:
    def normed(x_ND: Tensor, name: str) -> Tensor:
        norm = parts.get(f"{name}.weight")
        return x_ND if norm is None else _perturbed(_norm(shape, x_ND, norm), rounding)

    def times(x_ND: Tensor, name: str) -> Tensor:
        return x_ND @ parts[f"mlp.{name}.weight"].T

    normed_ND = normed(x_ND, "attention_norm")
    y_ND = _attention(
        shape, index, attention_weights, normed_ND, documents_BT, turns, parts, rounding
    )
    x_ND = _perturbed(x_ND + normed(y_ND, "attention_out_norm"), rounding)
    normed_ND = normed(x_ND, "mlp_norm")
    gated = _perturbed(times(normed_ND, "gate"), rounding)
    both = _perturbed(
        _activated(shape, gated) * _perturbed(times(normed_ND, "up"), rounding), rounding
    )
    return _perturbed(x_ND + normed(times(both, "down"), "mlp_out_norm"), rounding)


def _activated(shape: Shape, x: Tensor) -> Tensor:
    if shape.activation == "silu":
        return x * torch.sigmoid(x)
    # gelu, by tanh (Hendrycks & Gimpel, 2016)
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _norm(shape: Shape, x: Tensor, weight: Tensor) -> Tensor:
    factor = weight + shape.norm_offset
    return x / ((x * x).mean(dim=-1, keepdim=True) + shape.eps).sqrt() * factor


def _attention(
    shape: Shape,
    index: int,
    attention_weights: int,
    x_ND: Tensor,
    documents_BT: Tensor,
    turns: dict[bool, Tensor],
    parts: Mapping[str, Tensor],
    rounding: float,
) -> Tensor:
    """Compute the attention of each token to itself and to the earlier tokens of its document."""
    window, scalar = shape.window_of(index), shape.query_scalar or shape.head_dim
    projections = []
    for name in "qkv":
        y = x_ND @ parts[f"attention.{name}.weight"].T + parts.get(f"attention.{name}.bias", 0.0)
        y_NHE = y.reshape(len(x_ND), -1, shape.head_dim)
        norm = parts.get(f"attention.{name}_norm.weight")
        if norm is not None and shape.qk_norm_whole:
            y_NHE = _norm(shape, y, norm).view(y_NHE.shape)
        elif norm is not None:
            y_NHE = _norm(shape, y_NHE, norm)
        projections.append(_perturbed(y_NHE, rounding))
    q_NHE, k_NKE, v_NKE = projections
    if index not in shape.layers_without_rope:
        rotations_NR = turns[window is not None]
        q_NHE, k_NKE = (_perturbed(_rotate(y, rotations_NR), rounding) for y in (q_NHE, k_NKE))
    rows, length = documents_BT.shape
    shared = shape.heads // shape.kv_heads
    q_BHTE = q_NHE.view(rows, length, *q_NHE.shape[1:]).transpose(1, 2)
    k_BHSE, v_BHSE = (
        y_NKE.view(rows, length, *y_NKE.shape[1:]).transpose(1, 2).repeat_interleave(shared, 1)
        for y_NKE in (k_NKE, v_NKE)
    )
    count = max(1, attention_weights // (rows * length))
    outputs = []
    for begin in range(0, length, count):
        end = min(begin + count, length)
        queries_BHTE = q_BHTE[:, :, begin:end]
        seen_BTS = documents_BT[:, begin:end, None] == documents_BT[:, None, :end]
        seen_BTS = seen_BTS.tril(begin)
        if window is not None:
            seen_BTS = seen_BTS.triu(begin - window + 1)
        arguments = queries_BHTE, k_BHSE[:, :, :end], v_BHSE[:, :, :end], seen_BTS, scalar, rounding
        # The attention weights of all queries would not fit in memory for the backward pass.
        if torch.is_grad_enabled() and count < length:
            outputs.append(_Recomputed.apply(*arguments))  # type: ignore[no-untyped-call]
        else:
            outputs.append(_attend(*arguments))
    outputs_ND = torch.cat(outputs, 1).flatten(0, 1)
    return _perturbed(outputs_ND, rounding) @ parts["attention.o.weight"].T


def _attend(
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    seen_BTS: Tensor,
    scalar: float,
    rounding: float,
) -> Tensor:
    """Return the attention output of some queries over the keys that they attend to, heads concatenated, (B, T,
    H*E)."""
    scores_BHTS = q_BHTE @ k_BHSE.transpose(2, 3) / math.sqrt(scalar)
    # Mask before softmax takes the maximum, because the score of a later token may be arbitrarily large.
    scores_BHTS = scores_BHTS.masked_fill(~seen_BTS[:, None], -math.inf)
    if rounding:
        sizes_BHTS = q_BHTE.detach().abs() @ k_BHSE.detach().abs().transpose(2, 3)
        arguments = scores_BHTS, v_BHSE, sizes_BHTS / math.sqrt(scalar), rounding
        output_BHTE: Tensor = _RoundedAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        output_BHTE = torch.softmax(scores_BHTS, dim=3) @ v_BHSE
    return output_BHTE.transpose(1, 2).flatten(2)


class _RoundedAttention(torch.autograd.Function):
    """softmax(scores) @ v, with roundings at the same points as in fused attention (Dao et al., 2022).

    Its backward pass recomputes the weights as P = exp(S - L) from scores S and L = log(sum(exp S)), in fp32 at any
    precision: scores in the thousands leave few bits for a weight, and so do terms that cancel to a small score.
    `sizes` are the sums of the sizes of each score's terms. The gradient of the scores is P (dP - D), with dP = dO v'
    and D = sum(dO O) rounded separately: they cancel where a weight is nearly 1.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, sizes: Tensor, rounding: float) -> Tensor:
        weights = torch.softmax(scores, dim=-1)
        recomputed = weights * (1 + _perturbed(sizes, SCORE_ROUNDINGS * FP32_ROUNDING) - sizes)
        ctx.save_for_backward(weights, recomputed, v)
        ctx.rounding = rounding
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weights, recomputed, v = ctx.saved_tensors
        flow, across = flows[0], v.transpose(-1, -2)
        into_weights = flow @ across
        mean = (weights * into_weights).sum(-1, keepdim=True)
        terms = flow.abs() @ across.abs()
        rounded = into_weights + _perturbed(terms, ctx.rounding) - terms
        return recomputed * (rounded - mean), recomputed.transpose(-1, -2) @ flow, None, None


class _Recomputed(torch.autograd.Function):
    """`_attend` that recomputes its attention weights in the backward pass.

    torch's own checkpointing imports a compiler, which takes seconds.
    """

    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, *others: Any) -> Tensor:
        ctx.save_for_backward(q_BHTE, k_BHSE, v_BHSE)
        ctx.others = others
        return _attend(q_BHTE, k_BHSE, v_BHSE, *others)

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            scalar_loss = (_attend(*inputs, *ctx.others) * flows[0]).sum()
        return *torch.autograd.grad(scalar_loss, inputs), *(None for _ in ctx.others)


def _rotate(x_THE: Tensor, rotations_TR: Tensor) -> Tensor:
    half = rotations_TR.shape[-1]
    z_THR = torch.complex(x_THE[..., :half], x_THE[..., half : 2 * half]) * rotations_TR[:, None]
    return torch.cat([z_THR.real, z_THR.imag, x_THE[..., 2 * half :]], dim=-1)


def _rotations(shape: Shape, length: int, device: torch.device, windowed: bool) -> Tensor:
    width = shape.rotary_dim or shape.head_dim
    theta, factor = shape.theta, shape.position_factor
    if windowed and shape.local_theta is not None:
        theta, factor = shape.local_theta, 1.0
    frequencies = torch.tensor(
        [
            scaled_frequency(theta ** (-2 * pair / width), shape.rope_scaling) / factor
            for pair in range(width // 2)
        ],
        dtype=torch.float64,
        device=device,
    )
    if factors := shape.long_factors if length > shape.short_positions else shape.short_factors:
        frequencies /= torch.tensor(factors, dtype=torch.float64, device=device)
    angles_TR = torch.arange(length, device=device)[:, None] * frequencies
    sizes_TR = torch.full_like(angles_TR, shape.attention_factor)
    return torch.polar(sizes_TR, angles_TR).to(torch.complex64)


def scaled_frequency(frequency: float, rope_scaling: RopeScaling | None) -> float:
    """Scale a rotary frequency as Llama 3.1 does: low frequencies are divided, high ones kept, and those between
    interpolated."""
    if rope_scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < rope_scaling.original / rope_scaling.high_freq_factor:
        return frequency
    if wavelength > rope_scaling.original / rope_scaling.low_freq_factor:
        return frequency / rope_scaling.factor
    smooth = (rope_scaling.original / wavelength - rope_scaling.low_freq_factor) / (
        rope_scaling.high_freq_factor - rope_scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / rope_scaling.factor + smooth * frequency


# The loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    alpha: float
    """Weight of the cross entropy, 0 to 1; 1 without a teacher."""
    temperature: float
    divergence: str
    """Name of the divergence: forward_kl, reverse_kl or jsd."""
    beta: float
    """Weight of the teacher in the mixture of jsd, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Stored teacher targets: a few tokens for each position."""

    ids_NK: Tensor
    log_probs_NK: Tensor | None
    """Log-probabilities of the top tokens at the loss's temperature; None for sampled tokens."""


@dataclass(slots=True, kw_only=True)
class LossSums:
    """Sums over labelled tokens in float64, not divided by the number of tokens and not multiplied by T^2."""

    ce: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0
    largest_logit: float = 0.0


def loss(
    objective: Objective,
    hidden_ND: Tensor,
    head: HeadRows,
    labels_N: Tensor,
    teacher: tuple[Tensor, HeadRows] | Targets | None,
    *,
    vocabulary: int,
    denominator: float,
    head_gradient_VD: Tensor | None = None,
    chunk_numbers: int,
) -> tuple[LossSums, Tensor]:
    """Return the sums of the loss over these tokens, and the gradient of the hidden states, (N, D), both in fp32, or
    in float64 if the hidden states are in float64.

    `teacher` is the teacher's hidden states (N, E) and its head, of which the first `vocabulary` rows are used
    (`vocabulary` is the size of the student's). The gradient of the head is added to `head_gradient_VD`.
    `denominator` is the number of labelled tokens of the whole step; `chunk_numbers` is the number of logits in
    memory at a time.
    """
    sums = LossSums()
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    gradient_ND = hidden_ND.new_zeros(hidden_ND.shape, dtype=wide)
    rows_M = (labels_N != IGNORED).nonzero().squeeze(1)
    step = max(chunk_numbers // vocabulary, 16)
    for begun in range(0, len(rows_M), step):
        rows_C = rows_M[begun : begun + step]
        h_CD = hidden_ND[rows_C].to(wide)
        z_CV = _logits(h_CD, head, vocabulary).requires_grad_()
        with torch.enable_grad():
            log_q_CV = torch.log_softmax(z_CV, 1)
            ce = -log_q_CV.gather(1, labels_N[rows_C][:, None]).double().sum()
            total, divergence = objective.alpha * ce, None
            if isinstance(teacher, Targets):
                divergence = _to_targets(objective, z_CV, teacher, rows_C)
                sums.agreeing += _agreeing(z_CV, teacher, rows_C)
            elif teacher is not None:
                t_CV = _logits(teacher[0][rows_C].to(wide), teacher[1], vocabulary)
                sums.agreeing += int((z_CV.argmax(1) == t_CV.argmax(1)).sum())
                log_p_CV = _log_softmax(t_CV, objective.temperature)
                softened_CV = log_q_CV
                if objective.temperature != 1:
                    softened_CV = _log_softmax(z_CV, objective.temperature)
                divergence = _divergence(objective, log_p_CV, softened_CV)
            if divergence is not None:
                scale = (1 - objective.alpha) * objective.temperature**2
                total = total + scale * divergence
                sums.divergence += float(divergence.detach())
        (dz_CV,) = torch.autograd.grad(total / denominator, z_CV)
        if head is LOGITS:
            gradient_ND[rows_C] += dz_CV
        for first in range(0, 0 if head is LOGITS else vocabulary, HEAD_ROWS):
            part = slice(first, min(first + HEAD_ROWS, vocabulary))
            weight_RD = head(first, part.stop - first).to(wide)
            gradient_ND[rows_C] += dz_CV[:, part] @ weight_RD
            if head_gradient_VD is not None:
                head_gradient_VD[part] += dz_CV[:, part].T @ h_CD
        sums.ce += float(ce.detach())
        sums.largest_logit = max(sums.largest_logit, *map(abs, map(float, z_CV.detach().aminmax())))
    return sums, gradient_ND


def _logits(h_CD: Tensor, head: HeadRows, vocabulary: int) -> Tensor:
    if head is LOGITS:
        return h_CD[:, :vocabulary].clone()
    parts = [
        h_CD @ head(first, min(HEAD_ROWS, vocabulary - first)).to(h_CD.dtype).T
        for first in range(0, vocabulary, HEAD_ROWS)
    ]
    return torch.cat(parts, 1)


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits_CV if temperature == 1 else logits_CV / temperature, 1)


def _divergence(objective: Objective, log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """Return the divergence of teacher p and student q at temperature T, summed over the rows, in nats."""
    if objective.divergence == "forward_kl":
        return _kl(log_p_CV, log_q_CV)
    if objective.divergence == "reverse_kl":
        return _kl(log_q_CV, log_p_CV)
    if objective.divergence == "jsd":
        b = objective.beta
        log_m_CV = torch.logaddexp(log_p_CV + math.log(b), log_q_CV + math.log(1 - b))
        return b * _kl(log_p_CV, log_m_CV) + (1 - b) * _kl(log_q_CV, log_m_CV)
    raise ValueError(f"divergence: expected one with a reference, found {objective.divergence}")


def _kl(log_p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    return (log_p_CV.exp() * (log_p_CV - log_q_CV)).sum(dtype=torch.float64)


def _to_targets(objective: Objective, z_CV: Tensor, targets: Targets, rows_C: Tensor) -> Tensor:
    """Return the divergence from a few targets of each row, summed over the rows.

    For sampled tokens it is their cross entropy. For the top tokens it is the KL divergence, with all other tokens as
    one outcome.
    """
    log_q_CV = torch.log_softmax(z_CV / objective.temperature, 1)
    ids_CK = targets.ids_NK[rows_C].long()
    log_q_CK = log_q_CV.gather(1, ids_CK)
    if targets.log_probs_NK is None:
        return -log_q_CK.mean(1).double().sum()
    log_p_CK = targets.log_probs_NK[rows_C].double()
    p_CK = log_p_CK.exp()
    kept = torch.where(p_CK > 0, p_CK * (log_p_CK - log_q_CK), 0.0).sum()
    rest_p_C = 1 - p_CK.sum(1)
    others_CV = torch.ones_like(log_q_CV, dtype=torch.bool).scatter(1, ids_CK, False)
    log_rest_q_C = log_q_CV.masked_fill(~others_CV, -math.inf).logsumexp(1)
    # A remainder of probability that is due to rounding to the stored type is not an outcome.
    has_rest_C = rest_p_C > ids_CK.shape[1] * torch.finfo(torch.float32).eps
    safe_p_C = torch.where(has_rest_C, rest_p_C, 1.0)
    rest_C = torch.where(has_rest_C, rest_p_C * (safe_p_C.log() - log_rest_q_C), 0.0)
    return kept + rest_C.sum()


def _agreeing(z_CV: Tensor, targets: Targets, rows_C: Tensor) -> int:
    if targets.log_probs_NK is None:
        return 0
    best_C1 = targets.log_probs_NK[rows_C].argmax(1, keepdim=True)
    return int((z_CV.argmax(1, keepdim=True) == targets.ids_NK[rows_C].gather(1, best_C1)).sum())


# The update


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    beta1: float
    beta2: float
    eps: float


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips gradients of this global norm; a limit of 0 does not clip."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def moments(adam: AdamW, gradient: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """Return AdamW's moments after the next (clipped) gradient, in float64."""
    g = gradient.double()
    return (
        adam.beta1 * mean.double() + (1 - adam.beta1) * g,
        adam.beta2 * square.double() + (1 - adam.beta2) * g * g,
    )


def step_of_adamw(
    adam: AdamW,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    rate: float,
    decay: float | Tensor,
    count: int | Tensor,
) -> Tensor:
    """Return the change of a weight by the `count`-th update, from the moments after it, in float64. Decay and count
    may differ per element."""
    m = mean.double() / (1 - adam.beta1**count)
    v = square.double() / (1 - adam.beta2**count)
    return -rate * (m / (v.sqrt() + adam.eps) + decay * weight.double())
