"""Runs made of what TensorBoard and W&B have written themselves, and of tables; broken files are refused."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tensorboard  # noqa: F401  the file is skipped where it is not installed
import wandb  # noqa: F401

from engine.interchange.names import ENGINE_NAMES, NAMES, plain
from engine.log.fold import Follower
from engine.log.folder import RunFolder, read_command, settings_of
from engine.log.view import RunView
from tests.support.running import engine_here
from tests.support.screens import on_screen, press, text_of, texts_of, words_of
from workbench.compared import CompareFeed, differences

BEGAN_S = 1_750_000_000.0


def python(script: str, *arguments: object, **variables: str) -> None:
    """Run a script in a process of its own: these libraries start threads and change what a process warns of."""
    words = [sys.executable, "-c", script, *map(str, arguments)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, **variables})


def imported(
    source: str, path: Path, *options: object, out: Path | None = None
) -> tuple[RunFolder, str]:
    done = engine_here("import", source, path, "--out", out or path.parent / "runs", *options)
    assert done.returncode == 0, done.stderr
    return RunFolder(Path(done.stdout.strip())), done.stderr


def read(run: RunFolder) -> RunView:
    follower = Follower(run)
    follower.read_all()
    return follower.view


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def column(view: RunView, name: str) -> list[float | None]:
    return view.steps.values(name)


# TensorBoard.

SUMMARIES = f"""
import math, sys, torch
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(sys.argv[1]) as writer:
    for step in range(10):
        at = {BEGAN_S} + 2 * step
        writer.add_scalar("train/loss", 3 / (step + 1), step, walltime=at)
        writer.add_scalar("train/learning_rate", 1e-3, step, walltime=at)
        writer.add_scalar("accuracy", step / 10, step, walltime=at)
    writer.add_scalar("Loss/val", 0.5, 9, walltime=at + 1)
    writer.add_scalar("train/loss", math.nan, 10, walltime=at + 2)
    writer.add_scalar("train/loss", math.inf, 11, walltime=at + 4)
    writer.add_scalar("new/style", 1.5, 11, walltime=at + 4, new_style=True)
    writer.add_histogram("weights", torch.arange(9.0), 3, walltime=at)
    writer.add_hparams({{"lr": 1e-3, "optimizer": "adamw"}}, {{"best": 0.5}}, run_name=".")
for begin, end, loss in ((0, 8, 1.0), (5, 12, 2.0)):
    with SummaryWriter(sys.argv[1] + "/../../restarted", filename_suffix=str(begin)) as writer:
        for step in range(begin, end):
            writer.add_scalar("loss", loss, step, walltime=1e9 + 100 * begin + step)
for name in ("keras/train", "keras/validation", "sweep/lr-1", "sweep/lr-2"):
    with SummaryWriter(f"{{sys.argv[1]}}/../../{{name}}") as writer:
        writer.add_scalar("epoch_loss", 1.0, 1)
