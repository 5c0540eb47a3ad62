"""Say what is wrong with a run, from its logs: what the supervisor would have said while it went on.

engine diagnose RUN           alerts, each with its numbers and the flip that would test it
engine diagnose RUN --all     and the rules that saw nothing, and those that could not judge, and why
engine diagnose RUN --json    one JSON value
engine diagnose --list        every rule: what it asks, what it reads, when it speaks

Exit codes: 0 nothing found, 1 alerts, 2 no rule could judge.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine.errors import EXIT_FAIL, EXIT_PASS, EXIT_UNKNOWN, UsageError
from engine.terminal import put, put_json

HELP = "say what is wrong with a run, from its logs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run folder")
    parser.add_argument("--all", action="store_true", help="also the rules that found nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--list", action="store_true", help="list the rules")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list == (arguments.run is not None):
        raise UsageError("expected either RUN or --list", hint="engine diagnose --help")
    if arguments.list:
        _print_rules(as_json=arguments.json)
        return EXIT_PASS
    from engine.errors import RunLogError
    from engine.log.folder import open_run
    from engine.log.text import has_ended, status_text
    from engine.watch.replay import diagnose
    from engine.watch.rules.rule import read_settings

    folder = open_run(arguments.run)
    found = diagnose(folder, read_settings(folder))
    if arguments.json:
        put_json(as_json(str(folder.path), found))
    else:
        head, *rest = _lines(folder.name, found, everything=arguments.all)
        alive = folder.liveness()
        state = found.view.state(alive)
        if has_ended(state) and state != "completed":
            rest = [f"ended: {status_text(found.view, alive)}", *rest]
        for line in [head, *rest]:
            put(line)
    if found.fault is not None:
        raise RunLogError(found.fault)
    if found.raised:
        return EXIT_FAIL
    return EXIT_PASS if found.judged else EXIT_UNKNOWN


def _print_rules(*, as_json: bool) -> None:
    from engine.watch.rules import RULES

    if as_json:
        fields = ("id", "asks", "reads", "threshold")
        put_json([{name: getattr(rule, name) for name in fields} for rule in RULES])
        return
    for rule in RULES:
        put(f"{rule.id}: {rule.asks}")
        put(f"  speaks at: {rule.threshold}")
        put(f"  reads: {', '.join(rule.reads)}")


def _lines(name: str, found: Any, *, everything: bool) -> list[str]:
    from engine.log.text import alert_lines, clock_text, one_line
    from engine.units import format_seconds

    count, judged = len(found.raised), len(found.judged)
    rules = judged + len(found.unjudged)
    lines = [
        f"{name}: {count} alert{'' if count == 1 else 's'}; {judged} of {rules} rules could judge"
    ]
    for entry in found.raised:
        end = "stands at the end of the log"
        if entry.cleared_unix_s is not None:
            end = f"over after {format_seconds(entry.cleared_unix_s - entry.unix_s)}"
        head, *rest = alert_lines(entry.alert)
        lines += ["", head, f"  raised at {clock_text(entry.unix_s)}, {end}", *rest]
    if everything:
        spoke = {entry.alert.id for entry in found.raised}
        quiet = [id for id in found.judged if id not in spoke]
        lines += ["", "found nothing", *(f"  {id}" for id in quiet)]
        lines += ["", "could not judge"]
        lines += [one_line(f"  {id}: {reason}") for id, reason in found.unjudged.items()]
    return lines


def as_json(path: str, found: Any) -> dict[str, Any]:
    """A diagnosis as one JSON value."""
    import math

    import msgspec

    from engine.log.events import name_of_non_finite

    envelope = ("v", "seq", "t_s", "nf")

    def number(value: float) -> float | str:
        return value if math.isfinite(value) else name_of_non_finite(value)

    def plain(entry: Any) -> dict[str, Any]:
        fields = msgspec.structs.asdict(entry.alert)
        numbers = [[name, number(value), held] for name, value, held in entry.alert.numbers]
        return {
            **{name: value for name, value in fields.items() if name not in envelope},
            "numbers": numbers,
            "raised_unix_s": entry.unix_s,
            "cleared_unix_s": entry.cleared_unix_s,
        }

    return {
        "run": path,
        "alerts": [plain(entry) for entry in found.raised],
        "judged": list(found.judged),
        "unjudged": found.unjudged,
        "fault": found.fault,
    }
