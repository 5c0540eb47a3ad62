"""The names and shapes of a decoder's tensors, as one table.

Every tensor has two names, ours (`layers.3.attention.q.weight`, the path in `Decoder`) and the one
that Hugging Face checkpoints use (`model.layers.3.self_attn.q_proj.weight`); `{}` stands for the
layer. Linear weights are (out, in) in both, so a tensor moves from one to the other untouched.

The shape column spells a tensor by its dimensions:

    V vocabulary    D model width    F feed-forward width
    Q all query heads    K all key/value heads (each times head_dim)

What is covered: presence, shape and float dtype of each tensor. Values (NaN, an `lm_head` that
differs from a tied embedding) are checked where they are read, in `engine.models.load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from engine.errors import WeightsError
from engine.models.config import ModelConfig

# ours, Hugging Face, dimensions
_OUTER = (
    ("embed.weight", "model.embed_tokens.weight", "VD"),
    ("norm.weight", "model.norm.weight", "D"),
    ("head.weight", "lm_head.weight", "VD"),
)
_LAYER = (
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight", "D"),
    ("layers.{}.attention.q.weight", "model.layers.{}.self_attn.q_proj.weight", "QD"),
    ("layers.{}.attention.q.bias", "model.layers.{}.self_attn.q_proj.bias", "Q"),
    ("layers.{}.attention.k.weight", "model.layers.{}.self_attn.k_proj.weight", "KD"),
    ("layers.{}.attention.k.bias", "model.layers.{}.self_attn.k_proj.bias", "K"),
    ("layers.{}.attention.v.weight", "model.layers.{}.self_attn.v_proj.weight", "KD"),
    ("layers.{}.attention.v.bias", "model.layers.{}.self_attn.v_proj.bias", "K"),
    ("layers.{}.attention.o.weight", "model.layers.{}.self_attn.o_proj.weight", "DQ"),
    ("layers.{}.mlp_norm.weight", "model.layers.{}.post_attention_layernorm.weight", "D"),
    ("layers.{}.mlp.gate.weight", "model.layers.{}.mlp.gate_proj.weight", "FD"),
    ("layers.{}.mlp.up.weight", "model.layers.{}.mlp.up_proj.weight", "FD"),
    ("layers.{}.mlp.down.weight", "model.layers.{}.mlp.down_proj.weight", "DF"),
)

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FLOAT_DTYPES = ("F32", "BF16", "F16")
LISTED_PROBLEMS = 12


class TensorFacts(Protocol):
    """What a weight file says of a tensor before its data is read."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class WeightNames(Protocol):
    """Any weight file with Hugging Face names."""

    @property
    def tensors(self) -> Mapping[str, TensorFacts]: ...


def hf_names(config: ModelConfig) -> dict[str, str]:
    """Our name -> Hugging Face name of every tensor, in the order of the forward pass."""
    return {ours: hf for ours, hf, _ in _rows(config)}


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor a checkpoint must have; tied, no `lm_head`."""
    size = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "Q": config.num_attention_heads * config.head_dim,
        "K": config.num_key_value_heads * config.head_dim,
    }
    return {hf: tuple(size[letter] for letter in shape) for _, hf, shape in _rows(config)}


def check_fits(config: ModelConfig, weights: WeightNames, where: object) -> None:
    """Compares names, shapes and dtypes with what `config` needs; no data is read.

    Raises one `WeightsError` that lists every missing, unexpected and misshapen tensor and every
    tensor that holds no plain floats. A tied model may come with an `lm_head`, if it has the
    embedding's shape.
    """
    expected = expected_tensors(config)
    allowed = {**expected, HEAD: expected[EMBEDDING]}
    found = weights.tensors
    missing = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    unexpected, misshapen, other_dtype = [], [], []
    for name, facts in found.items():
        if name not in allowed:
            unexpected.append(f"unexpected {name} {list(facts.shape)}")
            continue
        if facts.shape != allowed[name]:
            misshapen.append(
                f"misshapen {name}: expected {list(allowed[name])}, found {list(facts.shape)}"
            )
        if facts.dtype not in FLOAT_DTYPES:
            other_dtype.append(
                f"dtype of {name}: expected {', '.join(FLOAT_DTYPES)}, found {facts.dtype}"
            )
    problems = [*missing, *unexpected, *misshapen, *other_dtype]
    if not problems:
        return
    lines = problems[:LISTED_PROBLEMS]
    if len(problems) > LISTED_PROBLEMS:
        lines.append(f"... and {len(problems) - LISTED_PROBLEMS} more")
    hint = None
    if HEAD in expected and HEAD not in found and len(problems) == 1:
        hint = "the head may be the embedding: config.json says tie_word_embeddings is false"
    raise WeightsError.expected(
        "weights do not fit the configuration",
        where,
        f"{len(expected)} tensors",
        f"{len(missing)} missing, {len(unexpected)} unexpected, {len(misshapen)} misshapen, "
        f"{len(other_dtype)} of another dtype:" + "".join(f"\n  {line}" for line in lines),
        hint=hint,
    )


def _rows(config: ModelConfig) -> Iterator[tuple[str, str, str]]:
    embed, norm, head = _OUTER
    yield embed
    for layer in range(config.num_hidden_layers):
        for ours, hf, shape in _LAYER:
            yield ours.format(layer), hf.format(layer), shape
    yield norm
    if not config.tie_word_embeddings:
        yield head
