"""Read the configuration of a model, for the engine that runs it: our own decoder, or transformers.

    auto          our decoder if it supports the family and all features in config.json, else transformers
    native        our decoder; other models are refused
    transformers  the model's class in transformers, whatever its family

GGUF and .apr files are run only by our own decoder.

The config.json of a multimodal model has the configuration of its language model in `text_config`. If transformers
has a causal language model class for the whole model, it runs the whole model. Otherwise only the language model is
run, by our decoder or by transformers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine import limits
from engine.errors import WeightsError
from engine.files import read_json_object
from engine.formats.weights import open_regular
from engine.model_families import FAMILIES, ROPE_DIVISORS
from engine.models.config import CONFIG_FILE, SIZES, ModelConfig, unsupported
from engine.models.rope import divisors, same_divisors, scaling_of_divisors
from engine.models.transformers_config import read_transformers_config
from engine.spec.sections import ModelSection

if TYPE_CHECKING:
    from engine.formats.weights import WeightFile

NATIVE = ModelSection(engine="native")
AUTO = ModelSection()
"""Setting `auto`: our own decoder if it supports the model, else transformers."""


def read_config(folder_or_file: str | Path, how: ModelSection = AUTO) -> ModelConfig:
    """Read the configuration in a model folder, or in a `config.json` named directly."""
    path = Path(folder_or_file)
    if path.is_dir():
        path = path / CONFIG_FILE
    raw = read_json_object(path, "model configuration", limits.MODEL_CONFIG, error=WeightsError)
    return _config_in(raw, path, how)


def _config_in(raw: Mapping[str, object], where: Path, how: ModelSection) -> ModelConfig:
    """Return the configuration in a parsed `config.json` for the engine that runs the model."""
    text = _text_part(raw)
    if text is None:
        return _config_alone(raw, where, how)
    if raw.get("model_type") not in FAMILIES and (why := why_not_native(raw, how)):
        with suppress(WeightsError):
            return read_transformers_config(raw, where, how, why)
    return _config_alone(text, where, how)


def _config_alone(raw: Mapping[str, object], where: Path, how: ModelSection) -> ModelConfig:
    why = why_not_native(raw, how)
    if why is not None:
        return read_transformers_config(raw, where, how, why)
    try:
        return ModelConfig.from_dict(raw, where)
    except WeightsError as error:
        if _runs_in_transformers(raw, where, how):
            error.hint = "transformers runs it: `--set model.engine=transformers`, in a run"
        raise


def _text_part(raw: Mapping[str, object]) -> dict[str, object] | None:
    """Return the configuration of the language model in a multimodal model; None for other models."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return None
    keys_of_whole = ("text_config", "vision_config", "architectures", "auto_map")
    return {**{key: raw[key] for key in raw if key not in keys_of_whole}, **text}


def _runs_in_transformers(raw: Mapping[str, object], where: Path, how: ModelSection) -> bool:
    """Return whether transformers accepts a configuration that the native decoder refuses."""
    sizes = {key: raw.get(key) for key in SIZES}
    if any(isinstance(size, int) and size > SIZES[key].most for key, size in sizes.items()):
        return False
    if not isinstance(raw.get("model_type"), str) or raw.get("quantization_config"):
        return False
    try:
        read_transformers_config(raw, where, replace(how, engine="transformers"), "")
    except WeightsError:
        return False
    return True


def why_not_native(raw: Mapping[str, object], how: ModelSection) -> str | None:
    """Return the reason why transformers runs a model; None if our own decoder runs it, or if neither can."""
    name = raw.get("model_type")
    if how.engine == "native" or not isinstance(name, str) or raw.get("quantization_config"):
        return None
    if how.engine == "transformers":
        return "model.engine is transformers"
    if name not in FAMILIES:
        return f"{name} is none of the native families ({', '.join(FAMILIES)})"
    return "; ".join(unsupported(raw)) or None


def config_of(weights: WeightFile, how: ModelSection = AUTO) -> ModelConfig:
    """Return the configuration of an open weight file of any format. Raises `WeightsError`."""
    if weights.convention == "hf":
        return _config_in(weights.config_dict(), weights.folder / CONFIG_FILE, how)
    config = ModelConfig.from_dict(weights.config_dict(), weights.path)
    if not config.kind.llama3_rope or ROPE_DIVISORS not in weights.tensors:
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
    """Read the stored RoPE divisors directly, because `get` would import torch."""
    info = weights.tensors[ROPE_DIVISORS]
    count = info.bytes // 4
    if info.dtype != "F32" or info.shape != (count,):
        raise WeightsError.expected(
            ROPE_DIVISORS, weights.path, "a row of F32", f"{info.dtype} {list(info.shape)}"
        )
    with open_regular(info.file, "weights") as file:
        file.seek(info.start)
        return list(struct.unpack(f"<{count}f", file.read(info.bytes)))
