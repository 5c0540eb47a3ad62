"""Folding the logs of a run: the same lines give the same view, and nothing unknown becomes a
number."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.log.events import (
    TRAINING,
    AnyEvent,
    CheckpointSaved,
    DecisionMade,
    Evaluated,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    Judged,
    LauncherGone,
    ModelReady,
    Note,
    Phase,
    RunStarted,
    StepDone,
    StopRequested,
    StudentSaved,
    TrainerStarted,
    Unrecognised,
)
from engine.log.fold import LOG_LINES_KEPT, Follower
from engine.log.folder import create_run
from engine.log.read import Liveness
from engine.log.table import STEP_FIELDS, Table
from engine.log.view import (
    FIRST_STEP,
    IMPORTS,
    SOURCES,
    RunView,
    Source,
)
from engine.log.write import encode
from tests.support.judged import alert_end, alert_event, number_event
from tests.support.perf import ratio_within, within
from tests.support.run_events import (
    dealt,
    example_of,
    exited,
    finished,
    fold_events,
    numbered,
    opened,
    picture,
    runs,
    started,
    step,
    write_log,
)

DEAD = Liveness(trainer=False, supervisor=False)
ALIVE = Liveness(trainer=True, supervisor=True)
WATCHED = Liveness(trainer=False, supervisor=True)
UNWATCHED = Liveness(trainer=True, supervisor=False)


def view_of(*events: Event, source: Source = "events", every_s: float = 1.0) -> RunView:
    """The view of one log."""
    return fold_events(RunView(), source, numbered(events, every_s))


def fold_all(logs: dict[Source, list[AnyEvent]]) -> RunView:
    view = RunView()
    for source in SOURCES:
        view = fold_events(view, source, logs[source])
    return view


def checkpoint(number: int) -> Any:
    return example_of(CheckpointSaved, step=number)


def evaluated(number: int, subject: str = "student", loss: float | None = 1.0) -> Evaluated:
    return Evaluated(step=number, subject=subject, loss=loss, labelled=10, eval_s=0.1)


# Tables.

CELL = st.none() | st.floats()


@given(rows=st.lists(st.tuples(CELL, CELL), max_size=20), cuts=st.lists(st.integers(0, 20)))
@settings(max_examples=100, deadline=None)
def test_a_table_holds_what_was_put_in(
    rows: list[tuple[float | None, float | None]], cuts: list[int]
) -> None:
    table, edges = Table(("a", "b")), sorted({0, *(c for c in cuts if c <= len(rows)), len(rows)})
    for begin, end in pairwise(edges):
        table = table.extended({"a": a, "b": b} for a, b in rows[begin:end])
    assert repr(table.values("a")) == repr([a for a, _ in rows])
    assert repr([table.value("b", i) for i in range(len(rows))]) == repr([b for _, b in rows])
    for start in (-3, 0, 2, 50):
        for stop in (None, -1, 0, 3, 50):
            expected = [a for a, _ in rows][start:stop]
            assert repr(table.values("a", start, stop)) == repr(expected)
    assert repr(table.last("a")) == repr(rows[-1][0] if rows else None)


def test_a_snapshot_of_a_table_does_not_see_later_rows() -> None:
    one = Table(("a",)).extended([{"a": 1.0}])
    two = one.extended([{"a": 2.0}, {}])
    assert one.columns is two.columns, "snapshots share storage"
    assert (len(one), one.values("a"), one.last("a")) == (1, [1.0], 1.0)
    assert one.values("a", -1) == [1.0] and two.values("a", -1) == [None]
    with pytest.raises(IndexError, match="row 1 of 1"):
        one.value("a", 1)
    with pytest.raises(IndexError):
        one.value("a", -2)


def test_a_table_can_grow_in_two_ways() -> None:
    one = Table(("a",)).extended([{"a": 1.0}])
    left, right = one.extended([{"a": 2.0}]), one.extended([{"a": 3.0}, {"a": math.nan}])
    assert left.values("a") == [1.0, 2.0] and right.values("a")[:2] == [1.0, 3.0]
    assert one.values("a") == [1.0]
    assert len(one.cut(5)) == 1 and one.cut(5).values("a") == [1.0]
    cut = right.cut(1).extended([{}])
    assert cut.values("a") == [1.0, None] and len(right) == 3


def test_a_row_that_is_no_number_changes_nothing() -> None:
    table = Table(("a", "b")).extended([{"a": 1.0, "b": 2.0}])
    with pytest.raises(TypeError):
        table.extended([{"a": 1.0, "b": "x"}])  # type: ignore[dict-item]
    assert table.extended([{"a": 3.0}]).values("a") == [1.0, 3.0]


# The fold.


@given(data=st.data(), logs=runs())
@settings(max_examples=40, deadline=None)
def test_batches_and_turns_change_nothing(
    data: st.DataObject, logs: dict[Source, list[AnyEvent]]
) -> None:
    expected = picture(fold_all(logs))
    one_by_one, dealt_out = RunView(), RunView()
    for source in reversed(SOURCES):
        for event in logs[source]:
            one_by_one = fold_events(one_by_one, source, [event])
    for source, batch in data.draw(dealt(logs)):
        dealt_out = fold_events(dealt_out, source, batch)
    assert picture(one_by_one) == expected
    assert picture(dealt_out) == expected


@given(data=st.data(), logs=runs())
@settings(max_examples=40, deadline=None)
def test_a_view_never_changes_after_it_was_made(
    data: st.DataObject, logs: dict[Source, list[AnyEvent]]
) -> None:
    view = RunView()
    taken = [(view, picture(view))]
    for source, batch in data.draw(dealt(logs)):
        view = fold_events(view, source, batch)
        taken.append((view, picture(view)))
    for old, was in taken:
        assert picture(old) == was
    # An old view may be folded again, with the same result and without harm to the newer.
    last = picture(view)
    middle = taken[len(taken) // 2][0]
    for source in SOURCES:
        fold_events(middle, source, logs[source])
    assert picture(view) == last


@given(logs=runs())
@settings(max_examples=40, deadline=None)
def test_a_resume_drops_what_it_repeats_and_nothing_else(
    logs: dict[Source, list[AnyEvent]],
) -> None:
    """Against the plain way: walk the log, and at each start forget what came after its step."""
    kept: list[Any] = []
    for event in logs["events"]:
        if isinstance(event, RunStarted):
            kept = [e for e in kept if e.step <= (event.resumed_from or 0)]
        elif isinstance(event, StepDone | Evaluated | CheckpointSaved | Judged):
            kept.append(event)
    view = fold_all(logs)
    steps = [event for event in kept if isinstance(event, StepDone)]
    for name in STEP_FIELDS[:-3]:
        assert repr(view.steps.values(name)) == repr(
            [None if (v := getattr(e, name)) is None else float(v) for e in steps]
        )
    numbers = [event.step for event in steps]
    assert numbers == sorted(set(numbers)), "a step was counted twice"
    assert view.evals == tuple(e for e in kept if isinstance(e, Evaluated))
    assert view.checkpoints == tuple(e for e in kept if isinstance(e, CheckpointSaved))
    assert view.non_finite == tuple(e for e in kept if isinstance(e, Judged))
    notes = [e for source in SOURCES for e in logs[source] if isinstance(e, Note)]
    assert len(view.notes) == len(notes)


def test_no_events_are_no_new_view() -> None:
    view = view_of(opened(1.0))
    assert fold_events(view, "events", []) is view


def test_a_first_session_tells_its_story() -> None:
    model = example_of(ModelReady, role="teacher", parameters=7)
    view = view_of(
        opened(1000.0),
        started(10),
        DecisionMade(knob="a.b", choice="c", reason="d"),
        model,
        Phase(name="train"),
        evaluated(0, "untrained", 9.0),
        step(1),
        evaluated(1),
        checkpoint(1),
        number_event(step=1, field="kd", value="nan"),
        Note(level="info", text="n"),
        example_of(StudentSaved),
        Unrecognised(kind="dream"),  # type: ignore[arg-type]
    )
    assert (view.first_unix_s, view.last_unix_s, view.sessions) == (1000.0, 1012.0, 1)
    assert (view.total_steps, view.last_step) == (10, 1)
    assert view.phase is not None and (view.phase.name, view.phase_unix_s) == ("train", 1004.0)
    assert view.models["teacher"].parameters == 7 and len(view.decisions) == 1
    assert [e.subject for e in view.evals] == ["untrained", "student"]
    assert view.eval_of("teacher") is None and view.eval_of("untrained") is view.evals[0]
    assert len(view.checkpoints) == len(view.non_finite) == len(view.notes) == 1
    assert view.student is not None and view.steps.last("unix_s") == 1006.0
    assert len(view.lines) == 13 and view.lines[-1].unix_s == 1012.0


def test_nan_is_kept_and_absence_is_kept_apart_from_it() -> None:
    view = view_of(opened(1.0), step(1, loss=math.nan, kd=None), step(2, loss=math.inf))
    loss = view.steps.value("loss", 0)
    assert loss is not None and math.isnan(loss)
    assert view.steps.value("kd", 0) is None
    assert view.steps.last("loss") == math.inf


def test_a_run_resumed_without_a_checkpoint_starts_over() -> None:
    view = view_of(
        opened(1.0),
        started(10),
        evaluated(0, "untrained"),
        step(1),
        step(2),
        checkpoint(2),
        opened(100.0),
        started(10, resumed_from=None),
        step(1, loss=7.0),
    )
    assert view.steps.values("step") == [1.0] and view.steps.last("loss") == 7.0
    assert view.checkpoints == () and len(view.evals) == 1 and view.sessions == 2


def test_a_start_within_a_session_rewinds_the_steps_in_front_of_it() -> None:
    again = started(10, resumed_from=1)
    view = view_of(opened(1.0), started(10), step(1), step(2), again, step(2, loss=7.0))
    assert view.steps.values("step") == [1.0, 2.0] and view.steps.last("loss") == 7.0


def test_a_resume_forgets_the_student_the_stop_and_the_decisions_of_the_last_session() -> None:
    first = [
        opened(1.0),
        started(10),
        DecisionMade(knob="a.b", choice="old", reason="d"),
        *(step(n) for n in range(1, 6)),
        example_of(StudentSaved),
        StopRequested(reason="SIGTERM", step=5),
        finished("stopped"),
    ]
    view = view_of(*first, opened(50.0))
    assert view.finished is None and view.stop_requested is None and view.decisions == ()
    assert view.phase is None and len(view.steps) == 5, "steps stand until it says where it resumes"
    view = view_of(*first, opened(50.0), started(10, resumed_from=4))
    assert view.student is None and view.last_step == 4


def test_notes_of_different_logs_stand_in_the_order_of_time() -> None:
    events = numbered([opened(10.0), *(Note(level="info", text=f"t{n}") for n in range(3))], 10.0)
    watch = numbered([opened(5.0), *(Note(level="info", text=f"s{n}") for n in range(3))], 10.0)
    texts = ["s0", "t0", "s1", "t1", "s2", "t2"]
    for order in ((("events", events), ("watch", watch)), (("watch", watch), ("events", events))):
        view = RunView()
        for source, log in order:
            view = fold_events(view, source, log)  # type: ignore[arg-type]
        assert [note.text for note in view.notes] == texts


# Log lines.


def test_only_the_newest_lines_are_kept_and_readings_are_not_lines() -> None:
    many = LOG_LINES_KEPT + 123
    events = numbered([opened(0.0), *(step(n) for n in range(1, many))])
    device = numbered([opened(0.0), *(HostSample(load1=1.0) for _ in range(50))])
    at_once = fold_events(fold_events(RunView(), "events", events), "device", device)
    assert len(at_once.lines) == LOG_LINES_KEPT
    assert [line.event.seq for line in at_once.lines] == list(range(123, many))
    one_by_one = fold_events(RunView(), "device", device)
    for event in events:
        one_by_one = fold_events(one_by_one, "events", [event])
    assert one_by_one.lines == at_once.lines


def test_lines_are_in_the_order_of_time_whoever_wrote_them() -> None:
    clock_steps = [opened(100.0), step(1), step(2), opened(50.0), step(3), opened(100.0), step(4)]
    view = view_of(*clock_steps)
    times = [line.unix_s for line in view.lines]
    assert times == sorted(times) == [50.0, 51.0, 100.0, 100.0, 101.0, 101.0, 102.0]
    assert (view.first_unix_s, view.last_unix_s) == (50.0, 102.0)


# States.

STOP = StopRequested(reason="SIGTERM", step=1)
BEGUN = [opened(10.0), started(10)]
TRAINER = TrainerStarted(trainer_pid=5, supervisor_pid=4)


@pytest.mark.parametrize(
    ("events", "watch", "alive", "state"),
    [
        ([], [], DEAD, "not started"),
        ([], [], WATCHED, "starting"),
        ([], [opened(1.0)], WATCHED, "starting"),
        (BEGUN, [opened(1.0)], ALIVE, "starting"),
        ([*BEGUN, step(1)], [opened(1.0)], ALIVE, "running"),
        ([*BEGUN, step(1)], [opened(1.0)], UNWATCHED, "running"),
        ([*BEGUN, step(1)], [opened(1.0)], WATCHED, "running"),
        ([*BEGUN, step(1), STOP], [opened(1.0)], ALIVE, "stopping"),
        ([*BEGUN, STOP], [opened(1.0)], ALIVE, "stopping"),
        ([*BEGUN, step(1), finished("completed")], [opened(1.0)], ALIVE, "completed"),
        ([*BEGUN, step(1), finished("completed")], [opened(1.0)], DEAD, "completed"),
        ([*BEGUN, STOP, finished("stopped")], [opened(1.0), exited("FAILED")], DEAD, "stopped"),
        ([*BEGUN, finished("failed")], [opened(1.0)], DEAD, "failed"),
        ([*BEGUN, step(1)], [opened(1.0), exited("KILLED")], DEAD, "killed"),
        ([*BEGUN, step(1)], [opened(1.0), exited("KILLED")], WATCHED, "killed"),
        ([], [opened(1.0), exited("CRASHED")], DEAD, "crashed"),
        ([], [opened(1.0), exited("CRASHED"), TRAINER], WATCHED, "starting"),
        ([*BEGUN, step(1)], [opened(1.0)], DEAD, "vanished"),
        ([*BEGUN, STOP], [opened(1.0)], DEAD, "vanished"),
        ([], [opened(1.0)], DEAD, "vanished"),
    ],
)
def test_the_state_is_one_word(
    events: list[Event], watch: list[Event], alive: Liveness, state: str
) -> None:
    view = fold_events(fold_events(RunView(), "events", numbered(events)), "watch", numbered(watch))
    assert view.state(alive) == state
    view = fold_events(fold_events(RunView(), "watch", numbered(watch)), "events", numbered(events))
    assert view.state(alive) == state


FIRST = [*BEGUN, step(1), step(2)]
AGAIN = [opened(1000.0), started(10, resumed_from=1)]
KILLED = [opened(1.0), TRAINER, exited("KILLED")]
SECOND = opened(900.0)


@pytest.mark.parametrize(
    ("events", "watch", "alive", "state"),
    [
        # Only the new supervisor has spoken: nothing of the last session is its state.
        (FIRST, [*KILLED, SECOND], WATCHED, "starting"),
        ([*FIRST, STOP], [*KILLED, SECOND], WATCHED, "starting"),
        ([*FIRST, STOP, finished("stopped")], [*KILLED, SECOND], WATCHED, "starting"),
        ([*FIRST, finished("stopped")], [*KILLED, SECOND], DEAD, "vanished"),
        ([*FIRST, finished("stopped")], [*KILLED, SECOND, exited("CRASHED")], DEAD, "crashed"),
        # The trainer has too.
        ([*FIRST, opened(1000.0)], [*KILLED, SECOND], ALIVE, "starting"),
        ([*FIRST, *AGAIN], [*KILLED, SECOND], ALIVE, "starting"),
        ([*FIRST, *AGAIN, step(2)], [*KILLED, SECOND], ALIVE, "running"),
        ([*FIRST, STOP, finished("stopped"), *AGAIN, step(2)], [*KILLED, SECOND], ALIVE, "running"),
        ([*FIRST, *AGAIN, step(2)], [*KILLED, SECOND], DEAD, "vanished"),
        ([*FIRST, *AGAIN, finished("completed")], [*KILLED, SECOND], DEAD, "completed"),
        # Only the new trainer has: it was started by hand, or the supervisor's line is not read
        # yet.
        ([*FIRST, *AGAIN, step(2)], KILLED, ALIVE, "running"),
        ([*FIRST, *AGAIN, step(2)], KILLED, DEAD, "vanished"),
    ],
)
def test_a_resumed_run_is_not_in_the_state_in_which_it_was_left(
    events: list[Event], watch: list[Event], alive: Liveness, state: str
) -> None:
    test_the_state_is_one_word(events, watch, alive, state)


def test_a_step_of_the_wall_clock_does_not_undo_the_end_of_a_run() -> None:
    """The trainer opened its log after the supervisor, but an hour earlier by the clock."""
    events = numbered([opened(10_000.0 - 3600), started(2), step(1), finished("completed")])
    watch = numbered([opened(10_000.0), exited("COMPLETED")])
    view = fold_events(fold_events(RunView(), "events", events), "watch", watch)
    assert view.finished is not None and view.state(DEAD) == "completed"


def test_a_new_supervisor_is_not_the_one_whose_launcher_left() -> None:
    view = view_of(
        opened(1.0),
        TrainerStarted(trainer_pid=5, supervisor_pid=4),
        LauncherGone(how="hangup"),
        source="watch",
    )
    assert (view.launcher_gone, view.trainer_pid) == ("hangup", 5)
    view = fold_events(view, "watch", numbered([opened(9.0)]))
    assert view.launcher_gone is None and view.trainer_pid is None


def test_a_start_is_broken_down_by_phase_up_to_the_first_step_of_the_session() -> None:
    def begun(*names: str) -> list[Event]:
        return [Phase(name=name) for name in names]

    events = [opened(100.0), *begun("reading", "reading", "loading", TRAINING)]
    assert RunView().start_s() == {}
    # A second between lines.
    so_far = {"setting up": 1.0, "reading": 2.0, "loading": 1.0}
    assert view_of(*events).start_s() == so_far
    whole = so_far | {FIRST_STEP: 1.0}
    view = view_of(*events, step(1), *begun("evaluating", TRAINING), step(2))
    assert view.start_s() == whole
    supervised = fold_events(
        RunView(),
        "watch",
        numbered([opened(97.5), TrainerStarted(trainer_pid=1, supervisor_pid=2)], 0.5),
    )
    view = fold_events(supervised, "events", numbered([*events, step(1)]))
    assert view.start_s() == {IMPORTS: 2.0} | whole
    again = [TrainerStarted(trainer_pid=3, supervisor_pid=2)]
    view = fold_events(view, "watch", numbered([opened(199.0), *again], 0.5))
    view = fold_events(view, "events", numbered([opened(200.0), *begun("loading")]))
    assert view.start_s() == {IMPORTS: 0.5, "setting up": 1.0}, "the start of the newest session"


# Pace.


def test_pace_and_time_left_are_unknown_before_they_are_known() -> None:
    assert RunView().tokens_per_second() is None and RunView().eta_s() is None
    assert RunView().first_step_unix_s is None and RunView().last_step == 0
    view = view_of(opened(1.0), step(1))
    assert view.eta_s() is None, "how many steps there will be is not known"
    view = view_of(opened(1.0), started(10), step(1))
    assert view.eta_s() is None, "one step is no pace"
    assert view_of(opened(1.0), started(10), step(1, step_s=None)).tokens_per_second() is None


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, math.nan, math.inf])
def test_a_step_without_a_time_counts_for_nothing_in_the_pace(seconds: float | None) -> None:
    untimed = step(2, step_s=seconds, tokens=10**9)
    assert view_of(opened(1.0), untimed).tokens_per_second() is None
    assert view_of(opened(1.0), step(1), untimed, step(3)).tokens_per_second() == 2000.0


def test_pace_is_that_of_the_last_steps() -> None:
    view = view_of(opened(1.0), *(step(n, step_s=float(n)) for n in range(1, 31)))
    assert view.tokens_per_second() == pytest.approx(1000 * 20 / sum(range(11, 31)))
    assert view.tokens_per_second(window=1) == pytest.approx(1000 / 30)
    assert view.tokens_per_second(window=1000) == pytest.approx(1000 * 30 / sum(range(1, 31)))


def test_time_left_follows_the_clock_and_not_the_steps_alone() -> None:
    view = view_of(opened(0.0), started(10), step(1), evaluated(1), step(2), evaluated(2), step(3))
    # Two steps and two evaluations took four seconds: seven more steps take fourteen.
    assert view.eta_s() == pytest.approx(14.0)
    assert view.first_step_unix_s == 2.0


def test_time_left_is_zero_only_when_no_step_is_left() -> None:
    assert view_of(opened(0.0), started(2), step(1), step(2)).eta_s() == 0.0
    assert view_of(opened(0.0), started(10), step(1), step(2), every_s=0.0).eta_s() is None
    assert view_of(opened(0.0), started(10), step(1), step(1)).eta_s() is None


def test_a_resumed_run_is_judged_by_its_own_pace() -> None:
    slow = [opened(0.0), started(10), *(step(n, step_s=100.0) for n in range(1, 5))]
    again = [opened(1000.0), started(10, resumed_from=4)]
    view = view_of(*slow, *again, every_s=100.0)
    assert view.tokens_per_second() is None and view.eta_s() is None
    assert view.first_step_unix_s is None and view.last_step == 4
    events = numbered([*slow, *again], 100.0)
    for number, t_s in ((5, 200.0), (6, 201.0)):
        event = msgspec.structs.replace(step(number), seq=len(events), t_s=t_s)
        events.append(event)
    view = fold_events(RunView(), "events", events)
    assert view.eta_s() == pytest.approx(4.0) and view.first_step_unix_s == 1200.0
    assert view.tokens_per_second() == pytest.approx(2000.0)


# Readings.


def test_the_newest_sample_of_each_subject_is_kept_and_its_column_holds_all() -> None:
    view = view_of(
        opened(1.0),
        FactsRead(facts={"a": 1}),
        HostSample(load1=1.0, host_total_bytes=64.0),
        HostSample(load1=2.0),
        GpuSample(index=0, gpu_util_pct=10.0, gpu_temperature_c=50.0),
        GpuSample(index=0, gpu_util_pct=20.0),
        GpuSample(index=1, gpu_util_pct=30.0),
        source="device",
    )
    assert view.host is not None
    assert (view.host.load1, view.host.host_total_bytes) == (2.0, None)
    assert (view.gpus[0].gpu_util_pct, view.gpus[0].gpu_temperature_c) == (20.0, None)
    assert view.gpus[1].gpu_temperature_c is None
    # The columns hold what was measured at each tick and nothing else.
    assert view.gpu_tables[0].values("gpu_temperature_c") == [50.0, None]
    assert view.hosts.values("load1") == [1.0, 2.0] and view.facts == {"a": 1}


def test_a_reading_that_is_gone_has_no_value_and_keeps_its_reason_until_it_is_back() -> None:
    log: list[Event] = [
        opened(1.0),
        GpuSample(index=1, gpu_power_w=9.0),
        GpuSample(index=1, absent={"gpu_power_w": "Not Supported"}),
        GpuSample(index=1),
    ]
    view = view_of(*log, source="device")
    assert view.gpus[1].gpu_power_w is None
    assert view.absent == {"gpu1.gpu_power_w": "Not Supported"}
    view = view_of(*log, GpuSample(index=1, gpu_power_w=0.0), source="device")
    assert view.gpus[1].gpu_power_w == 0.0 and view.absent == {}


def test_the_readings_of_another_session_are_not_those_of_this_one() -> None:
    view = view_of(
        opened(1.0),
        HostSample(load1=1.0, absent={"gpu_count": "no driver"}),
        GpuSample(index=3, gpu_power_w=9.0),
        opened(100.0),
        source="device",
    )
    assert view.host is None and view.gpus == {} and view.absent == {}
    assert len(view.hosts) == 1 and len(view.gpu_tables[3]) == 1


# Speed.


@pytest.mark.perf
def test_a_log_of_200_000_steps_is_read_within_three_seconds(tmp_path: Path) -> None:
    count = 200_000
    run = create_run(tmp_path / "run", "", {})
    write_log(run.events, [opened(1.7e9), started(count)])
    line = encode(step(111111111, position=999999999), 222222222, 333.5)
    lines = (
        line.replace(b"111111111", b"%d" % n).replace(b"222222222", b"%d" % (n + 1))
        for n in range(1, count + 1)
    )
    with run.events.open("ab") as file:
        file.write(b"".join(lines))
    follower = Follower(run)
    begin = time.process_time()
    view = follower.read_all()
    took_s = time.process_time() - begin
    assert view.last_step == len(view.steps) == count
    within(took_s, 3.0)


@pytest.mark.perf
def test_many_events_of_a_rare_kind_do_not_take_quadratic_time() -> None:
    """A run that diverged names each bad number; 50,000 of them copied each time would take
    minutes."""
    bad = number_event(step=1, field="loss", value="nan")
    note = Note(level="info", text="x")

    def seconds(count: int) -> float:
        events = numbered([opened(0.0), *([bad] * count), *([note] * count)])
        begin = time.process_time()
        view = fold_events(RunView(), "events", events)
        assert len(view.non_finite) == len(view.notes) == count
        return time.process_time() - begin

    # Ten times as many take ten times as long, a hundred if each is copied.
    ratio_within(lambda: seconds(30_000) / seconds(3_000), 40, tries=5)


def test_alerts_stand_until_they_are_cleared_or_a_new_watcher_comes() -> None:
    raised = alert_event(id="gpu_idle", level="fail", text="t")
    other = alert_event(id="data_wait", level="suspicion", text="t")
    log: list[Event] = [opened(1.0), raised, other]
    view = view_of(*log, source="watch")
    assert set(view.alerts) == {"gpu_idle", "data_wait"} and view.alert_count == 2
    log.append(alert_end(id="gpu_idle", active_s=3.0))
    assert set(view_of(*log, source="watch").alerts) == {"data_wait"}
    view = view_of(*log, opened(100.0), source="watch")
    assert view.alerts == {} and view.alert_count == 0 and view.stack_dump is None


def test_the_heartbeat_is_the_newest_line_of_the_trainer_that_is_no_note() -> None:
    log: list[Event] = [opened(10.0), Phase(name="training"), step(1), Note(level="info", text="x")]
    view = view_of(*log)
    assert view.heartbeat_unix_s == 12.0
    assert view_of(*log, source="watch").heartbeat_unix_s is None
    # In one batch or in many.
    alone = fold_events(view, "events", [msgspec.structs.replace(log[3], seq=4, t_s=9.0)])  # type: ignore[list-item]
    assert alone.heartbeat_unix_s == 12.0


def test_whether_clocks_are_held_down_is_a_column() -> None:
    words = ["none", "sw_power_cap", "sw_power_cap,hw_thermal_slowdown", None]
    samples = [GpuSample(index=0, clock_event_reasons=w) for w in words]
    view = view_of(opened(1.0), *samples, source="device")
    assert view.gpu_tables[0].values("slowed") == [0.0, 0.0, 1.0, None]
