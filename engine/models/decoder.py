"""The decoder of Qwen2, Qwen3 and Llama: the one forward pass of every teacher and student.

    x = embed[tokens]
    x = x + attention(norm(x));  x = x + mlp(norm(x))     for each layer
    logits = norm(x) head^T                               head is the embedding itself when tied

- norm: RMS norm, y = w x / sqrt(mean(x^2) + eps), in fp32 inside.
- attention: softmax(q k^T / sqrt(E)) v, with H query heads in groups that share K key/value heads.
  Rotary positions turn the pair (x[i], x[i + E/2]) by the angle position * theta^(-2i/E): the
  halves of a head, not its neighbours, which is another model that trains and answers nonsense with
  these weights.
- mlp: down(silu(gate(x)) * up(x)).

What the families differ in, and all of it: q, k, v have biases in Qwen2 alone; Qwen3 norms each
head of q and k, with one weight of length E for all heads, before it is turned; Llama may stretch
its slow rotations (`engine.models.rope`). o never has a bias.

Documents: a row may hold several, one after the other, and `documents_BT` numbers them. A token sees
the earlier tokens of its own document and itself, by a mask or packed (`engine.models.attention`), and
its position is the count of those earlier tokens. So a
document's logits do not depend on what shares its row. Padding is one more document, which always
sees itself: no row of the softmax is empty, and nothing becomes NaN.

For generation a token is run by itself, and the keys and values of those before it are kept
(`Past`, `Decoder.hidden_with_past`). A row's token at position p lies in slot p of its cache and sees
the slots up to p, so rows of any length stand side by side and no padding has to be told.

Covered: the whole sequence at once, forward and backward, under autocast or in the dtype of the
weights; one sequence in parts, without gradients. Not covered: dropout, sliding windows.

**The one seam between backends** is the linear layers (`MakeLinear`). Every teacher and student runs
the same `Decoder`. A backend may make other layers for it, or put others in their place once a file says
what it holds (`engine.models.load`); it changes nothing else. A second forward pass would be a second
model to get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import InternalError
from engine.models.attention import Packing, attend_packed, packing_of, positions
from engine.models.config import ModelConfig

# Shapes: B rows, T tokens, D model width, V vocabulary, H query heads, K key/value heads,
# E width of one head, R = E/2 its pairs, X = B with documents and 1 without, S slots of a cache

INIT_STD = 0.02


class Past(NamedTuple):
    """One layer's keys and values of the tokens so far, and where the next ones go."""

    keys_BSKE: Tensor
    values_BSKE: Tensor
    position_BT: Tensor
    """The slots of the tokens being run, int64."""

    def extended(self, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """Everything there is, with the tokens being run put in their slots."""
        row_B1 = torch.arange(len(k_BTKE), device=k_BTKE.device)[:, None]
        self.keys_BSKE[row_B1, self.position_BT] = k_BTKE
        self.values_BSKE[row_B1, self.position_BT] = v_BTKE
        return self.keys_BSKE, self.values_BSKE


class Sight(NamedTuple):
    """Where each token is and what it sees: made once per forward, shared by all layers."""

    cos_XT1R: Tensor
    sin_XT1R: Tensor
    mask_B1TT: Tensor | None
    """0 where a token may look, -inf where not; None is plain causal, or packed."""
    starts_S: Tensor | None = None
    longest_L: Tensor | None = None
    """A `Packing`, where attention is packed; tensors side by side, as a compiler sees them."""
    past: Past | None = None
    """In generation, and of one layer alone: made anew for each."""


class MakeLinear(Protocol):
    """Makes one layer y = x W^T + b from (..., in_features) to (..., out_features)."""

    def __call__(self, in_features: int, out_features: int, bias: bool) -> nn.Module: ...


def project(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """The outputs of layers that have the same input. A backend that does them as one product gives
    its first layer a method `together`.
    """
    together: Any = getattr(layers[0], "together", None)
    if together is not None:
        outputs: Sequence[Tensor] = together(x, layers[1:])
        return outputs
    return [layer(x) for layer in layers]


def dense_linear(in_features: int, out_features: int, bias: bool) -> nn.Module:
    """Weights as plain floats: what is trained, and what a dequantized teacher runs."""
    return nn.Linear(in_features, out_features, bias=bias)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The cast is a no-op but for q and k under autocast: with two dtypes there is no fused
        # kernel, and the steps of the plain one are kept for the backward pass.
        weight_D = self.weight.to(x_BTD.dtype)
        return F.rms_norm(x_BTD, weight_D.shape, weight_D, self.eps)


def rotate(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + E/2]) by its angle."""
    left, right = x_BTHE.chunk(2, dim=-1)
    return torch.cat(
        (left * cos_XT1R - right * sin_XT1R, right * cos_XT1R + left * sin_XT1R), dim=-1
    )


def attend(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, mask_B1TT: Tensor | None) -> Tensor:
    """Attention of grouped heads, (B, T, H, E)."""
    groups = q_BTHE.shape[2] // k_BTKE.shape[2]
    shared = groups > 1 and _kernel_shares_heads(q_BTHE, mask_B1TT)
    if groups > 1 and not shared:
        k_BTKE = k_BTKE.repeat_interleave(groups, dim=2)
        v_BTKE = v_BTKE.repeat_interleave(groups, dim=2)
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=mask_B1TT,
        is_causal=mask_B1TT is None,
        enable_gqa=shared,
    )
    return y_BHTE.transpose(1, 2)


def _kernel_shares_heads(q_BTHE: Tensor, mask_B1TT: Tensor | None) -> bool:
    """Whether a fused kernel takes fewer key/value heads than query heads.

    Where none does, `enable_gqa` falls to the unfused product, which holds (B, H, T, T) scores:
    copying the heads is then several times faster. The CPU kernel takes them; on CUDA flash does in
    half precision from capability 8 on but takes no mask, and cuDNN, which takes both, is preferred
    on 9 alone.
    """
    if not q_BTHE.is_cuda:
        return True
    if q_BTHE.dtype not in (torch.float16, torch.bfloat16):
        return False
    major, _ = torch.cuda.get_device_capability(q_BTHE.device)
    return major >= 8 if mask_B1TT is None else major == 9


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, make_linear: MakeLinear) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        query_width = config.num_attention_heads * config.head_dim
        shared_width = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q = make_linear(width, query_width, bias)
        self.k = make_linear(width, shared_width, bias)
        self.v = make_linear(width, shared_width, bias)
        self.o = make_linear(query_width, width, False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, sight: Sight) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTD, k_BTD, v_BTD = project(x_BTD, (self.q, self.k, self.v))
        q_BTHE = torch.unflatten(q_BTD, -1, heads)
        k_BTKE = torch.unflatten(k_BTD, -1, heads)
        v_BTKE = torch.unflatten(v_BTD, -1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        q_BTHE = rotate(q_BTHE, sight.cos_XT1R, sight.sin_XT1R)
        k_BTKE = rotate(k_BTKE, sight.cos_XT1R, sight.sin_XT1R)
        if sight.past is not None:
            k_BTKE, v_BTKE = sight.past.extended(k_BTKE, v_BTKE)
        if sight.starts_S is not None and sight.longest_L is not None:
            packing = Packing(sight.starts_S, sight.longest_L)
            y_BTHE = attend_packed(q_BTHE, k_BTKE, v_BTKE, packing)
        else:
            y_BTHE = attend(q_BTHE, k_BTKE, v_BTKE, sight.mask_B1TT)
        y_BTD: Tensor = self.o(y_BTHE.flatten(-2))
        return y_BTD


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, make_linear: MakeLinear) -> None:
        super().__init__()
        self.gate = make_linear(config.hidden_size, config.intermediate_size, False)
        self.up = make_linear(config.hidden_size, config.intermediate_size, False)
        self.down = make_linear(config.intermediate_size, config.hidden_size, False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = project(x_BTD, (self.gate, self.up))
        open_BTF = F.silu(gate_BTF)
        del gate_BTF  # without a graph, its memory is free for the product
        y_BTD: Tensor = self.down(open_BTF * up_BTF)
        return y_BTD


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, make_linear: MakeLinear) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, make_linear)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config, make_linear)

    def forward(self, x_BTD: Tensor, sight: Sight) -> Tensor:
        # The cast is a no-op but under autocast, where each linear would otherwise cast its input
        # and keep its own copy of it for the backward pass: three for q, k, v and two for gate, up.
        dtype = product_dtype(x_BTD)
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD).to(dtype), sight)
        y_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD).to(dtype))
        return y_BTD


RunLayer: TypeAlias = Callable[[nn.Module, Tensor, Sight], Tensor]


def run_layer(layer: nn.Module, x_BTD: Tensor, sight: Sight) -> Tensor:
    """The layer as it is written."""
    y_BTD: Tensor = layer(x_BTD, sight)
    return y_BTD


class Shards(Protocol):
    """Layers whose weights are shared out over the ranks (`engine.teachers.sharded`)."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """What this rank holds of each layer, as bytes."""
        ...

    def arrive(self, index: int) -> None:
        """Has a layer's weights there for what is launched next, until another's are asked for. A
        collective.
        """
        ...


class _Embedding(nn.Embedding):
    """torch's. Where there is no memory yet it draws no numbers: on the meta device torch would load
    its compiler to draw none, for more than a second.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Decoder(nn.Module):
    """A Qwen2, Qwen3 or Llama decoder; only its layers with matrices differ between backends.

    A new one holds whatever torch puts in fresh layers: use `new_decoder` or `load_decoder`, or
    call `init_weights`.
    """

    def __init__(self, config: ModelConfig, make_linear: MakeLinear = dense_linear) -> None:
        super().__init__()
        self.config = config
        self.run_layer: RunLayer = run_layer
        """How each layer is run: compiled, or so that its activations are made again when wanted
        (`engine.models.running`)."""
        self.packed = False
        """Whether attention over documents is packed (`engine.models.attention`), not masked; in fp32
        it is masked always."""
        self.shards: Shards | None = None
        """Where this process has no more than a part of each layer: of a frozen teacher."""
        self.embed = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, make_linear) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.head = make_linear(config.hidden_size, config.vocab_size, False)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix (V, D); the embedding itself when tied."""
        owner = self.embed if self.head is None else self.head
        weight: object = getattr(owner, "weight", None)
        if not isinstance(weight, Tensor):
            raise InternalError(f"head_weight: {type(owner).__name__} has no dense weight")
        return weight

    def hidden(
        self,
        tokens_BT: Tensor,
        documents_BT: Tensor | None = None,
        embedded_BTD: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, D) after the last norm.

        `embedded_BTD` are the tokens' rows of the embedding, where they were looked up already.

        `documents_BT` holds any integer ids, equal for tokens of one document of a row, which stand
        side by side; None is one document per row, and needs no mask.
        """
        x_BTD = self.embed(tokens_BT) if embedded_BTD is None else embedded_BTD
        dtype = product_dtype(x_BTD)
        if self.packed and documents_BT is not None and dtype != torch.float32:
            sight = see_packed(self.config, documents_BT, dtype)
        else:
            sight = see(self.config, tokens_BT, documents_BT, dtype)
        for index, layer in enumerate(self.layers):
            if self.shards is not None:
                self.shards.arrive(index)
            x_BTD = self.run_layer(layer, x_BTD, sight)
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def reach(self, name: str) -> None:
        """Has the weights there of the layer that the tensor or module `name` is in, for whoever reads
        them and does not run the layer. A collective where layers are in parts.
        """
        first, _, rest = name.partition(".")
        if self.shards is not None and first == "layers" and rest:
            self.shards.arrive(int(rest.partition(".")[0]))

    def hidden_with_past(self, tokens_BT: Tensor, pasts: Sequence[Past]) -> Tensor:
        """Hidden states (B, T, D) of tokens whose predecessors lie in `pasts`, one for each layer;
        the tokens are added to them. For inference: what is kept has no gradient.
        """
        x_BTD = self.embed(tokens_BT)
        slots = pasts[0].keys_BSKE.shape[1]
        sight = see_past(self.config, pasts[0].position_BT, slots, product_dtype(x_BTD))
        for layer, past in zip(self.layers, pasts, strict=True):
            x_BTD = layer(x_BTD, sight._replace(past=past))
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def logits(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the next token at every position."""
        return self.logits_of(self.hidden(tokens_BT, documents_BT))

    def logits_of(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (B, T, V) of hidden states."""
        if self.head is None:
            return F.linear(hidden_BTD, self.embed.weight)
        logits_BTV: Tensor = self.head(hidden_BTD)
        return logits_BTV

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        return self.logits(tokens_BT, documents_BT)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fresh weights: normal(0, 0.02), norms 1, biases 0.

        The 2 L outputs that add up in the residual start at 1/sqrt(2 L) of that, as in GPT-2.
        The generator's device draws the numbers, in fp32, whatever device and dtype the weights
        have: one seed is one model.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = residual_std if name.endswith((".o.weight", ".down.weight")) else INIT_STD
                if parameter.dtype == torch.float32 and parameter.device == generator.device:
                    parameter.normal_(0.0, std, generator=generator)
                else:
                    drawn = torch.empty(parameter.shape, device=generator.device)
                    parameter.copy_(drawn.normal_(0.0, std, generator=generator))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which linears answer: autocast's where it is on, else that of `x`."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


@torch.no_grad()
def see(
    config: ModelConfig, tokens_BT: Tensor, documents_BT: Tensor | None, dtype: torch.dtype
) -> Sight:
    """Positions and mask of a batch; angles are computed in fp32 and rounded to `dtype` last."""
    length, device = tokens_BT.shape[1], tokens_BT.device
    mask_B1TT = None
    if documents_BT is None:
        position_XT = torch.arange(length, device=device)[None]
    else:
        seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
        position_XT = seen_BTT.sum(-1) - 1
        mask_B1TT = torch.zeros(seen_BTT.shape, dtype=dtype, device=device)
        mask_B1TT = mask_B1TT.masked_fill_(~seen_BTT, -math.inf)[:, None]
    return Sight(*_turns(config, position_XT, dtype), mask_B1TT)


@torch.no_grad()
def see_past(config: ModelConfig, position_BT: Tensor, slots: int, dtype: torch.dtype) -> Sight:
    """The same for tokens at `position_BT` that see the slots up to their own."""
    slot_S = torch.arange(slots, device=position_BT.device)
    seen_BTS = slot_S <= position_BT[..., None]
    mask_BTS = torch.zeros(seen_BTS.shape, dtype=dtype, device=position_BT.device)
    mask_BTS = mask_BTS.masked_fill_(~seen_BTS, -math.inf)
    return Sight(*_turns(config, position_BT, dtype), mask_BTS[:, None])


@torch.no_grad()
def see_packed(config: ModelConfig, documents_BT: Tensor, dtype: torch.dtype) -> Sight:
    """The same for packed attention."""
    packing = packing_of(documents_BT)
    return Sight(*_turns(config, positions(documents_BT), dtype), None, *packing)


def _turns(config: ModelConfig, position_XT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position, (X, T, 1, R)."""
    # Computed anew each time: a buffer would be lost when a model is built on the meta device.
    angle_XTR = position_XT[..., None].float() * frequencies(config, position_XT.device)
    cos_XTR, sin_XTR = angle_XTR.cos(), angle_XTR.sin()
    return cos_XTR[:, :, None].to(dtype), sin_XTR[:, :, None].to(dtype)


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians each position, of each pair of a head, (R,) in fp32; the maths is that of
    `engine.models.rope`. Nothing is copied from the host: that would wait for the device.
    """
    exponent_R = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    frequency_R = 1.0 / config.rope_theta**exponent_R
    scaling = config.rope_scaling
    if scaling is None:
        return frequency_R
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns_R = scaling.original_max_position_embeddings * frequency_R / (2 * math.pi)
    keep_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return frequency_R * (keep_R + (1 - keep_R) / scaling.factor)


class Tensors(Mapping[str, Tensor]):
    """Parameters and buffers. Of a decoder in parts, a tensor is valid until one of another layer is
    asked for, and asking is a collective: every rank asks for the same in the same order.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._found = dict(decoder.named_parameters()) | dict(decoder.named_buffers())

    def __getitem__(self, name: str) -> Tensor:
        self._decoder.reach(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
