"""A run in words: one line where one line is promised, and no number that nobody measured."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decision import Decision
from engine.log.events import (
    TRAINING,
    AnyEvent,
    CheckpointSaved,
    DataReady,
    DecisionMade,
    Evaluated,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    LogOpened,
    MemoryMeasured,
    Note,
    Phase,
    RunStarted,
    StepDone,
    StopRequested,
    StudentSaved,
    Unrecognised,
)
from engine.log.read import Liveness
from engine.log.text import (
    alert_lines,
    clock_text,
    data_lines,
    decision_lines,
    device_lines,
    event_text,
    has_ended,
    ledger_line,
    line_text,
    one_line,
    result_lines,
    sample_text,
    speed_lines,
    start_line,
    status_text,
    step_text,
)
from engine.log.view import RunView, Source
from tests.support.judged import alert_event
from tests.support.run_events import (
    KINDS,
    events_of,
    example_of,
    exited,
    finished,
    fold_events,
    numbered,
    opened,
    started,
    step,
)

ALIVE = Liveness(trainer=True, supervisor=True)
DEAD = Liveness(trainer=False, supervisor=False)
UNWATCHED = Liveness(trainer=True, supervisor=False)


def view_of(*events: Event, source: Source = "events") -> RunView:
    return fold_events(RunView(), source, numbered(events))


# One line per event.


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_an_event_is_one_line_whatever_is_in_it(kind: type[Any], data: st.DataObject) -> None:
    text = event_text(data.draw(events_of(kind)))
    assert text.isprintable()


@given(text=st.text())
def test_one_line_is_printable_and_leaves_printable_text_alone(text: str) -> None:
    assert one_line(text).isprintable()
    assert one_line("plain  é — text") == "plain  é — text"


def test_a_message_of_many_lines_reads_as_one_and_cannot_drive_the_terminal() -> None:
    note = Note(level="error", text="it broke\r\n  hint: mend it\n\x1b[2Jgone\ttab \udcff")
    assert event_text(note) == "error: it broke hint: mend it \\x1b[2Jgone tab \\udcff"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (opened(1.0, writer="trainer", pid=7), "trainer (pid 7) opened its log"),
        (
            opened(1.0, writer="trainer", pid=7, torn_bytes_dropped=12),
            "trainer (pid 7) opened its log, 12 bytes of an unfinished line dropped",
        ),
        (Phase(name="train"), "train"),
        (Phase(name="load", detail="teacher"), "load: teacher"),
        (
            Evaluated(step=3, subject="student", loss=None, labelled=9, eval_s=None),
            "held-out loss of the student at step 3: not measured (9 tokens, not measured)",
        ),
        (
            Evaluated(step=3, subject="teacher", loss=math.nan, labelled=9, eval_s=1.25),
            "held-out loss of the teacher at step 3: NaN nats/token (9 tokens, 1.2 s)",
        ),
        (
            CheckpointSaved(
                step=3, path="c/3", size_bytes=1536, save_s=None, manifest_sha256="a", best=True
            ),
            "checkpoint c/3: 1.5 KiB in not measured, best so far",
        ),
        (exited("KILLED"), "trainer exited: it was KILLED"),
        (
            finished("failed", "no room\nhint: make some"),
            "failed at step 1: no room hint: make some (exit 0)",
        ),
        (
            Unrecognised(kind="dream", fields={"depth": 2}),
            "dream (written by another version): {'depth': 2}",
        ),
    ],
)
def test_an_event_reads_as(event: AnyEvent, text: str) -> None:
    assert event_text(event) == text


def test_a_run_that_starts_says_from_where_and_with_what() -> None:
    text = event_text(example_of(RunStarted, resumed_from=0, peak_lr=math.inf))
    assert "resumed from step 0" in text and "peak lr +inf" in text
    assert "resumed" not in event_text(started())


FULL = "step 7  loss 2.0000  ce 2.5000  kd 1.5000  agree 25.0%  lr 1.00e-03  |g| 1.000  500 ms"


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({}, {}),
        ({"lr": None}, {"lr 1.00e-03": "lr not measured"}),
        ({"kd": None, "agreement": None}, {"  kd 1.5000  agree 25.0%": ""}),
        ({"loss": math.nan, "agreement": math.nan}, {"2.0000": "NaN", "25.0%": "NaN"}),
        ({"lr": math.inf, "grad_norm": -math.inf}, {"1.00e-03": "+inf", "1.000": "-inf"}),
        ({"grad_norm": None}, {"|g| 1.000": "|g| not measured"}),
        ({"step_s": None}, {"500 ms": "time not measured"}),
        ({"kd": 3e-6}, {"1.5000": "3.000e-06"}),
    ],
)
def test_a_step_shows_every_number_that_is_known(
    changes: dict[str, Any], reads: dict[str, str]
) -> None:
    expected = FULL
    for usual, now in reads.items():
        expected = expected.replace(usual, now)
    assert step_text(step(7, **changes)) == expected


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_step_never_shows_zero_for_what_is_missing(data: st.DataObject) -> None:
    names = ("loss", "ce", "kd", "agreement", "lr", "grad_norm", "step_s")
    missing = data.draw(st.sets(st.sampled_from(names)))
    text = step_text(step(7, **dict.fromkeys(missing)))
    assert not re.search(r"(?<![\d.])0(\.0+)?(?![\d.])", text)
    assert text.count("not measured") == len(missing - {"ce", "kd", "agreement"})


def test_a_sample_shows_what_was_read_and_nothing_else() -> None:
    assert sample_text(HostSample(absent={"load1": "gone"})) == "host: not measured"
    sample = GpuSample(
        index=2,
        gpu_util_pct=0.0,
        gpu_mem_used_bytes=1536.0,
        gpu_power_w=math.nan,
        clock_event_reasons="sw_power_cap",
    )
    assert sample_text(sample) == (
        "gpu 2: gpu_util_pct=0, gpu_mem_used=1.5 KiB, gpu_power_w=NaN, "
        "clock_event_reasons=sw_power_cap"
    )


def test_a_log_line_has_its_time() -> None:
    (line,) = view_of(opened(1.7e9, writer="w", pid=3)).lines
    assert line_text(line) == f"{clock_text(1.7e9)} w (pid 3) opened its log"
    assert re.fullmatch(r"\d\d:\d\d:\d\d", clock_text(line.unix_s))


# Decisions.


@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize("reason", ["it fits", "set by the user"])
@pytest.mark.parametrize("rejected", [(), (("none", "a teacher is given"), ("x", "y"))])
def test_a_logged_decision_reads_as_the_decision_did(
    overridden: bool, reason: str, rejected: tuple[tuple[str, str], ...]
) -> None:
    decision = Decision(
        knob="a.b", choice="c", reason=reason, rejected=rejected, overridden=overridden
    )
    logged = DecisionMade(
        knob="a.b",
        choice="c",
        reason=reason,
        rejected=list(rejected),
        override=decision.override,
        overridden=overridden,
    )
    assert decision_lines(logged) == decision.lines()
    choice, why, *_ = (line.strip() for line in decision.lines())
    assert event_text(logged) == f"{choice}, {why}"


def test_a_logged_decision_keeps_the_override_it_was_logged_with() -> None:
    logged = DecisionMade(knob="a.b", choice="c", reason="two\nlines", override="--other")
    assert decision_lines(logged) == ["a.b: c", "  because two lines", "  override: --other"]


# Status.

BEGUN = [opened(100.0), started(10)]
STUDENT = Evaluated(step=1, subject="student", loss=1.5, labelled=9, eval_s=0.1)


@pytest.mark.parametrize(
    ("events", "alive", "text"),
    [
        ([], DEAD, "NOT STARTED"),
        ([], ALIVE, "STARTING"),
        ([opened(1.0), Phase(name="load", detail="teacher")], ALIVE, "STARTING | load: teacher"),
        ([*BEGUN, Phase(name="train")], ALIVE, "STARTING | step 0/10 | train"),
        ([*BEGUN, step(1)], ALIVE, "RUNNING | step 1/10 | loss 2.0000 | 2.0k tok/s"),
        (
            [*BEGUN, step(1), STUDENT, step(2)],
            ALIVE,
            "RUNNING | step 2/10 | loss 2.0000 | held-out 1.5000 | 2.0k tok/s | 16.0 s left",
        ),
        (
            [*BEGUN, step(1, loss=None, step_s=None), step(2, loss=None, step_s=None)],
            ALIVE,
            "RUNNING | step 2/10 | loss not measured | 8.0 s left",
        ),
        (
            [*BEGUN, step(1), step(2, loss=math.nan)],
            UNWATCHED,
            "RUNNING | step 2/10 | loss NaN | 2.0k tok/s | 8.0 s left | "
            "UNWATCHED: the supervisor is gone",
        ),
        (
            [*BEGUN, step(1), step(2), StopRequested(reason="SIGTERM", step=2)],
            ALIVE,
            "STOPPING | step 2/10 | loss 2.0000 | 2.0k tok/s",
        ),
        (
            [*BEGUN, step(1), finished("completed")],
            ALIVE,
            "COMPLETED | step 1/10 | loss 2.0000",
        ),
        (
            [*BEGUN, step(1), finished("stopped", "SIGTERM")],
            DEAD,
            "STOPPED | step 1/10 | loss 2.0000",
        ),
        (
            [*BEGUN, finished("failed", "bad file\nhint: mend it")],
            DEAD,
            "FAILED | step 0/10",
        ),
        (
            [*BEGUN, step(1)],
            DEAD,
            "VANISHED | step 1/10 | loss 2.0000",
        ),
    ],
)
def test_the_status_is_one_line(events: list[Event], alive: Liveness, text: str) -> None:
    assert status_text(view_of(*events), alive) == text


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        *((s, False) for s in ("not started", "starting", "running", "stopping")),
        *((s, True) for s in ("completed", "stopped", "failed", "killed", "oom_memcg", "vanished")),
    ],
)
def test_a_run_has_ended_or_not(state: str, ended: bool) -> None:
    assert has_ended(state) is ended


# Results.


def test_results_compare_the_student_with_what_it_was_and_what_it_should_be() -> None:
    assert result_lines(RunView()) == []
    view = view_of(
        opened(1.0),
        Evaluated(step=0, subject="untrained", loss=5.0, labelled=9, eval_s=1.0),
        Evaluated(step=0, subject="teacher", loss=0.0, labelled=9, eval_s=1.0),
        Evaluated(step=5, subject="student", loss=3.0, labelled=9, eval_s=1.0),
        Evaluated(step=9, subject="student", loss=2.0, labelled=9, eval_s=1.0),
        StudentSaved(path="run/student", size_bytes=9, sha256="ab"),
    )
    assert result_lines(view) == [
        "held-out loss of the student before training: 5.0000 nats/token, perplexity 148.41",
        "held-out loss of the student at step 9: 2.0000 nats/token, perplexity 7.39",
        "held-out loss of the teacher: 0.0000 nats/token, perplexity 1.00",
        "student saved in run/student",
    ]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (None, "not measured"),
        (math.nan, "NaN nats/token"),
        (math.inf, "+inf nats/token"),
        (800.0, "800.0000 nats/token"),
        (12.0, "12.0000 nats/token, perplexity 1.628e+05"),
    ],
)
def test_a_perplexity_is_shown_only_where_there_is_one(loss: float | None, text: str) -> None:
    view = view_of(
        opened(1.0), Evaluated(step=1, subject="student", loss=loss, labelled=9, eval_s=1.0)
    )
    assert result_lines(view) == [f"held-out loss of the student at step 1: {text}"]


# Devices.


def test_without_a_reading_the_device_pane_says_so() -> None:
    assert device_lines(RunView()) == ["no reading yet"]


def test_without_a_gpu_the_reason_is_given() -> None:
    facts = view_of(opened(1.0), FactsRead(facts={"a": 1}), source="device")
    assert device_lines(facts) == ["GPU    not measured"]
    facts = view_of(opened(1.0), FactsRead(facts={"nvml_absent": "no driver"}), source="device")
    assert device_lines(facts) == ["GPU    no driver"]


def test_readings_are_shown_with_their_units() -> None:
    view = view_of(
        opened(1.0),
        HostSample(
            host_available_bytes=1536.0,
            host_total_bytes=2048.0,
            load1=0.25,
            trainer_rss_bytes=0.0,
            trainer_cpu_pct=101.4,
        ),
        GpuSample(
            index=1,
            gpu_util_pct=0.0,
            gpu_mem_used_bytes=1024.0**3,
            gpu_mem_total_bytes=80 * 1024.0**3,
            gpu_power_w=71.6,
            gpu_temperature_c=40.0,
            sm_clock_mhz=1980.0,
        ),
        source="device",
    )
    assert device_lines(view)[-2:] == [
        "host   available 1.5 KiB / 2.0 KiB  load 0.2",
        "       trainer rss 0 B  cpu 101%",
    ]


def test_a_missing_reading_is_a_reason_or_not_measured_and_never_zero() -> None:
    view = view_of(
        opened(1.0),
        HostSample(absent={"load1": "no /proc", "trainer_rss_bytes": "no trainer\nis running"}),
        GpuSample(index=0, absent={"gpu_power_w": "Not Supported"}),
        GpuSample(index=4),
        source="device",
    )
    assert device_lines(view)[-2:] == [
        "host   available not measured / not measured  load no /proc",
        "       trainer rss no trainer is running  cpu not measured",
    ]


def test_every_kind_has_words_of_its_own() -> None:
    """An event that fell through would read `None`."""
    texts = {kind: event_text(example_of(kind)) for kind in KINDS}
    assert len(set(texts.values())) == len(KINDS)
    assert "None" not in " ".join(texts.values())
    assert texts[StepDone].startswith("step 1 ") and "opened" in texts[LogOpened]


# Alerts.

ALERT = alert_event(
    id="gpu_idle",
    level="fail",
    text="GPU 0 was 0.3 % busy",
    numbers=[("gpu_util_pct, mean", 0.3, "at most 5 is idle"), ("x", math.nan, "y\nz")],
    first_step=3,
    step=9,
    from_unix_s=1.7e9,
    to_unix_s=1.7e9 + 30,
    meaning="the work is not on the GPU",
    flip="--set teacher.backend=dequantized",
)


def test_an_alert_reads_with_its_numbers_its_window_and_its_flip() -> None:
    begin, end = clock_text(1.7e9), clock_text(1.7e9 + 30)
    assert alert_lines(ALERT) == [
        "error: gpu_idle: GPU 0 was 0.3 % busy",
        "  gpu_util_pct, mean 0.3 (at most 5 is idle)",
        "  x NaN (y z)",
        f"  seen in steps 3 to 9, {begin} to {end}",
        "  means: the work is not on the GPU",
        "  test it: --set teacher.backend=dequantized",
    ]
    assert event_text(ALERT) == "ALERT gpu_idle: GPU 0 was 0.3 % busy"


def test_the_memory_of_the_job_stands_beside_that_of_all_processes_and_of_the_pool() -> None:
    peak = MemoryMeasured(
        step=9, measured_bytes=3 * 1024.0**3, predicted_bytes=0.0, source="torch's allocator"
    )
    view = view_of(opened(1.0), peak)
    facts = FactsRead(facts={"cuda0_integrated": "yes"})
    host = HostSample(host_available_bytes=1024.0**3, host_total_bytes=2 * 1024.0**3)
    view = fold_events(view, "device", numbered([opened(1.0), facts, host, GpuSample(index=0)]))
    words = "\n".join(device_lines(view))
    assert "job 3.0 GiB at its peak by step 9 (torch's allocator)" in words
    assert "available 1.0 GiB / 2.0 GiB (host pool, shared with the GPU)" in words


def test_the_ledger_names_phases_longest_first_and_is_empty_where_nobody_measured() -> None:
    assert ledger_line(RunView()) == ""
    phases = {"data": 0.0, "teacher": 0.155, "student": 0.021, "backward": 0.044}
    line = ledger_line(RunView(recent_steps=(StepDone(step=1, phases=phases),)))
    assert line.startswith("step   220 ms: teacher 155 ms (70%), backward 44 ms (20%), student")
    assert "data" not in line
    assert speed_lines(RunView(recent_steps=(StepDone(step=1, phases=phases),))) == [line]
    assert speed_lines(RunView()) == []


def test_the_start_is_told_by_its_phases_but_for_the_smallest() -> None:
    assert start_line(RunView()) == ""
    names = (("loading", 1.0), ("looking", 10.99), (TRAINING, 11.0))
    events: list[Any] = [opened(0.0), *(Phase(name=name) for name, _ in names), step(1)]
    at = [0.0, *(t_s for _, t_s in names), 16.0]
    timed = [
        msgspec.structs.replace(event, seq=seq, t_s=t_s)
        for seq, (event, t_s) in enumerate(zip(events, at, strict=True))
    ]
    line = start_line(fold_events(RunView(), "events", timed))
    assert (
        line
        == "start  16.0 s: loading 10.0 s (62%), the first step 5.0 s (31%), setting up 1.0 s (6%)"
    )


def test_what_a_run_trains_on_is_told_with_what_was_left_out() -> None:
    assert data_lines(RunView()) == []
    plain = example_of(DataReady, train_tokens=90, epoch_rows=3)
    lines = data_lines(RunView(data=plain))
    assert not [line for line in lines if line.split()[0] in ("labels", "padding", "left")]
    chats = example_of(
        DataReady,
        train_tokens=90,
        labelled_tokens=30,
        padding=10,
        unlabelled_rows=2,
        left_out={"no assistant turn": 4},
        partly_labelled=6,
        remarks={"the template does not write the tools": 3},
    )
    copied = msgspec.structs.replace(
        plain, skipped_files=12, copies=9, copies_named=["a.py", "b.py"], repeated=3
    )
    told = "\n".join(data_lines(RunView(data=copied)))
    assert "copies     9 of the skipped files copy held-out text: a.py, b.py, ...\n" in told
    assert "repeated   3 training documents repeat an earlier one" in told
    assert "copies" not in "\n".join(
        lines
    ) and "skipped 12 files; copies 9 of the skipped" in event_text(copied)
    words = "\n".join(data_lines(RunView(data=chats)))
    assert "30 tokens, 33.3%, are predicted" in words and "10.0% of the positions" in words
    assert "2 rows have no label" in words and "left out   4: no assistant turn" in words
    assert "6 conversations have a turn without labels" in words
    assert "in 3: the template does not write the tools" in words
    assert "in 3: the template does not write the tools" in event_text(chats)
