"""Read and write the folder of a finding, and the log of findings next to it.

    evidence/
      LOG.md                       an entry for each exported finding, newest first
      2026-11-27-hang/
        finding.json               the root: lists the hash of everything else
        README.md                  the same for people
        observed/                  the observed run: logs, settings, receipt, stacks, what it printed last
        tests/t1/                  a flip: plan.json, pairs.jsonl, verdict.json, and the logs of its arms

Copies have the same relative paths as in the run or flip, so every command that reads those reads the copies. Secrets
are removed before hashing; where that changed a file, its original hash is kept too.

A change holds a lock on the folder and writes finding.json last, each file atomically. A crash in the middle leaves
finding.json unchanged, and files that it does not list; the next change removes such files of tests, and README.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from engine import limits
from engine.errors import BadInput, write_error
from engine.files import open_plain, read_bytes, read_text
from engine.findings.finding import File, Finding, load, sealed, to_bytes
from engine.findings.older import Older, read_older
from engine.findings.text import readme, state_words
from engine.log.folder import RunFolder, new_folder, write_whole
from engine.log.text import one_line
from engine.redact import Redactor
from engine.sealing import digest

FINDING, README, LOG = "finding.json", "README.md", "LOG.md"
OBSERVED, TESTS = "observed", "tests"
_LOG_TITLE = "# What was found, newest first\n"
LARGEST_COPIED_BYTES = 8 << 20
"""Largest file that is copied, in bytes; of a larger one only hash and size are kept."""
STACKS_COPIED = 8
"""Number of the latest stack dumps that are copied."""
_RUN_FILES = (
    "events.jsonl",
    "watch.jsonl",
    "effective.json",
    "spec.toml",
    "receipt.json",
    "stderr.txt",
)
_ARM_FILES = _RUN_FILES[:3]
_FLIP_FILES = ("plan.json", "pairs.jsonl", "verdict.json")


class Blob(NamedTuple):
    file: File
    data: bytes | None
    """None where only hash and size are kept."""


Blobs = Mapping[str, Blob]


def copy_run(run: RunFolder) -> Blobs:
    """Return the files that a finding keeps of the observed run, by their paths in the finding's folder."""
    stacks = sorted((run.path / "stacks").glob("*"))[-STACKS_COPIED:]
    hosts = sorted(run.path.glob("watch-*.jsonl"))
    paths = [*(run.path / name for name in _RUN_FILES), *hosts, *stacks]
    return _copies(run.path, paths, OBSERVED)


def copy_flip(flip: Path, test: str) -> Blobs:
    """Return the files of a flip from which its verdict can be recomputed. Raises BadInput if one is too big."""
    arms = sorted(path for path in (flip / "arms").glob("*") if path.is_dir())
    paths = [flip / name for name in _FLIP_FILES] + [
        arm / name for arm in arms for name in _ARM_FILES
    ]
    paths += sorted((flip / "code").rglob("*"))
    blobs = _copies(flip, paths, f"{TESTS}/{test}")
    for name, blob in blobs.items():
        if blob.data is None:
            most = f"at most {LARGEST_COPIED_BYTES} bytes"
            raise BadInput.expected("file", name, most, str(blob.file.size))
    return blobs


def _copies(root: Path, paths: Iterable[Path], into: str) -> Blobs:
    redactor = Redactor()
    # A name that is no UTF-8 is written with its bytes escaped.
    return {
        f"{into}/{path.relative_to(root)}".encode("utf-8", "backslashreplace").decode(): _blob(
            path, redactor
        )
        for path in paths
        if path.is_file() and not path.is_symlink()
    }


def _blob(path: Path, redactor: Redactor) -> Blob:
    try:
        with open_plain(path) as opened:
            data = opened.read(LARGEST_COPIED_BYTES + 1)
            if len(data) > LARGEST_COPIED_BYTES:
                opened.seek(0)
                sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
                size = opened.tell()
                return Blob(File(sha256=sha256, size=size, is_copied=False), None)
    except OSError as error:
        found = error.strerror or str(error)
        raise BadInput.expected("file", path, "to read it", found) from error
    kept, secrets = redactor.bytes(data)
    whole = digest(data) if secrets else ""
    file = File(sha256=digest(kept), size=len(kept), redacted=secrets, whole_sha256=whole)
    return Blob(file, kept)


