"""Copy a script's folder for one run of an arm, so that short runs cannot overwrite what the script has written.

Writes to an absolute path elsewhere, or through a link, are not isolated.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.errors import BadInput
from engine.files import open_plain, read_bytes, read_json_object, read_text
from engine.limits import SCRIPT, SCRIPT_FILES
from engine.sealing import digest

COPY_BYTES, COPY_FILES = 256 << 20, 20_000
"""Largest folder that is copied for each run, in bytes and files."""
KEPT_BYTES, ALL_KEPT_BYTES = 1 << 20, 8 << 20
"""Largest size of a file of the script that a flip keeps, and of all of them."""
CODE = "files.json"
"""Name of the list of a kept folder: the SHA-256 of each file by its path."""
LEFT_OUT = frozenset(
    {"wandb", "mlruns", "lightning_logs", "__pycache__"}
    | {".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
"""Folders of trackers and caches, which are recreated on demand."""
LINKED = frozenset({".git", ".hg", ".venv", "venv", "node_modules"})
"""Folders that a training only reads, which are linked instead of copied."""


def size_to_copy(folder: Path) -> int | None:
    """Return the size of the files that would be copied, in bytes; None if it exceeds the limits."""
    total = 0
    for count, entry in enumerate(_entries(folder), 1):
        if entry.is_file(follow_symlinks=False):
            total += entry.stat(follow_symlinks=False).st_size
        if total > COPY_BYTES or count > COPY_FILES:
            return None
    return total


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries to copy, folders before their content, without those left out or linked."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in entries:
        if entry.name in LEFT_OUT or entry.name in LINKED:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder and _is_run_or_flip(entry.path):
            continue
        yield entry
        if is_folder:
            yield from _entries(Path(entry.path))


def _is_run_or_flip(folder: str) -> bool:
    return any(os.path.isfile(f"{folder}/{name}") for name in ("effective.json", "pairs.jsonl"))


def copy_folder(folder: Path, to: Path) -> None:
    """Copy the folder of a script to a new folder. Raises OSError."""
    shutil.rmtree(to.parent, ignore_errors=True)
    to.mkdir(parents=True)
    for entry in _entries(folder):
        target = to / os.path.relpath(entry.path, folder)
        if entry.is_symlink():
            os.symlink(_target(entry.path, folder), target)
        elif entry.is_dir():
            target.mkdir()
        elif entry.is_file():
            shutil.copy2(entry.path, target)
    for name in LINKED:
        if os.path.lexists(folder / name):
            os.symlink(folder / name, to / name)


def line_of(folder: Path, name: str) -> str:
    """Read the line `train.py:42` of a script's folder. Raises BadInput."""
    file, number, lines = _lines_of(folder, name)
    if number > len(lines):
        raise BadInput.expected("line", f"of {file}", name, f"a file of {len(lines)} lines")
    return lines[number - 1].rstrip("\r\n")


def _lines_of(folder: Path, name: str) -> tuple[Path, int, list[str]]:
    path, _, number = name.rpartition(":")
    file = folder / path
    if not file.resolve().is_relative_to(folder.resolve()) or file.is_symlink():
        raise BadInput.expected("line", name, f"a file of {folder}", "a file outside it, or a link")
    text = read_text(file, "script", SCRIPT)
    return file, int(number), text.splitlines(keepends=True)


def _with_line(folder: Path, name: str, text: str) -> tuple[Path, str, str]:
    """Return a file, its text, and its text with another line, which keeps its indentation and its line end."""
    file, number, lines = _lines_of(folder, name)
    before, line = "".join(lines), lines[number - 1]
    old = line.rstrip("\r\n")
    indent = "" if not text or text[0].isspace() else old[: len(old) - len(old.lstrip())]
    lines[number - 1] = f"{indent}{text}{line[len(old) :]}"
    return file, before, "".join(lines)


def write_line(folder: Path, name: str, text: str) -> None:
    """Replace the text of a line, keeping its indentation. Raises BadInput, OSError."""
    file, _, after = _with_line(folder, name, text)
    file.write_text(after, encoding="utf-8", newline="")


def same_code(folder: Path, name: str, text: str) -> bool:
    """Return whether the syntax tree of a file stays the same with another text of a line. Raises BadInput, OSError."""
    _, before, after = _with_line(folder, name, text)
    try:
        return ast.dump(ast.parse(before)) == ast.dump(ast.parse(after))
    except (SyntaxError, ValueError, RecursionError):
        return False


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder that would be copied, by its path in it."""
    hashes = {}
    for entry in _entries(folder):
        if entry.is_file(follow_symlinks=False):
            with open_plain(Path(entry.path)) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            hashes[os.path.relpath(entry.path, folder)] = sha256
    return hashes


def keep_code(folder: Path, code: Mapping[str, str], to: Path) -> None:
    """Store the list of a script's files in the folder `to`. Next to it, store the files of at most KEPT_BYTES under
    their SHA-256, so that equal files are stored once. Raises OSError."""
    to.mkdir(parents=True)
    (to / CODE).write_text(json.dumps(code, indent=1, sort_keys=True), encoding="utf-8")
    left_bytes = ALL_KEPT_BYTES
    for name, sha256 in code.items():
        size = (folder / name).stat().st_size
        if size <= min(KEPT_BYTES, left_bytes):
            left_bytes -= size
            if not (kept := to.parent / sha256).exists():
                shutil.copyfile(folder / name, kept)


def read_code(folder: Path) -> str:
    """Return the SHA-256 of a kept list; empty where none was kept. Raises BadInput."""
    file = folder / CODE
    return digest(read_bytes(file, "code", SCRIPT_FILES)) if file.is_file() else ""


def kept_sources(folder: Path) -> dict[str, str]:
    """Return the texts of the Python files that a flip keeps of a run, by their paths. Raises BadInput."""
    if not (folder / CODE).is_file():
        return {}
    code = read_json_object(folder / CODE, "code", SCRIPT_FILES)
    kept = {name: folder.parent / code[name] for name in code if name.endswith(".py")}
    return {
        name: read_text(file, "script", SCRIPT) for name, file in kept.items() if file.is_file()
    }


def remove_copy(to: Path) -> None:
    """Remove a copy, and the folder of copies with the last of them."""
    shutil.rmtree(to.parent, ignore_errors=True)
    with contextlib.suppress(OSError):
        to.parent.parent.rmdir()


def _target(link: str, folder: Path) -> str:
    """Return the target of a copied link. A relative one inside the folder is kept, so it leads into the copy."""
    target = os.readlink(link)
    resolved = os.path.normpath(os.path.join(os.path.dirname(link), target))
    is_inside = Path(resolved).is_relative_to(folder) and not os.path.isabs(target)
    return target if is_inside else resolved
