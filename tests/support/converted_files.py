"""A file of `engine convert` read again, beside its source."""

from __future__ import annotations

from pathlib import Path

from engine.errors import EngineError
from engine.export.metadata import difference, other_types, said
from engine.export.published import said_by


def contradicts_its_source(source: Path, target: Path, *, tokenizer: bool) -> str:
    """Say what the new file has of the model, its tokens and its types that the source does not; empty when nothing."""
    if target.suffix == ".gguf" and (wrong := other_types(target)):
        return wrong
    wanted = said(source) or {}
    # What is told of a model anew, and what goes with its tokenizer.
    of_tokenizer = ("tokens", "kinds", "merges", "around", "template")
    for key in ("name", "licence", *(() if tokenizer else of_tokenizer)):
        wanted.pop(key, None)
    try:
        for where, found in said_by(target):
            if wrong := difference(wanted, found):
                return f"{where}: {wrong}"
    except EngineError as error:
        return f"it cannot be read back: {error}"
    return ""
