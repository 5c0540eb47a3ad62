"""Sources of documents: a source is a list of files, which are read as a stream of documents (`Piece`).

    source            a piece is                          its name
    python-stdlib     a *.py file of the interpreter      path in the library: json/decoder.py
    a folder, a glob  a *.py, *.txt or *.md file          path in the folder
                      a record of a file of records       as below
    file of records   the text of one record              text-<16 hex digits of its sha256>
                      a conversation                      chat-<16 hex digits> of its content
    any other file    a passage of at least 4 KiB         <file name>#<ordinal>

Names decide which split a document is in, so they never contain an absolute path, and a record
(`engine.data.records`) is named after its content: inserting one renames no other, and equal ones are in one split,
whichever files they are in. A passage ends at the first blank line past 4 KiB, or at the first line end past 8 KiB;
the passages of a file, concatenated, are the file.

A folder holds either text or records. A folder with a text file other than README.md is a folder of text: files of
records in it are reported as left out, and .json files do not count as text. A folder without one, or any folder if
columns are named, is a folder of records. Its .json files are read only if it has no other files of records, because
next to other files they usually describe the data. A glob reads the folder that it begins in, but only the files that
match: `data/*.parquet`, `src/**/*.py`, with `*`, `?` and `[ab]` in a name and `**` for any folders.

Listing holds one text at a time (of a JSON list, its file), so a source may be larger than memory if callers do not
keep the texts of its pieces.

The following are left out, and each is reported as a `Skipped`: invalid records, empty files and texts, links to
folders (they can loop), hidden files and folders (.git, .venv), and, in the standard library only, files that are not
UTF-8 and the two kinds that are made for one machine: `_sysconfigdata*` by the build of the interpreter,
`sitecustomize.py` by a distribution. Files of other kinds, caches, and the library's tests and installed packages are
left out without a report. Anything else that cannot be read raises a CorpusError.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from engine import limits
from engine.data import records
from engine.data.left_out import Skipped
from engine.data.records import (
    TEXT_SUFFIXES,
    DataFile,
    decoded,
    has_record_suffix,
    open_stream,
    read_records,
    recognise,
    refuse_size,
    refuse_unreadable,
    shown,
    unusable,
)
from engine.errors import CorpusError
from engine.files import open_regular

STDLIB = "python-stdlib"
PASSAGE_BYTES = 4096

_KINDS = ".py, .txt, .md, .jsonl, .json, .parquet, or .jsonl and .json with .gz or .zst"
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_LOCAL_FILES = ("_sysconfigdata", "sitecustomize")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a source, found but not opened."""

    path: Path
    name: str
    """Prefix of its documents' names: the file's name, or its path in the folder."""
    kind: Literal["text", "records", "alone"]
    """`text` is one document and `records` a file of records. `alone` is a source of one file;
    its first bytes decide how it is read."""
    may_skip: bool = False
    """Whether a file that is not UTF-8 is left out instead of refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One document."""

    name: str
    text: str
    """The text, or the JSON of a conversation's record."""
    size_bytes: int
    """Size of the text in UTF-8."""
    digest: int
    """First 64 bits of the SHA-256 of the text."""
    is_chat: bool = False
    """Whether it is a conversation."""
    place: str = ""
    """File and line of a record; empty for a document that is not a record."""
    remark: str = ""
    """Warning about a part of the record that is not read although the user may expect it; empty for none."""


def _read_document(path: Path) -> bytes:
    limit = limits.CORPUS_DOCUMENT.most
    with open_regular(path, "corpus", error=CorpusError) as file:
        try:
            # A huge sparse file is refused by its size, before anything is read.
            if os.fstat(file.fileno()).st_size > limit or len(raw := file.read(limit + 1)) > limit:
                refuse_size(path, limits.CORPUS_DOCUMENT)
        except OSError as error:
            refuse_unreadable(path, error)
    return raw


def list_pieces(
    source: str, *, include_tests: bool = False, columns: Sequence[str] = ()
) -> Iterator[Piece | Skipped]:
    """Yield every document of `source`. Raises CorpusError at the first problem.

    The order is that of the file system's walk and carries no meaning. `include_tests` applies only to
    `python-stdlib`, and `columns` (one or two names) to records.
    """
    size = 0
    columns = tuple(columns)
    files = list_files(source, include_tests=include_tests, columns=columns)
    listed = (
        item
        for file in files
        for item in ((file,) if isinstance(file, Skipped) else _pieces(file, columns))
    )
    most_pieces, most_text = limits.CORPUS_PIECES.most, limits.CORPUS_TEXT.most
    for count, item in enumerate(listed, start=1):
        size += item.size_bytes if isinstance(item, Piece) else 0
        if count > most_pieces or size > most_text:
            limit = limits.CORPUS_PIECES if count > most_pieces else limits.CORPUS_TEXT
            raise unusable(shown(source), str(limit), "more")
        yield item


