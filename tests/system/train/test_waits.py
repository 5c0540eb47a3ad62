"""A run tells of phases in which nothing of it worked, and of files that are gone through for nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.formats.tokenizer import open_tokenizer
from engine.log.follow import Follower
from engine.machine import accounts
from engine.machine.accounts import Spent
from engine.train import data, loop
from engine.train.checkpoint import keeper as keeping
from engine.train.checkpoint.keeper import Keeper
from engine.train.waits import SMALL_WRITE, Waits, beyond
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit


def notes_of(run: Path) -> list[str]:
    return [note.text for note in Follower(run).read_all().notes if note.level == "warning"]


def waits_before(function: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(*given: Any, **named: Any) -> Any:
        threading.Event().wait(0.6)
        return function(*given, **named)

    return spoilt


@pytest.mark.parametrize(
    ("where", "name", "phase"),
    [(loop.TrainingLoop, "_context", "checking"), (loop, "heldout_loss", "evaluating")],
)
def test_a_phase_in_which_nothing_works_is_told(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, phase: str
) -> None:
    # Other tests run beside this one.
    monkeypatch.setattr(accounts, "CROWDED", 100.0)
    monkeypatch.setattr(where, name, waits_before(getattr(where, name)))
    run, code = carried_out(kit, tmp_path)
    told = [text for text in notes_of(run) if "the run waited" in text]
    assert code == 0 and told and all(text.startswith(phase) for text in told), told


def test_a_run_that_waits_for_nothing_and_reads_no_file_again_is_quiet(
    kit: Kit, tmp_path: Path
) -> None:
    run, code = carried_out(kit, tmp_path, checkpoint__every=2, checkpoint__keep_last=1)
    assert code == 0 and notes_of(run) == []


def test_checkpoints_that_are_read_again_as_one_is_saved_are_told(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Keeper.save

    def reads_more(self: Keeper, *given: Any) -> Path:
        path = exact(self, *given)
        for _ in range(1 + (8 << 20) // self.saved_bytes):
            keeping.digest_of(path / "student.safetensors")
            keeping.digest_of(path / "optimizer.safetensors")
        return path

    monkeypatch.setattr(Keeper, "save", reads_more)
    run, code = carried_out(kit, tmp_path)
    told = [text for text in notes_of(run) if "are enough" in text]
    assert code == 0 and told and all(text.startswith("save: it reads") for text in told), told


def test_phases_in_which_others_work_are_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def spent(waited_s: float, written: int = 0, writes: int = 0) -> Spent:
        return Spent(
            passed_s=10.0,
            cpu_s=0.0,
            wanted_share=0.0,
            wanted_s=0.0,
            waited_s=waited_s,
            read_bytes=0,
            reads=0,
            written_bytes=written,
            writes=writes,
        )

    monkeypatch.setattr("engine.train.waits.between", lambda before, after: spent(2.0))
    phases = ["checking", "tokenizing", "saving the student", "evaluating", "training"]
    for alone, told in ((True, [1, 0, 0, 1]), (False, [0, 0, 0, 0])):
        waits = Waits(alone=alone)
        waits.begin(phases[0])
        assert [bool(waits.begin(phase)) for phase in phases[1:]] == told
    small = spent(0.0, 64 * SMALL_WRITE, 1000)
    assert ["1,000 calls" in text for text in beyond("save", small, written_bytes=1e9)] == [True]
    assert not [*beyond("save", spent(0.0, 64 * SMALL_WRITE, 64), written_bytes=1e6)]


@pytest.mark.parametrize(
    ("took_s", "cpu_s", "cpus", "busy", "told"),
    [
        (10.0, 10.0, 2, False, True),
        (10.0, 18.0, 2, False, False),
        (10.0, 10.0, 1, False, False),
        (10.0, 10.0, 2, True, False),
        (1.0, 1.0, 2, False, False),
    ],
)
def test_texts_that_one_cpu_of_many_tokenizes_are_told(
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    took_s: float,
    cpu_s: float,
    cpus: int,
    busy: bool,
    told: bool,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr(data, "others_want_the_cpus", lambda: busy)
    tokenizer = open_tokenizer(kit.teacher)
    tokenizer.encode_documents(["def f(x):"])
    assert 0 < tokenizer.encoded_s < 5
    tokenizer.encoded_s, tokenizer.encoded_cpu_s = took_s, cpu_s
    assert bool(data.one_cpu_of_many(tokenizer)) == told


def test_a_phase_that_logs_its_progress_without_end_is_told() -> None:
    waits = Waits(alone=True)
    told = [waits.begin(phase) for phase in ("reading", *["tokenizing"] * 100, "planning")]
    assert told[:-1] == [""] * 101 and "tokenizing: its progress was logged 99 times" in told[-1]
