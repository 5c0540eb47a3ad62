"""Change a finding on disk, for `engine why`, the screens and the notebook. Each change holds the lock of the finding's
folder, so a shell and a screen can work on the same finding."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import platform
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine.errors import BadInput, EngineError, RunLogError
from engine.findings.bundle import (
    LOG,
    Blobs,
    Bundle,
    copy_flip,
    copy_run,
    find_bundles,
    path_of,
    slug_of,
)
from engine.findings.check import check_bundle, faults_of_test
from engine.findings.finding import CannotClose, Cause, Closed, Finding, Note, Parent, Test
from engine.flips.ending import ending_plan, split_kind
from engine.flips.flip_folder import read_pairs, read_verdict
from engine.flips.plan import Plan
from engine.flips.proposals import proposals
from engine.flips.verdicts import ENDS_IT, ENDS_IT_HERE, INVALID
from engine.log.fold import Follower
from engine.log.folder import RunFolder, read_command, settings_of
from engine.log.observed import observation, run_id
from engine.redact import Redactor
from engine.sealing import now_utc


class Suspect(NamedTuple):
    """A change that would end the observation."""

    assignment: str
    why: str = ""


def begin(
    folder: Path,
    run: RunFolder,
    name: str = "",
    suspects: Iterable[Suspect] = (),
    *,
    slug: str = "",
    why_of: Bundle | None = None,
) -> Bundle:
    """Create a finding in `folder` about what `run` showed: `alert ID`, `check ID`, `identity ID` or `exit`; without a
    name, about the observation that proves most. Raises BadInput, also if `why_of` is given and `run` is not one of the
    runs that had its cause."""
    observed = observation(run, name)
    slug = slug or slug_of(f"{run.name} {observed.id}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", slug):
        raise BadInput.expected("finding", slug, "a name of a-z, 0-9 and -", repr(slug))
    source = os.path.relpath(run.path, path_of(folder, slug, now_utc()))
    parent = None if why_of is None else parent_of(why_of)
    if parent is not None and observed.run_id not in parent.runs:
        expected = f"a run that had {parent.cause} of {parent.finding}"
        raise BadInput.expected("observation", observed.run, expected, "another run")
    made = Finding(
        slug=slug,
        host=platform.node(),
        source=_redacted(source),
        observed=dataclasses.replace(
            observed, run=_redacted(observed.run), text=_redacted(observed.text)
        ),
        parent=parent,
        **_signed(),
    )
    for possible in suspects:
        made = _with_cause(made, run.path, *possible)
    return Bundle.create(folder, made, copy_run(run))


def _with_cause(finding: Finding, run: Path, assignment: str, why: str) -> Finding:
    """Add a possible cause. Raises BadInput for one that the finding has, or that does not change the observed run."""
    (change,) = ending_plan(run, finding.observed, assignment, order_seed=0).changes
    assignment = _must_have_words(assignment, "change")
    kind, _ = split_kind(assignment)
    if any(
        (known.change, split_kind(known.assignment)[0]) == (change, kind)
        for known in finding.causes
    ):
        raise BadInput.expected("cause", finding.slug, "a new one", f"{change}, which it has")
    id_ = f"c{len(finding.causes) + 1}"
    cause = Cause(id=id_, assignment=assignment, change=change, why=_redacted(why), **_signed())
    return replace(finding, closed=None, causes=(*finding.causes, cause))


def _signed() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return {"author": user, "at": now_utc()}


def _redacted(text: str) -> str:
    """Return a user's text for storage: without secrets, as valid UTF-8."""
    return Redactor().text(text.encode("utf-8", "backslashreplace").decode()).text.strip()


def _must_have_words(text: str, what: str) -> str:
    if kept := _redacted(text):
        return kept
    raise BadInput.expected(what, "of the finding", "some words", "none")


def parent_of(bundle: Bundle) -> Parent:
    """Return the reference to a finding's confirmed cause, for a finding about it. Raises BadInput without one."""
    finding = bundle.load()
    if not finding.confirmed:
        raise BadInput.expected("finding", bundle.path, "one with a confirmed cause", "none")
    cause = finding.confirmed[0]
    runs = [finding.observed.run_id]
    for test in finding.tests:
        if test.cause == cause.id and test.verdict in (ENDS_IT, ENDS_IT_HERE):
            flip = bundle.flip_of(test.id)
            runs += [run_id(RunFolder(flip / pair.a.run)) for pair in read_pairs(flip)]
    return Parent(finding=bundle.path.name, cause=cause.id, runs=tuple(runs))


