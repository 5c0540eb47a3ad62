"""What the charts of a run show: the gap that is closed, and shares over time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.log.figures import Lane, gap_closed, gap_text, held_out, lanes_of, references
from engine.log.follow import Follower
from engine.log.table import Table
from engine.log.view import RunView
from tests.support.run_folders import Scene, evaluated, gpu, step


def view_of(path: Path, *evaluations: tuple[int, str, float]) -> RunView:
    scene = Scene(path).open()
    for number, subject, loss in evaluations:
        scene.events(evaluated(number, subject, loss))
    return Follower(scene.run).read_all()


def test_the_gap_is_the_way_from_the_start_to_the_teacher_on_the_same_text(tmp_path: Path) -> None:
    begun = (0, "teacher", 2.0), (0, "untrained", 6.0)
    view = view_of(tmp_path / "run", *begun, (10, "student", 5.0), (20, "student", 3.0))
    assert held_out(view) == [(0.0, 6.0), (10.0, 5.0), (20.0, 3.0)]
    assert references(view) == {"teacher": 2.0, "start": 6.0}
    assert gap_closed(view) == 0.75 and gap_text(view) == "gap closed: 75%"


@pytest.mark.parametrize(
    "evaluations",
    [
        [],
        [(0, "teacher", 2.0), (0, "untrained", 6.0)],
        [(0, "untrained", 6.0), (10, "student", 5.0)],
        [(0, "teacher", 6.0), (0, "untrained", 6.0), (10, "student", 5.0)],
        [(0, "teacher", math.nan), (0, "untrained", 6.0), (10, "student", 5.0)],
    ],
    ids=["nothing", "no evaluation", "no teacher", "teacher no better", "teacher not finite"],
)
def test_a_gap_that_is_not_known_is_not_said(
    evaluations: list[tuple[int, str, float]], tmp_path: Path
) -> None:
    view = view_of(tmp_path / "run", *evaluations)
    assert gap_closed(view) is None and gap_text(view) == ""


def test_a_student_that_got_worse_is_said_to_have(tmp_path: Path) -> None:
    begun = (0, "teacher", 2.0), (0, "untrained", 6.0)
    view = view_of(tmp_path / "run", *begun, (10, "student", 8.0))
    assert gap_text(view) == "worse than at the start: -50%"


def lane(readings: list[tuple[float, float | None]], full: float = 100.0) -> Lane:
    table = Table(("unix_s", "gpu_util_pct"))
    rows = [{"unix_s": at, "gpu_util_pct": value} for at, value in readings]
    return Lane(name="GPU", table=table.extended(rows), column="gpu_util_pct", full=full)


def test_a_share_is_the_mean_of_the_readings_in_its_cell() -> None:
    found = lane([(0.0, 10.0), (1.0, 30.0), (2.0, 50.0), (3.0, 100.0)]).shares([0.0, 2.0, 4.0])
    assert found == [0.2, 0.75]


def test_a_reading_is_held_for_a_while_and_then_nothing_is_known() -> None:
    readings = [(float(n), 50.0) for n in range(5)]
    found = lane(readings).shares([-2.0, -1.0, 4.0, 4.5, 5.5, 6.5, 30.0, 31.0])
    assert found == [None, 0.5, 0.5, 0.5, 0.5, None, None]


def test_absent_readings_are_not_zero() -> None:
    assert lane([(0.0, None), (1.0, None)]).shares([0.0, 1.0, 2.0]) == [None, None]
    assert lane([(0.0, 80.0), (1.0, None), (2.0, 40.0)]).at(2.0) == 0.4


def test_each_gpu_has_lanes_and_what_was_not_read_has_none(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open()
    scene.device(gpu(97.0))
    scene.events(step(1, 2.0))
    view = Follower(scene.run).read_all()
    names = [one.name for one in lanes_of(view)]
    assert names[0] == "GPU" and "TC" not in names
    assert lanes_of(view)[0].newest == pytest.approx(0.97)
