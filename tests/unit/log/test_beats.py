"""Beats name the rank that the others wait for, and a broken file is "not known"."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.log.beats import (
    Beat,
    BeatWriter,
    LostRank,
    behind,
    forget,
    log_of,
    read_beats,
    read_lost_rank,
    waited_for,
    write_lost_rank,
)
from engine.log.folder import RunFolder


def test_a_beat_is_read_back_as_it_was_last_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    writers = [BeatWriter(run, rank) for rank in range(3)]
    for writer, step in zip(writers, (7, 1 << 40, 0), strict=True):
        writer.write(step)
        for _ in range(step % 8):
            writer.entering()
        writer.close()
    found = [(7, 7), (1 << 40, 0), (0, 0)]
    assert read_beats(run) == [Beat(rank, os.getpid(), *at) for rank, at in enumerate(found)]


def test_a_torn_or_foreign_file_is_no_beat(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    BeatWriter(run, 0).close()
    (tmp_path / "ranks" / "1.beat").write_bytes(b"half")
    (tmp_path / "ranks" / "x.beat").write_bytes(bytes(24))
    assert [beat.rank for beat in read_beats(run)] == [0]


def test_a_run_of_one_process_has_no_beats(tmp_path: Path) -> None:
    assert read_beats(RunFolder(tmp_path)) == [] and waited_for([]) is None
    assert read_lost_rank(RunFolder(tmp_path)) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_who_is_behind_are_exactly_those_with_less_than_the_most(steps: list[int]) -> None:
    beats = [Beat(rank, 100 + rank, step) for rank, step in enumerate(steps)]
    late = {beat.rank for beat in behind(beats)}
    assert late == {rank for rank, step in enumerate(steps) if step < max(steps)}
    assert (waited_for(beats) is None) == (not late)


def test_the_words_name_rank_process_step_and_how_many_wait() -> None:
    beats = [Beat(0, 10, 41), Beat(1, 11, 40), Beat(2, 12, 41)]
    assert waited_for(beats) == "rank 1 (process 11) has not done step 41; 2 of 3 wait for it"


def test_within_a_step_who_has_entered_fewer_collectives_is_waited_for() -> None:
    beats = [Beat(0, 10, 40, 900), Beat(1, 11, 40, 899)]
    assert waited_for(beats) == "rank 1 (process 11) has not done step 41; 1 of 2 wait for it"
    assert waited_for([Beat(0, 10, 40, 900), Beat(1, 11, 41, 899)]) == (
        "rank 0 (process 10) has not done step 41; 1 of 2 wait for it"
    )


def test_a_new_session_forgets_beats_and_the_lost_rank_but_no_log(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    BeatWriter(run, 1).close()
    lost = LostRank(rank=1, pid=5, returncode=-9, sentence="rank 1 was ended by SIGKILL")
    write_lost_rank(run, lost)
    log_of(run, 1).write_text("a line\n")
    assert read_lost_rank(run) == lost and log_of(run, 0) == run.events
    forget(run, range(9), 9)
    assert read_beats(run) == [] and read_lost_rank(run) is None
    assert log_of(run, 1).read_text() == "a line\n"
