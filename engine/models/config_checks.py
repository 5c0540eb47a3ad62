"""What a `config.json` may say: its values with their kinds, what is not supported, what no model
can have.

Problems are collected as lines `key: expected X, found Y`, so that one error can name them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine import limits
from engine.limits import Limit

# Family -> the class that transformers loads it with.
FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
HIDDEN_ACT = "silu"

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
"""Every count of a decoder, and the most there is of it."""
_REALS = ("rms_norm_eps", "rope_theta")
_SCALING: dict[str, type] = {
    "factor": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "original_max_position_embeddings": int,
}


def read_values(raw: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The fields of `ModelConfig` that `raw` has, each of the right kind, and what is wrong with
    the others. A scaling of rotary positions comes as a dict of its numbers.
    """
    family = _family(raw)
    problems = _unsupported(raw)
    values: dict[str, object] = {} if family is None else {"family": family}
    if raw.get("num_key_value_heads", 0) is None:
        raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}
    for key in SIZES:
        # Qwen3 has no rule for the width of a head: transformers would take 128.
        if key != "head_dim" or family == "qwen3" or raw.get(key) is not None:
            _take(raw, key, int, values, problems)
    _take(raw, "rms_norm_eps", float, values, problems)
    _take(_with_rope_theta(raw, problems), "rope_theta", float, values, problems)
    if family == "llama":
        _take_rope_scaling(raw, values, problems)
    if raw.get("tie_word_embeddings") is not None:
        _take(raw, "tie_word_embeddings", bool, values, problems)
    if raw.get("bos_token_id") is not None:
        _take(raw, "bos_token_id", int, values, problems)
    values["eos_token_ids"] = _token_ids(raw, "eos_token_id", problems)
    return values, problems


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
    if len(ids) > limits.TOKEN_IDS.most:
        problems.append(f"{key}: expected {limits.TOKEN_IDS}, found {len(ids):,}")
        return ()
    if all(type(token) is int and abs(token) < 2**63 for token in ids):
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
            f"{nested['rope_theta']!r:.80}, found {raw['rope_theta']!r:.80}"
        )
    return {**raw, "rope_theta": nested["rope_theta"]}


def _family(raw: Mapping[str, object]) -> str | None:
    found = raw.get("model_type")
    return found if isinstance(found, str) and found in FAMILIES else None


def _rope_type(rope: Mapping[str, object]) -> object:
    """`rope_type`, or `type`, its older name."""
    return rope.get("rope_type", rope.get("type", "default"))


def _take_rope_scaling(
    raw: Mapping[str, object], values: dict[str, object], problems: list[str]
) -> None:
    """The scaling of either spelling; a file with both must mean the same by both."""
    found: list[dict[str, object]] = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if not isinstance(rope, Mapping):
            continue
        scaling: dict[str, object] = {}
        if _rope_type(rope) == "llama3":
            wrong: list[str] = []
            for name, kind in _SCALING.items():
                _take(rope, name, kind, scaling, wrong)
            problems.extend(f"{key}.{problem}" for problem in wrong)
        found.append(scaling)
    if len(found) == 2 and found[0] != found[1]:
        problems.append(
            f"rope_scaling: expected the scaling of rope_parameters, {found[1] or None}, "
            f"found {found[0] or None}"
        )
    elif found and found[0]:
        values["rope_scaling"] = found[0]


