"""Checking a whole bundle: every byte, every locator, every rule.

    fail      a byte, a file or a seal is not as the tool left it; a locator does not say what it said;
              a rule is broken, or the finding was closed against one
    unknown   sound, and open: no root cause yet
    pass      sound and closed

A finding.json that is a folder, a FIFO or a file that cannot be read could not be checked at all: that is
unknown too, never passed over.

A fault names the file or the evidence. Found are changes by anything but this tool: bit rot, editors,
hands. Someone who rewrites a bundle with the tool's own code is found by the seal in LOG.md, if that
was not rewritten too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine import limits
from engine.errors import BadInput
from engine.files import read_bytes
from engine.findings.bundle import FINDING, LOG, Bundle, logged_seal
from engine.findings.finding import Finding
from engine.findings.form import load
from engine.findings.locate import check_locator, check_source, tested_problems
from engine.findings.rules import Problem, judge
from engine.verdict import Level, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    where: str
    """The file, or the id of the evidence."""
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    bundle: Bundle
    finding: Finding | None
    """None where it is damaged, or could not be read."""
    faults: tuple[Fault, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    unread: str = ""
    """Why nothing of it could be checked: finding.json is no file that can be read."""

    @property
    def broken(self) -> dict[str, str]:
        """Artifacts that do not verify, by sha256, with the reason."""
        if self.finding is None:
            return {}
        paths = {a.path: a.sha256 for a in self.finding.artifacts}
        return {paths[f.where]: f.text for f in self.faults if f.where in paths}

    @property
    def integrity(self) -> Verdict:
        """Whether everything is as it was left and still says what it said; rules aside."""
        if self.unread:
            return Verdict(Level.UNKNOWN, f"could not be checked: {self.unread}")
        if self.faults:
            more = f" and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            return Verdict(Level.FAIL, f"{self.faults[0]}{more}")
        assert self.finding is not None
        files = sum(a.kept for a in self.finding.artifacts) + len(self.finding.derived) + 1
        return Verdict(Level.PASS, f"{files} files and {_count(self.finding)} as they were")

    @property
    def standing(self) -> Verdict:
        """Whether everything is as it was left, and nothing was closed against the rules; what an open
        finding lacks is no fault of it."""
        closed = self.finding.closed if self.finding is not None else None
        if self.integrity.level is not Level.PASS or closed is None:
            return self.integrity
        levels = ("error",) if closed.outcome == "unresolved" else ("error", "open")
        against = [p for p in self.problems if p.level in levels]
        if not against:
            return self.integrity
        more = f" and {len(against) - 1} more" if len(against) > 1 else ""
        what = "closed" if closed.outcome == "unresolved" else "closed as root cause"
        return Verdict(Level.FAIL, f"{what} against {against[0]}{more}")

    @property
    def verdict(self) -> Verdict:
        if self.standing.level is not Level.PASS:
            return self.standing
        assert self.finding is not None
        for level, what in (("error", Level.FAIL), ("open", Level.UNKNOWN)):
            found = [p for p in self.problems if p.level == level]
            unresolved = (
                self.finding.closed is not None and self.finding.closed.outcome == "unresolved"
            )
            if found and not (level == "open" and unresolved):
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                return Verdict(what, f"{found[0]}{more}")
        if self.finding.closed is None:
            return Verdict(Level.UNKNOWN, "sound, and not closed")
        if self.finding.closed.outcome == "unresolved":
            return Verdict(Level.UNKNOWN, f"closed unresolved: {self.finding.closed.text}")
        return Verdict(Level.PASS, f"root cause, {_count(self.finding)} checked")


def _count(finding: Finding) -> str:
    count = sum(1 for _ in finding.evidence())
    return f"{count} piece{'s' if count != 1 else ''} of evidence"


def check_bundle(bundle: Bundle) -> Checked:
    """Re-hash everything and look at every locator again."""
    try:
        raw = bundle.read_finding()
    except BadInput as error:
        return Checked(
            bundle=bundle, finding=None, faults=(), problems=(), notes=(), unread=error.message
        )
    try:
        finding = load(raw, bundle.path / FINDING)
    except BadInput as error:
        fault = Fault(where=FINDING, text=error.message)
        return Checked(bundle=bundle, finding=None, faults=(fault,), problems=(), notes=())
    faults, kept = list(_file_faults(bundle, finding)), dict[str, bytes | None]()
    for artifact in finding.artifacts:
        try:
            kept[artifact.sha256] = bundle.read_artifact(artifact)
        except BadInput as error:
            faults.append(Fault(where=artifact.path, text=error.message))
    notes: list[str] = []
    for _, evidence in finding.evidence():
        if evidence.artifact in kept:
            faults += [
                Fault(where=evidence.id, text=text)
                for text in check_locator(finding, evidence, kept.get)
            ]
        said = check_source(finding, evidence, bundle.path)
        faults += [Fault(where=evidence.id, text=text) for text in said.faults]
        notes += said.notes
    notes += [
        f"{a.name} ({a.sha256[:12]}, {a.size} bytes) was not copied: known by hash and size"
        for a in finding.artifacts
        if not a.kept
    ]
    checked = Checked(
        bundle=bundle, finding=finding, faults=tuple(faults), problems=(), notes=tuple(notes)
    )
    return Checked(
        bundle=bundle,
        finding=finding,
        faults=tuple(faults),
        problems=(*judge(finding, checked.broken), *tested_problems(finding, kept.get)),
        notes=tuple(notes),
    )


def _file_faults(bundle: Bundle, finding: Finding) -> Iterator[Fault]:
    """Files that should not be there, files made for people that are not as they were, and the log."""
    wanted = {FINDING, *finding.derived, *(a.path for a in finding.artifacts if a.kept)}
    folders = {str(Path(name).parent) for name in wanted}
    for path in sorted(bundle.path.rglob("*")):
        name = str(path.relative_to(bundle.path))
        if path.is_dir() and not path.is_symlink():
            if name not in folders:
                yield Fault(where=name, text="a folder that the finding does not name")
        elif name not in wanted:
            yield Fault(where=name, text="a file that the finding does not name")
    for name, digest in finding.derived.items():
        path = bundle.path / name
        try:
            data = read_bytes(path, "file", limits.ARTIFACT)
        except BadInput as error:
            yield Fault(where=name, text=f"cannot be read: {error.message}")
            continue
        found = hashlib.sha256(data).hexdigest()
        if path.is_symlink() or found != digest:
            yield Fault(where=name, text=f"expected sha256 {digest[:16]}, found {found[:16]}")
    seal = logged_seal(bundle.path.parent / LOG, bundle.path.name)
    if seal is not None and seal != finding.seal:
        text = f"has the seal {seal[:16]}, the finding {finding.seal[:16]}: export it again if you changed it"
        yield Fault(where=LOG, text=text)
