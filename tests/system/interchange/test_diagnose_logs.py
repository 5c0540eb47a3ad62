"""`engine diagnose` of what other tools have logged: what is read of each kind of log, and what is said of it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.interchange.importing import import_run
from engine.interchange.kinds import find_logs
from engine.interchange.names import engine_names
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


def diagnosed(
    path: Path | str,
    *options: str,
) -> tuple[int, dict[str, Any]]:
    done = engine_here("diagnose", path, "--json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_log_is_read_to_the_digit_with_its_steps(kind: str, tmp_path: Path) -> None:
    points = falling()
    (log,) = find_logs(KINDS[kind](points, tmp_path))
    assert log.read is not None
    recorded = Recorded(path=log.path)
    log.read(recorded, {})
    names = engine_names(recorded.series, {})
    loss = recorded.series[names["loss"]]
    assert list(loss.steps) == [point.step for point in points]
    assert list(loss.values) == pytest.approx([point.loss for point in points], rel=1e-6)
    if kind not in ("axolotl", "plain"):
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


def test_times_are_known_by_their_last_words(tmp_path: Path) -> None:
    lines = [
        f"step {at} train/loss={2 - at / 300:.4f} perf/data_time=0.9 perf/step_time=1.0"
        for at in range(100)
    ]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    code, found = diagnosed(tmp_path / "train.log")
    assert code == 2 and found["verdict"]["id"] == "alert data_wait", found["verdict"]


def test_steps_are_those_of_the_bar_or_are_said_to_be_counted(tmp_path: Path) -> None:
    tens = [point._replace(step=10 * point.step) for point in falling(50)]
    path = transformers_text(tens, tmp_path)
    assert (
        "steps: from the progress bar after each line"
        in engine_here("diagnose", path, "--series").stdout
    )
    path.write_text(
        "".join(line + "\n" for line in path.read_text().splitlines() if line.startswith("{"))
    )
    said = engine_here("diagnose", path, "--series").stdout
    assert (
        "the lines have none, so lines with values are numbered" in said and "steps 1 to 50" in said
    )


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.cli.main import main; sys.argv[1:] = ['diagnose', sys.argv[1]]; code = main();"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torch']; sys.exit(code)"
    )
    path = nanogpt(falling(), tmp_path)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CRASHED = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total": "CUDA out of memory",
    "[rank1]:[E1130 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: Work": "a NCCL",
    "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.": "a DataLoader worker was killed",
    "RuntimeError: CUDA error: device-side assert triggered": "a device-side assertion failed",
    "ValueError: too many values": "ended by ValueError: too many values",
}
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n'


@pytest.mark.parametrize("words", CRASHED)
def test_a_crash_in_a_text_is_named_with_its_line_and_what_it_proves(
    words: str, tmp_path: Path
) -> None:
    path = plain(falling(100), tmp_path)
    path.write_text(path.read_text() + TRACE + words + "\n")
    code, found = diagnosed(path)
    verdict = found["verdict"]
    assert code == 1 and verdict["line"].startswith(f"ENDED at step 100: {CRASHED[words]}")
    assert "line 104" in verdict["text"] and verdict["action"]
    path.write_text(TRACE + words + "\n" + plain(falling(100), tmp_path / "b").read_text())
    assert diagnosed(path)[0] == 0, "it was caught, and the training went on"


def test_a_folder_has_a_line_for_each_log_the_worst_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    nanogpt(falling(), logs / "good")
    nanogpt(
        [point._replace(loss=math.nan) if point.step > 99 else point for point in falling()],
        logs / "nan",
    )
    KINDS["mlflow_database"](falling(50), logs, runs=("a" * 32, "b" * 32))
    KINDS["trainer_state"](falling(), logs / "trainer")
    for name, data in {
        "a.log": bytes(range(64)),
        "b.jsonl": b"[" * 9999,
        "requirements.txt": b"numpy\n",
    }.items():
        (logs / name).write_bytes(data)
    monkeypatch.chdir(logs)
    done = engine_here("diagnose", ".")
    *rows, count, not_read, also = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == [
        *("nan/nanogpt.log", "mlflow.db:run-a", "mlflow.db:run-b", "good/nanogpt.log"),
        "trainer/checkpoint-9/trainer_state.json",
    ]
    assert done.returncode == 1 and "WRONG since step 100" in rows[0]
    assert count == "5 logs judged; 2 could not be read; 1 files have no values of a run"
    assert "a.log — expected text" in not_read and "b.jsonl line 1 — expected a JSON object" in also
    (logs / "nan" / "nanogpt.log").unlink()
    assert diagnosed(logs)[0] == 65


def test_standard_input_is_read_as_a_text(tmp_path: Path) -> None:
    text = nanogpt(falling(), tmp_path).read_text()
    done = subprocess.run(
        [sys.executable, "-m", "engine", "diagnose", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("✓ HEALTHY: no alert in 300 steps"), (
        done.stderr
    )


@pytest.mark.parametrize("kind", ["json_lines", "table"])
def test_a_last_line_that_is_cut_off_is_left_out_and_mentioned(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](falling(), tmp_path)
    whole = path.read_bytes().rstrip(b"\r\n")
    path.write_bytes(whole[: whole.rfind(b"\n") + 8])
    code, found = diagnosed(path)
    assert code == 0 and "in 299 steps" in found["verdict"]["line"]
    assert "the last line is incomplete" in engine_here("diagnose", path, "--series").stdout
    path.write_bytes(path.read_bytes() + b"\n" + whole[-30:])
    assert engine_here("diagnose", path).returncode == 65


HOSTILE = {
    "bytes.log": bytes(range(256)) * 20,
    "empty.csv": b"",
    "deep.jsonl": b"[" * 100_000,
    "torn.parquet": b"PAR1" + bytes(64),
    "no.db": b"SQLite format 3\0" + bytes(200),
    "trainer_state.json": b'{"log_history": 7}',
    "longer.log": b"loss " * 220_000,
    "huge.log": b"step 99999999999999999999999 loss=0.5\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_and_exit_65(name: str, tmp_path: Path) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(HOSTILE[name])
    done = engine_here("diagnose", tmp_path / name)
    assert done.returncode == 65 and not done.stdout
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("engine diagnose: ")


def test_a_long_curve_is_thinned_and_each_nan_is_kept(tmp_path: Path) -> None:
    lines = [
        f"iter {step}: loss {2 + 8 / (1 + step):.4f}, time 5.12ms, mfu 3.20%\n"
        for step in range(40_000)
    ]
    for step in range(30_001, 30_005):
        lines[step] = f"iter {step}: loss nan, time 5.12ms, mfu 3.20%\n"
    path = tmp_path / "long.log"
    path.write_text("".join(lines))
    code, found = diagnosed(path)
    assert code == 2 and "loss was nan in steps 30001 to 30004" in found["verdict"]["line"]
    assert (
        "long curves: of each 4 values one is evaluated, and every non-finite value"
        in found["read"]
    )


@pytest.mark.soak
def test_a_gigabyte_of_text_takes_under_a_minute_and_300_mb(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    with path.open("w") as file:
        for begin in range(0, 21_000_000, 100_000):
            steps = range(begin, begin + 100_000)
            file.write(
                "".join(f"iter {n}: loss 2.{n % 97:04}, time 5.12ms, mfu 31.41%\n" for n in steps)
            )
    assert path.stat().st_size > 1e9
    code = "import sys, resource; from engine.cli.main import main; main(['diagnose', sys.argv[1]])"
    code += "; print(resource.getrusage(resource.RUSAGE_SELF))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    used = dict(re.findall(r"(ru_utime|ru_stime|ru_maxrss)=([\d.]+)", done.stdout))
    assert float(used["ru_utime"]) + float(used["ru_stime"]) < 60, used
    assert int(used["ru_maxrss"]) < 300_000, used
