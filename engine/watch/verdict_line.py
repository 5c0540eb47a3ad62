"""The verdict on a run in one line, the same in every command and screen: its level, since which step, and what to
do.

    HEALTHY: 28 checks passed
    SUSPECT since step 51: the model is trained in eval mode
    WRONG since step 3: gradients are not zeroed between steps
    ENDED at step 40: killed from outside, not for lack of memory
    UNKNOWN: loading the teacher, no step yet

A pure function of a view. Of several problems the line names the one that explains the others: a failed check comes
before an alert, and an alert that other work on the machine can explain comes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from engine.catalogue import BY_ID, CHECKS
from engine.errors import EXIT_FAIL, EXIT_PASS, EXIT_UNKNOWN
from engine.log.events import CHECK, FACT, FAIL, IDENTITY, PASS, SUSPICION, Judged
from engine.log.text import ending_text, event_text, has_ended, one_line
from engine.log.view import RunView
from engine.watch.crashes import about_crash

HEALTHY, SUSPECT, WRONG, ENDED, UNDECIDED = "HEALTHY", "SUSPECT", "WRONG", "ENDED", "UNKNOWN"
SIGNS = {HEALTHY: "✓", SUSPECT: "!", WRONG: "✗", ENDED: "■", UNDECIDED: "?"}
ASCII_SIGNS = {HEALTHY: "+", SUSPECT: "!", WRONG: "x", ENDED: "#", UNDECIDED: "?"}
"""ASCII sign of each level, shown with its word and colour."""

EXPLAINS_AN_END = ("non_finite", "gpu_lost")
"""Alerts that explain how a run ended."""
CAUSES = ("cpu_bound_teacher", "data_wait", "memory_ceiling", "update_too_large")
"""Alerts that explain other alerts of their level."""
OF_THE_MACHINE = ("throttled", "step_time_drift", "unaccounted")
"""Alerts that other work on the machine can explain."""
FEWEST_IMPORTED = 10
"""Minimum number of logged steps from which an imported run without alerts counts as healthy."""
NO_FAULT = (
    *("completed", "stopped", "terminated", "interrupted", "declined"),
    *("unwatched", "imported"),
)
"""States of a run that ended normally."""
_ENDS = {
    "killed_external": "killed from outside, not for lack of memory",
    "oom_memcg": "out of memory, its control group was full",
    "oom_global": "out of memory, the machine was full",
    "device_failed": "the GPU failed",
    "disk_full": "the disk is full",
    "host_lost": "the machine stopped or restarted",
    "vanished": "the cause was not recorded",
    "unknown": "the cause is not known",
}
"""Text of the verdict for each state of a run that did not end normally."""
_MEMORY = ("oom_memcg", "oom_global", "alloc_failed")
_FROM_OUTSIDE = ("killed_external", "host_lost", "vanished", "unknown")
"""Ends with a cause outside the run: findings from before the end are listed first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of a run."""

    level: str
    text: str
    rank: int = 0
    """Sort key: a finding with a lower rank explains more of the other findings."""
    since: int | None = None
    """First step at which the problem was seen; None if it does not belong to a step."""
    detail: str = ""
    """Evidence of the finding, with numbers."""
    action: str = ""
    """Next thing to do; empty if there is nothing to do."""
    id: str = ""
    """Source of the finding, such as `check step_labels`; empty for the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict(Finding):
    """The verdict on a run: the finding that explains most."""

    others: tuple[Finding, ...] = ()
    """The other findings, ordered by how much they explain."""

    @property
    def line(self) -> str:
        """The verdict in one line, without a sign."""
        at = (
            ""
            if self.since is None
            else f" {'at' if self.level == ENDED else 'since'} step {self.since}"
        )
        ends = [finding for finding in self.others if finding.level == ENDED]
        then = f"; ended at step {ends[0].since}, {ends[0].text}" if ends else ""
        count = len(self.others) - len(ends)
        more = f" (and {count} more)" if count else ""
        return one_line(f"{self.level}{at}: {self.text}{more}{then}")

    def sign(self, *, ascii_only: bool = False) -> str:
        return (ASCII_SIGNS if ascii_only else SIGNS)[self.level]

    def signed(self, *, ascii_only: bool = False) -> str:
        """Return the line with the sign of its level before it."""
        return f"{self.sign(ascii_only=ascii_only)} {self.line}"

    @property
    def exit_code(self) -> int:
        """Exit code: 1 for a wrong or failed run, 2 for suspect or unknown, else 0."""
        return {HEALTHY: EXIT_PASS, SUSPECT: EXIT_UNKNOWN, UNDECIDED: EXIT_UNKNOWN}.get(
            self.level, EXIT_FAIL
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        return {
            "level": self.level.lower(),
            "text": self.text,
            "since_step": self.since,
            "detail": self.detail,
            "action": self.action,
            "id": self.id,
            "line": self.line,
            "others": [
                {
                    "level": finding.level.lower(),
                    "text": finding.text,
                    "since_step": finding.since,
                    "id": finding.id,
                }
                for finding in self.others
            ],
        }


def verdict_of(view: RunView, state: str, path: object = "RUN") -> RunVerdict:
    """Return the verdict on a run in `state` (`RunView.state`); `path` is used in the commands that it names."""
    findings = sorted(_findings(view, state, str(path)), key=lambda finding: finding.rank)
    if findings:
        first, *others = findings
        return RunVerdict(**asdict(first), others=tuple(others))
    judged = _counts_of_judged(view)
    if judged:
        how = _end_prefix(view, state)
        return RunVerdict(level=HEALTHY, text=f"{how}{judged}")
    if view.process is not None:
        text = "its steps and its loss are not visible from outside"
    elif has_ended(state):
        few = len(view.steps) if view.imported is not None else 0
        script = view.script_ended
        if few:
            text = f"{few} logged steps are too few to judge"
        elif script is not None and script.optimizers == 0:
            text = "the script created no torch optimizer, so that its steps were not seen"
        else:
            text = "it ended before anything could be judged"
    else:
        phase = "starting" if view.phase is None else event_text(view.phase)
        text = f"{phase}, no step yet"
    return RunVerdict(level=UNDECIDED, text=text)


def run_verdict_lines(view: RunView, state: str, path: object = "RUN") -> list[str]:
    """Render the verdict with its sign, and below it the evidence and what to do."""
    verdict = verdict_of(view, state, path)
    detail = [verdict.detail] if verdict.detail not in ("", verdict.text) else []
    action = [f"do: {verdict.action}"] if verdict.action else []
    return [verdict.signed(), *(one_line(f"  {text}") for text in [*detail, *action])]


def _findings(view: RunView, state: str, path: str) -> Iterator[Finding]:
    order = [about.id for about in CHECKS]
    failed = [check for check in view.checks.values() if check.level == FAIL]
    for check in sorted(failed, key=lambda c: order.index(c.id) if c.id in order else -1):
        about = BY_ID[CHECK].get(check.id)
        warns = about is not None and not about.stops
        yield Finding(
            level=SUSPECT if warns else WRONG,
            text=about.wrong if about is not None else f"{check.id}: {check.text}",
            rank=60 if warns else 0,
            since=check.step,
            detail=check.text,
            action=about.remedy if about is not None else f"engine checks {path}",
            id=f"check {check.id}",
        )
    yield from _identity_findings(view)
    yield from map(_alert_finding, view.alerts.values())
    if view.errors:
        first = view.errors[0].note.text
        text = first.split("; ")[0]
        yield Finding(level=WRONG, text=text, rank=40, detail=first, action=f"engine tail {path}")
    if view.non_finite and not any(alert.id == "non_finite" for alert in view.alerts.values()):
        yield _number_finding(view)
    if has_ended(state) and state not in NO_FAULT and not _ended_by_check(view):
        yield _end_finding(view, state, path)


def _identity_findings(view: RunView) -> Iterator[Finding]:
    first: dict[tuple[str, str], Judged] = {}
    for judged in view.identities:
        if judged.level in (FAIL, SUSPICION):
            first.setdefault((judged.level, judged.id), judged)
    for (level, id), judged in first.items():
        if level == SUSPICION and (FAIL, id) in first:
            continue
        about = BY_ID[IDENTITY].get(id)
        yield Finding(
            level=WRONG if level == FAIL else SUSPECT,
            text=about.wrong if about is not None else judged.text,
            rank=5 if level == FAIL else 65,
            since=judged.step,
            detail=judged.text,
            action="" if about is None else about.remedy_with(judged.framework),
            id=f"identity {id}",
        )


def _alert_finding(alert: Judged) -> Finding:
    if alert.level == FAIL:
        rank = 10 if alert.id in EXPLAINS_AN_END else 30
    else:
        rank = 90 if alert.id in OF_THE_MACHINE else 80
    rank -= alert.id in CAUSES
    return Finding(
        level=WRONG if alert.level == FAIL else SUSPECT,
        text=alert.text,
        rank=rank,
        since=alert.first_step,
        detail=alert.meaning,
        action=f"test it: {alert.flip}" if alert.flip else alert.no_flip,
        id=f"alert {alert.id}",
    )


def _number_finding(view: RunView) -> Finding:
    """Return the finding on numbers that were not finite in earlier steps and are finite again."""
    first, last = view.non_finite[0], view.non_finite[-1]
    steps = f"at step {first.step}" if first.step == last.step else f"{first.step} to {last.step}"
    text = f"{first.id} was {first.text} {'' if first.step == last.step else 'in steps '}{steps}"
    return Finding(
        level=SUSPECT,
        text=f"{text}, and is finite again",
        rank=70,
        since=first.step,
        detail=f"{len(view.non_finite)} numbers were not finite",
        action="check the batches and the gradient norms of these steps",
        id=f"number {first.id}",
    )


def _end_finding(view: RunView, state: str, path: str) -> Finding:
    """Return the finding on a run that did not end normally."""
    exit_ = view.exit
    text = _ENDS.get(state, "")
    if state == "host_lost" and exit_ is not None:
        text = exit_.cause
    if state in _MEMORY and exit_ is not None and exit_.certainty == "probable":
        text = f"probably {text or exit_.cause}"
    script = view.script_ended
    if not text and script is not None and script.exception is not None:
        text = event_text(script)
    if not text and view.finished is not None:
        text = view.finished.reason
    if not text and exit_ is not None:
        if state == "crashed" and exit_.signal:
            text = f"crashed with {exit_.signal}"
        elif view.is_foreign and exit_.returncode:
            text = f"the command failed with exit code {exit_.returncode}"
        else:
            text = exit_.sentence.split(". ")[0]
    resume = "" if view.is_foreign else f"engine distill --resume {path}"
    detail, about = ending_text(view, state), None
    if view.imported is not None and view.finished is not None:
        about = about_crash(view.finished.reason)
        text = text or view.finished.reason
    if about is not None:
        detail, action = f"it proves: {about.proves}", about.do
    elif view.imported is not None:
        action = "read its last output: its files record nothing else about the end"
    elif state in ("host_lost", "vanished") and resume:
        action = resume
    elif state in _MEMORY:
        action = f"engine diagnose {path} shows what memory did; start again with a smaller batch"
    elif state in _FROM_OUTSIDE:
        action = "find out what ended it (a scheduler, `timeout`, a memory guard)"
        action += f"; then {resume}" if resume else ""
    elif state not in ("failed", "crashed"):
        action = f"engine diagnose {path}"
    elif view.is_foreign:
        action = (
            "read the last lines that the command printed, correct the cause, and start it again"
        )
    else:
        action = f"read the traceback in {path}/stderr.txt; then {resume}"
    return Finding(
        level=ENDED,
        text=one_line(text or state).splitlines()[0].rstrip("."),
        rank=50 if state in _FROM_OUTSIDE else 20,
        since=view.last_step,
        detail=detail,
        action=action,
    )


def _ended_by_check(view: RunView) -> bool:
    """Return whether the run ended itself because a check failed; the check is then the verdict."""
    finished = view.finished
    return (
        finished is not None
        and finished.state == "failed"
        and any(
            check.level == FAIL and finished.reason.startswith(f"check {check.id}")
            for check in view.checks.values()
        )
    )


def _end_prefix(view: RunView, state: str) -> str:
    """Return the prefix of a healthy verdict for a run that has ended."""
    if state == "completed":
        return f"completed {view.last_step:,} steps; "
    if not has_ended(state) or state in ("unwatched", "imported"):
        return ""
    return f"{state} at step {view.last_step:,}, as requested; "


def _counts_of_judged(view: RunView) -> str:
    """Return the numbers of checks and rules that passed and that could not be judged; empty if nothing was
    judged."""
    judged = [*view.checks.values(), *_worst_identities(view)]
    passed = sum(result.level in (PASS, FACT) for result in judged)
    unknown = len(judged) - passed
    singular, plural = ("check", "checks") if view.checks else ("identity", "identities")
    parts = []
    if passed:
        parts.append(f"{passed} {singular if passed == 1 else plural} passed")
    if unknown:
        parts.append(f"{unknown} could not be judged")
    if passed and (stages := len(view.audited_steps)):
        parts.append(f"{stages} step{'s' * (stages > 1)} audited")
    fewest = FEWEST_IMPORTED if view.imported is not None else 1
    if (
        not passed
        and len(view.steps) >= fewest
        and ("watch" in view.clocks or view.imported is not None)
    ):
        limitation = "; only its logged numbers could be judged" if view.imported else ""
        parts.append(f"no alert in {view.last_step:,} steps{limitation}")
    return ", ".join(parts) if passed or (parts and len(view.steps)) else ""


def _worst_identities(view: RunView) -> list[Judged]:
    return list({judged.id: judged for judged in view.identities}.values())
