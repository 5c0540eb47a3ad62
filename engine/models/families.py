"""The families of models and the names of their tensors: adding a family is a row here, and a parity
test (`tests/unit/models/test_decoder.py` compares with transformers).

A family is what `model_type` says in a `config.json`, and `general.architecture` in a GGUF file. All
families are one decoder (`engine.models.decoder`): RMS norms, rotary positions on halves of a head,
silu(gate) * up. What they differ in is a column of `Family`:

    qwen2   Qwen2, Qwen2.5      q, k and v have biases
    qwen3   Qwen3               each head of q and k has its norm; head_dim is a number of its own
    llama   Llama 2, 3, 3.1..   neither; from 3.1 on, `rope_scaling` stretches the slow rotations

Every tensor has our name (`layers.3.attention.q.weight`, the path in `Decoder`) and one for each
convention of weight files:

    hf     `model.layers.3.self_attn.q_proj.weight`    safetensors
    gguf   `blk.3.attn_q.weight`                       GGUF
    apr    as hf                                       .apr

Numbers and names only: `engine.formats` reads this table too, and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

ACTIVATION = "silu"
"""Of every family: the decoder and its kernels have no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row: what a family has, and how files tell of it."""

    name: str
    """`model_type` in a config.json, `general.architecture` in a GGUF file."""
    title: str
    hf_class: str
    """That transformers loads it with."""
    attention_bias: bool = False
    """q, k and v have biases; o never has one."""
    qk_norm: bool = False
    """Each head of q and k is normed, before it is turned."""
    rope_types: tuple[str, ...] = ("default",)
    """Of rotary positions; `llama3` is the stretching of `engine.models.rope`."""
    own_head_dim: bool = False
    """config.json has to say how wide a head is: there is no rule, and transformers would take 128."""
    whole_heads: bool = False
    """hidden_size has to be a multiple of the heads even beside a head_dim: transformers wants it."""
    hf_flags: Mapping[str, object]
    """What config.json says of variants that this decoder has not."""
    turns_neighbours: bool = False
    """Readers of GGUF and .apr turn x[2i] with x[2i + 1], so rows of q and k are in another order."""
    gguf_rope_dimension: bool = False
    """GGUF files of the family have always said how much of a head is turned."""
    gguf_biases: bool = False
    """Only the tensors of a GGUF file say whether the model has biases, which is not supported."""
    pre_tokenizer: str | None = None
    """How text is cut (`engine.formats.tokenizer`) in an .apr file that does not say."""

    @property
    def stretches(self) -> bool:
        """Whether slow rotations may be stretched."""
        return "llama3" in self.rope_types


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
        hf_flags={"attention_bias": False, "mlp_bias": False},
        turns_neighbours=True,
        gguf_rope_dimension=True,
        gguf_biases=True,
    ),
)
FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}


def titles() -> str:
    """`Qwen2, Qwen3 or Llama`."""
    *others, last = (family.title for family in FAMILIES.values())
    return f"{', '.join(others)} or {last}"


class TensorRow(NamedTuple):
    """One tensor, or one of each layer.

    The shape is spelt by dimensions: V vocabulary, D model width, F feed-forward width, E one head,
    Q all query heads, K all key/value heads (each times head_dim).
    """

    ours: str
    hf: str
    gguf: str
    shape: str
    only: str = ""
    """The column of `Family` without which there is no such tensor."""

    def named(self, convention: str) -> str:
        if convention not in CONVENTIONS:
            raise ValueError(f"convention: expected {', '.join(CONVENTIONS)}, found {convention!r}")
        return self.gguf if convention == "gguf" else self.hf


CONVENTIONS = ("hf", "gguf", "apr")
EMBEDDING = TensorRow("embed.weight", "model.embed_tokens.weight", "token_embd.weight", "VD")
LAST_NORM = TensorRow("norm.weight", "model.norm.weight", "output_norm.weight", "D")
HEAD = TensorRow("head.weight", "lm_head.weight", "output.weight", "VD")
LAYERS = TensorRow("layers", "model.layers", "blk", "")
"""What stands before a layer's number; the names of `LAYER` stand behind it."""
LAYER = (
    TensorRow("attention_norm.weight", "input_layernorm.weight", "attn_norm.weight", "D"),
    TensorRow("attention.q.weight", "self_attn.q_proj.weight", "attn_q.weight", "QD"),
    TensorRow("attention.q.bias", "self_attn.q_proj.bias", "attn_q.bias", "Q", "attention_bias"),
    TensorRow("attention.k.weight", "self_attn.k_proj.weight", "attn_k.weight", "KD"),
    TensorRow("attention.k.bias", "self_attn.k_proj.bias", "attn_k.bias", "K", "attention_bias"),
    TensorRow("attention.v.weight", "self_attn.v_proj.weight", "attn_v.weight", "KD"),
    TensorRow("attention.v.bias", "self_attn.v_proj.bias", "attn_v.bias", "K", "attention_bias"),
    TensorRow(
        "attention.q_norm.weight", "self_attn.q_norm.weight", "attn_q_norm.weight", "E", "qk_norm"
    ),
    TensorRow(
        "attention.k_norm.weight", "self_attn.k_norm.weight", "attn_k_norm.weight", "E", "qk_norm"
    ),
    TensorRow("attention.o.weight", "self_attn.o_proj.weight", "attn_output.weight", "DQ"),
    TensorRow("mlp_norm.weight", "post_attention_layernorm.weight", "ffn_norm.weight", "D"),
    TensorRow("mlp.gate.weight", "mlp.gate_proj.weight", "ffn_gate.weight", "FD"),
    TensorRow("mlp.up.weight", "mlp.up_proj.weight", "ffn_up.weight", "FD"),
    TensorRow("mlp.down.weight", "mlp.down_proj.weight", "ffn_down.weight", "DF"),
)
ROPE_DIVISORS = "rope_freqs.weight"
"""Llama 3.1's rope scaling in a GGUF or .apr file, beside the weights."""


def layer_tensors(family: Family) -> list[TensorRow]:
    """The tensors of one layer, in the order of the forward pass."""
    return [row for row in LAYER if not row.only or getattr(family, row.only)]
