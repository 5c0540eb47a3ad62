"""What a weight file says of its model beside shape and weights, and where each format keeps it.

    safetensors   chat_template.jinja beside the weights, else `chat_template` in
                  tokenizer_config.json: a text, or a list of named ones with a `default`
    gguf          metadata `tokenizer.chat_template`, `general.name`, `general.license`, ...
    apr           metadata `chat_template`, `name`, `license`, ...

Within one format everything said about the model's origin is kept; from one to another, what both
have a key for. A chat template is text of the model's author: carried along, never rendered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import WeightsError
from engine.files import read_text
from engine.formats.safetensors_header import read_json_object
from engine.formats.weights import WeightFile

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_KEY = {"gguf": "tokenizer.chat_template", "apr": "chat_template"}
# .apr key -> GGUF key.
_ORIGIN = {key: f"general.{key}" for key in ("name", "author", "version", "description", "license")}
_OF_THE_GGUF = (
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
)


def about(
    weights: WeightFile, format_: str, origin: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Metadata for a new file of `format_`, "gguf" or "apr"; it always has a name.

    `origin` is said besides, by the keys of .apr: `name`, `author`, `version`, `description`, `license`.
    """
    found: dict[str, Any] = {}
    if weights.format == format_ == "apr":
        # What the writer works out by itself it does not take from here.
        found = {k: v for k, v in weights.metadata.items() if not k.startswith("tokenizer.")}
    elif weights.format == format_ == "gguf":
        general = [key for key in weights.metadata if key.startswith("general.")]
        found = {key: weights.metadata[key] for key in general if key not in _OF_THE_GGUF}
    elif weights.format != "safetensors":
        pairs = list(_ORIGIN.items())
        if format_ == "apr":
            pairs = [(theirs, ours) for ours, theirs in pairs]
        said = {new: weights.metadata.get(old) for old, new in pairs}
        found = {key: value for key, value in said.items() if value is not None}
    template = chat_template(weights)
    if template is not None:
        found[_TEMPLATE_KEY[format_]] = template
    for key, value in (origin or {}).items():
        found[key if format_ == "apr" else _ORIGIN[key]] = value
    name = "name" if format_ == "apr" else _ORIGIN["name"]
    if not isinstance(found.get(name), str):
        found[name] = _file_name(weights)
    return found


def chat_template(weights: WeightFile) -> str | None:
    """The template, or None. Raises `WeightsError` for a file that cannot be read."""
    if weights.format != "safetensors":
        found = weights.metadata.get(_TEMPLATE_KEY[weights.format])
        return found if isinstance(found, str) else None
    folder = folder_of(weights)
    path = folder / TEMPLATE_FILE
    if path.exists():
        return _read_text(path)
    path = folder / TOKENIZER_CONFIG_FILE
    if not path.exists():
        return None
    found = read_json_object(path, "tokenizer configuration", limits.MODEL_CONFIG).get(
        "chat_template"
    )
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def folder_of(weights: WeightFile) -> Path:
    """Where the files are that belong to the weights."""
    return weights.path if weights.path.is_dir() else weights.path.parent


def _file_name(weights: WeightFile) -> str:
    if weights.format == "safetensors":
        return folder_of(weights).resolve().name
    return weights.path.stem


def _read_text(path: Path) -> str:
    return read_text(path, "chat template", limits.MODEL_TEXT, error=WeightsError)
