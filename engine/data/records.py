"""Files of records: JSON and Parquet, plain or compressed, and the documents in them.

    what a file holds                     its name                     its first bytes
    JSON, one record per line             .jsonl .json                 any but [
    JSON, a list of records               .json .jsonl                 [
    a table in Parquet, one row at a time .parquet                     PAR1
    text                                  any other
    any but Parquet, compressed           another name and .gz .zst    1f 8b (gzip), 28 b5 2f fd (zstd)

Compression and Parquet are recognised by the first bytes alone, JSON by the name.

A record is a text or a conversation:

    {"text": "..."}                                        a text
    a record with "messages" or another form               a conversation (`engine.data.conversations`), also where
    of a conversation                                      it also has a "text"
    columns "question,answer" are named                    a prompt and a completion
    one column is named                                    a text, or a list of messages

**An invalid record is left out**, with its file and line, and the others are read. Invalid are

    a line that is not JSON or not UTF-8
    nesting that is too deep
    NaN, an infinity or a lone surrogate in a conversation, a lone surrogate in a text
    a record over the size limit, or without a named column, or of an unknown form

Code that reads a record later can rely on this. A fault of the whole file, such as a JSON list that is cut off, raises
a CorpusError.

Reading holds one record in memory at a time, for Parquet the pages of one row in the columns that are needed, and for
a JSON list all of it. Compressed bytes are decompressed as a stream, and their decompressed size
counts towards the limit of a corpus. Byte positions in messages are those of the decompressed bytes.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from engine import limits
from engine.data.conversations import (
    LONE_SURROGATE,
    BadRecord,
    bad_record,
    is_conversation,
    read_conversation,
)
from engine.data.left_out import Skipped
from engine.errors import CorpusError
from engine.files import open_regular

TEXT_SUFFIXES = (".py", ".txt", ".md")
CHAT_KEYS = frozenset({"messages", "conversations", "completion"})
"""Keys of a conversation; a record or table that holds conversations has at least one of them."""
TEXT_NOT_READ = 'the "text" of a record with a conversation is not read'
_CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "system")
RECORD_HINT = (
    'a record has "text", "messages", "conversations", or "prompt" and "completion"; '
    'name other keys: data.columns = "question,answer" for prompt and completion, or one name for the text'
)
_WANTED = 'a JSON object with a string "text", or a conversation'
_INSTALL = 'pip install "apr-workbench[data]"'
_UTF8_HINT = "convert it to UTF-8, or leave it out of the corpus"

_BOM = codecs.BOM_UTF8
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_ROWS_AT_ONCE = 1
"""Rows of Parquet decoded at a time. Decoding one row at a time costs 10 microseconds more per row, but bounds memory
by one long row."""
_READ_AT_ONCE = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a corpus, recognised but not read."""

    path: Path
    name: str
    """Prefix of its documents' names: the file's name, or its path in the folder."""
    kind: Literal["text", "json", "parquet"]
    compression: Literal["", "gzip", "zstd"] = ""
    columns: tuple[str, ...] = ()
    """Columns that the user names; empty if they are detected."""
    where: str = field(init=False)
    """The path, printable, for messages."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", shown(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    place: str
    """File, and the line, list index or row number."""
    chat_name: str
    """`chat-` and a hash of the conversation's content; empty for a text."""
    text: str
    """The text, or a conversation as JSON."""
    remark: str = ""
    """Warning about a part of the record that is not read although the user may expect it; empty for none."""


def has_record_suffix(name: str) -> bool:
    """Return whether a file's name has an ending of record files."""
    return _kind_of_name(name) != "text"


def _kind_of_name(name: str) -> Literal["text", "json", "parquet"]:
    stem, suffix = os.path.splitext(name)
    if suffix in _COMPRESSED_SUFFIXES:
        suffix = os.path.splitext(stem)[1]
    if suffix in (".jsonl", ".json"):
        return "json"
    return "parquet" if suffix == ".parquet" else "text"


