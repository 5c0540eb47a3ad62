"""Metadata of a model's files, read independently of the engine's readers, to check that all files of one model agree.

    what            folder                                     GGUF                          .apr
    shape, RoPE     config.json                               <architecture>.*              its own keys, hf_config
    tokens, kinds   tokenizer.json, model.vocab, added_tokens  tokenizer.ggml.tokens, types  tables, tokenizer.json
    around          tokenizer.json, post_processor             add_bos_token, add_eos_token  tokenizer.json
    bos, ends       config.json                                tokenizer.ggml.*_token_id     tokenizer.*_token_id
    template        chat_template.jinja, tokenizer_config.json tokenizer.chat_template       chat_template
    name, licence   -                                          general.name, general.license name, license

`Said` has a value for each thing that a file can say; what only one of two files can say is not compared.
`other_types` holds the types of a GGUF's tensors against the mixture that the file names.
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
from engine.audit.reference import Stretch, stretched
from engine.audit.shapes import shape_in, shape_in_gguf
from engine.files import parse_json, read_json_object, read_text

Said = dict[str, Any]


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
_SHORTER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types that llama.cpp uses instead if a row is not a multiple of the 256 numbers of a block."""


def said(path: str | Path) -> Said | None:
    """Return what a folder, its config.json alone, or a GGUF file says; None for other paths, and for a GGUF where the
    `gguf` library is not installed. Raises `BadInput` for a file that cannot be read."""
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


def said_in_apr(metadata: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Said]]:
    """Yield what the metadata of an .apr file says, by where in it: for this engine, and for other readers."""
    whole = metadata.get("hf_config") or {}
    tokenizer = metadata.get("tokenizer.json.zlib.base64")
    raw = zlib.decompress(base64.b64decode(tokenizer)) if tokenizer else b"{}"
    yield (
        "hf_config, tokenizer.json and chat_template",
        {
            **(of_config(whole) if whole else {}),
            **_of_tokenizer(parse_json(raw, path, "tokenizer")),
            "template": metadata.get("chat_template", ""),
        },
    )
    own = {name: metadata[key] for name, key in _IN_APR.items() if key in metadata}
    own |= {
        role: _ids(metadata.get(f"tokenizer.{key}_token_id"))
        for role, key in (("bos", "bos"), ("end", "eos"))
    }
    own["architecture"] = _architecture(metadata.get("architecture"))
    own |= {"name": metadata.get("name"), "licence": metadata.get("license")}
    if "tokenizer.vocabulary" in metadata:
        own |= _tables(
            metadata["tokenizer.vocabulary"],
            metadata.get("tokenizer.token_type", []),
            metadata.get("tokenizer.merges", []),
        )
    yield "its own keys", own


def difference(wanted: Said, found: Said) -> str:
    """Name the first thing that both say and that is not the same; empty when there is none."""
    for name, here in found.items():
        # A role that the one gives no token may have one in the other, by its tokenizer.
        if wanted.get(name, []) == [] or _same(here, wanted[name]):
            continue
        there = wanted[name]
        if isinstance(here, dict) and isinstance(there, dict):
            at = min(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
            return f"{name} of id {at}: {here.get(at)!r:.60}, expected {there.get(at)!r:.60}"
        if isinstance(here, list) and isinstance(there, list) and len(here) == len(there) > 9:
            at = next(place for place in range(len(here)) if here[place] != there[place])
            return f"{name} {at}: {here[at]!r:.60}, expected {there[at]!r:.60}"
        return f"{name}: {here!r:.60}, expected {there!r:.60}"
    return ""


def other_types(path: Path) -> str:
    """Name a tensor of a GGUF whose type is not that of llama.cpp in the mixture that the file names; empty when there
    is none, for a mixture that is not known here, and where the `gguf` library is not installed."""
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
    special = {f"blk.{layer}.attn_qkv.weight": "Q5_K" for layer in range(layers)}
    if layers == 80:
        # Of 70B, where eight heads share a v.
        special |= {f"blk.{layer}.attn_v.weight": "Q5_K" for layer in range(layers)}
    special |= {
        f"blk.{layer}.{kind}.weight": "Q6_K" for layer in spared for kind in ("attn_v", "ffn_down")
    }
    tied = all(one.name != "output.weight" for one in reader.tensors)
    special["token_embd.weight" if tied else "output.weight"] = "Q6_K"
    for one in reader.tensors:
        wanted = "F32"
        if len(one.shape) == 2:
            wanted = _MATRICES[mixture]
            if mixture == _Q4_K_M:
                wanted = special.get(one.name, wanted)
            if "K" in wanted and one.shape[0] % 256:
                wanted = _SHORTER[wanted]
            if wanted.startswith("Q") and one.shape[0] % 32:
                wanted = "F16"
        if len(one.shape) < 3 and one.tensor_type.name != wanted:
            return (
                f"general.file_type {mixture}: {one.name} is {one.tensor_type.name}, expected {wanted}, as llama.cpp "
                "has it"
            )
    return ""


def of_config(raw: Mapping[str, Any]) -> Said:
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
        "slowed": _slowed(shape),
        "bos": _ids(raw.get("bos_token_id")),
        "ends": (ends := _ids(raw.get("eos_token_id")))[:_ENDS],
        "end": ends[:1],
    }


