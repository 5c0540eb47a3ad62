"""Record the rows of every step by content (`engine.log.rows`), as the trainer passes them to the models.

Any row repeated, skipped, altered, of another split or of another rank has another hash than the row that spec, seed
and position prescribe; `engine verify` and tests compare them.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import msgspec
from torch import Tensor

from engine.data.row_hashes import RowHash, hashes_of
from engine.log.events import StepDone
from engine.log.folder import RunFolder
from engine.log.rows import RowsWriter
from engine.log.written import WrittenRow, WrittenWriter
from engine.train.rollout import Written
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
        self._written: dict[int, list[Written]] = {}
        """Micro-batches whose rows a model wrote, of the steps that are not recorded yet."""
        self._written_writer = (
            None if trainer.rollout is None else WrittenWriter(run, ranks.rank, step)
        )
        self._step = step
        trainer.observers = (*trainer.observers, self)

    def begun(self, step: int) -> None:
        self._step = step
        self._hashes[step], self._written[step] = [], []

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        self._hashes[self._step] += hashes_of(micro.batch)
        if micro.written is not None:
            self._written[self._step].append(micro.written)

    def record(self, step: StepDone) -> StepDone:
        """Write the rows of a step that is done, and return its record with the running digest."""
        hashes, written = self._hashes.pop(step.step), self._written.pop(step.step)
        if self._written_writer is not None:
            self._written_writer.append(
                [
                    WrittenRow(*key, prompt, text, ended, log_p)
                    for micro_batch in written
                    for key, prompt, text, ended, log_p in zip(
                        micro_batch.keys,
                        micro_batch.prompts,
                        micro_batch.texts,
                        micro_batch.ended,
                        micro_batch.log_p,
                        strict=True,
                    )
                ]
            )
        self._writer.append(step.step, hashes)
        return msgspec.structs.replace(step, rows_digest=self._writer.digest.hex())

    def sync(self) -> None:
        """Return when the records are on disk. Raises RunLogError and DiskFull."""
        self._writer.sync()
        if self._written_writer is not None:
            self._written_writer.sync()
