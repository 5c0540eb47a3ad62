"""A file of `engine convert` read again, beside its source."""

from __future__ import annotations

from pathlib import Path

from engine.errors import EngineError
from engine.formats.open import open_weights
from engine.models.names import rotates_neighbours
from engine.models.read_config import NATIVE, config_of
from tests.support.file_metadata import (
    Metadata,
    difference,
    other_types,
    read_apr_metadata,
    read_metadata,
)


def contradicts_its_source(source: Path, target: Path, *, tokenizer: bool) -> str:
    """Say what the new file has of the model, its tokens and its types that the source does not; empty when nothing."""
    if target.suffix == ".gguf" and (wrong := other_types(target)):
        return wrong
    wanted = read_metadata(source) or {}
    # What is told of a model anew, and what goes with its tokenizer.
    of_tokenizer = ("tokens", "kinds", "merges", "added ids", "template")
    for key in ("name", "licence", *(() if tokenizer else of_tokenizer)):
        wanted.pop(key, None)
    try:
        for where, found in read_records(target):
            if wrong := difference(wanted, found):
                return f"{where}: {wrong}"
    except EngineError as error:
        return f"it cannot be read back: {error}"
    return ""


def read_records(path: Path) -> list[tuple[str, Metadata]]:
    """Return the metadata of a model's file or folder, by its place in it."""
    if path.suffix == ".apr":
        with open_weights(path) as weights:
            # A file that no reader could load fails here too.
            rotates_neighbours(config_of(weights, NATIVE), "apr", weights.metadata, path)
            return list(read_apr_metadata(weights.metadata, path))
    record = read_metadata(path)
    return [] if record is None else [("its metadata", record)]
