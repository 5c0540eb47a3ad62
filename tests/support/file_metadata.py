"""Metadata of a model's files, read independently of the engine's readers, to check that all files of one model agree.

    what            folder                                     GGUF                          .apr
    shape, RoPE     config.json                               <architecture>.*              its own keys, hf_config
    tokens, kinds   tokenizer.json, model.vocab, added_tokens  tokenizer.ggml.tokens, types  tables, tokenizer.json
    added ids       tokenizer.json, post_processor             add_bos_token, add_eos_token  tokenizer.json
    bos, ends       config.json                                tokenizer.ggml.*_token_id     tokenizer.*_token_id
    template        chat_template.jinja, tokenizer_config.json tokenizer.chat_template       chat_template
    name, licence   -                                          general.name, general.license name, license

`Metadata` has a value for each property of the table that a file has a place for; only properties that both files have
are compared. The added ids are the tokens that a tokenizer puts before and after a text. `other_types` compares the
types of a GGUF's tensors with the mixture that the file names.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine import limits
from engine.audit.reference import RopeScaling, scaled_frequency
from engine.files import parse_json, read_json_object, read_text
from tests.support.shapes import shape_in, shape_in_gguf

Metadata = dict[str, Any]


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_KINDS = {NORMAL: "normal", CONTROL: "special", USER_DEFINED: "added, not special"}
_ENDS = 3
"""GGUF has keys for three tokens that end a text."""
_ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
_SIZES = {"width": "embedding_length", "positions": "context_length"}
"""Settings of the configuration other than its shape, by the key of a GGUF."""
_IN_APR = {
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "eps": "rms_norm_eps",
    "theta": "rope_theta",
    "tied": "tied_embeddings",
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "positions": "max_position_embeddings",
}

_MATRICES = {0: "F32", 1: "F16", 7: "Q8_0", 15: "Q4_K", 18: "Q6_K", 32: "BF16"}
"""Type of a file's matrices by its general.file_type. 15 is llama.cpp's Q4_K_M, which also contains other types."""
_Q4_K_M = 15
_SHORTER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""Types that llama.cpp uses instead if a row is not a multiple of the 256 numbers of a block."""


def read_metadata(path: str | Path) -> Metadata | None:
    """Return the metadata of a folder, of its config.json alone, or of a GGUF file; None for other paths, and for a
    GGUF where the `gguf` library is not installed. Raises `BadInput` for a file that cannot be read."""
    path = Path(path)
    if path.suffix == ".gguf":
        return _of_gguf(path) if find_spec("gguf") else None
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        return None
    raw = read_json_object(config, "model configuration", limits.MODEL_CONFIG)
    if "num_attention_heads" not in raw:
        return None  # of several models, one inside the other
    if config == path:
        return of_config(raw)
    tokenizer = path / "tokenizer.json"
    return {
        **of_config(raw),
        **(_of_tokenizer(_object(tokenizer)) if tokenizer.is_file() else {}),
        "template": _template(path),
    }


def read_apr_metadata(metadata: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Metadata]]:
    """Yield the metadata of an .apr file as this engine reads it, and as other readers do."""
    config = metadata.get("hf_config") or {}
    tokenizer = metadata.get("tokenizer.json.zlib.base64")
    raw = zlib.decompress(base64.b64decode(tokenizer)) if tokenizer else b"{}"
    yield (
        "hf_config, tokenizer.json and chat_template",
        {
            **(of_config(config) if config else {}),
            **_of_tokenizer(parse_json(raw, path, "tokenizer")),
            "template": metadata.get("chat_template", ""),
        },
    )
    values = {name: metadata[key] for name, key in _IN_APR.items() if key in metadata}
    values |= {
        role: _ids(metadata.get(f"tokenizer.{key}_token_id"))
        for role, key in (("bos", "bos"), ("end", "eos"))
    }
    values["architecture"] = _architecture(metadata.get("architecture"))
    values |= {"name": metadata.get("name"), "licence": metadata.get("license")}
    if "tokenizer.vocabulary" in metadata:
        values |= _tables(
            metadata["tokenizer.vocabulary"],
            metadata.get("tokenizer.token_type", []),
            metadata.get("tokenizer.merges", []),
        )
    yield "its own keys", values


