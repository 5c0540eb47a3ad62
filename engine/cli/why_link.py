"""`engine why link`: evidence under a node, taken where it lies.

    EVIDENCE a run       one thing of it: --events, --metric, --alert, --check, --exit, or a time
             a flip      its verdict, its plan and every pair
             a file      all of it, or --lines
    --run-command        what a command does, kept; with --expect-exit or --expect-text a reproduction, which
                         has to start a run of its own
    --note               what a person says

It supports the claim, or contradicts it, or is the test of an alternative (--answers). What is taken is
written down as it is now, without secrets (`engine.findings.redact`), so it can be checked when its source
is gone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.numbers import real, whole
from engine.errors import UsageError
from engine.terminal import say

if TYPE_CHECKING:
    from engine.findings.bundle import Bundle
    from engine.findings.capture import Blob, Capture
    from engine.findings.finding import Finding
    from engine.findings.redact import Redactor

_SAYS = ("supports", "contradicts")


def add_link_arguments(link: argparse.ArgumentParser) -> None:
    """Those of what is taken, and of what it says."""
    link.add_argument("node")
    link.add_argument("source", type=Path, nargs="?", metavar="EVIDENCE", help="run, flip or file")
    link.add_argument("--run-command", metavar="COMMAND", help="run this and keep what it does")
    link.add_argument("--note", metavar="TEXT", help="what a person says")
    link.add_argument(
        "--expect-exit",
        type=whole(limits.EXIT_STATUS.most),
        metavar="N",
        help="a reproduction: its exit status",
    )
    link.add_argument(
        "--expect-text", default="", metavar="TEXT", help="a reproduction: in its output"
    )
    link.add_argument(
        "--timeout", type=real(limits.WAIT.most), default=600.0, metavar="S", help="of the command"
    )
    link.add_argument("--events", metavar="FIRST[-LAST]", help="of a run: lines of a log, by seq")
    link.add_argument("--log", choices=("events", "device", "watch"), default="events")
    link.add_argument("--metric", metavar="NAME", help="of a run: loss, gpu0.gpu_util_pct, ...")
    link.add_argument("--steps", metavar="FIRST-LAST", help="of a metric: these steps only")
    link.add_argument(
        "--from",
        dest="from_s",
        type=real(1e12),
        metavar="S",
        help="of a run: seconds since its start",
    )
    link.add_argument(
        "--to", dest="to_s", type=real(1e12), metavar="S", help="of a run: until then"
    )
    link.add_argument("--exit", action="store_true", help="of a run: the record of how it ended")
    link.add_argument("--alert", metavar="ID", help="of a run: an alert, with its readings")
    link.add_argument("--check", metavar="ID", help="of a run: what a first-minute check answered")
    link.add_argument("--lines", metavar="FIRST-LAST", help="of a file")
    link.add_argument(
        "--project", type=Path, metavar="DIR", help="git checkout to note (default: .)"
    )
    link.add_argument("--contradicts", action="store_true", help="it speaks against the claim")
    link.add_argument("--answers", metavar="ALTERNATIVE", help="it is the test of this alternative")
    link.add_argument("--outcome", choices=("excluded", "holds", "undecided"))
    link.add_argument("--result", default="", help="what the test of the alternative showed")


def link_evidence(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    """The finding with the evidence under a node of it, the files to keep, and what to say."""
    from engine.findings.redact import Redactor, words
    from engine.findings.report import locator_words
    from engine.findings.support import carries_nothing
    from engine.findings.whys import answer, blobs_of, link

    if a.answers and (a.contradicts or a.outcome is None or not a.result):
        raise UsageError("--answers needs --outcome and --result, and no --contradicts")
    finding.node(a.node)  # before a command is run for nothing
    redactor = Redactor()
    capture = _capture(a, redactor)
    says = "answers" if a.answers else _SAYS[a.contradicts]
    done = link(finding, a.node, capture, says=says, relative_to=bundle.path)  # type: ignore[arg-type]
    evidence = done.node(a.node).evidence[-1]
    if a.answers:
        done = answer(done, a.answers, outcome=a.outcome, text=a.result, evidence=evidence.id)
    for blob in blobs_of(capture):
        if blob.artifact.redacted:
            say(f"{blob.artifact.what}: {words(blob.artifact.redacted)}")
    if mute := carries_nothing(evidence):
        say(f"{evidence.id} is kept, and {mute}")
    said = f"{evidence.id} {says} {a.node}: {locator_words(evidence.locator)}"
    return done, blobs_of(capture), said


def _capture(a: argparse.Namespace, redactor: Redactor) -> Capture:
    """The evidence that the arguments name."""
    from engine.errors import BadInput
    from engine.findings.capture import capture_file, capture_statement
    from engine.findings.command import capture_command
    from engine.findings.flips import capture_flip, is_flip
    from engine.log.folder import RunFolder, is_run

    if sum(x is not None for x in (a.source, a.run_command, a.note)) != 1:
        raise UsageError("expected one of EVIDENCE, --run-command and --note")
    if a.run_command is not None:
        return capture_command(
            a.run_command,
            redactor,
            expect_exit=a.expect_exit,
            expect_text=a.expect_text,
            limit_s=a.timeout,
        )
    if a.note is not None:
        return capture_statement(a.note, redactor)
    if is_flip(a.source):
        return capture_flip(a.source, redactor)
    if is_run(a.source):
        return _capture_run(RunFolder(a.source), a, redactor)
    if a.source.is_dir():
        raise BadInput.expected("evidence", a.source, "a run, a flip or a file", "another folder")
    first, last = _range(a.lines) if a.lines else (0, 0)
    return capture_file(a.source, redactor, first, last)


def _capture_run(run: Any, a: argparse.Namespace, redactor: Redactor) -> Capture:
    """The part of a run that is asked for, with what is captured of every run."""
    from engine.findings import capture
    from engine.findings.context import run_blobs, view_of

    begin = view_of(run).first_unix_s or 0.0
    from_unix_s = float("-inf") if a.from_s is None else begin + a.from_s
    to_unix_s = float("inf") if a.to_s is None else begin + a.to_s
    asked = [x for x in (a.events, a.metric, a.alert, a.check, a.exit or None) if x is not None]
    if len(asked) > 1 or not (asked or a.from_s is not None or a.to_s is not None):
        raise UsageError(
            "of a run, expected one of --events, --metric, --alert, --check, --exit, or a time: --from, --to"
        )
    if a.exit:
        found = capture.capture_exit(run, redactor)
    elif a.alert is not None:
        found = capture.capture_alert(run, a.alert, redactor)
    elif a.check is not None:
        found = capture.capture_check(run, a.check, redactor)
    elif a.events is not None:
        found = capture.capture_events(run, a.log, *_range(a.events), redactor)
    elif a.metric is not None:
        first, last = _range(a.steps) if a.steps else (0, None)
        found = capture.capture_metric(
            run,
            a.metric,
            redactor,
            from_unix_s=from_unix_s,
            to_unix_s=to_unix_s,
            first_step=first,
            last_step=last,
        )
    else:
        found = capture.capture_window(run, a.log, from_unix_s, to_unix_s, redactor)
    return found.with_attached(run_blobs(run, redactor, a.project))


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UsageError(f"expected FIRST or FIRST-LAST, found {text!r}")
    return int(first), int(last) if dash else int(first)
