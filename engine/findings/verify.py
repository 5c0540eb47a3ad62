"""Verification of a whole bundle: every byte, every locator, every rule.

    fail      a byte, a file or a seal was changed; a locator does not match its artifact; a rule is
              broken, or the finding was closed although a rule forbade it
    unknown   intact and open: no root cause yet
    pass      intact and closed

A finding.json that is a folder, a FIFO or an unreadable file cannot be checked at all. The verdict is then
unknown; the bundle is never skipped.

The artifact must match its locator. If the run or the flip that it came from is still in its place, that must
match too: logs are append-only, so a difference means a change. A project's file may change later, so a
difference there gives a note and no fault; so does a source that no longer exists.

A fault names the file or the evidence. Verification detects changes made by anything but this tool: bit rot,
editors, people. A bundle that was rewritten with the tool's own code is detected by the seal in LOG.md,
unless that was rewritten too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine import limits
from engine.errors import BadInput, EngineError
from engine.files import parse_json, read_bytes
from engine.findings.bundle import FINDING, LOG, Bundle, logged_seal
from engine.findings.finding import (
    Evidence,
    FileRange,
    Finding,
    OfRun,
    Read,
    digest,
    is_active,
    load,
)
from engine.findings.kinds import KINDS, Piece
from engine.findings.rules import Problem, in_the_way, judge, names_a_run
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
    finding: Finding | None = None
    """None when it is damaged or cannot be read."""
    faults: tuple[Fault, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    unread: str = ""
    """Why nothing could be checked: finding.json is not a readable file."""

    @property
    def broken(self) -> dict[str, str]:
        """Artifacts that do not verify, by sha256, with the reason."""
        if self.finding is None:
            return {}
        paths = {a.path: a.sha256 for a in self.finding.artifacts}
        return {paths[f.where]: f.text for f in self.faults if f.where in paths}

    @property
    def integrity(self) -> Verdict:
        """Whether all files are unchanged and all locators match, whatever the rules say."""
        if self.unread:
            return Verdict(Level.UNKNOWN, f"could not be checked: {self.unread}")
        if self.faults:
            return Verdict(Level.FAIL, _and_more(self.faults))
        assert self.finding is not None
        files = len(self.finding.files) + 1
        return Verdict(Level.PASS, f"{files} files and {_count(self.finding)} as they were")

    @property
    def standing(self) -> Verdict:
        """The integrity, or FAIL when the finding was closed against the rules. What an open finding lacks
        does not count."""
        closed = self.finding.closed if self.finding is not None else None
        if self.integrity.level is not Level.PASS or closed is None:
            return self.integrity
        unresolved = closed.outcome == "unresolved"
        against = in_the_way(self.problems, unresolved=unresolved)
        if not against:
            return self.integrity
        what = "closed" if unresolved else "closed as root cause"
        return Verdict(Level.FAIL, f"{what} against {_and_more(against)}")

    @property
    def verdict(self) -> Verdict:
        if self.standing.level is not Level.PASS:
            return self.standing
        assert self.finding is not None
        closed = self.finding.closed
        if closed is None:
            for level, what in (("error", Level.FAIL), ("open", Level.UNKNOWN)):
                if found := [p for p in self.problems if p.level == level]:
                    return Verdict(what, _and_more(found))
            return Verdict(Level.UNKNOWN, "sound, and not closed")
        if closed.outcome == "unresolved":
            return Verdict(Level.UNKNOWN, f"closed unresolved: {closed.text}")
        return Verdict(Level.PASS, f"root cause, {_count(self.finding)} checked")


def _and_more(found: Sequence[object]) -> str:
    return f"{found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}"


def _count(finding: Finding) -> str:
    count = sum(1 for _ in finding.evidence())
    return f"{count} piece{'s' if count != 1 else ''} of evidence"


def check_bundle(bundle: Bundle) -> Checked:
    """Re-hash every file and re-check every locator and rule."""
    try:
        raw = bundle.read_finding()
    except BadInput as error:
        return Checked(bundle=bundle, unread=error.message)
    try:
        finding = load(raw, bundle.path / FINDING)
    except BadInput as error:
        return Checked(bundle=bundle, faults=(Fault(where=FINDING, text=error.message),))
    faults, kept = list(_file_faults(bundle, finding)), dict[str, bytes | None]()
    notes: list[str] = []
    for artifact in finding.artifacts:
        try:
            kept[artifact.sha256] = bundle.read_artifact(artifact)
        except BadInput as error:
            faults.append(Fault(where=artifact.path, text=error.message))
    for _, evidence in finding.evidence():
        found: list[str] = []
        if evidence.artifact in kept:
            found += _differences(Piece(finding, evidence, kept.get))
        fault, note = _source_difference(finding, evidence, bundle.path)
        found += [fault] if fault else []
        notes += [f"{evidence.id}: {evidence.source}: {note}"] if note else []
        faults += [Fault(where=evidence.id, text=text) for text in found]
    notes += [
        f"{a.name} ({a.sha256[:12]}, {a.size} bytes) was not copied: known by hash and size"
        for a in finding.artifacts
        if not a.kept
    ]
    checked = Checked(bundle=bundle, finding=finding, faults=tuple(faults), notes=tuple(notes))
    tested = _tested_problems(finding, kept.get)
    return replace(checked, problems=(*judge(finding, checked.broken), *tested))


def _differences(piece: Piece) -> list[str]:
    """List where a locator differs from its artifact."""
    if piece.read(piece.evidence.artifact) is None:
        return []  # known by hash and size alone
    locator = piece.evidence.locator
    try:
        return list(KINDS[type(locator)].differences(locator, piece))
    except (EngineError, ValueError, KeyError, TypeError) as error:
        return [f"it cannot be read as it was: {error}"]


def _source_difference(finding: Finding, evidence: Evidence, folder: Path) -> tuple[str, str]:
    """Compare evidence with its source and return (fault, note). `folder` is the bundle's folder."""
    again_of = KINDS[type(evidence.locator)].again
    if not evidence.source:
        return "", ""
    if finding.artifact(evidence.artifact).redacted or "[redacted" in evidence.source:
        return "", "not compared, secrets were taken out"
    path = folder / evidence.source
    if not path.exists():
        return "", "is not here, not compared"
    try:
        again = None if again_of is None else again_of(evidence.locator, path)
    except (EngineError, OSError) as error:
        return f"{evidence.source}: cannot be read any more: {error}", ""
    if again is None:
        return "", "something else lies there now, not compared"
    if again.blob.artifact.redacted:
        return "", "not compared, secrets are taken out of it by now"
    if again.blob.artifact.sha256 == evidence.artifact and again.locator == evidence.locator:
        return "", ""
    if isinstance(evidence.locator, FileRange):
        return "", "the file was changed since"
    return f"{evidence.source}: does not say any more what was taken from it", ""


