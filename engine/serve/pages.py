"""The pages: the list of what the folders hold, and each run, flip and finding as `engine report` shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.errors import BadInput, EngineError
from engine.findings.bundle import Bundle, is_bundle
from engine.findings.text import state_words
from engine.flips.flip_folder import read_verdict
from engine.flips.text import verdict_line
from engine.log.filters import parse_filter
from engine.log.folder import RunFolder, is_run
from engine.log.sparkline import sparkline
from engine.log.text import one_line
from engine.report.page import content_of, page_body, without_home
from engine.serve.folders import Folders, key_of
from engine.serve.topics import Parts, State, version_of
from engine.terminal import as_html
from engine.units import format_value
from engine.watch.runs_feed import RunRow, RunsFeed
from engine.watch.verdict_line import HEALTHY, SIGNS, SUSPECT, UNDECIDED, WRONG

LEVELS = (WRONG, SUSPECT, UNDECIDED, HEALTHY)
"""Levels of what is live, worst first; an end without a verdict comes with what is wrong."""
FIRST_S = 1.5
"""Seconds that the first list may take; what is not read by then follows."""


def document(state: State, wanted: str, page: str) -> str:
    """Return a page as HTML."""
    parts = state.parts(wanted)
    box = (
        f'<form><input id="filter" name="filter" value="{as_html(wanted)}" aria-label="filter" '
        'placeholder="filter: a word, state:failed, tag:good, lr&gt;0.001"></form>'
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
    """Return the page that says why there is no other."""
    return _article("engine serve", f"<pre>{as_html(text)}</pre>", status)


def _article(title: str, body: str, status: int = 200) -> State:
    part = f'<article id="part-page">{body}</article>'
    return State(title=title, parts=lambda _: {"part-page": part}, status=status)


# A run, a flip, a finding


def report_page(folders: Folders, path: Path) -> Callable[[], State]:
    """Return what renders the page of a folder; it returns the same state until a file of it changes."""
    stamp: object = None
    state = error_state("")

    def render() -> State:
        nonlocal stamp, state
        now: object
        try:
            now = (folders.stamp(path), RunFolder(path).liveness() if is_run(path) else None)
            if now != stamp:
                found = content_of(path)
                state = _article(found.title, without_home(page_body(found)))
        except (EngineError, OSError) as error:
            if (now := str(error)) != stamp:
                state = error_state(now)
        stamp = now
        return state

    return render


# The list


def list_page(folders: Folders) -> Callable[[], State]:
    """Return what renders the list: live runs first, the worst first of them."""
    feed = RunsFeed(folders.given, accepts=folders.accepts)
    others: dict[Path, tuple[object, str]] = {}
    first = True

    def render() -> State:
        nonlocal first
        until_s = time.monotonic() + FIRST_S
        snapshot = feed.poll()
        while first and snapshot.behind and time.monotonic() < until_s:
            snapshot = feed.poll()
        first = False
        rows = sorted(snapshot.rows, key=_place)
        drawn = {f"part-{key_of(row.path)}": (row, _run_row(row)) for row in rows}
        listed = {path: _listed(folders, path, others) for path in folders.flips_and_findings()}
        more = {f"part-{key_of(path)}": text for path, text in listed.items() if text}

        def parts(wanted: str) -> Parts:
            said = snapshot.error or ""
            shown = {id: text for id, (_, text) in drawn.items()}
            if wanted:
                try:
                    names = {name for row in rows for name in row.settings}
                    terms = parse_filter(wanted, names)
                    shown = {
                        id: text for id, (row, text) in drawn.items() if terms.matches(row.subject)
                    }
                except BadInput as error:
                    said = error.message
            live = sum(row.alive for row in rows)
            head = f"{len(shown):,} of {len(rows):,} runs, {live} live"
            lines = f'<h1>{head}</h1><p class="said">{as_html(said)}</p>'
            return {"part-head": f'<header id="part-head">{lines}</header>', **shown} | (
                {} if wanted else more
            )

        return State(title="runs", parts=parts)

    return render


def _place(row: RunRow) -> tuple[bool, int, float]:
    level = LEVELS.index(row.level) if row.level in LEVELS else 0
    return not row.alive, level, row.age_s or 0.0


def _run_row(row: RunRow) -> str:
    total = f"/{row.total_steps:,}" if row.total_steps else ""
    loss = "" if row.loss is None else f"loss {format_value(row.loss)}"
    began = (
        ""
        if row.age_s is None
        else time.strftime("%Y-%m-%d", time.localtime(time.time() - row.age_s))
    )
    tags = "".join(f"<i>{as_html(tag)}</i>" for tag in row.tags)
    note = f"<q>{as_html(row.note)}</q>" if row.note else ""
    cells = (
        ("name", f"{as_html(row.name)}{tags}{note}"),
        ("state", as_html(row.state.upper())),
        ("step", f"step {row.last_step:,}{total}"),
        ("loss", as_html(loss)),
        ("curve", sparkline(row.curve)),
        ("began", began),
    )
    return _row(row.path, row.level, row.verdict, cells, live=row.alive)


def _listed(folders: Folders, path: Path, known: dict[Path, tuple[object, str]]) -> str:
    """Return the row of a flip or a finding, read again when a file of it has changed; empty when a link in it leads
    out of the folders."""
    try:
        stamp = folders.stamp(path)
    except (BadInput, OSError):
        return ""
    if path not in known or known[path][0] != stamp:
        what = "flip"
        try:
            if is_bundle(path):
                what = "finding"
                found = Bundle(path).read()
                words = f"{found.title}: {state_words(found)}"
            else:
                fields = read_verdict(path)
                words = verdict_line(fields) if fields else "no verdict: it goes on, or it died"
        except (EngineError, KeyError, TypeError) as error:
            words = str(error)
        cells = ("name", as_html(path.name)), ("state", what)
        known[path] = stamp, _row(path, "", one_line(words), cells)
    return known[path][1]


def _row(
    path: Path, level: str, verdict: str, cells: Iterable[tuple[str, str]], *, live: bool = False
) -> str:
    key = key_of(path)
    drawn = "".join(f'<span class="{name}">{text}</span>' for name, text in cells)
    return (
        f'<a class="row {level}{" live" * live}" id="part-{key}" href="/page/{key}">'
        f'<b>{SIGNS.get(level, "")}</b>{drawn}<b class="says">{as_html(verdict)}</b></a>'
    )
