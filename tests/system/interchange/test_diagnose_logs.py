"""`engine diagnose` of what other tools have logged: what is read of each kind of log, and what is said of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.interchange.importing import import_run
from engine.interchange.kinds import find_logs
from engine.interchange.names import our_names
from engine.interchange.sources import Recorded
from tests.support.foreign_logs import BEGAN_S, KINDS, Point, nanogpt, plain, transformers_text
from tests.support.running import engine_here


def falling(count: int = 300) -> list[Point]:
    return [
        Point(
            step=step,
            loss=round(1.5 + 3 * math.exp(-step / 60) + 0.03 * math.sin(7 * step), 3),
            held_out=round(1.6 + 3 * math.exp(-step / 60), 3) if step % 50 == 0 else None,
            unix_s=BEGAN_S + 0.5 * step,
        )
        for step in range(1, count + 1)
    ]


def diagnosed(path: Path | str, *options: str, **more: Any) -> tuple[int, dict[str, Any]]:
    done = engine_here("diagnose", path, "--json", *options, **more)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_log_is_read_to_the_digit_with_its_steps(kind: str, tmp_path: Path) -> None:
    if kind in ("tensorboard", "parquet"):
        pytest.importorskip(kind.replace("parquet", "pyarrow"))
    points = falling()
    (log,) = find_logs(KINDS[kind](points, tmp_path))
    assert log.read is not None
    recorded = Recorded(path=log.path)
    log.read(recorded, {})
    names = our_names(recorded.series, {})
    loss = recorded.series[names["loss"]]
    assert list(loss.steps) == [point.step for point in points]
    assert list(loss.values) == pytest.approx([point.loss for point in points], rel=1e-6)
    if kind not in ("axolotl", "torchtune", "plain"):
        held_out = recorded.series[names["held_out"]]
        evaluated = [point for point in points if point.held_out is not None]
        if kind != "lightning_bar":  # its bar goes on showing the last one
            assert list(held_out.steps) == [point.step for point in evaluated]
            assert list(held_out.values) == pytest.approx(
                [point.held_out for point in evaluated], rel=1e-6
            )


def test_a_diagnosis_is_that_of_the_run_folder_that_an_import_makes(tmp_path: Path) -> None:
    points = [point._replace(loss=math.nan) if point.step >= 200 else point for point in falling()]
    path = nanogpt(points, tmp_path)
    run, _ = import_run("text", path, tmp_path / "runs")
    (code, found), (code_of_run, found_of_run) = diagnosed(path), diagnosed(run.path)
    assert code == code_of_run == 1
    assert found["verdict"]["line"] == found_of_run["verdict"]["line"]
    assert "since step 200" in found["verdict"]["line"]


def test_a_line_that_is_not_read_is_counted_and_shown(tmp_path: Path) -> None:
    path = plain(falling(), tmp_path)
    path.write_text("loading 3 files\nloss is 4x what it was\n" + path.read_text())
    said = engine_here("diagnose", path, "--series").stdout
    assert (
        "300 with values, 0 progress bars without, 1 others, 1 with a loss that could not be read"
        in said
    )
    assert "line 2: 'loss is 4x what it was'" in said
    assert "loss, as loss: 300 values, steps 1 to 300" in said


def test_steps_are_those_of_the_bar_or_are_said_to_be_counted(tmp_path: Path) -> None:
    tens = [point._replace(step=10 * point.step) for point in falling(50)]
    path = transformers_text(tens, tmp_path)
    assert (
        "steps: of the progress bar after each line"
        in engine_here("diagnose", path, "--series").stdout
    )
    path.write_text(
        "".join(line + "\n" for line in path.read_text().splitlines() if line.startswith("{"))
    )
    said = engine_here("diagnose", path, "--series").stdout
    assert "the lines have none and are counted" in said and "steps 1 to 50" in said


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.cli.main import main; sys.argv[1:] = ['diagnose', sys.argv[1]]; code = main();"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torch']; sys.exit(code)"
    )
    path = nanogpt(falling(), tmp_path)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
