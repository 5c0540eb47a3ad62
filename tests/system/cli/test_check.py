"""`engine distill SPEC --check`: what two real steps took, or why not; and nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

import engine
from engine.cli import first_steps
from engine.plan import data_size
from tests.support import running
from tests.support.kit import Kit
from tests.support.running import DEADLINE_S, engine_here, environment


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, and the folder for temporary files, both empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return scratch


SAMPLED_BYTES = 1 << 17
"""Bytes of a large corpus that are read here, instead of megabytes."""


def nothing_is_left(scratch: Path) -> bool:
    return not list(scratch.iterdir()) and not list(Path.cwd().iterdir())


@pytest.mark.usefixtures("trainer_here")
def test_time_and_memory_are_those_of_the_second_step(
    kit: Kit, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (data_size, first_steps):
        monkeypatch.setattr(module, "SAMPLED_BYTES", SAMPLED_BYTES)
    line = (kit.corpus / "part_00.py").read_text()
    records = (json.dumps({"text": f"# {i}\n{line}"}) + "\n" for i in range(400))
    large = tmp_path / "large.jsonl"
    large.write_text("".join(records))
    spec = kit.spec(tmp_path, data__corpus=str(large), train__steps=500)
    done = engine_here("distill", spec, "--check", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["first_steps"]
    assert (found["device"], found["failed"], found["exit_code"]) == ("cpu", "", 0)
    assert found["text_bytes"] == SAMPLED_BYTES < large.stat().st_size
    step, whole = found["step_s"], found["total_s"]
    assert step["source"] == "step 2, after one that warms up" and step["value"] > 0
    assert whole["value"] == pytest.approx(500 * step["value"])
    # The trainer holds torch, and this model of 30 thousand parameters.
    assert 50 << 20 < found["host_peak_bytes"]["value"] < 8 << 30
    assert found["device_peak_bytes"]["value"] is None
    assert found["device_peak_bytes"]["absent"] == "torch keeps no peak of CPU memory"
    said = done.stderr.splitlines()[-4:]
    assert said[0].startswith("a step: ") and said[1].startswith("all 500 steps: ")
    assert all(line.startswith("memory at the peak, ") for line in said[2:])
    assert nothing_is_left(scratch)


@pytest.mark.parametrize(
    ("sets", "code", "says"),
    [
        (("memory.limit_gib=0.0001",), 65, "expected a run that fits in 104.9 KiB"),
        (("train.lr=1e30", "train.warmup_steps=0"), 1, "is nan at step 2"),
    ],
    ids=["memory", "NaN"],
)
def test_a_spec_whose_first_steps_fail_is_not_sound(
    kit: Kit, tmp_path: Path, scratch: Path, sets: tuple[str, ...], code: int, says: str
) -> None:
    flags = [word for one in sets for word in ("--set", one)]
    spec = kit.spec(tmp_path)
    done = running.engine("distill", spec, "--check", *flags, "--json")
    assert done.returncode == code, done.stderr
    last = [line for line in done.stderr.splitlines() if not line.startswith("hint: ")][-1]
    assert last.startswith(f"{spec}: its first steps fail: ") and says in last
    found = json.loads(done.stdout)["first_steps"]
    assert found["failed"] and found["exit_code"] == code
    assert found["step_s"]["value"] is found["total_s"]["value"] is None
    assert nothing_is_left(scratch)


@pytest.mark.usefixtures("trainer_here")
@pytest.mark.parametrize(
    ("corpus", "settings", "fails", "said"),
    [
        ("words", (), False, "teacher: cross entropy"),
        ("noise", (), True, "teacher_knows_text stops the run"),
        pytest.param(
            *("noise", ("checks.on_fail=report",), False, "guessing at random gives"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "noise", ("checks.skip=teacher_knows_text",), False, "", marks=pytest.mark.soak
        ),
    ],
)
def test_a_text_that_the_teacher_does_not_know_is_found_before_the_run(
    tmp_path: Path,
    corpus: str,
    settings: tuple[str, ...],
    fails: bool,
    said: str,
) -> None:
    """The demo's teacher knows small talk; its guesses on code are worse than none."""
    demo = Path(engine.__file__).parent / "demo"
    noise = tmp_path / "noise.txt"
    noise.write_text("\n".join(f"0x{i:04x}|{i * 7919 % 65521:016b}~" for i in range(4000)))
    where = demo / "chats.jsonl" if corpus == "words" else noise
    path = tmp_path / "spec.toml"
    path.write_text(
        f'[teacher]\npath = "{demo / "chat"}"\n[student]\nconfig = "{demo / "chat/student.json"}"\n'
        f'[data]\ncorpus = "{where}"\nseq_len = 64\n[train]\nsteps = 4\nrows = 2\n[eval]\nrows = 8\n'
        '[compute]\ndevice = "cpu"\nthreads = 1\n'
    )
    sets = [word for one in settings for word in ("--set", one)]
    for words in (["distill", path, "--check"], ["data", path, "--samples", "0", "--ask-teacher"]):
        done = engine_here(*words, *sets)
        assert done.returncode == int(fails), done.stderr
        text = done.stdout + done.stderr
        assert said in text and ("stops the run" in text) == fails
    assert "teacher: not tested on this text" in engine_here("data", path, "--samples", "0").stdout


def test_without_the_device_time_and_memory_are_unknown(
    kit: Kit, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = engine_here("distill", kit.spec(tmp_path, compute__device="cuda"), "--check")
    assert done.returncode == 2, done.stderr
    assert "the spec and its inputs are sound" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("time and memory: unknown: compute.device: cuda — expected a GPU")
    assert nothing_is_left(scratch)


def test_the_inputs_alone_are_checked_without_torch_or_another_process(
    kit: Kit, tmp_path: Path, scratch: Path
) -> None:
    program = (
        "import sys, subprocess; from engine.cli.main import main; subprocess.Popen = None; "
        "code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = ["distill", str(kit.spec(tmp_path)), "--check-inputs", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == {
        *("schema", "spec_sha256", "spec", "data", "engines", "notes")
    }
    assert nothing_is_left(scratch)


def test_a_run_to_resume_is_not_started_by_a_check(tmp_path: Path) -> None:
    for flag in ("--check", "--check-inputs"):
        done = engine_here("distill", "--resume", tmp_path, flag)
        assert done.returncode == 64 and "--resume continues a run" in done.stderr


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in "ZX"
    except OSError:
        return False


def test_an_interrupt_ends_the_steps_at_once(kit: Kit, tmp_path: Path, scratch: Path) -> None:
    # A step that sleeps far longer than anybody waits.
    spec = kit.spec(tmp_path, compute__slow_by=10.0, train__rows=256, train__accumulation=512)
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", "distill", str(spec), "--check"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        # Where the tests run in the background the signal is ignored, and would stay so.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        pids: list[int] = []
        while not pids:
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
            for log in scratch.glob("*/run/events.jsonl"):
                with contextlib.suppress(OSError):
                    text = log.read_text()
                    if '"name":"training"' in text:
                        first = [json.loads(text.splitlines()[0])]
                        watch = (log.parent / "watch.jsonl").read_text().splitlines()
                        pids = [one["pid"] for one in [*first, json.loads(watch[0])]]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130 and "Traceback" not in stderr, stderr
        assert len(pids) == 2
        while any(map(is_alive, pids)) or not nothing_is_left(scratch):
            assert time.monotonic() < deadline_s, (pids, list(scratch.rglob("*")))
            time.sleep(0.02)
    finally:
        for pid in [process.pid, *filter(is_alive, pids)]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
