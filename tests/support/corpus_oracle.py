"""Read a corpus with the libraries of its formats instead of the engine's readers, and find where the rows made of it
differ: counts, splits, texts, labels and bytes.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.data.tokens import READ_AT_ONCE, Encoded, TokenStream
from engine.formats.tokenizer import Tokenizer

MOST_BYTES = 1 << 25
"""Largest file on disk that is read again, in bytes; decompressed it may be eight times as large."""
MOST_OF_TEXT = 1 << 20
"""Largest text file that is read again, in bytes."""
STDLIB = "python-stdlib"
INSTALLED, TESTS = {"site-packages", "dist-packages"}, {"test", "tests", "idle_test"}
TEXTS = (".py", ".txt", ".md")
SPEAKERS = ("assistant", "gpt", "chatgpt", "bot", "model")
ASKING = ("system", "user", "human")
BEHIND_REASONING = "</think>"
COMPOSED = {"type": "NFC"}
Spelling: TypeAlias = Callable[[str], str]

LARGEST_DEVIATION = 5.5
LEAST_TAKEN = 0.95
"""Minimum share of the documents that fit into data.max_bytes, if some are left out: larger ones may replace them."""
WEIGHED = 1 << 24
"""Maximum number of tokens of a split whose bytes are counted."""


@dataclass(frozen=True, slots=True)
class Records:
    sizes: Sequence[int]
    """Bytes of each record as it counts for `data.max_bytes`: of its text, or of the JSON of its conversation."""
    are_texts: bool
    answers: Sequence[tuple[str, ...] | None]
    """Answers of the assistant in each record, turn by turn; None if one is more than text, or for no conversation."""
    asked: Sequence[tuple[str, ...]]
    """Messages of system and user in each record, before the last answer."""
    of_one_file: bool
    names: Sequence[str]
    """Name of each record, made from its text; empty if any record is not a text."""
    alike: Sequence[int]
    """Number of copies of each distinct record."""


def read_records(
    source: str, columns: Sequence[str], spelt: Spelling | None = None
) -> Records | None:
    """Read a source that is a file or a folder of records; None for any other source, and for one that is too large.
    Sizes are those of the texts after `spelt`."""
    path = Path(source)
    files = [path] if path.is_file() else _files_of_records(source, columns)
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        return None
    records: list[Any] = []
    lines: list[bytes] = []
    for file in files:
        read = _records_of(file)
        if read is None:
            return None
        records += read[0]
        lines += read[1]
    return _records(records, columns, spelt, lines, path.is_file()) if files else None


def _files_of_records(source: str, columns: Sequence[str]) -> list[Path]:
    """Return the files of a folder of records, or those that match a glob in it; none of another one."""
    paths = [path for path in _files_below(source) if path.name[0] != "."]
    if not columns and any(p.suffix in TEXTS and p.name != "README.md" for p in paths):
        return []
    kinds = {path: _kind(path) for path in paths}
    tables = [p for p, kind in kinds.items() if kind and p.suffix != ".json"]
    return tables or [p for p, kind in kinds.items() if kind]


def _files_below(source: str) -> list[Path]:
    """Return the files below a folder, none of hidden folders or of links to folders; or those that match a glob."""
    root = _root(source)
    if source != STDLIB and root != Path(source):
        return [path for path in map(Path, glob.glob(source, recursive=True)) if path.is_file()]
    return [
        path
        for folder, _, names in os.walk(root)
        for path in (Path(folder, name) for name in sorted(names))
        if path.is_file()
        and not any(p[0] == "." or p == "__pycache__" for p in path.relative_to(root).parts[:-1])
    ]


def _kind(path: Path) -> str:
    """Return .parquet, .jsonl or .json by a file's name; empty for another one."""
    suffix = path.suffixes[-2:][0] if path.suffix in (".gz", ".zst") else path.suffix
    return suffix if suffix in (".parquet", ".jsonl", ".json") else ""