def recognise(path: Path, name: str, columns: tuple[str, ...] = ()) -> DataFile:
    """Recognise a regular file. Raises CorpusError if it cannot be read, is larger than a file of a corpus may be, or
    has the name of a Parquet file (.parquet, also with .gz or .zst) and does not begin with PAR1."""
    with _opened(path) as file, _readable(shown(path)):
        if os.fstat(file.fileno()).st_size > limits.CORPUS_FILE.most:
            refuse_size(path, limits.CORPUS_FILE)
        head = file.read(4)
    detected = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
    kind = "parquet" if detected == "parquet" else _kind_of_name(path.name)
    if kind == "parquet" and detected != kind:
        raise unusable(
            shown(path),
            "a Parquet file, which begins with PAR1",
            f"a {detected} file" if detected else "another file",
            hint="decompress it" if detected else "rename the file to match its content",
        )
    return DataFile(
        path=path,
        name=name,
        kind=kind,
        compression="gzip" if detected == "gzip" else "zstd" if detected == "zstd" else "",
        columns=columns,
    )


def read_records(file: DataFile) -> Iterator[Record | Skipped]:
    """Yield every record of a file of JSON or Parquet, and a Skipped for each invalid one.

    Raises CorpusError for a fault of the file.
    """
    if file.kind == "parquet":
        for number, row in _rows(file):
            yield _record_or_skipped(_record_of_value, file, f"row {number:,}", row)
        return
    with open_stream(file) as stream:
        begin = stream.peek(len(_BOM))[: len(_BOM)]
        start = len(stream.read(len(_BOM))) if begin == _BOM else 0
        if _begins_list(stream):
            yield from _elements(file, stream, start)
            return
        for number, raw in enumerate(lines(file, stream, skip_long=True), start=1):
            place = f"line {number:,}"
            if isinstance(raw, int):
                yield _record_or_skipped(_refuse_long, file, place, start)
                start += raw
                continue
            if raw.strip():
                yield _record_or_skipped(_parse_record, file, place, raw, start)
            start += len(raw)


def _record_or_skipped(
    read: Callable[..., Record], file: DataFile, place: str, *arguments: Any
) -> Record | Skipped:
    """Return the result of `read`, or a Skipped that holds the BadRecord it raised."""
    try:
        return read(file, place, *arguments)
    except BadRecord as error:
        return Skipped(name=f"{file.name} {place}", reason=error.reason, fault=error)


def _begins_list(stream: io.BufferedReader) -> bool:
    """Return whether the first byte that is no white space is [; only buffered bytes are checked."""
    return stream.peek(1).lstrip()[:1] == b"["


def _refuse_long(file: DataFile, place: str, start_byte: int | None = None) -> NoReturn:
    limit = limits.CORPUS_DOCUMENT
    where = f"{file.where} {place}"
    if start_byte is not None:
        where += f", byte {start_byte:,}"
    bad_record(where, f"{limit.what} of {limit}", "more", what="corpus")


def _parse_record(file: DataFile, place: str, raw: bytes, start_byte: int) -> Record:
    """Parse the JSON of one record, which begins at `start_byte`."""
    where = f"{file.where} {place}"
    raw = raw.rstrip(b"\r\n")
    try:
        source = raw.decode("utf-8")
        record = json.loads(source)
    except UnicodeDecodeError as error:
        bad_record(
            f"{where}, byte {start_byte + error.start:,}",
            "UTF-8 text",
            f"0x{raw[error.start]:02x} ({error.reason})",
            hint=_UTF8_HINT,
            reason="not UTF-8",
            what="corpus",
        )
    except json.JSONDecodeError as error:
        byte = start_byte + len(source[: error.pos].encode("utf-8"))
        hint = None
        if file.path.suffix == ".json" or ".json." in file.path.name:
            hint = "a .json file holds a list of records, or one record per line"
        bad_record(f"{where}, byte {byte:,}", _WANTED, error.msg, hint=hint, what="corpus")
    except (ValueError, RecursionError) as error:
        found = _parser_message(error)
        bad_record(f"{where}, byte {start_byte:,}", _WANTED, found, what="corpus")
    return _content(file, place, f"{where}, byte {start_byte:,}", record, source)


def _parser_message(error: Exception) -> str:
    # An integer of thousands of digits is a plain ValueError, and deep nesting exhausts the parser.
    return "nesting too deep" if isinstance(error, RecursionError) else str(error)


