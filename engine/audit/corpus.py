"""What a corpus holds, read by the libraries of its formats and by none of the engine's readers: where the chain from
the corpus to the labels begins.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 1 << 25
"""Of a file, as it lies on disk; and eight times as many decompressed. Larger ones are not read a second time."""
MOST_OF_TEXT = 1 << 20
"""Of a file of text that is read a second time."""
STDLIB = "python-stdlib"
INSTALLED, TESTS = {"site-packages", "dist-packages"}, {"test", "tests", "idle_test"}
TEXTS = (".py", ".txt", ".md")
SPEAKERS, ASKING = ("assistant", "gpt"), ("system", "user", "human")
BEHIND_REASONING = "</think>"
COMPOSED = {"type": "NFC"}
Spelling: TypeAlias = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Records:
    sizes: Sequence[int]
    """Bytes of each record as it counts for `data.max_bytes`: of its text, or of the JSON of its conversation."""
    are_texts: bool
    answers: Sequence[tuple[str, ...] | None]
    """What the assistant says in each record, turn by turn; None where it is more than text, or no conversation."""
    asked: Sequence[tuple[str, ...]]
    """What system and user say in each, in front of the last answer."""


def read_records(
    source: str, columns: Sequence[str], spelt: Spelling | None = None
) -> Records | None:
    """Read a source that is one file of records; None for another one, and for one that is not read as such. Sizes are
    those of the texts as `spelt` writes them."""
    path = Path(source)
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return _records(parquet.read_table(path).to_pylist(), columns, spelt)
    kind = path.suffixes[-2:][0] if path.suffix in (".gz", ".zst") else path.suffix
    if kind not in (".jsonl", ".json"):
        return None
    with _opened(path) as file:
        text = file.read(8 * MOST_BYTES + 1)
    if len(text) > 8 * MOST_BYTES:
        return None
    if kind == ".jsonl" and text[:1] != b"[":
        lines = [line for line in text.split(b"\n") if line.strip()]
        return _records([_parsed(line) for line in lines], columns, spelt, lines)
    whole = _parsed(text)
    if not isinstance(whole, list):
        return None
    return _records(whole, columns, spelt)


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a document is held out: by the hash of its name alone, so a share of `fraction` is."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) < fraction * 2**64


def sizes_of_files(
    source: str, *, include_tests: bool, spelt: Spelling | None = None
) -> list[int] | None:
    """Return the bytes of each file of text below a folder of text, or of the standard library's modules, as `spelt`
    writes it; None for another source. Empty and hidden ones are none, and links to folders are not followed."""
    root = _root(source)
    if not root.is_dir():
        return None
    others = INSTALLED if include_tests else INSTALLED | TESTS
    found = {
        path: size
        for folder, folders, names in os.walk(root)
        for path in (Path(folder, name) for name in names)
        if path.suffix in (TEXTS if source != STDLIB else TEXTS[:1])
        and not any(
            part[0] == "."
            or part == "__pycache__"
            or (source == STDLIB and (part in others or part.startswith("config-")))
            for part in path.relative_to(root).parts
        )
        and path.is_file()
        and (size := path.stat().st_size)
    }
    if all(path.name == "README.md" for path in found):
        return None
    if spelt is None:
        return list(found.values())
    return [len(spelt(path.read_bytes().decode(errors="replace")).encode()) for path in found]


def spelling_of(tokenizer_json: bytes) -> Spelling | None:
    """Return what a tokenizer makes of a text before it cuts it up: its composed normal form; None where that is the
    text, or is not known (then `bytes_of_tokens` is None too)."""
    from tokenizers.normalizers import NFC

    normalizer = json.loads(tokenizer_json).get("normalizer")
    return NFC().normalize_str if normalizer == COMPOSED else None


def bytes_of_tokens(tokenizer_json: bytes) -> NDArray[np.int64] | None:
    """Return how many bytes of text each token is, by its id, where tokens are bytes of the text or of its composed
    normal form; None for another tokenizer. Tokens that may take white space beside them have -1."""
    found = json.loads(tokenizer_json)
    kinds = [found.get("decoder"), *((found.get("decoder") or {}).get("decoders") or ())]
    parts = [
        found.get("pre_tokenizer"),
        *((found.get("pre_tokenizer") or {}).get("pretokenizers") or ()),
    ]
    if found.get("normalizer") not in (None, COMPOSED) or not any(
        one and one["type"] == "ByteLevel" for one in kinds
    ):
        return None
    vocabulary = found["model"].get("vocab")
    if any(one and one.get("add_prefix_space") for one in parts) or not isinstance(
        vocabulary, dict
    ):
        return None
    sizes = {id: len(token) for token, id in vocabulary.items()}
    for one in found.get("added_tokens") or ():
        trims = one.get("lstrip") or one.get("rstrip")
        sizes[one["id"]] = -1 if trims else len(one["content"].encode())
    table = np.zeros(max(sizes, default=-1) + 1, np.int64)
    table[list(sizes)] = list(sizes.values())
    return table


def text_of(source: str, document: str) -> str | None:
    """Return the text of a document that is a file of a folder or of the standard library; None for another one, and
    for a large one."""
    root = _root(source)
    path = root / document
    if not root.is_dir() or path.suffix not in TEXTS or not path.is_file():
        return None
    return path.read_bytes().decode() if path.stat().st_size <= MOST_OF_TEXT else None


def _root(source: str) -> Path:
    return Path(sysconfig.get_path("stdlib") if source == STDLIB else source)


def _records(
    found: Sequence[Any],
    columns: Sequence[str],
    spelt: Spelling | None,
    lines: Sequence[bytes] = (),
) -> Records:
    texts = [_text(one, columns) for one in found]
    answers = [
        _answers(one, columns) if text is None else ()
        for one, text in zip(found, texts, strict=True)
    ]
    sizes = [
        len(line.strip() or json.dumps(one, ensure_ascii=False, default=repr).encode())
        if text is None
        else len((spelt(text) if spelt else text).encode(errors="replace"))
        for one, text, line in zip(found, texts, lines or [b""] * len(found), strict=True)
    ]
    return Records(sizes, None not in texts, answers, list(map(_asked, found)))


def _text(record: Any, columns: Sequence[str]) -> str | None:
    """Return the text of a record that is nothing else."""
    if not isinstance(record, Mapping) or len(columns) > 1:
        return None
    text = record.get(columns[0] if columns else "text")
    return text if isinstance(text, str) else None


def _asked(record: Any) -> tuple[str, ...]:
    if not isinstance(record, Mapping):
        return ()
    said = [_said(one) for one in record.get("messages") or record.get("conversations") or ()]
    answers = [place for place, one in enumerate(said) if one is not None and one[0] in SPEAKERS]
    before = said[: answers[-1]] if answers else []
    asked = [one for one in before if one is not None]
    if "messages" not in record and "system" not in [who for who, _ in asked[:1]]:
        asked.append(("system", str(record.get("system") or "")))
    return tuple(text for who, text in asked if who in ASKING)


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    return io.BufferedReader(io.FileIO(path))


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _answers(record: Any, columns: Sequence[str]) -> tuple[str, ...] | None:
    if not isinstance(record, Mapping):
        return None
    if len(columns) == 2:
        prompt, completion = (record.get(name) for name in columns)
    else:
        prompt, completion = record.get("prompt"), record.get("completion")
    messages = record.get(columns[0] if len(columns) == 1 else "messages")
    messages = record.get("conversations") if messages is None else messages
    if messages is None and isinstance(prompt, str) and isinstance(completion, str):
        return (completion,)
    found = [_said(one) for one in (completion if messages is None else messages) or ()]
    if not found or None in found:
        return None
    return tuple(text for speaker, text in found if speaker in SPEAKERS)  # type: ignore[misc]


def _said(message: Any) -> tuple[str, str] | None:
    """Return who says what in a message that is nothing but text."""
    if not isinstance(message, Mapping) or not message.keys() <= {
        *("role", "content"),
        *("from", "value"),
    }:
        return None
    content = message.get("content", message.get("value"))
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts: list[Any] = [
            one.get("text") if isinstance(one, Mapping) else None for one in content
        ]
        content = "".join(parts) if all(isinstance(one, str) for one in parts) else None
    speaker = message.get("role", message.get("from"))
    return (speaker, content) if isinstance(speaker, str) and isinstance(content, str) else None


def plain(text: str, special: Sequence[str], *, reasoning: bool = False) -> str:
    """Return a text as it is compared: without special tokens, the `reasoning` in front of it, and white space, which
    templates add and take away."""
    for token in special:
        text = text.replace(token, "")
    return "".join((text if reasoning else text.rpartition(BEHIND_REASONING)[2]).split())