@dataclass(frozen=True, slots=True)
class Bundle:
    path: Path

    @classmethod
    def create(cls, folder: Path, finding: Finding, blobs: Blobs) -> Bundle:
        """Create the folder `DATE-SLUG` in `folder`. Raises BadInput when it exists."""
        bundle = cls(path_of(folder, finding.slug, finding.at))
        with new_folder(bundle.path, "finding", "choose another name"):
            bundle.save(finding, blobs)
        return bundle

    def load(self) -> Finding:
        """Load the finding. Raises BadInput when it is not exactly as the tool left it, or of an earlier version."""
        found = self.read()
        if isinstance(found, Older):
            text = "one of an earlier version, which is read-only"
            raise BadInput.expected("finding", self.path, "a finding that can be changed", text)
        return found

    def read(self) -> Finding | Older:
        """Load the finding, whichever version wrote it. Raises BadInput when it is not exactly as the tool left it."""
        raw = read_bytes(self.path / FINDING, "finding", limits.FINDING)
        return read_older(raw, self.path / FINDING) or load(raw, self.path / FINDING)

    @property
    def observed(self) -> RunFolder:
        """The copy of the observed run."""
        return RunFolder(self.path / OBSERVED)

    def flip_of(self, test: str) -> Path:
        """The copy of a test's flip."""
        return self.path / TESTS / test

    def save(self, finding: Finding, blobs: Blobs) -> Finding:
        """Write a finding with its new files, and return it sealed, as written. Raises DiskFull or RunLogError."""
        files = finding.files | {name: blob.file for name, blob in blobs.items()}
        files.pop(README, None)
        text = readme(finding).encode()
        files[README] = File(sha256=digest(text), size=len(text))
        done = sealed(replace(finding, files=files))
        for name, blob in blobs.items():
            if blob.data is not None:
                self._write(name, blob.data)
        self._write(README, text)
        self._write(FINDING, to_bytes(done))
        return done

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error("evidence", path, f"to write {len(data)} bytes", error) from error
        write_whole(path, data, "evidence")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that excludes other changes; waits for one that is in progress."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            found = error.strerror or str(error)
            raise BadInput.expected("finding", self.path, "a folder", found) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def change(self, change: Callable[[Finding], Finding], blobs: Blobs | None = None) -> Finding:
        """Apply `change` under the lock, and save the finding that it returns with its new files.

        An entry of the finding in LOG.md is rewritten. Raises what `change` raises, and then leaves everything as it
        was.
        """
        with self._locked():
            done = self.save(change(self.load()), blobs or {})
            if logged_seal(self.path) is not None:
                _write_log_entry(self.path, done)
        return done

    def export(self, to: Path | None = None) -> Bundle:
        """Enter the finding into LOG.md of its evidence folder; with `to`, copy the folder there first. The
        caller verifies it first. Raises BadInput for a copy that exists."""
        finding = self.load()
        bundle = self
        if to is not None and to.resolve() != self.path.parent.resolve():
            bundle = Bundle(to / self.path.name)
            if bundle.path.exists():
                raise BadInput.expected("export", bundle.path, "nothing there", "something")
            copied = [name for name, file in finding.files.items() if file.is_copied]
            for name in (*copied, FINDING):
                bundle._write(name, read_bytes(self.path / name, "finding", limits.ARTIFACT))
        _write_log_entry(bundle.path, finding)
        return bundle


def path_of(folder: Path, slug: str, at: str) -> Path:
    return folder / f"{at[:10]}-{slug}"


def slug_of(text: str) -> str:
    """Make the name of a finding from some words."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:48].strip("-") or "finding"


def is_bundle(path: Path) -> bool:
    """Whether the folder holds a finding, damaged or not: a finding.json of any kind is checked, never skipped."""
    return os.path.lexists(path / FINDING)


def find_bundles(folder: Path) -> list[Bundle]:
    """Return the bundles in `folder`, or `folder` itself, in descending order of name."""
    if is_bundle(folder):
        return [Bundle(folder)]
    try:
        names = sorted(folder.iterdir(), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        found = error.strerror or str(error)
        raise BadInput.expected("findings", folder, "a folder that can be read", found) from None
    return [Bundle(p) for p in names if is_bundle(p)]


def find_bundle(name: str, folder: Path) -> Bundle:
    """Find a bundle by path, folder name or slug; an empty name means the only one, or the only open one. Raises
    BadInput."""
    if name and is_bundle(Path(name)):
        return Bundle(Path(name))
    found = find_bundles(folder)
    if name:
        fitting = [b for b in found if name in (b.path.name, b.path.name[11:])]
    else:
        fitting = [b for b in found if len(found) == 1 or _is_open(b)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(b.path.name for b in (fitting or found)) or "none"
    expected = f"one called {name}" if name else "one open finding"
    hint = "`engine evidence list` lists them"
    raise BadInput.expected("finding", folder, expected, names, hint=hint)


def _is_open(bundle: Bundle) -> bool:
    try:
        return bundle.load().closed is None
    except BadInput:
        # A damaged or older one is not open: `find_bundle` must still find the others.
        return False


def log_entry(name: str, finding: Finding) -> str:
    """Return the paragraph for a finding in LOG.md."""
    title = f"## {finding.at[:10]}: {one_line(finding.title)}, `{name}/`"
    return f"{title}\n{one_line(state_words(finding))}. Seal `{finding.seal}`.\n"


def logged_seal(bundle: Path) -> str | None:
    """Return the seal of a bundle that the neighbouring LOG.md records; None if it records none."""
    try:
        text = read_text(bundle.parent / LOG, "log of findings", limits.FINDINGS_LOG)
    except BadInput:
        return None
    for part in _entries(text)[1:]:
        if f", `{bundle.name}/`\n" in part and (match := re.search(r"Seal `([^`]*)`\.", part)):
            return match[1]
    return None


def _entries(text: str) -> list[str]:
    """Return the head of LOG.md, then each of its entries."""
    return re.split(r"(?m)^(?=## )", text)


def _write_log_entry(bundle: Path, finding: Finding) -> None:
    """Put the entry of a finding on top, in place of an older entry of the same finding."""
    path = bundle.parent / LOG
    is_old = os.path.lexists(path)
    text = read_text(path, "log", limits.FINDINGS_LOG) if is_old else _LOG_TITLE
    head, *entries = _entries(text)
    others = "".join(entry for entry in entries if f", `{bundle.name}/`\n" not in entry)
    gap = "\n" if others else ""
    write_whole(path, f"{head.rstrip()}\n\n{log_entry(bundle.name, finding)}{gap}{others}")