"""


@pytest.fixture(scope="module")
def event_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "one" / "lr-3"
    python(SUMMARIES, folder)
    return folder


def test_event_files_become_a_run_with_every_number(event_files: Path, tmp_path: Path) -> None:
    run, said = imported("tensorboard", event_files, out=tmp_path)
    view = read(run)
    losses = column(view, "loss")
    assert losses[:10] == [float32(3 / (step + 1)) for step in range(10)]
    assert losses[10] is not None and math.isnan(losses[10]) and losses[11] == math.inf
    assert column(view, "step") == list(range(12))
    assert column(view, "unix_s")[:10] == [BEGAN_S + 2 * step for step in range(10)]
    assert [(done.step, done.loss) for done in view.evals] == [(9, 0.5)]
    assert view.logged["accuracy"] == (9, float32(0.9)) and view.logged["new/style"] == (11, 1.5)
    assert view.logged["best"] == (0, 0.5), "logged at the end, and later than every step"
    assert settings_of(run) == {"config.lr": 1e-3, "config.optimizer": "adamw"}
    assert "left out because they are not numbers: weights (histo)" in said
    assert "loss from train/loss, lr from train/learning_rate" in said
    assert "names kept unchanged: accuracy, best, new/style" in said


def test_the_run_says_which_files_it_was_made_from(event_files: Path, tmp_path: Path) -> None:
    import hashlib

    run, _ = imported("tensorboard", event_files.parent, out=tmp_path)
    found = read(run).imported
    assert run.name == "lr-3" and found is not None and found.source == "tensorboard"
    for path, size, sha256 in found.files:
        data = Path(path).read_bytes()
        assert (size, sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert len(found.files) == len(list(event_files.iterdir()))


def test_steps_that_go_back_in_a_second_file_replace_those_of_the_first(
    event_files: Path, tmp_path: Path
) -> None:
    run, said = imported("tensorboard", event_files.parents[1] / "restarted", out=tmp_path)
    view = read(run)
    assert column(view, "step") == list(range(12))
    assert column(view, "loss") == [1.0] * 5 + [2.0] * 7
    assert "3 values were replaced: a restart went back" in said


def test_folders_beside_each_other_are_one_run_only_where_their_names_say_so(
    event_files: Path, tmp_path: Path
) -> None:
    logs = event_files.parents[1]
    run, _ = imported("tensorboard", logs / "keras", out=tmp_path)
    found = read(run).imported
    assert found is not None
    assert found.names == {"loss": "train/epoch_loss", "held_out": "validation/epoch_loss"}
    refused = engine_here("import", "tensorboard", logs / "sweep", "--out", tmp_path / "no")
    assert refused.returncode == 65 and "expected one run, found 2: lr-1, lr-2" in refused.stderr


# Weights & Biases.

LOGGED = """
import math, sys, wandb
config = {"lr": 0.1, "optimizer": {"name": "adamw", "betas": [0.9, 0.95]}, "hub_token": "hf_" + "a" * 30}
run = wandb.init(mode="offline", project="p", name="first try", config=config)
for step in range(600):
    run.log({"train/loss": 3 / (step + 1), "train/global_step": 10 * step, "note": "text"})
run.config.update({"seed": 3})
run.log({"train/loss": math.nan, "train/global_step": 6000, "nested": {"a": math.inf}})
run.log({"eval/loss": 0.25, "train/global_step": 6000, "picture": wandb.Histogram([1, 2, 3])})
run.finish()
for number in range(2):
    run = wandb.init(mode="offline", project="p", dir=sys.argv[1])
    run.log({"loss": 1.0})
    run.finish(exit_code=3)
"""


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than one block of 32 KiB."""
    folder = tmp_path_factory.mktemp("wandb")
    (folder / "failed").mkdir()
    python(
        LOGGED,
        folder / "failed",
        WANDB_DIR=str(folder),
        WANDB_SILENT="true",
        WANDB_ERROR_REPORTING="false",
    )
    return folder / "wandb"


def record_file(offline_run: Path) -> Path:
    (found,) = offline_run.glob("offline-run-*/*.wandb")
    return found


def test_an_offline_run_becomes_a_run_bit_for_bit(offline_run: Path, tmp_path: Path) -> None:
    assert record_file(offline_run).stat().st_size > 2 << 15
    run, said = imported("wandb", offline_run, out=tmp_path)
    view = read(run)
    assert run.name == "first-try"
    assert column(view, "step") == [10.0 * step for step in range(601)], "the script's own steps"
    assert column(view, "loss")[:600] == [3 / (step + 1) for step in range(600)]
    assert [(done.step, done.loss) for done in view.evals] == [(6000, 0.25)]
    assert view.logged == {"nested.a": (6000, math.inf)}
    assert view.finished is not None and view.finished.state == "completed"
    assert "note ('text')" in said and "picture._type ('histogram')" in said


def test_its_settings_and_its_command_are_kept_without_secrets(
    offline_run: Path, tmp_path: Path
) -> None:
    run, _ = imported("wandb", offline_run, out=tmp_path)
    settings = settings_of(run)
    assert settings["config.lr"] == 0.1 and settings["config.seed"] == 3
    assert settings["optimizer.name"] == "adamw" and settings["optimizer.betas"] == "[0.9, 0.95]"
    assert "hf_" not in run.effective.read_text()
    command = read_command(run)
    assert command is not None and command.folder == str(offline_run.parent)


