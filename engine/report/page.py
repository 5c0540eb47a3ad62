"""Render a run, several compared runs, a flip or a finding as one HTML file, as `engine report` writes it.

The file is self-contained, so it opens offline and can be mailed. Its one script draws the charts of a run; without
scripts, and in print, they are SVG. A Content-Security-Policy in the page allows only this script and these styles,
by their hashes, and no requests. Text from users and logs is escaped. The page depends only on the folder: once a run
has ended, the same folder gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput, RunLogError
from engine.findings.bundle import Bundle, is_bundle
from engine.findings.check import check_bundle
from engine.findings.finding import Finding
from engine.findings.older import Older
from engine.findings.text import lines
from engine.flips.flip_folder import is_flip, read_pairs, read_plan_of, read_verdict
from engine.flips.judge import interval_of
from engine.flips.text import pair_heading, pair_line, plan_lines, verdict_lines
from engine.log.events import FAIL
from engine.log.fold import Follower
from engine.log.folder import RunFolder, WatchedCommand, is_run, read_command, settings_of
from engine.log.gpus import RANKS, UNKNOWN, Cell, gpu_table, rank_rows
from engine.log.identities import identity_lines
from engine.log.text import (
    OTHERS_KERNELS,
    OTHERS_RESULT,
    alert_lines,
    check_lines,
    command_lines,
    commit_text,
    error_lines,
    has_ended,
    has_samples,
    host_lines,
    kernel_lines,
    result_lines,
    sample_lines,
    speed_lines,
    status_text,
)
from engine.log.view import RunView
from engine.receipts.receipt import effective_of
from engine.report.chart import STYLE as CHART_STYLE
from engine.report.chart import browser_charts, compared_charts, flip_figure, run_figures
from engine.report.compared import all_settings, differing, results_table, settings_note
from engine.spec.sections import options
from engine.terminal import as_html
from engine.units import format_bytes, format_count, format_seconds
from engine.watch.verdict_line import run_verdict_lines, verdict_of

LETTERS = "ABCDEF"
MOST_COMPARED = len(LETTERS)
"""Maximum number of runs that are compared, which is the number of colours in charts."""
OPEN_LINES = 12
"""Maximum number of lines of samples that are shown without folding them."""
_HOME = re.compile(r"(?<![\w.~-])/(?:home/[^/\s\"'<>&]+|Users/[^/\s\"'<>&]+|root)(?![\w.-])")
"""Pattern of a home folder in a path, on Linux, on macOS, and of root."""


def _file(name: str) -> str:
    return (importlib.resources.files("engine.report") / name).read_text(encoding="utf-8")


STYLE, SCRIPT = _file("page.css"), _file("chart.js") + _file("page.js")
"""Style and script of every page of `engine report` and `engine serve`."""


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_hash_of(SCRIPT)}; "
    f"style-src {_hash_of(STYLE)} {_hash_of(CHART_STYLE)}; style-src-attr 'unsafe-inline'; base-uri 'none'"
)
"""Content security policy of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a page."""

    title: str
    body: str
    """HTML below the title."""
    series: dict[str, Any] | None = None
    """The charts of a run for the script (`browser_charts`)."""


def report(*paths: Path, with_home: bool = False) -> str:
    """Return the HTML page of a run folder, a flip folder or a bundle, or of several runs compared; home folders are
    written as ~ unless `with_home`.

    Raises BadInput for any other path, and RunLogError for a flip that cannot be read. If the log of a run is broken,
    the page shows the rest and the reason.
    """
    content = content_of(*paths)
    body = page_body(content)
    return _page(content.title, body if with_home else without_home(body))


def content_of(path: Path, *others: Path, links: Sequence[str] = ()) -> Content:
    """Return the content of the page of a run, a flip or a finding, or of the comparison of several runs with `links`
    to their pages. Raises the errors of `report`."""
    if others:
        return _compared_content([path, *others], links)
    if is_bundle(path):
        return _finding_content(Bundle(path))
    if is_flip(path):
        return Content(title=f"flip {path.resolve().name}", body="\n".join(_flip_parts(path)))
    if is_run(path):
        return _run_content(RunFolder(path))
    kind = "another folder" if path.is_dir() else "a file" if path.exists() else "nothing there"
    raise BadInput.expected("report", path, "a run, a flip or a finding", kind)


def without_home(html: str) -> str:
    """Return a text with ~ for each home folder."""
    return _HOME.sub("~", html)


def page_body(content: Content) -> str:
    """Return the title and the content as HTML, with the data of its charts."""
    body = f"<h1>{as_html(content.title)}</h1>\n{content.body}\n"
    if content.series is None:
        return body
    # The end tag of a script inside its data would end it.
    data = json.dumps(content.series, separators=(",", ":")).replace("<", r"\u003c")
    return f'{body}<script type="application/json" id="series">{data}</script>\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A run, as read from its logs."""

    run: RunFolder
    view: RunView
    state: str
    status: str
    """The run's status in one line, and the reason why its log cannot be read further."""
    command: WatchedCommand | None

    @property
    def settings(self) -> Mapping[str, str]:
        return all_settings(self.run, self.view, self.command)

    @property
    def total_tokens(self) -> float | None:
        return sum(n or 0.0 for n in self.view.steps.values("tokens"))

    def verdict(self, heading: str = "") -> str:
        """Return the box with the verdict, below a heading."""
        verdict, *below = run_verdict_lines(self.view, self.state, self.run.name)
        level = verdict_of(self.view, self.state).level
        lines = as_html("\n".join([*below, self.status]))
        return f'<div class="verdict {level}">{heading}<b>{as_html(verdict)}</b>{lines}</div>'


