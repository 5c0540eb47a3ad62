"""Render the pages: the list of runs, flips and findings, and each run, comparison, flip and finding as in `engine
report`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.errors import BadInput, EngineError
from engine.findings.bundle import Bundle, is_bundle
from engine.findings.text import state_words
from engine.flips.flip_folder import read_verdict
from engine.flips.text import verdict_line
from engine.log.filters import Filter, parse_filter
from engine.log.folder import RunFolder, is_run
from engine.log.sparkline import sparkline
from engine.log.text import one_line
from engine.report.page import content_of, page_body, without_home
from engine.serve.folders import Folders, key_of
from engine.serve.topics import EVERY_S, Parts, State, version_of
from engine.terminal import as_html
from engine.units import format_value
from engine.watch.runs_feed import READING, RunRow, RunsFeed, RunsSnapshot
from engine.watch.verdict_line import HEALTHY, SIGNS, SUSPECT, UNDECIDED

PLACES = {SUSPECT: 1, UNDECIDED: 2, HEALTHY: 3}
"""Order of the levels in the list: runs that are wrong, have failed or cannot be read come first."""
COMPARE = "/compare"
"""Path of the pages that compare runs: `?runs=KEY,KEY`."""
READ_S = 1.7
"""Seconds of reading before a list is shown; runs that are not read by then are added later."""


def document(state: State, wanted: str, page: str) -> str:
    """Return a page as HTML."""
    parts = state.parts(wanted)
    box = (
        f'<form><input id="filter" name="filter" value="{as_html(wanted)}" aria-label="filter" '
        'placeholder="filter: a word, state:failed, tag:good, lr&gt;0.001"></form>'
        f'<form id="compare" action="{COMPARE}"><button>compare the ticked runs</button></form>'
        if page == "/"
        else '<a href="/">all runs</a>'
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{as_html(state.title)}</title>"
        '<link rel="stylesheet" href="/report.css"><link rel="stylesheet" href="/page.css">'
        '<script src="/report.js" defer></script><script src="/page.js" defer></script></head>\n'
        f'<body><nav>{box}<output id="live"></output></nav>\n<main data-page="{page}" '
        f'data-version="{version_of(parts)}">{"".join(parts.values())}</main></body></html>\n'
    )


def error_state(text: str, status: int = 200) -> State:
    """Return an error page with the reason."""
    return _article("engine serve", f"<pre>{as_html(text)}</pre>", status)


def _article(title: str, body: str, status: int = 200) -> State:
    part = f'<article id="part-page">{body}</article>'
    return State(title=title, parts=lambda _: {"part-page": part}, status=status)


# A run, several runs, a flip, a finding


def report_page(folders: Folders, paths: Sequence[Path]) -> Callable[[], State]:
    """Return a function that renders the page of a folder, or of several compared runs. It renders again only if a file
    or the liveness of a run has changed."""
    links = [f"/page/{key_of(path)}" for path in paths]
    stamp: object = None
    state = error_state("")

    def render() -> State:
        nonlocal stamp, state
        new_stamp: object
        try:
            new_stamp = [
                (folders.stamp(path), RunFolder(path).liveness() if is_run(path) else None)
                for path in paths
            ]
            if new_stamp != stamp:
                content = content_of(*paths, links=links)
                state = _article(content.title, without_home(page_body(content)))
        except (EngineError, OSError) as error:
            if (new_stamp := str(error)) != stamp:
                state = error_state(new_stamp)
        stamp = new_stamp
        return state

    return render


# The list


def runs_of(folders: Folders) -> Callable[[], RunsSnapshot]:
    """Return a function that reads the runs; a call within EVERY_S / 2 of the last reading returns its result
    again."""
    # The server begins the first reading when it starts; the first request waits for the result.
    lock, read_s = threading.Lock(), -math.inf
    feed = RunsFeed(folders.given, budget_s=READ_S, accepts=folders.accepts)
    snapshot: RunsSnapshot

    def read() -> RunsSnapshot:
        nonlocal snapshot, read_s
        with lock:
            if time.monotonic() > read_s + EVERY_S / 2:
                snapshot = feed.poll()
                read_s = time.monotonic()
            return snapshot

    return read


def list_page(folders: Folders, read: Callable[[], RunsSnapshot]) -> Callable[[], State]:
    """Return a function that renders the list: live runs first; among live and among ended runs the worst first, then
    the newest. Flips and findings follow; a filter hides them."""
    others: dict[Path, tuple[object, str]] = {}

    def render() -> State:
        snapshot = read()
        rows = sorted(snapshot.rows, key=_place)
        drawn = {f"part-{key_of(row.path)}": (row, _run_row(row)) for row in rows}
        listed = {path: _listed(folders, path, others) for path in folders.flips_and_findings()}
        other_rows = {f"part-{key_of(path)}": text for path, text in listed.items() if text}

        def parts(wanted: str) -> Parts:
            message = snapshot.error or ""
            fits = Filter()
            try:
                names = {name for row in rows for name in row.settings} if wanted else ()
                fits = parse_filter(wanted, names)
            except BadInput as error:
                message = error.message
            shown = {
                id: text
                for id, (row, text) in drawn.items()
                if not fits.terms or fits.matches(row.subject)
            }
            live = sum(row.alive for row in rows)
            head = f"{len(shown):,} of {len(rows):,} runs, {live} live"
            lines = f'<h1>{head}</h1><p class="said">{as_html(message)}</p>'
            return {"part-head": f'<header id="part-head">{lines}</header>', **shown} | (
                {} if wanted else other_rows
            )

        return State(title="runs", parts=parts)

    return render


def _place(row: RunRow) -> tuple[bool, int, float]:
    place = 4 if row.state == READING else PLACES.get(row.level, 0)
    return not row.alive, place, row.age_s


def _run_row(row: RunRow) -> str:
    total = f"/{row.total_steps:,}" if row.total_steps else ""
    loss = "" if row.loss is None else f"loss {format_value(row.loss)}"
    tags = "".join(f"<i>{as_html(tag)}</i>" for tag in row.tags)
    note = f"<q>{as_html(row.note)}</q>" if row.note else ""
    cells = (
        ("name", f"{as_html(row.name)}{tags}{note}"),
        ("state", as_html(row.state.upper())),
        ("step", f"step {row.last_step:,}{total}"),
        ("loss", as_html(loss)),
        ("curve", sparkline(row.curve)),
    )
    return _row(row.path, row.level, row.verdict, cells, live=row.alive, is_run=True)


def _listed(folders: Folders, path: Path, known: dict[Path, tuple[object, str]]) -> str:
    """Return the row of a flip or a finding, read again if one of its files has changed; empty if a link in it leads
    out of the folders, or if it has too many files or cannot be read."""
    try:
        stamp = folders.stamp(path)
    except (BadInput, OSError):
        return ""
    if path not in known or known[path][0] != stamp:
        what = "flip"
        try:
            if is_bundle(path):
                what = "finding"
                finding = Bundle(path).read()
                words = f"{finding.title}: {state_words(finding)}"
            else:
                fields = read_verdict(path)
                words = (
                    verdict_line(fields)
                    if fields
                    else "no verdict: it is still running, or it was killed"
                )
        except (EngineError, KeyError, TypeError) as error:
            words = str(error)
        cells = ("name", as_html(path.name)), ("state", what)
        known[path] = stamp, _row(path, "", one_line(words), cells)
    return known[path][1]


def _row(
    path: Path,
    level: str,
    verdict: str,
    cells: Iterable[tuple[str, str]],
    *,
    live: bool = False,
    is_run: bool = False,
) -> str:
    key = key_of(path)
    # The label refers to the row's element: no text of a run is in an attribute.
    tick = (
        f'<input type="checkbox" form="compare" name="runs" value="{key}" aria-labelledby="name-{key}">'
        if is_run
        else ""
    )
    ids = {"name": f' id="name-{key}"'}
    drawn = "".join(
        f'<span class="{name}"{ids.get(name, "")}>{text}</span>' for name, text in cells
    )
    return (
        f'<div class="item" id="part-{key}">{tick}<a class="row {level}{" live" * live}" href="/page/{key}">'
        f'<b>{SIGNS.get(level, "")}</b>{drawn}<b class="says">{as_html(verdict)}</b></a></div>'
    )
