"""A run, a flip or a finding as one HTML file, which is what `engine report` writes.

The file holds text, tables and SVG, and no script, font or external link, so it opens offline and can be
mailed. The figures are the same as in the notebook. Text from people and logs is escaped. The page depends on
the folder alone: once a run has ended, the same folder gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.errors import BadInput, RunLogError
from engine.findings.bundle import Bundle, is_bundle
from engine.findings.check import check_bundle
from engine.findings.finding import Finding
from engine.findings.older import Older
from engine.findings.text import lines
from engine.flips.flip_folder import is_flip, read_pairs, read_plan_of, read_verdict
from engine.flips.judge import interval_of
from engine.flips.text import pair_heading, pair_line, plan_lines, verdict_lines
from engine.log.folder import RunFolder, WatchedCommand, is_run, read_command
from engine.log.follow import Follower
from engine.log.identities import identity_lines
from engine.log.text import (
    OTHERS_KERNELS,
    OTHERS_RESULT,
    alert_lines,
    check_lines,
    command_lines,
    decision_lines,
    device_lines,
    has_samples,
    kernel_lines,
    result_lines,
    sample_lines,
    speed_lines,
    status_text,
)
from engine.report.chart import PAINTS, flip_figure, run_figures
from engine.terminal import as_html
from engine.watch.verdict_line import run_verdict_lines

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "pre{white-space:pre-wrap;background:#f5f5f5;padding:.6em;overflow-x:auto}"
    "svg{max-width:100%;height:auto}"
    ".figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(28em,1fr));gap:.6em 1em}"
    "h1{font-size:1.3em}h2{font-size:1.05em;margin:1.2em 0 .3em}"
    f"@media(prefers-color-scheme:dark){{body{{color:{PAINTS['ink'][1]};background:{PAINTS['ground'][1]}}}"
    "pre{background:#222}}"
)


def report(path: Path) -> str:
    """Return the HTML page of a run folder, a flip folder or a bundle.

    Raises BadInput for anything else, and RunLogError for a flip that cannot be read. When the log of a run
    breaks off, the page says so.
    """
    if is_bundle(path):
        return _finding_page(Bundle(path))
    if is_flip(path):
        return _flip_page(path)
    if is_run(path):
        return _run_page(RunFolder(path))
    found = "another folder" if path.is_dir() else "a file" if path.exists() else "nothing there"
    raise BadInput.expected("report", path, "a run, a flip or a finding", found)


def _run_page(run: RunFolder) -> str:
    follower, broken = Follower(run), ""
    try:
        follower.read_all()
    except RunLogError as fault:
        broken = str(fault)
    view = follower.view
    alerts = [line for alert in view.alerts.values() for line in alert_lines(alert)]
    command = _command_of(run)
    decisions = [line for decision in view.decisions for line in decision_lines(decision)]
    verdict = run_verdict_lines(view, follower.state, run.name)
    parts = [_lines([*verdict, status_text(view, follower.alive), *([broken] if broken else [])])]
    parts += [
        _section(
            "Result",
            result_lines(view) or [OTHERS_RESULT if command else "no held-out loss was measured"],
        ),
        *[_section("Speed", speed_lines(view))] * bool(speed_lines(view)),
        *[_section("Samples of text", sample_lines(view))] * has_samples(view),
        _section("Active alerts", alerts or ["none"]),
        f'<h2>Figures</h2>\n<div class="figures">{"".join(run_figures(view))}</div>',
        _section("Identities", identity_lines(view))
        if command
        else _section("First-minute checks", check_lines(view)),
        _section("Command", command_lines(view, command))
        if command
        else _section("Decisions", decisions or ["none was logged"]),
        _section(
            "Kernels", [OTHERS_KERNELS] if command and not view.compiles else kernel_lines(view)
        ),
        _section("Device, newest readings", device_lines(view)),
    ]
    return _page(f"run {run.name}", parts)


def _command_of(run: RunFolder) -> WatchedCommand | None:
    try:
        return read_command(run)
    except RunLogError:
        return None


def _flip_page(path: Path) -> str:
    return _page(f"flip {path.resolve().name}", _flip_parts(path))


def _flip_parts(path: Path) -> list[str]:
    plan, pairs, verdict = read_plan_of(path), read_pairs(path), read_verdict(path)
    table = [pair_heading(plan)]
    for count, pair in enumerate(pairs, start=1):
        table.append(pair_line(plan, pair, interval_of(plan, pairs[:count])))
    try:
        said = ["no verdict: it goes on, or it died"] if verdict is None else verdict_lines(verdict)
    except (KeyError, TypeError) as error:
        raise RunLogError.expected("verdict", path, "the fields of one", repr(error)) from error
    return [
        _section("Verdict", said),
        *([flip_figure(plan, pairs)] if plan.observed is None else ()),
        _section("Plan, registered before the first run", plan_lines(plan)),
        _section("Pairs", table),
    ]


def _finding_page(bundle: Bundle) -> str:
    checked = check_bundle(bundle)
    finding = bundle.read()
    is_older = isinstance(finding, Older)
    said = lines(finding, checked.broken)
    parts = [
        _lines([f"verified: {checked.verdict.level.name.lower()}: {checked.verdict.reason}"]),
        f"<h2>{'Claims' if is_older else 'Causes and tests'}</h2>\n{hanging(said)}",
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
    return _page(finding.title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    name = as_html(title)
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    )


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
