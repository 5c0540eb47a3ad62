"""The record of the rows that a run trained on has the rows that spec, seed and position prescribe, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.data.batches import Batches
from engine.data.row_hashes import RowHash, hashes_of
from engine.log.folder import RunFolder
from engine.log.rows import path_of, read_rows
from engine.train.checkpoint import state
from engine.train.trained_rows import TrainedRows
from tests.support.checked_runs import SEQ_LEN, Run, World, make_run, make_world
from tests.support.defects import OTHER_ROWS, Defect
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def trained(run: Run, folder: Path, steps: int) -> list[str | None]:
    """Record some steps, and return the digests that are logged with them."""
    rows = TrainedRows(RunFolder(folder), run.trainer)
    taken = zip(range(steps), run.trainer.steps(), strict=False)
    digests = [rows.record(step).rows_digest for _, step in taken]
    rows.sync()
    return digests


def recorded(folder: Path) -> list[tuple[int, RowHash]]:
    return [(row.step, RowHash(*row[1:])) for row in read_rows(path_of(RunFolder(folder), 0))]


def prescribed(run: Run, steps: int) -> list[tuple[int, RowHash]]:
    train = run.spec.train
    per_step = train.rows * train.accumulation
    batches = Batches(run.stream, seq_len=SEQ_LEN, rows_per_batch=train.rows, seed=train.seed)
    rows = hashes_of(batches.rows(batches.row_ids_at(0, steps * per_step)))
    return [(place // per_step + 1, row) for place, row in enumerate(rows)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"train__accumulation": 3, "train__rows": 1}, {"train__rows": 7}],
    ids=str,
)
def test_the_record_has_the_prescribed_rows_over_several_epochs(
    world: World, tmp_path: Path, changes: dict[str, object]
) -> None:
    run = make_run(world, train__steps=2000, loss__alpha=1.0, **changes)
    each = run.spec.train.rows * run.spec.train.accumulation
    steps = 2 + run.trainer.batches.rows_per_epoch // each
    digests = trained(run, tmp_path, steps)
    assert recorded(tmp_path) == prescribed(run, steps)
    assert len(set(digests)) == steps and None not in digests
    assert any(row.documents for _, row in recorded(tmp_path))


@pytest.mark.parametrize("planted", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_a_defect_of_the_rows_is_in_the_record(
    world: World, tmp_path: Path, planted: Defect
) -> None:
    with planted.plant():
        run = make_run(world, train__accumulation=2)
        trained(run, tmp_path, 1)
    assert recorded(tmp_path) != prescribed(run, 1)


def test_a_resume_leaves_no_record_of_the_steps_that_it_trains_again(
    world: World, tmp_path: Path
) -> None:
    run = make_run(world)
    trained(run, tmp_path, 1)
    before = state.capture_trainer(run.trainer, run.spec)
    trained(run, tmp_path, 2)
    state.restore_trainer(before, run.trainer)
    run.trainer._ahead = None
    trained(run, tmp_path, 1)
    assert recorded(tmp_path) == prescribed(run, 2)
