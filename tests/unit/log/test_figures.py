"""What the charts of a run show: the gap that is closed, and shares over time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.log.events import GpuSample, HostSample
from engine.log.figures import (
    Curve,
    figures_of,
    gap_closed,
    gap_text,
    held_out,
    lanes_of,
    references,
)
from engine.log.fold import Follower
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


def lane(readings: list[tuple[float, float | None]], full: float = 100.0) -> Curve:
    table = Table(("unix_s", "gpu_util_pct"))
    rows = [{"unix_s": at, "gpu_util_pct": value} for at, value in readings]
    return Curve(
        name="GPU", of="GPU 0", table=table.extended(rows), column="gpu_util_pct", full=full / 100
    )


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


GIB = 2.0**30


def memory_of(view: RunView) -> dict[str, float]:
    """The newest value of each line of the memory chart, in GiB."""
    (figure,) = (one for one in figures_of(view) if one.id == "memory")
    newest = {curve.name: (curve, curve.table.last(curve.column)) for curve in figure.curves}
    return {name: c.drawn(y) / GIB for name, (c, y) in newest.items() if y is not None}


def host(**fields: float) -> HostSample:
    return HostSample(
        host_total_bytes=100 * GIB,
        host_available_bytes=70 * GIB,
        trainer_rss_bytes=5 * GIB,
        **fields,
    )


def gpu_memory(index: int, used: float, own: float | None = None) -> GpuSample:
    return GpuSample(
        index=index,
        gpu_mem_used_bytes=used * GIB,
        gpu_mem_total_bytes=80 * GIB,
        family_gpu_mem_bytes=None if own is None else own * GIB,
    )


def test_the_trainers_own_memory_stands_beside_that_of_the_whole_machine(tmp_path: Path) -> None:
    view = Follower(Scene(tmp_path / "run").open().device(host()).run).read_all()
    assert memory_of(view) == {"machine": 30.0, "own RSS": 5.0}
    found = {one.name: one.newest for one in lanes_of(view)}
    assert found == {"mem": pytest.approx(0.3), "own": pytest.approx(0.05)}
    (lane,) = (one for one in lanes_of(view) if one.name == "mem")
    at = view.hosts.last("unix_s")
    assert at is not None and lane.at(at) == pytest.approx(0.3)


def test_of_one_gpu_the_allocator_says_what_the_trainer_holds(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open()
    scene.device(host(memory_reserved_bytes=24 * GIB), gpu_memory(0, 60.0))
    view = Follower(scene.run).read_all()
    expected = {"GPU 0": 60.0, "own of GPU 0": 24.0, "machine": 30.0, "own RSS": 5.0}
    assert memory_of(view) == expected
    assert {one.name: one.newest for one in lanes_of(view)} == {"mem": 0.75, "own": 0.3}
    # Both stand in the chart of that GPU, though the tables differ.
    shares = [[c.name for c in f.curves] for f in figures_of(view) if f.id == "GPU 0"]
    assert shares == [["mem", "own"]] and not [f for f in figures_of(view) if f.id == "CPU"]


def test_of_several_gpus_the_driver_says_what_a_process_holds_and_the_allocator_does_not(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path / "run").open()
    scene.device(host(memory_reserved_bytes=24 * GIB), gpu_memory(0, 60.0), gpu_memory(1, 40.0))
    assert not [name for name in memory_of(Follower(scene.run).read_all()) if "of GPU" in name]
    scene.device(gpu_memory(1, 40.0, own=8.0))
    view = Follower(scene.run).read_all()
    assert memory_of(view)["own of GPU 1"] == 8.0 and "own of GPU 0" not in memory_of(view)
    assert {one.name for one in lanes_of(view)} == {"mem0", "mem1", "own1"}


def test_memory_that_was_not_read_is_not_drawn(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open().device(HostSample(host_available_bytes=70 * GIB))
    view = Follower(scene.run).read_all()
    assert memory_of(view) == {} and lanes_of(view) == []


def test_what_the_trainer_held_stays_when_it_has_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open()
    scene.device(host(memory_reserved_bytes=24 * GIB), gpu_memory(0, 60.0))
    scene.device(HostSample(host_total_bytes=100 * GIB), gpu_memory(0, 2.0))
    view = Follower(scene.run).read_all()
    assert [one.name for one in lanes_of(view)] == ["mem", "own"]
