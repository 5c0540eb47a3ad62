"""Which collective ranks hang in, from recordings as torch writes them; the real ones are in tests/gpu."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.watch import flight_recorder
from engine.watch.flight_recorder import FOLDER, ask, has_answered, read, sentence, variables


def entry(
    number: int,
    name: str = "all_reduce",
    size: int = 1000,
    state: str = "completed",
    group: str = "0",
) -> dict[str, Any]:
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": f"nccl:{name}",
        "input_sizes": ((size,),),
        "input_dtypes": ["Float"],
        "state": state,
        "frames": [
            {"filename": "/x/site-packages/torch/distributed/c10d.py", "line": 9, "name": name},
            {"filename": "/home/me/train.py", "line": 40 + number, "name": "step"},
        ],
    }


def recorded(run: Path, rank: int, *entries: dict[str, Any], world: int = 2) -> None:
    (run / FOLDER).mkdir(exist_ok=True)
    config = {"0": {"desc": "default_pg", "ranks": str(list(range(world)))}}
    whole = {"version": "2.9", "pg_config": config, "entries": list(entries)}
    (run / FOLDER / f"rank-{rank}").write_bytes(pickle.dumps(whole))


def said(run: Path) -> str:
    traces, refused = read(run, 0.0)
    assert not refused
    return sentence(traces)


def test_the_rank_that_has_not_entered_a_collective_is_named_with_its_last_one(
    tmp_path: Path,
) -> None:
    recorded(tmp_path, 0, entry(3), entry(4, state="started"))
    recorded(tmp_path, 1, entry(3))
    assert said(tmp_path) == (
        "rank 1 has not entered all_reduce(Float [1000]), number 4, in which rank 0 waits at "
        "/home/me/train.py:44 in step; its last was all_reduce(Float [1000]) at /home/me/train.py:43 in step"
    )


def test_collectives_that_differ_are_named_with_both_lines(tmp_path: Path) -> None:
    recorded(tmp_path, 0, entry(4, state="started"))
    recorded(tmp_path, 1, entry(4, "broadcast", state="scheduled"))
    text = said(tmp_path)
    assert text.startswith("ranks differ in collective 4: rank 0 is in all_reduce(Float [1000])")
    assert "rank 1 in broadcast(Float [1000])" in text and "neither can end" in text


def test_sizes_that_differ_are_a_difference(tmp_path: Path) -> None:
    recorded(tmp_path, 0, entry(4, state="started"))
    recorded(tmp_path, 1, entry(4, size=999, state="started"))
    assert "all_reduce(Float [999])" in said(tmp_path)


def test_a_rank_without_a_recording_is_said_to_have_none(tmp_path: Path) -> None:
    recorded(tmp_path, 0, entry(4, state="started"), world=3)
    recorded(tmp_path, 1, entry(4, state="started"), world=3)
    text = said(tmp_path)
    assert text.startswith("rank 2 has not answered; ranks 0 and 1 wait in all_reduce")


def test_ranks_that_are_all_in_one_collective_point_at_the_network(tmp_path: Path) -> None:
    for rank in (0, 1):
        recorded(tmp_path, rank, entry(4, state="started"))
    assert said(tmp_path).startswith("all ranks are in all_reduce") and "network" in said(tmp_path)


def test_the_first_collective_that_did_not_end_is_the_one(tmp_path: Path) -> None:
    recorded(tmp_path, 0, entry(4, state="started"), entry(5, "broadcast", state="scheduled"))
    recorded(tmp_path, 1, entry(3))
    assert "number 4" in said(tmp_path)


def test_ranks_that_wait_for_nothing_are_not_spoken_of(tmp_path: Path) -> None:
    for rank in (0, 1):
        recorded(tmp_path, rank, entry(4))
    assert said(tmp_path) == ""
    assert sentence([]) == ""


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("data", [pickle.dumps(Harmful()), b"", b"no pickle", pickle.dumps([1])])
def test_what_is_no_recording_is_refused_and_runs_nothing(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-0").write_bytes(data)
    traces, refused = read(tmp_path, 0.0)
    assert traces == [] and len(refused) == 1
    assert not (tmp_path / "harm").exists()


def test_an_answer_is_whole_once_each_rank_that_was_asked_has_written_it(tmp_path: Path) -> None:
    recorded(tmp_path, 0, entry(4, state="started"))
    for rank in (0, 1):
        os.mkfifo(tmp_path / FOLDER / f"ask-{rank}.pipe")
    assert not has_answered(tmp_path, 0.0)
    (tmp_path / FOLDER / "rank-1").write_bytes(b"")
    assert not has_answered(tmp_path, 0.0), "it is being written"
    recorded(tmp_path, 1, entry(3))
    assert has_answered(tmp_path, 0.0)


def test_recordings_of_before_the_question_are_not_read(tmp_path: Path) -> None:
    recorded(tmp_path, 0, entry(4, state="started"))
    os.utime(tmp_path / FOLDER / "rank-0", (1000.0, 1000.0))
    assert read(tmp_path, 2000.0) == ([], [])


def test_a_rank_is_asked_over_its_pipe_and_one_that_is_gone_is_not_waited_for(
    tmp_path: Path,
) -> None:
    (tmp_path / FOLDER).mkdir()
    for rank in (0, 1):
        os.mkfifo(tmp_path / FOLDER / f"ask-{rank}.pipe")
    assert ask(tmp_path) is None, "nobody reads"
    heard: list[bytes] = []
    opened = threading.Event()

    def listen() -> None:
        number = os.open(tmp_path / FOLDER / "ask-0.pipe", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(number, True)
        opened.set()
        assert asked.wait(10)
        heard.append(os.read(number, 16))
        os.close(number)

    asked = threading.Event()
    thread = threading.Thread(target=listen)
    thread.start()
    assert opened.wait(10)
    assert ask(tmp_path) is not None
    asked.set()
    thread.join()
    assert heard == [b"1\n"]


def test_a_users_own_places_stay_as_they_are(tmp_path: Path) -> None:
    found = variables(tmp_path, {})
    assert all(str(tmp_path / FOLDER) in value for value in found.values())
    assert variables(tmp_path, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}) == {}
    assert flight_recorder.ask(tmp_path) is None
