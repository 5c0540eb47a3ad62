"""The shape of a model: a strict reader of the `config.json` of a model of one of `FAMILIES`.

A decoder is fixed by its family, nine numbers and one flag:

    tokens -> embedding (V, D) -> L x [norm, attention, norm, feed-forward] -> norm -> head (V, D)

    V vocab_size   D hidden_size   F intermediate_size   L num_hidden_layers
    num_attention_heads query heads, head_dim wide, share num_key_value_heads key/value heads

The family (`model_type`) determines the rest: it is a row of `engine.model_families`.

`rms_norm_eps` and `rope_theta` change every logit but no shape, so a file without them is refused:
a default would run and be wrong. Both spellings of the RoPE settings are read, `rope_theta` with
`rope_scaling` and transformers' newer `rope_parameters`, and both are written.

Not covered, and refused by name: other families, other activations, other RoPE scalings (yarn,
linear, ...), dropout, sliding windows and biases where the family has none, quantised
checkpoints. Problems of one file are reported in one `WeightsError`, as lines `key: expected X,
found Y`: unsupported features and wrong types, or, where there are none, impossible values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass

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
_REALS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_SCALING: dict[str, dict[str, type]] = {
    "linear": {"factor": float},
    "longrope": {},
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
    `WeightsError` that lists them, with `where` as their place.
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
    """The numbers of the layers that have no window, in families where some have none."""
    rope_local_base_freq: float | None = None
    """The RoPE base of the layers with a window, in families where some layers have none; None becomes
    rope_theta there.
    """
    rope_factor: float = 1.0
    """Divisor of positions in linear RoPE scaling, in families that support it; not in layers with a
    RoPE base of their own.
    """
    query_pre_attn_scalar: int | None = None
    """Square of the divisor of attention scores, in families whose files give it (None becomes head_dim there);
    the other families use head_dim.
    """
    partial_rotary_factor: float = 1.0
    """The share of a head that RoPE rotates, in families where it may be less than 1."""
    layers_without_rope: tuple[int, ...] = ()
    """The numbers of the layers that have no RoPE, in families where some have none."""
    tie_word_embeddings: bool = False
    """The head is the embedding: one (V, D) tensor used twice."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    where: InitVar[object] = "ModelConfig"

    def __post_init__(self, where: object) -> None:
        heads = self.num_attention_heads
        # Stays 0 if it does not divide, so that the check below names the two numbers.
        if self.head_dim == 0 and heads > 0 and self.hidden_size % heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        kind = FAMILIES.get(self.family)
        derived: dict[str, float | None] = {}
        if kind is not None and kind.window_by_layer:
            derived["sliding_window"] = self.max_position_embeddings
            derived["rope_local_base_freq"] = self.rope_theta
        if kind is not None and kind.query_scale:
            derived["query_pre_attn_scalar"] = self.head_dim
        for key, value in derived.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        _refuse(_impossible(self), where)
        if (weights := count_parameters(self)) > limits.PARAMETERS.most:
            _refuse([f"sizes: expected {limits.PARAMETERS}, found {weights:,}"], where)

    @property
    def kind(self) -> Family:
        """The family's row in `FAMILIES`."""
        return FAMILIES[self.family]

    @property
    def counted(self) -> int:
        """Number of parameters of a model whose tensors are not in the table of `FAMILIES` (`TransformersConfig`
        overrides this); 0 for other models."""
        return 0

    @property
    def native(self) -> bool:
        """Whether our own decoder runs the model; that of a `TransformersConfig` is run by transformers."""
        return True

    @property
    def attention_bias(self) -> bool:
        """Whether q, k and v have biases; o never has one."""
        return self.kind.attention_bias

    @property
    def rotary_dim(self) -> int:
        """Count of a head's first numbers, which RoPE rotates."""
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
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            values["rope_scaling"] = RopeScaling(**scaling)
        if isinstance(long := values.get("long_rope"), dict):
            values["long_rope"] = LongRope(**long)
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
    the others. A RoPE scaling is returned as a dict of its numbers.
    """
    problems: list[str] = []
    if family.window_by_layer:
        raw = _one_rope(raw, problems)
    problems += _unsupported(raw, family)
    values: dict[str, object] = {"family": family.name}
    if raw.get("num_key_value_heads", 0) is None:
        raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}
    raw = _completed(raw, family)
    for key in SIZES:
        if key != "head_dim" or family.own_head_dim or raw.get(key) is not None:
            _take(raw, key, int, values, problems)
    _take(raw, "rms_norm_eps", float, values, problems)
    _take(_from_rope(raw, "rope_theta", problems), "rope_theta", float, values, problems)
    if family.partial_rotary:
        raw = _from_rope(raw, "partial_rotary_factor", problems)
        if raw.get("partial_rotary_factor") is not None:
            _take(raw, "partial_rotary_factor", float, values, problems)
    if len(family.rope_types) > 1:
        _take_rope_scaling(raw, values, problems)
    # null means no window, except in families where some layers have one: those need its size.
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


def _completed(raw: Mapping[str, object], family: Family) -> Mapping[str, object]:
    """Return `raw` with the keys that older files of the family lack."""
    nested = raw.get("rope_parameters")
    present = {*raw, *(nested if isinstance(nested, Mapping) else ())}
    lacking = {key: value for key, value in family.absent.items() if key not in present}
    for key in lacking:
        # As `Family.absent` says.
        if lacking[key] is None:
            lacking[key] = raw.get("num_attention_heads")  # type: ignore[assignment]  # checked as it is taken
    return {**raw, **lacking}


def _take(
    raw: Mapping[str, object],
    key: str,
    kind: type,
    values: dict[str, object],
    problems: list[str],
) -> None:
    """Copy one value if it has the right type, else add a problem; a bool is not an integer, and an integer is read as
    a float.
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


