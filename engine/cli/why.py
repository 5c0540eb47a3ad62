"""Five whys: claims that answer each other's why, each with evidence that can be checked.

    engine why new hang --claim "no step in 90 minutes"        what was seen, node n1
    engine why link n1 runs/kd-1 --metric gpu0.gpu_util_pct    evidence of a run: numbers over a time
    engine why add --why-of n1 --claim "the dense upload ran out of memory"
    engine why link n2 flips/x --contradicts                   evidence of a flip
    engine why refute n2 --reason "both arms completed"
    engine why add --why-of n1 --kind mechanism --claim "attention ran on the CPU"
    engine why alternative n3 --claim "slow disk" --test "engine flip ..." --if-true "..." --if-false "..." --minutes 5
    engine why link n3 --run-command "engine distill kd.toml" --expect-exit 1     a reproduction
    engine why link n3 flips/y --answers a1 --outcome excluded --result "equal with the file in memory"
    engine why withdraw e2 --reason "of another run"           kept, struck out, supports nothing
    engine why show | verify | close --text "..." | export

A command speaks of the only open finding in ./evidence, or of the one that --finding names. A cause
counts as supported by a flip or a reproduction alone; else it is printed "unverified". A reproduction starts
a run; an alternative is excluded by the test it names: that command, a flip of that setting, a run of that
spec. A command that ended with 64, 65, 70, 126, 127 or by a signal supports nothing. `engine evidence`
lists and checks what is there.

What is linked of a run is one thing: --events, --metric, --alert, --check, --exit, or a time; of a flip its
verdict, its plan and every pair; of a file all of it, or --lines. It is written down as it is now, without
secrets (`engine.findings.redact`), so it can be checked when its source is gone.

Exit codes of verify: 0 sound and closed, 1 something was changed or a rule is broken, 2 sound and open.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.arguments import real, whole
from engine.errors import UsageError
from engine.terminal import put, put_json, say

if TYPE_CHECKING:
    from engine.findings.bundle import Bundle
    from engine.findings.capture import Capture
    from engine.findings.changes import Done
    from engine.findings.finding import Finding, Says
    from engine.findings.redact import Redactor
    from engine.log.folder import RunFolder

HELP = "five whys: claims, evidence, alternatives, root cause"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.add_argument(
            "--finding", default="", metavar="NAME", help="the finding: slug or folder"
        )
        made.add_argument(
            "--evidence",
            type=Path,
            default=Path("evidence"),
            metavar="DIR",
            help="folder of findings",
        )
        made.add_argument("--json", action="store_true", help="print one JSON value")
        return made

    new = action("new", "begin a finding with what was seen")
    new.add_argument("slug", help="a short name: a-z, 0-9 and -")
    new.add_argument("--claim", required=True, help="what was seen")
    new.add_argument("--title", default="", help="a headline (default: the claim)")

    add = action("add", "add an answer to a why")
    add.add_argument(
        "--why-of", action="append", required=True, metavar="NODE", help="what it explains"
    )
    add.add_argument("--claim", required=True)
    kinds = ("hypothesis", "mechanism", "process", "observation")
    add.add_argument("--kind", choices=kinds, default="hypothesis")
    add.add_argument("--id", default="", help="its name (default: the next number)")

    _add_link_arguments(action("link", "put evidence under a node"))

    refute = action("refute", "say that a claim is wrong, and why")
    refute.add_argument("node")
    refute.add_argument("--reason", required=True)

    other = action("alternative", "name another explanation and the cheapest test that would tell")
    other.add_argument("node")
    other.add_argument("--claim", required=True)
    other.add_argument("--test", required=True, help="what to do, best a command")
    other.add_argument("--if-true", required=True, help="what the test shows if it is so")
    other.add_argument("--if-false", required=True, help="what the test shows if it is not")
    other.add_argument("--minutes", type=real(1e9), required=True, help="what the test costs")

    withdraw = action("withdraw", "take back a claim, evidence or an alternative: kept, struck out")
    withdraw.add_argument(
        "entry", metavar="ENTRY", help="a node, evidence or an alternative: n2, e3, a1"
    )
    withdraw.add_argument("--reason", required=True)

    action("verify", "check every byte, every piece of evidence and every rule")
    action("show", "print the tree")
    close = action("close", "close as the root cause, or as unresolved")
    close.add_argument("--text", default="", help="the root cause in a sentence")
    close.add_argument("--unresolved", default="", metavar="REASON", help="why there is none")
    export = action("export", "enter it into LOG.md; with --to, copy it into another folder first")
    export.add_argument("--to", type=Path, metavar="DIR", help="another evidence folder")


def _add_link_arguments(link: argparse.ArgumentParser) -> None:
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


def run(a: argparse.Namespace) -> int:
    from engine.findings import changes
    from engine.findings.bundle import find_bundle

    if a.action == "new":
        bundle = changes.begin(a.evidence, a.slug, a.claim, title=a.title)
        return _say(bundle, f"n1 of {bundle.path}", a)
    bundle = find_bundle(a.finding, a.evidence)
    if a.action in ("verify", "show"):
        return _verify(bundle, a) if a.action == "verify" else _show(bundle, a)
    if a.action == "export":
        bundle = changes.export(bundle, a.to)
        return _say(bundle, str(bundle.path), a)
    done = _change(bundle, a)
    if done.reopened:
        say("the finding was closed; this opens it again")
    return _say(bundle, done.said, a)


def _change(bundle: Bundle, a: argparse.Namespace) -> Done:
    from engine.findings import changes

    match a.action:
        case "add":
            return changes.add(bundle, a.claim, why_of=a.why_of, kind=a.kind, id_=a.id)
        case "refute":
            return changes.refute(bundle, a.node, a.reason)
        case "withdraw":
            return changes.withdraw(bundle, a.entry, a.reason)
        case "alternative":
            asked = {"test": a.test, "if_true": a.if_true, "if_false": a.if_false}
            return changes.suspect(bundle, a.node, a.claim, **asked, minutes=a.minutes)
        case "close":
            return changes.close(bundle, unresolved=a.unresolved, text=a.text)
    return _link(bundle, a)


def _say(bundle: Bundle, said: str, a: argparse.Namespace) -> int:
    if a.json:
        put_json(_fields(bundle, bundle.load()))
    else:
        put(said)
    return 0


def _fields(bundle: Bundle, finding: Finding) -> dict[str, Any]:
    import msgspec

    from engine.findings.rules import effective_status, judge

    return {
        "folder": str(bundle.path),
        "finding": msgspec.to_builtins(finding),
        "status": {node.id: effective_status(finding, node)[0] for node in finding.nodes},
        "problems": [problem.as_fields() for problem in judge(finding)],
    }


def _verify(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.cli.evidence import exit_code_of, print_checked
    from engine.findings.verify import check_bundle

    checked = check_bundle(bundle)
    print_checked([checked], as_json=a.json, rules=True)
    return exit_code_of([checked], checked.verdict)


def _show(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.findings.text import tree_lines
    from engine.findings.verify import check_bundle

    checked = check_bundle(bundle)
    finding = bundle.load()
    if a.json:
        put_json(_fields(bundle, finding))
        return 0
    for fault in checked.faults:
        say(f"changed: {fault}")
    put("\n".join(tree_lines(finding, checked.broken)))
    return 0


# Evidence


def _link(bundle: Bundle, a: argparse.Namespace) -> Done:
    from dataclasses import replace

    from engine.findings import changes
    from engine.findings.kinds import words_of
    from engine.findings.redact import Redactor, words
    from engine.findings.rules import carries_nothing

    if a.answers and (a.contradicts or a.outcome is None or not a.result):
        raise UsageError("--answers needs --outcome and --result, and no --contradicts")
    taken: list[Capture] = []

    def take() -> Capture:
        taken.append(_capture(a, Redactor()))
        return taken[0]

    says: Says = "answers" if a.answers else "contradicts" if a.contradicts else "supports"
    answered = {"answers": a.answers, "outcome": a.outcome, "result": a.result}
    done = changes.link(bundle, a.node, take, says=says, **answered if a.answers else {})
    for blob in taken[0].blobs:
        if blob.artifact.redacted:
            say(f"{blob.artifact.what}: {words(blob.artifact.redacted)}")
    evidence = done.finding.node(a.node).evidence[-1]
    if mute := carries_nothing(evidence):
        say(f"{evidence.id} is kept, and {mute}")
    return replace(done, said=f"{done.said}: {words_of(evidence.locator)}")


def _capture(a: argparse.Namespace, redactor: Redactor) -> Capture:
    """The evidence that the arguments name."""
    from engine.findings import capture

    if sum(x is not None for x in (a.source, a.run_command, a.note)) != 1:
        raise UsageError("expected one of EVIDENCE, --run-command and --note")
    if a.run_command is not None:
        expected = {"expect_exit": a.expect_exit, "expect_text": a.expect_text}
        return capture.capture_command(a.run_command, redactor, **expected, limit_s=a.timeout)
    if a.note is not None:
        return capture.capture_statement(a.note, redactor)
    found = capture.whole_or_run(a.source, redactor, _range(a.lines) if a.lines else (0, 0))
    return found if isinstance(found, capture.Capture) else _capture_run(found, a, redactor)


def _capture_run(run: RunFolder, a: argparse.Namespace, redactor: Redactor) -> Capture:
    """The part of a run that is asked for, with what is captured of every run."""
    from engine.findings.capture import capture_part
    from engine.findings.context import run_blobs, view_of

    begin = view_of(run).first_unix_s or 0.0
    asked = [x for x in (a.events, a.metric, a.alert, a.check, a.exit or None) if x is not None]
    if len(asked) > 1 or not (asked or a.from_s is not None or a.to_s is not None):
        raise UsageError(
            "of a run, expected one of --events, --metric, --alert, --check, --exit, or a time: --from, --to"
        )
    found = capture_part(
        run,
        redactor,
        exit_=a.exit,
        alert=a.alert,
        check=a.check,
        metric=a.metric,
        seqs=_range(a.events) if a.events is not None else None,
        log=a.log,
        from_unix_s=float("-inf") if a.from_s is None else begin + a.from_s,
        to_unix_s=float("inf") if a.to_s is None else begin + a.to_s,
        steps=_range(a.steps) if a.steps else (0, None),
    )
    return found.with_attached(run_blobs(run, redactor, a.project))


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UsageError(f"expected FIRST or FIRST-LAST, found {text!r}")
    return int(first), int(last) if dash else int(first)
