"""A rank that the others wait for too long is ended and named, and no other is."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.log.beats import read_beats, read_lost_rank
from engine.log.folder import RunFolder
from engine.train.ranks import torchrun
from engine.train.ranks.torchrun import LEEWAY_S, HangWatch
from tests.support.kit import Kit
from tests.support.running import start, wait_for, wait_until_ended


class _Over(Exception):
    """The clock has run for as long as the test wants."""


def _watched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    beats: Callable[[int], list[tuple[int, int]]],
    *,
    limit_s: float = 60.0,
    gap_at: int = -1,
    children: tuple[int, ...] = (11, 12),
    ranks: range = range(9),
) -> tuple[HangWatch, list[int], int]:
    """Runs a watch by a clock of its own; at second t each rank has the (pid, step) in `beats(t)`. The
    watch, the pids that were killed, and when it was over."""
    (folder / "ranks").mkdir(exist_ok=True)
    now, killed = [0], []

    def sleep(_seconds: float) -> None:
        now[0] += 100 if now[0] == gap_at else 1
        if now[0] > 1000:
            raise _Over
        for rank, beat in enumerate(beats(now[0])):
            (folder / "ranks" / f"{rank}.beat").write_bytes(struct.pack("<QQQ", *beat, 0))

    monkeypatch.setattr(torchrun.time, "sleep", sleep)
    monkeypatch.setattr(torchrun.time, "monotonic", lambda: float(now[0]))
    monkeypatch.setattr(torchrun, "_children", lambda: [*children])
    monkeypatch.setattr(torchrun.os, "kill", lambda pid, number: killed.append(pid))
    watch = HangWatch(RunFolder(folder), limit_s, ranks)
    with contextlib.suppress(_Over):
        watch.run()
    return watch, killed, now[0]


def test_a_rank_that_others_wait_for_is_ended_when_the_limit_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beats(second: int) -> list[tuple[int, int]]:
        return [(11, min(second, 30)), (12, min(second, 29))]

    watch, killed, over = _watched(tmp_path, monkeypatch, beats)
    assert killed == [12] and over == 30 + 60
    assert watch.sentence == (
        "rank 1 (process 12) has not done step 30; 1 of 2 wait for it, for 60 s"
    )


def test_a_rank_of_another_host_is_left_to_the_agent_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beats(second: int) -> list[tuple[int, int]]:
        # Processes of two hosts may have the same number.
        return [(12, min(second, 30)), (12, min(second, 29))]

    watch, killed, _ = _watched(tmp_path, monkeypatch, beats, ranks=range(1))
    assert killed == [] and watch.sentence is None
    _, killed, over = _watched(tmp_path, monkeypatch, beats, ranks=range(1, 2))
    assert killed == [12] and over == 30 + 60


def test_ranks_that_are_level_or_only_slow_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def level(second: int) -> list[tuple[int, int]]:
        return [(11, 7), (12, 7)]

    def slow(second: int) -> list[tuple[int, int]]:
        return [(11, 1 + second // 50), (12, second // 50)]

    for beats in (level, slow):
        watch, killed, over = _watched(tmp_path, monkeypatch, beats)
        assert killed == [] and watch.sentence is None and over > 1000


def test_a_watch_that_was_stopped_itself_counts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, killed, over = _watched(tmp_path, monkeypatch, lambda second: [(11, 3), (12, 2)], gap_at=20)
    assert killed == [12] and over == 120 + 60


def test_a_process_that_is_no_rank_of_ours_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, killed, _ = _watched(tmp_path, monkeypatch, lambda second: [(11, 3), (99, 2)])
    assert killed == [] and watch.sentence is not None


@pytest.mark.soak  # a collective waits no less than 10 s
def test_a_stopped_rank_ends_the_run_with_its_name(kit: Kit, tmp_path: Path) -> None:
    quiet = dict(train__steps=100_000, train__rows=2, checkpoint__every=0, eval__every=0)
    spec = kit.spec(tmp_path, compute__collective_timeout_s=10, **quiet)
    launched: subprocess.Popen[str] = start("distill", spec, "--gpus", 2, "--out", tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    wait_for(run.path, lambda view: view.last_step >= 3)
    victim = read_beats(run)[1]
    os.kill(victim.pid, signal.SIGSTOP)
    _, stderr = launched.communicate(timeout=240 + LEEWAY_S)
    ended = wait_until_ended(run.path)
    lost = read_lost_rank(run)
    assert lost is not None and (lost.rank, lost.pid) == (1, victim.pid), stderr
    assert "rank 1" in lost.sentence and "wait" in lost.sentence
    assert ended.view.exit is not None and "rank 1" in ended.view.exit.sentence