def _records_of(path: Path) -> tuple[list[Any], list[bytes]] | None:
    """Return the records of a file, and the line of each; an empty line where the format has none."""
    kind = _kind(path)
    if not kind:
        return None
    if kind == ".parquet":
        import pyarrow.parquet as parquet

        found = parquet.read_table(path).to_pylist()
        return found, [b""] * len(found)
    with _opened(path) as file:
        text = file.read(8 * MOST_BYTES + 1)
    if len(text) > 8 * MOST_BYTES:
        return None
    if kind == ".jsonl" and text[:1] != b"[":
        lines = [line for line in text.split(b"\n") if line.strip()]
        return [_parsed(line) for line in lines], lines
    whole = _parsed(text)
    return (whole, [b""] * len(whole)) if isinstance(whole, list) else None


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a document is held out: by the hash of its name alone, so a share of `fraction` is."""
    return _place(name) < fraction * 2**64


def _place(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)


def taken(
    documents: Iterable[tuple[str, int]], fraction: float, max_bytes: int
) -> tuple[set[str], set[str]]:
    """Return the names of the documents to train on, and of those that are held out, of names and sizes: in the order
    of the names' hashes as many of each as fit into `max_bytes` and its `fraction`."""
    train: set[str] = set()
    held: set[str] = set()
    left_bytes = {id(train): max_bytes, id(held): int(max_bytes * fraction)}
    for name, size in sorted(documents, key=lambda document: _place(document[0])):
        split = held if is_held_out(name, fraction) else train
        if size <= left_bytes[id(split)]:
            left_bytes[id(split)] -= size
            split.add(name)
    return train, held


def files_of(
    source: str, *, include_tests: bool, spelt: Spelling | None = None
) -> dict[str, int] | None:
    """Return the bytes of each file of text below a folder of text, or of the standard library's modules, by its path
    and as `spelt` writes it; None for another source. Empty and hidden ones are none, and links to folders are not
    followed."""
    root = _root(source)
    if not root.is_dir():
        return None
    others = INSTALLED if include_tests else INSTALLED | TESTS
    found = {
        path: size
        for path in _files_below(source)
        if path.suffix in (TEXTS if source != STDLIB else TEXTS[:1])
        and path.name[0] != "."
        and not (
            source == STDLIB
            and any(p in others or p.startswith("config-") for p in path.relative_to(root).parts)
        )
        and (size := path.stat().st_size)
    }
    if all(path.name == "README.md" for path in found):
        return None
    if spelt is not None:
        found = {p: len(spelt(p.read_bytes().decode(errors="replace")).encode()) for p in found}
    return {path.relative_to(root).as_posix(): size for path, size in found.items()}


def copies_of(source: str, files: Mapping[str, int], fraction: float) -> int:
    """Return how many of the files of text of a folder have the text of one that is held out, and are not."""
    root = _root(source)
    alike: dict[int, list[str]] = {}
    for name, size in files.items():
        alike.setdefault(size, []).append(name)
    count = 0
    for names in alike.values():
        held = [name for name in names if is_held_out(name, fraction)]
        if held and len(held) < len(names):
            texts = {(root / name).read_bytes() for name in held}
            others = {*names} - {*held}
            count += sum((root / name).read_bytes() in texts for name in others)
    return count


def spelling_of(tokenizer_json: bytes) -> Spelling | None:
    """Return what a tokenizer makes of a text before it cuts it up: its composed normal form; None where that is the
    text, or is not known (then `bytes_of_tokens` is None too)."""
    from tokenizers.normalizers import NFC

    normalizer = json.loads(tokenizer_json).get("normalizer")
    return NFC().normalize_str if normalizer == COMPOSED else None


def bytes_of_tokens(tokenizer_json: bytes) -> NDArray[np.int64] | None:
    """Return how many bytes of text each token is, by its id, where tokens are bytes of the text or of its composed
    normal form; None for another tokenizer. Tokens that may take white space beside them have -1."""
    tokenizer = json.loads(tokenizer_json)
    decoder, cutter = (tokenizer.get(part) or {} for part in ("decoder", "pre_tokenizer"))
    decoders = [decoder, *(decoder.get("decoders") or ())]
    cutters = [cutter, *(cutter.get("pretokenizers") or ())]
    vocabulary = tokenizer["model"].get("vocab")
    if (
        tokenizer.get("normalizer") not in (None, COMPOSED)
        or not any(part.get("type") == "ByteLevel" for part in decoders)
        or any(part.get("add_prefix_space") for part in cutters)
        or not isinstance(vocabulary, dict)
    ):
        return None
    sizes = {id: len(token) for token, id in vocabulary.items()}
    for added in tokenizer.get("added_tokens") or ():
        trims = added.get("lstrip") or added.get("rstrip")
        sizes[added["id"]] = -1 if trims else len(added["content"].encode())
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
    # Of a file that is no UTF-8 this is another text than any that could be in the rows.
    small = path.stat().st_size <= MOST_OF_TEXT
    return path.read_bytes().decode(errors="replace") if small else None


