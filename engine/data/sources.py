"""Sources of documents: a source is listed as `Piece`s, each of which is read only when needed.

    source            a piece is                          its name
    python-stdlib     a *.py file of the interpreter      path in the library: json/decoder.py
    a folder          a *.py, *.txt or *.md file          path in the folder
    a .jsonl file     the "text" of one line              text-<16 hex digits of its sha256>
                      a conversation in one line          chat-<16 hex digits> of its content
    any other file    a passage of at least 4 KiB         <file name>#<ordinal>

Names decide which split a document is in, so they never contain an absolute path, and a line of a .jsonl
file is named after its text: inserting a line renames no other, and equal texts are in one split. A
passage ends at the first blank line past 4 KiB, or at the first line end past 8 KiB; the passages of a
file, concatenated, are the file.

Listing reads no file of a folder, and holds one line of a file at a time, so a source may be larger than
memory.

The following are left out on purpose, and each is reported as a `Skipped`: empty files and texts, links
to folders (they can loop), hidden files and folders (.git, .venv), and, in the standard library only,
files that are not UTF-8 and the two kinds that are made for one machine: `_sysconfigdata*` by the build
of the interpreter, `sitecustomize.py` by a distribution. Files of other kinds, caches, and the library's
tests and installed packages are left out without a report. Anything else that cannot be read is a
CorpusError.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engine import limits
from engine.data.conversations import read_conversation
from engine.errors import CorpusError
from engine.files import open_regular

STDLIB = "python-stdlib"
CHAT_KEYS = frozenset({"messages", "conversations", "completion"})
"""A line without "text" that has one of them is a conversation."""
CHAT_HINT = 'a conversation has "messages", "conversations", or "prompt" and "completion"'
FOLDER_SUFFIXES = (".py", ".txt", ".md")
PASSAGE_BYTES = 4096

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_LOCAL_FILES = ("_sysconfigdata", "sitecustomize")
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_UTF8_HINT = "convert it to UTF-8, or leave it out of the corpus"
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
    path: Path
    size_bytes: int
    """Size of the text in UTF-8."""
    start_byte: int = 0
    end_byte: int | None = None
    """Where the piece ends in its file; None for a whole file."""
    line: int | None = None
    """Line number, from 1, of a JSON line; None when the bytes are the text."""
    may_skip: bool = False
    """Whether bytes that are not UTF-8 are skipped instead of refused."""
    is_chat: bool = False
    """Whether it is a conversation; its text is then the JSON of its record."""

    def read(self) -> str | Skipped:
        """Return the text, decoded as strict UTF-8. Raises CorpusError when it cannot be read."""
        most = limits.CORPUS_DOCUMENT.most
        size = most + 1 if self.end_byte is None else self.end_byte - self.start_byte
        with open_regular(self.path, "corpus", error=CorpusError) as file:
            try:
                file.seek(self.start_byte)
                # A huge sparse file is refused by its size, before anything is read.
                if self.end_byte is None and os.fstat(file.fileno()).st_size > most:
                    _refuse_size(self.path, limits.CORPUS_DOCUMENT)
                raw = file.read(size)
            except OSError as error:
                _refuse_unreadable(self.path, error)
        if len(raw) > most:
            _refuse_size(self.path, limits.CORPUS_DOCUMENT)
        if self.line is not None:
            return _content_of_line(raw, self.path, self.line, self.start_byte)[1]
        if self.may_skip:
            try:
                return raw.decode("utf-8")
            except UnicodeDecodeError as error:
                return Skipped(name=self.name, reason=f"not UTF-8 at byte {error.start:,}")
        return _decoded(raw, shown(self.path), self.start_byte)


def list_pieces(source: str, *, include_tests: bool = False) -> Iterator[Piece | Skipped]:
    """Yield every document of `source`. Raises CorpusError at the first problem.

    The order is that of the file system's walk and carries no meaning. `include_tests` applies only to
    `python-stdlib`.
    """
    size = 0
    for count, item in enumerate(_listed(source, include_tests=include_tests), start=1):
        size += item.size_bytes if isinstance(item, Piece) else 0
        for found, limit in ((count, limits.CORPUS_PIECES), (size, limits.CORPUS_TEXT)):
            if found > limit.most:
                raise _unusable(shown(source), str(limit), "more")
        yield item


def _listed(source: str, *, include_tests: bool) -> Iterator[Piece | Skipped]:
    if source == STDLIB:
        yield from _library(Path(sysconfig.get_path("stdlib")), include_tests)
        return
    # Path("") is the current folder, which an empty setting never means.
    if not source:
        raise _unusable("''", f"a folder, a file or {STDLIB}", "an empty name")
    path = Path(source)
    mode = _stat(path).st_mode
    if stat.S_ISDIR(mode):
        yield from _folder(path)
        return
    _refuse_special(path, mode)
    if path.stat().st_size > limits.CORPUS_FILE.most:
        _refuse_size(path, limits.CORPUS_FILE)
    yield from _json_lines(path) if path.suffix == ".jsonl" else _passages(path)


def _unusable(where: str, expected: str, found: str, *, hint: str | None = None) -> CorpusError:
    return CorpusError.expected("corpus", where, expected, found, hint=hint)


def shown(path: Path | str) -> str:
    """Return a path as one printable line, whatever characters it contains."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def _library(root: Path, include_tests: bool) -> Iterator[Piece | Skipped]:
    if not root.is_dir():
        raise _unusable(STDLIB, f"the standard library at {shown(root)}", "no such folder")
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


