"""A file of `engine convert` read again, beside its source."""

from __future__ import annotations

from pathlib import Path

from engine.errors import EngineError
from engine.export.metadata import difference, other_types, read_metadata
from engine.export.published import read_records


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