def test_without_a_record_of_its_end_a_run_is_not_called_completed(
    offline_run: Path, tmp_path: Path
) -> None:
    data = record_file(offline_run).read_bytes()
    (tmp_path / "run-x.wandb").write_bytes(data[: len(data) - 40])
    run, said = imported("wandb", tmp_path / "run-x.wandb", "--partial")
    view = read(run)
    assert (
        len(view.steps) == 601
        and "warning: " in said
        and "the end of the file in the middle of a record" in said
    )
    assert view.finished is not None
    assert (view.finished.state, view.finished.reason) == (
        "imported",
        "its files do not record how it ended",
    )


def test_a_run_that_failed_says_so_and_of_several_one_is_named(
    offline_run: Path, tmp_path: Path
) -> None:
    failed = offline_run.parent / "failed" / "wandb"
    refused = engine_here("import", "wandb", failed, "--out", tmp_path)
    assert (
        refused.returncode == 65
        and "expected one run-ID.wandb, found 2: offline-run-" in refused.stderr
    )
    run, _ = imported("wandb", next(failed.glob("offline-run-*")), out=tmp_path)
    finished = read(run).finished
    assert finished is not None and (finished.state, finished.exit_code) == ("failed", 3)
    assert "exit code 3" in engine_here("runs", run.path).stdout


# Tables.

ROWS: list[dict[str, Any]] = [
    {"step": 1, "unix_s": BEGAN_S, "loss": 0.1 + 0.2, "lr": 1e-3, "tokens": 4096, "acc": None},
    {"step": 2, "unix_s": BEGAN_S + 1, "loss": math.nan, "lr": 5e-324, "tokens": 4096, "acc": None},
    {"step": 4, "unix_s": BEGAN_S + 2, "loss": math.inf, "lr": None, "tokens": 2048, "acc": -0.0},
]


def separated(path: Path, by: str) -> None:
    cells = [["" if value is None else repr(value) for value in row.values()] for row in ROWS]
    path.write_text("\n".join(by.join(row) for row in [list(ROWS[0]), *cells]) + "\n")


def as_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


TABLES: dict[str, Callable[[Path], None]] = {
    ".csv": lambda path: separated(path, ","),
    ".tsv": lambda path: separated(path, "\t"),
    ".jsonl": lambda path: (
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)) and None
    ),
    ".parquet": as_parquet,
}


