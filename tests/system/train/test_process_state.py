"""What the process of a run does that nobody asked for, and is told of once."""

from __future__ import annotations

import dataclasses
import gc
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.log.events import MemoryMeasured
from engine.log.follow import Follower
from engine.log.table import HOST_FIELDS, STEP_FIELDS, Table
from engine.log.view import RunView
from engine.train import process_state
from engine.train.beside import hashed_slowly
from engine.train.process_state import (
    COLLECTED_STEPS,
    ProcessState,
    pace_told_wrongly,
    peak_told_wrongly,
)
from engine.train.trainer import Trainer
from engine.watch.stacks import Looks, look_at
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit


def test_what_torch_was_set_to_is_quiet_and_each_change_is_told_once() -> None:
    state = ProcessState(torch.get_num_threads(), deterministic=False)
    assert [*state.look()] == []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        with pytest.warns(UserWarning), torch.autograd.detect_anomaly(check_nan=False):
            told = [*state.look()]
        assert [text.partition(" is to be")[0] for text in told] == [
            "anomaly detection",
            "compute.threads",
        ]
        torch.set_num_threads(before + 2)
        assert [*state.look()] == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("taken", [None, 1])
def test_a_run_tells_of_another_number_of_threads_than_was_decided(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int | None
) -> None:
    exact, before = torch.set_num_threads, torch.get_num_threads()
    try:
        if taken is not None:
            monkeypatch.setattr(torch, "set_num_threads", lambda _, n=taken: exact(n))
        run, code = carried_out(kit, tmp_path, compute__threads=2)
    finally:
        exact(before)
    notes = [note for note in Follower(run).read_all().notes if "torch computes with" in note.text]
    assert code == 0 and [note.level for note in notes] == ([] if taken is None else ["error"])


@contextmanager
def polling(name: str) -> Iterator[threading.Thread]:
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            pass

    thread = threading.Thread(target=poll, name=name)
    thread.start()
    try:
        yield thread
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(("name", "told"), [("poll", True), ("hash of a model", False)])
def test_a_thread_that_takes_a_cpu_beside_the_steps_is_told_of_and_one_that_works_for_them_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, told: bool
) -> None:
    monkeypatch.setattr(process_state, "BUSY_S", -1e9)
    used = 0.0

    def at_its_own_time(pid: int) -> Looks:
        # The thread's CPU time is the clock, so that a busy machine does not matter.
        found = look_at(pid)
        return dataclasses.replace(found, at_s=found.threads[thread.native_id or 0].cpu_s)

    monkeypatch.setattr(process_state, "look_at", at_its_own_time)
    with polling(name) as thread:
        state = ProcessState(torch.get_num_threads(), deterministic=False)
        begun_s = used = at_its_own_time(os.getpid()).at_s
        while used < begun_s + 0.2:
            used = at_its_own_time(os.getpid()).at_s
        assert any(f"the thread {name} takes" in text for text in state.look()) == told


def sampled(cpu_pct: float | None, begun_s: float, seconds: int) -> RunView:
    """A log with a sample of each second since then."""
    rows = [
        {"unix_s": begun_s + second, "trainer_cpu_pct": cpu_pct} for second in range(seconds + 1)
    ]
    return RunView(hosts=Table(HOST_FIELDS).extended(rows))


@pytest.mark.parametrize(
    ("cpu_pct", "told"),
    [(150.0, False), (110.0, False), (None, False), (0.0, True), (5.0, True), (2000.0, True)],
)
def test_samples_that_do_not_add_up_to_the_cpu_time_are_told(
    monkeypatch: pytest.MonkeyPatch, cpu_pct: float | None, told: bool
) -> None:
    used = SimpleNamespace(ru_utime=100.0, ru_stime=5.0)
    now_s = 1000.0
    monkeypatch.setattr("resource.getrusage", lambda who: used)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("time.time", lambda: now_s)
    # What was used before is nobody's to tell.
    state = ProcessState(torch.get_num_threads(), deterministic=False)
    used, now_s = SimpleNamespace(ru_utime=125.0, ru_stime=10.0), 1022.0
    assert bool(state.cpu_told_wrongly(sampled(cpu_pct, 1000.5, 20))) == told
    assert not state.cpu_told_wrongly(sampled(0.0, 900.0, 20))


@pytest.mark.parametrize(("times", "told"), [(1.0, False), (0.5, True), (2.0, True)])
def test_a_peak_of_memory_that_is_another_by_getrusage_is_told(times: float, told: bool) -> None:
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = MemoryMeasured(
        step=1,
        measured_bytes=None,
        predicted_bytes=1.0,
        source="",
        host_peak_bytes=times * peak,
    )
    assert bool(peak_told_wrongly(RunView(memory_peak=said))) == told
    assert not peak_told_wrongly(RunView())


@pytest.mark.parametrize(("pace", "told"), [(200.0, False), (None, False), (400.0, True)])
def test_a_pace_that_is_not_tokens_over_time_is_told(pace: float | None, told: bool) -> None:
    steps = Table(STEP_FIELDS).extended(
        [{"step": 1.0, "tokens": 100.0, "step_s": 0.5, "tokens_per_s": pace}]
    )
    assert bool(pace_told_wrongly(RunView(steps=steps))) == told


@pytest.mark.parametrize("spoilt", [False, True])
def test_what_is_set_within_steps_alone_is_told(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    exact = Trainer._forward_backward

    def profiled(*given: Any) -> Any:
        with torch.autograd.profiler.profile(), sdpa_kernel(SDPBackend.MATH):
            found = exact(*given)
        gc.collect()
        return found

    if spoilt:
        monkeypatch.setattr(Trainer, "_forward_backward", profiled)
    run, code = carried_out(kit, tmp_path, train__steps=COLLECTED_STEPS + 1, train__warmup_steps=2)
    told = [note.text for note in Follower(run).read_all().notes if note.level == "error"]
    words = (
        "autograd's profiler",
        "attention by flash",
        "attention by memory",
        "attention by cuDNN",
    )
    assert code == 0
    for begin in (*words, "all objects of Python"):
        assert [text.startswith(begin) for text in told].count(True) == spoilt, told


def test_a_hash_that_takes_many_times_its_bytes_is_told() -> None:
    assert not hashed_slowly(1 << 20, 0.01)
    assert not hashed_slowly(1 << 40, 0.4)
    assert "something else is done to its bytes" in hashed_slowly(1 << 20, 2.0)
