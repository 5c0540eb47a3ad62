"""`engine prepare`: what was planned is what is written, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.errors import DiskFull
from engine.spec import load_spec
from engine.teachers.store.folder import open_store, shard_path
from engine.teachers.store.keys import CacheError
from engine.teachers.store.write import StorePlan
from engine.train.prepare import PrepareOptions, plan_job
from engine.train.stop_request import StopRequest
from tests.support import faults
from tests.support.kit import Kit
from tests.support.paths import ROOT
from tests.support.preparing import files_of, make_store

SHARD_BYTES = 96 << 10
"""Of the kit's rows of 6 KiB: a shard is four batches."""
LAST_PLACE = 60
"""Operations on files before a kill, at most: a third of an undisturbed run, two of its six shards."""


@pytest.fixture(scope="module")
def spec(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.spec(tmp_path_factory.mktemp("prepare"), train__steps=20)


@pytest.fixture(scope="module")
def undisturbed(spec: Path) -> Path:
    out = spec.parent / "undisturbed"
    make_store(spec, out, shard_bytes=SHARD_BYTES)
    return out


def test_a_dry_run_says_exactly_what_is_then_written(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "store"
    command = ["prepare", str(spec), "--out", str(out), "--json", "--steps", "3"]
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr()
    planned = json.loads(said.out)
    assert not out.exists()
    assert "bytes each" in said.err and "free" in said.err
    assert main(command) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["bytes_done"] == planned["disk_bytes"]
    assert planned["disk_bytes"] == sum(f.stat().st_size for f in out.glob("shard-*"))
    assert done["rows_done"] == planned["missing"] == len(open_store(out))
    assert planned["rows"] == 3 * 4 + 4  # and the held-out ones
    assert planned["bytes_per_token"] == 48 * 4
    assert main([*command, "--dry-run"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["missing"], again["disk_bytes"], again["stored"]) == (0, 0, planned["missing"])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.compiled(tmp_path_factory.mktemp("faults"))


def _killed(spec: Path, out: Path, places: list[int], library: Path) -> list[str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.preparing",
            spec,
            out,
            str(SHARD_BYTES),
            *map(str, places),
        ],
        capture_output=True,
        text=True,
        env=faults.environment(library),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def _kills(
    spec: Path, undisturbed: Path, out: Path, library: Path, *, seed: int, count: int
) -> None:
    places = [random.Random(seed + index).randint(1, LAST_PLACE) for index in range(count)]
    said = _killed(spec, out, places, library)
    assert said[0].endswith("True"), said
    assert files_of(out) == files_of(undisturbed), (seed, said)
    assert not list(out.glob("*.partial"))


def test_a_kill_at_a_random_point_leaves_the_store_of_an_undisturbed_run(
    spec: Path, undisturbed: Path, tmp_path: Path, library: Path
) -> None:
    _kills(spec, undisturbed, tmp_path / "killed", library, seed=1, count=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 1100, 100))
def test_many_kills_at_random_points(
    spec: Path, undisturbed: Path, tmp_path: Path, library: Path, seed: int
) -> None:
    _kills(spec, undisturbed, tmp_path / "killed", library, seed=seed, count=20)


def test_a_damaged_shard_is_found_named_and_made_again(
    spec: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "store"
    shutil.copytree(undisturbed, out)
    raw = bytearray(shard_path(out, 1).read_bytes())
    raw[len(raw) // 2] ^= 1
    shard_path(out, 1).write_bytes(raw)
    said: list[str] = []
    done = make_store(spec, out, say=said.append)
    assert done.rows == len(open_store(undisturbed).shards[1].rows)
    assert any("shard-000001" in line and "computed again" in line for line in said)
    assert files_of(out) == files_of(undisturbed)


def test_a_request_to_stop_ends_the_shard_and_loses_nothing(
    spec: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out, stop = tmp_path / "store", StopRequest()

    def ask(rows: int, seconds: float) -> None:
        if rows >= 12:
            stop.reason = "SIGINT"

    done = make_store(spec, out, shard_bytes=SHARD_BYTES, stop=stop, progress=ask)
    assert done.stopped == "SIGINT" and done.rows == 12 < done.plan.missing
    assert len(open_store(out)) == 12
    rest = make_store(spec, out)
    assert rest.stopped is None and rest.rows == done.plan.missing - 12
    whole, again = open_store(undisturbed), open_store(out)
    for shard in whole.shards.values():
        for key, digest in shard.rows:  # the same rows, in shards of other lengths
            assert any((key, digest) in other.rows for other in again.shards.values())


def test_ctrl_c_exits_130_and_says_what_is_left(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.cli import prepare

    asked: list[int] = []

    def interrupt(self: object, rows: int, seconds: float) -> None:
        if not asked:
            asked.append(rows)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(prepare._Progress, "__call__", interrupt)
    assert main(["prepare", str(spec), "--out", str(tmp_path / "s"), "--json"]) == 130
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["stopped"] == "SIGINT" and result["rows_left"] > 0
    assert f"{result['rows_left']} rows are left" in said.err
    assert len(open_store(tmp_path / "s")) == result["rows_done"] == asked[0]


def test_what_does_not_fit_on_the_disk_is_refused_before_anything_is_written(
    spec: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 65 << 20))
    out = tmp_path / "store"
    assert main(["prepare", str(spec), "--out", str(out), "--dry-run"]) == 0  # half a MiB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 64 << 20))
    for dry in ([], ["--dry-run"]):
        assert main(["prepare", str(spec), "--out", str(out), *dry]) == DiskFull.exit_code
        assert "64.0 MiB more" in capsys.readouterr().err
        assert not out.exists()


def test_a_store_of_something_else_is_not_mixed_with_this(
    spec: Path, undisturbed: Path, tmp_path: Path
) -> None:
    def plan(*sets: str, **wanted: object) -> StorePlan:
        asked = PrepareOptions(out=undisturbed, **wanted)  # type: ignore[arg-type]
        return plan_job(load_spec(spec, list(sets))[0], asked).plan

    assert plan().missing == 0
    assert plan("train.rows=2").missing == 0  # other batches of the same rows
    with pytest.raises(CacheError, match="expected form top_k"):
        plan(form="top_k", count=4)
    with pytest.raises(CacheError, match="expected seq_len 16, found 32"):
        plan("data.seq_len=16")
    teacher = tmp_path / "teacher"
    shutil.copytree(load_spec(spec)[0].teacher.path, teacher)
    assert plan(f"teacher.path={teacher}").missing == 0  # a copy: other inodes, the same hashes
    raw = bytearray((teacher / "model.safetensors").read_bytes())
    raw[-1] ^= 64
    (teacher / "model.safetensors").write_bytes(raw)
    with pytest.raises(CacheError, match="the teacher that the store was made with"):
        plan(f"teacher.path={teacher}")


def test_a_command_without_a_store_or_with_no_rows_is_a_usage_error(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", str(spec)]) == 64
    assert main(["prepare", str(spec), "--out", "x", "--rows", "0"]) == 64
    said = capsys.readouterr().err
    assert "--out DIR" in said and "--rows: expected 1 or more" in said


def test_how_threads_wait_is_set_before_torch_is_loaded(spec: Path, tmp_path: Path) -> None:
    program = (
        "import sys; import engine.cli.prepare as command; from engine.cli.main import main\n"
        "command.prepare_threads = lambda wanted: sys.exit(7 if 'torch' in sys.modules else 0)\n"
        "main(sys.argv[1:])"
    )
    command = ["prepare", str(spec), "--out", str(tmp_path / "s")]
    done = subprocess.run([sys.executable, "-c", program, *command], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_equal_rows_are_stored_once(kit: Kit, tmp_path: Path) -> None:
    # One line again and again: rows that begin at the same place of it are the same.
    (tmp_path / "corpus").mkdir()
    for index in range(12):
        text = "x = 1\n" * 400 + f"# {index}\n"
        (tmp_path / "corpus" / f"{index}.py").write_text(text)
    spec = kit.spec(tmp_path, data__corpus=str(tmp_path / "corpus"), train__steps=30)
    job = plan_job(load_spec(spec)[0], PrepareOptions(out=tmp_path / "s"))
    assert job.plan.repeated > job.plan.missing > 0
    done = make_store(spec, tmp_path / "s")
    assert done.rows == job.plan.missing == len(open_store(tmp_path / "s"))
