"""A signal at a moment drawn from a seed, through every phase of every command that takes long."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.kit import Kit
from tests.support.running import DEADLINE_S, environment

pytestmark = [pytest.mark.attack, pytest.mark.soak]
WITHIN_S = 4.0
"""Two seconds, and as much again for a machine that other tests keep busy."""
MARK = "APR_ATTACK_MARK"
COMMANDS = {
    "distill": ("distill", "SPEC", "--out", "OUT/run"),
    "check": ("distill", "SPEC", "--check"),
    "prepare": ("prepare", "SPEC", "--out", "OUT/store"),
    "convert": ("convert", "TEACHER", "OUT/m.gguf", "--quant", "f32"),
    "convert-apr": ("convert", "TEACHER", "OUT/m.apr", "--quant", "f32"),
    "convert-hf": ("convert", "TEACHER", "OUT/m", "--quant", "bf16", "--format", "safetensors"),
    "flip": ("flip", "SPEC", "--set", "train.lr=1e-4", "--out", "OUT/flip", "--controls", "skip"),
    "gate": ("gate", "SPEC"),
    "generate": ("generate", "TEACHER", "--prompt", "def f"),
}
LATEST_S = 6.0
HALF_WRITTEN = (".partial", ".publish", ".new")


def marked_pids(mark: str) -> list[int]:
    """All processes that were started with this mark in their environment, and still run."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with contextlib.suppress(OSError):
                state = (path / "stat").read_text().rpartition(") ")[2][:1]
                marks = (path / "environ").read_bytes().split(b"\0")
                if state not in "ZX" and f"{MARK}={mark}".encode() in marks:
                    found.append(int(path.name))
    return found


def marked(mark: str) -> list[str]:
    """Their command lines."""
    found = []
    for pid in marked_pids(mark):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_at_any_moment_ends_a_command_and_leaves_nothing_of_it(
    kit: Kit, tmp_path: Path, name: str, seed: int
) -> None:
    draw = random.Random(f"{name} {seed}")
    number = draw.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    out = tmp_path / "out"
    out.mkdir()
    # Far more steps than there is time for: what is ended is never a run that has finished.
    words = {
        "SPEC": kit.spec(tmp_path, train__steps=100000),
        "TEACHER": kit.teacher,
    }
    arguments = [
        str(words.get(one, one)).replace("OUT", str(out)) if one != "OUT" else str(out)
        for one in COMMANDS[name]
    ]
    mark = f"{os.getpid()}-{name}-{seed}"
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {MARK: mark},
        cwd=tmp_path,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.0, LATEST_S))
        ended_by_itself = process.poll() is not None
        training = '"name":"training"' in _text(out / "run" / "events.jsonl")
        begun = time.monotonic()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
        took_s = time.monotonic() - begun
        assert "Traceback" not in stderr, stderr
        if ended_by_itself:
            return
        hung_up = number == signal.SIGHUP and (out / "run").exists()
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        # One that was about to end may end by itself; a flip says that it was interrupted.
        assert code in (128 + number, 0, 2, 130), (code, stdout, stderr)
        if not training and name != "flip":
            assert took_s < WITHIN_S, (took_s, stderr)
        if hung_up:
            # A closed terminal leaves a run going, by promise; one that has hardly begun has nobody to stop yet.
            stop = [sys.executable, "-m", "engine", "stop", "--now", str(out / "run")]
            by_s = time.monotonic() + DEADLINE_S
            while subprocess.run(stop).returncode and marked(mark) and time.monotonic() < by_s:
                pass
        deadline = time.monotonic() + (DEADLINE_S if hung_up else WITHIN_S)
        while left := marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        # A run that outlives its command by promise must not outlive a test that fails.
        for left in marked_pids(mark):
            with contextlib.suppress(OSError):
                os.kill(left, signal.SIGKILL)
    half = [path for path in out.rglob("*") if any(word in path.name for word in HALF_WRITTEN)]
    assert not half, half


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