def _content(file: DataFile, place: str, where: str, record: Any, source: str) -> Record:
    """Return the text or conversation of a parsed record. `source` is the JSON of the record."""
    if not isinstance(record, dict):
        bad_record(where, _WANTED, f"JSON of type {_type(record)}", what="corpus")
    place = f"{file.name} {place}"
    key, remark = "text", ""
    if columns := file.columns:
        _refuse_absent(columns, list(record), where)
        key = columns[0]
        if len(columns) == 2:
            names = dict(zip(("prompt", "completion"), columns, strict=True))
            return _named_chat(names, record, where, place)
        if isinstance(record[key], list):
            return _named_chat({"conversations": key}, record, where, place)
    elif is_conversation(record) or "text" not in record:
        if CHAT_KEYS.isdisjoint(record):
            found = f"an object with {_list_names(record)}"
            bad_record(where, _WANTED, found, hint=RECORD_HINT, what="corpus")
        if "text" in record:
            remark = TEXT_NOT_READ
        chat = read_conversation(record, where)
        return Record(place=place, chat_name=chat.name, text=source.strip(), remark=remark)
    text = record[key]
    if not isinstance(text, str):
        expected = f"text or messages in {json.dumps(key)}" if columns else _WANTED
        found = f"a {json.dumps(key)} of type {_type(text)}"
        bad_record(where, expected, found, what="corpus")
    try:
        # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start:,}"
        expected = f"Unicode text in {json.dumps(key)}"
        bad_record(where, expected, found, reason=LONE_SURROGATE, what="corpus")
    return Record(place=place, chat_name="", text=text)


def _named_chat(
    names: Mapping[str, str], record: Mapping[str, Any], where: str, place: str
) -> Record:
    """Return the conversation in the columns that the user names. `names` maps the keys of a conversation to these
    columns."""
    chat = {key: record[column] for key, column in names.items()}
    chat |= {key: record[key] for key in ("tools", "system") if record.get(key) is not None}
    name = read_conversation(chat, where).name
    return Record(place=place, chat_name=name, text=_as_json(chat, where))


def _as_json(record: object, where: str) -> str:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(record)
    except (TypeError, ValueError, RecursionError) as error:
        expected = "a conversation of texts and numbers"
        bad_record(where, expected, str(error), what="corpus")
    return text


def _refuse_absent(columns: Sequence[str], present: Sequence[str], where: str) -> None:
    absent = [name for name in columns if name not in present]
    if absent:
        bad_record(
            where,
            f"the column {json.dumps(absent[0])} that data.columns names",
            _list_names(present),
            hint="data.columns takes one or two of these",
            what="corpus",
        )


def _list_names(names: Sequence[str] | Mapping[str, Any]) -> str:
    listed = list(names)
    rest = f" and {len(listed) - 5:,} more" if len(listed) > 5 else ""
    return (", ".join(ascii(name)[:80] for name in listed[:5]) or "no keys") + rest


# A list of JSON


def _elements(file: DataFile, stream: IO[bytes], start: int) -> Iterator[Record | Skipped]:
    """Yield the records of one JSON list, which begins at byte `start`. All of it is held in memory."""
    text = decoded(stream.read(), file.where, start)
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        where, message = file.where, _parser_message(error)
        if isinstance(error, json.JSONDecodeError):
            byte = start + len(text[: error.pos].encode())
            where, message = f"{where}, byte {byte:,}", error.msg
        raise unusable(where, "a JSON list of records", message) from None
    for number, record in enumerate(records, start=1):
        yield _record_or_skipped(_record_of_value, file, f"record {number:,}", record)


def _record_of_value(file: DataFile, place: str, value: Any) -> Record:
    """Return the record in a value that is parsed already."""
    where = f"{file.where} {place}"
    is_chat = isinstance(value, dict) and not file.columns and is_conversation(value)
    result = _content(file, place, where, value, _as_json(value, where) if is_chat else "")
    if len(result.text.encode()) > limits.CORPUS_DOCUMENT.most:
        _refuse_long(file, place)
    return result


# Parquet


