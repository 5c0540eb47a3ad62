"""What a run says that it decided, against what trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.log.events import DecisionMade
from engine.log.follow import Follower
from engine.log.view import RunView
from engine.plan.knobs import KNOBS
from engine.train import loop
from engine.train.applied import READ, Applied, not_as_decided
from engine.train.trainer import Trainer
from tests.support.checked_runs import make_run, make_world
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit

ELSEWHERE = {
    # Of the process, not of what trains: its threads are looked at at each step, its allocator when it is built.
    "memory.allocator",
    "compute.threads",
    "compute.thread_wait",
    # By what the step does: arithmetic that is done again.
    "student.checkpointing",
    # A kernel is chosen for each shape.
    "teacher.kernel",
}
WRONG = {
    "model.engine": "transformers",
    "compute.device": "cuda",
    "student.precision": "bf16",
    "student.compile": "on",
    "student.attention": "packed",
    "student.graphs": "on",
    "teacher.precision": "tf32",
    "teacher.compile": "on",
    "teacher.attention": "packed",
    "teacher.prefetch": "on",
    "teacher.shard": "on",
    "teacher.backend": "quantized",
    "loss.kernel": "fused",
    "loss.chunk_rows": "32",
    "train.update": "fused",
    "checkpoint.sharded": "on",
}
"""Choices that a small run on a CPU does not have."""


def test_every_decision_is_read_back_or_seen_elsewhere() -> None:
    assert READ.keys() | ELSEWHERE == KNOBS.keys() and not READ.keys() & ELSEWHERE
    assert WRONG.keys() == READ.keys() - {"student.reshard"}


def test_a_decision_that_reached_nothing_is_named(
    kit: Kit, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = make_run(make_world(kit, tmp_path_factory.mktemp("world")))
    applied = Applied(run.trainer, run.context.teacher_decoder, chunk_rows=64, sharded=False)
    for knob, wrong in WRONG.items():
        decided = DecisionMade(knob=knob, choice=wrong, reason="")
        (text,) = not_as_decided([decided], applied)
        assert text.startswith(f"{knob} was decided to be {wrong}, and is ")
        right = text.rpartition(" ")[2]
        # The newest one counts.
        newer = DecisionMade(knob=knob, choice=right, reason="")
        assert not_as_decided([decided, newer], applied) == []
    unread = DecisionMade(knob="student.reshard", choice="on", reason="")
    assert not_as_decided([unread], applied) == []


@pytest.mark.parametrize("reaches", [True, False])
def test_a_run_tells_of_a_decision_that_did_not_reach_its_trainer(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaches: bool
) -> None:
    if not reaches:
        exact = Trainer.__init__

        def other_chunks(self: Trainer, **given: object) -> None:
            given["loss"] = dataclasses.replace(given["loss"], chunk_rows=64)  # type: ignore[type-var]
            exact(self, **given)  # type: ignore[arg-type]

        monkeypatch.setattr(Trainer, "__init__", other_chunks)
    run, code = carried_out(kit, tmp_path, loss__chunk_rows=32)
    told = [one.text for one in Follower(run).read_all().notes if "not as decided" in one.text]
    wanted = "not as decided: loss.chunk_rows was decided to be 32, and is 64"
    assert code == 0 and told == ([] if reaches else [wanted])


WRONGLY_TOLD = {
    ("data", "train_tokens"): "training tokens",
    ("data", "heldout_tokens"): "held-out tokens",
    ("data", "padding"): "padding",
    ("data", "epoch_rows"): "rows of an epoch",
    ("data", "labelled_tokens"): "labelled tokens",
    ("data", "unlabelled_rows"): "rows without a label",
    ("student", "parameters"): "parameters of the student",
    ("teacher", "parameters"): "parameters of the teacher",
    ("teacher", "layers"): "layers of the teacher",
    ("teacher", "vocab_size"): "vocabulary of the teacher",
    ("student", "hidden_size"): "width of the student",
    ("run", "trainable_parameters"): "trained parameters",
    ("run", "resumed_from"): "the step it is resumed from",
    ("run", "flops_per_token"): "operations for a token",
}


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_each_number_of_the_log_that_is_another_is_named(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    told: dict[tuple[str, str], list[str]] = {}
    exact = loop.wrongly_told

    def looked(log: RunView, *others: Any) -> list[str]:
        for what, field in WRONGLY_TOLD:
            event = {"data": log.data, "run": log.started, **log.models}[what]
            value = 0 if field == "resumed_from" else getattr(event, field)
            if value is None:
                assert (field, packing) == ("labelled_tokens", "stream")
                continue
            other = msgspec.structs.replace(event, **{field: value + 1})  # type: ignore[type-var]
            changed: dict[str, Any] = {"data": {"data": other}, "run": {"started": other}}.get(
                what, {"models": {**log.models, what: other}}
            )
            told[what, field] = exact(dataclasses.replace(log, **changed), *others)
        return exact(log, *others)

    monkeypatch.setattr(loop, "wrongly_told", looked)
    run, code = carried_out(kit, tmp_path, data__packing=packing)
    assert code == 0 and not [n for n in Follower(run).read_all().notes if n.level == "error"]
    assert told.keys() | {("data", "labelled_tokens")} == WRONGLY_TOLD.keys()
    for key, texts in told.items():
        (text,) = texts
        assert text.startswith(f"{WRONGLY_TOLD[key]} is "), text
