"""What a silent process is doing, asked of real ones: spinning, deadlocked, stopped, reading."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.log.events import StackDump
from engine.machine.surroundings import find_command
from engine.watch import stacks
from engine.watch.stacks import (
    FOLDER,
    TRAINER_FILE,
    Capture,
    ProcessSample,
    Thread,
    compare,
    native_frame,
    own_frame,
    read_dump,
    sample_threads,
    takes_signal,
)
from tests.support.running import environment

DEADLINE_S = 120.0

PLAY = """
import os, sys, threading, time
from pathlib import Path
from engine.watch.stacks import register
if sys.argv[2] == "register":
    register(Path(sys.argv[1]))

def spin():
    print("ready", flush=True)
    while True:
        pass

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()

def read_pipe():
    end = os.pipe()[0]
    print("ready", flush=True)
    os.read(end, 1)

def sleep():
    print("ready", flush=True)
    time.sleep(3600)

def compile_a_kernel_and_spin():
    import torch
    from engine.kernels.dequantize_triton import variant
    from engine.kernels.registry import KernelRegistry
    from engine.quant.blocks import BLOCK_TYPES
    KernelRegistry(arch=90).get_or_compile(variant(BLOCK_TYPES["Q4_K"], torch.bfloat16))
    spin()

def main_waits_for_a_worker():
    worker = threading.Thread(target=spin, daemon=True)
    worker.start()
    worker.join()