def _one_rope(raw: Mapping[str, object], problems: list[str]) -> Mapping[str, object]:
    """Return `raw` with `rope_parameters` for the layers without a window, and the RoPE base of the layers with one as
    `rope_local_base_freq`. The newer spelling has a table for each kind of layer in `rope_parameters` instead.
    """
    nested = raw.get("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(nested, Mapping) or not nested.keys() & {*kinds}:
        return raw
    if nested.keys() - {*kinds}:
        problems.append(
            f"rope_parameters: expected {' and '.join(kinds)} alone, found {[*nested]!r:.80}"
        )
    full, local = (rope if isinstance(rope := nested.get(kind), Mapping) else {} for kind in kinds)
    where = "rope_parameters.sliding_attention"
    if (kind := _rope_type(local)) != "default":
        problems.append(f"{where}.rope_type: expected 'default', found {kind!r:.80}")
    if "rope_theta" not in local:
        return {**raw, "rope_parameters": full}
    key, found = "rope_local_base_freq", local["rope_theta"]
    if raw.get(key, found) != found:
        problems.append(
            f"{key}: expected the value of {where}.rope_theta, {found!r:.80}, found {raw[key]!r:.80}"
        )
    return {**raw, "rope_parameters": full, key: found}


def _token_ids(raw: Mapping[str, object], key: str, problems: list[str]) -> tuple[int, ...]:
    found = raw.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if len(ids) > limits.TOKEN_IDS.most:
        problems.append(f"{key}: expected {limits.TOKEN_IDS}, found {len(ids):,}")
        return ()
    if all(type(token) is int and abs(token) < 2**63 for token in ids):
        return tuple(ids)
    problems.append(f"{key}: expected an integer or a list of integers, found {found!r:.80}")
    return ()


def _from_rope(raw: Mapping[str, object], key: str, problems: list[str]) -> Mapping[str, object]:
    """Return `raw` with a RoPE setting under `key`, whichever spelling the file has."""
    nested = raw.get("rope_parameters")
    if not isinstance(nested, Mapping) or key not in nested:
        return raw
    if key in raw and raw[key] != nested[key]:
        problems.append(
            f"{key}: expected the value of rope_parameters.{key}, "
            f"{nested[key]!r:.80}, found {raw[key]!r:.80}"
        )
    return {**raw, key: nested[key]}


def _family(raw: Mapping[str, object]) -> Family | None:
    found = raw.get("model_type")
    return FAMILIES.get(found) if isinstance(found, str) else None


def _rope_type(rope: Mapping[str, object]) -> object:
    """Return `rope_type`, or `type`, its older name."""
    return rope.get("rope_type", rope.get("type", "default"))


def _take_rope_scaling(
    raw: Mapping[str, object], values: dict[str, object], problems: list[str]
) -> None:
    """Read the RoPE scaling in either spelling; if a file has both, they must agree."""
    found: list[dict[str, object]] = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if not isinstance(rope, Mapping):
            continue
        scaling: dict[str, object] = {}
        wrong: list[str] = []
        for name, kind in _SCALING.get(str(_rope_type(rope)), {}).items():
            _take(rope, name, kind, scaling, wrong)
        if _rope_type(rope) == "longrope":
            scaling |= _long_rope(raw, rope, wrong)
        problems.extend(f"{key}.{problem}" for problem in wrong)
        found.append(scaling)
    if len(found) == 2 and found[0] != found[1]:
        problems.append(
            f"rope_scaling: expected the scaling of rope_parameters, {found[1] or None}, "
            f"found {found[0] or None}"
        )
    elif found and found[0].keys() & {*LONG_FACTORS}:
        values["long_rope"] = found[0]
    elif found and found[0].keys() == {"factor"}:
        values["rope_factor"] = found[0]["factor"]
    elif found and found[0]:
        values["rope_scaling"] = found[0]


def _long_rope(
    raw: Mapping[str, object], rope: Mapping[str, object], problems: list[str]
) -> dict[str, object]:
    """Return the fields of `LongRope`. The original length is a key of the model and not of its RoPE, as
    transformers has it.
    """
    fields: dict[str, object] = {}
    _take(raw, ORIGINAL, int, fields, problems)
    original, length = fields.get(ORIGINAL), raw.get("max_position_embeddings")
    if rope.get(ORIGINAL, original) != original:
        problems.append(f"{ORIGINAL}: expected that of the model, found {rope[ORIGINAL]!r:.80}")
    for key in LONG_FACTORS:
        factors = rope.get(key)
        if isinstance(factors, list) and all(type(number) in (int, float) for number in factors):
            fields[key] = tuple(map(float, factors))
        else:
            problems.append(f"{key}: expected a list of numbers, found {factors!r:.80}")
    if rope.get("attention_factor") is not None:
        _take(rope, "attention_factor", float, fields, problems)
    factor = rope.get("factor")
    if isinstance(original, int) and isinstance(length, int) and original > 0:
        expected = length / original
        if factor not in (None, expected):
            problems.append(
                f"factor: expected max_position_embeddings / {ORIGINAL}, {expected:g}, found {factor!r:.80}"
            )
    return fields


def unsupported(raw: Mapping[str, object]) -> list[str]:
    """List the features that a config.json requests and this decoder does not support."""
    family = _family(raw)
    if family is None:
        names = " or ".join(map(repr, FAMILIES))
        found = f"{raw.get('model_type')!r:.80}"
        return [f"model_type: expected {names} (all that is supported), found {found}"]
    return _unsupported(_one_rope(raw, []) if family.window_by_layer else raw, family)


def _unsupported(raw: Mapping[str, object], family: Family) -> list[str]:
    """List the features that the file requests and this decoder does not support."""
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
    # A family without attention_bias has the key for a bias on q, k, v and o, and the decoder has none on o.
    for key, has in (("attention_bias", family.attention_bias), ("mlp_bias", False)):
        if raw.get(key) is not None:
            only(key, raw[key], has)
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list) and not family.window_by_layer:
        for kind in sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            only("layer_types", kind, "full_attention")
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if isinstance(rope, Mapping):
            only(f"{key}.rope_type", _rope_type(rope), *family.rope_types)
            if not family.partial_rotary or key == "rope_scaling":
                only(f"{key}.partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
        else:
            only(key, rope, None)
    return problems


def _impossible(config: ModelConfig) -> list[str]:
    """List the problems of values that no model can have: first of its sizes, then of what its family lacks, then of
    the rest, which is computed from these."""
    name, family = config.family, FAMILIES.get(config.family)
    if family is None:
        return [f"family: expected {', '.join(FAMILIES)}, found {name!r:.80}"]
    problems = []
    for key, limit in SIZES.items():
        size = getattr(config, key)
        if size > limit.most:
            found = f"{size:,}" if size < 2**63 else "a number of more than 18 digits"
            problems.append(f"{key}: expected {limit}, found {found}")
        elif size < 1 and not (key == "head_dim" and size == 0):
            problems.append(f"{key}: expected a positive integer, found {size!r:.80}")
    for key in _REALS:
        real = getattr(config, key)
        if real is not None and not (math.isfinite(real) and real > 0):
            problems.append(f"{key}: expected a positive finite number, found {real!r:.80}")
    for key, absent, has in (
        ("partial_rotary_factor", 1, family.partial_rotary),
        ("sliding_window", None, family.sliding_window),
        ("layers_without_rope", (), family.rope_by_layer),
        ("layers_without_window", (), family.window_by_layer),
        ("rope_local_base_freq", None, family.window_by_layer),
        ("query_pre_attn_scalar", None, family.query_scale),
        ("rope_factor", 1, "linear" in family.rope_types),
        ("rope_scaling", None, family.llama3_rope),
        ("long_rope", None, "longrope" in family.rope_types),
    ):
        if not has and (value := getattr(config, key)) != absent:
            problems.append(f"{key}: expected {absent or None} for {name}, found {value!r:.80}")
    return problems or _contradictory(config, family)


def _contradictory(config: ModelConfig, family: Family) -> list[str]:
    problems = []

    def expect(holds: bool, key: str, expected: str, found: object) -> None:
        if not holds:
            problems.append(f"{key}: expected {expected}, found {found!r:.80}")

    heads, shared = config.num_attention_heads, config.num_key_value_heads
    expect(heads % shared == 0, "num_key_value_heads", f"a divisor of {heads} heads", shared)
    if config.head_dim == 0 or family.whole_heads:
        width = config.hidden_size
        expect(width % heads == 0, "hidden_size", f"a multiple of {heads} heads", width)
    # RoPE rotates pairs of numbers.
    expect(config.head_dim % 2 == 0, "head_dim", "an even number", config.head_dim)
    share, width = config.partial_rotary_factor, config.head_dim
    key = "partial_rotary_factor"
    expect(0 < share <= 1, key, "from 0 to 1", share)
    if 0 < share < 1 and width:
        rotated = int(width * share)
        is_even = rotated > 0 and rotated % 2 == 0
        expect(is_even, key, f"an even number of the {width} dimensions to rotate", rotated)
    if (window := config.sliding_window) is not None:
        most = limits.POSITIONS.most
        expect(0 < window <= most, "sliding_window", f"from 1 to {most:,} tokens", window)
    for key in ("layers_without_rope", "layers_without_window"):
        layers = getattr(config, key)
        inside = all(0 <= at < config.num_hidden_layers for at in layers)
        expect(inside, key, "numbers of layers", layers)
    factor = config.rope_factor
    expect(1 <= factor < 2**63, "rope_scaling.factor", "at least 1", factor)
    if config.rope_scaling is not None:
        problems += _impossible_scaling(asdict(config.rope_scaling))
    if config.long_rope is not None:
        problems += _impossible_factors(config, config.long_rope)
    ids = [*config.eos_token_ids, *([] if config.bos_token_id is None else [config.bos_token_id])]
    outside = [token for token in ids if not 0 <= token < config.vocab_size]
    expect(not outside, "bos_token_id, eos_token_id", "ids below vocab_size", outside)
    return problems


def _impossible_factors(config: ModelConfig, long: LongRope) -> list[str]:
    problems = []
    width = config.hidden_size // config.num_attention_heads
    if config.head_dim != width:
        # transformers counts the factors by this width, whatever head_dim is.
        problems.append(f"head_dim: expected {width} with longrope, found {config.head_dim}")
    pairs = config.rotary_dim // 2
    for key in LONG_FACTORS:
        factors = getattr(long, key)
        if len(factors) != pairs:
            problems.append(
                f"rope_scaling.{key}: expected a number for each of {pairs} pairs, found {len(factors)}"
            )
        elif not all(0 < number < math.inf for number in factors):
            problems.append(f"rope_scaling.{key}: expected positive finite numbers")
    if not 1 < (original := long.original_max_position_embeddings) <= limits.POSITIONS.most:
        problems.append(
            f"{ORIGINAL}: expected from 2 to {limits.POSITIONS.most:,}, found {original!r:.80}"
        )
    factor = long.attention_factor
    if factor is not None and not 0 < factor < math.inf:
        problems.append(
            f"rope_scaling.attention_factor: expected a positive finite number, found {factor!r:.80}"
        )
    return problems


def _impossible_scaling(scaling: Mapping[str, float]) -> list[str]:
    problems = [
        f"rope_scaling.{key}: expected a positive finite number, found {scaling[key]!r:.80}"
        for key in scaling
        if not 0 < scaling[key] < 2**63
    ]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if not problems and high <= low:
        problems.append(f"rope_scaling.high_freq_factor: expected more than {low}, found {high}")
    if not problems and scaling["factor"] < 1:
        problems.append(f"rope_scaling.factor: expected at least 1, found {scaling['factor']}")
    return problems
