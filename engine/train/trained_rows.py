"""Record the rows of every step by content (`engine.log.rows`), and compare them with the prescribed rows.

The audit compares the rows on the device, but only in some steps. Here the rows of all steps are hashed as the trainer
passes them to the models. Any fault between the corpus and the trainer (a row repeated, skipped, altered, of the wrong
split, of another rank, replayed or skipped by a resume) gives another hash than that of the row that spec, seed and
position prescribe.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
from torch import Tensor

from engine.catalogue import BY_ID, skipped_ids
from engine.checks.result import Result
from engine.data.batches import Batch, Batches
from engine.data.row_hashes import RowHash, hashes_of
from engine.log.events import CHECK, StepDone
from engine.log.folder import RunFolder
from engine.log.rows import RowsWriter, path_of, read_rows
from engine.log.written import WrittenRow, WrittenWriter
from engine.spec import RunSpec
from engine.train.rollout import Written
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer
from engine.verdict import Answer, Level, Numbers, passed


class TrainedRows(StepObserver):
    """Records the rows of this rank."""

    def __init__(
        self,
        run: RunFolder,
        trainer: Trainer,
        spec: RunSpec,
        prescribed: Batches,
        heldout: list[Batch],
    ) -> None:
        """Record the steps of `trainer` from the next one on. Raises RunLogError and DiskFull."""
        ranks, step = trainer.ranks, trainer.step
        self._run, self._ranks, self._heldout, self._train = run, ranks, heldout, spec.train
        self._prescribed = prescribed
        self._skipped = "step_rows" in skipped_ids(spec.checks.skip)
        self._writer = RowsWriter(run, ranks.rank, ranks.world, step)
        self._hashes: dict[int, list[list[RowHash]]] = {}
        """Row hashes of each step that is not recorded yet, one list per micro-batch."""
        self._written: dict[int, dict[int, Written]] = {}
        """Micro-batches whose rows a model wrote, by step and index, of the steps that are not judged yet."""
        self._written_writer = (
            None if trainer.rollout is None else WrittenWriter(run, ranks.rank, step)
        )
        self._step = self._begun_at = step
        trainer.observers = (*trainer.observers, self)

    def begun(self, step: int) -> None:
        self._step = step
        self._hashes[step] = []

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        self._hashes[self._step].append(hashes_of(micro.batch))
        if micro.written is not None:
            index = len(self._hashes[self._step]) - 1
            self._written.setdefault(self._step, {})[index] = micro.written

    def record(self, step: StepDone) -> StepDone:
        """Write the rows of a step that is done, and return its record with the running digest."""
        if self._written_writer is not None:
            written = self._written.get(step.step, {}).values()
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
        self._writer.append(
            step.step, [row for micro_batch in self._hashes[step.step] for row in micro_batch]
        )
        return msgspec.structs.replace(step, rows_digest=self._writer.digest.hex())

    def sync(self) -> None:
        """Return when the records are on disk. Raises RunLogError and DiskFull."""
        self._writer.sync()
        if self._written_writer is not None:
            self._written_writer.sync()

    def after(self, step: StepDone) -> Iterator[Result]:
        """Compare the recorded rows of a step with the prescribed rows, and yield a failure where they differ."""
        begun_s = time.perf_counter()
        answer = self._judge(step.step)
        if step.step == self._begun_at + 1 and (wrong := self._describe_wrong_record(step.step)):
            answer = Numbers().failed(wrong)
        if answer.verdict.level is Level.FAIL and not self._skipped:
            yield Result(
                about=BY_ID[CHECK]["step_rows"],
                verdict=answer.verdict,
                numbers=answer.numbers,
                cost_s=time.perf_counter() - begun_s,
                step=step.step,
            )

    def _describe_wrong_record(self, step: int) -> str:
        """Describe how this rank's file differs from the rows of all steps up to `step`; empty when it does not."""
        path = path_of(self._run, self._ranks.rank)
        steps = np.fromiter((row.step for row in read_rows(path)), np.uint64)
        first = min(int(steps[0]), step) if len(steps) else step
        step_rows = self._train.rows * self._train.accumulation
        expected = np.repeat(np.arange(first, step + 1, dtype=np.uint64), step_rows)
        if np.array_equal(steps, expected):
            return ""
        same = steps[: len(expected)] == expected[: len(steps)]
        index = int(np.argmin(same)) if not same.all() else min(len(steps), len(expected))
        return (
            f"{path.parent.name}/{path.name} has {len(steps):,} rows, the steps {first:,} to {step:,} have "
            f"{len(expected):,}: from row {index + 1:,} on it differs from the rows that were trained on"
        )

    def _judge(self, step: int) -> Answer:
        micro_batches, written = self._hashes.pop(step), self._written.pop(step, {})
        world, rows = self._ranks.world, self._train.rows
        for index, hashes in enumerate(micro_batches):
            if index in written:
                continue  # a model wrote these rows, so no corpus holds them
            passes = ((step - 1) * self._train.accumulation + index) * world + self._ranks.rank
            row_ids = self._prescribed.row_ids_at(passes * rows, rows)
            expected = hashes_of(self._prescribed.rows(row_ids))
            if len(hashes) != len(expected):
                return Numbers(rows=len(hashes), wanted=len(expected)).failed(
                    f"micro-batch {index + 1} has {len(hashes)} rows, the spec sets {len(expected)}"
                )
            for row, (found_row, expected_row) in enumerate(zip(hashes, expected, strict=True)):
                if found_row != expected_row:
                    return Numbers(row=int(row_ids[row])).failed(
                        f"micro-batch {index + 1}, row {row + 1}: expected row {row_ids[row]:,} of the corpus, found "
                        f"{self._describe_row(found_row, expected_row, step, expected)}"
                    )
        return passed("every row is the one that the spec prescribes")

    def _describe_row(
        self, found: RowHash, expected: RowHash, step: int, micro_batch: list[RowHash]
    ) -> str:
        """Describe an unexpected row, or a document in it that the prescribed row lacks."""
        heldout = [row for batch in self._heldout for row in hashes_of(batch)]
        prescribed = (expected.row, *expected.documents)
        documents = [document for document in found.documents if document not in prescribed]
        for prefix, parts in (("", found[:1]), ("one that has a document of ", documents)):
            for part in parts:
                if any(part == row.row or part in row.documents for row in heldout):
                    return f"{prefix}a held-out row"
                if any(part == row.row or part in row.documents for row in micro_batch):
                    return f"{prefix}another row of the same micro-batch"
                if before := self._trained_before(part, step):
                    return f"{prefix}{before}"
        return "a row that was not trained on before: another row or an altered one"

    def _trained_before(self, part: bytes, step: int) -> str | None:
        for rank in range(self._ranks.world):
            for row in read_rows(path_of(self._run, rank)):
                matches = part == row.hash or part in row.documents
                if matches and (row.step, rank) < (step, self._ranks.rank):
                    whose = "" if rank == self._ranks.rank else f" by rank {rank}"
                    return f"one that was trained on in step {row.step:,}{whose}"
        return None