def size_of_text(source: str) -> int | None:
    """Return the bytes of a source that is one file of text, without its byte order mark; None for another one."""
    path = Path(source)
    if path.suffix not in TEXTS or not path.is_file():
        return None
    with path.open("rb") as file:
        return path.stat().st_size - (3 if file.read(3) == codecs.BOM_UTF8 else 0)


def _root(source: str) -> Path:
    """Return the folder that a source is, or that a glob begins in."""
    if source == STDLIB:
        return Path(sysconfig.get_path("stdlib"))
    path = Path(source)
    while not os.path.lexists(path) and glob.has_magic(str(path)):
        path = path.parent
    return path


def _records(
    records: Sequence[Any],
    columns: Sequence[str],
    spelt: Spelling | None,
    lines: Sequence[bytes],
    of_one_file: bool,
) -> Records:
    texts = [_text(record, columns) for record in records]
    answers = [
        _answers(record, columns) if text is None else ()
        for record, text in zip(records, texts, strict=True)
    ]
    sizes = [
        len(line.strip() or json.dumps(record, ensure_ascii=False, default=repr).encode())
        if text is None
        else len((spelt(text) if spelt else text).encode(errors="replace"))
        for record, text, line in zip(records, texts, lines, strict=True)
    ]
    plain_texts = [text for text in texts if text is not None]
    names = [
        "text-" + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
        for text in plain_texts
    ]
    return Records(
        sizes=sizes,
        are_texts=len(plain_texts) == len(texts),
        answers=answers,
        asked=list(map(_asked, records)),
        of_one_file=of_one_file,
        names=names if len(plain_texts) == len(texts) else (),
        alike=[*Counter(map(_alike, records)).values()],
    )


def _alike(record: Any) -> str:
    """Return a key that is equal for records that may share a name: their messages, without ids and the like."""
    content: Any = record
    if isinstance(record, Mapping):
        content = record.get("messages") or record.get("conversations") or record
    if isinstance(content, list):
        keys = ("role", "from", "content", "value")
        content = [[m.get(k) for k in keys] if isinstance(m, Mapping) else m for m in content]
    return json.dumps(content, sort_keys=True, default=repr)


def _text(record: Any, columns: Sequence[str]) -> str | None:
    """Return the text of a record that is nothing else."""
    if not isinstance(record, Mapping) or len(columns) > 1:
        return None
    pair = record.get("prompt") is not None and record.get("completion") is not None
    if not columns and (record.get("messages") or record.get("conversations") or pair):
        return None
    text = record.get(columns[0] if columns else "text")
    return text if isinstance(text, str) else None


def _asked(record: Any) -> tuple[str, ...]:
    if not isinstance(record, Mapping):
        return ()
    messages = [
        _said(message) for message in record.get("messages") or record.get("conversations") or ()
    ]
    answers = [
        place
        for place, message in enumerate(messages)
        if message is not None and message[0] in SPEAKERS
    ]
    before = messages[: answers[-1]] if answers else []
    asked = [message for message in before if message is not None]
    if "messages" not in record and "system" not in [speaker for speaker, _ in asked[:1]]:
        asked.append(("system", str(record.get("system") or "")))
    return tuple(text for speaker, text in asked if speaker in ASKING)


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
    messages_said = [
        _said(message) for message in (completion if messages is None else messages) or ()
    ]
    if not messages_said or None in messages_said:
        return None
    return tuple(text for speaker, text in messages_said if speaker in SPEAKERS)  # type: ignore[misc]