def _tested_problems(finding: Finding, read: Read) -> Iterator[Problem]:
    """Yield a problem for each alternative that was excluded by a run other than the one that its test
    starts. The settings captured with the run record the spec that it was started with."""
    for node in finding.nodes:
        for alternative in node.alternatives:
            answer, wanted = alternative.answer, names_a_run(alternative.test)
            if answer is None or answer.outcome != "excluded" or not wanted:
                continue
            if not is_active(node) or not is_active(alternative):
                continue
            evidence = next(e for e in node.evidence if e.id == answer.evidence)
            if not isinstance(evidence.locator, OfRun):
                continue
            if why := _another_run(finding, evidence, wanted, alternative.test, read):
                text = f"{alternative.id} is not excluded by the test it names: {evidence.id} {why}"
                yield Problem(rule="E-WHY-004", level="open", node=node.id, text=text)


def _another_run(finding: Finding, evidence: Evidence, spec: str, test: str, read: Read) -> str:
    """Say why the run behind the evidence was not started with `spec` and the settings of the test; empty
    when it was."""
    names = {a.sha256: a.name for a in finding.artifacts}
    kept = [sha for sha in evidence.attached if names.get(sha) == "effective.json"]
    raw = read(kept[0]) if kept else None
    try:
        effective = parse_json(raw or b"", "effective.json", "settings")
        file, sets, tree = effective["spec_file"], effective["sets"], effective["spec"]
        if Path(str(file)).name != Path(spec).name:
            return f"is of a run of {Path(str(file)).name}, the test names {spec}"
        for key, value in re.findall(r"--set[ =](\S+?)=(\S+)", test):
            section, _, name = key.partition(".")
            if f"{key}={value}" not in sets and str(tree[section].get(name)) != value:
                return f"is of a run without {key}={value}"
    except (BadInput, KeyError, TypeError, AttributeError):
        return "is of a run of which it is not recorded how it was started"
    return ""


def _file_faults(bundle: Bundle, finding: Finding) -> Iterator[Fault]:
    """Yield files that should not be there, generated files that were changed, and a seal that differs from
    LOG.md."""
    wanted = {FINDING, *finding.files}
    folders = {str(Path(name).parent) for name in wanted}
    for path in sorted(bundle.path.rglob("*")):
        name = str(path.relative_to(bundle.path))
        if path.is_dir() and not path.is_symlink():
            if name not in folders:
                yield Fault(where=name, text="a folder that the finding does not name")
        elif name not in wanted:
            yield Fault(where=name, text="a file that the finding does not name")
    for name, sha256 in finding.derived.items():
        path = bundle.path / name
        try:
            data = read_bytes(path, "file", limits.ARTIFACT)
        except BadInput as error:
            yield Fault(where=name, text=f"cannot be read: {error.message}")
            continue
        found = digest(data)
        if path.is_symlink() or found != sha256:
            yield Fault(where=name, text=f"expected sha256 {sha256[:16]}, found {found[:16]}")
    seal = logged_seal(bundle.path.parent / LOG, bundle.path.name)
    if seal is not None and seal != finding.seal:
        text = f"has the seal {seal[:16]}, the finding {finding.seal[:16]}: export it again if you changed it"
        yield Fault(where=LOG, text=text)