def _rows(file: DataFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table with their number, each with the columns that are needed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise unusable(
            file.where, "pyarrow, which reads Parquet", "it is not installed", hint=_INSTALL
        ) from None
    with _opened(file.path) as raw:
        try:
            table = pyarrow.parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
            needed = _columns(file, table.schema_arrow.names)
            batches = table.iter_batches(_ROWS_AT_ONCE, columns=needed, use_threads=False)
            for number, batch in enumerate(batches, start=1):
                # A table has a column for every key of any row; a row without the key has null there.
                yield number, _plain(batch.to_pylist()[0])
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
            message = " ".join(str(error).split())[:200]
            raise unusable(file.where, "a complete Parquet file", message) from None


def _columns(file: DataFile, present: list[str]) -> list[str]:
    if file.columns:
        _refuse_absent(file.columns, present, file.where)
        return list(
            dict.fromkeys([*file.columns, *(n for n in ("tools", "system") if n in present)])
        )
    if CHAT_KEYS.isdisjoint(present):
        if "text" in present:
            return ["text"]
        raise unusable(
            file.where, "a column of texts or conversations", _list_names(present), hint=RECORD_HINT
        )
    return [name for name in (*_CHAT_COLUMNS, "text") if name in present]


def _plain(value: Any) -> Any:
    """Return a value with each Arrow map (a list of pairs) as a dictionary, and without the entries of structs that are
    null. Nulls in lists and maps are kept."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items() if child is not None}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(child, tuple) for child in value):
        return {key: _plain(child) for key, child in value}
    return [_plain(child) for child in value]


# Bytes


def open_stream(file: DataFile) -> io.BufferedReader:
    """Open a file for its bytes, decompressed."""
    raw = _opened(file.path)
    if not file.compression:
        return raw
    if file.compression == "gzip":
        return io.BufferedReader(_Stream(file, raw, gzip.GzipFile(fileobj=raw)), _READ_AT_ONCE)
    try:
        import pyarrow
    except ImportError:
        raw.close()
        raise unusable(
            file.where, "pyarrow, which reads .zst", "it is not installed", hint=_INSTALL
        ) from None
    decompressed = pyarrow.CompressedInputStream(raw, "zstd")
    return io.BufferedReader(_Stream(file, raw, decompressed), _READ_AT_ONCE)


class _Stream(io.RawIOBase):
    """The bytes of a compressed file, with its errors as CorpusErrors."""

    def __init__(self, file: DataFile, raw: IO[bytes], decompressor: Any) -> None:
        self._file, self._raw, self._decompressor = file, raw, decompressor
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._decompressor.read(len(buffer))
        except (EOFError, zlib.error, OSError) as error:
            # Only an error of the disk has an errno; the others come from gzip or zstd.
            if isinstance(error, OSError) and error.errno:
                refuse_unreadable(self._file.path, error)
            where = f"{self._file.where}, decompressed byte {self._size:,}"
            raise unusable(where, f"a complete {self._file.compression} file", str(error)) from None
        buffer[: len(data)] = data
        self._size += len(data)
        if self._size > limits.CORPUS_TEXT.most:
            refuse_size(self._file.path, limits.CORPUS_TEXT)
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()


def lines(
    file: DataFile, stream: io.BufferedReader, *, skip_long: bool = False
) -> Iterator[bytes | int]:
    """Yield the lines of a stream, each with its line end. For a line longer than the limit of a document, yield its
    length if `skip_long`, else raise CorpusError."""
    limit = limits.CORPUS_DOCUMENT.most
    with _readable(file.where):
        if not file.compression and os.fstat(stream.fileno()).st_size <= limit:
            yield from stream  # no line is longer than its file
            return
        while line := stream.readline(limit + 1):
            if len(line) <= limit:
                yield line
                continue
            if not skip_long:
                refuse_size(file.path, limits.CORPUS_DOCUMENT)
            length = len(line)
            while line and not line.endswith(b"\n"):
                line = stream.readline(_READ_AT_ONCE)
                length += len(line)
            yield length


def _opened(path: Path) -> io.BufferedReader:
    return open_regular(path, "corpus", error=CorpusError)


@contextmanager
def _readable(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unusable(where, "a readable file", error.strerror or str(error)) from error


def decoded(raw: bytes, where: str, start_byte: int) -> str:
    """Decode strict UTF-8; `start_byte` is the position of the first byte in its file."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise unusable(
            f"{where}, byte {start_byte + error.start:,}",
            "UTF-8 text",
            f"0x{raw[error.start]:02x} ({error.reason})",
            hint=_UTF8_HINT,
        ) from None


# Errors


def unusable(where: str, expected: str, found: str, *, hint: str | None = None) -> CorpusError:
    return CorpusError.expected("corpus", where, expected, found, hint=hint)


def refuse_size(path: Path, limit: limits.Limit) -> NoReturn:
    raise unusable(
        shown(path),
        f"{limit.what} of {limit}",
        "more",
        hint="cut it into more files, or into lines",
    )


def refuse_unreadable(path: Path, error: OSError | ValueError) -> NoReturn:
    # The interpreter raises ValueError for a path that contains a NUL.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise unusable(shown(path), "a readable file", reason) from error


def shown(path: Path | str) -> str:
    """Return a path as one printable line, whatever characters it contains."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _type(value: object) -> str:
    return "null" if value is None else type(value).__name__
