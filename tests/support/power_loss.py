"""Generate the possible contents of a disk after a power loss, from the journal that `faults.c` wrote.

The model is POSIX at its weakest. Bytes of a file are on the disk once the file was synced, names in a folder
once the folder was; of everything since then any part may be present, in any order. Renames are atomic. A
crash state is taken after each operation, in several ways of losing what was not synced:

    names   synced   the folder is as it was when it was last synced
            all      creations, renames and removals are all present, ahead of everything else
    bytes   synced   unsynced bytes are gone
            all      unsynced bytes are present
            torn     half of what was appended is present
            hole     the length is complete and the first half zeros: the pages came in the wrong order
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = struct.Struct("<cQQII")
MARK = "!"


@dataclass(frozen=True, slots=True)
class Operation:
    kind: str
    inode: int
    number: int
    path: str
    data: bytes


def read_journal(path: Path) -> list[Operation]:
    raw, at, out = path.read_bytes(), 0, []
    while at < len(raw):
        kind, inode, number, first, second = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        text = raw[at : at + first].decode()
        at += first
        out.append(Operation(kind.decode(), inode, number, text, raw[at : at + second]))
        at += second
    return out


@dataclass(slots=True)
class _File:
    live: bytes = b""
    synced: bytes = b""


@dataclass(slots=True)
class _Folder:
    live: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    since: list[tuple[str, str, _File | _Folder | None]] = field(default_factory=list)
    """Changes of names since the last sync: (from or "", to or "", what)."""


class Disk:
    """A folder that was empty at first, and every operation on it since."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _Folder()
        self.by_inode: dict[int, _File | _Folder] = {root.stat().st_ino: self.top}

    def apply(self, operation: Operation) -> None:
        thing = self.by_inode.get(operation.inode)
        match operation.kind:
            case "C" | "M":
                made = _File() if operation.kind == "C" else _Folder()
                self.by_inode[operation.inode] = made
                self._change(operation.path, "", made)
            case "W":
                assert isinstance(thing, _File), "bytes of a file that nobody created"
                begin, end = operation.number, operation.number + len(operation.data)
                before = thing.live.ljust(begin, b"\0")
                thing.live = before[:begin] + operation.data + before[end:]
            case "F":
                assert isinstance(thing, _File)
                thing.live = thing.live[: operation.number].ljust(operation.number, b"\0")
            case "S":
                assert isinstance(thing, _File)
                thing.synced = thing.live
            case "D":
                assert isinstance(thing, _Folder)
                thing.synced, thing.since = dict(thing.live), []
            case "R":
                self._change(operation.data.decode(), operation.path, None)
            case "U":
                self._change("", operation.path, None)

    def _at(self, path: str) -> tuple[_Folder, str]:
        *folders, name = Path(path).relative_to(self.root).parts
        place = self.top
        for step in folders:
            inner = place.live[step]
            assert isinstance(inner, _Folder)
            place = inner
        return place, name

    def _change(self, to: str, gone: str, made: _File | _Folder | None) -> None:
        """Apply a new name, a removal, or a rename within one folder."""
        if made is not None:
            to, made_of = to, made
            folder, name = self._at(to)
            folder.live[name] = made_of
            folder.since.append(("", name, made_of))
        elif to:
            folder, name = self._at(to)
            source, old = self._at(gone)
            assert source is folder, "a rename into another folder is not part of this model"
            folder.live[name] = folder.live.pop(old)
            folder.since.append((old, name, folder.live[name]))
        else:
            folder, name = self._at(gone)
            del folder.live[name]
            folder.since.append((name, "", None))

    def state(self, names: str, bytes_: str) -> dict[str, bytes | None]:
        """Return one crash state: the bytes of each file by its path, None for a folder."""
        return self._tree(NAMES[names], BYTES[bytes_])

    def random_state(self, rng: random.Random) -> dict[str, bytes | None]:
        """Return a random crash state: any part of what was not synced, independently for each file and name."""

        def names(folder: _Folder) -> dict[str, _File | _Folder]:
            found = dict(folder.synced)
            for old, name, thing in folder.since:
                if rng.random() < 0.5:
                    continue
                if old:
                    found.pop(old, None)
                if name and thing is not None:
                    found[name] = thing
            return found

        def content(file: _File) -> bytes:
            return BYTES[rng.choice(list(BYTES))](file)

        return self._tree(names, content)

    def _tree(
        self,
        names: Callable[[_Folder], dict[str, _File | _Folder]],
        content: Callable[[_File], bytes],
    ) -> dict[str, bytes | None]:
        out: dict[str, bytes | None] = {}

        def walk(folder: _Folder, prefix: str) -> None:
            for name, thing in names(folder).items():
                if isinstance(thing, _Folder):
                    out[prefix + name] = None
                    walk(thing, f"{prefix}{name}/")
                else:
                    out[prefix + name] = content(thing)

        walk(self.top, "")
        return out


def _torn(file: _File) -> bytes:
    if not file.live.startswith(file.synced):
        return file.synced
    return file.live[: (len(file.synced) + len(file.live)) // 2]


def _hole(file: _File) -> bytes:
    if not file.live.startswith(file.synced):
        return file.synced
    half = len(_torn(file))
    return file.synced + bytes(half - len(file.synced)) + file.live[half:]


NAMES: dict[str, Callable[[_Folder], dict[str, _File | _Folder]]] = {
    "synced": lambda folder: folder.synced,
    "all": lambda folder: folder.live,
}
BYTES: dict[str, Callable[[_File], bytes]] = {
    "synced": lambda file: file.synced,
    "all": lambda file: file.live,
    "torn": _torn,
    "hole": _hole,
}


def make(state: dict[str, bytes | None], folder: Path) -> None:
    """Write a crash state into a new folder."""
    folder.mkdir()
    for path, content in state.items():
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def crash_states(
    journal: list[Operation], root: Path, rng: random.Random | None = None, tries: int = 1
) -> Iterator[tuple[str, list[int], dict[str, bytes | None]]]:
    """Yield (where and how, marks passed, state) after each operation, and no state twice under the same marks;
    with `rng`, `tries` random states after each operation instead of the eight named ones."""
    disk, marks = Disk(root), []
    seen: set[int] = set()
    for index in range(len(journal) + 1):
        if index:
            operation = journal[index - 1]
            if operation.kind == MARK:
                marks.append(operation.number)
            disk.apply(operation)
        if rng is None:
            made = [
                (f"{index} operations, names {n}, bytes {b}", disk.state(n, b))
                for n in NAMES
                for b in BYTES
            ]
        else:
            made = [(f"{index} operations, try {i}", disk.random_state(rng)) for i in range(tries)]
        for how, state in made:
            key = hash((tuple(marks), frozenset(state.items())))
            if key not in seen:
                seen.add(key)
                yield how, list(marks), state