globals()[sys.argv[3]]()
"""


def wait_until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def wait_until_ready(capture: Capture) -> None:
    """Wait for py-spy, where it is installed."""
    wait_until(lambda: capture.is_ready(time.monotonic()), "py-spy hangs")


class Play:
    """A process that does one thing for ever."""

    def __init__(self, run: Path, act: str, *, registered: bool = True) -> None:
        self.run = run
        word = "register" if registered else "not"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PLAY, str(run), word, act],
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def main(self, before: ProcessSample) -> Thread:
        return compare(before, sample_threads(self.pid))[0]

    def wait_for_state(self, state: str) -> None:
        before = sample_threads(self.pid)
        wait_until(lambda: self.main(before).state == state, f"never {state}: {self.main(before)}")

    def capture(self, *, answered: bool = True) -> StackDump:
        """Begin, wait for the dump and for time to have passed, finish."""
        capture = Capture(run=self.run, pid=self.pid, name="x", why="silent for 60 s in training")
        file = self.run / FOLDER / TRAINER_FILE
        size = file.stat().st_size if file.exists() else 0
        capture.begin()
        begun_s = time.monotonic()
        # CPU time is counted in ticks of 10 ms: a share needs some of them.
        wait_until(lambda: time.monotonic() > begun_s + 0.2, "time stands still")
        if answered:
            wait_until(lambda: "in <module>\n" in file.read_text()[size:], "no dump was written")
        wait_until_ready(capture)
        return capture.finish()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., Play]]:
    plays: list[Play] = []

    def begin(act: str, **options: bool) -> Play:
        plays.append(Play(tmp_path, act, **options))
        return plays[-1]

    yield begin
    for one in plays:
        one.end()


def test_a_spinning_process_computes_and_its_line_is_named(play: Callable[..., Play]) -> None:
    one = play("spin")
    one.wait_for_state(stacks.COMPUTING)
    dump = one.capture()
    assert dump.state == "computing" and "% CPU" in dump.summary
    assert dump.python_frame.endswith("in spin") and dump.python_frame in dump.summary
    assert dump.python_stack[1].endswith("in <module>")
    assert one.process.poll() is None, "the process that was looked at must live"


def test_a_deadlock_waits_for_a_lock_and_its_line_is_named(play: Callable[..., Play]) -> None:
    one = play("deadlock")
    one.wait_for_state(stacks.LOCK)
    dump = one.capture()
    assert dump.state == "waiting for a lock"
    native = "futex" if find_command("py-spy").absent else "PyThread_acquire_lock_timed"
    assert dump.native_frame.startswith(native)
    assert dump.python_frame.endswith("in deadlock") and "other threads compute" not in dump.summary
    assert one.process.poll() is None


@pytest.mark.soak
def test_stacks_are_taken_of_a_process_in_which_llvm_took_its_signals(
    play: Callable[..., Play], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    # Nothing on disk, so that the compiler runs in the process itself.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    one = play("compile_a_kernel_and_spin")
    assert one.capture().python_frame.endswith("in spin")


@pytest.mark.parametrize(
    ("act", "state"), [("read_pipe", stacks.READING), ("sleep", stacks.SLEEPING)]
)
def test_a_system_call_that_waits_is_told_from_another(
    play: Callable[..., Play], act: str, state: str
) -> None:
    one = play(act)
    one.wait_for_state(state)
    dump = one.capture()
    assert dump.state == state and dump.python_frame.endswith(f"in {act}")
    # A signal interrupts the call; Python goes back into it.
    one.wait_for_state(state)


def test_a_stopped_process_gets_no_signal_and_the_word_for_going_on(
    play: Callable[..., Play],
) -> None:
    one = play("spin")
    os.kill(one.pid, signal.SIGSTOP)
    one.wait_for_state(stacks.STOPPED)
    dump = one.capture(answered=False)
    assert dump.state == "stopped by a signal" and f"kill -CONT {one.pid}" in dump.summary
    assert dump.python_frame == "" and any("takes no signal" in text for text in dump.missing)
    os.kill(one.pid, signal.SIGCONT)
    one.wait_for_state(stacks.COMPUTING)
    assert "  File " not in (one.run / FOLDER / TRAINER_FILE).read_text()


def test_stacks_of_an_earlier_look_are_not_taken_for_those_of_this_one(
    play: Callable[..., Play],
) -> None:
    one = play("spin")
    assert one.capture().python_frame.endswith("in spin")
    os.kill(one.pid, signal.SIGSTOP)
    one.wait_for_state(stacks.STOPPED)
    later = one.capture(answered=False)
    assert later.python_frame == "" and later.python_stack == []


def test_a_busy_worker_behind_a_waiting_main_thread_is_seen(play: Callable[..., Play]) -> None:
    one = play("main_waits_for_a_worker")
    one.wait_for_state(stacks.LOCK)
    dump = one.capture()
    assert dump.state == "waiting for a lock"
    assert "1 other threads compute" in dump.summary
    assert "main_waits_for_a_worker" in " ".join(dump.python_stack)


def test_a_process_without_the_handler_is_not_ended_by_the_look(play: Callable[..., Play]) -> None:
    one = play("sleep", registered=False)
    assert not takes_signal(one.pid)
    one.wait_for_state(stacks.SLEEPING)
    dump = one.capture(answered=False)
    assert any("no handler for the signal" in text for text in dump.missing)
    assert one.process.poll() is None and dump.state == "sleeping"


def test_the_file_holds_all_of_it_and_what_could_not_be_had(play: Callable[..., Play]) -> None:
    one = play("deadlock")
    one.wait_for_state(stacks.LOCK)
    dump = one.capture()
    text = (one.run / dump.path).read_text()
    assert text.startswith("silent for 60 s in training\n")
    assert "waiting for a lock" in text and "in deadlock" in text
    assert all(f"missing: {missing}" in text for missing in dump.missing)


def test_a_second_look_shows_the_second_stack(play: Callable[..., Play]) -> None:
    one = play("spin")
    first, second = one.capture(), one.capture()
    assert first.python_frame.endswith("in spin") and second.python_frame.endswith("in spin")
    text = (one.run / FOLDER / TRAINER_FILE).read_text()
    assert text.count("Current thread") == 2 and text.count("main thread") == 1


def test_a_process_that_has_ended_is_said_to_have(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    capture = Capture(run=tmp_path, pid=child.pid, name="x", why="w")
    capture.begin()
    wait_until_ready(capture)
    dump = capture.finish()
    assert (dump.state, dump.summary) == ("ended", "the process has ended")


TWO_DUMPS = """main thread 0x00007f0000000001
Thread 0x00007f0000000002 (most recent call first):
  File "/a/old.py", line 1 in worker

Current thread 0x00007f0000000001 (most recent call first):
  File "/a/old.py", line 2 in old
Thread 0x00007f0000000002 (most recent call first):
  File "/a/queue.py", line 171 in get

Current thread 0x00007f0000000001 (most recent call first):
  File "/site-packages/torch/nn/functional.py", line 2510 in rms_norm
  File "/x/engine/models/decoder.py", line 88 in norm
  File "/x/engine/teachers/frozen.py", line ??? in hidden
