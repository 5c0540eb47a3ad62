"""A log that is hostile or broken never takes down who looks at the run: commands end with one line and a code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.log.events import Event, Note
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import LONGEST_LINE_BYTES, BrokenLog, LogReader
from engine.log.write import encode
from tests.support.run_events import finished, numbered, opened, started, step
from tests.support.run_folders import Scene

LOGS = ("events", "device", "watch")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run that ended, with a log that says so."""
    scene = Scene(tmp_path / "one")
    write(scene.run.events, [opened(1.75e9), started(9), *(step(n) for n in range(1, 10))])
    return scene.run


def write(path: Path, events: list[Event], behind: bytes = b"") -> None:
    lines = [encode(event, event.seq, event.t_s) for event in numbered(events)]  # type: ignore[arg-type]
    path.write_bytes(b"".join(lines) + behind)


def line(kind: str, seq: int, **fields: Any) -> bytes:
    return json.dumps({"v": 1, "seq": seq, "t_s": 1.0, "kind": kind, **fields}).encode() + b"\n"


def engine(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


# Numbers have ranges.


@pytest.mark.parametrize(
    "bad",
    [
        line("note", 11, t_s=1e300, level="info", text="x"),
        line("note", 11, t_s=-0.5, level="info", text="x"),
        line("log_opened", 11, unix_s=1e18, boot_id="b", pid=1, writer="trainer"),
        line("log_opened", 11, unix_s=-1.0, boot_id="b", pid=1, writer="trainer"),
        line("log_opened", 11, unix_s=1.0, boot_id="b", pid=0, writer="trainer"),
        line("log_opened", 11, unix_s=None, nf={"unix_s": "nan"}, boot_id="b", pid=1, writer="t"),
        line(
            "checkpoint", 11, step=-1, path="p", size_bytes=1, save_s=1, manifest_sha256="", best=1
        ),
        line(
            "checkpoint",
            11,
            step=2**54,
            path="",
            size_bytes=1,
            save_s=1,
            manifest_sha256="",
            best=False,
        ),
        line("eval", 11, step=1, subject="student", loss=1e200, labelled=1, eval_s=1),
        line("gpu", 11, index=256),
        line("gpu", 11, index=-1),
        line("stranger", 11, t_s=1e11),
        line("device_facts", 11, facts={"a": json.loads("[" * 100 + "]" * 100)}),
        line("stranger", 11, a=json.loads("[" * 300 + "]" * 300)),
        b'{"v":1,"seq":11,"t_s":1,"kind":"stranger","a":' + b"9" * 5000 + b"}\n",
        b'{"v":1,"seq":11,"t_s":1e999,"kind":"phase","name":"x"}\n',
        b"\x00" * 50 + b"\n",
        b"\xff\xfe\n",
        line("step", 11),
    ],
)
def test_a_line_out_of_its_range_is_a_broken_line_and_what_stands_before_it_is_shown(
    run: RunFolder, bad: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run.events.read_bytes()
    run.events.write_bytes(good + bad + line("note", 12, level="info", text="behind"))
    code, out, err = engine("tail", run.path, capsys=capsys)
    assert code == 65 and "step 9/9" in out and "behind" not in out
    assert f"{run.events} @{len(good)} — expected" in err and len(err) < 700
    code, out, _ = engine("diagnose", run.path, capsys=capsys)
    assert code == 65 and "rules could judge" in out
    code, out, _ = engine("runs", run.path.parent, capsys=capsys)
    assert code == 0 and f"@{len(good)}" in out
    with pytest.raises(BrokenLog):
        Follower(run).read_all()


def test_steps_out_of_range_are_refused_on_the_fast_path_too(run: RunFolder) -> None:
    first = run.events.read_bytes().splitlines(keepends=True)[0]
    steps = [encode(step(n), n, 1.0) for n in range(1, 6000)]
    bad = json.loads(steps[500]) | {"loss": 1e200}
    run.events.write_bytes(
        first + b"".join([*steps[:500], json.dumps(bad).encode() + b"\n", *steps[501:]])
    )
    assert LogReader(run.events)._decode_at_once(run.events.read_bytes()) is None
    with pytest.raises(BrokenLog, match=r"<= 1e\+100") as broken:
        LogReader(run.events).poll()
    assert len(broken.value.before) == 501


def test_a_number_beyond_the_range_is_written_as_an_infinite_one(tmp_path: Path) -> None:
    write(tmp_path / "log", [opened(1.0), step(1, loss=1e200, grad_norm=-1e200)])
    found = LogReader(tmp_path / "log").poll()[1]
    assert (found.loss, found.grad_norm) == (float("inf"), float("-inf"))  # type: ignore[union-attr]


def test_a_text_that_is_too_long_for_a_line_is_cut_by_the_writer(tmp_path: Path) -> None:
    write(tmp_path / "log", [opened(1.0), Note(level="info", text="y" * 5_000_000)])
    found = LogReader(tmp_path / "log").poll()[1]
    assert found.text == "y" * 65536 + "… (5,000,000 characters)"  # type: ignore[union-attr]


def test_a_line_that_is_too_long_is_refused_wherever_it_stands(run: RunFolder) -> None:
    good = run.events.read_bytes()
    long = line("note", 11, level="info", text="z" * LONGEST_LINE_BYTES)
    run.events.write_bytes(good + long + line("note", 12, level="info", text="x"))
    reader = LogReader(run.events)
    assert len(reader.poll()) == 11
    with pytest.raises(BrokenLog, match=f"@{len(good)} — expected lines under"):
        reader.poll()


# Regular files only, and nothing waits.


def make(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(os.path.relpath(path))
        bound.close()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_is_no_file_is_named_and_nothing_waits_for_it(
    run: RunFolder, kind: str, log: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(run.path)
    make(getattr(run, log), kind)
    for command in (["tail"], ["tail", "--json"], ["tail", "-f"], ["diagnose"], ["stop"]):
        code, _, err = engine(*command, run.path, capsys=capsys)
        assert code == 65 and f"{log}.jsonl" in err and f"found a {kind}" in err
    code, out, _ = engine("runs", run.path.parent, capsys=capsys)
    assert code == 0 and f"found a {kind}" in out


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
def test_a_receipt_that_is_no_file_is_refused(
    run: RunFolder, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(run.path)
    make(run.receipt, kind)
    code, _, err = engine("evidence", "receipt", run.path, capsys=capsys)
    assert code == 65 and f"found a {kind}" in err


# What is printed.


def test_a_text_of_megabytes_is_cut_on_every_line(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run.events.read_bytes()
    huge = "w" * 900_000
    run.events.write_bytes(
        good
        + line("note", 11, level="info", text=huge)
        + line("phase", 12, name=huge, detail=huge[:9])
        + line("decision", 13, knob=huge[:400_000], choice=huge[:400_000], reason="")
        + line(huge, 14)
        + line("run_finished", 15, state=huge, reason=huge[:9], exit_code=1, step=3)
    )
    for command in (["tail"], ["diagnose"], ["runs"]):
        _, out, err = engine(*command, run.path, capsys=capsys)
        assert len(out) + len(err) < 60_000
    code, out, _ = engine("tail", run.path, "--json", capsys=capsys)
    assert code == 0 and len(out) < 500_000
    assert json.loads(out)["notes"][0]["text"].endswith("(900,000 characters)")


def test_json_of_a_broken_log_is_what_could_be_read_and_says_what_is_wrong(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.events.write_bytes(run.events.read_bytes() + b"no record\n")
    code, out, err = engine("tail", run.path, "--json", capsys=capsys)
    assert code == 65 and "expected a record" in err
    value = json.loads(out)
    assert value["step"] == 9 and "expected a record, found b'no record'" in value["fault"]


def test_json_follows_a_run_line_by_line_to_its_end(run: RunFolder) -> None:
    watch = run.watch
    write(watch, [opened(1.75e9)])
    # Held open as its writer would: the run goes on.
    code = (
        "import fcntl,sys; f=open(sys.argv[1],'ab'); fcntl.flock(f,2); print(flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(watch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdin is not None
    holder.stdout.readline()
    tail = subprocess.Popen(
        [sys.executable, "-m", "engine", "tail", "-f", "--json", str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(60, tail.kill)
    killer.start()
    try:
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline())["state"] == "running"
        with run.events.open("ab") as log:
            log.write(line("note", 11, level="info", text="one \x1b[31m"))
        said = json.loads(tail.stdout.readline())
        assert (said["kind"], said["log"], said["text"]) == ("note", "events", "one \x1b[31m")
        with run.events.open("ab") as log:
            log.write(encode(finished("completed"), 12, 20.0))
        said = json.loads(tail.stdout.readline())
        assert (said["kind"], said["state"]) == ("run_finished", "completed")
        last = json.loads(tail.stdout.readline())
        assert (last["state"], last["fault"]) == ("completed", None)
        assert tail.stdout.read() == "" and tail.wait() == 0
    finally:
        killer.cancel()
        tail.kill()
        tail.communicate()
        holder.communicate(b"\n")


def test_an_end_that_says_the_run_goes_on_is_an_end(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.events.write_bytes(run.events.read_bytes() + encode(finished("running"), 11, 99.0))
    code, out, _ = engine("tail", "-f", run.path, capsys=capsys)
    assert code == 0 and "FAILED" in out


def test_a_log_cannot_have_another_process_stopped(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = (
        "import fcntl,sys; f=open(sys.argv[1],'ab'); fcntl.flock(f,2); print(flush=True); input()"
    )
    wait = "input()"
    with (
        subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE) as victim,
        subprocess.Popen(
            [sys.executable, "-c", hold, str(run.watch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder,
    ):
        assert holder.stdout is not None
        holder.stdout.readline()
        write(run.watch, [opened(1.75e9, pid=victim.pid)])
        code, _, err = engine("stop", run.path, capsys=capsys)
        assert code == 65 and f"process {victim.pid}" in err and victim.poll() is None
        write(run.watch, [opened(1.75e9, pid=holder.pid)])
        code, _, err = engine("stop", run.path, capsys=capsys)
        assert code == 0 and "asked run" in err
        holder.communicate()
        victim.communicate(b"\n")
    assert (victim.returncode, holder.returncode) == (0, -15)
