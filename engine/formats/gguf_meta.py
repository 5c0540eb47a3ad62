"""The configuration of a model, between GGUF metadata and a Hugging Face `config.json`.

    GGUF, after `<architecture>.`          config.json
    block_count                            num_hidden_layers
    embedding_length                       hidden_size
    feed_forward_length                    intermediate_size
    context_length                         max_position_embeddings
    attention.head_count                   num_attention_heads
    attention.head_count_kv                num_key_value_heads      (absent: as many as heads)
    attention.key_length                   head_dim                 (absent: width / heads)
    attention.layer_norm_rms_epsilon       rms_norm_eps
    rope.freq_base                         rope_theta
    rope.scaling.*                         rope_parameters          (linear, yarn)
    tokenizer.ggml.{bos,eos,padding}_token_id   bos_token_id, eos_token_id, pad_token_id

Not in the metadata: whether the head is tied (there is no `output.weight`) and how many tokens
there are (the rows of `token_embd.weight`). Llama 3.1's scaled rotary positions are a tensor,
`rope_freqs.weight`; whoever loads the model turns it into numbers.

GGUF stores reals as fp32. 1e-6 comes back as 9.99999997e-07; `read_config` answers with the
shortest decimal that is the same fp32 number, so a configuration survives the way there and back.

The architectures here are also Hugging Face's names for them. Another one is refused by name
(GG17), and so is a mixture of experts under the name `llama`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from engine.errors import WeightsError
from engine.formats.gguf_header import GgufMetadata
from engine.formats.gguf_values import GgufValue, ValueType, quoted, refuse
from engine.formats.gguf_vocabulary import EMBEDDING, ENDS, TOKENS, token_id
from engine.formats.safetensors_header import TensorInfo

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
HEAD = "output.weight"
ROPE_FREQS = "rope_freqs.weight"
LARGEST_REAL = 1e38
"""Rounded up in any digit, a smaller number is still an fp32 number."""

_COUNTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_YARN = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def read_config(metadata: GgufMetadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What a Hugging Face `config.json` of this model says. Raises `WeightsError` GG17, GG18."""
    arch = _architecture(metadata)
    reader = _Reader(metadata, arch)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        **{hf: reader.count(key) for key, hf in _COUNTS.items()},
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = reader.count("attention.head_count_kv", heads)
    config["head_dim"] = reader.count("attention.key_length", config["hidden_size"] // heads)
    config["rms_norm_eps"] = reader.real("attention.layer_norm_rms_epsilon")
    config["rope_theta"] = reader.real("rope.freq_base", 10_000.0)
    config["rope_parameters"] = {
        "rope_theta": config["rope_theta"],
        **_rope_scaling(reader, config["head_dim"]),
    }
    if window := reader.get("attention.sliding_window"):
        config |= {"sliding_window": window, "use_sliding_window": True}
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    config["vocab_size"] = _vocab_size(reader, tensors)
    config["tie_word_embeddings"] = HEAD not in tensors
    ends = [end for end in (token_id(metadata, name) for name in ENDS) if end is not None]
    ends = list(dict.fromkeys(ends))
    config["bos_token_id"] = token_id(metadata, "bos")
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    if (padding := token_id(metadata, "padding")) is not None:
        config["pad_token_id"] = padding
    return config


def config_metadata(config: Mapping[str, Any], where: object) -> dict[str, GgufValue]:
    """The metadata that says what a `config.json` says; `where` names it in errors.

    Each number is checked for its kind, and none against the others: they are those of a model
    that runs.
    """
    arch = config.get("model_type")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        _refuse_config(where, f"a model_type of {', '.join(ARCHITECTURES)}", arch)
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and type(heads) is int and type(config.get("hidden_size")) is int and heads:
        head_dim = config["hidden_size"] // heads
    counts: dict[str, Any] = {key: config.get(hf) for key, hf in _COUNTS.items()}
    counts |= {
        "attention.head_count_kv": heads if shared is None else shared,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.get("vocab_size"),
    }
    if arch == "llama":
        counts["rope.dimension_count"] = head_dim  # this family's files have always had it
    nested = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    reals: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "rope.freq_base": nested.get("rope_theta", config.get("rope_theta")),
    }
    values: dict[str, GgufValue] = {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind in ("linear", "yarn"):
        values[f"{arch}.rope.scaling.type"] = GgufValue(type=ValueType.STRING, value=kind)
        reals["rope.scaling.factor"] = nested.get("factor")
        if kind == "yarn":
            length = nested.get("original_max_position_embeddings")
            counts["rope.scaling.original_context_length"] = length
            reals |= {key: nested[hf] for key, hf in _YARN.items() if nested.get(hf) is not None}
    elif kind not in ("default", "llama3"):
        _refuse_config(where, "rotary positions of default, linear, yarn or llama3", kind)
    values |= {f"{arch}.{key}": uint32(number, key, where) for key, number in counts.items()}
    for key, number in reals.items():
        if type(number) not in (int, float) or not 0 < number < LARGEST_REAL:
            _refuse_config(where, f"{key} between 0 and {LARGEST_REAL:g}", number)
        values[f"{arch}.{key}"] = GgufValue(type=ValueType.FLOAT32, value=float(number))
    ends = config.get("eos_token_id")
    roles = dict(zip(ENDS, ends if isinstance(ends, list) else [ends], strict=False))
    roles |= {"bos": config.get("bos_token_id"), "padding": config.get("pad_token_id")}
    for name, number in roles.items():
        if number is not None:
            key = f"tokenizer.ggml.{name}_token_id"
            values[key] = uint32(number, key, where)
    return values


def shortest_decimal(real: float) -> float:
    """The number of fewest digits that is stored as the same fp32 number."""
    stored = struct.pack("<f", real)
    shorter = (float(f"{real:.{digits}g}") for digits in range(1, 9))
    return next((one for one in shorter if struct.pack("<f", one) == stored), real)


def uint32(number: Any, key: str, where: object) -> GgufValue:
    """A count or an id to write, as the type that other readers insist on."""
    if type(number) is not int or not 0 <= number < 2**32:
        _refuse_config(where, f"{key} from 0 to 2^32 - 1", number)
    return GgufValue(type=ValueType.UINT32, value=number)


class _Reader:
    """Values of one architecture, each checked for its kind. Raises `WeightsError` GG17."""

    def __init__(self, metadata: GgufMetadata, arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def count(self, key: str, absent: int | None = None) -> int:
        """An integer from 1; one for each layer is taken when all are the same."""
        found = self.get(key)
        if isinstance(found, list) and len(set(found)) == 1:
            found = found[0]
        if found is None and absent is not None:
            return absent
        if type(found) is not int or not 1 <= found < 2**31:
            self.refuse(key, "an integer from 1 to 2^31 - 1", found)
        return found

    def real(self, key: str, absent: float | None = None) -> float:
        found = self.get(key)
        if found is None and absent is not None:
            return absent
        if type(found) is not float or not 0 < found < LARGEST_REAL:
            self.refuse(key, f"a number between 0 and {LARGEST_REAL:g}", found)
        return shortest_decimal(found)

    def refuse(self, key: str, expected: str, found: object) -> NoReturn:
        where = f"{self.metadata.path}, key {quoted(f'{self.arch}.{key}')}"
        refuse("GG17", where, expected, "none" if found is None else f"{found!r:.80}")


def _architecture(metadata: GgufMetadata) -> str:
    where = f'{metadata.path}, key "general.architecture"'
    known = f"one of {', '.join(ARCHITECTURES)}"
    found = metadata.get("general.architecture")
    if found is None:
        refuse("GG17", where, known, "none", "the file may hold no model, or only part of one")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        refuse("GG17", where, known, f"{found!r:.80}, which is not supported")
    experts = metadata.get(f"{found}.expert_count")
    if experts:
        refuse("GG17", where, known, f"{found} with {experts!r:.40} experts, not supported")
    return found


def _rope_scaling(reader: _Reader, head_dim: int) -> dict[str, Any]:
    """What `rope_parameters` says beside the base."""
    kind = reader.get("rope.scaling.type")
    found: dict[str, Any] = {"rope_type": "default"}
    if kind in ("linear", "yarn"):
        found = {"rope_type": kind, "factor": reader.real("rope.scaling.factor")}
        if kind == "yarn":
            length = reader.count("rope.scaling.original_context_length")
            found["original_max_position_embeddings"] = length
            present = {key: hf for key, hf in _YARN.items() if reader.get(key) is not None}
            found |= {hf: reader.real(key) for key, hf in present.items()}
    elif kind not in (None, "none"):
        reader.refuse("rope.scaling.type", "none, linear or yarn", kind)
    turned = reader.count("rope.dimension_count", head_dim)
    if turned != head_dim:
        found["partial_rotary_factor"] = turned / head_dim
    return found


def _vocab_size(reader: _Reader, tensors: Mapping[str, TensorInfo]) -> int:
    """Rows of the embedding; what the metadata says only where there is none."""
    if EMBEDDING in tensors:
        return tensors[EMBEDDING].shape[0]
    tokens = reader.metadata.entry(TOKENS)
    return reader.count("vocab_size", None if tokens is None else tokens.count)


def _refuse_config(where: object, expected: str, found: object) -> NoReturn:
    raise WeightsError.expected(
        "model configuration for GGUF",
        where,
        expected,
        "none" if found is None else f"{found!r:.80}",
    )
