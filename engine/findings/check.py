"""Verify a finding's folder: every byte, the observation, and the verdict of every test, recomputed from its files.

    fail      a byte, a file or a seal was changed; a test does not verify; closed with a cause that none confirms
    unknown   unchanged, and open, unresolved or of an earlier version
    pass      unchanged, and closed with a confirmed cause

A test counts only where its flip is that of the plan that was registered before its first run, the plan has the
observed run as arm A and the cause as its one change, each arm was started with its own settings, and its logs agree
with the pairs. The verdict is then recomputed from the pairs.

Changes by anything but this tool are detected: bit rot, editors, people. A folder that was rewritten with the tool's
own code is detected by the seal in LOG.md, unless that was rewritten too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput, EngineError
from engine.files import read_bytes
from engine.findings.bundle import FINDING, LOG, Bundle, logged_seal
from engine.findings.finding import Finding, Test
from engine.findings.older import LEVEL, Older
from engine.flips.arms import Outcome, shown_fields
from engine.flips.command import LINE, LINE_VARIABLE, WORDS
from engine.flips.ending import settings_as_run, split_kind
from engine.flips.flip_folder import read_plan_of, read_record
from engine.flips.judge import judge
from engine.flips.pair import Pair, same_work
from engine.flips.plan import EXTERNAL, Plan
from engine.flips.statistics import ALPHA, pairs_to_confirm
from engine.flips.verdicts import ENDS_IT, ENDS_IT_HERE, INVALID, KEEPS_IT, UNTESTED
from engine.flips.watched import arms_of, given_to
from engine.log.folder import COMMAND, RunFolder, read_command
from engine.log.observed import LOGS, lines_of, observations, run_id
from engine.sealing import digest, now_utc
from engine.spec import spec_from_dict
from engine.verdict import Level, Verdict

_READ_ERRORS = (EngineError, OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Fault:
    where: str
    """The file, or the id of the test."""
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    bundle: Bundle
    finding: Finding | Older | None = None
    """None when it is damaged or cannot be read."""
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    unread: str = ""
    """Reason why nothing could be checked: finding.json is not a readable file."""

    @property
    def broken(self) -> dict[str, str]:
        """Reasons why tests do not verify, by their ids."""
        reasons: dict[str, str] = {}
        for fault in self.faults:
            reasons.setdefault(fault.where.removeprefix("tests/").partition("/")[0], fault.text)
        return reasons

    @property
    def is_sound(self) -> bool:
        return not self.faults and not self.unread

    def as_fields(self) -> dict[str, Any]:
        """Return the fields that `engine why check --json` prints."""
        return {
            "folder": self.bundle.path,
            "level": self.verdict.level,
            "reason": self.verdict.reason,
            "seal": None if self.finding is None else self.finding.seal,
            "faults": self.faults,
            "notes": self.notes,
        }

    @property
    def verdict(self) -> Verdict:
        if self.unread:
            return Verdict(Level.UNKNOWN, f"could not be checked: {self.unread}")
        if self.faults:
            more = f" and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            return Verdict(Level.FAIL, f"{self.faults[0]}{more}")
        assert self.finding is not None, "what could not be loaded has a fault"
        files = f"{len(self.finding.files) + 1} files unchanged"
        if isinstance(self.finding, Older):
            return Verdict(Level.UNKNOWN, f"{files}, {LEVEL}")
        closed = self.finding.closed
        if closed is None:
            return Verdict(Level.UNKNOWN, f"{files}, not closed")
        if closed.outcome == "unresolved":
            return Verdict(Level.UNKNOWN, f"{files}, closed unresolved: {closed.text}")
        tests = len(self.finding.tests)
        judged = f"{tests} test{'s' if tests != 1 else ''} judged again"
        return Verdict(Level.PASS, f"root cause, {files}, {judged}")


def check_bundle(bundle: Bundle) -> Checked:
    """Hash every file and judge every test again."""
    try:
        read_bytes(bundle.path / FINDING, "finding", limits.FINDING)
    except BadInput as error:
        return Checked(bundle=bundle, unread=error.message)
    try:
        finding = bundle.read()
    except BadInput as error:
        return Checked(bundle=bundle, faults=(Fault(FINDING, error.message),))
    if isinstance(finding, Older):
        changed = _file_faults(bundle, finding.files, {*finding.files}, finding.seal)
        return Checked(bundle=bundle, finding=finding, faults=tuple(changed))
    hashes = {name: file.sha256 for name, file in finding.files.items()}
    copied = {name for name, file in finding.files.items() if file.is_copied}
    faults = [*_file_faults(bundle, hashes, copied, finding.seal)]
    if not faults:
        faults += _observation_faults(bundle, finding)
        for test in finding.tests:
            # A test that did not verify when it was recorded has no copy, and does not count.
            is_copied = f"tests/{test.id}/plan.json" in hashes
            if test.verdict and (is_copied or test.verdict != INVALID):
                flip = bundle.flip_of(test.id)
                texts = faults_of_test(finding, test, bundle.observed, flip)
                faults += [Fault(test.id, text) for text in texts]
        faults += _closing_faults(bundle, finding)
    return Checked(bundle=bundle, finding=finding, faults=tuple(faults), notes=(*_notes(finding),))


def _notes(finding: Finding) -> Iterator[str]:
    if not finding.observed.sign:
        yield "judged by the rules of an earlier version, under which any failure of the same id is the same"
    for name, file in finding.files.items():
        if not file.is_copied:
            yield f"{name}: not copied, known by hash and size"
        if file.redacted:
            yield f"{name}: redacted, otherwise whole"


def _file_faults(
    bundle: Bundle, hashes: dict[str, str], copied: set[str], seal: str
) -> Iterator[Fault]:
    """Yield files that are missing, changed, or should not be there, and a seal that differs from LOG.md."""
    wanted = {FINDING, *copied}
    folders = {str(above) for name in wanted for above in Path(name).parents}
    for path in sorted(bundle.path.rglob("*")):
        name = str(path.relative_to(bundle.path))
        is_folder = path.is_dir() and not path.is_symlink()
        if name not in (folders if is_folder else wanted):
            yield Fault(name, f"{FINDING} does not list it")
    for name in sorted(copied):
        path = bundle.path / name
        try:
            data = read_bytes(path, "file", limits.ARTIFACT)
            found = "a link" if path.is_symlink() else digest(data)
        except BadInput as error:
            yield Fault(name, f"cannot be read: {error.message}")
            continue
        if found != hashes[name]:
            yield Fault(name, f"expected sha256 {hashes[name][:16]}, found {found[:16]}")
    logged = logged_seal(bundle.path)
    if logged is not None and logged != seal:
        text = f"records the seal {logged[:16]}, but {FINDING} has {seal[:16]}: "
        text += "if you edited the finding, export it again"
        yield Fault(LOG, text)


def _observation_faults(bundle: Bundle, finding: Finding) -> Iterator[Fault]:
    """Compare the observation with the logs of the run that were copied. Its texts are compared only if nothing was
    redacted in the logs."""
    seen = finding.observed
    files = {log: finding.files.get(f"observed/{log}.jsonl") for log in LOGS}
    is_whole = all(
        file is None or (file.is_copied and not file.redacted) for file in files.values()
    )
    own = files[seen.log]
    if own is not None and not own.is_copied:
        return
    try:
        named = [one for one in observations(bundle.observed) if one.name == seen.name]
    except EngineError as error:
        yield Fault("observed", error.message)
        return
    same = [one for one in named if (one.log, one.seq) == (seen.log, seen.seq)]
    if is_whole:
        # An observation of an earlier version has no field `sign`.
        same = [
            one
            for one in same
            if dataclasses.replace(one, run=seen.run, sign=one.sign if seen.sign else "") == seen
        ]
    if not same:
        yield Fault("observed", f"its logs do not record {seen.name} as the finding states it")


def _closing_faults(bundle: Bundle, finding: Finding) -> Iterator[Fault]:
    closed, parent = finding.closed, finding.parent
    if closed is not None and closed.outcome == "root-cause" and not finding.confirmed:
        yield Fault(FINDING, "closed with a root cause, and no test confirms one")
    if parent is None:
        return
    try:
        above = Bundle(bundle.path.parent / parent.finding).load()
    except BadInput:
        return  # it lies elsewhere
    if parent.cause not in {cause.id for cause in above.confirmed}:
        yield Fault(
            FINDING,
            f"it explains cause {parent.cause} of {parent.finding}, which has not confirmed that cause",
        )


# Verdicts of tests, recomputed


def faults_of_test(finding: Finding, test: Test, observed: RunFolder, flip: Path) -> list[str]:
    """Return why the flip in `flip` does not support the test's verdict; `observed` is the run that the finding is
    about, or its copy. An INVALID verdict is only recomputed from its pairs."""
    try:
        plan, (header, pairs) = read_plan_of(flip), read_record(flip)
        found = []
        if test.verdict != INVALID:
            found = [
                *_plan_faults(finding, test, observed, plan, header),
                *_pair_faults(finding, test, plan, pairs, header["at"], flip),
            ]
    except _READ_ERRORS as error:
        return [f"its flip cannot be read: {error}"]
    if not found:
        judgement = judge(plan, pairs) or judge(plan, pairs, "ended")
        word = judgement.verdict if judgement is not None else "nothing"
        # A test that an earlier version's rules left untested may have a verdict by today's, unless that refutes it.
        if word != test.verdict and (test.verdict != UNTESTED or word == KEEPS_IT):
            found.append(f"its pairs say {word}, it says {test.verdict}")
    return found


def _plan_faults(
    finding: Finding, test: Test, observed: RunFolder, plan: Plan, header: dict[str, Any]
) -> Iterator[str]:
    cause, file = finding.cause(test.cause), finding.files.get(f"tests/{test.id}/plan.json")
    hashes = {header["plan_sha256"]}
    if file is None or not file.redacted:
        hashes.add(plan.sha256)
    if hashes != {test.plan_sha256}:
        yield "its flip is of another plan than the one that was registered"
    if plan.observed != finding.observed:
        yield "its plan asks about another observation"
    if (plan.changes, plan.changes_on_purpose) != (
        (cause.change,),
        split_kind(cause.assignment)[0],
    ):
        yield f"its plan changes {' and '.join(map(str, plan.changes)) or 'nothing'}"
    number = 1 + [one.id for one in finding.tests].index(test.id)
    few = plan.pairs_min < pairs_to_confirm(plan.attempt) or plan.steps < finding.observed.step
    # Only a confirmation needs more pairs the more tests there were before it (`attempt`).
    confirms = test.verdict in (ENDS_IT, ENDS_IT_HERE) and finding.observed.sign
    if few or plan.alpha > ALPHA or (confirms and plan.attempt < number):
        yield "its plan asks for fewer pairs or steps, or for a larger alpha, than a test requires"
    if not cause.at <= test.at <= header["at"]:
        yield "the cause and the test were not registered before its flip"
    if plan.command is None:
        # Both as this version reads them: an earlier version had other settings.
        if spec_from_dict(dict(plan.spec)).to_dict() != settings_as_run(observed.path):
            yield "its arm A has other settings than the observed run"
        return
    command = read_command(observed)
    words = arms_of(observed, {cause.change.key: cause.change.b}).words
    if command is None or (plan.command.words, plan.command.folder) != (words, command.folder):
        yield "its arm A is another command than the observed run"


def _pair_faults(
    finding: Finding, test: Test, plan: Plan, pairs: Sequence[Pair], begun: str, folder: Path
) -> Iterator[str]:
    order = plan.order()
    if plan.attempt:
        named = {Path(outcome.run).name for pair in pairs for outcome in pair.arms}
        extra = {path.name for path in (folder / "arms").glob("*")} - named
        if extra or any("." in name for name in named):
            yield "a run was repeated after an interruption, or belongs to no pair"
    ids = {finding.observed.run_id}
    for number, pair in enumerate(pairs, start=1):
        if pair.number != number or number > plan.pairs_max or pair.b_first != order[number - 1]:
            yield f"pair {number} has another number or order than in its plan"
        if why := _not_flipped(plan, pair, folder):
            yield f"pair {number}: {why}"
        if same_work(plan, pair.a, pair.b, folder) != pair.proofs["equal"]:
            yield f"pair {number}: its logs disagree with the recorded comparison of B's work with A's"
        for outcome in pair.arms:
            run = RunFolder(folder / outcome.run)
            if (name := run_id(run)) in ids:
                yield f"{outcome.run} is the same run as another one of the test"
            ids.add(name)
            first = next(iter(lines_of(run.events if run.events.exists() else run.watch)))
            if now_utc(first.unix_s) < begun:
                yield f"{outcome.run} began before the flip"
            if run.read_effective().get("flip_sha256", test.plan_sha256) != test.plan_sha256:
                yield f"{outcome.run} is of another flip"
            fields = shown_fields(plan, outcome.arm, run, outcome.state)
            differ = {name for name in fields if fields[name] != getattr(outcome, name)}
            if differ & {"shown", "trace"}:
                yield f"{outcome.run}: its logs do not agree with the pair"
            if "code" in differ:
                yield f"{outcome.run}: the list of its script's files differs from the recorded one"


def _not_flipped(plan: Plan, pair: Pair, folder: Path) -> str:
    """Return why the two runs of a pair do not differ only in the change; empty if they do."""
    a, b = (_started_with(plan, folder, outcome) for outcome in (pair.a, pair.b))
    (change,) = plan.changes
    differ = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    key = LINE_VARIABLE if LINE.fullmatch(change.key) else change.key
    if differ != {key}:
        return f"its arms differ in {', '.join(sorted(differ)) or 'nothing'}"
    if plan.command is None and (a[key], b[key]) != (change.a, change.b):
        return f"its arms have {key} {a[key]} and {b[key]}"
    return ""


def _started_with(plan: Plan, folder: Path, outcome: Outcome) -> dict[str, Any]:
    """Return the settings of a run, or words, variables and settings of a command's run without the run's own name."""
    run = RunFolder(folder / outcome.run)
    effective = run.read_effective()
    if plan.command is None:
        return {
            f"{section}.{key}": value
            for section, settings in effective["spec"].items()
            if section not in EXTERNAL
            for key, value in settings.items()
        }
    start = effective[COMMAND]
    found = {WORDS: "\0".join(start["arguments"]), **given_to(start)}
    return {name: text.replace(run.name, "") for name, text in found.items()}
