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

A command acts on the only open finding in ./evidence, or on the one that --finding names. Only a flip or a
reproduction can support a cause; otherwise it is printed "unverified". A reproduction starts a run. An
alternative is excluded by the test it names: that command, a flip of that setting, or a run of that spec.
A command that ended with 64, 65, 70, 126, 127 or by a signal supports nothing. `engine evidence`
lists and checks the findings.

A link to a run captures one thing: --events, --metric, --alert, --check, --exit, or a time; a link to a flip its
verdict, its plan and every pair; a link to a file all of it, or --lines. The content is copied as it is now,
without secrets (`engine.findings.redact`), so it can be checked when its source is gone.

Exit codes of verify: 0 sound and closed, 1 something was changed or a rule is broken, 2 sound and open.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.arguments import (
    actions_of,
    add_choice,
    add_flag,
    add_json,
    add_number,
    add_path,
    add_real,
)
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
    add = actions_of(parser)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        made = add(name, text)
        which = "the finding: slug or folder"
        made.add_argument("--finding", default="", metavar="NAME", help=which)
        add_path(made, "--evidence", "DIR", "folder of findings", default=Path("evidence"))
        add_json(made)
        return made

    def words(made: argparse.ArgumentParser, **asked: str) -> None:
        """Add required options to a parser."""
        for name, what in asked.items():
            made.add_argument(f"--{name.replace('_', '-')}", required=True, help=what or None)

    new = action("new", "begin a finding with what was seen")
    new.add_argument("slug", help="a short name: a-z, 0-9 and -")
    words(new, claim="what was seen")
    new.add_argument("--title", default="", help="a headline (default: the claim)")

    answer = action("add", "add an answer to a why")
    explains = "what it explains"
    answer.add_argument("--why-of", action="append", required=True, metavar="NODE", help=explains)
    words(answer, claim="")
    kinds = ("hypothesis", "mechanism", "process", "observation")
    add_choice(answer, "--kind", kinds, "hypothesis")
    answer.add_argument("--id", default="", help="its name (default: the next number)")

    _add_link_arguments(action("link", "put evidence under a node"))

    refute = action("refute", "say that a claim is wrong, and why")
    refute.add_argument("node")
    words(refute, reason="")

    other = action("alternative", "name another explanation and the cheapest test that would tell")
    other.add_argument("node")
    words(
        other,
        claim="",
        test="what to do, best a command",
        if_true="what the test shows if it is so",
        if_false="what the test shows if it is not",
    )
    add_real(other, "--minutes", 1e9, "what the test costs", required=True)

    withdraw = action("withdraw", "take back a claim, evidence or an alternative: kept, struck out")
    entry = "a node, evidence or an alternative: n2, e3, a1"
    withdraw.add_argument("entry", metavar="ENTRY", help=entry)
    words(withdraw, reason="")

    action("verify", "check every byte, every piece of evidence and every rule")
    action("show", "print the tree")
    close = action("close", "close as the root cause, or as unresolved")
    close.add_argument("--text", default="", help="the root cause in a sentence")
    close.add_argument("--unresolved", default="", metavar="REASON", help="why there is none")
    export = action("export", "enter it into LOG.md; with --to, copy it into another folder first")
    add_path(export, "--to", "DIR", "another evidence folder")


def _add_link_arguments(link: argparse.ArgumentParser) -> None:
    """Add the options that select the evidence, and those that say what it shows."""
    link.add_argument("node")
    add_path(link, "source", "EVIDENCE", "run, flip or file", nargs="?")
    for name, metavar, what in (
        ("--run-command", "COMMAND", "run this and keep what it does"),
        ("--note", "TEXT", "what a person says"),
        ("--events", "FIRST[-LAST]", "of a run: lines of a log, by seq"),
        ("--metric", "NAME", "of a run: loss, gpu0.gpu_util_pct, ..."),
        ("--steps", "FIRST-LAST", "of a metric: these steps only"),
        ("--alert", "ID", "of a run: an alert, with its readings"),
        ("--check", "ID", "of a run: what a check answered, or what was seen of an identity"),
        ("--lines", "FIRST-LAST", "of a file"),
        ("--answers", "ALTERNATIVE", "it is the test of this alternative"),
    ):
        link.add_argument(name, metavar=metavar, help=what)
    status = "a reproduction: its exit status"
    add_number(link, "--expect-exit", limits.EXIT_STATUS, status, metavar="N")
    in_output = "a reproduction: in its output"
    link.add_argument("--expect-text", default="", metavar="TEXT", help=in_output)
    add_real(link, "--timeout", limits.WAIT.most, "of the command", default=600.0, metavar="S")
    add_choice(link, "--log", ("events", "device", "watch"), "events")
    since = "of a run: seconds since its start"
    add_real(link, "--from", 1e12, since, dest="from_s", metavar="S")
    add_real(link, "--to", 1e12, "of a run: until then", dest="to_s", metavar="S")
    add_flag(link, "--exit", "of a run: the record of how it ended")
    add_path(link, "--project", "DIR", "git checkout to note (default: .)")
    add_flag(link, "--contradicts", "it speaks against the claim")
    link.add_argument("--outcome", choices=("excluded", "holds", "undecided"))
    link.add_argument("--result", default="", help="what the test of the alternative showed")


def run(a: argparse.Namespace) -> int:
    from engine.findings import changes
    from engine.findings.bundle import find_bundle

    if a.action == "new":
        bundle = changes.begin(a.evidence, a.slug, a.claim, title=a.title)
        return _say(bundle, f"n1 of {bundle.path}", a)
    bundle = find_bundle(a.finding, a.evidence)
    match a.action:
        case "verify":
            return _verify(bundle, a)
        case "show":
            return _show(bundle, a)
        case "export":
            bundle = changes.export(bundle, a.to)
            return _say(bundle, str(bundle.path), a)
        case "add":
            done = changes.add(bundle, a.claim, why_of=a.why_of, kind=a.kind, id_=a.id)
        case "refute":
            done = changes.refute(bundle, a.node, a.reason)
        case "withdraw":
            done = changes.withdraw(bundle, a.entry, a.reason)
        case "alternative":
            asked = {"test": a.test, "if_true": a.if_true, "if_false": a.if_false}
            done = changes.suspect(bundle, a.node, a.claim, **asked, minutes=a.minutes)
        case "close":
            done = changes.close(bundle, unresolved=a.unresolved, text=a.text)
        case _:
            done = _link(bundle, a)
    if done.reopened:
        say("the finding was closed; this opens it again")
    return _say(bundle, done.said, a)


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


# Evidence.


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
    """Capture the evidence that the arguments name."""
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
    """Capture the requested part of a run, with what is captured of every run."""
    from engine.findings.capture import capture_part
    from engine.findings.context import run_blobs, view_of
    from engine.findings.logs import Window

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
        window=Window(
            float("-inf") if a.from_s is None else begin + a.from_s,
            float("inf") if a.to_s is None else begin + a.to_s,
            *(_range(a.steps) if a.steps else ()),
        ),
    )
    return found.with_attached(run_blobs(run, redactor, a.project))


def _range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise UsageError(f"expected FIRST or FIRST-LAST, found {text!r}")
    return int(first), int(last) if dash else int(first)