def _said(message: Any) -> tuple[str, str] | None:
    """Return the speaker and the text of a message; None if it holds more than text."""
    if not isinstance(message, Mapping) or not message.keys() <= {
        *("role", "content"),
        *("from", "value"),
    }:
        return None
    content = message.get("content", message.get("value"))
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts: list[Any] = [
            part.get("text") if isinstance(part, Mapping) else None for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    speaker = message.get("role", message.get("from"))
    is_known = speaker in (*SPEAKERS, *ASKING)
    return (str(speaker), content) if is_known and isinstance(content, str) else None


def plain(text: str, special: Sequence[str], *, reasoning: bool = False) -> str:
    """Return a text as it is compared: without special tokens, the `reasoning` in front of it, and white space, which
    templates add and take away."""
    for token in special:
        text = text.replace(token, "")
    return "".join((text if reasoning else text.rpartition(BEHIND_REASONING)[2]).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The rows that were made of a source, and the settings that they were made with; `max_bytes` of 0 is no limit."""

    source: str
    streams: Mapping[str, TokenStream]
    """Training and held-out ones."""
    documents: tuple[int, int]
    left_out: int
    copies: int
    again: Mapping[str, Encoded]
    """Documents of the source by name, read and tokenized alone."""
    tokenizer: Tokenizer
    fraction: float
    max_bytes: int = 0
    columns: tuple[str, ...] = ()
    turns: str = "all"
    writes_system: bool = True


def what_is_wrong(made: Made) -> list[str]:
    return list(_faults(made))


def _faults(made: Made) -> Iterator[str]:
    for (split, stream), documents in zip(made.streams.items(), made.documents, strict=True):
        filled = stream.lengths > 0
        if stream.padding is not None:
            filled &= ~stream.padding
        expected = documents - sum(reason.count for reason in stream.left_out)
        if (found := int(filled.sum())) != expected:
            yield f"the {split} rows have {found:,} documents, the corpus has {expected:,} for them"
    records = read_records(made.source, made.columns)
    sizes, names = (None, ()) if records is None else (records.sizes, records.names)
    # With columns a folder is one of records, whatever else is in it.
    if records is None and not made.columns:
        files = files_of(made.source, include_tests=False) or {}
        sizes, names = [*files.values()] or None, [*files]
    if sizes is not None:
        yield from _miscounted(made, sizes, records)
    again = {}
    for name, document in made.again.items():
        found_in = [split for split, stream in made.streams.items() if has(stream, document)]
        if not len(document.ids) or (not found_in and made.max_bytes):
            continue
        wanted = "held-out" if is_held_out(name, made.fraction) else "training"
        if found_in not in ([wanted], ["held-out"]):
            where = " and ".join(found_in) or "no"
            yield f"{name} is whole in {where} rows, and belongs into the {wanted} ones"
        again[name] = found_in[0] if found_in else ""
    if sizes is not None and (fault := _wrong_split(made, again, names, sizes, records)):
        yield fault
    yield from _wrong_documents(made, records)
    if records is None or records.are_texts:
        yield from _wrong_sizes(made, sizes)


def _wrong_documents(made: Made, records: Records | None) -> Iterator[str]:
    answers = Answers.of(made, records)
    for name, document in made.again.items():
        if answers is not None and (wrong_label := answers.not_said(document)) is not None:
            yield f"{name} has labels on {wrong_label!r:.80}: no conversation has these answers"
        if answers is not None and (missing := answers.not_asked(document)):
            yield f"{name} has not in it what its record says in front of an answer: {missing!r:.80}"
        if document.left_out or document.labelled is not None:
            continue
        if (text := text_of(made.source, name)) is not None:
            (ids,) = made.tokenizer.encode_documents([text])
            if len(document.ids) > len(ids) + 1 or not np.array_equal(
                ids, document.ids[: len(ids)]
            ):
                yield f"{name} in the rows is not the text of that file of {made.source}"


def _miscounted(made: Made, source_sizes: Sequence[int], records: Records | None) -> Iterator[str]:
    """Compare the number of documents with the texts of the source and their sizes."""
    documents = made.documents
    sizes, accounted = np.sort(source_sizes)[::-1], made.left_out + sum(documents)
    what = "records, read by another library" if records else "files of text"
    budgets = (made.max_bytes, int(made.max_bytes * made.fraction))
    # Where as many documents as there are, and one more, fit whichever they are, none is left out by max_bytes.
    all_fit = not made.max_bytes or all(
        sizes[: count + 1].sum() <= budget for count, budget in zip(documents, budgets, strict=True)
    )
    # What is left out of a folder is not only records.
    counted = records is not None and records.of_one_file
    if (all_fit and accounted < len(sizes)) or (counted and accounted > len(sizes)):
        yield (
            f"{made.source} has {len(sizes):,} {what}; {accounted:,} are in a split or known to be left out"
        )
    if made.max_bytes and (least := int(sizes[::-1][: documents[0]].sum())) > made.max_bytes:
        yield (
            f"{documents[0]:,} training documents of {made.source} are {least:,} bytes long at least, data.max_bytes "
            f"allows {made.max_bytes:,}"
        )


def _wrong_split(
    made: Made,
    again: Mapping[str, str],
    names: Sequence[str],
    sizes: Sequence[int],
    records: Records | None,
) -> str:
    """Return how the documents of the two splits differ from those that their names and sizes prescribe; empty if they
    do not. Copies and unreadable documents are not known here, so a few may differ."""
    held, fraction = made.documents[1], made.fraction
    fraction_text = f"data.heldout_fraction of {fraction:g}"
    if names and made.max_bytes:
        expected_splits = taken(zip(names, sizes, strict=True), fraction, made.max_bytes)
        for count, names_expected, split in zip(
            made.documents, expected_splits, made.streams, strict=True
        ):
            least = LEAST_TAKEN if made.left_out else 1.0
            if count < least * len(names_expected) - made.left_out:
                return (
                    f"{count:,} {split} documents are taken, {len(names_expected):,} fit into a data.max_bytes of "
                    f"{made.max_bytes:,}"
                )
            names_found = [name for name, where in again.items() if where == split]
            unexpected = [name for name in names_found if name not in names_expected]
            if len(unexpected) > max(1, len(names_found) // 2):
                return (
                    f"{len(unexpected)} of {len(names_found)} {split} documents, as {unexpected[0]}, are none of "
                    f"the first by the hash of their names that fit into a data.max_bytes of {made.max_bytes:,}"
                )
    elif names:
        wanted_held = sum(is_held_out(name, fraction) for name in names)
        if abs(held - wanted_held) > made.left_out:
            return f"{held:,} documents are held out, by their names and a {fraction_text} it is {wanted_held:,}"
        # Records of one text have one name, so none is a copy across the split.
        known = dict(zip(names, sizes, strict=True)) if records is None else {}
        copies = copies_of(made.source, known, fraction)
        if abs(copies - made.copies) > made.left_out - made.copies:
            return (
                f"{made.copies:,} training documents are left out as copies of held-out text, "
                f"{copies:,} of {made.source} are"
            )
    elif records is not None and not made.max_bytes:
        # Records of one content have one name, and are in one split.
        deviation = math.sqrt(fraction * (1 - fraction) * sum(n * n for n in records.alike))
        expected = fraction * sum(records.alike)
        if abs(held - expected) > LARGEST_DEVIATION * deviation + made.left_out:
            return f"{held:,} documents are held out, a {fraction_text} gives some {expected:,.0f}"
    return ""


def _wrong_sizes(made: Made, source_sizes: Sequence[int] | None) -> Iterator[str]:
    """Yield documents whose tokens have as many bytes as no text of the source, whose sizes are `source_sizes`. The
    passages of a source that is one text file must add up to the file."""
    tokenizer, file_size = made.tokenizer, size_of_text(made.source)
    if source_sizes is None and file_size is None:
        return
    table, spelt = bytes_of_tokens(tokenizer.raw), spelling_of(tokenizer.raw)
    if table is None:
        return
    train, held = (_bytes_of_documents(stream, table) for stream in made.streams.values())
    if source_sizes is not None:
        if made.max_bytes and (total := int(train.sum())) > made.max_bytes:
            yield f"the training text is {total:,} bytes long, data.max_bytes allows {made.max_bytes:,}"
        weighed = Counter([*train.tolist(), *held.tolist()])
        unmatched = weighed - Counter(source_sizes)
        # Only texts that are not in their normal form, which few are, must be read for that.
        if unmatched and spelt is not None:
            records = read_records(made.source, made.columns, spelt)
            files = files_of(made.source, include_tests=False, spelt=spelt) or {}
            unmatched = weighed - Counter(records.sizes if records is not None else files.values())
        if unmatched:
            yield (
                f"{unmatched.total():,} of {len(train) + len(held):,} documents are as long as no text of "
                f"{made.source}, as one of {min(unmatched):,} bytes: something of them is lost or added on the way to "
                "the rows"
            )
    documents, total = sum(made.documents), int(train.sum() + held.sum())
    is_all = not made.left_out and not made.max_bytes and len(train) + len(held) == documents
    if file_size is not None and spelt is None and is_all and total != file_size:
        yield (
            f"the {documents:,} passages of {made.source} are {total:,} bytes long in all, the file {file_size:,}: "
            "something of it is in no row, or twice"
        )


def _bytes_of_documents(stream: TokenStream, table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each of the first documents without the token that ends it; none of those that are empty,
    fill a row, or have a token whose bytes are not known."""
    last = int(np.searchsorted(stream.starts, WEIGHED, side="right")) - 1
    starts = stream.starts[: last + 1]
    known = np.diff(starts) > 0
    if stream.padding is not None:
        known &= ~stream.padding[:last]
    # Of all tokens before each one.
    bytes_before = np.zeros(int(starts[-1]) + 1, np.int64)
    for first in range(0, int(starts[-1]), READ_AT_ONCE):
        ids = stream.tokens[first : min(first + READ_AT_ONCE, int(starts[-1]))]
        sizes = table[np.minimum(ids, len(table) - 1)]
        unknown_at = first + np.flatnonzero((sizes < 0) | (ids >= len(table)))
        known[np.searchsorted(starts, unknown_at, side="right") - 1] = False
        bytes_before[first + 1 : first + 1 + len(ids)] = sizes
        stream.release()
    np.cumsum(bytes_before, out=bytes_before)
    begin, last_token = starts[:-1][known], starts[1:][known] - 1
    sizes_found: NDArray[np.int64] = bytes_before[last_token] - bytes_before[begin]
    return sizes_found


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of the assistant in the records of a source, to be compared with the tokens that have labels."""

    tokenizer: Tokenizer
    special: tuple[str, ...]
    known: frozenset[tuple[str, ...]]
    last: bool
    """Whether only the last answer of a conversation has labels."""
    asked: Mapping[tuple[str, ...], Sequence[Sequence[str]]]
    """Messages before the last answer of each record, by its answers."""

    @staticmethod
    def of(made: Made, records: Records | None) -> Answers | None:
        """Return None if a record holds more than plain text: templates may write that in any way."""
        tokenizer = made.tokenizer
        if records is None:
            return None
        special = tuple(sorted(tokenizer.special_tokens, key=len, reverse=True))
        known: dict[tuple[str, ...], list[Sequence[str]]] = {}
        for answer_texts, asked in zip(records.answers, records.asked, strict=True):
            if answer_texts is None:
                return None
            answers = tuple(plain(text, special) for text in answer_texts)
            known.setdefault(answers, []).append(
                [plain(text, special, reasoning=True) for text in asked]
            )
        last = made.turns == "last"
        asked_before = known if made.writes_system else {}
        return Answers(tokenizer, special, frozenset(known), last, asked_before)

    def not_asked(self, document: Encoded) -> str:
        """Return a message of the record that is missing in its conversation; empty if all are there."""
        if (
            document.labelled is None
            or not len(document.ids)
            or self.last
            or document.partly_labelled
        ):
            return ""
        answers = tuple(
            plain(self.tokenizer.decode(document.ids[first:end]), self.special)
            for first, end in _runs(document.labelled)
        )
        conversation = plain(self.tokenizer.decode(document.ids), self.special, reasoning=True)
        missing = [
            next((text for text in asked if text not in conversation), "")
            for asked in self.asked.get(answers, [])
        ]
        return "" if not missing or "" in missing else missing[0]

    def not_said(self, document: Encoded) -> str | None:
        """Return a text that has labels and is not an answer of any record; None if there is none."""
        if document.labelled is None or not len(document.ids):
            return None
        runs = _runs(document.labelled)
        texts = tuple(self.tokenizer.decode(document.ids[first:end]) for first, end in runs)
        exact = tuple(plain(text, self.special) for text in texts)
        # A token that begins with the prompt's white space and reaches into the answer has no label.
        before = [
            self.tokenizer.decode(document.ids[max(0, first - 1) : first]) for first, _ in runs
        ]
        whole = tuple(
            plain(head + text, self.special) if head[:1].isspace() else exact_text
            for head, text, exact_text in zip(before, texts, exact, strict=True)
        )
        known = {answers[-1:] for answers in self.known} if self.last else self.known
        known_texts = {text for answers in self.known for text in answers}
        if exact in known or whole in known:
            return None
        if document.partly_labelled and (
            known_texts.issuperset(exact) or known_texts.issuperset(whole)
        ):
            return None
        return next(
            (
                t
                for t, exact_text in zip(texts, exact, strict=True)
                if exact_text not in known_texts
            ),
            texts[0],
        )


def _runs(labelled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where each run of labels begins and ends, (runs, 2)."""
    return np.flatnonzero(np.diff(labelled, prepend=False, append=False)).reshape(-1, 2)


def has(stream: TokenStream, document: Encoded) -> bool:
    """Return whether a stream has a document, with the same labels."""
    for index in np.flatnonzero(stream.lengths == len(document.ids)):
        place = slice(stream.starts[index], stream.starts[index + 1])
        if np.array_equal(stream.tokens[place], document.ids):
            return stream.labelled is None or np.array_equal(
                stream.labelled[place], document.labels
            )
    return False