def suspect(bundle: Bundle, assignment: str, why: str = "") -> Finding:
    """Add a possible cause. Raises BadInput for one that does not change the observed run."""
    run = _source(bundle, bundle.load())
    return bundle.change(lambda now: _with_cause(now, run, assignment, why))


def _source(bundle: Bundle, finding: Finding) -> Path:
    """Return the folder of the observed run. Raises BadInput if it is not there any more."""
    path = bundle.path / finding.source
    found = run_id(RunFolder(path)) if path.is_dir() else "nothing there"
    if found != finding.observed.run_id:
        expected = f"the observed run {finding.observed.run}"
        raise BadInput.expected("run", path, expected, found)
    return Path(os.path.relpath(path))


def plan_test(
    bundle: Bundle, cause: str = "", *, steps: int | None = None, budget_s: float | None = None
) -> tuple[Cause, Plan]:
    """Plan a test of a cause, or of the one to test next. Raises BadInput."""
    finding = bundle.load()
    chosen = finding.cause(cause) if cause else finding.next_cause
    if chosen is None:
        found = "one that is confirmed" if finding.confirmed else "none that is open"
        raise BadInput.expected("cause", bundle.path, "one to test", found)
    plan = ending_plan(
        _source(bundle, finding),
        finding.observed,
        chosen.assignment,
        # Random, so that no two plans are the same.
        order_seed=secrets.randbelow(1 << 31),
        # Counts the tests of all causes, also in other findings about it: each makes a wrong verdict more likely.
        attempt=_tests_about(finding, bundle.path.parent) + 1,
        steps=steps,
        budget_s=budget_s,
    )
    return chosen, plan


def _tests_about(finding: Finding, folder: Path) -> int:
    """Return the number of tests about an observation in all findings of a folder."""
    count = 0
    for bundle in find_bundles(folder):
        with contextlib.suppress(EngineError):
            other = bundle.load()
            count += len(other.tests) * (other.observed == finding.observed)
    return count


def register(bundle: Bundle, cause: Cause, plan: Plan, flip: Path) -> Test:
    """Register a test, before the flip in `flip` is begun. Raises BadInput for one that is there already, and for a
    plan of something else."""
    if os.path.lexists(flip):
        raise BadInput.expected("flip folder", flip, "a new one", "something")
    where = _redacted(os.path.relpath(flip.absolute(), bundle.path.resolve()))

    def with_test(finding: Finding) -> Finding:
        if plan.observed != finding.observed:
            expected = f"one that asks about {finding.observed.name} of {finding.observed.run}"
            raise BadInput.expected("plan", finding.slug, expected, "another one")
        id_ = f"t{len(finding.tests) + 1}"
        test = Test(id=id_, cause=cause.id, plan_sha256=plan.sha256, flip=where, **_signed())
        return replace(finding, closed=None, tests=(*finding.tests, test))

    return bundle.change(with_test).tests[-1]


def pending(bundle: Bundle) -> tuple[Test, Path] | None:
    """Return the test whose flip was begun and that has no verdict yet, with the flip's folder; None without one."""
    for test in bundle.load().tests:
        flip = Path(os.path.relpath(bundle.path / test.flip))
        if not test.verdict and flip.is_dir():
            return test, flip
    return None


def record(bundle: Bundle, test: Test) -> Finding:
    """Copy the ended flip of a registered test into the finding, with its verdict; one that does not verify is recorded
    as INVALID, with the reason. Raises BadInput for one that has not ended."""
    flip = bundle.path / test.flip
    verdict = read_verdict(flip)
    if verdict is None or verdict["interrupted"]:
        raise BadInput.expected("flip", flip, "a verdict", "none: it has not ended")
    word, reason = verdict["verdict"], verdict["reason"]
    ended = replace(test, verdict=word)
    if faults := faults_of_test(bundle.load(), ended, bundle.observed, flip):
        word, reason = INVALID, f"does not verify: {faults[0]}"
    return _end_test(bundle, test, word, reason, {} if faults else copy_flip(flip, test.id))


