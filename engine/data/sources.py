"""Sources of documents: a source is listed as `Piece`s, each of which is read only when needed.

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

A folder of text and a folder of records are told apart. With a text file beside README.md it is one of text: files
of records in it are reported as left out, and .json files are no text. Without one, or where columns are named, it is
one of records, and .json files in it are read where there are no others: beside others they describe the data. A glob
is the folder that it begins in, with only the files that match: `data/*.parquet`, `src/**/*.py`, with `*`, `?` and
`[ab]` in a name and `**` for any folders.

Listing reads no text file of a folder, and holds one record or line of a file at a time, so a source may be larger
than memory. It decompresses and parses every record once; `Reader` does so once more for what is read in the order
of the file, and from the beginning of the file for each step back.

The following are left out on purpose, and each is reported as a `Skipped`: empty files and texts, links
to folders (they can loop), hidden files and folders (.git, .venv), and, in the standard library only,
files that are not UTF-8 and the two kinds that are made for one machine: `_sysconfigdata*` by the build
of the interpreter, `sitecustomize.py` by a distribution. Files of other kinds, caches, and the library's
tests and installed packages are left out without a report. Anything else that cannot be read is a
CorpusError.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import io
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from engine import limits
from engine.data import records
from engine.data.records import (
    TEXT_SUFFIXES,
    DataFile,
    Record,
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
_SPECIAL_FILES = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Something in a source that is left out of the corpus."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One document that has been found but not read."""

    name: str
    file: DataFile
    size_bytes: int
    """Size of the text in UTF-8."""
    start_byte: int = 0
    end_byte: int | None = None
    """Where the piece ends in its file, decompressed; None for a whole file."""
    record: int | None = None
    """Number, from 1, of a line, an element of a list or a row; None when the bytes are the text."""
    may_skip: bool = False
    """Whether bytes that are not UTF-8 are skipped instead of refused."""
    is_chat: bool = False
    """Whether it is a conversation; its text is then the JSON of its record."""

    def read(self) -> str | Skipped:
        """Return the text, decoded as strict UTF-8. Raises CorpusError when it cannot be read.

        For more than one piece of a file a `Reader` is faster."""
        with Reader() as reader:
            return reader.read(self)


