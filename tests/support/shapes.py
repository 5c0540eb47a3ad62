"""Read the shape of a decoder from the keys of a config.json or a GGUF, without the engine's readers.

Fields are those of `engine.audit.reference.Shape` and of its `RopeScaling`.
"""

from __future__ import annotations

import math
from typing import Any

PARTIAL = "partial_rotary_factor"
LOCAL = "rope_local_base_freq"
ORIGINAL = "original_max_position_embeddings"
Shape = dict[str, float | str | tuple[float, ...] | None]


def shape_in(raw: dict[str, Any]) -> Shape:
    """Return the shape in the content of a config.json."""
    rope = raw.get("rope_parameters") or {}
    local_rope = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    stretch = rope if {"factor", "long_factor"} & rope.keys() else raw.get("rope_scaling") or {}
    kind = stretch.get("rope_type", stretch.get("type"))
    linear, long = kind == "linear", kind == "longrope"
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    return {
        "layers": raw["num_hidden_layers"],
        "intermediate_size": raw["intermediate_size"],
        "heads": heads,
        "kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "eps": raw["rms_norm_eps"],
        # Configurations of the first Llamas lack it.
        "theta": rope.get("rope_theta", raw.get("rope_theta", 10_000.0)),
        "tied": raw.get("tie_word_embeddings", raw["model_type"] in ("smollm3", "gemma3_text")),
        "window": _window_in(raw),
        "layers_without_rope": tuple(
            place for place, flag in enumerate(raw.get("no_rope_layers") or ()) if not flag
        ),
        "rotary_dim": int(head_dim * (rope.get(PARTIAL) or raw.get(PARTIAL) or 1.0)),
        "layers_without_window": _windowless(raw),
        "local_theta": local_rope.get("rope_theta", raw.get(LOCAL)),
        "position_factor": stretch["factor"] if linear else 1.0,
        "query_scalar": raw.get("query_pre_attn_scalar"),
        "activation": raw.get("hidden_activation") or raw["hidden_act"],
        **_of_gemma(raw["model_type"], raw["hidden_size"]),
        **(_long(raw, stretch) if long else {}),
        "factor": None if linear or long else stretch.get("factor"),
        "low_freq_factor": stretch.get("low_freq_factor"),
        "high_freq_factor": stretch.get("high_freq_factor"),
        "original": None if long else stretch.get(ORIGINAL),
    }


def _windowless(raw: dict[str, Any]) -> tuple[int, ...]:
    if raw["model_type"] != "gemma3_text":
        return ()
    step = raw.get("sliding_window_pattern", 6)
    types = raw.get("layer_types") or [
        "full_attention" if number % step == 0 else ""
        for number in range(1, raw["num_hidden_layers"] + 1)
    ]
    return tuple(place for place, kind in enumerate(types) if kind == "full_attention")


def _long(raw: dict[str, Any], rope: dict[str, Any]) -> Shape:
    original = raw[ORIGINAL]
    ratio = raw["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return {
        "short_factors": tuple(rope["short_factor"]),
        "long_factors": tuple(rope["long_factor"]),
        "short_positions": original,
        "attention_factor": rope.get("attention_factor", usual),
    }


def _of_gemma(family: str, width: int) -> Shape:
    """Return the fields that no key of the configuration sets."""
    gemma = family in ("gemma3", "gemma3_text")
    return {"norm_offset": float(gemma), "embedding_scale": math.sqrt(width) if gemma else 1.0}


def _window_in(raw: dict[str, Any]) -> int | None:
    # Qwen's files set a window that is unused unless `use_sliding_window` is true.
    used = raw.get("use_sliding_window", not raw["model_type"].startswith("qwen"))
    return raw.get("sliding_window") if used else None


def shape_in_gguf(reader: Any) -> tuple[str, Shape]:
    """Return the family and the shape in the metadata of a `gguf.GGUFReader`."""
    family = str(reader.fields["general.architecture"].contents())

    def value(key: str) -> Any:
        field = reader.fields.get(f"{family}.{key}")
        return None if field is None else field.contents()

    heads = value("attention.head_count")
    head_dim = value("attention.key_length") or value("embedding_length") // heads
    shape: Shape = {
        "layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "heads": heads,
        "kv_heads": value("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "eps": value("attention.layer_norm_rms_epsilon"),
        "theta": value("rope.freq_base") or 10000.0,
        "tied": all(tensor.name != "output.weight" for tensor in reader.tensors),
        # llama.cpp writes 0 for none.
        "window": value("attention.sliding_window") or None,
        "rotary_dim": value("rope.dimension_count") or head_dim,
        # Every fourth layer, as in llama.cpp: no key of the file sets this.
        "layers_without_rope": tuple(range(3, value("block_count"), 4))
        if family == "smollm3"
        else (),
        **_of_gemma(family, value("embedding_length")),
    }
    if family == "gemma3":
        layers, width_per_head = value("block_count"), value("embedding_length") // heads
        shape |= {
            "layers_without_window": tuple(range(5, layers, 6)),
            "local_theta": 10000.0,
            "query_scalar": width_per_head if layers == 62 else head_dim,
            "activation": "gelu_pytorch_tanh",
            "position_factor": value("rope.scaling.factor") or 1.0,
        }
    return family, shape