def _unsupported(raw: Mapping[str, object]) -> list[str]:
    """What the file asks for by name and this decoder does not do."""
    problems = []

    def only(key: str, found: object, *allowed: object) -> None:
        if found not in allowed:
            names = " or ".join(map(repr, allowed))
            problems.append(f"{key}: expected {names} (all that is supported), found {found!r:.80}")

    family = _family(raw)
    only("model_type", raw.get("model_type"), *FAMILIES)
    only("hidden_act", raw.get("hidden_act", HIDDEN_ACT), HIDDEN_ACT)
    only("use_sliding_window", raw.get("use_sliding_window") or False, False)
    only("attention_dropout", raw.get("attention_dropout") or 0.0, 0.0)
    only("quantization_config", raw.get("quantization_config"), None)
    # Where Llama and Qwen3 have a bias on q, k and v, they have one on o too.
    for key, has in (("attention_bias", family == "qwen2"), ("mlp_bias", False)):
        if family is not None and raw.get(key) is not None:
            only(key, raw[key], has)
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list):
        for kind in sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            only("layer_types", kind, "full_attention")
    rope_types = ("default", "llama3") if family == "llama" else ("default",)
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if isinstance(rope, Mapping):
            only(f"{key}.rope_type", _rope_type(rope), *rope_types)
            only(f"{key}.partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
        else:
            only(key, rope, None)
    return problems


def impossible(values: Mapping[str, object]) -> list[str]:
    """Numbers that no model can have; keys that are absent were reported by the reader."""
    problems = []
    family = values.get("family", "qwen2")
    if family not in FAMILIES:
        problems.append(f"family: expected {', '.join(FAMILIES)}, found {family!r:.80}")
    good: dict[str, int] = {}
    for key, most in SIZES.items():
        found = values.get(key)
        if isinstance(found, int) and found > most.most:
            shown = f"{found:,}" if found < 2**63 else "a number of more than 18 digits"
            problems.append(f"{key}: expected {most}, found {shown}")
        elif isinstance(found, int) and found > 0:
            good[key] = found
        elif key in values and not (key == "head_dim" and found == 0):
            problems.append(f"{key}: expected a positive integer, found {found!r:.80}")
    for key in _REALS:
        real = values.get(key)
        if isinstance(real, int | float) and not (math.isfinite(real) and real > 0):
            problems.append(f"{key}: expected a positive finite number, found {real!r:.80}")
    heads, shared = good.get("num_attention_heads"), good.get("num_key_value_heads")
    if heads and shared and heads % shared:
        problems.append(f"num_key_value_heads: expected a divisor of {heads} heads, found {shared}")
    if good.get("head_dim", 0) % 2:
        # Rotary positions turn pairs of numbers.
        problems.append(f"head_dim: expected an even number, found {good['head_dim']}")
    # Llama's may have a head_dim beside it, but transformers refuses it all the same.
    if (
        heads
        and good.get("hidden_size", 0) % heads
        and ("head_dim" not in good or family == "llama")
    ):
        problems.append(
            f"hidden_size: expected a multiple of {heads} heads, found {good['hidden_size']}"
        )
    problems.extend(_impossible_scaling(values.get("rope_scaling"), family))
    bos = values.get("bos_token_id")
    ids = [bos] if isinstance(bos, int) else []
    eos = values.get("eos_token_ids", ())
    assert isinstance(eos, tuple)
    outside = [token for token in (*ids, *eos) if not 0 <= token < good.get("vocab_size", math.inf)]
    if outside:
        problems.append(
            f"bos_token_id, eos_token_id: expected ids below vocab_size, found {outside!r:.80}"
        )
    return problems


def _impossible_scaling(scaling: object, family: object) -> list[str]:
    if not isinstance(scaling, Mapping):
        return []
    if family != "llama":
        return [f"rope_scaling: expected None for {family}, found {dict(scaling)!r:.80}"]
    problems = [
        f"rope_scaling.{key}: expected a positive finite number, found {scaling[key]!r:.80}"
        for key in _SCALING
        if key in scaling and not 0 < scaling[key] < 2**63
    ]
    low, high = scaling.get("low_freq_factor", 0.0), scaling.get("high_freq_factor", math.inf)
    if not problems and high <= low:
        problems.append(f"rope_scaling.high_freq_factor: expected more than {low}, found {high}")
    if not problems and scaling.get("factor", 1.0) < 1:
        problems.append(f"rope_scaling.factor: expected at least 1, found {scaling['factor']}")
    return problems