class Reader:
    """Reads pieces, and keeps the file of the last one open.

    Pieces that come in the order of their file cost one pass over it. A step back costs nothing in a file that is
    read by position; one that is compressed is decompressed from its beginning, and the row group of a row is decoded
    from its own."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._file: DataFile | None = None
        self._stream: io.BufferedReader | None = None
        self._at = 0
        """Byte of the stream, or the last row that was read."""
        self._rows: Iterator[Record] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, piece: Piece) -> str | Skipped:
        """Return the text of a piece, decoded as strict UTF-8. Raises CorpusError when it cannot be read."""
        if piece.file.kind == "parquet":
            return self._row(piece)
        raw = self._bytes(piece)
        if piece.record is not None:
            return records.record_of(piece.file, raw, piece.record, piece.start_byte).text
        if piece.may_skip:
            try:
                return raw.decode("utf-8")
            except UnicodeDecodeError as error:
                return Skipped(name=piece.name, reason=f"not UTF-8 at byte {error.start:,}")
        return decoded(raw, piece.file.where, piece.start_byte)

    def _close(self) -> None:
        self._open.close()
        self._file = self._stream = None
        self._rows, self._at = iter(()), 0

    def _row(self, piece: Piece) -> str:
        assert piece.record is not None
        if piece.file is not self._file or piece.record <= self._at:
            self._close()
            self._file = piece.file
            self._rows = records.read_rows(piece.file, start=piece.record)
        for row in self._rows:
            self._at = row.number
            if row.number == piece.record:
                return row.text
        raise unusable(
            piece.file.where, f"row {piece.record:,}", f"{self._at:,} rows: the file has changed"
        )

    def _bytes(self, piece: Piece) -> bytes:
        file, most = piece.file, limits.CORPUS_DOCUMENT.most
        size = most + 1 if piece.end_byte is None else piece.end_byte - piece.start_byte
        is_behind = bool(file.compression) and piece.start_byte < self._at
        if self._stream is None or file is not self._file or is_behind:
            self._close()
            self._stream, self._file = self._open.enter_context(open_stream(file)), file
        try:
            if file.compression:
                while self._at < piece.start_byte:
                    skipped = self._stream.read(min(piece.start_byte - self._at, 1 << 20))
                    self._at += len(skipped)
                    if not skipped:
                        break
            else:
                self._stream.seek(piece.start_byte)
                # A huge sparse file is refused by its size, before anything is read.
                if piece.end_byte is None and os.fstat(self._stream.fileno()).st_size > most:
                    refuse_size(file.path, limits.CORPUS_DOCUMENT)
            raw = self._stream.read(size)
        except OSError as error:
            refuse_unreadable(file.path, error)
        self._at += len(raw)
        if len(raw) > most:
            refuse_size(file.path, limits.CORPUS_DOCUMENT)
        return raw


def list_pieces(
    source: str, *, include_tests: bool = False, columns: Sequence[str] = ()
) -> Iterator[Piece | Skipped]:
    """Yield every document of `source`. Raises CorpusError at the first problem.

    The order is that of the file system's walk and carries no meaning. `include_tests` applies only to
    `python-stdlib`, and `columns` (one or two names) to records.
    """
    size = 0
    listed = _listed(source, include_tests=include_tests, columns=tuple(columns))
    for count, item in enumerate(listed, start=1):
        size += item.size_bytes if isinstance(item, Piece) else 0
        for found, limit in ((count, limits.CORPUS_PIECES), (size, limits.CORPUS_TEXT)):
            if found > limit.most:
                raise unusable(shown(source), str(limit), "more")
        yield item


def _listed(
    source: str, *, include_tests: bool, columns: tuple[str, ...]
) -> Iterator[Piece | Skipped]:
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
        return
    mode = _stat(path).st_mode
    if stat.S_ISDIR(mode):
        yield from _folder(path, columns)
        return
    _refuse_special(path, mode)
    if path.stat().st_size == 0:
        # A file of procfs looks empty; opening it says what it is.
        open_regular(path, "corpus", error=CorpusError).close()
        yield Skipped(name=_utf8_name(path.name, path), reason="empty")
        return
    file = recognise(path, _utf8_name(path.name, path), columns)
    if file.kind == "text":
        _refuse_columns(source, columns)
        yield from _passages(file)
    else:
        yield from _records(file)


def column_names(setting: str) -> tuple[str, ...]:
    """Read `data.columns`: no name, one, or two with a comma between them. Raises CorpusError."""
    names = tuple(name.strip() for name in setting.split(",")) if setting else ()
    if len(names) > 2 or not all(names) or len(set(names)) < len(names):
        raise unusable(
            "data.columns",
            "one name, or two with a comma between them, as in question,answer",
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


def _library(root: Path, include_tests: bool) -> Iterator[Piece | Skipped]:
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
                yield _whole_file(path, root, may_skip=True)


def _glob(pattern: str, columns: tuple[str, ...]) -> Iterator[Piece | Skipped]:
    parts = Path(pattern).parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    if not stat.S_ISDIR(_stat(root).st_mode):
        raise unusable(shown(pattern), f"a folder at {shown(root)}", "a file")
    yield from _folder(root, columns, parts[fixed:])


def _folder(
    root: Path, columns: tuple[str, ...], glob_parts: Sequence[str] = ()
) -> Iterator[Piece | Skipped]:
    """Yield what a folder holds, or the files in it that match a glob."""
    has_text, has_tables = _kinds_in(root, glob_parts)
    is_text = has_text and not columns
    others = found = 0
    for path in _walk(root, glob_parts):
        if isinstance(path, Skipped):
            yield path
            continue
        is_record, is_json = has_record_suffix(path.name), path.suffix == ".json"
        if (not is_record and path.suffix not in TEXT_SUFFIXES) or (is_text and is_json):
            others += 1
            continue
        reason = ""
        if path.name.startswith("."):
            reason = "hidden file"
        elif is_text and is_record:
            reason = "records in a folder of text: a glob takes them"
        elif not is_text and not is_record:
            reason = "text in a folder of records"
        elif not is_text and has_tables and is_json:
            reason = "JSON that is no .jsonl, in a folder of records"
        if reason:
            yield Skipped(name=_name(path, root), reason=reason)
            continue
        found += 1
        if is_record:
            yield from _records_in(path, root, columns)
        else:
            yield _whole_file(path, root, may_skip=False)
    if not found:
        if has_text:
            _refuse_columns(str(root), columns)
        raise unusable(
            shown(root.joinpath(*glob_parts)),
            f"files that {'match and ' if glob_parts else ''}end in {_KINDS}",
            f"none ({others:,} of other kinds)",
            hint="give a text file with another ending by its own path",
        )


def _kinds_in(root: Path, glob_parts: Sequence[str]) -> tuple[bool, bool]:
    """Return whether it is a folder of text, and whether there are records in files that do not end in .json."""
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


def _records_in(path: Path, root: Path, columns: tuple[str, ...]) -> Iterator[Piece | Skipped]:
    name, status = _name(path, root), _stat(path)
    _refuse_special(path, status.st_mode)
    if status.st_size == 0:
        yield Skipped(name=name, reason="empty")
    else:
        yield from _records(recognise(path, name, columns))


def _whole_file(path: Path, root: Path, *, may_skip: bool) -> Piece | Skipped:
    status = _stat(path)
    # Checked before anything opens it: opening a FIFO waits for a writer.
    _refuse_special(path, status.st_mode)
    name = _name(path, root)
    if status.st_size == 0:
        return Skipped(name=name, reason="empty")
    file = DataFile(path=path, name=name, kind="text")
    return Piece(name=name, file=file, size_bytes=status.st_size, may_skip=may_skip)


def _records(file: DataFile) -> Iterator[Piece | Skipped]:
    is_empty = True
    for record in read_records(file):
        is_empty = False
        encoded = record.text.encode("utf-8")
        if not encoded:
            key = file.columns[0] if file.columns else "text"
            yield Skipped(name=f"{file.name}:{record.number}", reason=f'empty "{key}"')
            continue
        yield Piece(
            name=record.chat or f"text-{hashlib.sha256(encoded).hexdigest()[:16]}",
            file=file,
            size_bytes=len(encoded),
            start_byte=record.start_byte,
            end_byte=record.end_byte,
            record=record.number,
            is_chat=bool(record.chat),
        )
    if is_empty:
        yield Skipped(name=file.name, reason="no records")


def _passages(file: DataFile) -> Iterator[Piece | Skipped]:
    ordinal = start = size = 0
    raw_lines: list[bytes] = []

    def passage() -> Piece:
        # Decoded here so that a bad byte is reported while listing, with its position in the file.
        decoded(b"".join(raw_lines), file.where, start)
        name = f"{file.name}#{ordinal:06d}"
        return Piece(name=name, file=file, size_bytes=size, start_byte=start, end_byte=start + size)

    with open_stream(file) as stream:
        for raw in records.lines(file, stream):
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


def _refuse_special(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    found = next((what for test, what in _SPECIAL_FILES if test(mode)), "something else")
    raise unusable(shown(path), "a regular file", found, hint="copy its text to a file first")


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
