"""The watcher on run folders that are written by hand, with a clock that is set by hand."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.catalogue import About
from engine.log.events import (
    Event,
    GpuSample,
    HostSample,
    Judged,
    Note,
    Phase,
    RunFinished,
    StackDump,
)
from engine.log.view import RunView
from engine.spec import build_spec
from engine.watch.active_alerts import ActiveAlerts
from engine.watch.rules import RULES
from engine.watch.rules.rule import Case, Rule, Symptom
from engine.watch.watcher import (
    EVALUATE_EVERY_S,
    HEAD_ROWS,
    STOP_GRACE_S,
    TAIL_ROWS,
    Watcher,
    trimmed,
)
from tests.support.diagnosing import healthy_step
from tests.support.judged import is_alert, is_alert_end, number_event, numbers_of
from tests.support.perf import within
from tests.support.run_events import fold_events, numbered, opened
from tests.support.run_folders import START_UNIX_S, Scene, started
from tests.system.watch.test_stacks import wait_until_ready


class Watched:
    """A run, a child that stands for its trainer, and a watcher at the time of the scene."""

    def __init__(self, path: Path) -> None:
        self.scene = Scene(path).open()
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.written: list[Event] = []
        self.stops: list[tuple[str, bool]] = []
        self.watcher = Watcher(
            self.scene.run,
            self.child.pid,
            self.write,
            lambda why, now: self.stops.append((why, now)),
            wall=lambda: START_UNIX_S + self.scene.now_s,
            monotonic=lambda: self.scene.now_s,
        )

    def write(self, event: Event) -> None:
        self.written.append(event)
        self.scene.watch(event)

    def set(self, **changes: Any) -> None:
        values = {"student": {"config": "s"}, "loss": {"alpha": 1.0}, "watch": changes}
        self.watcher.settings = build_spec(values, check_paths=False)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.scene.now_s += 1.0
            self.watcher.tick()
            # The clock of the scene waits for py-spy, where it is installed.
            for capture in self.watcher.capturing:
                wait_until_ready(capture)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.written if isinstance(event, kind)]

    def alerts(self) -> list[Any]:
        return [event for event in self.written if is_alert(event)]

    def end(self) -> None:
        self.scene.close()
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path / "run")
    yield one
    one.end()


def training(watched: Watched) -> Watched:
    watched.scene.begin(100).events(Phase(name="training")).steps(1, 20)
    return watched


def test_a_healthy_run_is_watched_in_silence(watched: Watched) -> None:
    training(watched)
    for number in range(21, 60):
        watched.scene.steps(number, number)
        watched.pass_seconds(1)
    assert watched.written == []


def test_a_stall_is_told_once_with_the_stacks_before_it(watched: Watched) -> None:
    training(watched).pass_seconds(60)
    assert [type(event) for event in watched.written] == [StackDump, Judged]
    dump, alert = watched.written
    assert isinstance(dump, StackDump) and is_alert(alert)
    assert alert.id == "stalled" and dump.path in alert.meaning
    assert (watched.scene.run.path / dump.path).exists()
    # Thirty seconds of silence, the next look, two ticks for the stacks.
    silence_s = dict((n, v) for n, v, _ in numbers_of(alert))["seconds of silence"]
    assert silence_s <= 30 + EVALUATE_EVERY_S + 3
    watched.pass_seconds(300)
    assert len(watched.written) == 2


def test_a_stall_is_over_with_the_next_step_and_a_second_one_is_another(watched: Watched) -> None:
    training(watched).pass_seconds(60)
    watched.scene.steps(21, 21)
    watched.pass_seconds(10)
    assert is_alert_end(watched.written[-1])
    watched.pass_seconds(60)
    raised = [is_alert(event) for event in watched.written if isinstance(event, Judged)]
    assert raised == [True, False, True]
    assert len({event.path for event in watched.of(StackDump)}) == 2
    assert watched.stops == []


def test_a_limit_that_was_set_is_kept(watched: Watched) -> None:
    watched.set(stall_seconds=5)
    training(watched).pass_seconds(14)
    assert "stalled" in {event.id for event in watched.alerts()}


STILL = HostSample(family_cpu_pct=0.0, family_io_bytes_per_s=0.0)
AT_WORK = HostSample(family_cpu_pct=100.0, family_io_bytes_per_s=0.0)


def silent(watched: Watched, sample: HostSample, seconds: int, phase: str = "compiling") -> None:
    """A phase that may take ten minutes."""
    watched.scene.events(Phase(name=phase))
    for _ in range(seconds):
        watched.scene.device(sample)
        watched.pass_seconds(1)


def test_a_silence_at_work_is_a_note_with_the_line_and_no_alert(watched: Watched) -> None:
    silent(watched, AT_WORK, 300)
    dump, note = watched.written
    assert isinstance(dump, StackDump) and isinstance(note, Note) and note.level == "info"
    assert "in compiling" in note.text and dump.summary in note.text and dump.path in note.text
    assert "stalled after 10m00s" in note.text
    assert "for 5" in note.text.partition(" in ")[0], "within a minute"
    # A second phase is another silence; the same again is not told twice.
    silent(watched, AT_WORK, 100, "loading the teacher")
    silent(watched, AT_WORK, 100)
    assert [type(event) for event in watched.written] == [StackDump, Note] * 2


def test_a_silence_in_which_nobody_works_is_an_alert_within_a_minute(watched: Watched) -> None:
    silent(watched, STILL, 59)
    assert [type(event) for event in watched.written] == [StackDump, Judged]
    alert = watched.alerts()[0]
    assert alert.id == "stalled_at_start" and watched.of(StackDump)[0].path in alert.meaning
    silent(watched, AT_WORK, 5)
    assert is_alert_end(watched.written[-1])


def test_stacks_of_a_quiet_run_that_cannot_be_taken_leave_no_note_for_the_next(
    watched: Watched,
) -> None:
    (watched.scene.run.path / "stacks").write_text("a file in the way")
    silent(watched, AT_WORK, 100)
    (watched.scene.run.path / "stacks").unlink()
    training(watched).pass_seconds(60)
    assert [type(event) for event in watched.written] == [Note, StackDump, Judged]
    assert "no stacks were taken" in watched.of(Note)[0].text


def test_a_second_stall_that_begins_between_two_looks_is_not_taken_for_the_first(
    watched: Watched,
) -> None:
    watched.set(stall_seconds=1)
    watched.scene.begin(100).events(Phase(name="tokenizing"))
    watched.pass_seconds(10)
    titles = {alert.id: alert.text for alert in watched.alerts()}
    assert "in tokenizing" in titles["stalled_at_start"]
    watched.scene.events(Phase(name="training"))
    watched.pass_seconds(20)
    stalls = [e for e in watched.written if getattr(e, "id", "") == "stalled_at_start"]
    assert [type(event) for event in stalls] == [Judged, Judged, Judged]
    assert "in training" in stalls[-1].text


def test_on_stall_stop_asks_after_the_alert_and_ends_what_does_not_answer(watched: Watched) -> None:
    watched.set(stall_seconds=5, on_stall="stop")
    training(watched).pass_seconds(14)
    assert [now for _, now in watched.stops] == [False]
    assert "watch.on_stall = stop" in watched.stops[0][0]
    watched.pass_seconds(int(STOP_GRACE_S) - 10)
    assert len(watched.stops) == 1
    watched.pass_seconds(200)
    assert [now for _, now in watched.stops] == [False, True]


def test_an_idle_gpu_has_the_stacks_taken(watched: Watched) -> None:
    scene = training(watched).scene
    scene.events(msgspec.structs.replace(started("scene", 100), device="cuda"))
    scene.events(Phase(name="training"))
    for number in range(21, 70):
        scene.device(GpuSample(index=0, gpu_util_pct=0.0))
        scene.steps(number, number)
        watched.pass_seconds(1)
    assert [event.id for event in watched.alerts()] == ["gpu_idle"]
    assert len(watched.of(StackDump)) == 1


def test_a_log_that_cannot_be_read_is_one_note_and_no_error(watched: Watched) -> None:
    training(watched).pass_seconds(2)
    lines = watched.scene.run.events.read_bytes()
    watched.scene.run.events.write_bytes(lines[: len(lines) // 2])
    watched.pass_seconds(100)
    (note,) = watched.written
    assert isinstance(note, Note) and "watched no further" in note.text


def test_a_rule_that_fails_is_one_note_and_the_others_go_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case) -> Symptom | None:
        raise RuntimeError("planted")

    about = About(by="alert", id="broken", question="?")
    bad = Rule(about=about, reads=("x",), threshold="x", judge=broken)
    watched.watcher.alerts = ActiveAlerts((bad, *RULES))
    training(watched).pass_seconds(60)
    kinds = [type(event) for event in watched.written]
    assert kinds == [Note, StackDump, Judged]
    assert "planted" in watched.of(Note)[0].text


def test_stacks_that_cannot_be_kept_are_a_note_and_the_alert_comes(watched: Watched) -> None:
    (watched.scene.run.path / "stacks").write_text("a file in the way")
    training(watched).pass_seconds(60)
    assert [type(event) for event in watched.written] == [Note, Judged]
    assert "no stacks were taken" in watched.of(Note)[0].text


# A long run.


def test_the_middle_of_a_long_run_is_not_kept_and_the_rules_say_the_same() -> None:
    count = 2 * (2 * HEAD_ROWS + TAIL_ROWS) + 10
    events = numbered([opened(1.0), *(healthy_step(n) for n in range(1, count + 1))])
    view = fold_events(RunView(), "events", events)
    small = trimmed(view)
    assert len(small.steps) == 2 * HEAD_ROWS + TAIL_ROWS
    numbers = small.steps.values("step")
    assert numbers == sorted(numbers, key=lambda n: n or 0) and len(set(numbers)) == len(numbers)
    assert numbers[:HEAD_ROWS] == [float(n) for n in range(1, HEAD_ROWS + 1)]
    assert small.last_step == view.last_step == count
    for name in small.steps.columns:
        assert small.steps.values(name)[-TAIL_ROWS:] == view.steps.values(name)[-TAIL_ROWS:]
    more = fold_events(small, "events", [healthy_step(count + 1)])
    assert more.last_step == count + 1
    assert trimmed(more) is more


@pytest.mark.parametrize("begin", [0, 100, HEAD_ROWS, 5000, 9000])
def test_the_beginning_of_the_session_is_kept_wherever_it_lies(begin: int) -> None:
    count = 2 * (2 * HEAD_ROWS + TAIL_ROWS)
    events = numbered([opened(1.0), *(healthy_step(n) for n in range(1, count + 1))])
    view = dataclasses.replace(fold_events(RunView(), "events", events), session_row=begin)
    small = trimmed(view)
    assert small.steps.value("step", small.session_row) == begin + 1
    numbers = [n or 0.0 for n in small.steps.values("step")]
    assert numbers == sorted(set(numbers)) and numbers[-1] == count


def test_readings_of_a_week_are_not_kept() -> None:
    device = [opened(1.0)]
    for _ in range(2 * TAIL_ROWS):
        device += [HostSample(load1=1.0), GpuSample(index=0, gpu_util_pct=1.0)]  # type: ignore[list-item]
    small = trimmed(fold_events(RunView(), "device", numbered(device)))
    assert len(small.hosts) == len(small.gpu_tables[0]) == TAIL_ROWS


# Folding so many steps takes five seconds; the budget of opening and following long runs is a soak test too.
@pytest.mark.soak
@pytest.mark.perf
def test_watching_a_run_of_100_000_steps_costs_little(watched: Watched) -> None:
    scene = watched.scene.begin(200_000).events(Phase(name="training"))
    for number in range(1, 100_001):
        scene.now_s += 0.01
        scene.writers["events"].write(healthy_step(number))
    while watched.watcher.view.last_step < 100_000:
        watched.watcher.tick()
    costs_s = []
    for number in range(100_001, 100_101):
        scene.steps(number, number)
        scene.now_s += 1.0
        begun = time.process_time()
        watched.watcher.tick()
        costs_s.append(time.process_time() - begun)
    # A tick reads three files; every fifth one asks all rules. 0.5 % of a second is 5 ms.
    within(sum(sorted(costs_s)[:90]) / 90, 0.005)


def test_what_the_last_lines_of_a_run_show_is_an_alert_too(watched: Watched) -> None:
    watched.set()
    watched.scene.events(started("scene", 10)).steps(1, 6)
    watched.watcher.judge_end()
    assert watched.alerts() == []
    watched.scene.events(
        number_event(step=6, field="loss", value="nan"),
        RunFinished(state="stopped", reason="", exit_code=0, step=6),
    )
    watched.watcher.judge_end()
    assert "non_finite" in [alert.id for alert in watched.alerts()]