def _folder(root: Path) -> Iterator[Piece | Skipped]:
    others = found = 0
    for folder, folders, files in os.walk(root, onerror=_refuse_walk):
        for name in sorted(folders):
            path = Path(folder, name)
            if name.startswith("."):
                yield Skipped(name=_name(path, root), reason="hidden folder")
            elif path.is_symlink():
                yield Skipped(name=_name(path, root), reason="link to a folder")
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix not in FOLDER_SUFFIXES:
                others += 1
            elif file.startswith("."):
                yield Skipped(name=_name(path, root), reason="hidden file")
            else:
                found += 1
                yield _whole_file(path, root, may_skip=False)
    if not found:
        raise _unusable(
            shown(root),
            f"files that end in {', '.join(FOLDER_SUFFIXES)}",
            f"none ({others:,} of other kinds)",
            hint="give a .jsonl or a text file by its own path",
        )


def _whole_file(path: Path, root: Path, *, may_skip: bool) -> Piece | Skipped:
    status = _stat(path)
    # Checked before anything opens it: opening a FIFO waits for a writer.
    _refuse_special(path, status.st_mode)
    name = _name(path, root)
    if status.st_size == 0:
        return Skipped(name=name, reason="empty")
    return Piece(name=name, path=path, size_bytes=status.st_size, may_skip=may_skip)


def _json_lines(path: Path) -> Iterator[Piece | Skipped]:
    offset = 0
    for line, raw in enumerate(_lines(path), start=1):
        start, offset = offset, offset + len(raw)
        if not raw.strip():
            continue
        name, text = _content_of_line(raw, path, line, start)
        encoded = text.encode("utf-8")
        if not encoded:
            yield Skipped(name=f"{path.name}:{line}", reason='empty "text"')
            continue
        is_chat = bool(name)
        yield Piece(
            name=name or f"text-{hashlib.sha256(encoded).hexdigest()[:16]}",
            path=path,
            size_bytes=len(encoded),
            start_byte=start,
            end_byte=offset,
            line=line,
            is_chat=is_chat,
        )


