"""Define the model families and the names of their tensors. To add a family, add a row here and a parity test
(`tests/unit/models/test_decoder.py` compares with transformers).

A family is identified by `model_type` in a `config.json`, and by `general.architecture` in a GGUF
file (`Family.gguf`). All families share one decoder (`engine.models.decoder`): RMS norms, RoPE on halves of a head,
activation(gate) * up. Their differences are columns of `Family`:

    qwen2   Qwen2, Qwen2.5      q, k and v have biases
    qwen3   Qwen3               each head of q and k is normalised; head_dim is independent
    llama   Llama 2, 3, 3.1..   neither; from 3.1 on, `rope_scaling` scales the low RoPE frequencies
    mistral Mistral 7B..        as llama; `sliding_window` may limit how far back a token attends
    smollm3 SmolLM3             as llama; some layers have no RoPE
    olmo2   OLMo 2              norms after attention and mlp, none before; one norm over all of q, one over k
    phi3    Phi-3, Phi-4        as mistral; q, k, v are one tensor of a file, and so are gate and up; RoPE may
                                rotate only the first part of a head
    gemma3  Gemma 3 (text)      gelu instead of silu; norms before and after, whose factors are 1 + weight;
                                embeddings are scaled; some layers have a window and a different RoPE base

A GGUF file of Mistral has the architecture `llama` and is read as Llama: without a window they compute
the same.

Every tensor has the engine's name (`layers.3.attention.q.weight`, the path in `Decoder`) and one for each
convention of weight files:

    hf     `model.layers.3.self_attn.q_proj.weight`    safetensors
    gguf   `blk.3.attn_q.weight`                       GGUF
    apr    as hf                                       .apr

This table holds only numbers and names, and imports nothing: `engine.formats` and `engine.models` read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its properties, and the keys of files that describe it."""

    name: str
    """`model_type` in a config.json."""
    title: str
    hf_class: str
    """Name of the transformers class that loads the family."""
    activation: str = "silu"
    """Name of the activation in transformers; one of `engine.models.decoder.ACTIVATIONS`."""
    activation_key: str = "hidden_act"
    """Key of the activation in config.json."""
    embeddings_scaled: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to their dtype."""
    norm_offset: float = 0.0
    """Norms multiply with their weight plus this, in fp32; GGUF files hold the sum."""
    attention_bias: bool = False
    """q, k and v have biases; o never has one."""
    qk_norm: bool = False
    """q and k are normalised before RoPE, each head separately."""
    qk_norm_whole: bool = False
    """With `qk_norm`: q and k are normalised over all heads together, with one weight per dimension of all heads."""
    has_pre_norms: bool = True
    """Pre-norm: the inputs of attention and mlp are normalised."""
    has_post_norms: bool = False
    """Post-norm: the outputs of attention and mlp are normalised, before they are added to the residual stream."""
    sliding_window: bool = False
    """config.json gives `sliding_window`, a number of tokens or null: in every layer a token attends to
    that many tokens, itself included. In other families a window is refused.
    """
    window_by_layer: bool = False
    """With `sliding_window`, which then is a number: config.json says which layers have the window, as
    `layer_types` or `sliding_window_pattern`. Layers with the window have the RoPE base `rope_local_base_freq` and no
    scaling; the others have `rope_theta` and the scaling of `rope_types`.
    """
    query_scale: bool = False
    """config.json gives `query_pre_attn_scalar`: scores are divided by its square root instead of that of head_dim."""
    fused: bool = False
    """Files have q, k and v concatenated (along the rows) in one tensor, and gate and up in another."""
    partial_rotary: bool = False
    """config.json may give `partial_rotary_factor`, the share of a head that RoPE rotates. In other
    families one below 1 is refused.
    """
    rope_types: tuple[str, ...] = ("default",)
    """Supported RoPE types; `llama3` is the scaling of `engine.models.rope`, `linear` divides positions; `longrope`
    divides the frequency of each pair by a factor. It has two sets of factors: one for documents of more than
    `original_max_position_embeddings` tokens, and one for shorter documents.
    """
    own_head_dim: bool = False
    """config.json must give head_dim: it cannot be derived, and transformers would default to 128.
    """
    whole_heads: bool = False
    """hidden_size must be a multiple of the number of heads even if head_dim is given, as
    transformers requires.
    """
    rope_by_layer: bool = False
    """config.json gives `no_rope_layers`, in which the layers with 0 have no RoPE."""
    tied: bool = False
    """Whether the head is the embedding if config.json does not say."""
    absent: Mapping[str, float | None] = field(default_factory=dict)
    """Values of keys that older config.json files lack, as in transformers; None means the value of
    num_attention_heads. A file of another family without such a key is refused.
    """
    hf_flags: Mapping[str, object]
    """Keys that are written to config.json to switch off variants that this decoder does not implement."""
    padding: int = 0
    """The padding token that transformers assumes if config.json names none."""
    gguf_name: str = ""
    """`general.architecture` in a GGUF file, where it is not `name`."""
    apr: bool = True
    """Whether .apr files of this family are read and written."""
    turns_neighbours: bool = False
    """GGUF and .apr readers use interleaved RoPE (x[2i] is rotated with x[2i + 1]), so the rows of q and k are
    permuted in these files.
    """
    gguf_rope_dimension: bool = False
    """GGUF files of this family always state how many dimensions of a head are rotated."""
    gguf_rope_interval: int = 0
    """Readers of GGUF files of this family leave out RoPE in every N-th layer, N being this number; no key
    says so. 0 for none.
    """
    gguf_window_interval: int = 0
    """With `window_by_layer`: for readers of GGUF files of this family every N-th layer, N being this number, has
    no window, and the others have a window and the RoPE base GGUF_LOCAL_BASE; no key says so.
    """
    gguf_wide_layers: int = 0
    """With `query_scale`: readers of GGUF files of this family divide scores by the square root of hidden_size /
    heads in models with this number of layers, and of head_dim in all others; no key says so.
    """
    gguf_biases: bool = False
    """Only the tensor list of a GGUF file shows whether the model has biases, which are not
    supported.
    """
    pre_tokenizer: str | None = None
    """The pre-tokenizer (`engine.formats.tokenizer`) that is assumed for an .apr file without one."""

    @property
    def separate_projections(self) -> bool:
        """Whether files have q, k, v, gate and up as separate tensors."""
        return not self.fused

    @property
    def pre_norms_only(self) -> bool:
        return self.has_pre_norms and not self.has_post_norms

    @property
    def pre_and_post_norms(self) -> bool:
        return self.has_pre_norms and self.has_post_norms

    @property
    def qk_norm_per_head(self) -> bool:
        return self.qk_norm and not self.qk_norm_whole

    @property
    def gguf(self) -> str:
        """`general.architecture` in a GGUF file."""
        return self.gguf_name or self.name

    @property
    def llama3_rope(self) -> bool:
        """Whether a file may request Llama 3's scaling of low RoPE frequencies."""
        return "llama3" in self.rope_types