def difference(wanted: Metadata, found: Metadata) -> str:
    """Describe the first value that both have and that differs; empty when there is none."""
    for name, found_value in found.items():
        # A token that one file leaves out (an empty list) may be set in the other by its tokenizer.
        if wanted.get(name, []) == [] or _is_same(found_value, wanted[name]):
            continue
        wanted_value = wanted[name]
        if isinstance(found_value, dict) and isinstance(wanted_value, dict):
            key = min(
                key
                for key in found_value.keys() | wanted_value.keys()
                if found_value.get(key) != wanted_value.get(key)
            )
            return f"{name} of id {key}: {found_value.get(key)!r:.60}, expected {wanted_value.get(key)!r:.60}"
        if (
            isinstance(found_value, list)
            and isinstance(wanted_value, list)
            and len(found_value) == len(wanted_value) > 9
        ):
            key = next(
                index
                for index in range(len(found_value))
                if found_value[index] != wanted_value[index]
            )
            return f"{name} {key}: {found_value[key]!r:.60}, expected {wanted_value[key]!r:.60}"
        return f"{name}: {found_value!r:.60}, expected {wanted_value!r:.60}"
    return ""


def other_types(path: Path) -> str:
    """Name a tensor of a GGUF that has another type than llama.cpp gives it in the file's mixture. Empty when there is
    none, for a mixture other than those of `_MATRICES`, and where the `gguf` library is not installed."""
    if not find_spec("gguf"):
        return ""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    named = reader.fields.get("general.file_type")
    mixture = None if named is None else named.contents()
    if mixture not in _MATRICES:
        return ""
    family = reader.fields["general.architecture"].contents()
    layers = reader.fields[f"{family}.block_count"].contents()
    # Errors cost more in the first and last eighth of the layers, and every third between is spared too.
    spared = {*range(layers // 8), *range(7 * layers // 8, layers)}
    spared |= {*range(layers // 8 + 2, layers, 3)}
    special = {f"blk.{layer}.attn_qkv.weight": "Q6_K" for layer in range(layers)}
    if layers == 80:
        # Of 70B, where eight heads share a v.
        special |= {f"blk.{layer}.attn_v.weight": "Q6_K" for layer in range(layers)}
    special |= {
        f"blk.{layer}.{kind}.weight": "Q6_K" for layer in spared for kind in ("attn_v", "ffn_down")
    }
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    special["token_embd.weight" if tied else "output.weight"] = "Q6_K"
    for tensor in reader.tensors:
        expected = "F32"
        if len(tensor.shape) == 2:
            expected = _MATRICES[mixture]
            if mixture == _Q4_K_M:
                expected = special.get(tensor.name, expected)
            if "K" in expected and tensor.shape[0] % 256:
                expected = _SHORTER[expected]
            if expected.startswith("Q") and tensor.shape[0] % 32:
                expected = "F16"
        if len(tensor.shape) < 3 and tensor.tensor_type.name != expected:
            return (
                f"general.file_type {mixture}: {tensor.name} is {tensor.tensor_type.name}, expected {expected}, as "
                "llama.cpp has it"
            )
    return ""


def of_config(raw: Mapping[str, Any]) -> Metadata:
    shape = shape_in(dict(raw))
    return {
        **shape,
        "width": raw["hidden_size"],
        # Configurations of the first Llamas lack it.
        "positions": (positions := raw.get("max_position_embeddings", 2048)),
        "vocabulary": raw.get("vocab_size"),
        "architecture": _architecture(raw.get("model_type")),
        "classes": raw.get("architectures") or [],
        "window": _window(shape, positions),
        "slowed": _slowed_frequencies(shape),
        "bos": _ids(raw.get("bos_token_id")),
        "ends": (ends := _ids(raw.get("eos_token_id")))[:_ENDS],
        "end": ends[:1],
    }


def _of_gguf(path: Path) -> Metadata:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    family, shape = shape_in_gguf(reader)
    embedding = next(
        (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None
    )

    def value(key: str) -> Any:
        field = reader.fields.get(key)
        return None if field is None else field.contents()

    def token(role: str) -> list[int]:
        return _ids(value(f"tokenizer.ggml.{role}_token_id"))

    divisors = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    linear = value(f"{family}.rope.scaling.type") == "linear"
    added = {role: value(f"tokenizer.ggml.add_{role}_token") for role in ("bos", "eos")}
    added_ids = [token(role) if on else [] for role, on in added.items()]
    return {
        "position_factor": value(f"{family}.rope.scaling.factor") if linear else 1.0,
        **shape,
        **{name: value(f"{family}.{key}") for name, key in _SIZES.items()},
        "window": _window(shape, value(f"{family}.context_length")),
        "vocabulary": 0 if embedding is None else int(embedding.shape[-1]),
        "architecture": family,
        "name": value("general.name"),
        "licence": value("general.license"),
        "slowed": [float(tensor) for tensor in divisors[0]] if divisors else None,
        **_tables(
            value("tokenizer.ggml.tokens") or [],
            value("tokenizer.ggml.token_type") or [],
            value("tokenizer.ggml.merges") or [],
        ),
        # In a file without these keys the name of the pre-tokenizer decides.
        **({"added ids": added_ids} if None not in added.values() else {}),
        "bos": token("bos"),
        "ends": list(dict.fromkeys(token("eos") + token("eot") + token("eom"))),
        "template": value("tokenizer.chat_template") or "",
    }


def _of_tokenizer(raw: Mapping[str, Any]) -> Metadata:
    model = raw.get("model") or {}
    if not isinstance(model.get("vocab"), dict):
        return {}  # a unigram model has a list of pieces with scores, and not the tables that are compared
    tokens = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, _KINDS[NORMAL])
    for token in raw.get("added_tokens") or ():
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = _KINDS[CONTROL if token.get("special") else USER_DEFINED]
    merges = [
        token if isinstance(token, str) else " ".join(token) for token in model.get("merges") or ()
    ]
    post = raw.get("post_processor") or {}
    added_ids: list[list[int]] = [[], []]
    for step in post.get("processors", [post]):
        if step.get("type") == "TemplateProcessing":
            is_after = 0
            for part in step["single"]:
                if "Sequence" in part:
                    is_after = 1
                else:
                    text = part["SpecialToken"]["id"]
                    added_ids[is_after] += step["special_tokens"][text]["ids"]
    return {"tokens": tokens, "kinds": kinds, "merges": merges, "added ids": added_ids}


def _window(shape: Mapping[str, Any], positions: int | None) -> int | None:
    """Return the window; None where it is as long as all positions, which a GGUF has no key for."""
    window = shape["window"]
    return None if positions and window and window >= positions else window


def _slowed_frequencies(shape: Mapping[str, Any]) -> list[float] | None:
    """Return the divisor of each pair's frequency in Llama 3.1's scaling; None for a model without it."""
    if not shape.get("low_freq_factor"):
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original")
    rope_scaling = RopeScaling(**{name: shape[name] for name in names})
    width = shape["rotary_dim"]
    frequencies = [shape["theta"] ** (-2 * pair / width) for pair in range(width // 2)]
    return [frequency / scaled_frequency(frequency, rope_scaling) for frequency in frequencies]


def _tables(tokens: list[str], kinds: list[int], merges: list[str]) -> Metadata:
    """Return tokens, kinds and merges; rows of the embedding without a token are left out."""
    kinds = kinds or [NORMAL] * len(tokens)
    used = [number for number, kind in enumerate(kinds) if kind != UNUSED]
    return {
        "tokens": {number: tokens[number] for number in used if number < len(tokens)},
        "kinds": {number: _KINDS.get(kinds[number], f"type {kinds[number]}") for number in used},
        "merges": list(merges),
    }


def _template(folder: Path) -> str:
    """Return the chat template that transformers uses; empty where there is none."""
    if (path := folder / "chat_template.jinja").is_file():
        return read_text(path, "chat template", limits.MODEL_TEXT)
    path = folder / "tokenizer_config.json"
    template = _object(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template or ""


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(path, "tokenizer", limits.TOKENIZER_FILE)


def _architecture(family: object) -> str:
    """Return the name that GGUF has for a model_type."""
    return _ARCHITECTURES.get(str(family), str(family))


def _ids(found: Any) -> list[int]:
    return found if isinstance(found, list) else [] if found is None else [found]


def _is_same(left: Any, right: Any, tolerance: float = 1e-6) -> bool:
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) < 1000:
        # Writers compute the divisors of frequencies in fp32 throughout, so they differ by more than one rounding.
        return len(left) == len(right) and all(
            _is_same(*pair, 1e-3) for pair in zip(left, right, strict=True)
        )
    # GGUF stores reals in fp32, and 0 for an absent one.
    if isinstance(left, float) or isinstance(right, float):
        return math.isclose(left or 0, right or 0, rel_tol=tolerance)
    return bool(left == right or not (left or right))
