"""Five whys: claims that answer each other's why, each with evidence that can be checked.

    engine why new hang --claim "no step in 90 minutes"        what was seen, node n1
    engine why link n1 runs/kd-1 --metric gpu0.gpu_util_pct    evidence of a run: numbers over a time
    engine why add --why-of n1 --claim "the dense upload ran out of memory"
    engine why link n2 flips/x --contradicts                   evidence of a flip
    engine why refute n2 --reason "both arms completed"
    engine why add --why-of n1 --kind mechanism --claim "attention ran on the CPU"
    engine why alternative n3 --claim "slow disk" --test "engine flip ..." --if-true "..." --if-false "..." --minutes 5
    engine why link n3 --run-command "python probe.py" --expect-exit 3     a reproduction
    engine why link n3 flips/y --answers a1 --outcome excluded --result "equal with the file in memory"
    engine why show | verify | close --text "..." | export

A command speaks of the only open finding in ./evidence, or of the one that --finding names. A cause
counts as supported by a flip or a reproduction alone; else it is printed "unverified". `engine evidence`
lists and checks what is there.

Exit codes of verify: 0 sound and closed, 1 something was changed or a rule is broken, 2 sound and open.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.evidence.bundle import Bundle
    from engine.evidence.capture import Blob, Capture
    from engine.evidence.finding import Finding
    from engine.evidence.redact import Redactor

HELP = "five whys: claims, evidence, alternatives, root cause"
_SAYS = ("supports", "contradicts")


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
    other.add_argument("--minutes", type=float, required=True, help="what the test costs")

    action("verify", "check every byte, every piece of evidence and every rule")
    action("show", "print the tree")
    close = action("close", "close as the root cause, or as unresolved")
    close.add_argument("--text", default="", help="the root cause in a sentence")
    close.add_argument("--unresolved", default="", metavar="REASON", help="why there is none")
    export = action("export", "enter it into LOG.md; with --to, copy it into another folder first")
    export.add_argument("--to", type=Path, metavar="DIR", help="another evidence folder")


def _add_link_arguments(link: argparse.ArgumentParser) -> None:
    link.add_argument("node")
    link.add_argument("source", type=Path, nargs="?", metavar="EVIDENCE", help="run, flip or file")
    link.add_argument("--run-command", metavar="COMMAND", help="run this and keep what it does")
    link.add_argument("--note", metavar="TEXT", help="what a person says")
    link.add_argument(
        "--expect-exit", type=int, metavar="N", help="a reproduction: its exit status"
    )
    link.add_argument(
        "--expect-text", default="", metavar="TEXT", help="a reproduction: in its output"
    )
    link.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of the command")
    link.add_argument("--events", metavar="FIRST[-LAST]", help="of a run: lines of a log, by seq")
    link.add_argument("--log", choices=("events", "device", "watch"), default="events")
    link.add_argument("--metric", metavar="NAME", help="of a run: loss, gpu0.gpu_util_pct, ...")
    link.add_argument("--steps", metavar="FIRST-LAST", help="of a metric: these steps only")
    link.add_argument(
        "--from", dest="from_s", type=float, metavar="S", help="of a run: seconds since its start"
    )
    link.add_argument("--to", dest="to_s", type=float, metavar="S", help="of a run: until then")
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


def run(arguments: argparse.Namespace) -> int:
    from engine.evidence import whys
    from engine.evidence.bundle import Bundle, find_bundle

    if arguments.action == "new":
        finding = whys.new_finding(arguments.slug, arguments.claim, title=arguments.title)
        bundle = Bundle.create(arguments.evidence, finding)
        return _say(bundle, bundle.load(), f"n1 of {bundle.path}", as_json=arguments.json)
    bundle = find_bundle(arguments.finding, arguments.evidence)
    if arguments.action in ("verify", "show", "export"):
        return {"verify": _verify, "show": _show, "export": _export}[arguments.action](
            bundle, arguments
        )
    changes = {
        "add": _add,
        "link": _link,
        "refute": _refute,
        "alternative": _alternative,
        "close": _close,
    }
    return _change(bundle, changes[arguments.action], arguments)


def _change(
    bundle: Bundle,
    change: Callable[[Finding, Bundle, argparse.Namespace], tuple[Finding, list[Blob], str]],
    arguments: argparse.Namespace,
) -> int:
    said = ""

    def changed(before: Finding) -> tuple[Finding, list[Blob]]:
        nonlocal said
        finding, blobs, said = change(before, bundle, arguments)
        return finding, blobs

    before, done = bundle.change(changed)
    if before.closed is not None and done.closed is None:
        print("the finding was closed; this opens it again", file=sys.stderr)
    return _say(bundle, done, said, as_json=arguments.json)


def _say(bundle: Bundle, finding: Finding, said: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(_fields(bundle, finding), allow_nan=False))
    else:
        print(said)
    return 0


def _fields(bundle: Bundle, finding: Finding) -> dict[str, Any]:
    import msgspec

    from engine.evidence.rules import effective_status, judge

    return {
        "folder": str(bundle.path),
        "finding": msgspec.to_builtins(finding),
        "status": {node.id: effective_status(node)[0] for node in finding.nodes},
        "problems": [
            {"rule": p.rule, "level": p.level, "node": p.node, "text": p.text}
            for p in judge(finding)
        ],
    }


def _add(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.evidence.whys import add_node

    done = add_node(finding, a.claim, why_of=a.why_of, kind=a.kind, id_=a.id)
    return done, [], f"{done.nodes[-1].id}: why of {', '.join(a.why_of)}"


def _refute(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.evidence.whys import refute

    return refute(finding, a.node, a.reason), [], f"{a.node}: refuted"


def _alternative(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.evidence.whys import add_alternative

    done = add_alternative(
        finding,
        a.node,
        a.claim,
        test=a.test,
        if_true=a.if_true,
        if_false=a.if_false,
        minutes=a.minutes,
    )
    return done, [], f"{done.node(a.node).alternatives[-1].id}: alternative to {a.node}"


def _close(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.errors import BadInput
    from engine.evidence.verify import check_bundle
    from engine.evidence.whys import close

    checked = check_bundle(bundle)
    if checked.faults:
        raise BadInput.expected("finding", bundle.path, "a sound bundle", str(checked.faults[0]))
    done = close(finding, unresolved=a.unresolved, text=a.text)
    return done, [], f"{finding.slug}: closed, {'unresolved' if a.unresolved else 'root cause'}"


def _link(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.evidence.redact import Redactor, words
    from engine.evidence.report import locator_words
    from engine.evidence.whys import answer, blobs_of, link

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
            print(f"{blob.artifact.what}: {words(blob.artifact.redacted)}", file=sys.stderr)
    said = f"{evidence.id} {says} {a.node}: {locator_words(evidence.locator)}"
    return done, blobs_of(capture), said


def _capture(a: argparse.Namespace, redactor: Redactor) -> Capture:
    """The evidence that the arguments name."""
    from engine.errors import BadInput
    from engine.evidence.capture import capture_file, capture_statement
    from engine.evidence.command import capture_command
    from engine.evidence.flips import capture_flip, is_flip
    from engine.runlog.folder import RunFolder, is_run

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
    from engine.evidence import capture
    from engine.evidence.context import run_blobs, view_of

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


def _verify(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.cli.evidence import print_checked
    from engine.evidence.verify import check_bundle

    checked = check_bundle(bundle)
    print_checked([checked], as_json=a.json, rules=True)
    return checked.verdict.exit_code


def _show(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.evidence.report import tree_lines
    from engine.evidence.verify import check_bundle

    checked = check_bundle(bundle)
    finding = bundle.load()
    if a.json:
        print(json.dumps(_fields(bundle, finding), allow_nan=False))
        return 0
    for fault in checked.faults:
        print(f"changed: {fault}", file=sys.stderr)
    print("\n".join(tree_lines(finding, checked.broken)))
    return 0


def _export(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.errors import BadInput
    from engine.evidence.verify import check_bundle

    checked = check_bundle(bundle)
    faults = [fault for fault in checked.faults if fault.where != "LOG.md"]
    if faults:
        raise BadInput.expected("finding", bundle.path, "a sound bundle", str(faults[0]))
    done = bundle.export(a.to)
    return _say(done, done.load(), str(done.path), as_json=a.json)
