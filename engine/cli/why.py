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

Exit codes of verify: 0 sound and closed, 1 something was changed or a rule is broken, 2 sound and open.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.numbers import real
from engine.cli.why_link import add_link_arguments, link_evidence
from engine.terminal import put, put_json, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.findings.bundle import Bundle
    from engine.findings.capture import Blob
    from engine.findings.finding import Finding

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

    add_link_arguments(action("link", "put evidence under a node"))

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


def run(arguments: argparse.Namespace) -> int:
    from engine.findings import whys
    from engine.findings.bundle import Bundle, find_bundle

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
        "link": link_evidence,
        "refute": _refute,
        "alternative": _alternative,
        "withdraw": _withdraw,
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
        say("the finding was closed; this opens it again")
    return _say(bundle, done, said, as_json=arguments.json)


def _say(bundle: Bundle, finding: Finding, said: str, *, as_json: bool) -> int:
    if as_json:
        put_json(_fields(bundle, finding))
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
        "problems": [
            {"rule": p.rule, "level": p.level, "node": p.node, "text": p.text}
            for p in judge(finding)
        ],
    }


def _add(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.findings.whys import add_node

    done = add_node(finding, a.claim, why_of=a.why_of, kind=a.kind, id_=a.id)
    return done, [], f"{done.nodes[-1].id}: why of {', '.join(a.why_of)}"


def _refute(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.findings.whys import refute

    return refute(finding, a.node, a.reason), [], f"{a.node}: refuted"


def _withdraw(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.findings.whys import withdraw

    return withdraw(finding, a.entry, a.reason), [], f"{a.entry}: withdrawn"


def _alternative(
    finding: Finding, bundle: Bundle, a: argparse.Namespace
) -> tuple[Finding, list[Blob], str]:
    from engine.findings.whys import add_alternative

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
    from engine.findings.verify import check_bundle
    from engine.findings.whys import close

    checked = check_bundle(bundle)
    if checked.faults:
        raise BadInput.expected("finding", bundle.path, "a sound bundle", str(checked.faults[0]))
    done = close(finding, unresolved=a.unresolved, text=a.text, known=checked.problems)
    return done, [], f"{finding.slug}: closed, {'unresolved' if a.unresolved else 'root cause'}"


def _verify(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.cli.evidence import exit_code_of, print_checked
    from engine.findings.verify import check_bundle

    checked = check_bundle(bundle)
    print_checked([checked], as_json=a.json, rules=True)
    return exit_code_of([checked], checked.verdict)


def _show(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.findings.report import tree_lines
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


def _export(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.errors import BadInput
    from engine.findings.verify import check_bundle

    checked = check_bundle(bundle)
    faults = [fault for fault in checked.faults if fault.where != "LOG.md"]
    if faults:
        raise BadInput.expected("finding", bundle.path, "a sound bundle", str(faults[0]))
    done = bundle.export(a.to)
    return _say(done, done.load(), str(done.path), as_json=a.json)
