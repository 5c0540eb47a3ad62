"""The shape of a model: the `config.json` of a Qwen2, Qwen3 or Llama model, read strictly.

A decoder is fixed by its family, nine numbers and one flag:

    tokens -> embedding (V, D) -> L x [norm, attention, norm, feed-forward] -> norm -> head (V, D)

    V vocab_size   D hidden_size   F intermediate_size   L num_hidden_layers
    num_attention_heads query heads, head_dim wide, share num_key_value_heads key/value heads

The family (`model_type`) settles the rest:

    qwen2   Qwen2, Qwen2.5      q, k and v have biases
    qwen3   Qwen3               each head of q and k has its norm; head_dim is a number of its own
    llama   Llama 2, 3, 3.1..   neither; from 3.1 on, `rope_scaling` stretches the slow rotations

`rms_norm_eps` and `rope_theta` change every logit and no shape, so a file that leaves them out is
refused: a default would run and be wrong. Both spellings of rotary positions are read, `rope_theta`
with `rope_scaling` and transformers' newer `rope_parameters`, and both are written.

Not covered, and refused by name: other families, other activations, other scalings of rotary
positions (yarn, linear, ...), sliding windows, attention dropout, biases where the family has none,
quantized checkpoints. All problems of one file come in one `WeightsError`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine import limits
from engine.errors import WeightsError
from engine.formats.safetensors_header import open_regular, read_json_object
from engine.models.config_checks import FAMILIES, HIDDEN_ACT, SIZES, impossible, read_values
from engine.models.rope import RopeScaling, divisors, same_divisors, scaling_of_divisors

if TYPE_CHECKING:
    from engine.formats.weights import WeightFile

CONFIG_FILE = "config.json"
ROPE_DIVISORS = "rope_freqs.weight"
"""Llama 3.1's rope scaling in a GGUF file, beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Qwen2, Qwen3 or Llama decoder; impossible numbers raise `WeightsError`, all at once."""

    family: str = "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    """Query heads share key/value heads in equal groups, so this divides `num_attention_heads`."""
    head_dim: int = 0
    """Width of one head; 0 asks for hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    """Llama only."""
    tie_word_embeddings: bool = False
    """The head is the embedding: one (V, D) tensor with two uses."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        # Left at 0 when it does not divide, so that the check below names the two numbers.
        if self.head_dim == 0 and heads > 0 and self.hidden_size % heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        _refuse(impossible(asdict(self)), "ModelConfig")
        if (weights := count_parameters(self)) > limits.PARAMETERS.most:
            _refuse([f"sizes: expected {limits.PARAMETERS}, found {weights:,}"], "ModelConfig")

    @property
    def attention_bias(self) -> bool:
        """Whether q, k and v have biases; o never has one."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k is normed, before it is turned."""
        return self.family == "qwen3"

    @classmethod
    def from_dict(cls, raw: Mapping[str, object], where: object) -> ModelConfig:
        """The configuration in a parsed `config.json`; `where` names it in the error."""
        values, problems = read_values(raw)
        _refuse([*problems, *impossible(values)], where)
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            values["rope_scaling"] = RopeScaling(**scaling)
        return cls(**values)  # type: ignore[arg-type]  # each value was checked by `_take`

    def to_hf_dict(self) -> dict[str, object]:
        """The content of a `config.json` that transformers loads as the family's class."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        scaling: dict[str, object] | None = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **asdict(self.rope_scaling)}
        family: dict[str, object] = {"use_sliding_window": False}
        if self.family == "llama":
            family = {"attention_bias": False, "mlp_bias": False}
        elif self.family == "qwen3":
            family |= {"attention_bias": False}
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "hidden_act": HIDDEN_ACT,
            **{key: getattr(self, key) for key in SIZES},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            **({} if scaling is None else {"rope_scaling": scaling}),
            "rope_parameters": {
                "rope_theta": self.rope_theta,
                **(scaling or {"rope_type": "default"}),
            },
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            **family,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
        }


def read_config(folder_or_file: str | Path) -> ModelConfig:
    """The configuration in a model folder, or in a `config.json` named directly."""
    path = Path(folder_or_file)
    if path.is_dir():
        path = path / CONFIG_FILE
    return ModelConfig.from_dict(
        read_json_object(path, "model configuration", limits.MODEL_CONFIG), path
    )


def config_of(weights: WeightFile) -> ModelConfig:
    """The configuration of an open weight file of any format. Raises `WeightsError`."""
    config = ModelConfig.from_dict(weights.config_dict(), weights.path)
    if config.family != "llama" or ROPE_DIVISORS not in weights.tensors:
        return config
    stored = _stored_divisors(weights)
    if config.rope_scaling is not None:
        expected = divisors(config.rope_scaling, config.rope_theta, config.head_dim)
        if not same_divisors(stored, expected):
            raise WeightsError.expected(
                ROPE_DIVISORS,
                weights.path,
                f"the divisors of {config.rope_scaling}, {expected}",
                f"{stored}",
            )
        return config
    try:
        scaling = scaling_of_divisors(stored, config.rope_theta, config.head_dim)
    except ValueError as error:
        raise WeightsError.expected(
            ROPE_DIVISORS, weights.path, "the divisors of a llama3 rope scaling", f"{stored}"
        ) from error
    return replace(config, rope_scaling=scaling)


def _stored_divisors(weights: WeightFile) -> list[float]:
    """Read here and not by `get`, which loads torch."""
    info = weights.tensors[ROPE_DIVISORS]
    count = info.bytes // 4
    if info.dtype != "F32" or info.shape != (count,):
        raise WeightsError.expected(
            ROPE_DIVISORS, weights.path, "a row of F32", f"{info.dtype} {list(info.shape)}"
        )
    with open_regular(info.file, "weights") as file:
        file.seek(info.start)
        return list(struct.unpack(f"<{count}f", file.read(info.bytes)))


def count_parameters(config: ModelConfig) -> int:
    """Trainable numbers of the decoder; a tied head is counted once."""
    width = config.hidden_size
    query_width = config.num_attention_heads * config.head_dim
    shared_width = config.num_key_value_heads * config.head_dim
    attention = width * (2 * query_width + 2 * shared_width)
    if config.attention_bias:
        attention += query_width + 2 * shared_width
    if config.qk_norm:
        attention += 2 * config.head_dim
    layer = attention + 3 * width * config.intermediate_size + 2 * width
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * width + config.num_hidden_layers * layer + width


def _refuse(problems: list[str], where: object) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise WeightsError.expected(
            "model configuration", where, "a Qwen2, Qwen3 or Llama decoder", f"{count}:{lines}"
        )