def _of_gguf(path: Path) -> Said:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    family, shape = shape_in_gguf(reader)
    embedding = next((one for one in reader.tensors if one.name == "token_embd.weight"), None)

    def value(key: str) -> Any:
        field = reader.fields.get(key)
        return None if field is None else field.contents()

    def token(role: str) -> list[int]:
        return _ids(value(f"tokenizer.ggml.{role}_token_id"))

    divisors = [one.data for one in reader.tensors if one.name == "rope_freqs.weight"]
    linear = value(f"{family}.rope.scaling.type") == "linear"
    added = {role: value(f"tokenizer.ggml.add_{role}_token") for role in ("bos", "eos")}
    around = [token(role) if on else [] for role, on in added.items()]
    return {
        "position_factor": value(f"{family}.rope.scaling.factor") if linear else 1.0,
        **shape,
        **{name: value(f"{family}.{key}") for name, key in _SIZES.items()},
        "window": _window(shape, value(f"{family}.context_length")),
        "vocabulary": 0 if embedding is None else int(embedding.shape[-1]),
        "architecture": family,
        "name": value("general.name"),
        "licence": value("general.license"),
        "slowed": [float(one) for one in divisors[0]] if divisors else None,
        **_tables(
            value("tokenizer.ggml.tokens") or [],
            value("tokenizer.ggml.token_type") or [],
            value("tokenizer.ggml.merges") or [],
        ),
        # Where it does not say, the name of its pre-tokenizer decides.
        **({"around": around} if None not in added.values() else {}),
        "bos": token("bos"),
        "ends": list(dict.fromkeys(token("eos") + token("eot") + token("eom"))),
        "template": value("tokenizer.chat_template") or "",
    }


def _of_tokenizer(raw: Mapping[str, Any]) -> Said:
    model = raw.get("model") or {}
    if not isinstance(model.get("vocab"), dict):
        return {}  # no list of pieces with scores has the tables that are compared
    tokens = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, _KINDS[NORMAL])
    for one in raw.get("added_tokens") or ():
        tokens[one["id"]] = one["content"]
        kinds[one["id"]] = _KINDS[CONTROL if one.get("special") else USER_DEFINED]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or ()]
    post = raw.get("post_processor") or {}
    around: list[list[int]] = [[], []]
    for step in post.get("processors", [post]):
        if step.get("type") == "TemplateProcessing":
            behind = 0
            for part in step["single"]:
                if "Sequence" in part:
                    behind = 1
                else:
                    text = part["SpecialToken"]["id"]
                    around[behind] += step["special_tokens"][text]["ids"]
    return {"tokens": tokens, "kinds": kinds, "merges": merges, "around": around}


def _window(shape: Mapping[str, Any], positions: int | None) -> int | None:
    """Return the window; None where it is as long as all positions, which a GGUF has no key for."""
    window = shape["window"]
    return None if positions and window and window >= positions else window


def _slowed(shape: Mapping[str, Any]) -> list[float] | None:
    """Return by what Llama 3.1's scaling divides the frequency of each pair; None where there is none."""
    if not shape.get("low_freq_factor"):
        return None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original")
    stretch = Stretch(**{name: shape[name] for name in names})
    width = shape["rotary_dim"]
    frequencies = [shape["theta"] ** (-2 * pair / width) for pair in range(width // 2)]
    return [one / stretched(one, stretch) for one in frequencies]


def _tables(tokens: list[str], kinds: list[int], merges: list[str]) -> Said:
    """Return what tables say; rows of the embedding without a token are left out."""
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
    found = _object(path).get("chat_template") if path.is_file() else None
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    return found or ""


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(path, "tokenizer", limits.TOKENIZER_FILE)


def _architecture(family: object) -> str:
    """Return the name that GGUF has for a model_type."""
    return _ARCHITECTURES.get(str(family), str(family))


def _ids(found: Any) -> list[int]:
    return found if isinstance(found, list) else [] if found is None else [found]


def _same(one: Any, other: Any, apart: float = 1e-6) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) < 1000:
        # Divisors of frequencies are computed in fp32 throughout by who writes them.
        return len(one) == len(other) and all(
            _same(*pair, 1e-3) for pair in zip(one, other, strict=True)
        )
    # GGUF stores reals in fp32, and 0 for none.
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one or 0, other or 0, rel_tol=apart)
    return bool(one == other or not (one or other))
