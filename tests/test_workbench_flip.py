"""One key from a run to a flip: what is suggested, what would be registered, and the verdict of a
real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import Scene, completed
from running import engine
from screens import on_screen, poll, press, settle, words_of
from textual.pilot import Pilot
from textual.widgets import Input

from engine.experiments.record import find_flips, read_verdict
from engine.runlog.events import AlertRaised, DecisionMade, Event
from engine.runlog.folder import RunFolder
from engine.runlog.view import RunView
from tests.conftest import Kit
from workbench.feed import RunFeed
from workbench.flips import FlipFeed, going_on
from workbench.launch import start_flip
from workbench.suspicions import suspicions
from workbench.tui.screens.flip import FlipScreen


def _view(tmp_path: Path, *events: Event) -> RunView:
    scene = Scene(tmp_path / "run").open()
    for event in events:
        (scene.watch if isinstance(event, AlertRaised) else scene.events)(event)
    scene.close()
    return RunFeed(scene.run).read_all().view


def _alert(severity: str, flip: str) -> AlertRaised:
    return AlertRaised(id=f"rule_{severity}", severity=severity, title="the GPU idles", flip=flip)


def test_alerts_come_first_and_errors_before_warnings(tmp_path: Path) -> None:
    chosen = DecisionMade(
        knob="teacher.backend", choice="quantized", reason="fits", rejected=[("dequantized", "big")]
    )
    found = suspicions(
        _view(
            tmp_path,
            chosen,
            _alert("warning", "--set compute.threads=1"),
            _alert("error", "--set memory.allocator=native"),
        )
    )
    assert [s.assignment for s in found] == [
        "memory.allocator=native",
        "compute.threads=1",
        "teacher.backend=dequantized",
    ]
    assert "the GPU idles" in found[0].hypothesis


def test_what_is_no_setting_is_not_suggested_and_nothing_twice(tmp_path: Path) -> None:
    odd = DecisionMade(knob="weather", choice="rain", reason="-", rejected=[("sun", "-")])
    twice = DecisionMade(
        knob="compute.threads", choice="2", reason="-", rejected=[("1", "slow"), ("1", "slow")]
    )
    alert = _alert("error", "--set compute.threads=1")
    found = suspicions(_view(tmp_path, odd, twice, alert))
    assert [s.assignment for s in found] == ["compute.threads=1"]
    assert found[0].source.startswith("alert")


@pytest.fixture(scope="module")
def run(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flip")
    spec = kit.spec(folder, train__steps=2, eval__every=0, checkpoint__every=0)
    done = engine("distill", spec, "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_key_opens_the_plan_that_would_be_registered(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        screen = pilot.app.screen
        assert isinstance(screen, FlipScreen)
        assert screen.query_one("#assignment", Input).value in words_of(pilot)
        screen.query_one("#assignment", Input).value = "compute.thread_wait=active"
        await settle(pilot)
        assert "compute.thread_wait A 'auto' B 'active'" in words_of(pilot)
        screen.query_one("#assignment", Input).value = "compute.thread_wait=dance"
        await settle(pilot)
        assert "passive, active" in words_of(pilot)
        screen.query_one("#budget", Input).value = "soon"
        await settle(pilot)
        assert "expected a time as 90s" in words_of(pilot)
        await press(pilot, "escape")
        assert not isinstance(pilot.app.screen, FlipScreen)
        assert not (tmp_path / "flips").exists()

    on_screen([run], (120, 40), script)


def test_a_read_only_screen_starts_no_flip(run: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        assert not isinstance(pilot.app.screen, FlipScreen)

    on_screen([run], (120, 40), script, read_only=True)


def test_enter_runs_it_and_the_verdict_comes_onto_the_screen(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    shown: list[str] = []

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        screen = pilot.app.screen
        assert isinstance(screen, FlipScreen)
        screen.query_one("#assignment", Input).value = "compute.slow_by=3"
        screen.query_one("#hypothesis", Input).value = "waiting makes steps longer"
        # A pair or two: enough for a verdict to be written, whatever it says.
        screen.query_one("#budget", Input).value = "10s"
        screen.query_one("#budget", Input).focus()
        await press(pilot, "enter")
        started = screen._started
        assert started is not None
        started._process.wait(timeout=80)
        await poll(pilot)
        words = words_of(pilot)
        assert "pair order" in words, words
        shown.append(words)
        assert "waiting makes steps longer" in words

    on_screen([run], (120, 40), script)
    (folder,) = find_flips(tmp_path / "flips")
    verdict = read_verdict(folder)
    assert verdict is not None and f"{verdict['verdict']} ({verdict['class']})" in shown[0]
    assert FlipFeed(folder).poll().verdict == verdict and going_on(tmp_path / "flips", run) is None


def test_a_refused_flip_says_why(run: Path, tmp_path: Path) -> None:
    started = start_flip(run, "compute.threads=1", tmp_path / "flips" / "x", budget="5m")
    started._process.wait(timeout=60)
    snapshot = FlipFeed(tmp_path / "flips" / "x", started).poll()
    # The kit's spec has one thread already.
    assert not snapshot.going_on and snapshot.plan is None
    assert "another value than arm A's" in snapshot.error


def test_a_folder_of_no_flip_is_a_text_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("not json\n")
    (tmp_path / "plan.json").write_text("{}")
    snapshot = FlipFeed(tmp_path).poll()
    assert snapshot.error and not snapshot.going_on


def test_checks_and_kernels_have_panes_of_their_own(run: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "7")
        assert "+ pass vocabulary_by_bytes" in words_of(pilot)
        await press(pilot, "8")
        assert "nothing was compiled" in words_of(pilot)

    on_screen([run], (120, 40), script)
    plain: RunFolder = completed(tmp_path / "plain")

    async def without(pilot: Pilot[None]) -> None:
        await press(pilot, "7")
        assert "no check was asked yet" in words_of(pilot)

    on_screen([plain.path], (80, 24), without)


def test_a_decision_without_an_alternative_suggests_nothing(tmp_path: Path) -> None:
    only = DecisionMade(knob="compute.device", choice="cpu", reason="set by the user")
    assert suspicions(_view(tmp_path, only)) == ()