@pytest.mark.parametrize("ending", TABLES)
def test_every_kind_of_table_keeps_every_bit(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"history{ending}"
    TABLES[ending](path)
    run, _ = imported("csv", path)
    view = read(run)
    assert run.name == "history" and column(view, "step") == [1, 2, 4]
    assert column(view, "unix_s") == [row["unix_s"] for row in ROWS]
    for name in ("loss", "lr", "tokens"):
        assert str(column(view, name)) == str(
            [None if row[name] is None else float(row[name]) for row in ROWS]
        )
    assert str(view.logged["acc"]) == "(4, -0.0)"


def test_without_a_step_the_row_counts_and_without_a_time_the_steps_take_theirs(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text("Loss/train;step_time\n3;0.5\n2;1.5\n1;2\n")
    run, said = imported("csv", tmp_path / "a.csv")
    view = read(run)
    times = [at for at in column(view, "unix_s") if at is not None]
    assert column(view, "step") == [1, 2, 3] and column(view, "loss") == [3, 2, 1]
    assert [round(b - a, 3) for a, b in pairwise(times)] == [1.5, 2.0]
    assert "no time of day" in said


def test_a_time_may_be_a_date_and_steps_may_go_back(tmp_path: Path) -> None:
    rows = ["global_step,timestamp,val_loss,loss"]
    rows += [
        f"{step},2025-06-15T15:06:{at:02}+00:00,,{step}"
        for at, step in enumerate((1, 2, 3, 2, 3, 4))
    ]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    run, said = imported("csv", tmp_path / "a.csv")
    assert column(read(run), "unix_s") == [BEGAN_S - 40 + at for at in (0, 3, 4, 5)]
    assert column(read(run), "step") == [1, 2, 3, 4] and "2 values were replaced" in said


def test_a_name_that_the_table_of_names_lacks_is_given_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("it,xent,loss\n10,3,7\n20,2,8\n")
    run, _ = imported(
        "csv", tmp_path / "a.csv", "--map", "loss=xent", "--map", "step=it", "--name", "b"
    )
    view = read(run)
    assert run.name == "b" and column(view, "loss") == [3, 2] and column(view, "step") == [10, 20]
    assert view.logged["loss"] == (20, 8.0), "the other one keeps its name"
    for text, code, words in (
        ("loss=gone", 65, "found it, loss, xent"),
        ("step=gone", 65, "expected a column, found it, xent, loss"),
        ("loss", 64, "expected NAME=TAG"),
        ("nats=xent", 64, "expected NAME=TAG"),
    ):
        refused = engine_here(
            "import", "csv", tmp_path / "a.csv", "--map", text, "--out", tmp_path / "no"
        )
        assert (refused.returncode, words in refused.stderr) == (code, True), refused.stderr
        assert not (tmp_path / "no").exists()


def test_a_count_that_is_none_is_kept_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("loss,tokens\n3,0.5\n2,-1\n1,7\n")
    view = read(imported("csv", tmp_path / "a.csv")[0])
    assert column(view, "tokens") == [None, None, 7] and view.logged["tokens"] == (2, -1.0)


def test_no_name_of_others_means_two_things() -> None:
    theirs = [name for names in NAMES.values() for name in names]
    assert len(theirs) == len(set(theirs)) and NAMES.keys() <= set(ENGINE_NAMES)
    assert not set(theirs) & set(ENGINE_NAMES) and all(plain(name) == name for name in theirs)


# Refusals.


def torn(data: bytes) -> bytes:
    return data[:-7]


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


BROKEN: list[tuple[str, str, Callable[[bytes], bytes], str]] = [
    ("tensorboard", "events.out.tfevents.1.a", torn, "truncated record in data"),
    ("tensorboard", "events.out.tfevents.1.a", flipped, "failed"),
    ("tensorboard", "events.out.tfevents.1.a", lambda data: b"", "an empty file"),
    ("tensorboard", "events.out.tfevents.1.a", lambda data: b"step,loss\n1,2\n" * 9, "failed header crc32"),
    ("tensorboard", "events.out.tfevents.1.a", lambda data: b"\xff" * 64, "failed header crc32"),
    ("wandb", "run-a.wandb", torn, "the end of the file in the middle of a record"),
    ("wandb", "run-a.wandb", flipped, "a wrong checksum or order of frames at byte"),
    ("wandb", "run-a.wandb", lambda data: b"", "an empty file"),
    ("wandb", "run-a.wandb", lambda data: b"step,loss\n1,2\n", "b'step,lo' at its beginning"),
    ("wandb", "run-a.wandb", lambda data: data[:7], "no number"),
    ("csv", "a.csv", lambda data: b"", "an empty file"),
    ("csv", "a.csv", lambda data: b"step,loss\n1,2\n3\n4,5\n", "found 1"),
    ("csv", "a.csv", lambda data: b"loss,loss\n1,2\n", "found 'loss,loss"),
    ("csv", "a.csv", lambda data: b'"loss\n1', "unexpected end of data"),
    ("csv", "a.jsonl", lambda data: b'{"loss": 1, "step": 1e300}', "found 1e+300 of loss"),
    ("csv", "a.csv", lambda data: b"step,loss\n1,\xff\n", "can't decode"),
    ("csv", "a.csv", lambda data: b"step,loss\n1.5,3\n", "an integer in step, found '1.5'"),
    ("csv", "a.csv", lambda data: b"step,loss\n-1,3\n", "found -1 of loss"),
    ("csv", "a.csv", lambda data: b"unix_s,loss\n1e99,3\n", "seconds since 1970"),
    ("csv", "a.csv", lambda data: b"step,a,b\n1,3,4\n", "found a, b"),
    ("csv", "a.jsonl", lambda data: b'{"loss": 1}\n[1]\n', "a JSON object, found b'[1]"),
    ("csv", "a.parquet", lambda data: b"PAR1" * 9, "Parquet"),
    ("csv", "a.xlsx", lambda data: b"PK", "found .xlsx"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name", "damage", "found"), BROKEN)
def test_a_broken_file_is_refused_in_one_line_and_leaves_nothing(
    event_files: Path,
    offline_run: Path,
    tmp_path: Path,
    source: str,
    name: str,
    damage: Callable[[bytes], bytes],
    found: str,
) -> None:
    whole = {"tensorboard": sorted(event_files.iterdir())[0], "wandb": record_file(offline_run)}
    path = tmp_path / name
    path.write_bytes(damage(whole[source].read_bytes() if source in whole else b""))
    done = engine_here("import", source, path, "--out", tmp_path / "runs")
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 65 and done.stdout == "" and found in first, done.stderr
    assert "expected " in first and ", found " in first
    assert all(line.startswith("hint: ") for line in rest) and len(rest) < 2
    assert not (tmp_path / "runs").exists()


HOSTILE = """
import struct, sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

def write(name, data, *, length=None):
    with open(f"{sys.argv[1]}/{name}.tfevents", "wb") as file:
        records = RecordWriter(file)
        records.write(Event(file_version="brain.Event:2", wall_time=1e9).SerializeToString())
        if length is None:
            records.write(data)
        else:
            size = struct.pack("<Q", length)
            file.write(size + struct.pack("<I", masked_crc32c(size)) + data)

def event(plugin, content=b"", **tensor):
    data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    value = {"tensor": TensorProto(**tensor)} if tensor else {}
    value = Summary.Value(tag="loss", metadata=SummaryMetadata(plugin_data=data), **value)
    return Event(step=1, wall_time=1e9, summary=Summary(value=[value])).SerializeToString()

write("length", b"x" * 99, length=1 << 62)
write("foreign", b"not an event at all")
write("settings", event("hparams", bytes([255] * 3)))
write("empty", event("scalars", dtype=1))
write("text", event("scalars", dtype=7, string_val=[b"x"], tensor_shape={"dim": [{"size": 1}]}))
write("shape", event("scalars", dtype=1, tensor_shape={"dim": [{"size": 1 << 40}]}))
"""


def test_records_that_no_writer_writes_are_refused(tmp_path: Path) -> None:
    python(HOSTILE, tmp_path)
    files = sorted(tmp_path.glob("*.tfevents"))
    assert len(files) == 6
    for path in files:
        done = engine_here("import", "tensorboard", path, "--out", tmp_path / "runs")
        assert done.returncode == 65 and f"{path} record 2 — expected" in done.stderr, done.stderr


def test_names_of_any_signs_are_kept_and_said_in_one_line(tmp_path: Path) -> None:
    row = {"loss": 1, "a\x1b[31m\nb/~1": 2, "": 3, "caf\u00e9 \u202e": 4}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    run, said = imported("csv", tmp_path / "a.jsonl")
    assert {name: value for name, (_, value) in read(run).logged.items()} == {
        name: value for name, value in row.items() if name != "loss"
    }
    assert len(said.splitlines()) == 3 and "\x1b" not in said


def test_what_is_in_front_of_a_fault_is_imported_on_demand(
    event_files: Path, tmp_path: Path
) -> None:
    path = tmp_path / "events.out.tfevents.1.a"
    data = bytearray(sorted(event_files.iterdir())[0].read_bytes())
    data[data.index(b"train/loss", 400)] ^= 1
    path.write_bytes(data)
    run, said = imported("tensorboard", path, "--partial")
    losses = column(read(run), "loss")
    assert 1 < len(losses) < 12 and losses == [
        float32(3 / (step + 1)) for step in range(len(losses))
    ]
    assert "warning: " in said and "read up to the fault" in said
    assert [note.level for note in read(run).notes].count("warning") == 1


@pytest.mark.parametrize("source", ["tensorboard", "wandb"])
def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    for module in ("tensorboard.compat.proto", "wandb.proto.wandb_internal_pb2"):
        monkeypatch.setitem(sys.modules, module, None)
    done = engine_here("import", source, tmp_path)
    assert done.returncode == 65
    assert f"library: {source} — expected" in done.stderr
    assert "hint: pip install 'apr-workbench[import]'" in done.stderr


def test_a_run_that_exists_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("loss\n1\n")
    run, _ = imported("csv", tmp_path / "a.csv")
    before = run.events.read_bytes()
    again = engine_here("import", "csv", tmp_path / "a.csv", "--out", tmp_path / "runs")
    assert again.returncode == 65 and "--name" in again.stderr
    assert run.events.read_bytes() == before


# What the workbench makes of it.


@pytest.fixture
def spiked(tmp_path: Path) -> RunFolder:
    """A loss that falls for 200 steps and is NaN from then on."""
    rows = [
        f"{step},{BEGAN_S + step},{'nan' if step > 200 else 3 / step},1.0" for step in range(1, 241)
    ]
    (tmp_path / "spiked.csv").write_text("\n".join(["step,unix_s,loss,grad_norm", *rows]))
    return imported("csv", tmp_path / "spiked.csv")[0]


def test_rules_judge_a_past_run_and_say_what_they_cannot_know(spiked: RunFolder) -> None:
    done = engine_here("diagnose", spiked.path, "--all")
    assert done.returncode == 1 and "non_finite" in done.stdout
    judged, unknown = done.stdout.split("could not judge")
    for rule in ("stalled", "compile_after_warm_up"):
        assert f"  {rule}: " in unknown and f"  {rule}\n" not in judged
    assert "non_finite" in read(spiked).alerts, "in the run's own log, for every screen"


def test_the_screen_draws_it_and_the_list_has_its_settings(
    spiked: RunFolder, offline_run: Path
) -> None:
    imported("wandb", offline_run, out=spiked.path.parent)
    (words,) = texts_of(spiked.path, (120, 40))
    assert "IMPORTED" in words and "imported from csv" in words and "non_finite" in words

    async def script(pilot: Any) -> None:
        rows = text_of(pilot)
        assert (
            "spiked" in rows and "imported" in rows and "first-try" in rows and "completed" in rows
        )
        await press(pilot, "1", "ctrl+home", "space", "space", "c")
        assert "config.lr" in words_of(pilot) and "compare loss" in words_of(pilot)

    on_screen([spiked.path.parent], (140, 45), script)


def test_runs_of_others_are_compared_by_their_settings(
    spiked: RunFolder, offline_run: Path
) -> None:
    run, _ = imported("wandb", offline_run, out=spiked.path.parent)
    feed = CompareFeed(dict(enumerate([run, spiked])))
    while (compared := feed.poll()).behind:
        pass
    runs = compared.runs
    found = {one.key: dict(one.values) for one in differences(runs)}
    assert found["config.lr"] == {(0,): "0.1", (1,): "-"}
    assert found["optimizer.name"] == {(0,): "adamw", (1,): "-"}


def test_report_and_list_take_it(spiked: RunFolder, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert engine_here("report", spiked.path, "--out", page).returncode == 0
    assert "imported from csv" in page.read_text() and "training loss" in page.read_text()
    listed = json.loads(engine_here("runs", spiked.path.parent, "--json").stdout)
    assert [(one["state"], one["step"]) for one in listed] == [("imported", 240)]
    assert engine_here("runs", spiked.path.parent, "--filter", "state:imported").stdout.startswith(
        "spiked"
    )


@pytest.mark.parametrize("command", [("flip", "--set", "train.lr=1"), ("distill", "--resume")])
def test_what_needs_settings_of_ours_refuses_it(
    spiked: RunFolder, command: tuple[str, ...]
) -> None:
    done = engine_here(*command, spiked.path)
    assert done.returncode in (64, 65)
