"""Changes of a finding on disk, for `engine why`, the screens and the notebook. Each holds the lock of its folder, so a
shell and a screen can work on the same finding. Errors are the engine's own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from engine.errors import BadInput, RunLogError
from engine.findings import finding as records
from engine.findings.bundle import LOG, Bundle, copy_flip, copy_run, path_of, slug_of
from engine.findings.check import check_bundle, faults_of_test
from engine.findings.finding import Cause, Finding, Parent, Test
from engine.flips.ending import ending_plan
from engine.flips.flip_folder import read_pairs, read_verdict
from engine.flips.plan import Change, Plan
from engine.flips.proposals import proposals
from engine.flips.verdicts import ENDS_IT, ENDS_IT_HERE, INVALID
from engine.log.folder import RunFolder, read_command, settings_of
from engine.log.follow import Follower
from engine.log.observed import Observed, observation, run_id
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
    name about what proves most. Raises BadInput."""
    observed = observation(run, name)
    slug = slug or slug_of(f"{run.name} {observed.id}")
    source = os.path.relpath(run.path, path_of(folder, slug, now_utc()))
    parent = None if why_of is None else parent_of(why_of)
    made = records.new_finding(slug, observed, source, parent)
    for one in suspects:
        change = _change_of(run.path, observed, one.assignment)
        made = records.add_cause(made, one.assignment, change, one.why)
    return Bundle.create(folder, made, copy_run(run))


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


def _change_of(run: Path, observed: Observed, assignment: str) -> Change:
    (change,) = ending_plan(run, observed, assignment, order_seed=0).changes
    return change


def suspect(bundle: Bundle, assignment: str, why: str = "") -> Finding:
    """Add a possible cause. Raises BadInput for what is no change of the observed run."""
    finding = bundle.load()
    change = _change_of(_source(bundle, finding), finding.observed, assignment)
    return bundle.change(lambda f: records.add_cause(f, assignment, change, why))


def _source(bundle: Bundle, finding: Finding) -> Path:
    """The folder of the observed run. Raises BadInput where it is not there any more."""
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
        # Drawn, so that no two plans are the same.
        order_seed=secrets.randbelow(1 << 31),
        # Of all causes: whoever tries many is wrong more often.
        attempt=len(finding.tests) + 1,
        steps=steps,
        budget_s=budget_s,
    )
    return chosen, plan


def register(bundle: Bundle, cause: Cause, plan: Plan, flip: Path) -> Test:
    """Register a test, before the flip in `flip` is begun. Raises BadInput for one that is there already."""
    if os.path.lexists(flip):
        raise BadInput.expected("flip folder", flip, "a new one", "something")
    where = os.path.relpath(flip.absolute(), bundle.path.resolve())
    return bundle.change(lambda f: records.add_test(f, cause, plan, where)).tests[-1]


def pending(bundle: Bundle) -> tuple[Test, Path] | None:
    """The test whose flip was begun and that has no verdict yet, with the flip's folder; None without one."""
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
    finding = bundle.load()
    told = records.with_verdict(finding, test, word, reason)
    done = next(one for one in told.tests if one.id == test.id)
    if faults := faults_of_test(finding, done, bundle.observed, flip):
        word, reason = INVALID, f"does not verify: {faults[0]}"
    copied = {} if faults else copy_flip(flip, test.id)
    return bundle.change(lambda f: records.with_verdict(f, test, word, reason), copied)


def spend(bundle: Bundle, test: Test) -> Finding:
    """Record a test that was interrupted. It counts for nothing, and as an attempt: who may end a test when a run does
    not please him could otherwise confirm anything. Raises BadInput."""
    reason = "interrupted: its runs count for nothing, and the next test takes more pairs"
    return bundle.change(lambda f: records.with_verdict(f, test, INVALID, reason))


def withdraw(bundle: Bundle, cause: str, why: str) -> Finding:
    """Mark a cause as no longer suspected. Raises BadInput."""
    return bundle.change(lambda f: records.withdraw(f, f.cause(cause), why))


def note(bundle: Bundle, text: str) -> Finding:
    """Keep a person's words; they support nothing."""
    return bundle.change(lambda f: records.add_note(f, text))


def close(bundle: Bundle, unresolved: str = "") -> Finding:
    """Close with the confirmed cause, or as unresolved with a reason. Raises CannotClose, and BadInput for a finding
    that does not verify."""
    _must_be_sound(bundle)
    return bundle.change(lambda f: records.close(f, unresolved))


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
