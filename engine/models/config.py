"""The shape of a model: `config.json` of the Qwen2 family, read strictly.

A decoder of this family is fixed by nine numbers and one flag:

    tokens -> embedding (V, D) -> L x [norm, attention, norm, feed-forward] -> norm -> head (V, D)

    V vocab_size   D hidden_size   F intermediate_size   L num_hidden_layers
    num_attention_heads query heads, head_dim wide, share num_key_value_heads key/value heads

`rms_norm_eps` and `rope_theta` change every logit and no shape, so a file that leaves them out is
refused: a default would run and be wrong. Both spellings of the rotary base are read, `rope_theta`
and transformers' newer `rope_parameters: {rope_theta, rope_type}`, and both are written.

Not covered, and refused by name: other families, other activations, scaled rotary positions (yarn,
linear, ...), sliding windows, attention dropout, quantized checkpoints. All problems of one file
come in one `WeightsError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import WeightsError
from engine.formats.safetensors_header import read_json_object

MODEL_TYPE = "qwen2"
HIDDEN_ACT = "silu"
CONFIG_FILE = "config.json"

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_REALS = ("rms_norm_eps", "rope_theta")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Qwen2 family; impossible numbers raise `WeightsError`, all at once."""

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
    tie_word_embeddings: bool = False
    """The head is the embedding: one (V, D) tensor with two uses."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        # Left at 0 when it does not divide, so that the check below names the two numbers.
        if self.head_dim == 0 and heads > 0 and self.hidden_size % heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        _refuse(_impossible(asdict(self)), "ModelConfig")

    @classmethod
    def from_dict(cls, raw: Mapping[str, object], where: object) -> ModelConfig:
        """The configuration in a parsed `config.json`; `where` names it in the error."""
        problems = _unsupported(raw)
        values: dict[str, object] = {}
        if raw.get("num_key_value_heads", 0) is None:
            raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}
        for key in _SIZES:
            if key != "head_dim" or raw.get(key) is not None:
                _take(raw, key, int, values, problems)
        _take(raw, "rms_norm_eps", float, values, problems)
        _take(_with_rope_theta(raw, problems), "rope_theta", float, values, problems)
        if raw.get("tie_word_embeddings") is not None:
            _take(raw, "tie_word_embeddings", bool, values, problems)
        if raw.get("bos_token_id") is not None:
            _take(raw, "bos_token_id", int, values, problems)
        values["eos_token_ids"] = _token_ids(raw, "eos_token_id", problems)
        _refuse([*problems, *_impossible(values)], where)
        return cls(**values)  # type: ignore[arg-type]  # each value was checked by `_take`

    def to_hf_dict(self) -> dict[str, object]:
        """The content of a `config.json` that transformers loads as `Qwen2ForCausalLM`."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": MODEL_TYPE,
            "hidden_act": HIDDEN_ACT,
            **{key: getattr(self, key) for key in _SIZES},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
        }


def read_config(folder_or_file: str | Path) -> ModelConfig:
    """The configuration in a model folder, or in a `config.json` named directly."""
    path = Path(folder_or_file)
    if path.is_dir():
        path = path / CONFIG_FILE
    return ModelConfig.from_dict(read_json_object(path, "model configuration"), path)


def count_parameters(config: ModelConfig) -> int:
    """Trainable numbers of the decoder; a tied head is counted once."""
    width = config.hidden_size
    query_width = config.num_attention_heads * config.head_dim
    shared_width = config.num_key_value_heads * config.head_dim
    attention = (width + 1) * (query_width + 2 * shared_width) + query_width * width
    layer = attention + 3 * width * config.intermediate_size + 2 * width
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * width + config.num_hidden_layers * layer + width


def _refuse(problems: list[str], where: object) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise WeightsError.expected(
            "model configuration", where, "a decoder of the Qwen2 family", f"{count}:{lines}"
        )


_KINDS = {int: "an integer", float: "a number", bool: "true or false"}


