"""Rows that a loader or a sampler hands out of turn are named at the step that trained on them, by content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.checks.result import Result
from engine.data.batches import Batch, Batches
from engine.data.row_hashes import hashes_of
from engine.log.events import StepDone
from engine.log.folder import RunFolder
from engine.log.rows import path_of, read_rows
from engine.train.checkpoint import state
from engine.train.trained_rows import TrainedRows
from tests.support.checked_runs import SEQ_LEN, Run, World, make_run, make_world
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def trained(run: Run, folder: Path, steps: int) -> Iterator[tuple[StepDone, list[Result]]]:
    heldout = list(run.context.heldout)
    train = run.spec.train
    prescribed = Batches(run.stream, seq_len=SEQ_LEN, rows_per_batch=train.rows, seed=train.seed)
    rows = TrainedRows(RunFolder(folder), run.trainer, run.spec, prescribed, heldout)
    for _, step in zip(range(steps), run.trainer.steps(), strict=False):
        step = rows.record(step)
        yield step, list(rows.after(step))


def said(run: Run, folder: Path, steps: int) -> dict[int, str]:
    """What was said of each step of which something was said."""
    found = trained(run, folder, steps)
    return {step.step: str(results[0].verdict) for step, results in found if results}


@pytest.mark.parametrize(
    "changes",
    [{}, {"train__accumulation": 3, "train__rows": 1}, {"train__rows": 7}],
    ids=str,
)
def test_a_healthy_run_over_several_epochs_is_said_nothing_of(
    world: World, tmp_path: Path, changes: dict[str, object]
) -> None:
    run = make_run(world, train__steps=2000, loss__alpha=1.0, **changes)
    each = run.spec.train.rows * run.spec.train.accumulation
    steps = 2 + run.trainer.batches.rows_per_epoch // each
    assert said(run, tmp_path, steps) == {}


def test_the_records_are_the_rows_of_the_order_and_their_digest_is_logged(
    world: World, tmp_path: Path
) -> None:
    run = make_run(world)
    digests = [step.rows_digest for step, _ in trained(run, tmp_path, 3)]
    batch = Batches(world.train, seq_len=SEQ_LEN, rows_per_batch=4, seed=0).take(0, 12)
    found = [one[1:] for one in read_rows(path_of(RunFolder(tmp_path), 0))]
    assert found == hashes_of(batch) and any(documents for _, documents in found)
    assert len(set(digests)) == 3 and None not in digests


def altered(batch: Batch) -> None:
    batch.tokens_BT[2, 5] += 1


def relabelled(batch: Batch) -> None:
    batch.labels_BT[2] = np.roll(batch.labels_BT[2], 1)


def doubled(batch: Batch) -> None:
    for array in (batch.tokens_BT, batch.labels_BT):
        array[2] = array[0]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (altered, "not trained on before: another row or an altered one"),
        (relabelled, "not trained on before: another row or an altered one"),
        (doubled, "another row of the same micro-batch"),
    ],
)
def test_a_row_that_is_not_the_corpus_is_named_at_its_step(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: object, what: str
) -> None:
    take = Batches.take

    def spoilt(self: Batches, position: int, rows: int) -> Batch:
        batch = take(self, position, rows)
        if position == 8:
            spoil(batch)  # type: ignore[operator]
        return batch

    monkeypatch.setattr(Batches, "take", spoilt)
    found = said(make_run(world), tmp_path, 4)
    assert list(found) == [3] and "row 3:" in found[3] and what in found[3]


def test_a_held_out_row_is_said_to_be_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, take = make_run(world), Batches.take
    held = run.context.heldout[0]

    def spoilt(self: Batches, position: int, rows: int) -> Batch:
        batch = take(self, position, rows)
        batch.tokens_BT[1], batch.labels_BT[1] = held.tokens_BT[0], held.labels_BT[0]
        return batch

    monkeypatch.setattr(Batches, "take", spoilt)
    assert "found a held-out row" in said(run, tmp_path, 1)[1]


def test_documents_that_are_met_again_in_other_rows_are_named_with_their_step(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Batches.take
    walk = Batches(world.train, seq_len=SEQ_LEN, rows_per_batch=4, seed=0).take(0, 40)
    row = next(i for i, ids in enumerate(walk.documents_BT) if ids[0] != ids[-1])
    step = row // 4 + 1
    last = walk.documents_BT[row] == walk.documents_BT[row, -1]

    def spoilt(self: Batches, position: int, rows: int) -> Batch:
        batch = take(self, position, rows)
        if position == 4 * step:
            # In front of what else the row has.
            for name in ("tokens_BT", "labels_BT", "documents_BT"):
                getattr(batch, name)[1, : last.sum()] = getattr(walk, name)[row, last]
        return batch

    monkeypatch.setattr(Batches, "take", spoilt)
    found = said(make_run(world), tmp_path, step + 1)
    wanted = f"one that has a document of one that was trained on in step {step}"
    assert list(found) == [step + 1] and wanted in found[step + 1]


def test_what_a_row_has_of_its_own_documents_does_not_make_it_another_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Batches.take
    walk = Batches(world.train, seq_len=SEQ_LEN, rows_per_batch=4, seed=0).take(0, 40)
    row = next(i for i, ids in enumerate(walk.documents_BT) if ids[0] != ids[-1])

    def spoilt(self: Batches, position: int, rows: int) -> Batch:
        batch = take(self, position, rows)
        if position == 4 * (row // 4):
            # In the first of its documents alone.
            batch.tokens_BT[row % 4, 0] += 1
        return batch

    monkeypatch.setattr(Batches, "take", spoilt)
    found = said(make_run(world), tmp_path, row // 4 + 1)
    assert "another row or an altered one" in found[row // 4 + 1]


def test_rows_that_a_resume_meets_again_are_named_with_their_step(
    world: World, tmp_path: Path
) -> None:
    run = make_run(world)
    assert said(run, tmp_path, 3) == {}
    run.trainer.position -= 8
    run.trainer._ahead = None
    assert "one that was trained on in step 2" in said(run, tmp_path, 1)[4]


def test_records_of_lost_steps_that_a_resume_leaves_are_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(world)
    assert said(run, tmp_path, 1) == {}
    before = state.capture_trainer(run.trainer, run.spec)
    assert said(run, tmp_path, 2) == {}
    state.restore_trainer(before, run.trainer)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)
    run.trainer._ahead = None
    assert "rows/0.bin has 16 rows, the steps 1 to 2 have 8" in said(run, tmp_path, 1)[2]


def test_epochs_in_one_order_are_named_where_the_second_begins(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(world, train__steps=2000, loss__alpha=1.0)
    order = run.trainer.batches._order
    monkeypatch.setattr(run.trainer.batches, "_order", lambda epoch: order(0))
    begins = run.trainer.batches.rows_per_epoch // 4 + 1
    assert min(said(run, tmp_path, begins + 2)) == begins
