"""The decoder of all families (`engine.model_families`): the one forward pass of every teacher and student.

    x = embed[tokens]
    x = x + attention(norm(x));  x = x + mlp(norm(x))     for each layer
    logits = norm(x) head^T                               head is the embedding itself when tied

- norm: RMS norm, y = w x / sqrt(mean(x^2) + eps), in fp32 inside.
- attention: softmax(q k^T / sqrt(E)) v, with H query heads in groups that share K key/value heads.
  RoPE rotates the pair (x[i], x[i + E/2]) by the angle position * theta^(-2i/E). It pairs the two
  halves of a head, not adjacent elements: that would be a different model, which runs without an
  error and gives nonsense with these weights.
- mlp: down(silu(gate(x)) * up(x)), or gelu in the place of silu.

These are all differences between the families: only Qwen2 has biases on q, k, v; Qwen3 normalises
each head of q and k before RoPE, with one weight of length E for all heads; Llama may scale its low
RoPE frequencies and Phi-3 all of them (`engine.models.rope`); Mistral may have a sliding window; some layers of SmolLM3
have no RoPE; OLMo 2 normalises the outputs of attention and mlp instead of their inputs, and q and k over all heads
together; Phi-3 may rotate only the first elements of a head; Gemma 3 scales its embeddings, multiplies in norms
with 1 + w, has norms both before and after attention and mlp, and some of its layers have a window and another RoPE
base. The projection o never has a bias.

Documents: a row may hold several, one after the other, and `documents_BT` numbers them. A token
attends to the earlier tokens of its own document and itself, by a mask or packed
(`engine.models.attention`), and its position is the count of those earlier tokens. So a document's
logits do not depend on the rest of its row. Padding is one more document, whose tokens always see
themselves: no row of the softmax is empty, so nothing becomes NaN.

In generation new tokens are run with a KV cache (`Decoder.hidden_with_cache`), which computes the attention to the
keys and values that it stores.

Covered: the whole sequence at once, forward and backward, under autocast or in the dtype of the
weights; one sequence in several calls with a cache, without gradients. Not covered: dropout.

**The one seam between backends** is the linear layers (`MakeLinear`). Every teacher and student
runs the same `Decoder`. A backend may create other layers for it, or replace them once it knows the
file's format (`engine.models.load`); it changes nothing else. A second forward pass would be a
second implementation to get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import InternalError
from engine.kernels.cudnn_attention import Ragged
from engine.models.attention import Packing, attend_packed, lengths, packing_of, positions
from engine.models.config import ModelConfig
from engine.models.rope import LongRope

# Shapes: B rows, T tokens, D model width, V vocabulary, H query heads, K key/value heads,
# E width of one head, R pairs of it that RoPE rotates (mostly E/2), X = B with documents and 1 without,
# S documents

INIT_STD = 0.02
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class LayerCache(Protocol):
    """One layer's KV cache (`engine.generation.forward`)."""

    def attend(
        self,
        q_BTHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Store the keys and values of new tokens, and return their attention to the stored ones up to
        themselves, (B, T, H, E).
        """
        ...


class AttentionInputs(NamedTuple):
    """Inputs of attention other than the hidden states: position embeddings (RoPE), and which tokens a token
    may attend to. Computed once per forward pass and shared by all layers. If only some layers have a window,
    they are computed twice: for layers with a window and for layers without.
    """

    cos_XT1R: Tensor
    sin_XT1R: Tensor
    mask_B1TT: Tensor | None
    """0 where a token may attend, -inf elsewhere; None if attention is plain causal or packed. A sliding
    window is part of it; packed attention has its own (`Attention.window`).
    """
    packing: Packing | None = None
    """The documents, if attention is packed."""
    cache: LayerCache | None = None
    """The KV cache of the current layer, in generation; replaced before each layer runs."""


class MakeLinear(Protocol):
    """Creates one layer y = x W^T + b from (..., in_features) to (..., out_features)."""

    def __call__(self, in_features: int, out_features: int, bias: bool) -> nn.Module: ...


def project(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return the outputs of several layers for the same input. If the first layer has a method `together`,
    it computes all outputs in one matmul.
    """
    together: Any = getattr(layers[0], "together", None)
    if together is not None:
        outputs: Sequence[Tensor] = together(x, layers[1:])
        return outputs
    return [layer(x) for layer in layers]


def dense_linear(in_features: int, out_features: int, bias: bool) -> nn.Module:
    """Create a dense linear layer, as students and dequantised teachers use."""
    return nn.Linear(in_features, out_features, bias=bias)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    @property
    def factor_D(self) -> Tensor:
        """Factor of normalised values; in fp32 if it is not the weight itself."""
        return self.weight.float() + self.offset if self.offset else self.weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.offset:
            # In fp32: in 16 bits, 1 + w would lose most of w.
            weight_D = self.factor_D
            return F.rms_norm(x_BTD.float(), weight_D.shape, weight_D, self.eps).to(x_BTD.dtype)
        # The cast is a no-op except for q and k under autocast: if weight and input have two dtypes, torch has no fused
        # kernel, and the unfused norm keeps its intermediates for the backward pass.
        weight_D = self.weight.to(x_BTD.dtype)
        return F.rms_norm(x_BTD, weight_D.shape, weight_D, self.eps)


def rotate(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + R]) of the first 2 R numbers of a head by its angle."""
    width = 2 * cos_XT1R.shape[-1]
    left, right = x_BTHE[..., :width].chunk(2, dim=-1)
    parts = [left * cos_XT1R - right * sin_XT1R, right * cos_XT1R + left * sin_XT1R]
    if width < x_BTHE.shape[-1]:
        parts.append(x_BTHE[..., width:])
    return torch.cat(parts, dim=-1)


Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    mask_B1TT: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Return grouped-query attention, (B, T, H, E). Scores are multiplied by `scale`, or 1/sqrt(E)."""
    groups = q_BTHE.shape[2] // k_BTKE.shape[2]
    gqa = groups > 1 and _kernel_shares_heads(q_BTHE, mask_B1TT)
    if groups > 1 and not gqa:
        k_BTKE = k_BTKE.repeat_interleave(groups, dim=2)
        v_BTKE = v_BTKE.repeat_interleave(groups, dim=2)
    y_BHTE = F.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        attn_mask=mask_B1TT,
        is_causal=mask_B1TT is None,
        enable_gqa=gqa,
        scale=scale,
    )
    return y_BHTE.transpose(1, 2)