_OLDER = {"num_key_value_heads": None, "rope_theta": 10_000.0}
_ROWS = (
    Family(
        name="qwen2",
        title="Qwen2",
        hf_class="Qwen2ForCausalLM",
        attention_bias=True,
        hf_flags={"use_sliding_window": False},
        pre_tokenizer="qwen2",
    ),
    Family(
        name="qwen3",
        title="Qwen3",
        hf_class="Qwen3ForCausalLM",
        qk_norm=True,
        own_head_dim=True,
        hf_flags={"use_sliding_window": False, "attention_bias": False},
        pre_tokenizer="qwen2",
    ),
    Family(
        name="llama",
        title="Llama",
        hf_class="LlamaForCausalLM",
        rope_types=("default", "llama3"),
        whole_heads=True,
        absent={**_OLDER, "max_position_embeddings": 2048},
        hf_flags={"attention_bias": False, "mlp_bias": False},
        turns_neighbours=True,
        gguf_rope_dimension=True,
        gguf_biases=True,
    ),
    Family(
        name="mistral",
        title="Mistral",
        hf_class="MistralForCausalLM",
        sliding_window=True,
        hf_flags={},
        gguf_name="llama",
        apr=False,
        turns_neighbours=True,
        gguf_rope_dimension=True,
        gguf_biases=True,
    ),
    Family(
        name="smollm3",
        title="SmolLM3",
        hf_class="SmolLM3ForCausalLM",
        rope_by_layer=True,
        tied=True,
        padding=128004,
        hf_flags={"use_sliding_window": False, "attention_bias": False, "mlp_bias": False},
        apr=False,
        turns_neighbours=True,
        gguf_rope_dimension=True,
        gguf_rope_interval=4,
        gguf_biases=True,
    ),
    Family(
        name="olmo2",
        title="OLMo 2",
        hf_class="Olmo2ForCausalLM",
        qk_norm=True,
        qk_norm_whole=True,
        has_pre_norms=False,
        has_post_norms=True,
        whole_heads=True,
        absent=_OLDER,
        hf_flags={"attention_bias": False},
        apr=False,
    ),
    Family(
        name="phi3",
        title="Phi-3",
        hf_class="Phi3ForCausalLM",
        fused=True,
        sliding_window=True,
        partial_rotary=True,
        rope_types=("default", "longrope"),
        padding=32000,
        absent=_OLDER,
        hf_flags={"attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        apr=False,
        gguf_rope_dimension=True,
    ),
    Family(
        name="gemma3_text",
        title="Gemma 3",
        hf_class="Gemma3ForCausalLM",
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        embeddings_scaled=True,
        norm_offset=1.0,
        has_post_norms=True,
        qk_norm=True,
        own_head_dim=True,
        whole_heads=True,
        sliding_window=True,
        window_by_layer=True,
        query_scale=True,
        rope_types=("default", "linear"),
        tied=True,
        hf_flags={
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        gguf_name="gemma3",
        gguf_window_interval=6,
        gguf_wide_layers=62,
        apr=False,
    ),
)
GGUF_LOCAL_BASE = 10_000.0
FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}


def titles() -> str:
    """Return the titles of all families as text: `Qwen2, Qwen3 or Llama`."""
    *others, last = (family.title for family in FAMILIES.values())
    return f"{', '.join(others)} or {last}"


class TensorRow(NamedTuple):
    """One tensor, or one tensor of each layer.

    The shape is spelt by dimensions: V vocabulary, D model width, F feed-forward width, E one head,
    Q all query heads, K all key/value heads (each times head_dim).
    """

    ours: str
    hf: str
    gguf: str
    shape: str
    only: str = ""
    """The flag of `Family` that this tensor requires; empty if every family has it."""

    def named(self, convention: str) -> str:
        if convention not in CONVENTIONS:
            raise ValueError(f"convention: expected {', '.join(CONVENTIONS)}, found {convention!r}")
        return self.gguf if convention == "gguf" else self.hf


CONVENTIONS = ("hf", "gguf", "apr")
EMBEDDING = TensorRow("embed.weight", "model.embed_tokens.weight", "token_embd.weight", "VD")
LAST_NORM = TensorRow("norm.weight", "model.norm.weight", "output_norm.weight", "D")
HEAD = TensorRow("head.weight", "lm_head.weight", "output.weight", "VD")
LAYERS = TensorRow("layers", "model.layers", "blk", "")
"""Prefix before a layer's number; the names in `LAYER` follow the number. Rows of a family with the same
name in a file are parts of one tensor, concatenated along its rows.
"""
LAYER = (
    TensorRow(
        "attention_norm.weight",
        "input_layernorm.weight",
        "attn_norm.weight",
        "D",
        "has_pre_norms",
    ),
    TensorRow(
        "attention.q.weight",
        "self_attn.q_proj.weight",
        "attn_q.weight",
        "QD",
        "separate_projections",
    ),
    TensorRow("attention.q.bias", "self_attn.q_proj.bias", "attn_q.bias", "Q", "attention_bias"),
    TensorRow(
        "attention.k.weight",
        "self_attn.k_proj.weight",
        "attn_k.weight",
        "KD",
        "separate_projections",
    ),
    TensorRow("attention.k.bias", "self_attn.k_proj.bias", "attn_k.bias", "K", "attention_bias"),
    TensorRow(
        "attention.v.weight",
        "self_attn.v_proj.weight",
        "attn_v.weight",
        "KD",
        "separate_projections",
    ),
    TensorRow("attention.v.bias", "self_attn.v_proj.bias", "attn_v.bias", "K", "attention_bias"),
    TensorRow("attention.q.weight", "self_attn.qkv_proj.weight", "attn_qkv.weight", "QD", "fused"),
    TensorRow("attention.k.weight", "self_attn.qkv_proj.weight", "attn_qkv.weight", "KD", "fused"),
    TensorRow("attention.v.weight", "self_attn.qkv_proj.weight", "attn_qkv.weight", "KD", "fused"),
    TensorRow(
        "attention.q_norm.weight",
        "self_attn.q_norm.weight",
        "attn_q_norm.weight",
        "E",
        "qk_norm_per_head",
    ),
    TensorRow(
        "attention.k_norm.weight",
        "self_attn.k_norm.weight",
        "attn_k_norm.weight",
        "E",
        "qk_norm_per_head",
    ),
    TensorRow(
        "attention.q_norm.weight",
        "self_attn.q_norm.weight",
        "attn_q_norm.weight",
        "Q",
        "qk_norm_whole",
    ),
    TensorRow(
        "attention.k_norm.weight",
        "self_attn.k_norm.weight",
        "attn_k_norm.weight",
        "K",
        "qk_norm_whole",
    ),
    TensorRow("attention.o.weight", "self_attn.o_proj.weight", "attn_output.weight", "DQ"),
    TensorRow(
        "attention_out_norm.weight",
        "post_attention_layernorm.weight",
        "post_attention_norm.weight",
        "D",
        "has_post_norms",
    ),
    TensorRow(
        "mlp_norm.weight",
        "post_attention_layernorm.weight",
        "ffn_norm.weight",
        "D",
        "pre_norms_only",
    ),
    TensorRow(
        "mlp_norm.weight",
        "pre_feedforward_layernorm.weight",
        "ffn_norm.weight",
        "D",
        "pre_and_post_norms",
    ),
    TensorRow(
        "mlp.gate.weight", "mlp.gate_proj.weight", "ffn_gate.weight", "FD", "separate_projections"
    ),
    TensorRow("mlp.up.weight", "mlp.up_proj.weight", "ffn_up.weight", "FD", "separate_projections"),
    TensorRow("mlp.gate.weight", "mlp.gate_up_proj.weight", "ffn_up.weight", "FD", "fused"),
    TensorRow("mlp.up.weight", "mlp.gate_up_proj.weight", "ffn_up.weight", "FD", "fused"),
    TensorRow("mlp.down.weight", "mlp.down_proj.weight", "ffn_down.weight", "DF"),
    TensorRow(
        "mlp_out_norm.weight",
        "post_feedforward_layernorm.weight",
        "post_ffw_norm.weight",
        "D",
        "has_post_norms",
    ),
)
ROPE_BUFFER = re.compile(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Names of RoPE buffers in older checkpoints, which are ignored because config.json determines them."""
_TEXT_MODEL = re.compile(
    r"(?:model\.language_model|language_model\.model)\.(?P<inner>.+)|language_model\.(?P<head>lm_head\..+)"
)


def in_text_model(name: str) -> str | None:
    """Return the name of a tensor in the language model, from its name in a checkpoint with a vision model; None for
    any other name."""
    found = _TEXT_MODEL.fullmatch(name)
    if found is None:
        return None
    return found["head"] or f"model.{found['inner']}"


ROPE_DIVISORS = "rope_freqs.weight"
"""The tensor with Llama 3.1's RoPE scaling in a GGUF or .apr file."""


def layer_tensors(family: Family) -> list[TensorRow]:
    """Return the tensors of one layer, in the order of the forward pass."""
    return [row for row in LAYER if not row.only or getattr(family, row.only)]
