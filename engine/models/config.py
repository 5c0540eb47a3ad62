"""Define the configuration of a decoder, and read it strictly from the `config.json` of a model of one of `FAMILIES`.

A decoder is fixed by its family, nine numbers and one flag:

    tokens -> embedding (V, D) -> L x [norm, attention, norm, feed-forward] -> norm -> head (V, D)

    V vocab_size   D hidden_size   F intermediate_size   L num_hidden_layers
    num_attention_heads query heads, head_dim wide, share num_key_value_heads key/value heads

The family (`model_type`) determines the rest: it is a row of `engine.model_families`.

`rms_norm_eps` and `rope_theta` change every logit but no shape, so a file without them is refused:
with a default the model would run and be wrong. RoPE settings have two spellings: `rope_theta` with
`rope_scaling`, and transformers' newer `rope_parameters`. Both are read and both are written; if a file has both,
`rope_parameters` is used.

Not covered, and refused by name: other families, other activations, other RoPE scalings (yarn,
linear, ...), dropout, sliding windows and biases where the family has none, quantised
checkpoints. Problems of one file are reported in one `WeightsError`, as lines `key: expected X,
found Y`: unsupported features and wrong types, or, where there are none, impossible values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass
from typing import Any

from engine import limits
from engine.errors import WeightsError
from engine.limits import Limit
from engine.model_families import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    LAST_NORM,
    Family,
    TensorRow,
    layer_tensors,
    titles,
)
from engine.models.rope import LongRope, RopeScaling

CONFIG_FILE = "config.json"

SIZES: dict[str, Limit] = {
    "vocab_size": limits.VOCABULARY,
    "hidden_size": limits.MODEL_WIDTH,
    "intermediate_size": limits.FEED_FORWARD,
    "num_hidden_layers": limits.LAYERS,
    "num_attention_heads": limits.HEADS,
    "num_key_value_heads": limits.HEADS,
    "head_dim": limits.HEAD_WIDTH,
    "max_position_embeddings": limits.POSITIONS,
}
"""Every size of a decoder with its upper limit."""
_POSITIVE = (
    *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "rope_factor"),
    *("query_pre_attn_scalar", "sliding_window"),
)
_SCALING: dict[str, dict[str, type]] = {
    "linear": {"factor": float},
    "llama3": {
        "factor": float,
        "low_freq_factor": float,
        "high_freq_factor": float,
        "original_max_position_embeddings": int,
    },
}
LONG_FACTORS = ("short_factor", "long_factor")
ORIGINAL = "original_max_position_embeddings"
_KINDS = {int: "an integer", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder of one of `FAMILIES`. Impossible values raise one
    `WeightsError` that lists them; `where` names the file in it.
    """

    family: str = "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    """Query heads share key/value heads in equal groups, so this must divide `num_attention_heads`.
    """
    head_dim: int = 0
    """Width of one head; 0 means hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    """RoPE scaling, in families that support it."""
    long_rope: LongRope | None = None
    """LongRoPE's factors, in families that support them."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, itself included, in families that have a window; None means all. In
    families where only some layers have a window, None becomes max_position_embeddings.
    """
    layers_without_window: tuple[int, ...] = ()
    """Indices of the layers without a window, in families where only some layers have one."""
    rope_local_base_freq: float | None = None
    """RoPE base of the layers with a window, in families where only some layers have one; there None becomes
    rope_theta.
    """
    rope_factor: float = 1.0
    """Divisor of positions in linear RoPE scaling, in families that support it. It does not apply to layers with a
    separate RoPE base.
    """
    query_pre_attn_scalar: int | None = None
    """Square of the divisor of attention scores, in families whose files have this key; there None becomes head_dim.
    Other families use head_dim.
    """
    partial_rotary_factor: float = 1.0
    """Share of a head that RoPE rotates, 0 to 1, in families where it may be less than 1."""
    layers_without_rope: tuple[int, ...] = ()
    """Indices of the layers without RoPE, in families where some have none."""
    tie_word_embeddings: bool = False
    """Whether the head is the embedding: one (V, D) tensor used twice."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    where: InitVar[object] = "ModelConfig"

    def __post_init__(self, where: object) -> None:
        heads = self.num_attention_heads
        # head_dim stays 0 if the division has a remainder, so that the check below names both numbers.
        if self.head_dim == 0 and heads > 0 and self.hidden_size % heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        derived: dict[str, float | None] = {}
        if self.kind.window_by_layer:
            derived["sliding_window"] = self.max_position_embeddings
            derived["rope_local_base_freq"] = self.rope_theta
        if self.kind.query_scale:
            derived["query_pre_attn_scalar"] = self.head_dim
        for key, value in derived.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        _refuse(_problems_of_values(self), where)
        if (weights := count_parameters(self)) > limits.PARAMETERS.most:
            _refuse([f"sizes: expected {limits.PARAMETERS}, found {weights:,}"], where)

    @property
    def kind(self) -> Family:
        """The family's row in `FAMILIES`."""
        return FAMILIES[self.family]

    @property
    def counted(self) -> int:
        """Number of parameters of a model that transformers runs (`TransformersConfig` overrides this); 0 for families
        of our own decoder, whose tensors are in `FAMILIES`."""
        return 0

    @property
    def native(self) -> bool:
        """Whether our own decoder runs the model; False for a `TransformersConfig`, whose model transformers runs."""
        return True

    @property
    def attention_bias(self) -> bool:
        """Whether q, k and v have biases; o never has one."""
        return self.kind.attention_bias

    @property
    def rotary_dim(self) -> int:
        """Number of a head's dimensions that RoPE rotates; they are its first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    def has_window(self, layer: int) -> bool:
        return self.sliding_window is not None and layer not in self.layers_without_window

    def _layer_types(self) -> list[str]:
        return [
            "sliding_attention" if self.has_window(layer) else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]

    def _rope_flags(self) -> list[int]:
        """Return 1 for each layer that has RoPE, and 0 for the others."""
        return [int(at not in self.layers_without_rope) for at in range(self.num_hidden_layers)]

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k is normalised before RoPE."""
        return self.kind.qk_norm

    @classmethod
    def from_dict(cls, raw: Mapping[str, object], where: object) -> ModelConfig:
        """Return the configuration in a parsed `config.json`; `where` names it in errors."""
        family = _family(raw)
        if family is None:
            _refuse(unsupported(raw), where)
        assert family is not None
        values, problems = _read_values(raw, family)
        _refuse(problems, where)
        return cls(**values, where=where)  # type: ignore[arg-type]  # each value was checked by `_take`

    def to_hf_dict(self) -> dict[str, object]:
        """Return the content of a `config.json` that transformers loads as the family's class."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        scaling: dict[str, object] | None = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": "llama3", **asdict(self.rope_scaling)}
        elif self.rope_factor != 1:
            scaling = {"rope_type": "linear", "factor": self.rope_factor}
        elif self.long_rope is not None:
            factors = {
                key: value for key, value in asdict(self.long_rope).items() if value is not None
            }
            scaling = {"rope_type": "longrope", **factors}
            for key in LONG_FACTORS:
                scaling[key] = list(factors[key])
        partial: dict[str, object] = {}
        if self.partial_rotary_factor != 1:
            partial = {"partial_rotary_factor": self.partial_rotary_factor}
        rope: dict[str, object] = {
            "rope_theta": self.rope_theta,
            **(scaling or {"rope_type": "default"}),
            **partial,
        }
        by_layer: dict[str, object] = {}
        if self.kind.window_by_layer:
            local = self.rope_local_base_freq
            by_layer = {"layer_types": self._layer_types(), "rope_local_base_freq": local}
            local_rope = {"rope_theta": local, "rope_type": "default"}
            rope = {"full_attention": rope, "sliding_attention": local_rope}
        if self.kind.query_scale:
            by_layer["query_pre_attn_scalar"] = self.query_pre_attn_scalar
        if self.long_rope is not None:
            by_layer[ORIGINAL] = self.long_rope.original_max_position_embeddings
        return {
            "architectures": [self.kind.hf_class],
            "model_type": self.family,
            self.kind.activation_key: self.kind.activation,
            **{key: getattr(self, key) for key in SIZES},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            **({} if scaling is None else {"rope_scaling": scaling}),
            **partial,
            "rope_parameters": rope,
            **by_layer,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            **self.kind.hf_flags,
            **({"sliding_window": self.sliding_window} if self.kind.sliding_window else {}),
            **({"no_rope_layers": self._rope_flags()} if self.kind.rope_by_layer else {}),
            # transformers does not load a model whose padding is outside of its vocabulary.
            **({"pad_token_id": None} if self.kind.padding >= self.vocab_size else {}),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
        }


def shape_of(row: TensorRow, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a tensor of the table."""
    size = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "E": config.head_dim,
        "Q": config.num_attention_heads * config.head_dim,
        "K": config.num_key_value_heads * config.head_dim,
    }
    return tuple(size[letter] for letter in row.shape)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of trainable parameters; a tied head is counted once."""
    if config.counted:
        return config.counted
    once = [EMBEDDING, LAST_NORM] if config.tie_word_embeddings else [EMBEDDING, LAST_NORM, HEAD]
    layer = sum(math.prod(shape_of(row, config)) for row in layer_tensors(config.kind))
    others = sum(math.prod(shape_of(row, config)) for row in once)
    return config.num_hidden_layers * layer + others


def _refuse(problems: list[str], where: object) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise WeightsError.expected(
            "model configuration", where, f"a {titles()} decoder", f"{count}:{lines}"
        )


def _read_values(raw: Mapping[str, object], family: Family) -> tuple[dict[str, object], list[str]]:
    """Return the fields of `ModelConfig` that `raw` has with the right type, and the problems of
    the others.
    """
    raw, rope = _flat(raw, family)
    problems = _unsupported(raw, rope, family)
    values: dict[str, object] = {"family": family.name}
    for key in SIZES:
        if key != "head_dim" or family.own_head_dim or raw.get(key) is not None:
            _take(raw, key, int, values, problems)
    _take(raw, "rms_norm_eps", float, values, problems)
    _take(raw, "rope_theta", float, values, problems)
    if family.partial_rotary and raw.get("partial_rotary_factor") is not None:
        _take(raw, "partial_rotary_factor", float, values, problems)
    if _rope_type(rope) in family.rope_types:
        _take_rope_scaling(raw, rope, values, problems)
    # null means no window, except in families where only some layers have a window: there the size is required.
    is_read = family.window_by_layer or raw.get("sliding_window", 0) is not None
    if family.sliding_window and is_read:
        _take(raw, "sliding_window", int, values, problems)
    if family.window_by_layer:
        values["layers_without_window"] = _layers_without_window(raw, problems)
        _take(raw, "rope_local_base_freq", float, values, problems)
    if family.query_scale:
        _take(raw, "query_pre_attn_scalar", int, values, problems)
    if family.rope_by_layer:
        values["layers_without_rope"] = _layers_without_rope(raw, problems)
    types, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if isinstance(types, list) and not family.window_by_layer and len(types) != layers:
        problems.append(
            f"layer_types: expected one for each of {layers} layers, found {len(types)}"
        )
    values["tie_word_embeddings"] = family.tied
    for key, kind in (("tie_word_embeddings", bool), ("bos_token_id", int)):
        if raw.get(key) is not None:
            _take(raw, key, kind, values, problems)
    values["eos_token_ids"] = _token_ids(raw, "eos_token_id", problems)
    return values, problems


def _flat(
    raw: Mapping[str, object], family: Family
) -> tuple[dict[str, object], Mapping[str, object]]:
    """Return `raw` completed by its RoPE base and by keys that older files of the family lack, and its RoPE settings.

    The RoPE settings come from `rope_parameters`, the newer spelling, if present. If only some layers have a window,
    `rope_parameters` may have a table for each kind of layer.
    """
    spellings = [raw.get("rope_scaling"), raw.get("rope_parameters")]
    rope: dict[str, object] = {}
    for spelling in spellings:
        rope |= spelling if isinstance(spelling, Mapping) else {}
    flat = dict(raw)
    kinds = [rope.get(kind) for kind in ("full_attention", "sliding_attention")]
    if family.window_by_layer and isinstance(kinds[0], Mapping):
        rope = dict(kinds[0])
        if isinstance(kinds[1], Mapping) and "rope_theta" in kinds[1]:
            flat["rope_local_base_freq"] = kinds[1]["rope_theta"]
    flat |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    for key, value in family.absent.items():
        # In `Family.absent`, None means the value of num_attention_heads.
        flat.setdefault(key, raw.get("num_attention_heads") if value is None else value)
    if flat.get("num_key_value_heads", 0) is None:
        flat["num_key_value_heads"] = raw.get("num_attention_heads")
    return flat, rope


def _take(
    raw: Mapping[str, object],
    key: str,
    kind: type,
    values: dict[str, object],
    problems: list[str],
) -> None:
    """Copy one value to `values` if it has the right type, else add a problem. A bool is not accepted as an integer; an
    integer is converted where a float is expected.
    """
    found = raw.get(key)
    if key not in raw:
        problems.append(f"{key}: expected a value, found none")
    elif type(found) is kind:
        values[key] = found
    elif kind is float and type(found) is int and abs(found) < 2**63:
        values[key] = float(found)
    else:
        problems.append(f"{key}: expected {_KINDS[kind]}, found {found!r:.80}")


def _layers_without_rope(raw: Mapping[str, object], problems: list[str]) -> tuple[int, ...]:
    flags, layers = raw.get("no_rope_layers"), raw.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > SIZES["num_hidden_layers"].most:
        return ()
    if not isinstance(flags, list) or len(flags) < layers or any(x not in (0, 1) for x in flags):
        found = "none" if flags is None else f"{flags!r:.80}"
        problems.append(
            f"no_rope_layers: expected 0 or 1 for each of {layers} layers, found {found}"
        )
        return ()
    return tuple(at for at in range(layers) if not flags[at])


def _layers_without_window(raw: Mapping[str, object], problems: list[str]) -> tuple[int, ...]:
    types, step = raw.get("layer_types"), raw.get("sliding_window_pattern")
    layers = raw.get("num_hidden_layers")
    if not isinstance(layers, int) or layers > SIZES["num_hidden_layers"].most:
        return ()
    if types is None and type(step) is int and step > 0:
        return tuple(range(step - 1, layers, step))
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(x not in known for x in types):
        found = "none" if types is None else f"{types!r:.80}"
        problems.append(
            f"layer_types: expected {' or '.join(known)} for each of {layers} layers, found {found}"
        )
        return ()
    return tuple(at for at in range(layers) if types[at] == "full_attention")


def _token_ids(raw: Mapping[str, object], key: str, problems: list[str]) -> tuple[int, ...]:
    found = raw.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if all(type(token) is int and abs(token) < 2**63 for token in ids):
        return tuple(ids)
    problems.append(f"{key}: expected an integer or a list of integers, found {found!r:.80}")
    return ()


def _family(raw: Mapping[str, object]) -> Family | None:
    found = raw.get("model_type")
    return FAMILIES.get(found) if isinstance(found, str) else None


def _rope_type(rope: Mapping[str, object]) -> object:
    """Return `rope_type`, or `type`, its older name."""
    return rope.get("rope_type", rope.get("type", "default"))


def _take_rope_scaling(
    raw: Mapping[str, object],
    rope: Mapping[str, object],
    values: dict[str, object],
    problems: list[str],
) -> None:
    kind = _rope_type(rope)
    fields: dict[str, Any] = {}
    wrong: list[str] = []
    for name, type_ in _SCALING.get(str(kind), {}).items():
        _take(rope, name, type_, fields, wrong)
    if kind == "longrope":
        # transformers has this key in the model's configuration, not in the RoPE settings.
        _take(raw, ORIGINAL, int, fields, wrong)
        for key in LONG_FACTORS:
            factors = rope.get(key)
            if isinstance(factors, list) and all(type(x) in (int, float) for x in factors):
                fields[key] = tuple(map(float, factors))
            else:
                wrong.append(f"{key}: expected a list of numbers, found {factors!r:.80}")
        if rope.get("attention_factor") is not None:
            _take(rope, "attention_factor", float, fields, wrong)
    problems.extend(f"rope_scaling.{problem}" for problem in wrong)
    if wrong:
        return
    if kind == "linear":
        values["rope_factor"] = fields["factor"]
    elif kind == "llama3":
        values["rope_scaling"] = RopeScaling(**fields)
    elif kind == "longrope":
        values["long_rope"] = LongRope(**fields)


def unsupported(raw: Mapping[str, object]) -> list[str]:
    """List the features that a config.json requests and this decoder does not support."""
    family = _family(raw)
    if family is None:
        names = " or ".join(map(repr, FAMILIES))
        found = f"{raw.get('model_type')!r:.80}"
        return [f"model_type: expected {names} (all that is supported), found {found}"]
    return _unsupported(*_flat(raw, family), family)


def _unsupported(
    raw: Mapping[str, object], rope: Mapping[str, object], family: Family
) -> list[str]:
    """List the features that the file requests and this decoder does not support; `raw` and `rope` are from `_flat`."""
    problems = []

    def only(key: str, found: object, *allowed: object) -> None:
        if found not in allowed:
            names = " or ".join(map(repr, allowed))
            problems.append(f"{key}: expected {names} (all that is supported), found {found!r:.80}")

    for key in ("hidden_act", "hidden_activation"):
        only(key, raw.get(key, family.activation), family.activation)
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "quantization_config"):
        only(key, raw.get(key), None)
    for key in ("use_bidirectional_attention", "use_sliding_window"):
        only(key, raw.get(key) or False, False)
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        only(key, raw.get(key) or 0.0, 0.0)
    # A true attention_bias usually means biases on q, k, v and o; the decoder has no bias on o.
    for key, has in (("attention_bias", family.attention_bias), ("mlp_bias", False)):
        if raw.get(key) is not None:
            only(key, raw[key], has)
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list) and not family.window_by_layer:
        for kind in sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            only("layer_types", kind, "full_attention")
    only("rope_type", _rope_type(rope), *family.rope_types)
    if not family.partial_rotary:
        only("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0, 1.0)
    return problems


def _problems_of_values(config: ModelConfig) -> list[str]:
    """List the problems of impossible values: those of single values, or, if there are none, contradictions between
    values."""
    problems = []
    for key, limit in SIZES.items():
        size = getattr(config, key)
        if size > limit.most:
            found = f"{size:,}" if size < 2**63 else "a number of more than 18 digits"
            problems.append(f"{key}: expected {limit}, found {found}")
        elif size < 1 and not (key == "head_dim" and size == 0):
            problems.append(f"{key}: expected a positive integer, found {size!r:.80}")
    for key in _POSITIVE:
        real = getattr(config, key)
        if real is not None and not (math.isfinite(real) and real > 0):
            problems.append(f"{key}: expected a positive finite number, found {real!r:.80}")
    return problems or _contradictions(config)


def _contradictions(config: ModelConfig) -> list[str]:
    problems = []

    def expect(holds: bool, key: str, expected: str, found: object) -> None:
        if not holds:
            problems.append(f"{key}: expected {expected}, found {found!r:.80}")

    heads, shared = config.num_attention_heads, config.num_key_value_heads
    expect(heads % shared == 0, "num_key_value_heads", f"a divisor of {heads} heads", shared)
    if config.head_dim == 0 or config.kind.whole_heads:
        width = config.hidden_size
        expect(width % heads == 0, "hidden_size", f"a multiple of {heads} heads", width)
    # RoPE rotates pairs of numbers.
    expect(config.head_dim % 2 == 0, "head_dim", "an even number", config.head_dim)
    if config.partial_rotary_factor != 1:
        rotated, width = config.rotary_dim, config.head_dim
        is_even = 0 < rotated <= width and rotated % 2 == 0
        expected = f"an even number of the {width} dimensions to rotate"
        expect(is_even, "partial_rotary_factor", expected, rotated)
    if (long := config.long_rope) is not None:
        pairs = config.rotary_dim // 2
        for key in LONG_FACTORS:
            count = len(getattr(long, key))
            expected = f"a number for each of {pairs} pairs"
            expect(count == pairs, f"rope_scaling.{key}", expected, count)
    ids = [*config.eos_token_ids, *([] if config.bos_token_id is None else [config.bos_token_id])]
    outside = [token for token in ids if not 0 <= token < config.vocab_size]
    expect(not outside, "bos_token_id, eos_token_id", "ids below vocab_size", outside)
    return problems