def _content_of_line(raw: bytes, path: Path, line: int, start_byte: int) -> tuple[str, str]:
    """Return the content of one JSON line: the name and the JSON of a conversation, or no name and the "text".

    `start_byte` is where the line begins in the file."""
    where = f"{shown(path)} line {line:,}"
    source = _decoded(raw.rstrip(b"\r\n"), where, start_byte)
    wanted = 'a JSON object with a string "text", or a conversation'
    try:
        record = json.loads(source)
    except json.JSONDecodeError as error:
        byte = start_byte + len(source[: error.pos].encode("utf-8"))
        raise _unusable(f"{where}, byte {byte:,}", wanted, error.msg) from None
    except (ValueError, RecursionError) as error:
        # An integer of thousands of digits is a plain ValueError, and deep nesting exhausts the
        # parser.
        found = "nesting too deep" if isinstance(error, RecursionError) else str(error)
        raise _unusable(f"{where}, byte {start_byte:,}", wanted, found) from None
    where = f"{where}, byte {start_byte:,}"
    if not isinstance(record, dict):
        raise _unusable(where, wanted, f"JSON of type {_kind(record)}")
    if "text" not in record and not CHAT_KEYS.isdisjoint(record):
        return read_conversation(record, where).name, source.strip()
    if "text" not in record:
        keys = ", ".join(ascii(key) for key in list(record)[:5]) or "no keys"
        raise _unusable(where, wanted, f"an object with {keys}", hint=CHAT_HINT)
    text = record["text"]
    if not isinstance(text, str):
        raise _unusable(where, wanted, f'a "text" of type {_kind(text)}')
    try:
        # JSON can spell half of a surrogate pair, which no UTF-8 text can hold.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start:,}"
        raise _unusable(where, 'Unicode text in "text"', found) from None
    return "", text


def _passages(path: Path) -> Iterator[Piece | Skipped]:
    ordinal = start = size = 0
    raw_lines: list[bytes] = []

    def passage() -> Piece:
        # Decoded here so that a bad byte is reported while listing, with its position in the file.
        _decoded(b"".join(raw_lines), shown(path), start)
        name = f"{_utf8_name(path.name, path)}#{ordinal:06d}"
        return Piece(name=name, path=path, size_bytes=size, start_byte=start, end_byte=start + size)

    for raw in _lines(path):
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
        yield Skipped(name=_utf8_name(path.name, path), reason="empty")


def _lines(path: Path) -> Iterator[bytes]:
    most = limits.CORPUS_DOCUMENT.most
    with open_regular(path, "corpus", error=CorpusError) as file:
        try:
            if os.fstat(file.fileno()).st_size <= most:
                yield from file  # no line is longer than its file
                return
            while line := file.readline(most + 1):
                if len(line) > most:
                    _refuse_size(path, limits.CORPUS_DOCUMENT)
                yield line
        except OSError as error:
            _refuse_unreadable(path, error)


def _refuse_size(path: Path, limit: limits.Limit) -> NoReturn:
    raise _unusable(
        shown(path),
        f"{limit.what} of {limit}",
        "more",
        hint="cut it into more files, or into lines",
    )


def _decoded(raw: bytes, where: str, start_byte: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unusable(
            f"{where}, byte {start_byte + error.start:,}",
            "UTF-8 text",
            f"0x{raw[error.start]:02x} ({error.reason})",
            hint=_UTF8_HINT,
        ) from None


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = "a broken link" if path.is_symlink() else "nothing there"
        raise _unusable(shown(path), f"a folder, a file or {STDLIB}", found) from None
    except (OSError, ValueError) as error:
        _refuse_unreadable(path, error)


def _refuse_special(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    found = next((what for test, what in _SPECIAL_FILES if test(mode)), "something else")
    raise _unusable(shown(path), "a regular file", found, hint="copy its text to a file first")


def _refuse_walk(error: OSError) -> NoReturn:
    _refuse_unreadable(Path(error.filename), error)


def _refuse_unreadable(path: Path, error: OSError | ValueError) -> NoReturn:
    # ValueError is how the interpreter refuses a path with a NUL in it.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise _unusable(shown(path), "a readable file", reason) from error


def _name(path: Path, root: Path) -> str:
    return _utf8_name(path.relative_to(root).as_posix(), path)


def _utf8_name(name: str, path: Path) -> str:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise _unusable(
            shown(path),
            "a file name in UTF-8",
            "other bytes in it",
            hint="rename the file",
        ) from None
    return name


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