def _take(
    raw: Mapping[str, object],
    key: str,
    kind: type,
    values: dict[str, object],
    problems: list[str],
) -> None:
    """Copies one value of the right kind; a bool is not an integer, an integer is a number."""
    found = raw.get(key)
    if key not in raw:
        problems.append(f"{key}: expected a value, found none")
    elif type(found) is kind:
        values[key] = found
    elif kind is float and type(found) is int and abs(found) < 2**63:
        values[key] = float(found)
    else:
        problems.append(f"{key}: expected {_KINDS[kind]}, found {found!r:.80}")


def _token_ids(raw: Mapping[str, object], key: str, problems: list[str]) -> tuple[int, ...]:
    found = raw.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if all(type(token) is int for token in ids):
        return tuple(ids)
    problems.append(f"{key}: expected an integer or a list of integers, found {found!r:.80}")
    return ()


def _with_rope_theta(raw: Mapping[str, object], problems: list[str]) -> Mapping[str, object]:
    """`raw` with its rotary base under `rope_theta`, whichever spelling the file has."""
    nested = raw.get("rope_parameters")
    if not isinstance(nested, Mapping) or "rope_theta" not in nested:
        return raw
    if "rope_theta" in raw and raw["rope_theta"] != nested["rope_theta"]:
        problems.append(
            "rope_theta: expected the value of rope_parameters.rope_theta, "
            f"{nested['rope_theta']!r}, found {raw['rope_theta']!r}"
        )
    return {**raw, "rope_theta": nested["rope_theta"]}


def _unsupported(raw: Mapping[str, object]) -> list[str]:
    """What the file asks for by name and this decoder does not do."""
    problems = []

    def only(key: str, allowed: object, found: object) -> None:
        if found != allowed:
            problems.append(
                f"{key}: expected {allowed!r} (all that is supported), found {found!r:.80}"
            )

    only("model_type", MODEL_TYPE, raw.get("model_type"))
    only("hidden_act", HIDDEN_ACT, raw.get("hidden_act", HIDDEN_ACT))
    only("use_sliding_window", False, raw.get("use_sliding_window") or False)
    only("attention_dropout", 0.0, raw.get("attention_dropout") or 0.0)
    only("quantization_config", None, raw.get("quantization_config"))
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list):
        for kind in sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            only("layer_types", "full_attention", kind)
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if isinstance(rope, Mapping):
            only(f"{key}.rope_type", "default", rope.get("rope_type", rope.get("type", "default")))
            only(f"{key}.partial_rotary_factor", 1.0, rope.get("partial_rotary_factor", 1.0))
        else:
            only(key, None, rope)
    return problems


def _impossible(values: Mapping[str, object]) -> list[str]:
    """Numbers that no model can have; keys that are absent were reported by the reader."""
    problems = []
    good: dict[str, int] = {}
    for key in _SIZES:
        found = values.get(key)
        if isinstance(found, int) and found > 0:
            good[key] = found
        elif key in values and not (key == "head_dim" and found == 0):
            problems.append(f"{key}: expected a positive integer, found {found!r}")
    for key in _REALS:
        real = values.get(key)
        if isinstance(real, int | float) and not (math.isfinite(real) and real > 0):
            problems.append(f"{key}: expected a positive finite number, found {real!r}")
    heads, shared = good.get("num_attention_heads"), good.get("num_key_value_heads")
    if heads and shared and heads % shared:
        problems.append(f"num_key_value_heads: expected a divisor of {heads} heads, found {shared}")
    if "head_dim" in good:
        if good["head_dim"] % 2:
            # Rotary positions turn pairs of numbers.
            problems.append(f"head_dim: expected an even number, found {good['head_dim']}")
    elif heads and good.get("hidden_size", 0) % heads:
        problems.append(
            f"hidden_size: expected a multiple of {heads} heads, found {good['hidden_size']}"
        )
    bos = values.get("bos_token_id")
    ids = [bos] if isinstance(bos, int) else []
    eos = values.get("eos_token_ids", ())
    assert isinstance(eos, tuple)
    outside = [token for token in (*ids, *eos) if not 0 <= token < good.get("vocab_size", math.inf)]
    if outside:
        problems.append(
            f"bos_token_id, eos_token_id: expected ids below vocab_size, found {outside}"
        )
    return problems
