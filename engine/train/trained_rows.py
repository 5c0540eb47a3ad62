"""Record a hash of the content of every row that the trainer passes to the models (`engine.log.rows`).

Spec, seed and position prescribe the rows of each step, so `engine verify` and tests can compare hashes. A row that was
repeated, skipped, altered, or taken from another split or rank has another hash than the prescribed row.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import msgspec
from torch import Tensor

from engine.data.row_hashes import RowHash, hashes_of
from engine.log.events import StepDone
from engine.log.folder import RunFolder
from engine.log.rows import RowsWriter
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer


class TrainedRows(StepObserver):
    """Records the rows of this rank."""

    def __init__(self, run: RunFolder, trainer: Trainer) -> None:
        """Record the steps of `trainer` from the next one on. Raises RunLogError and DiskFull."""
        ranks, step = trainer.ranks, trainer.step
        self._writer = RowsWriter(run, ranks.rank, ranks.world, step)
        self._hashes: dict[int, list[RowHash]] = {}
        """Row hashes of each step that is not recorded yet."""
        self._step = step
        trainer.observers = (*trainer.observers, self)

    def begun(self, step: int) -> None:
        self._step = step
        self._hashes[step] = []

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        self._hashes[self._step] += hashes_of(micro.batch)

    def record(self, step: StepDone) -> StepDone:
        """Write the row hashes of a finished step, and return its event with the running digest."""
        self._writer.append(step.step, self._hashes.pop(step.step))
        return msgspec.structs.replace(step, rows_digest=self._writer.digest.hex())

    def sync(self) -> None:
        """Return when the records are on disk. Raises RunLogError and DiskFull."""
        self._writer.sync()
