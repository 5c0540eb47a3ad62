"""Five whys on screens: from the failed run to a closed finding by keys, with the changes that lead there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select

from engine.findings import changes
from engine.findings.bundle import Bundle, find_bundles
from engine.findings.check import check_bundle
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.verdict import Level
from tests.support.findings import (
    DEMO,
    KEEPS,
    ROWS,
    THREADS,
    asked,
    carry_out,
    flip,
    hanging_run,
)
from tests.support.running import wait_for
from tests.support.screens import on_screen, poll, press, settle, shows, texts_of
from tests.support.waiting_teacher import TRAINER
from workbench.finding_rows import FindingFeed, FindingsFeed, of_flip
from workbench.listing import Row
from workbench.tui.screens.finding import FindingScreen
from workbench.tui.screens.form import FormScreen

SIZES = [
    (160, 45),
    (40, 12),
    *(pytest.param(size, marks=pytest.mark.soak) for size in ((120, 40), (80, 24))),
]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.chdir(tmp_path)
    bundle = asked(hanging_run(tmp_path / "runs" / "hang"), ROWS, THREADS)
    carry_out(bundle, tmp_path / "flips" / "1", KEEPS)
    carry_out(bundle, tmp_path / "flips" / "2", [(True, False)] * 5)
    changes.note(bundle, "the fan was loud")
    return bundle


def rows_of(bundle: Bundle) -> dict[str, Row]:
    return {row.key: row for row in FindingFeed(bundle.path).poll().rows}


def test_levels_and_tests_are_words_and_signs(bundle: Bundle) -> None:
    rows = rows_of(bundle)
    assert [*rows] == ["finding", "observed", "c1", "t1", "c2", "t2", "note1"]
    assert [rows[key].sign for key in ("observed", "c1", "t1", "c2", "t2")] == [*"*x>+>"]
    assert rows["c1"].text == "c1  refuted: train.rows: 8 -> 2"
    assert rows["t2"].text == "  t2  B_ENDS_IT: A shows it in 5 of 5 pairs, B in none"
    details = "\n".join(rows["t2"].lines)
    assert (
        "plan, registered before the first run" in details and "shows it      does not" in details
    )
    assert "supports nothing" in "\n".join(rows["note1"].lines)


def test_a_changed_byte_is_seen_at_the_next_look(bundle: Bundle) -> None:
    feed = FindingFeed(bundle.path)
    assert feed.poll().rows[0].tone == "unsure"
    log = bundle.flip_of("t2") / "arms" / "01-a" / "watch.jsonl"
    log.write_bytes(log.read_bytes()[:-2])
    rows = {row.key: row for row in feed.poll().rows}
    assert rows["finding"].tone == "bad" and rows["t2"].sign == "!"
    assert rows["t1"].sign == ">"


def test_a_damaged_finding_is_listed_beside_the_others(bundle: Bundle, tmp_path: Path) -> None:
    other = asked(hanging_run(tmp_path / "runs" / "other", later_s=9.0))
    (other.path / "finding.json").write_text("{")
    rows = FindingsFeed([tmp_path / "evidence"]).poll().rows
    assert {row.tone for row in rows} == {"bad", "good"}
    assert any(row.text.startswith("damaged: ") for row in rows)


@pytest.mark.parametrize("size", SIZES)
def test_a_finding_is_shown_at_every_size(
    bundle: Bundle, tmp_path: Path, size: tuple[int, int]
) -> None:
    *_, text = texts_of(tmp_path / "runs", size, "w", "enter")
    assert "c2" in text and "confirmed" in text


def test_an_empty_list_says_how_a_finding_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, text = texts_of(tmp_path, (80, 24), "w")
    assert "No finding in evidence yet" in text and "engine why new" in text


async def fill(pilot: Pilot[None], **values: str) -> None:
    """Put words into the form that is open, and send it."""
    form = pilot.app.screen
    assert isinstance(form, FormScreen), form
    for name, value in values.items():
        widget = form.query_one(f"#field-{name}")
        assert isinstance(widget, Input | Select)
        widget.value = value
    await press(pilot, "enter")
    # What was done is said to the screen below, which looks again.
    await settle(pilot)


def test_a_finding_is_begun_with_its_numbers_and_worked_on_with_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = hanging_run(tmp_path / "runs" / "hang")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "W")
        assert await shows(pilot, "alert gpu_idle: the GPU has done nothing for 6 s")
        form = pilot.app.screen
        assert isinstance(form, FormScreen) and len(form.query(".line")) == 3
        await fill(pilot, other="the moon")
        assert await shows(pilot, "expected"), "a refusal leaves the form open"
        await fill(pilot, other=THREADS)
        assert await shows(pilot, "test c1: does compute.threads=1 end it?")
        assert isinstance(pilot.app.screen, FindingScreen)
        (bundle,) = find_bundles(tmp_path / "evidence")
        await press(pilot, "a")
        await fill(pilot, change=ROWS)
        assert await shows(pilot, "c2 open: train.rows: 8 -> 2")
        await press(pilot, "c")
        assert await shows(pilot, "close as unresolved: no test confirms a cause")
        await press(pilot, "escape")
        carry_out(bundle, tmp_path / "flips" / "1")
        await poll(pilot)
        assert await shows(pilot, "c1 confirmed")
        await press(pilot, "c")
        await poll(pilot)
        assert await shows(pilot, "root cause: alert gpu_idle")
        assert check_bundle(bundle).verdict.level == Level.PASS

    on_screen([run.path.parent], (120, 40), script)


def test_read_only_changes_no_finding(bundle: Bundle, tmp_path: Path) -> None:
    before = bundle.load()

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "w", "enter")
        for key in ("t", "a", "c"):
            await press(pilot, key)
            assert isinstance(pilot.app.screen, FindingScreen), key

    on_screen([tmp_path / "runs"], (120, 40), script, read_only=True)
    assert bundle.load() == before


def test_a_flip_offers_its_change_for_what_went_wrong_in_its_source(
    bundle: Bundle, tmp_path: Path
) -> None:
    run, suspects = of_flip(tmp_path / "flips" / "2")
    assert run.name == "hang" and [one.assignment for one in suspects] == [THREADS]
    flip(tmp_path / "flips" / "healthy")
    with pytest.raises(Exception, match="something went wrong in"):
        of_flip(tmp_path / "flips" / "healthy")


@pytest.mark.soak
def test_the_founding_story_closes_by_a_real_flip_in_few_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distillation whose teacher in blocks hangs while it is loaded, killed from outside: the demo's own models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APR_WORKBENCH_TRAINER", TRAINER)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sets = {
        "run.name": "hang",
        "watch.stall_seconds": "3",
        "teacher.path": str(DEMO / "teacher.gguf"),
        "teacher.backend": "quantized",
    }
    command = [sys.executable, "-m", "engine", "distill", str(DEMO / "demo.toml")]
    command += [f"--set={key}={value}" for key, value in sets.items()]
    engine = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    run = RunFolder(tmp_path / "runs" / "hang")

    def hangs(view: RunView) -> bool:
        alert = view.alerts.get("stalled_at_start")
        return alert is not None and "loading the teacher" in alert.text

    pid = wait_for(run.path, hangs).view.trainer_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    engine.wait(60)
    keys: list[str] = []

    async def script(pilot: Pilot[None]) -> None:
        async def pressed(*names: str) -> None:
            keys.extend(names)
            await press(pilot, *names)

        await pressed("enter", "W")
        assert await shows(pilot, "alert stalled_at_start")
        await pressed("enter")
        assert await shows(pilot, "does teacher.backend=dequantized end it?")
        await pressed("t")
        (bundle,) = find_bundles(tmp_path / "evidence")
        job = pilot.app.screen.job  # type: ignore[attr-defined]
        await asyncio.to_thread(job._process.wait)
        await poll(pilot)
        assert await shows(pilot, "c1 confirmed")
        await pressed("c")
        await poll(pilot)
        assert await shows(pilot, "root cause: alert stalled_at_start")
        assert check_bundle(bundle).verdict.level is Level.PASS

    on_screen([run.path.parent], (120, 40), script)
    assert len(keys) < 12, keys