def _read(run: RunFolder) -> _Read:
    follower, broken = Follower(run), []
    try:
        follower.read_all()
    except RunLogError as fault:
        broken = [str(fault)]
    status = "\n".join([status_text(follower.view, follower.alive), *broken])
    return _Read(
        run=run,
        view=follower.view,
        state=follower.state,
        status=status,
        command=_command_of(run),
    )


def _run_content(run: RunFolder) -> Content:
    read = _read(run)
    view, state, command = read.view, read.state, read.command
    alerts = [line for alert in view.alerts.values() for line in alert_lines(alert)]
    charts = browser_charts(view)
    receipt = _receipt_of(run)
    parts = [
        read.verdict(),
        _facts(_identity(view, command, receipt)),
        _figures(charts, run_figures(view)),
        *_gpus(view, whole_run=has_ended(state)),
        *["<h2>Ranks, slowest first</h2>", _table(RANKS, rank_rows(view))] * bool(view.beats),
        _section(
            "Result",
            result_lines(view) or [OTHERS_RESULT if command else "no held-out loss was measured"],
        ),
        *[_section("Speed", speed_lines(view))] * bool(speed_lines(view)),
        *_samples(view),
        *[_section("Active alerts", alerts)] * bool(alerts),
    ]
    if command:
        lines = identity_lines(view)
        parts += [
            _folded("Identities", _lines(lines)),
            _section("Command", command_lines(view, command)),
        ]
    else:
        parts += [_checks(view), *_settings(run, view)]
    kernels = [OTHERS_KERNELS] if command and not view.compiles else kernel_lines(view)
    parts += [
        _folded("Kernels", _lines(kernels)),
        _folded("Host, newest readings", _lines(host_lines(view) or ["no reading yet"])),
        *_files(run, view, receipt),
    ]
    if not command:
        parts.append(_section("Run it again", [_command_line(run)]))
    return Content(title=f"run {run.name}", body="\n".join(parts), series=charts)


def _figures(charts: Mapping[str, Any], stills: Iterable[str]) -> str:
    figures = "".join(
        f'<figure data-chart="{as_html(chart["id"])}"><div class="still">{svg}</div></figure>\n'
        for chart, svg in zip(charts["charts"], stills, strict=True)
    )
    return f'<h2>Figures</h2>\n<div class="figures">\n{figures}</div>'


def _compared_content(paths: Sequence[Path], links: Sequence[str]) -> Content:
    if len(paths) > MOST_COMPARED:
        raise BadInput.expected(
            "report", f"{len(paths)} folders", f"at most {MOST_COMPARED} runs", "more"
        )
    for path in paths:
        if not is_run(path):
            found = "another folder" if path.is_dir() else "nothing there"
            raise BadInput.expected("report", path, "a run, to be compared with others", found)
    runs = [_read(RunFolder(path)) for path in paths]
    letters = LETTERS[: len(runs)]
    names = [f"{letter} {read.run.name}" for letter, read in zip(letters, runs, strict=True)]
    charts, stills = compared_charts(names, [read.view for read in runs])
    boxes = []
    for at, (name, read) in enumerate(zip(names, runs, strict=True)):
        heading = f'<a href="{as_html(links[at])}">{as_html(name)}</a>' if links else as_html(name)
        boxes.append(read.verdict(f"<div>{heading}</div>"))
    changed = [
        (
            difference.key,
            *(
                next((text for of, text in difference.values if at in of), "")
                for at in range(len(runs))
            ),
        )
        for difference in differing(runs)
    ]
    note = settings_note(runs, letters)
    parts = [
        f'<div class="verdicts">{"".join(boxes)}</div>',
        _figures(charts, stills),
        f"<h2>Results</h2>\n{_table(('', *names), results_table(runs))}",
        "<h2>Settings that differ</h2>",
        *([_table(("setting", *names), changed)] if changed else []),
        *([_lines([note])] if note else []),
    ]
    return Content(title=f"compare {', '.join(names)}", body="\n".join(parts), series=charts)


