"""Five whys: what went wrong in a run, what may have caused it, and the tests that decide.

    engine why new runs/kd-1             begin one with what went wrong there, and list what may have caused it
    engine why new runs/kd-1 --seen "alert gpu_idle" --cause teacher.backend=dequantized
    engine why cause compute.threads=1   another change that might end it; of a script also NAME=VALUE of its
                                         environment, words ("--lr 1e-4"), or a line ("train.py:42=TEXT")
    engine why cause "data: DATA=clean"  one that changes the rows, the objective or the model on purpose
    engine why test                      run the next experiment: the run as it was, and with the change, in turn
    engine why show | check | close | export
    engine why check --all               hash every file of every finding, judge every test again
    engine why new runs/kd-1 --seen "check step_loss" --why-of hang     the next why, about the confirmed cause
    engine why withdraw c1 "mistyped"                 no longer suspect c1; it stays on record
    engine why note "the fan was loud"                add a note, which is no evidence

What went wrong is a line of the run's log: an alert, a failed check, what contradicts a script, an exit. A cause is
one change that would end it, as `engine flip RUN --propose` names them. A test is `engine flip --ends`, registered in
the finding before it starts. It confirms the cause when, in three pairs with their own seeds, the unchanged runs show
the same failure (the same exception from the same line, the same words) and the changed runs, which work half as long
again, do not. Each further test of a finding takes more pairs, so that trying many causes confirms none by luck. A run
that fails in another way or ends early does not count; after two of them the cause could not be tested. Nothing else
confirms a cause, and `close` takes only a confirmed one.

A command acts on the only open finding in ./evidence, or on the one that --finding names. An interrupted test decides
nothing, but the next one takes more pairs, as after any test. Findings of the first version open read-only.

Exit codes of check: 0 sound and closed with a cause, 1 something was changed or does not hold, 2 sound and open. Of
check --all: 0 everything is unchanged and every recorded test holds, 1 something was changed or does not hold (it is
named), 2 there was nothing to check, 65 a finding could not be read (it is named) and was not checked. Of test: 0
decided, 2 not decided, 130 interrupted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import actions_of, add_flag, add_json, add_number, add_path, add_run
from engine.terminal import say

if TYPE_CHECKING:
    from engine.findings.bundle import Bundle
    from engine.findings.check import Checked
    from engine.findings.finding import Finding

HELP = "five whys: what went wrong, its possible causes, and the tests that decide"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = actions_of(parser)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser_of_action = add(name, text)
        if name != "new":
            parser_of_action.add_argument(
                "--finding", default="", metavar="NAME", help="slug or folder"
            )
        add_path(
            parser_of_action, "--evidence", "DIR", "folder of findings", default=Path("evidence")
        )
        add_json(parser_of_action)
        return parser_of_action

    new = action("new", "begin a finding with what went wrong in a run")
    add_run(new)
    new.add_argument(
        "--seen", default="", metavar="WHAT", help="alert ID, check ID, identity ID, exit"
    )
    changes = "a change that might end it; repeat for several"
    new.add_argument("--cause", action="append", default=[], metavar="CHANGE", help=changes)
    new.add_argument("--slug", default="", help="name of the finding (default: of run and alert)")
    new.add_argument("--why-of", metavar="NAME", help="the finding whose cause this is about")
    action("cause", "add a possible cause").add_argument(
        "change", help="KEY=VALUE, NAME=VALUE, words, or FILE:N=TEXT"
    )
    test = action("test", "run the next experiment, or continue it")
    test.add_argument("--cause", default="", metavar="ID", help="c2 (default: the next open one)")
    add_number(test, "--steps", limits.STEPS, "steps of a run without the change", metavar="N")
    test.add_argument("--budget", metavar="TIME", help="time for all pairs, as 90s or 5m")
    add_path(test, "--out", "DIR", "the new flip folder (default: flips/DATE-KNOB)")
    add_flag(test, "--dry-run", "show the plan, start nothing")
    withdraw = action("withdraw", "mark a cause as no longer suspected; it stays on record")
    withdraw.add_argument("cause", metavar="ID", help="c2")
    withdraw.add_argument("reason", help="the reason, such as a mistyped change")
    action("note", "add a note, which is no evidence").add_argument("text")
    action("show", "print the finding")
    check = action("check", "check every byte, and judge every test again")
    add_flag(check, "--all", "every finding in the folder")
    close = action("close", "close with the confirmed cause, or as unresolved")
    close.add_argument(
        "--unresolved", default="", metavar="REASON", help="why no cause is confirmed"
    )
    export = action(
        "export", "add the finding to LOG.md; with --to, copy it into another folder first"
    )
    add_path(export, "--to", "DIR", "another evidence folder")


def run(a: argparse.Namespace) -> int:
    from engine.findings import changes
    from engine.findings.bundle import find_bundle

    if a.action == "new":
        return _new(a)
    if a.action == "check" and a.all:
        return _check_all(a)
    bundle = find_bundle(a.finding, a.evidence)
    match a.action:
        case "show":
            return _show(bundle, a)
        case "check":
            return _check(bundle, a)
        case "test":
            return _test(bundle, a)
        case "export":
            bundle = changes.export(bundle, a.to)
            return _say(bundle, bundle.load(), str(bundle.path), a)
        case "cause":
            finding = changes.suspect(bundle, a.change)
            message = f"{finding.causes[-1].id}: {finding.causes[-1].change}"
        case "withdraw":
            finding, message = changes.withdraw(bundle, a.cause, a.reason), "withdrawn"
        case "note":
            finding, message = changes.note(bundle, a.text), "kept"
        case _:
            finding = changes.close(bundle, a.unresolved)
            message = finding.closed.text if finding.closed is not None else ""
    return _say(bundle, finding, message, a)


def _new(a: argparse.Namespace) -> int:
    from engine.findings.bundle import find_bundle
    from engine.findings.changes import Suspect, begin
    from engine.log.folder import open_run

    above = find_bundle(a.why_of, a.evidence) if a.why_of else None
    folder = open_run(a.run)
    suspects = [Suspect(change) for change in a.cause]
    bundle = begin(a.evidence, folder, a.seen, suspects, slug=a.slug, why_of=above)
    if not a.cause:
        _propose(folder.path)
    return _say(bundle, bundle.load(), str(bundle.path), a)


def _propose(run: Path) -> None:
    from engine.findings.changes import suspects_of
    from engine.log.folder import open_run

    for suspect in suspects_of(open_run(run)):
        say(f"engine why cause {suspect.assignment!r}   {suspect.why}")


def _say(bundle: Bundle, finding: Finding, message: str, a: argparse.Namespace) -> int:
    from engine.findings.text import next_words

    if following := next_words(finding):
        say(f"next: {following}")
    return answer(a, "finding", _fields(bundle, finding), [message])


def _fields(bundle: Bundle, finding: Finding) -> dict[str, Any]:
    import msgspec

    levels = {cause.id: finding.level_of(cause) for cause in finding.causes}
    summary = {"folder": bundle.path, "title": finding.title, "levels": levels}
    return summary | {"finding": msgspec.to_builtins(finding)}


def _show(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.findings.check import check_bundle
    from engine.findings.finding import Finding
    from engine.findings.text import lines

    checked = check_bundle(bundle)
    finding = bundle.read()
    for fault in checked.faults:
        say(f"changed: {fault}")
    shown_lines = lines(finding, checked.broken)
    fields = _fields(bundle, finding) if isinstance(finding, Finding) else {"lines": shown_lines}
    return answer(a, "finding", fields, shown_lines)


def _check(bundle: Bundle, a: argparse.Namespace) -> int:
    from engine.errors import BadInput
    from engine.findings.check import check_bundle

    checked = check_bundle(bundle)
    code = BadInput.exit_code if checked.unread else checked.verdict.exit_code
    return _print_checked([checked], a, code)


def _check_all(a: argparse.Namespace) -> int:
    from engine.errors import EXIT_FAIL, EXIT_UNKNOWN, BadInput, UsageError
    from engine.findings.bundle import find_bundles
    from engine.findings.check import check_bundle

    if a.finding:
        raise UsageError("--all — expected no --finding as well", hint="one at a time")
    checked = [check_bundle(bundle) for bundle in find_bundles(a.evidence)]
    code = BadInput.exit_code if any(result.unread for result in checked) else 0
    if not checked:
        say(f"no findings in {a.evidence}: nothing was checked")
        code = EXIT_UNKNOWN
    if any(result.faults for result in checked):
        code = EXIT_FAIL
    return _print_checked(checked, a, code)


def _print_checked(checked: Sequence[Checked], a: argparse.Namespace, code: int) -> int:
    """Print the result of checking findings: their faults and notes."""
    lines = []
    for result in checked:
        verdict = result.verdict
        lines.append(f"{verdict.level.name:7}  {result.bundle.path.name}: {verdict.reason}")
        lines += [f"         changed: {fault}" for fault in result.faults]
        lines += [f"         note: {note}" for note in result.notes]
        if result.finding is not None:
            lines.append(f"         seal {result.finding.seal}")
    return answer(a, "finding-check", [result.as_fields() for result in checked], lines, code)


def _test(bundle: Bundle, a: argparse.Namespace) -> int:
    """Plan, register, run and record a test, or record one that ended unrecorded."""
    from engine.cli.flip import show_plan
    from engine.cli.flip_progress import Progress
    from engine.errors import EXIT_INTERRUPTED, BadInput
    from engine.findings import changes
    from engine.flips.flip import run_flip
    from engine.log.read import writer_is_alive
    from engine.units import parse_time

    begun = changes.pending(bundle)
    if begun is not None and not _has_ended(begun[1]):
        test, flip = begun
        if writer_is_alive(flip / "pairs.jsonl"):
            raise BadInput.expected("test", test.id, "none that is running", f"one in {flip}")
        changes.spend(bundle, test)
        say(f"{test.id} was interrupted: it counts for nothing, and the next test takes more pairs")
        begun = None
    if begun is None:
        budget_s = None if a.budget is None else parse_time("--budget", a.budget)
        cause, plan = changes.plan_test(bundle, a.cause, steps=a.steps, budget_s=budget_s)
        flip = a.out or Path("flips") / f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.name}"
        plan = show_plan(plan, flip, dry_run=a.dry_run)
        if a.dry_run:
            return answer(a, "plan", plan.fields(), ())
        test = changes.register(bundle, cause, plan, flip)
        with Progress(plan).watching() as watching:
            run_flip(plan, flip, watching, use_controls="skip")
        if not _has_ended(flip):
            changes.spend(bundle, test)
            say(
                f"{test.id} was interrupted: it counts for nothing, and the next test takes more pairs"
            )
            return EXIT_INTERRUPTED
    else:
        test, flip = begun
    finding = changes.record(bundle, test)
    done = next(recorded for recorded in finding.tests if recorded.id == test.id)
    _say(bundle, finding, f"{done.id} {done.verdict}: {done.reason}", a)
    level = finding.level_of(finding.cause(done.cause))
    return 0 if level == "refuted" or level.startswith("confirmed") else 2


def _has_ended(flip: Path) -> bool:
    """Return whether a flip ran to its end."""
    from engine.flips.flip_folder import read_verdict

    verdict = read_verdict(flip)
    return verdict is not None and not verdict["interrupted"]
