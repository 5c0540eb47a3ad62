"""Runs written for other tools, read back by these tools and by our import: every value is what it was."""

from __future__ import annotations

import csv
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.log.events import Logged, StepDone
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.table import STEP_FIELDS
from engine.log.view import RunView
from tests.support.run_folders import Scene, completed, corrupt, empty, evaluated, resumed, step
from tests.support.running import engine_here

TARGETS = {"csv": "csv", "parquet": "csv", "tensorboard": "tensorboard"}
"""Each kind of file, and what imports it."""


def read(run: RunFolder) -> RunView:
    follower = Follower(run)
    follower.read_all()
    return follower.view


def odd_run(path: Path) -> RunFolder:
    """Numbers that formats lose: NaN, infinities, the smallest, the largest, absent ones, a script's own."""
    scene = Scene(path).open().begin(9)
    odd = [math.nan, math.inf, -math.inf, 5e-324, -0.0, 1e100, 0.1 + 0.2, None]
    for number, value in enumerate(odd, 1):
        scene.now_s += 0.123456
        scene.events(step(number, value, grad_norm=value, tokens=2**53, phases={"data": 0.25}))
        scene.events(Logged(step=number, values={"acc/top 1": value, "a,b": 1.0 / number}))
    scene.events(evaluated(8, "student", 1 / 3))
    return scene.close().run


RUNS: dict[str, Callable[[Path], RunFolder]] = {
    "completed": lambda path: completed(path, nan={20}),
    "resumed": resumed,
    "odd": odd_run,
}


def as_float32(value: float | None) -> float | None:
    try:
        return None if value is None else struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, value or 0.0)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_out_and_comes_back_has_the_same_numbers(
    tmp_path: Path, name: str, kind: str
) -> None:
    run = RUNS[name](tmp_path / name)
    suffix = "" if kind == "tensorboard" else f".{kind}"
    out = tmp_path / "out" / f"back{suffix}"
    out.parent.mkdir()
    done = engine_here("export", run.path, "--to", kind, "--out", out)
    assert done.returncode == 0 and done.stdout == f"{out}\n", done.stderr
    back = engine_here("import", TARGETS[kind], out, "--out", tmp_path / "runs")
    assert back.returncode == 0, back.stderr
    before, after = read(run), read(RunFolder(Path(back.stdout.strip())))
    kept = as_float32 if kind == "tensorboard" else lambda value: value
    for field in STEP_FIELDS:
        values, found = before.steps.values(field), after.steps.values(field)
        if field in ("unix_s", "clock_s"):
            # The log has microseconds since it was opened.
            assert found == pytest.approx(values, abs=2e-6)
        elif field != "tokens_per_s":
            assert str(found) == str([kept(value) for value in values]), field
    subjects = ("student", "teacher", "untrained")
    for subject in subjects:
        mine, theirs = before.eval_of(subject), after.eval_of(subject)
        assert (mine and (mine.step, kept(mine.loss))) == (theirs and (theirs.step, theirs.loss))
    newest = {
        key: (at, kept(value)) for key, (at, value) in before.logged.items() if value is not None
    }
    assert {key: after.logged[key] for key in newest} == newest


def test_a_table_has_a_row_a_step_and_leaves_absent_cells_empty(tmp_path: Path) -> None:
    out = tmp_path / "odd.csv"
    engine_here("export", odd_run(tmp_path / "odd").path, "--to", "csv", "--out", out)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(number) for number in range(9)]
    assert [row["loss"] for row in rows[1:]] == [
        "nan",
        "inf",
        "-inf",
        "5e-324",
        "-0.0",
        "1e+100",
        "0.30000000000000004",
        "",
    ]
    assert rows[0]["held_out/teacher"] == "2.2011" and rows[8]["held_out"] == repr(1 / 3)
    assert {row["tokens"] for row in rows[1:]} == {str(2**53)} and rows[1]["phases/data"] == "0.25"


def test_parquet_tells_an_absent_number_from_nan(tmp_path: Path) -> None:
    out = tmp_path / "odd.parquet"
    engine_here("export", odd_run(tmp_path / "odd").path, "--to", "parquet", "--out", out)
    table = pyarrow.parquet.read_table(out)
    losses = table["loss"].to_pylist()
    assert losses[0] is None and losses[8] is None and math.isnan(losses[1])
    assert str(table.schema.field("tokens").type) == "int64"


def test_tensorboard_itself_reads_what_was_exported(tmp_path: Path) -> None:
    run, out = completed(tmp_path / "run"), tmp_path / "logs"
    engine_here("export", run.path, "--to", "tensorboard", "--out", out)
    events = EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    losses = events.Scalars("loss")
    view = read(run)
    assert [one.value for one in losses] == [as_float32(v) for v in view.steps.values("loss")]
    assert [one.step for one in losses] == view.steps.values("step")
    assert [one.wall_time for one in losses] == view.steps.values("unix_s")
    assert [(one.step, one.value) for one in events.Scalars("held_out")] == [
        (60, as_float32(2.629))
    ]


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.csv"
    there.write_text("mine")
    run = completed(tmp_path / "run").path
    for path, out, words in (
        (run, there, "--out names another"),
        (run, tmp_path / "no" / "folder.csv", "to write it, found No such file"),
        (empty(tmp_path / "empty").path, tmp_path / "a.csv", "a step with a number, found none"),
        (corrupt(tmp_path / "corrupt").path, tmp_path / "b.csv", "a line was lost"),
        (tmp_path / "gone", tmp_path / "c.csv", "found nothing there"),
    ):
        before = set(tmp_path.rglob("*"))
        done = engine_here("export", path, "--to", "csv", "--out", out)
        assert (done.returncode, words in done.stderr) == (65, True), done.stderr
        assert set(tmp_path.rglob("*")) == before and there.read_text() == "mine"
    for kind, module, extra in (
        ("tensorboard", "tensorboard.compat.proto.event_pb2", "import"),
        ("parquet", "pyarrow.parquet", "data"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        done = engine_here("export", run, "--to", kind, "--out", tmp_path / kind)
        assert done.returncode == 65 and f"apr-workbench[{extra}]" in done.stderr


def test_every_number_of_a_step_has_a_name(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "run").open()
    fields = {"losses": [1.0, None], "host": {"launch": 0.5}, "lowest_kl": 0.25, "total_steps": 9}
    scene.events(StepDone(step=1, loss=1.0, rows_digest="ab", **fields))  # type: ignore[arg-type]
    scene.close()
    out = tmp_path / "run.csv"
    engine_here("export", scene.run.path, "--to", "csv", "--out", out)
    assert (
        out.read_text().splitlines()[0]
        == "step,unix_s,loss,lowest_kl,losses/0,host/launch,total_steps"
    )