def _gpus(view: RunView, *, whole_run: bool) -> Iterator[str]:
    """Yield the table of GPUs with their newest readings, or with those over the whole run."""
    table = gpu_table(view, whole_run=whole_run)
    if not table.rows:
        return
    shown = [at for at, column in enumerate(table.columns) if not column.is_note]
    heading = "".join(f"<th>{as_html(table.columns[at].title)}</th>" for at in shown)
    rows = "\n".join(
        f"<tr>{''.join(_gpu_cell(row[at]) for at in shown)}</tr>" for row in table.rows
    )
    is_split = any(len(cell.shares) > 1 for row in table.rows for cell in row)
    legend = ["bar of the memory: the trainer's, then that of other processes"] * is_split
    notes = "".join(f"<div>{as_html(note)}</div>" for note in [*table.notes, *legend])
    yield f"<h2>GPUs{', over the whole run' * whole_run}</h2>"
    yield f'<table class="gpus" tabindex="0">\n<tr>{heading}</tr>\n{rows}\n</table>\n<div class="about">{notes}</div>'


def _gpu_cell(cell: Cell) -> str:
    bar = ""
    if cell.shares:
        parts = "".join(f'<b style="width:{share:.1%}"></b>' for share in cell.shares)
        bar = f'<b class="meter">{parts}</b>'
    name = "bad" if cell.is_bad else "unknown" if cell.text == UNKNOWN else ""
    return f'<td class="{name}">{bar}{as_html(cell.text)}</td>'


def _receipt_of(run: RunFolder) -> dict[str, Any]:
    """Return the receipt of a run; empty if there is none, or if it cannot be read."""
    try:
        return run.read_receipt() or {}
    except RunLogError:
        return {}


