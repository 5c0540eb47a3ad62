"""`engine report`: one HTML file that needs nothing else, of a run, a flip or a finding."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine.errors import BadInput
from engine.findings import changes
from engine.flips.flip_folder import create_flip
from engine.flips.surroundings import Surroundings
from engine.log.events import Wrote
from engine.log.write import encode
from engine.report.chart import flip_figure
from engine.report.page import POLICY, SCRIPT, report
from tests.support.findings import asked, carry_out, hanging_run
from tests.support.flip_pairs import plan, timed
from tests.support.paths import ROOT
from tests.support.run_events import example_of
from tests.support.run_folders import completed, corrupt, killed, running
from tests.support.running import engine_here


class Page(HTMLParser):
    """What a page would load, and whether its elements are closed."""

    VOID = frozenset({"meta", "rect", "polyline", "polygon"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "data", "action", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def whole(text: str) -> Page:
    """The page, once it is known to stand alone."""
    page = Page(text)
    assert page.open == [] and page.loads == []
    assert "url(" not in text and "@import" not in text
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert scripts == [SCRIPT] and page.tags.count("script") == 1 + ('id="series"' in text)
    assert f'content="{POLICY}"' in text and "default-src 'none'" in POLICY
    return page


def test_a_run_is_one_file_with_its_figures(tmp_path: Path) -> None:
    run = completed(tmp_path / "run", total=4000, nan=(2000,))
    text = report(run.path)
    page = whole(text)
    assert page.tags.count("svg") == 7 and len(text) < 400_000
    assert "COMPLETED | step 4000/4000" in text and "held-out loss of the student" in text
    assert "teacher.backend" in text and "×" in text
    assert report(run.path) == text


def test_a_page_shows_what_a_model_wrote_and_nothing_of_it_where_none_did(tmp_path: Path) -> None:
    wrote = example_of(Wrote, step=1, by="student", sample="<b>text</b>")
    run = completed(tmp_path / "run")
    assert "Samples of text" not in report(run.path)
    newest = json.loads(run.events.read_bytes().splitlines()[-1])
    with run.events.open("ab") as log:
        log.write(encode(wrote, newest["seq"] + 1, newest["t_s"]))
    page = report(run.path)
    assert "Samples of text" in page and "step 1: the student wrote" in page
    assert "&lt;b&gt;text&lt;/b&gt;" in page


def test_the_line_is_broken_where_a_loss_was_not_a_number(tmp_path: Path) -> None:
    def lines(nan: tuple[int, ...]) -> int:
        text = report(completed(tmp_path / f"run{len(nan)}", nan=nan).path)
        return len(re.findall("<polyline", text.partition("step time</title>")[0]))

    # The steps of ce and kd go on: only the line of the loss has a gap.
    assert lines((30,)) == lines(()) + 1


def test_runs_are_compared_in_one_file(tmp_path: Path) -> None:
    runs = [completed(tmp_path / name / "kd", total=40).path for name in ("a", "b")]
    for run, rate in zip(runs, (0.1, 0.2), strict=True):
        effective = json.loads((run / "effective.json").read_text())
        effective["spec"] = {"train": {"lr": rate, "rows": 8}}
        (run / "effective.json").write_text(json.dumps(effective))
    broken = corrupt(tmp_path / "broken").path
    text = report(*runs, broken)
    page = whole(text)
    assert "<h1>compare A kd, B kd, C broken</h1>" in text and page.tags.count("svg") == 8
    assert re.findall(r"<td>train.(\w+)</td><td>(.*?)</td><td>(.*?)</td>", text) == [
        ("lr", "0.1", "0.2")
    ]
    assert "expected line number 20" in text and "C: no settings on record" in text
    assert report(*runs, broken) == text
    assert "every setting is the same in all of them" in report(runs[0], runs[0])
    for others, found in (((tmp_path,), "another folder"), (runs * 3, "more")):
        with pytest.raises(BadInput, match=found):
            report(runs[0], *others)


@pytest.mark.parametrize("make", [killed, corrupt, lambda path: running(path).close().run])
def test_a_run_that_did_not_end_well_has_a_page_too(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = report(make(tmp_path / "run").path)
    whole(text)
    if make is killed:
        assert "KILLED" in text
    if make is corrupt:
        assert "events.jsonl" in text and "expected" in text.partition("<h2>")[0]


def test_a_name_is_text_and_no_markup(tmp_path: Path) -> None:
    bundle = asked(hanging_run(tmp_path / "runs" / "<img src=x>"))
    changes.note(bundle, "<script>alert(1)</script>")
    text = report(bundle.path)
    whole(text)
    assert "&lt;script&gt;" in text and "<img" not in text


def test_a_flip_has_its_plan_its_pairs_and_the_margin(tmp_path: Path) -> None:
    asked = plan()
    surroundings = {name: None for name in Surroundings.__dataclass_fields__}
    folder = create_flip(tmp_path / "flip", asked, Surroundings(**surroundings))  # type: ignore[arg-type]
    for pair in timed([0.1, 0.2, 0.15, 0.12]):
        folder.add(pair)
    folder.close()
    text = report(tmp_path / "flip")
    whole(text)
    assert "no verdict" in text and "compute.threads" in text and asked.sha256 in text
    figure = flip_figure(asked, timed([0.1, 0.2]))
    assert figure in flip_figure(asked, timed([0.1, 0.2])) and figure.count("<polygon") == 2
    assert figure.count("stroke-dasharray") == 3, "the margin, and no change"


def test_a_finding_shows_its_tests_and_names_what_was_changed(tmp_path: Path) -> None:
    bundle = asked(hanging_run(tmp_path / "runs" / "hang"))
    carry_out(bundle, tmp_path / "flips" / "1")
    text = report(bundle.path)
    whole(text)
    assert "c1  confirmed: compute.threads: 2 -&gt; 1" in text and "shows it      does not" in text
    assert "<h2>Changed</h2>" not in text
    with (bundle.path / "tests" / "t1" / "plan.json").open("ab") as file:
        file.write(b"x")
    assert "<h2>Changed</h2>" in report(bundle.path)


def test_a_finding_of_the_first_version_has_a_page_too() -> None:
    text = report(ROOT / "evidence" / "2026-11-21-hang-at-step-zero")
    whole(text)
    assert "of an earlier version" in text and "recorded as supported" in text


def test_the_command_writes_the_file_and_keeps_one_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = completed(tmp_path / "run")
    done = engine_here("report", run.path)
    assert (done.returncode, done.stdout) == (0, "report-run.html\n")
    whole((tmp_path / "report-run.html").read_text())
    again = engine_here("report", run.path)
    assert again.returncode == 65 and "--force" in again.stderr
    assert engine_here("report", run.path, "--force").returncode == 0
    assert engine_here("report", tmp_path).returncode == 65


def test_what_is_none_of_the_three_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a run, a flip or a finding"):
        report(tmp_path)
    with pytest.raises(BadInput, match="nothing there"):
        report(tmp_path / "no")
