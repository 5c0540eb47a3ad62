"""One key from a run to a flip: what is suggested, what would be registered, and the verdict of a
real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from engine.findings.bundle import find_bundles
from engine.findings.check import check_bundle
from engine.flips.flip_folder import find_flips, read_verdict
from engine.flips.proposals import proposals
from engine.log.events import DecisionMade, Event, Judged
from engine.log.folder import RunFolder, settings_of
from engine.log.view import RunView
from tests.support.findings import NONE, SAME, asked, carry_out, flip, hanging_run
from tests.support.judged import alert_event, is_alert
from tests.support.run_folders import Scene, completed
from tests.support.screens import on_screen, poll, press, settle, shows, texts_of, words_of
from workbench.feed import RunFeed
from workbench.flip_snapshots import FlipFeed, FlipsFeed, Wanted, running_flip
from workbench.tui.screens.flip import FlipScreen


def _view(tmp_path: Path, *events: Event) -> RunView:
    scene = Scene(tmp_path / "run").open()
    for event in events:
        (scene.watch if is_alert(event) else scene.events)(event)
    scene.close()
    return RunFeed(scene.run).read_all().view


def _alert(level: str, flip: str) -> Judged:
    return alert_event(id=f"rule_{level}", level=level, text="the GPU idles", flip=flip)


def test_alerts_come_first_and_errors_before_warnings(tmp_path: Path) -> None:
    chosen = DecisionMade(
        knob="teacher.backend", choice="quantized", reason="fits", rejected=[("dequantized", "big")]
    )
    found = proposals(
        _view(
            tmp_path,
            chosen,
            _alert("suspicion", "--set compute.threads=1"),
            _alert("fail", "--set memory.allocator=native"),
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
    alert = _alert("fail", "--set compute.threads=1")
    found = proposals(_view(tmp_path, odd, twice, alert))
    assert [s.assignment for s in found] == ["compute.threads=1"]
    assert found[0].source.startswith("alert")


def test_the_key_opens_the_plan_that_would_be_registered(
    ended_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        screen = pilot.app.screen
        assert isinstance(screen, FlipScreen)
        assert screen.query_one("#assignment", Input).value in words_of(pilot)
        screen.query_one("#assignment", Input).value = "compute.thread_wait=active"
        await settle(pilot)
        # A moment later: what `engine flip --dry-run` says of the plan, time, memory and device.
        changes = "compute.thread_wait: auto -> active"
        cost = ("memory of one run", "device: the CPU", "time: ", "limits: at most 5m")
        for words in (changes, *cost):
            assert await shows(pilot, words), words_of(pilot)
        screen.query_one("#assignment", Input).value = "compute.thread_wait=dance"
        assert await shows(pilot, "passive, active"), words_of(pilot)
        screen.query_one("#budget", Input).value = "soon"
        await settle(pilot)
        assert "expected a time as 90s" in words_of(pilot)
        await press(pilot, "escape")
        assert not isinstance(pilot.app.screen, FlipScreen)
        assert not (tmp_path / "flips").exists()

    on_screen([ended_run], (120, 40), script)


def test_a_read_only_screen_starts_no_flip(ended_run: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        assert not isinstance(pilot.app.screen, FlipScreen)

    on_screen([ended_run], (120, 40), script, read_only=True)


def test_enter_runs_it_and_the_verdict_comes_onto_the_screen(
    ended_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    shown: list[str] = []

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "F")
        screen = pilot.app.screen
        assert isinstance(screen, FlipScreen)
        screen.query_one("#assignment", Input).value = "compute.slow_by=3"
        screen.query_one("#hypothesis", Input).value = "waiting makes steps longer"
        # One pair, cut short where the machine is slow: a verdict is written, whatever it says.
        screen.query_one("#budget", Input).value = "6s"
        screen.query_one("#budget", Input).focus()
        await press(pilot, "enter")
        started = screen._started
        assert started is not None
        started._process.wait(timeout=240)
        await poll(pilot)
        assert "next: " in words_of(pilot) and "pair order" not in words_of(pilot)
        await press(pilot, "z")
        words = words_of(pilot)
        assert "pair order" in words, words
        shown.append(words)
        assert "waiting makes steps longer" in words

    on_screen([ended_run], (120, 40), script)
    (folder,) = find_flips(tmp_path / "flips")
    verdict = read_verdict(folder)
    assert verdict is not None and f"{verdict['verdict']} ({verdict['class']})" in shown[0]
    assert (
        FlipFeed(folder).poll().verdict == verdict
        and running_flip(tmp_path / "flips", ended_run) is None
    )


def test_a_refused_flip_says_why(ended_run: Path, tmp_path: Path) -> None:
    started = Wanted(assignment="compute.threads=1").start(ended_run, tmp_path / "flips" / "x")
    started._process.wait(timeout=240)
    snapshot = FlipFeed(tmp_path / "flips" / "x", started).poll()
    # The kit's spec has one thread already.
    assert not snapshot.going_on and snapshot.plan is None and snapshot.state == "refused"
    assert "another value than arm A's" in snapshot.error


def test_a_folder_of_no_flip_is_a_text_and_no_exception(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("not json\n")
    (tmp_path / "plan.json").write_text("{}")
    snapshot = FlipFeed(tmp_path).poll()
    assert snapshot.error and not snapshot.going_on


def test_checks_and_kernels_have_panes_of_their_own(ended_run: Path, tmp_path: Path) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "7")
        assert "+ pass vocabulary_by_bytes" in words_of(pilot)
        await press(pilot, "8")
        assert "nothing compiled" in words_of(pilot)

    on_screen([ended_run], (120, 40), script)
    plain: RunFolder = completed(tmp_path / "plain")

    async def without(pilot: Pilot[None]) -> None:
        await press(pilot, "7")
        assert "no check has run yet" in words_of(pilot)

    on_screen([plain.path], (80, 24), without)


def test_a_decision_without_an_alternative_suggests_nothing(tmp_path: Path) -> None:
    only = DecisionMade(knob="compute.device", choice="cpu", reason="set by the user")
    assert proposals(_view(tmp_path, only)) == ()


def test_what_cannot_be_tested_comes_last_with_its_reason(tmp_path: Path) -> None:
    managed = DecisionMade(
        knob="memory.allocator",
        choice="native",
        reason="-",
        rejected=[("managed", "no GPU")],
        impossible=["managed"],
    )
    dense = DecisionMade(
        knob="teacher.backend",
        choice="dequantized",
        reason="-",
        rejected=[
            ("quantized", "the file has no quantized blocks"),
            ("none", "a teacher is given"),
        ],
        impossible=["quantized"],
    )
    view = _view(tmp_path, managed, dense, _alert("fail", "--set compute.threads=2"))
    found = proposals(view, {"compute.threads": 2})
    assert [one.assignment for one in found if not one.impossible] == ["teacher.backend=none"]
    why = {one.assignment: one.impossible for one in found if one.impossible}
    assert why == {
        "compute.threads=2": "it is 2 already",
        "memory.allocator=managed": "no GPU",
        "teacher.backend=quantized": "the file has no quantized blocks",
    }


def test_a_choice_that_the_run_made_by_itself_is_no_alternative(tmp_path: Path) -> None:
    chosen = DecisionMade(knob="compute.threads", choice="4", reason="-", rejected=[("2", "-")])
    view = _view(tmp_path, chosen, _alert("fail", "--set compute.threads=4"))
    found = proposals(view, {"compute.threads": 0})
    assert [(one.assignment, bool(one.impossible)) for one in found] == [
        ("compute.threads=2", False),
        ("compute.threads=4", True),
    ]


def test_the_impossible_is_shown_and_cannot_be_chosen(ended_run: Path) -> None:
    assert settings_of(RunFolder(ended_run))["compute.threads"] == 1

    async def script(pilot: Pilot[None]) -> None:
        # From the list of flips; F of the run's screen is tested above.
        await press(pilot, "E", "n")
        await poll(pilot)
        screen = pilot.app.screen
        assert isinstance(screen, FlipScreen)
        options = screen.query_one(OptionList).options
        refused = [str(option.prompt) for option in options if option.disabled]
        words = "/ memory.allocator=managed   cannot be tested: managed memory needs a GPU, and the run computes on "
        words += "the CPU"
        assert any(text.startswith(words) for text in refused), refused
        # What a GPU alone has is refused on a CPU, whatever the setting.
        for words in ("train.update=fused", "student.graphs=on", "kernels.layers=fused"):
            assert any(text.startswith(f"/ {words}   cannot be tested: ") for text in refused), (
                refused
            )
        assert options[-1].disabled and not options[0].disabled
        screen.query_one(OptionList).action_last()
        await settle(pilot)
        assert screen.query_one("#assignment", Input).value + " " not in "".join(refused)

    on_screen([ended_run], (160, 45), script)


def _past_flips(folder: Path) -> Path:
    flip(folder / "flips" / "20260101-100000-backend")
    flip(folder / "flips" / "20260102-100000-threads", SAME, controls=NONE)
    return folder


@pytest.mark.parametrize(
    "size",
    [
        (160, 45),
        (40, 12),
        *(pytest.param(size, marks=pytest.mark.soak) for size in ((120, 40), (80, 24))),
    ],
)
def test_past_flips_are_listed_with_verdicts_and_opened(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_past_flips(tmp_path))
    keys = ("E", "down", "enter", "z")
    _, listed, _, folded, opened = texts_of(tmp_path, size, *keys, ascii_only=size[0] == 80)
    assert "experiments: 2 flips" in listed
    assert "+ EQUIVALENT (screen)" in listed and "+ B_FASTER (measured)" in listed
    assert "20260101-100000-backend: B_FASTER (measured)" in opened
    if size[1] > 18:
        assert "is faster: time per step -26.0 %" in folded and "next: set " in folded
        assert "AA: pass" not in folded
        assert "AA: pass" in opened and "parity: pass" in opened and "manipulation" in opened


def test_an_empty_list_of_flips_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, text = texts_of(tmp_path, (80, 24), "E")
    assert "No flip in flips yet" in text and "F on the screen of a run" in text


def test_a_broken_flip_is_listed_beside_the_others(tmp_path: Path) -> None:
    _past_flips(tmp_path)
    (tmp_path / "flips" / "20260102-100000-threads" / "plan.json").write_text("{")
    rows = FlipsFeed([tmp_path / "flips"]).poll().rows
    assert sorted(row.tone for row in rows) == ["bad", "good"]


def test_a_flip_of_a_run_that_failed_begins_a_finding_with_its_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = asked(hanging_run(tmp_path / "runs" / "hang"), folder=tmp_path / "others")
    carry_out(other, tmp_path / "flips" / "1")

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "E", "enter", "ctrl+w")
        assert await shows(pilot, "why? a finding about hang")
        await press(pilot, "enter")
        assert await shows(pilot, "does compute.threads=1 end it?")
        (made,) = find_bundles(tmp_path / "evidence")
        assert made.load().causes[0].why == "flip 1"
        assert check_bundle(made).faults == ()

    on_screen([tmp_path / "runs"], (120, 40), script)


def test_a_flip_in_which_nothing_went_wrong_begins_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_past_flips(tmp_path))

    async def script(pilot: Pilot[None]) -> None:
        await press(pilot, "E", "enter", "ctrl+w")
        assert await shows(pilot, "went wrong in, found no alert")

    on_screen([tmp_path], (120, 40), script)
    assert not find_bundles(tmp_path / "evidence")