def spend(bundle: Bundle, test: Test) -> Finding:
    """Record an interrupted test: its runs do not count, but the test counts as an attempt. Otherwise a user could
    confirm anything by interrupting each test that goes badly. Raises BadInput."""
    reason = "interrupted: its runs count for nothing, and the next test takes more pairs"
    return _end_test(bundle, test, INVALID, reason, {})


def _end_test(bundle: Bundle, test: Test, verdict: str, reason: str, copied: Blobs) -> Finding:
    ended = replace(test, verdict=verdict, reason=_redacted(reason))

    def with_verdict(finding: Finding) -> Finding:
        tests = tuple(ended if one.id == test.id else one for one in finding.tests)
        return replace(finding, tests=tests)

    return bundle.change(with_verdict, copied)


def withdraw(bundle: Bundle, cause: str, why: str) -> Finding:
    """Mark a cause as no longer suspected; its tests still count as attempts. Raises BadInput."""

    def without(finding: Finding) -> Finding:
        suspected = finding.cause(cause)
        withdrawn = replace(suspected, withdrawn=_must_have_words(why, "reason"))
        causes = tuple(withdrawn if one is suspected else one for one in finding.causes)
        return replace(finding, closed=None, causes=causes)

    return bundle.change(without)


def note(bundle: Bundle, text: str) -> Finding:
    """Add a note of a person; it is no evidence."""
    kept = Note(text=_must_have_words(text, "note"), **_signed())
    return bundle.change(lambda now: replace(now, notes=(*now.notes, kept)))


def close(bundle: Bundle, unresolved: str = "") -> Finding:
    """Close with the confirmed cause, or as unresolved with a reason. Raises CannotClose, and BadInput for a finding
    that does not verify."""
    _must_be_sound(bundle)

    def closed(finding: Finding) -> Finding:
        if not unresolved and not finding.confirmed:
            levels = ", ".join(f"{one.id} {finding.level_of(one)}" for one in finding.causes)
            raise CannotClose(
                f"finding: {finding.slug} — expected a cause that a test confirms, found {levels or 'none'}",
                hint="`engine why test` runs the next experiment; --unresolved REASON closes without one",
            )
        done = Closed(
            outcome="unresolved" if unresolved else "root-cause",
            text=_must_have_words(unresolved or _root_cause(finding), "reason"),
            **_signed(),
        )
        return replace(finding, closed=done)

    return bundle.change(closed)


def _root_cause(finding: Finding) -> str:
    """Return what the tests confirm, in one sentence."""
    confirmed = [
        f"{cause.assignment} ends it ({test.id}: {test.reason})"
        for cause in finding.confirmed
        for test in finding.tests
        if test.cause == cause.id and test.verdict in (ENDS_IT, ENDS_IT_HERE)
    ]
    return f"{finding.observed.name} of {finding.observed.run}: {'; '.join(confirmed)}"


def export(bundle: Bundle, to: Path | None = None) -> Bundle:
    """Enter the finding into LOG.md; with `to`, copy it into that evidence folder first. Raises BadInput for a finding
    that does not verify."""
    # The entry in LOG.md is rewritten anyway, so it need not match.
    _must_be_sound(bundle, but=LOG)
    return bundle.export(to)


def _must_be_sound(bundle: Bundle, but: str = "") -> None:
    checked = check_bundle(bundle)
    if checked.unread or (faults := [one for one in checked.faults if one.where != but]):
        found = checked.unread or str(faults[0])
        raise BadInput.expected("finding", bundle.path, "one that verifies", found)


def suspects_of(run: RunFolder) -> list[Suspect]:
    """Return what may have caused what a run showed, likeliest first: changes that its alerts, its decisions and, of a
    script, its identities suggest; none of a run without settings. Raises RunLogError."""
    try:
        settings, command = settings_of(run), read_command(run)
    except RunLogError:
        return []
    found = proposals(Follower(run).read_all(), settings, command)
    return [Suspect(one.assignment, one.source) for one in found if one.seen and not one.impossible]
