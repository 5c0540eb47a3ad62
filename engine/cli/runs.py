"""Runs: list them, tag them, print what one has logged, ask one to stop."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.answers import answer, plain, put_json
from engine.cli.arguments import (
    add_flag,
    add_json,
    add_path,
    add_repeated,
    add_run,
    real,
    whole,
)
from engine.terminal import aligned, clipped, put, say

if TYPE_CHECKING:
    from engine.log.fold import Follower
    from engine.log.folder import RunFolder
    from engine.log.notes import Notes
    from engine.watch.runs_feed import RunRow

POLL_S = 0.25
SECTION_LINES = 500
"""Maximum number of lines printed of a section; a log may have any number of them."""


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(
        parser, "folder", None, "folder of run folders (runs)", nargs="?", default=Path("runs")
    )
    parser.add_argument(
        "--filter",
        metavar="TERMS",
        default="",
        help="only runs for which all terms hold: a word, /regex/, state:WORD, tag:WORD, lr>0.001",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--metrics",
        action="store_true",
        help="print them in the OpenMetrics format, for the textfile collector of node_exporter",
    )
    group.add_argument(
        "--since",
        type=_since,
        default=0.0,
        metavar="WHEN",
        help="only runs that have logged since: 30m, 2h or 7d ago, a date as 2026-01-31T08:00, or seconds of Unix time",
    )
    add_json(parser, "print one JSON list")


def _since(text: str) -> float:
    """Return the Unix time of an age, a date or a Unix time."""
    if age := re.fullmatch(r"(\d{1,6})([smhd])", text):
        return time.time() - int(age[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[age[2]]
    with contextlib.suppress(ValueError, OverflowError, argparse.ArgumentTypeError):
        return datetime.fromisoformat(text).timestamp() if "-" in text else real(1e12)(text)
    raise argparse.ArgumentTypeError(
        f"expected 30m, 2h, 7d, a date or seconds of Unix time, found {clipped(text, 40)!r}"
    )


def list_runs(arguments: argparse.Namespace) -> int:
    """List the runs in a folder, newest first.

    engine runs                                  the runs in ./runs
    engine runs DIR --json                       as one JSON list
    engine runs --json --since 10m               what has changed in the last ten minutes
    engine runs --metrics                        for Prometheus; `engine serve` answers them at /metrics
    engine runs --filter 'lr>0.001 state:failed' the runs for which all terms hold; a setting by its short
                                                 name or as section.key, compared by > < >= <= = !=
    """
    from engine.errors import RunLogError
    from engine.log.fold import Follower
    from engine.log.folder import find_runs, last_change
    from engine.log.text import status_text
    from engine.watch.metrics import metrics_text
    from engine.watch.verdict_line import verdict_of

    if arguments.metrics:
        rows_of_feed = _matching(arguments.folder, arguments.filter)
        put(metrics_text(rows_of_feed), end="", exact=True)
        return 0
    runs = [run for run in find_runs(arguments.folder) if last_change(run) >= arguments.since]
    matching = runs
    if arguments.filter:
        paths = {
            os.path.realpath(row.path) for row in _matching(arguments.folder, arguments.filter)
        }
        matching = [run for run in runs if os.path.realpath(run.path) in paths]
    rows: list[tuple[RunFolder, Follower | None, str]] = []
    for folder in matching:
        follower = Follower(folder)
        try:
            follower.read_all()
        except RunLogError as error:
            # One broken log must not hide the others.
            rows.append((folder, None, error.message))
            continue
        verdict = verdict_of(follower.view, follower.state, folder.path)
        text = f"{verdict.signed()} | {status_text(follower.view, follower.alive)}"
        rows.append((folder, follower, text))
    if arguments.json:
        entries = [
            as_json(follower) if follower else {"run": run.path, "error": text, **_notes_json(run)}
            for run, follower, text in rows
        ]
        put_json("run", entries)
        return 0
    if runs and not rows:
        say(f"none of the {len(runs)} runs in {arguments.folder} matches {arguments.filter!r}")
    elif not rows:
        say(
            f"no runs in {arguments.folder}; start one with `engine distill SPEC.toml` or `apr-workbench demo`"
        )
    cells = [
        (run.name, " ".join([text, *(f"[{tag}]" for tag in _notes_of(run).tags)]))
        for run, _, text in rows
    ]
    for line in aligned(cells):
        put(line)
    return 0


def _matching(folder: Path, terms: str) -> list[RunRow]:
    """Return the rows of the list of runs for which all terms hold."""
    from engine.log.filters import parse_filter
    from engine.watch.runs_feed import RunsFeed

    snapshot = RunsFeed((folder,), budget_s=math.inf).poll()
    names = {name for row in snapshot.rows for name in row.settings}
    wanted = parse_filter(terms, names)
    return [row for row in snapshot.rows if wanted.matches(row.subject)]


def _notes_of(run: RunFolder) -> Notes:
    """Return the tags and the note of a run; a broken file of them must not hide the run."""
    from engine.errors import RunLogError
    from engine.log.notes import Notes, read_notes

    try:
        return read_notes(run)
    except RunLogError:
        return Notes()


def _notes_json(run: RunFolder) -> dict[str, Any]:
    """Return the tags and the note of a run for JSON."""
    notes = _notes_of(run)
    return {"tags": list(notes.tags), "note": notes.text}


def add_tag_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("tags", nargs="*", metavar="TAG", help="words to add")
    add_repeated(parser, "--remove", "TAG", "remove a tag; may be repeated")
    parser.add_argument("--note", metavar="TEXT", help="replace the note; '' removes it")
    add_json(parser)


def tag(arguments: argparse.Namespace) -> int:
    """Add tags and a note to a run, remove tags, or print what there is.

    engine tag RUN                           print its tags and its note
    engine tag RUN baseline good             add two tags
    engine tag RUN --remove good             remove one
    engine tag RUN --note "lr was too high"  replace the note

    They are kept in notes.json of the run folder; `engine runs --filter tag:baseline` lists the runs with a tag.
    """
    from engine.log.folder import open_run
    from engine.log.notes import change_notes, read_notes

    run = open_run(arguments.run)
    if arguments.tags or arguments.remove or arguments.note is not None:
        notes = change_notes(run, add=arguments.tags, remove=arguments.remove, note=arguments.note)
    else:
        notes = read_notes(run)
    lines = [f"tags  {' '.join(notes.tags) or 'none'}", f"note  {notes.text or 'none'}"]
    return answer(arguments, "tag", {"run": run.path, **_notes_json(run)}, lines)


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_flag(parser, "--now", "kill it without saving")
    add_json(parser)


def stop_run(arguments: argparse.Namespace) -> int:
    """Ask a run to finish its step, save a checkpoint and stop; it can be resumed. A watched script gets SIGTERM.

    engine stop RUN          finish the step, save, stop (exit code of the run: 143)
    engine stop RUN --now    kill the trainer or the script without saving
    """
    from engine.log.folder import open_run
    from engine.watch.start_and_stop import stop

    run = open_run(arguments.run)
    message = stop(run, now=arguments.now)
    say(message)
    return answer(arguments, "stop", {"run": run.path, "message": message}, ())


def add_tail_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing the log until the run ends"
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=whole(limits.LINES.most),
        default=20,
        metavar="N",
        help="log lines to print first (20)",
    )
    add_json(parser, "print JSON: one value; with -f one value per line")


def tail(arguments: argparse.Namespace) -> int:
    """Print what a run has logged: state, losses, alerts, decisions, device, log.

    engine tail RUN            the current state
    engine tail -f RUN         and what follows, until the run ends
    engine tail --json RUN     the same as one JSON value
    engine tail -f --json RUN  one JSON value per line: the run, each new log line, the run at its end

    A log that cannot be read to its end is printed as far as it can be, as JSON too, where `fault` says what is
    wrong; then the exit code is 65.
    """
    from engine.errors import RunLogError
    from engine.log.fold import Follower
    from engine.log.folder import open_run
    from engine.log.text import has_ended, line_text, status_text
    from engine.watch.verdict_line import run_verdict_lines

    follower = Follower(open_run(arguments.run))
    fault: RunLogError | None = None
    try:
        follower.read_all()
    except RunLogError as error:
        fault = error  # what can be read is printed first
    if arguments.json:
        put_json("run", as_json(follower, fault), flush=True)
    else:
        _print_all(follower, arguments.lines)
    follower.new_lines()
    while arguments.follow and fault is None and not has_ended(follower.state):
        time.sleep(POLL_S)
        try:
            follower.poll()
        except RunLogError as error:
            fault = error
        for entry in follower.new_lines():
            if arguments.json:
                put_json("log-line", line_as_json(entry), flush=True)
            else:
                put(f"  {line_text(entry)}", flush=True)
    if arguments.follow and arguments.json:
        put_json("run", as_json(follower, fault))
    elif arguments.follow and fault is None:
        for line in run_verdict_lines(follower.view, follower.state, follower.run.path):
            put(line)
        put(f"{follower.run.name}: {status_text(follower.view, follower.alive)}")
    if fault is not None:
        sys.stdout.flush()
        raise fault
    return 0


def _print_all(follower: Any, log_lines: int) -> None:
    """Print the current state as text."""
    from engine.log.text import (
        alert_lines,
        device_lines,
        line_text,
        result_lines,
        speed_lines,
        status_text,
    )
    from engine.watch.verdict_line import run_verdict_lines

    view = follower.view
    for line in run_verdict_lines(view, follower.state, follower.run.path):
        put(line)
    put(f"{follower.run.name}: {status_text(view, follower.alive)}")
    for line in [*result_lines(view), *speed_lines(view)]:
        put(line)
    alerts = [line for a in view.alerts.values() for line in alert_lines(a)]
    log = view.lines[-log_lines:] if log_lines > 0 else []
    sections = {
        **({"alerts": alerts} if alerts else {}),
        **_activity_sections(follower.run, view),
        "device": device_lines(view),
    }
    for heading, lines in sections.items():
        put(f"\n{heading}")
        for line in lines[:SECTION_LINES]:
            put(f"  {line}")
        if len(lines) > SECTION_LINES:
            put(f"  and {len(lines) - SECTION_LINES:,} lines more")
    put("\nlog")
    for entry in log:
        put(f"  {line_text(entry)}")
    sys.stdout.flush()


def _activity_sections(run: RunFolder, view: Any) -> dict[str, list[str]]:
    """Return the command and the identities of a watched script, or the decisions of a run of the engine."""
    from engine.errors import RunLogError
    from engine.log.folder import read_command
    from engine.log.identities import identity_lines
    from engine.log.text import command_lines, decision_lines

    # A run whose settings cannot be read is shown like a run of the engine.
    with contextlib.suppress(RunLogError):
        if (command := read_command(run)) is not None:
            return {"command": command_lines(view, command), "identities": identity_lines(view)}
    return {"decisions": [line for d in view.decisions for line in decision_lines(d)]}


def line_as_json(line: Any) -> dict[str, Any]:
    """Return a log line as one JSON value."""
    from engine.log.events import kind_of

    fields = {"log": line.source, "unix_s": line.unix_s, **plain(line.event)}
    return fields | {"kind": kind_of(line.event)}


def as_json(follower: Any, fault: Any = None) -> dict[str, Any]:
    """Return a run as one JSON value; `fault` is what kept its logs from being read to their ends."""
    from engine.log.text import share_of_peak, start_parts
    from engine.watch.verdict_line import verdict_of

    view = follower.view
    last = len(view.steps) - 1
    return {
        "run": follower.run.path,
        "fault": None if fault is None else fault.message,
        "state": follower.state,
        "verdict": verdict_of(view, follower.state, follower.run.path).as_dict(),
        **_notes_json(follower.run),
        "step": view.last_step,
        "total_steps": view.total_steps,
        "batch_of_pass": view.batch,
        "last": {name: view.steps.value(name, last) for name in view.steps.columns}
        if last >= 0
        else None,
        "tokens_per_second": view.tokens_per_second(),
        "share_of_peak": share_of_peak(view),
        "phases_s": view.phases,
        "host_s": view.host_s,
        "start": start_parts(view),
        "eta_s": view.eta_s(),
        "started": view.started,
        "phase": view.phase,
        "data": view.data,
        "models": view.models,
        "decisions": view.decisions,
        "evals": view.evals,
        "checkpoints": view.checkpoints,
        "non_finite": view.non_finite,
        "notes": view.notes,
        "alerts": list(view.alerts.values()),
        "alert_count": view.alert_count,
        "stack_dump": view.stack_dump,
        "student": view.student,
        "finished": view.finished,
        "exit": view.exit,
        "host": view.host,
        "gpus": [view.gpus[i] for i in sorted(view.gpus)],
        "absent": view.absent,
        "facts": view.facts,
    }
