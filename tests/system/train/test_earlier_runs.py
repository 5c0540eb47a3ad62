"""A run that takes more for its work than an earlier one of the same work on this machine says in which part."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.files import user_state
from engine.log.events import PartsMeasured
from engine.log.follow import Follower
from engine.machine import accounts
from engine.machine.accounts import Spent
from engine.spec import RunSpec
from engine.teachers.frozen import DequantizedTeacher
from engine.train import heldout
from engine.train import run as composed
from engine.train.checkpoint import keeper as keeping
from engine.train.earlier_runs import KEPT, EarlierRuns, same_work
from engine.train.trainer import Trainer
from tests.support.finished_runs import carried_out, resumed_here
from tests.support.kit import Kit
from tests.support.preparing import make_store

TOLD, CPU = "of the same work here", torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # The first run of each test tokenizes, and the others do not.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Other tests run beside this one.
    monkeypatch.setattr(accounts, "CROWDED", 100.0)
    # A process of its own, as a run has, does not look for garbage among all that the tests before have left.
    gc.collect()
    gc.freeze()


def told_by(kit: Kit, folder: Path) -> list[str]:
    folder.mkdir()
    run, code = carried_out(kit, folder)
    assert code == 0
    return [note.text for note in Follower(run).read_all().notes if TOLD in note.text]


def computes_before(function: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(*given: Any, **named: Any) -> Any:
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < 1.0:
            pass
        return function(*given, **named)

    return spoilt


def makes_ones(function: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(self: Trainer, *given: Any, **named: Any) -> Any:
        for one in [*self.parameters] * 2:
            torch.ones_like(one).sum()
        return function(self, *given, **named)

    return spoilt


def looks_at_all(function: Callable[..., Any]) -> Callable[..., Any]:
    def spoilt(logits_NV: torch.Tensor, *given: Any) -> Any:
        logits_NV.exp()
        return function(logits_NV, *given)

    return spoilt


def test_a_part_that_does_more_than_in_an_earlier_run_is_told_and_the_same_work_is_not(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizes", "first", "second"):
        assert told_by(kit, tmp_path / name) == []
    with monkeypatch.context() as spoilt:
        spoilt.setattr(composed, "write_receipt", computes_before(composed.write_receipt))
        spoilt.setattr(keeping.checkpoint, "save", computes_before(keeping.checkpoint.save))
        spoilt.setattr(Trainer, "_update", makes_ones(Trainer._update))
        spoilt.setattr(heldout, "project", looks_at_all(heldout.project))
        told = told_by(kit, tmp_path / "third")
    for beginning in (
        "writing the receipt took ",
        "saving a checkpoint took ",
        "optimizer in the first step: ",
        "evaluating the teacher: ",
    ):
        assert any(text.startswith(beginning) for text in told), told
    assert all("in 2 earlier runs" in text for text in told)


def test_a_store_that_takes_more_than_an_earlier_one_of_the_same_rows_is_told(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, said = kit.spec(tmp_path, train__steps=4), list[str]()
    for name in ("first", "second"):
        make_store(spec, tmp_path / name, say=said.append)
        assert [text for text in said if TOLD in text] == []
    exact = DequantizedTeacher.hidden

    def runs_often(self: DequantizedTeacher, *rows: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            exact(self, *rows).sum()
        return exact(self, *rows)

    monkeypatch.setattr(DequantizedTeacher, "hidden", runs_often)
    make_store(spec, tmp_path / "third", say=said.append)
    told = [text for text in said if TOLD in text]
    assert any(text.startswith("the teacher: ") for text in told), told


def test_a_run_that_tokenizes_is_not_compared_with_those_whose_tokens_were_kept(
    kit: Kit, tmp_path: Path
) -> None:
    for name, works in (("tokenizes", 1), ("has-them", 2), ("has-them-too", 2)):
        assert told_by(kit, tmp_path / name) == []
        assert len([*user_state("earlier-runs").iterdir()]) == works


def test_of_the_same_work_are_settings_that_differ_in_names_paths_and_length() -> None:
    spec = RunSpec()

    def changed(section: str, **values: Any) -> RunSpec:
        return dataclasses.replace(
            spec, **{section: dataclasses.replace(getattr(spec, section), **values)}
        )

    assert same_work(spec, CPU, 1) == same_work(
        changed("train", steps=spec.train.steps + 1), CPU, 1
    )
    assert same_work(spec, CPU, 1) == same_work(changed("teacher", path="elsewhere"), CPU, 1)
    assert same_work(spec, CPU, 1) != same_work(changed("train", rows=spec.train.rows + 1), CPU, 1)
    assert same_work(spec, CPU, 1) != same_work(spec, CPU, 2)


def spent(cpu_s: float, wanted_share: float = 0.0, reads: int = 0) -> Spent:
    return Spent(
        passed_s=cpu_s,
        cpu_s=cpu_s,
        wanted_share=wanted_share,
        wanted_s=0.0,
        waited_s=0.0,
        read_bytes=0,
        reads=reads,
        written_bytes=0,
        writes=0,
    )


def test_a_small_part_is_told_when_it_takes_three_times_its_share() -> None:
    for name, loss_s, told in (("first", 0.004, 0), ("second", 0.015, 0), ("third", 0.06, 1)):
        assert len(session(name, loss_s=loss_s)) == told


def session(
    name: str,
    cpu_s: float = 1.0,
    loss_s: float = 1.0,
    wanted_share: float = 0.0,
    reads: int = 0,
    steps: int = 10,
) -> list[str]:
    one = EarlierRuns(name)
    one.phase("planning", spent(cpu_s, wanted_share, reads))
    one.compare_with("key", steps)
    one.parts(
        PartsMeasured(
            step=12,
            seconds={"teacher": 1.0, "loss": loss_s},
            needed={},
            matmul_flops_per_s=1.0,
            copy_bytes_per_s=1.0,
        ),
        spent(cpu_s, wanted_share),
    )
    told = [*one.more()]
    assert [*one.more()] == []
    one.keep(steps)
    return told


def test_sessions_that_stop_and_go_on_are_compared_with_those_of_the_same_steps(
    kit: Kit, tmp_path: Path
) -> None:
    for name in ("tokenizes", "first", "second"):
        (tmp_path / name).mkdir()
        run, code = carried_out(kit, tmp_path / name, train__stop_after=2, checkpoint__keep_last=3)
        assert code == 0
        while (view := Follower(run).read_all()).last_step < view.total_steps:
            assert resumed_here(run.path).returncode == 0
        assert [one.text for one in view.notes if TOLD in one.text] == []
    sessions = [
        json.loads(path.read_text())["sessions"] for path in user_state("earlier-runs").iterdir()
    ]
    assert {len(each) for each in sessions} == {1, 2, 3}


def test_what_takes_more_is_said_once_and_the_newest_sessions_are_kept() -> None:
    assert session("first", cpu_s=3.0, loss_s=1.1) == []
    for number in range(KEPT):
        assert session(f"run-{number}") == []
    # The first, which took 3.0 s, is not among the newest any more.
    slower, longer = session("last", cpu_s=2.4, loss_s=1.5)
    assert slower.startswith("planning took 2.4 s of a CPU, and at most 1 s in 16 earlier runs")
    assert longer.startswith(
        "loss takes 60.0% of a step, and took at most 50.0% in 16 earlier runs"
    )
    assert "the newest run-15 by engine " in longer


@pytest.mark.parametrize(
    "text", ["", "{", '{"sessions": 3}', '{"sessions": [3, {"most": {"s/planning": "x"}}]}']
)
def test_a_file_of_other_content_is_no_earlier_run(text: str) -> None:
    path = user_state("earlier-runs") / "key.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert session("run", cpu_s=9.0) == []
    assert json.loads(path.read_text())["sessions"][-1]["run"] == "run"