def _kernel_shares_heads(q_BTHE: Tensor, mask_B1TT: Tensor | None) -> bool:
    """Return whether a fused kernel accepts fewer key/value heads than query heads.

    Without one, `enable_gqa` falls back to the unfused implementation, which materialises (B, H, T,
    T) scores: copying the heads is then several times faster. The CPU kernel supports it. On CUDA,
    flash supports it in half precision from capability 8 on but takes no mask, and cuDNN, which
    supports both, is preferred only on capability 9.
    """
    if not q_BTHE.is_cuda:
        return True
    if q_BTHE.dtype not in (torch.float16, torch.bfloat16):
        return False
    major, _ = torch.cuda.get_device_capability(q_BTHE.device)
    return major >= 8 if mask_B1TT is None else major == 9


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, index: int, make_linear: MakeLinear) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotate: Rotate | None = None
        """Rotates in one kernel (`engine.models.fused`)."""
        self.rotates = index not in config.layers_without_rope
        self.window = config.sliding_window if config.has_window(index) else None
        self.scale: float | None = None
        if config.query_pre_attn_scalar is not None:
            self.scale = config.query_pre_attn_scalar**-0.5
        width = config.hidden_size
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q = make_linear(width, query_width, bias)
        self.k = make_linear(width, kv_width, bias)
        self.v = make_linear(width, kv_width, bias)
        self.o = make_linear(query_width, width, False)
        self.norms_whole = False
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.norms_whole = config.kind.qk_norm_whole
            widths = (query_width, kv_width) if self.norms_whole else (config.head_dim,) * 2
            self.q_norm, self.k_norm = (_norm(config, norm_width) for norm_width in widths)

    def forward(self, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTD, k_BTD, v_BTD = project(x_BTD, (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None and self.norms_whole:
            q_BTD, k_BTD = self.q_norm(q_BTD), self.k_norm(k_BTD)
        q_BTHE = torch.unflatten(q_BTD, -1, heads)
        k_BTKE = torch.unflatten(k_BTD, -1, heads)
        v_BTKE = torch.unflatten(v_BTD, -1, heads)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_whole:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        if self.rotates:
            rotate_heads = self.rotate or rotate
            q_BTHE = rotate_heads(q_BTHE, attention_inputs.cos_XT1R, attention_inputs.sin_XT1R)
            k_BTKE = rotate_heads(k_BTKE, attention_inputs.cos_XT1R, attention_inputs.sin_XT1R)
        if attention_inputs.cache is not None:
            y_BTHE = attention_inputs.cache.attend(
                q_BTHE, k_BTKE, v_BTKE, scale=self.scale, window=self.window
            )
        elif attention_inputs.packing is not None:
            y_BTHE = attend_packed(
                q_BTHE,
                k_BTKE,
                v_BTKE,
                attention_inputs.packing,
                scale=self.scale,
                window=self.window,
            )
        else:
            y_BTHE = attend(q_BTHE, k_BTKE, v_BTKE, attention_inputs.mask_B1TT, self.scale)
        y_BTD: Tensor = self.o(y_BTHE.flatten(-2))
        return y_BTD


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, make_linear: MakeLinear) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.kind.activation]
        self.gated: Callable[[Tensor, Tensor], Tensor] | None = None
        """Returns activation(gate) * up in one kernel (`engine.models.fused`)."""
        self.adds = False
        """Whether the last matmul may add to the residual in place: frozen and dense (`engine.models.fused`)."""
        self.gate = make_linear(config.hidden_size, config.intermediate_size, False)
        self.up = make_linear(config.hidden_size, config.intermediate_size, False)
        self.down = make_linear(config.intermediate_size, config.hidden_size, False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = project(x_BTD, (self.gate, self.up))
        if self.gated is not None:
            y_BTD: Tensor = self.down(self.gated(gate_BTF, up_BTF))
            return y_BTD
        gated_BTF = self.activation(gate_BTF)
        del gate_BTF  # without autograd, its memory is free for the multiplication
        y_BTD = self.down(gated_BTF * up_BTF)
        return y_BTD

    def add_to(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        """Return x + mlp(y) in the memory of x: the sum is rounded once, out of the matmul."""
        assert self.gated is not None and isinstance(self.down.weight, Tensor)
        gated_BTF = self.gated(*project(y_BTD, (self.gate, self.up)))
        x_BTD.flatten(0, 1).addmm_(gated_BTF.flatten(0, 1), self.down.weight.t())
        return x_BTD


Normed: TypeAlias = Callable[[Tensor | None, Tensor, RMSNorm, torch.dtype], tuple[Tensor, Any]]
"""Function of (y, x, norm, dtype) that returns x + y (x if y is None), and its norm in a dtype. The norm is a tensor,
or quantised rows for the next linear layers (`engine.models.fp8.Rounded`)."""


def _norm(config: ModelConfig, width: int) -> RMSNorm:
    return RMSNorm(width, config.rms_norm_eps, config.kind.norm_offset)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, make_linear: MakeLinear) -> None:
        super().__init__()

        def norm(has: bool) -> RMSNorm | None:
            return _norm(config, config.hidden_size) if has else None

        pre_norms, post_norms = config.kind.has_pre_norms, config.kind.has_post_norms
        # In the order of the tensors in `LAYER`.
        self.attention_norm = norm(pre_norms)
        self.attention = Attention(config, index, make_linear)
        self.attention_out_norm = norm(post_norms)
        self.mlp_norm = norm(pre_norms)
        self.mlp = FeedForward(config, make_linear)
        self.mlp_out_norm = norm(post_norms)
        self.normed: Normed | None = None
        """Adds and normalises in one kernel (`engine.models.fused`)."""

    def forward(self, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
        # The cast is a no-op except under autocast, where each linear would otherwise cast its
        # input and save its own copy for the backward pass: three for q, k, v and two for gate, up.
        dtype = matmul_dtype(x_BTD)
        if self.normed is not None:
            return _sum(*self.summands(x_BTD, None, attention_inputs))
        y_BTD = _normed(self.attention_norm, x_BTD).to(dtype)
        x_BTD = x_BTD + _normed(self.attention_out_norm, self.attention(y_BTD, attention_inputs))
        y_BTD = _normed(self.mlp_norm, x_BTD).to(dtype)
        return x_BTD + _normed(self.mlp_out_norm, self.mlp(y_BTD))

    def summands(
        self, x_BTD: Tensor, z_BTD: Tensor | None, attention_inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Return two tensors whose sum is the layer's output for the input x + z; None is zero. The sum is left
        to the first kernel of the next layer, which adds and normalises.
        """
        assert self.normed and self.attention_norm is not None and self.mlp_norm is not None
        dtype = matmul_dtype(x_BTD)
        x_BTD, y_BTD = self.normed(z_BTD, x_BTD, self.attention_norm, dtype)
        y_BTD = self.attention(y_BTD, attention_inputs)
        x_BTD, y_BTD = self.normed(y_BTD, x_BTD, self.mlp_norm, dtype)
        if isinstance(self.mlp, FeedForward) and self.mlp.adds:
            return self.mlp.add_to(x_BTD, y_BTD), None
        return x_BTD, self.mlp(y_BTD)


def _sum(x_BTD: Tensor, z_BTD: Tensor | None) -> Tensor:
    return x_BTD if z_BTD is None else x_BTD + z_BTD


def _normed(norm: RMSNorm | None, x_BTD: Tensor) -> Tensor:
    if norm is None:
        return x_BTD
    y_BTD: Tensor = norm(x_BTD)
    return y_BTD


RunLayer: TypeAlias = Callable[[nn.Module, Tensor, AttentionInputs], Tensor]


def run_layer(layer: nn.Module, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
    """Run a layer eagerly."""
    y_BTD: Tensor = layer(x_BTD, attention_inputs)
    return y_BTD


class Shards(Protocol):
    """Layers whose weights are sharded over the ranks (`engine.teachers.sharded`)."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """This rank's shard of each layer, as bytes."""
        ...

    def gather_layer(self, index: int) -> None:
        """Gather a layer's weights for the operations launched next. They are valid until another layer
        is gathered. A collective.
        """
        ...


class _Embedding(nn.Embedding):
    """torch's embedding, except that it skips initialisation on the meta device: torch would import
    its compiler there, for more than a second, and initialise nothing.
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Decoder(nn.Module):
    """A decoder of one of `FAMILIES`. Backends differ only in its linear layers.

    A new instance has whatever weights torch gives to fresh layers: use `new_decoder` or
    `load_decoder`, or call `init_weights`.
    """

    def __init__(self, config: ModelConfig, make_linear: MakeLinear = dense_linear) -> None:
        super().__init__()
        self.config = config
        self.run_layer: RunLayer = run_layer
        """Function that runs a layer: eagerly or with activation checkpointing
        (`engine.models.activation_checkpointing`).
        """
        self.packed = False
        """Whether attention over documents is packed (`engine.models.attention`) instead of masked.
        In fp32 it is always masked.
        """
        self.cudnn = False
        """Whether cuDNN computes packed attention (`engine.kernels.cudnn_attention`)."""
        self.shards: Shards | None = None
        """Shards of the layers, if this process holds only a shard of each, as for a sharded frozen teacher."""
        self.embed = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, index, make_linear) for index in range(config.num_hidden_layers)
        )
        self.norm = _norm(config, config.hidden_size)
        self.head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.head = make_linear(config.hidden_size, config.vocab_size, False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights that are neither in quantised blocks nor in 8 bits."""
        return self.norm.weight.dtype

    @property
    def head_weight(self) -> Tensor | None:
        """The output matrix (V, D), which is the embedding itself when tied; None for a model whose `hidden`
        returns logits (`engine.models.transformers_decoder`)."""
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
        """Return the hidden states (B, T, D) after the last norm.

        `embedded_BTD` are the tokens' embeddings, if they were already looked up.

        `documents_BT` holds arbitrary integer ids, equal for the tokens of one document of a row,
        which are contiguous. None means one document per row and needs no mask.
        """
        x_BTD = self.scaled(self.embed(tokens_BT) if embedded_BTD is None else embedded_BTD)
        dtype = matmul_dtype(x_BTD)
        if self.packed and documents_BT is not None and dtype != torch.float32:
            inputs_by_layer = self.packed_inputs(documents_BT, dtype)
        else:
            inputs_by_layer = self.masked_inputs(tokens_BT, documents_BT, dtype)
        z_BTD: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if self.shards is not None:
                self.shards.gather_layer(index)
            # A layer of another class, as FSDP makes it, has hooks around its forward pass.
            if self.run_layer is run_layer and type(layer) is Layer and layer.normed is not None:
                x_BTD, z_BTD = layer.summands(x_BTD, z_BTD, inputs_by_layer[index])
            else:
                x_BTD = self.run_layer(layer, _sum(x_BTD, z_BTD), inputs_by_layer[index])
                z_BTD = None
        hidden_BTD: Tensor = self.norm(_sum(x_BTD, z_BTD))
        return hidden_BTD

    def scaled(self, embedded_BTD: Tensor) -> Tensor:
        """Return embeddings as the first layer gets them."""
        if not self.config.kind.embeddings_scaled:
            return embedded_BTD
        root = torch.tensor(math.sqrt(self.config.hidden_size)).to(embedded_BTD.dtype)
        return embedded_BTD * float(root)

    def masked_inputs(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, dtype: torch.dtype
    ) -> list[AttentionInputs]:
        """Return what `masked_attention_inputs` returns, for each layer."""
        return self._inputs_by_layer(
            lambda windowed: masked_attention_inputs(
                self.config, tokens_BT, documents_BT, dtype, windowed
            )
        )

    def packed_inputs(self, documents_BT: Tensor, dtype: torch.dtype) -> list[AttentionInputs]:
        """Return what `packed_attention_inputs` returns, for each layer."""
        return self._inputs_by_layer(
            lambda windowed: packed_attention_inputs(
                self.config, documents_BT, dtype, windowed, cudnn=self.cudnn
            )
        )

    def _inputs_by_layer(self, make: Callable[[bool], AttentionInputs]) -> list[AttentionInputs]:
        """Return the inputs of each layer; `make` is called once for layers with a window and once for the others."""
        kinds = [self.config.has_window(index) for index in range(len(self.layers))]
        inputs_by_kind = {kind: make(kind) for kind in sorted(set(kinds))}
        return [inputs_by_kind[kind] for kind in kinds]

    def run_like(self, other: Decoder) -> None:
        """Use the attention of `other`, a decoder of the same configuration, so that outputs are bit-identical: packed
        and masked attention round differently."""
        self.packed, self.cudnn = other.packed, other.cudnn

    def gather_for(self, name: str) -> None:
        """Gather the layer that contains the tensor or module `name`, for code that reads its weights
        without running it. A collective if layers are sharded.
        """
        first, _, rest = name.partition(".")
        if self.shards is not None and first == "layers" and rest:
            self.shards.gather_layer(int(rest.partition(".")[0]))

    def hidden_with_cache(
        self,
        tokens_BT: Tensor,
        position_BT: Tensor,
        length_BT: Tensor,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """Return the hidden states (B, T, D) of tokens at positions of sequences that have `length_BT`
        tokens so far, and add them to the caches of the layers. For inference only: caches have no
        gradients.
        """
        x_BTD = self.scaled(self.embed(tokens_BT))
        dtype = matmul_dtype(x_BTD)
        inputs_by_layer = self._inputs_by_layer(
            lambda windowed: AttentionInputs(
                *_cos_sin(self.config, position_BT, length_BT, dtype, windowed), None
            )
        )
        for layer, cache, inputs in zip(self.layers, caches, inputs_by_layer, strict=True):
            x_BTD = layer(x_BTD, inputs._replace(cache=cache))
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def logits(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of the next token at every position."""
        return self.logits_of(self.hidden(tokens_BT, documents_BT))

    def logits_of(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states."""
        if self.head is None:
            return F.linear(hidden_BTD, self.embed.weight)
        logits_BTV: Tensor = self.head(hidden_BTD)
        return logits_BTV

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        return self.logits(tokens_BT, documents_BT)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights: normal(0, 0.02), factors of norms 1, biases 0.

        The 2 L projections that add to the residual are scaled by 1/sqrt(2 L), as in GPT-2. The
        numbers are drawn in fp32 on the generator's device, whatever device and dtype the weights
        have, so that a seed determines the model.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0 - self.config.kind.norm_offset)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                std = residual_std if name.endswith((".o.weight", ".down.weight")) else INIT_STD
                if parameter.dtype == torch.float32 and parameter.device == generator.device:
                    parameter.normal_(0.0, std, generator=generator)
                else:
                    drawn = torch.empty(parameter.shape, device=generator.device)
                    parameter.copy_(drawn.normal_(0.0, std, generator=generator))


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the output dtype of linear layers: autocast's if it is enabled, else that of `x`."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


@torch.no_grad()
def masked_attention_inputs(
    config: ModelConfig,
    tokens_BT: Tensor,
    documents_BT: Tensor | None,
    dtype: torch.dtype,
    windowed: bool = True,
) -> AttentionInputs:
    """Return the inputs for attention with a mask, or for plain causal attention without `documents_BT`.
    Angles are computed in fp32 and rounded to `dtype` last. `windowed`: whether the inputs are for layers
    with a window, if the model has one.
    """
    length, device = tokens_BT.shape[1], tokens_BT.device
    # A window that is as long as the rows hides no token.
    window = min((config.sliding_window if windowed else None) or length, length)
    if documents_BT is None and window < length:
        documents_BT = torch.zeros(1, length, dtype=torch.int64, device=device)
    mask_B1TT = None
    length_XT: Tensor | int = length
    if documents_BT is None:
        position_XT = torch.arange(length, device=device)[None]
    else:
        visible_XTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        if config.long_rope is not None:
            length_XT = visible_XTT.sum(-1)
        visible_XTT = visible_XTT.tril()
        position_XT = visible_XTT.sum(-1) - 1
        if window < length:
            visible_XTT &= position_XT[:, :, None] - position_XT[:, None, :] < window
        mask_B1TT = _additive_mask(visible_XTT, dtype).expand(len(tokens_BT), -1, -1, -1)
    angles = _cos_sin(config, position_XT, length_XT, dtype, windowed)
    return AttentionInputs(*angles, mask_B1TT)


def _additive_mask(visible_XTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (X, 1, T, S) to add to scores: 0 where a token may attend, -inf elsewhere."""
    mask_XTS = torch.zeros(visible_XTS.shape, dtype=dtype, device=visible_XTS.device)
    return mask_XTS.masked_fill_(~visible_XTS, -math.inf)[:, None]


@torch.no_grad()
def packed_attention_inputs(
    config: ModelConfig,
    documents_BT: Tensor,
    dtype: torch.dtype,
    windowed: bool = True,
    *,
    cudnn: bool = False,
) -> AttentionInputs:
    """Return the `AttentionInputs` for packed attention, by cuDNN or by torch's kernel. `windowed`: whether they are
    for layers with a window, if the model has one: these may have another RoPE base. The kernel itself applies the
    window."""
    packing = packing_of(documents_BT)
    if cudnn:
        packing = packing._replace(ragged=Ragged(packing.starts_S, documents_BT.shape[1]))
    length_BT = 0 if config.long_rope is None else lengths(documents_BT)
    angles = _cos_sin(config, positions(documents_BT), length_BT, dtype, windowed)
    return AttentionInputs(*angles, None, packing)


def _cos_sin(
    config: ModelConfig,
    position_XT: Tensor,
    length_XT: Tensor | int,
    dtype: torch.dtype,
    windowed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of each position, (X, T, 1, R), in documents of `length_XT` tokens."""
    # Recomputed each time: a buffer would have no values when a model is built on the meta device.
    frequency_R = frequencies(config, position_XT.device, windowed)
    long, factor = config.long_rope, 1.0
    if long is not None:
        short_R, long_R = _long_factors(long, position_XT.device)
        original_length = long.original_max_position_embeddings
        if isinstance(length_XT, int):
            frequency_R = frequency_R / (long_R if length_XT > original_length else short_R)
        else:
            frequency_R = frequency_R / torch.where(
                length_XT[..., None] > original_length, long_R, short_R
            )
        factor = long.angle_factor(config.max_position_embeddings)
    angle_XTR = position_XT[..., None].float() * frequency_R
    cos_XTR, sin_XTR = angle_XTR.cos(), angle_XTR.sin()
    if factor != 1:
        cos_XTR, sin_XTR = cos_XTR * factor, sin_XTR * factor
    return cos_XTR[:, :, None].to(dtype), sin_XTR[:, :, None].to(dtype)


@lru_cache(maxsize=16)
def _long_factors(long: LongRope, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return LongRoPE's factors for short and for long documents, (R,). The result is cached, because copying it to the
    device synchronises."""
    short_R, long_R = (
        torch.tensor(factors, device=device) for factors in (long.short_factor, long.long_factor)
    )
    return short_R, long_R


def frequencies(config: ModelConfig, device: torch.device, windowed: bool = False) -> Tensor:
    """Return the RoPE frequency of each rotated pair of a head, in radians per position, (R,) in fp32, by
    the formulas of `engine.models.rope`. Nothing is copied from the host, which would synchronise.
    """
    width = config.rotary_dim
    exponent_R = torch.arange(0, width, 2, device=device).float() / width
    if windowed and config.rope_local_base_freq is not None:
        return 1.0 / config.rope_local_base_freq**exponent_R
    frequency_R = 1.0 / config.rope_theta**exponent_R / config.rope_factor
    scaling = config.rope_scaling
    if scaling is None:
        return frequency_R
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns_R = scaling.original_max_position_embeddings * frequency_R / (2 * math.pi)
    keep_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return frequency_R * (keep_R + (1 - keep_R) / scaling.factor)


class Tensors(Mapping[str, Tensor]):
    """Parameters and buffers of a decoder by name. If the decoder is sharded, every access is a
    collective: all ranks must access the same names in the same order, and a tensor is valid until
    a tensor of another layer is accessed.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._found = dict(decoder.named_parameters()) | dict(decoder.named_buffers())

    def __getitem__(self, name: str) -> Tensor:
        self._decoder.gather_for(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
