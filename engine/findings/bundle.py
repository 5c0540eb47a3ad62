"""The folder of a finding, and the log beside it.

    evidence/
      LOG.md                           an entry for each exported finding, newest first
      2026-11-21-hang-at-step-0/
        finding.json                   the root: lists the hash of everything else
        artifacts/SHA256.jsonl         what was captured, named by its content
        plots/e3.svg  README.md        generated from the others, for people

A change holds a lock on the folder and writes artifacts first and finding.json last, each file atomically. So
a crash in the middle leaves the finding as it was, beside artifacts that nothing refers to yet; the next
change removes those.

Before a change, finding.json must load, which means it must be exactly as the tool left it. README.md and
plots are regenerated at each change, so damage to those alone does not prevent one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from engine import limits
from engine.errors import BadInput, write_error
from engine.files import read_bytes, read_text
from engine.findings.capture import Blob
from engine.findings.finding import (
    Artifact,
    Finding,
    Status,
    digest,
    is_active,
    load,
    sealed,
    to_bytes,
)
from engine.findings.rules import judge
from engine.findings.text import derive, state_words
from engine.log.folder import new_folder, write_whole
from engine.log.text import one_line

FINDING = "finding.json"
LOG = "LOG.md"
_LOG_TITLE = "# What was found, newest first\n"


@dataclass(frozen=True, slots=True)
class Bundle:
    path: Path

    @staticmethod
    def path_of(folder: Path, finding: Finding) -> Path:
        return folder / f"{finding.at[:10]}-{finding.slug}"

    @classmethod
    def create(cls, folder: Path, finding: Finding, blobs: Iterable[Blob] = ()) -> Bundle:
        """Create the bundle `DATE-SLUG` in `folder`. Raises BadInput when it exists."""
        bundle = cls(cls.path_of(folder, finding))
        with new_folder(bundle.path, "finding", "choose another name"):
            bundle.save(finding, blobs)
        return bundle

    def load(self) -> Finding:
        """Load the finding from disk. Raises BadInput when it is not exactly as the tool left it."""
        return load(self.read_finding(), self.path / FINDING)

    def read_finding(self) -> bytes:
        """Return the bytes of finding.json. Raises BadInput for anything but a readable regular file of some
        MiB."""
        return read_bytes(self.path / FINDING, "finding", limits.FINDING)

    def read_artifact(self, artifact: Artifact) -> bytes | None:
        """Return the artifact's bytes; None when it was not copied. Raises BadInput when they do not match
        its hash."""
        if not artifact.kept:
            return None
        path = self.path / artifact.path
        try:
            if path.is_symlink() or not path.is_file():
                raise BadInput.expected("artifact", path, "a plain file", "none")
            if path.stat().st_size != artifact.size:
                found = str(path.stat().st_size)
                raise BadInput.expected("artifact", path, f"{artifact.size} bytes", found)
        except OSError as error:
            raise BadInput.expected("artifact", path, "to read it", str(error.strerror)) from None
        data = read_bytes(path, "artifact", limits.ARTIFACT)
        if (found := digest(data)) != artifact.sha256:
            raise BadInput.expected("artifact", path, f"sha256 {artifact.sha256}", found)
        return data

    def save(self, finding: Finding, blobs: Iterable[Blob] = ()) -> Finding:
        """Write a finding with its new artifacts, and return it sealed, as written. Raises DiskFull or
        RunLogError, and BadInput when an artifact that it names is missing or changed."""
        finding = sealed(finding)  # what is derived shows the texts that will be read back
        for blob in blobs:
            if blob.data is not None and blob.artifact.path in finding.files:
                _write(self.path / blob.artifact.path, blob.data)

        def read(sha256: str) -> bytes | None:
            return self.read_artifact(finding.artifact(sha256))

        for artifact in finding.artifacts:
            self.read_artifact(artifact)
        files = derive(finding, read)
        for name, text in files.items():
            _write(self.path / name, text.encode())
        hashes = {name: digest(text.encode()) for name, text in files.items()}
        done = sealed(replace(finding, derived=hashes))
        _write(self.path / FINDING, to_bytes(done))
        self._drop_leftovers(done)
        return done

    def _drop_leftovers(self, finding: Finding) -> None:
        """Remove our own artifacts and plots that nothing refers to. Other files stay, for `verify` to
        report."""
        wanted = set(finding.files)
        for path in [*(self.path / "artifacts").glob("*"), *(self.path / "plots").glob("*.svg")]:
            name = str(path.relative_to(self.path))
            if name in wanted or path.is_symlink() or not path.is_file():
                continue
            named = path.name.split(".")[0]
            if re.fullmatch(r"plots/e[0-9]+\.svg", name) or named == digest(
                read_bytes(path, "artifact", limits.FINDING)
            ):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
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

    def change(
        self, change: Callable[[Finding], tuple[Finding, Iterable[Blob]]]
    ) -> tuple[Finding, Finding]:
        """Apply `change` under the lock, and save the finding that it returns with its new artifacts.

        An entry of the finding in LOG.md is rewritten. Returns the finding before and after. Raises what
        `change` raises, and then leaves everything as it was.
        """
        with self.locked():
            before = self.load()
            finding, blobs = change(before)
            done = self.save(finding, blobs)
            if logged_seal(self.path.parent / LOG, self.path.name) is not None:
                self.export()
        return before, done

    def export(self, to: Path | None = None) -> Bundle:
        """Enter the finding into LOG.md of its evidence folder; with `to`, copy the bundle there first.
        Raises BadInput for a bundle that does not verify, and for a copy that already exists."""
        finding = self.load()
        for artifact in finding.artifacts:
            self.read_artifact(artifact)
        bundle = self
        if to is not None and to.resolve() != self.path.parent.resolve():
            bundle = Bundle(to / self.path.name)
            if bundle.path.exists():
                raise BadInput.expected("export", bundle.path, "nothing there", "something")
            for name in (FINDING, *finding.files):
                _write(bundle.path / name, read_bytes(self.path / name, "finding", limits.FINDING))
        _log(bundle.path.parent / LOG, bundle.path.name, finding)
        return bundle


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically; a file that already holds these bytes is not touched."""
    with contextlib.suppress(OSError):
        if not path.is_symlink() and path.is_file() and path.read_bytes() == data:
            return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error("evidence", path, f"to write {len(data)} bytes", error) from error
    write_whole(path, data, "evidence")


