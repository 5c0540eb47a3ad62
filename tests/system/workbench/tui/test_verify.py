"""`T` on the screen of a run: `engine verify` in the background, and its outcome among the checks."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.verdict import Level, Verdict
from engine.verify.kept_outcome import digest_log, keep_outcome
from tests.support.finished_runs import finish
from tests.support.kit import Kit
from tests.support.run_folders import completed, running
from tests.support.screens import on_screen, poll, press, texts_of, words_of
from workbench.feed import RunFeed
from workbench.panes import check_words
from workbench.tui.screens.run import RunScreen

SIZE = (160, 50)
STEPS = 3


@pytest.fixture(scope="module")
def whole(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(kit, tmp_path_factory.mktemp("verify"), train__steps=STEPS).path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "runs" / "kd"))


def test_t_verifies_a_run_in_the_background_and_shows_the_verdict(run: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        await press(pilot, "T")
        assert f"kd is trained again, {STEPS} steps" in words_of(pilot)
        await press(pilot, "n")
        assert screen.context.jobs.of(screen.job_name) is None
        await press(pilot, "T", "y")
        job = screen.context.jobs.of(screen.job_name)
        assert job is not None and job.is_alive and job.arguments == ("verify", str(run))
        assert "verifying: " in words_of(pilot)
        await press(pilot, "T")
        assert "is running" in words_of(pilot)
        await press(pilot, "n")
        await asyncio.to_thread(job._process.wait, 240)
        await poll(pilot)
        assert f"verified: pass, {STEPS} steps to the bit" in words_of(pilot), job.lines()

    on_screen([run], SIZE, script)
    assert [path.name for path in run.parent.iterdir()] == ["kd"]


def test_a_verification_that_is_stopped_leaves_the_run_as_it_was(run: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        await press(pilot, "T", "y", "T", "y")
        job = screen.context.jobs.of(screen.job_name)
        assert job is not None
        await asyncio.to_thread(job._process.wait, 60)
        await poll(pilot)
        assert "not verified" in words_of(pilot)

    on_screen([run], SIZE, script)
    assert [path.name for path in run.parent.iterdir()] == ["kd"]
    assert not (run / "verified.json").exists()


def test_a_refusal_of_the_engine_is_shown_in_its_words(run: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        (run / "effective.json").write_text("{")
        await press(pilot, "T", "y")
        job = screen.context.jobs.of(screen.job_name)
        assert job is not None
        await asyncio.to_thread(job._process.wait, 60)
        await poll(pilot)
        assert job.code == 65
        assert "not verified: engine verify: settings: " in words_of(pilot)

    on_screen([run], SIZE, script)


def test_the_kept_outcome_is_below_the_counts_of_the_checks(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    feed = RunFeed(run)
    assert check_words(feed.read_all())[1] == "not verified"
    log = digest_log(run)
    assert log is not None
    kept = keep_outcome(run, log, Verdict(Level.FAIL, "steps: step 3: loss"), 3, "")
    words = f"verified: fail: steps: step 3: loss, {kept.at[:10]}"
    assert check_words(feed.read_all())[1] == words
    assert words in texts_of(run.path, (80, 24), "7")[-1]
    with run.events.open("ab") as file:
        file.write(b"{")
    assert check_words(feed.read_all())[1].startswith("verified: stale, the log has changed since")
    (run.path / "verified.json").write_text("[]")
    assert "expected a JSON object" in check_words(feed.read_all())[1]


def test_a_run_that_goes_on_is_not_verified_and_a_read_only_screen_starts_nothing(
    tmp_path: Path,
) -> None:
    scene = running(tmp_path / "active", done=5)
    assert not any("verified" in line for line in check_words(RunFeed(scene.run).read_all()))
    assert "is trained again" not in texts_of(scene.run.path, SIZE, "T")[-1]
    scene.close()
    ended = completed(tmp_path / "ended").path
    assert "is trained again" in texts_of(ended, SIZE, "T")[-1]
    assert "is trained again" not in texts_of(ended, SIZE, "T", read_only=True)[-1]