def list_files(
    source: str, *, include_tests: bool = False, columns: tuple[str, ...] = ()
) -> Iterator[SourceFile | Skipped]:
    """Yield the files of `source`, and a Skipped for those left out. Raises CorpusError at the first problem."""
    if source == STDLIB:
        _refuse_columns(source, columns)
        yield from _library(Path(sysconfig.get_path("stdlib")), include_tests)
        return
    # Path("") is the current folder, which an empty setting never means.
    if not source:
        raise unusable("''", f"a folder, a file or {STDLIB}", "an empty name")
    path = Path(source)
    if glob.has_magic(source) and not os.path.lexists(path):
        yield from _glob(source, columns)
    elif stat.S_ISDIR(_stat(path).st_mode):
        yield from _folder(path, columns)
    else:
        yield SourceFile(path=path, name=_utf8_name(path.name, path), kind="alone")


def _pieces(source_file: SourceFile, columns: tuple[str, ...]) -> Iterator[Piece | Skipped]:
    if _stat(source_file.path).st_size == 0:
        # A FIFO or a file of procfs looks empty; opening it says what it is.
        open_regular(source_file.path, "corpus", error=CorpusError).close()
        yield Skipped(name=source_file.name, reason="empty")
    elif source_file.kind == "text":
        yield _whole_file(source_file)
    else:
        file = recognise(source_file.path, source_file.name, columns)
        if file.kind == "text":
            _refuse_columns(str(source_file.path), columns)
            yield from _passages(file)
        else:
            yield from _records(file)


def _whole_file(file: SourceFile) -> Piece | Skipped:
    raw = _read_document(file.path)
    if file.may_skip:
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            return Skipped(name=file.name, reason=f"not UTF-8 at byte {error.start:,}")
    text = decoded(raw, shown(file.path), 0)
    return Piece(name=file.name, text=text, size_bytes=len(raw), digest=hash_of(raw))


def hash_of(text: bytes) -> int:
    """Return the first 64 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def column_names(setting: str) -> tuple[str, ...]:
    """Read `data.columns`: no name, one name, or two comma-separated names. Raises CorpusError."""
    names = tuple(name.strip() for name in setting.split(",")) if setting else ()
    if len(names) > 2 or not all(names) or len(set(names)) < len(names):
        raise unusable(
            "data.columns",
            "one name, or two comma-separated names, as in question,answer",
            ascii(setting)[:200],
        )
    return names


def _refuse_columns(source: str, columns: tuple[str, ...]) -> None:
    if columns:
        names = ",".join(columns)
        raise unusable(
            shown(source),
            f"records, because data.columns is {shown(names)}",
            "text",
            hint="leave data.columns out",
        )


def _library(root: Path, include_tests: bool) -> Iterator[SourceFile | Skipped]:
    if not root.is_dir():
        raise unusable(STDLIB, f"the standard library at {shown(root)}", "no such folder")
    left_out = _NOT_LIBRARY if include_tests else _NOT_LIBRARY | _TEST_FOLDERS
    for folder, folders, files in os.walk(root, onerror=_refuse_walk):
        folders[:] = sorted(
            name for name in folders if name not in left_out and not name.startswith("config-")
        )
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix != ".py":
                continue
            if file.startswith(_LOCAL_FILES):
                yield Skipped(name=_name(path, root), reason="made for one machine")
            else:
                yield SourceFile(path=path, name=_name(path, root), kind="text", may_skip=True)


def _glob(pattern: str, columns: tuple[str, ...]) -> Iterator[SourceFile | Skipped]:
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    if not stat.S_ISDIR(_stat(root).st_mode):
        raise unusable(shown(pattern), f"a folder at {shown(root)}", "a file")
    yield from _folder(root, columns, parts[fixed:])


def _folder(
    root: Path, columns: tuple[str, ...], glob_parts: Sequence[str] = ()
) -> Iterator[SourceFile | Skipped]:
    """Yield the files of a folder, or those that match a glob."""
    has_text, has_tables = _kinds_in(root, glob_parts)
    is_text = has_text and not columns
    other_kinds = taken = 0
    for path in _walk(root, glob_parts):
        if isinstance(path, Skipped):
            yield path
            continue
        is_record, is_json = has_record_suffix(path.name), path.suffix == ".json"
        if (not is_record and path.suffix not in TEXT_SUFFIXES) or (is_text and is_json):
            other_kinds += 1
            continue
        reason = ""
        if path.name.startswith("."):
            reason = "hidden file"
        elif is_text and is_record:
            reason = "records in a folder of text: a glob takes them"
        elif not is_text and not is_record:
            reason = "text in a folder of records"
        elif not is_text and has_tables and is_json:
            reason = "a .json file in a folder of records"
        if reason:
            yield Skipped(name=_name(path, root), reason=reason)
            continue
        taken += 1
        kind: Literal["text", "records"] = "records" if is_record else "text"
        yield SourceFile(path=path, name=_name(path, root), kind=kind)
    if not taken:
        if has_text:
            _refuse_columns(str(root), columns)
        raise unusable(
            shown(root.joinpath(*glob_parts)),
            f"files that {'match and ' if glob_parts else ''}end in {_KINDS}",
            f"none ({other_kinds:,} of other kinds)",
            hint="give a text file with another ending by its own path",
        )


def _kinds_in(root: Path, glob_parts: Sequence[str]) -> tuple[bool, bool]:
    """Return whether the folder is one of text, and whether it has files of records other than .json."""
    has_text = has_readme = has_tables = False
    for path in _walk(root, glob_parts):
        if isinstance(path, Skipped) or path.name.startswith("."):
            continue
        if path.suffix in TEXT_SUFFIXES:
            has_readme |= path.name == "README.md"
            has_text |= path.name != "README.md"
        else:
            has_tables |= has_record_suffix(path.name) and path.suffix != ".json"
        if has_text and has_tables:
            break
    return has_text or (has_readme and not has_tables), has_tables


def _walk(root: Path, glob_parts: Sequence[str] = ()) -> Iterator[Path | Skipped]:
    """Yield the files below a folder, or those that match a glob, and the folders that are left out."""
    for folder, folders, files in os.walk(root, onerror=_refuse_walk):
        for name in sorted(folders):
            path = Path(folder, name)
            if glob_parts:
                continue
            if name.startswith("."):
                yield Skipped(name=_name(path, root), reason="hidden folder")
            elif path.is_symlink():
                yield Skipped(name=_name(path, root), reason="link to a folder")
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        for name in sorted(files):
            path = Path(folder, name)
            if not glob_parts or _matches(glob_parts, path.relative_to(root).parts):
                yield path


def _matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the parts of a glob match those of a path; `**` is any number of folders, and at the end everything."""
    if not parts or not names:
        return not parts and not names
    if parts[0] == "**":
        return len(parts) == 1 or any(_matches(parts[1:], names[n:]) for n in range(len(names)))
    return fnmatch.fnmatchcase(names[0], parts[0]) and _matches(parts[1:], names[1:])


