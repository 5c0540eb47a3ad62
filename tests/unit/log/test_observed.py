"""What a run's logs say went wrong, and whether another run shows the same: yes, no, or unknown."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path

import msgspec
import pytest

from engine.errors import BadInput
from engine.log.events import AnyEvent, Judged, RunFinished, ScriptEnded, TrainerExited
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.observed import Observed, is_shown, observation, observations, raised_at, shown
from tests.support.judged import alert_event, check_event, identity_event, is_alert
from tests.support.run_folders import START_UNIX_S, Scene, started, step

CHECK = check_event(id="step_rows", level="fail", text="7 of 8 rows", cost_s=0.1, step=3)


def answered(level: str, at: int) -> Judged:
    return check_event(id="step_rows", level=level, text="r", cost_s=0.1, step=at)


ALERT = alert_event(
    id="gpu_idle",
    level="fail",
    text="the GPU does nothing",
    step=3,
    from_unix_s=START_UNIX_S,
    to_unix_s=START_UNIX_S + 5,
)
OF_LOADING, OF_TRAINING = (
    alert_event(id="stalled", level="fail", text="no step", step=3, part=part)
    for part in ("loading the teacher", "training")
)
WARNING = alert_event(id="data_wait", level="suspicion", text="waits", step=2)
WRONG = identity_event(id="weights_move", level="fail", step=2, text="another rate")


def of_update(level: str, text: str) -> Judged:
    return identity_event(id="weights_move", level=level, step=1, text=text)


def ended(state: str = "completed", returncode: int = 0) -> TrainerExited:
    return TrainerExited(
        trainer_pid=7,
        returncode=returncode,
        state=state.upper(),
        signal=None,
        cause="c",
        certainty="proved",
        sentence=f"it ended as {state}",
    )


def run_of(
    path: Path,
    *said: AnyEvent,
    steps: int = 8,
    end: TrainerExited | None = None,
    loss: float = 2.0,
) -> RunFolder:
    """A run that takes a second a step and then says `said`, and ends."""
    scene = Scene(path).open()
    scene.events(started(path.name, steps))
    for number in range(1, steps + 1):
        scene.now_s += 1.0
        scene.events(step(number, loss))
    scene.events(*[one for one in said if isinstance(one, Judged | Judged)])
    exit_ = end or ended()
    if exit_.returncode == 0:
        scene.events(RunFinished(state="stopped", reason="r", exit_code=0, step=steps))
    scene.watch(*[one for one in said if is_alert(one)], exit_)
    return scene.close().run


def test_what_proves_most_comes_first_and_each_is_one_line_of_a_log(tmp_path: Path) -> None:
    killed = ended("killed_external", -9)
    run = run_of(tmp_path / "a", WARNING, ALERT, WRONG, CHECK, end=killed)
    found = observations(run)
    names = ("check step_rows", "identity weights_move", "alert gpu_idle", "alert data_wait")
    assert [one.name for one in found] == [*names, "exit killed_external"]
    for one in found:
        raw = getattr(run, one.log).read_bytes().splitlines()[one.seq]
        assert one.sha256 == hashlib.sha256(raw).hexdigest()
        assert one.text in raw.decode()
    assert (found[2].step, found[2].window_s) == (3, 5.0)
    assert observation(run, "").name == "check step_rows"
    assert observation(run, "exit").id == "killed_external"
    with pytest.raises(BadInput, match="alert gpu_idle, alert data_wait"):
        observation(run, "alert of nothing")


def test_a_healthy_run_has_nothing_to_ask_about(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing: no check failed"):
        observation(run_of(tmp_path / "a"), "")


def asked(tmp_path: Path, said: AnyEvent, name: str = "") -> Observed:
    end = said if isinstance(said, TrainerExited) else None
    own = () if end else (said,)
    return observation(run_of(tmp_path / "seen", *own, end=end), name)


@pytest.mark.parametrize(
    ("said", "other", "steps", "expected"),
    [
        (CHECK, (CHECK,), 6, True),
        (CHECK, (answered("pass", 6),), 6, False),
        # Nobody asked, or asked too early, or could not tell.
        (CHECK, (), 6, None),
        (CHECK, (answered("pass", 0),), 6, None),
        (CHECK, (answered("unknown", 6),), 6, None),
        (WRONG, (WRONG,), 6, True),
        (WRONG, (of_update("suspicion", "another rate"),), 6, True),
        # The same identity for another reason.
        (WRONG, (of_update("fail", "other weights"),), 6, None),
        (WRONG, (of_update("pass", "t"),), 6, False),
        (WRONG, (), 6, None),
        (ALERT, (ALERT,), 6, True),
        (ALERT, (WARNING,), 6, False),
        (OF_LOADING, (OF_LOADING,), 6, True),
        # The same alert about another part.
        (OF_LOADING, (OF_TRAINING,), 6, None),
        # Too few steps, or too short for what the alert looks at.
        (ALERT, (), 9, None),
    ],
)
def test_no_is_an_answer_only_where_the_run_gives_it(
    tmp_path: Path, said: AnyEvent, other: tuple[AnyEvent, ...], steps: int, expected: bool | None
) -> None:
    one = asked(tmp_path, said)
    run = run_of(tmp_path / "other", *other)
    found, reason = shown(one, run, steps=steps)
    assert found is expected and reason
    if expected is not None:
        assert is_shown(one, Follower(run).read_all(), steps=steps) is expected


def test_weights_are_finite_where_later_losses_are(tmp_path: Path) -> None:
    """The probe answers with a pass only where a loss is not finite."""
    said = identity_event(id="finite_weights", level="fail", step=2, text="1 tensors hold NaN")
    one = asked(tmp_path, said)
    assert shown(one, run_of(tmp_path / "mended", steps=8), steps=6)[0] is False
    for loss in (math.nan, 0.0):
        run = run_of(tmp_path / f"loss {loss}", steps=8, loss=loss)
        assert shown(one, run, steps=6)[0] is None


def test_a_run_that_ended_before_the_alert_could_come_tells_nothing(tmp_path: Path) -> None:
    one = asked(tmp_path, ALERT)
    run = run_of(tmp_path / "short", steps=4)
    assert shown(one, run, steps=4)[0] is None
    assert shown(dataclasses.replace(one, window_s=0.0, rows=0), run, steps=4)[0] is False


@pytest.mark.parametrize("state", ["failed", "crashed", "oom_memcg", "usage"])
def test_a_run_that_broke_tells_nothing(tmp_path: Path, state: str) -> None:
    one = asked(tmp_path, ALERT)
    assert shown(one, run_of(tmp_path / "broken", end=ended(state, 1)), steps=6)[0] is None


def test_an_exit_is_the_same_only_with_the_same_state(tmp_path: Path) -> None:
    one = asked(tmp_path, ended("crashed", 1))
    assert one.name == "exit crashed" and one.step == 8
    for state, code, steps, expected in (
        ("crashed", 1, 8, True),
        ("crashed", 3, 8, None),
        ("failed", 1, 8, None),
        ("completed", 0, 12, False),
        # It may have been due in the next step.
        ("completed", 0, 9, None),
    ):
        run = run_of(tmp_path / f"{state}-{code}-{steps}", end=ended(state, code), steps=steps)
        assert shown(one, run, steps=12)[0] is expected


def test_a_stop_by_the_flip_is_not_the_exit_that_was_observed(tmp_path: Path) -> None:
    end = msgspec.structs.replace(ended("terminated", -15), signal="SIGTERM")
    one = asked(tmp_path, end)
    run = run_of(tmp_path / "stopped", end=end, steps=12)
    assert shown(one, run, steps=12)[0] is True
    assert shown(one, run, steps=12, is_stopped=True) == (
        False,
        "it made 12 steps in 12 s and ended as terminated",
    )


def script_run(
    path: Path,
    error: str,
    line: int,
    message: str,
    steps: int = 8,
    end: TrainerExited | None = None,
) -> RunFolder:
    """A watched script that an exception ended."""
    scene = Scene(path).open()
    scene.events(*[step(number, 2.0) for number in range(1, steps + 1)])
    where = f"{path}/train.py:{line} in main"
    scene.events(ScriptEnded(how="raised", exception=error, message=message, where=where))
    scene.watch(end or ended("failed", 1))
    return scene.close().run


def test_an_exception_counts_though_the_process_was_ended_before_it_exited(tmp_path: Path) -> None:
    one = observation(script_run(tmp_path / "seen", "ValueError", 7, "not finite"), "exit")
    for name, message, expected in (("same", "not finite", True), ("other", "no file", None)):
        end = ended("terminated", -15)
        run = script_run(tmp_path / name, "ValueError", 7, message, steps=20, end=end)
        assert shown(one, run, steps=12)[0] is expected


def test_an_exception_is_the_same_from_its_line_with_its_words_numbers_and_folders_aside(
    tmp_path: Path,
) -> None:
    own = "loss 12.5 of /data/a/x.bin is not finite"
    one = observation(script_run(tmp_path / "seen", "ValueError", 7, own), "exit")
    assert raised_at(one) == ("train.py", 7)
    for name, error, line, message, expected in (
        ("same", "ValueError", 7, "loss 3e-7 of /tmp/b/x.bin is not finite", True),
        ("words", "ValueError", 7, "no such file", None),
        ("line", "ValueError", 9, own, None),
        ("type", "ImportError", 7, own, None),
    ):
        run = script_run(tmp_path / name, error, line, message)
        assert shown(one, run, steps=12)[0] is expected, name


def test_a_run_on_half_the_rows_has_to_make_twice_the_steps(tmp_path: Path) -> None:
    one = dataclasses.replace(asked(tmp_path, ended("crashed", 1)), rows=10_000)
    for steps, expected in ((12, None), (20, None)):
        run = run_of(tmp_path / f"{steps}", steps=steps)
        found, reason = shown(one, run, steps=12)
        assert found is expected and "on 15000 rows" in reason


def test_a_run_that_nothing_watched_to_its_end_tells_nothing(tmp_path: Path) -> None:
    one = asked(tmp_path, ALERT)
    scene = Scene(tmp_path / "alone").open()
    scene.events(*[step(number, 2.0) for number in range(1, 9)])
    assert shown(one, scene.close().run, steps=6)[0] is None