def _identity(
    view: RunView, command: WatchedCommand | None, receipt: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the recorded facts of the run: steps, time, models, device and versions."""
    if len(view.steps):
        yield (
            "steps",
            f"{view.last_step:,}" + (f" of {view.total_steps:,}" if view.total_steps else ""),
        )
    if view.first_unix_s is not None and view.last_unix_s is not None:
        yield "time", format_seconds(max(0.0, view.last_unix_s - view.first_unix_s))
    for role, model in view.models.items():
        yield (
            role,
            f"{format_count(model.parameters)} parameters, {model.precision}, sha256 {model.sha256[:12]}",
        )
    program = view.started or view.watched
    if program is not None:
        yield "device", program.device
        yield "torch", program.torch
        yield "python", program.python
    if view.started is not None:
        yield "engine", view.started.engine
    tool = receipt.get("tool")
    commit = (
        commit_text(command) if command else tool.get("commit") if isinstance(tool, dict) else ""
    )
    if commit:
        yield "commit", str(commit)[:60]


def _samples(view: RunView) -> Iterator[str]:
    """Yield the texts that the models wrote, folded if they are long."""
    if has_samples(view):
        samples = sample_lines(view)
        yield _folded("Samples of text", _lines(samples), is_open=len(samples) <= OPEN_LINES)


def _checks(view: RunView) -> str:
    """Return the checks, folded to one line unless a check has failed or an error was logged."""
    counts, *checks = check_lines(view)
    is_open = any(check.level == FAIL for check in view.checks.values()) or bool(
        error_lines(view.errors)
    )
    return _folded(f"Checks: {counts}", _lines(checks or ["none"]), is_open=is_open)


def _settings(run: RunFolder, view: RunView) -> Iterator[str]:
    """Yield the settings that differ from their defaults, then all settings and the decisions, folded."""
    values = settings_of(run)
    chosen = {decision.knob: decision.choice for decision in view.decisions}
    defaults = {option.key: option.default for option in options()}

    def row(key: str) -> tuple[str, ...]:
        value = "" if key not in values else str(values[key])
        return key, value, chosen.get(key, "") if chosen.get(key, "") != value else ""

    changed = [key for key in values if key in defaults and values[key] != defaults[key]]
    if changed:
        table = _table(("setting", "value", "chosen"), map(row, changed))
        yield f"<h2>Settings that differ from their defaults</h2>\n{table}"
    if values:
        yield _folded("All settings", _table(("setting", "value", "chosen"), map(row, values)))
    decisions = [(decision.knob, decision.choice, decision.reason) for decision in view.decisions]
    if decisions:
        yield _folded(
            f"Decisions: {len(decisions)}", _table(("setting", "chosen", "because"), decisions)
        )


def _files(run: RunFolder, view: RunView, receipt: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files of the run and of its inputs, with their hashes."""
    rows = [(f"{role}: {model.source}", "", model.sha256) for role, model in view.models.items()]
    if view.data is not None:
        rows += [
            ("training tokens", format_count(view.data.train_tokens), view.data.train_sha256),
            ("held-out tokens", format_count(view.data.heldout_tokens), view.data.heldout_sha256),
        ]
    for kind, folder in (("student_files", f"{run.student.name}/"), ("files", ""), ("logs", "")):
        files = receipt.get(kind)
        for name, entry in files.items() if isinstance(files, dict) else ():
            if isinstance(entry, dict) and isinstance(entry.get("bytes"), int):
                rows.append(
                    (f"{folder}{name}", format_bytes(entry["bytes"]), str(entry.get("sha256")))
                )
    if rows:
        yield _folded(f"Files: {len(rows)}", _table(("file", "size", "sha256"), rows))


def _command_line(run: RunFolder) -> str:
    """Return the command that starts a new run with the same settings."""
    sets = effective_of(run).get("sets") or []
    return shlex.join(
        [
            "engine",
            "distill",
            f"{run.name}/{run.spec.name}",
            *(w for s in sets for w in ("--set", s)),
        ]
    )


def _command_of(run: RunFolder) -> WatchedCommand | None:
    try:
        return read_command(run)
    except RunLogError:
        return None


def _flip_parts(path: Path) -> list[str]:
    plan, pairs, verdict = read_plan_of(path), read_pairs(path), read_verdict(path)
    table = [pair_heading(plan)]
    for count, pair in enumerate(pairs, start=1):
        table.append(pair_line(plan, pair, interval_of(plan, pairs[:count])))
    try:
        verdict_text = (
            ["no verdict: it is still running, or it was killed"]
            if verdict is None
            else verdict_lines(verdict)
        )
    except (KeyError, TypeError) as error:
        raise RunLogError.expected("verdict", path, "the fields of one", repr(error)) from error
    return [
        _section("Verdict", verdict_text),
        *([flip_figure(plan, pairs)] if plan.observed is None else ()),
        _section("Plan, registered before the first run", plan_lines(plan)),
        _section("Pairs", table),
    ]


def _finding_content(bundle: Bundle) -> Content:
    checked = check_bundle(bundle)
    finding = bundle.read()
    is_older = isinstance(finding, Older)
    tree = lines(finding, checked.broken)
    parts = [
        _lines([f"verified: {checked.verdict.level.name.lower()}: {checked.verdict.reason}"]),
        f"<h2>{'Claims' if is_older else 'Causes and tests'}</h2>\n{hanging(tree)}",
        *[_section("Changed", map(str, checked.faults))] * bool(checked.faults),
        *[_section("Notes", checked.notes)] * bool(checked.notes),
    ]
    if isinstance(finding, Finding):
        for test in finding.tests:
            if test.verdict and test.id not in checked.broken:
                parts += [
                    f"<h2>{test.id}: {as_html(test.reason)}</h2>",
                    *_flip_parts(bundle.flip_of(test.id)),
                ]
    return Content(title=finding.title, body="\n".join(parts))


def _page(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{as_html(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{as_html(name)}</dt><dd>{as_html(text)}</dd></div>" for name, text in rows
    )
    return f'<dl class="facts">{cells}</dl>'


def _folded(title: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' * is_open}><summary>{as_html(title)}</summary>\n{body}</details>"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{as_html(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<table tabindex="0">\n{line(heading, "th")}\n{body}\n</table>'


def _section(title: str, lines: Iterable[str]) -> str:
    return f"<h2>{as_html(title)}</h2>\n{_lines(lines)}"


def _lines(lines: Iterable[str]) -> str:
    return f"<pre>{as_html(chr(10).join(lines))}</pre>"


def hanging(lines: Iterable[str]) -> str:
    """Draw the lines of a tree; a line wider than the page continues with a hanging indent."""
    drawn = []
    for line in lines:
        text = line.lstrip(" ")
        style = f"margin-left:{len(line) - len(text) + 4}ch;text-indent:-4ch"
        drawn.append(f'<div style="{style}">{as_html(text)}</div>')
    return f'<pre style="white-space:pre-wrap;word-break:normal">{"".join(drawn)}</pre>'