def _records(file: DataFile) -> Iterator[Piece | Skipped]:
    is_empty = True
    for record in read_records(file):
        is_empty = False
        if isinstance(record, Skipped):
            yield record
            continue
        text = record.text
        if not text:
            key = file.columns[0] if file.columns else "text"
            yield Skipped(name=record.place, reason=f'empty "{key}"')
            continue
        encoded = text.encode()
        digest = hash_of(encoded)
        yield Piece(
            name=record.chat_name or f"text-{digest:016x}",
            size_bytes=len(encoded),
            text=text,
            digest=digest,
            is_chat=bool(record.chat_name),
            place=record.place,
            remark=record.remark,
        )
    if is_empty:
        yield Skipped(name=file.name, reason="no records")


def _passages(file: DataFile) -> Iterator[Piece | Skipped]:
    ordinal = start = size = 0
    raw_lines: list[bytes] = []

    def passage() -> Piece:
        raw = b"".join(raw_lines)
        text = decoded(raw, file.where, start)
        name = f"{file.name}#{ordinal:06d}"
        return Piece(name=name, size_bytes=size, text=text, digest=hash_of(raw))

    with open_stream(file) as stream:
        for raw in records.lines(file, stream):
            assert isinstance(raw, bytes)
            raw_lines.append(raw)
            size += len(raw)
            # A line feed is never inside a longer UTF-8 sequence, so a cut after one splits no
            # character.
            if size >= 2 * PASSAGE_BYTES or (size >= PASSAGE_BYTES and not raw.strip()):
                yield passage()
                ordinal, start, size = ordinal + 1, start + size, 0
                raw_lines.clear()
    if raw_lines:
        yield passage()
    if start + size == 0:
        yield Skipped(name=file.name, reason="empty")


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = "a broken link" if path.is_symlink() else "nothing there"
        raise unusable(shown(path), f"a folder, a file or {STDLIB}", found) from None
    except (OSError, ValueError) as error:
        refuse_unreadable(path, error)


def _refuse_walk(error: OSError) -> NoReturn:
    refuse_unreadable(Path(error.filename), error)


def _name(path: Path, root: Path) -> str:
    return _utf8_name(path.relative_to(root).as_posix(), path)


def _utf8_name(name: str, path: Path) -> str:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise unusable(
            shown(path),
            "a file name in UTF-8",
            "other bytes in it",
            hint="rename the file",
        ) from None
    return name