def is_bundle(path: Path) -> bool:
    """Whether the folder holds a finding, damaged or not: a finding.json of any kind is checked, never
    skipped."""
    return os.path.lexists(path / FINDING)


def find_bundles(folder: Path) -> list[Bundle]:
    """The bundles in `folder`, or `folder` itself, in descending order of name."""
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
    """Find a bundle by path, folder name or slug; an empty name means the only open one. Raises BadInput."""
    if name and is_bundle(Path(name)):
        return Bundle(Path(name))
    found = find_bundles(folder)
    if name:
        fitting = [b for b in found if b.path.name == name or b.path.name[11:] == name]
    else:
        fitting = [b for b in found if _is_open(b)]
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
        return False  # A damaged bundle is not open: `find_bundle` must still find the others.


def log_entry(name: str, finding: Finding) -> str:
    """The paragraph for a finding in LOG.md."""
    kinds = [node.status for node in finding.nodes if is_active(node)]
    counts = ", ".join(f"{kinds.count(s)} {s}" for s in get_args(Status) if s in kinds)
    open_ = sum(p.level != "warning" for p in judge(finding))
    left = f" {open_} open." if open_ else ""
    return (
        f"## {finding.at[:10]}: {one_line(finding.title)}, `{name}/`\n"
        f"{state_words(finding)}. {counts}.{left} Seal `{finding.seal}`.\n"
    )


def logged_seal(log: Path, name: str) -> str | None:
    """The seal of a bundle that LOG.md records; None when it records none."""
    try:
        text = read_text(log, "log of findings", limits.FINDING)
    except BadInput:
        return None
    for part in re.split(r"(?m)^(?=## )", text):
        if f", `{name}/`\n" in part and (match := re.search(r"Seal `([^`]*)`\.", part)):
            return match[1]
    return None


def _log(path: Path, name: str, finding: Finding) -> None:
    """Put the entry of a finding on top, in place of an older entry of the same finding."""
    there = os.path.lexists(path)
    text = read_text(path, "log", limits.FINDINGS_LOG) if there else _LOG_TITLE
    head, *entries = re.split(r"(?m)^(?=## )", text)
    others = "".join(entry for entry in entries if f", `{name}/`\n" not in entry)
    gap = "\n" if others else ""
    write_whole(path, f"{head.rstrip()}\n\n{log_entry(name, finding)}{gap}{others}")