"""


def test_the_newest_dump_and_the_main_thread_are_read() -> None:
    stacks = read_dump(TWO_DUMPS, "0x00007f0000000001")
    assert stacks is not None and stacks.others == 1
    assert stacks.main[0] == "/site-packages/torch/nn/functional.py:2510 in rms_norm"
    assert own_frame(stacks.main) == "/x/engine/models/decoder.py:88 in norm"
    assert stacks.main[2].endswith(":??? in hidden")
    other = read_dump(TWO_DUMPS, "0x00007f0000000002")
    assert other is not None and other.main == ("/a/queue.py:171 in get",)
    assert read_dump("nothing here", None) is None


def test_the_native_frame_is_that_of_the_main_thread() -> None:
    text = (
        "Process 7: python\nPython v3.11.7\n\n"
        'Thread 9 (idle): "worker"\n    wait (threading.py:320)\n'
        'Thread 7 (active): "MainThread"\n    cuStreamSynchronize (libcuda.so.580)\n    step (t.py:9)\n'
    )
    assert native_frame(text) == "cuStreamSynchronize (libcuda.so.580)"
    # A library without symbols: the innermost frame that has a name says more than an address.
    bare = "    0x7feffeea3f16 (libc.so.6)\n    0x7feffeeaed90 (libc.so.6)\n"
    nameless = text.replace('"MainThread"\n', '"MainThread"\n' + bare)
    assert native_frame(nameless) == "cuStreamSynchronize (libcuda.so.580)"
    assert native_frame(f'Thread 7 (idle): "MainThread"\n{bare}') == "0x7feffeea3f16 (libc.so.6)"
    assert native_frame("Error: Permission denied") == ""


class Recorded:
    """One thread in a folder that stands in for /proc."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 10.0
        (root / "5/task/5").mkdir(parents=True)

    def look(
        self, letter: str, ticks: int, wchan: str = "0", *, after_s: float = 1.0
    ) -> ProcessSample:
        folder = self.root / "5/task/5"
        (folder / "stat").write_text(
            f"5 (a) b) {letter} {' '.join(['0'] * 10)} {ticks} 0 0 0 20 0 1 0 5 1 1\n"
        )
        (folder / "wchan").write_text(wchan)
        self.now_s += after_s
        return sample_threads(5, self.root, lambda: self.now_s)


@pytest.mark.parametrize(
    ("letter", "ticks", "kernel", "state"),
    [
        ("T", 0, "futex_do_wait", stacks.STOPPED),
        ("t", 0, "futex_do_wait", stacks.STOPPED),
        ("D", 0, "folio_wait_bit", stacks.UNINTERRUPTIBLE),
        ("Z", 0, "do_exit", stacks.ENDED),
        ("R", 0, "0", stacks.COMPUTING),
        # Asleep at the moment of the look, but more than half a core in between.
        ("S", 60, "futex_wait_queue", stacks.COMPUTING),
        ("S", 40, "futex_wait_queue_me", stacks.LOCK),
        ("S", 0, "poll_schedule_timeout.constprop.0", stacks.INPUT),
        ("S", 0, "do_epoll_wait", stacks.INPUT),
        ("S", 0, "anon_pipe_read", stacks.READING),
        ("S", 0, "do_wait", stacks.CHILD),
        ("S", 0, "inet_csk_accept", stacks.WAITING),
        ("S", 0, "0", stacks.WAITING),
    ],
)
def test_states_of_a_recorded_thread(
    tmp_path: Path, letter: str, ticks: int, kernel: str, state: str
) -> None:
    machine = Recorded(tmp_path)
    before = machine.look("S", 0)
    (thread,) = compare(before, machine.look(letter, ticks, kernel))
    assert (thread.name, thread.state) == ("a) b", state)
    assert thread.cpu_pct == pytest.approx(float(ticks))
    assert thread.kernel.value == (None if kernel == "0" else kernel)


@pytest.mark.parametrize(("after_s", "pct"), [(0.0004, None), (0.04, None), (0.0625, 16.0)])
def test_one_tick_between_two_quick_looks_makes_no_waiting_thread_a_busy_one(
    tmp_path: Path, after_s: float, pct: float | None
) -> None:
    machine = Recorded(tmp_path)
    before = machine.look("S", 20, "futex_do_wait")
    (thread,) = compare(before, machine.look("S", 21, "futex_do_wait", after_s=after_s))
    assert (thread.state, thread.cpu_pct) == (stacks.LOCK, pytest.approx(pct))


def test_a_function_that_may_not_be_read_is_a_reason(tmp_path: Path) -> None:
    machine = Recorded(tmp_path)
    assert machine.look("S", 0).threads[5].kernel.absent == "the kernel does not show it"
    (tmp_path / "5/task/5/wchan").unlink()
    (tmp_path / "5/task/5/wchan").mkdir()
    found = sample_threads(5, tmp_path).threads[5]
    assert found.kernel.absent is not None and "not readable" in found.kernel.absent


def test_the_watching_half_loads_without_torch() -> None:
    code = (
        "import sys, engine.watch.watcher, engine.watch.stacks, engine.watch.replay\n"
        "print([m for m in ('torch', 'numpy', 'pynvml', 'textual') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
