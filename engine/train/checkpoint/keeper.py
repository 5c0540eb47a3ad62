"""Save, restore and delete the checkpoints of one run.

The newest `checkpoint.keep_last` checkpoints and the one with the lowest held-out loss are kept. A checkpoint is
logged only once it is safe on disk, and older ones are deleted only after that.

With `checkpoint.sharded`, every rank writes its own part of a checkpoint. The first rank coordinates them:

    first     checkpoint.save creates the partial folder ── its path ──> every rank writes its part,
              <── size and sha256 of each part ──                        fsyncs it and hashes it
              manifest, fsync, rename, as for any other checkpoint

No rank holds more than its own part in memory. If one rank fails, all ranks fail, before anything is
published.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.checkpoint_folders import published
from engine.errors import CheckpointError
from engine.log.events import CheckpointSaved, Note
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.runtime.parts import check_shared_folder, part_name, write_parts
from engine.runtime.ranks import Ranks, whole
from engine.spec import RunSpec
from engine.train.checkpoint import state
from engine.train.checkpoint import write as checkpoint
from engine.train.checkpoint.continuing import (
    changes_since,
    check_changes,
    missing_newest,
    newest_logged_step,
    require_logged_checkpoint,
    written_sha256,
)
from engine.train.checkpoint.manifest import FileRecord, digest_of, newest, verify
from engine.train.non_finite import stop_for_weights
from engine.train.to_events import Log
from engine.train.trainer import Trainer


class Parts:
    """The parts of one sharded checkpoint.

    The first rank passes this to `checkpoint.save`, which calls `write_into`; every other rank calls
    `follow`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks, device: torch.device) -> None:
        self._tensors, self._ranks, self._device = tensors, ranks, device
        self._sent_folder = False

    @property
    def size_bytes(self) -> int:
        """Size in bytes over all ranks, without the headers of the files."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def write_into(self, folder: Path) -> Mapping[str, FileRecord]:
        """Write the files of all ranks into `folder` and return their records once all are on disk.

        Raises OSError or CheckpointError.
        """
        self._sent_folder = True
        self._ranks.tell(str(folder))
        return self._write(folder)

    def give_up(self) -> None:
        """Release the other ranks, which wait for a folder, if `write_into` was never called."""
        if not self._sent_folder:
            self._ranks.tell(None)

    def follow(self) -> None:
        """Write this rank's part into the folder that the first rank sends.

        Raises CheckpointError when the first rank could not begin.
        """
        folder = self._ranks.tell(None)
        if folder is None:
            raise CheckpointError("checkpoint: the first rank could not begin to write it")
        self._write(Path(str(folder)))

    def _write(self, folder: Path) -> Mapping[str, FileRecord]:
        check_shared_folder(self._ranks, folder, self._device)
        write_parts(self._tensors, folder)
        path, own, problem = folder / part_name(self._ranks.rank), None, None
        if path.exists():
            try:
                own = _sync_and_hash(path)
            except OSError as error:
                problem = error
        records: dict[str, FileRecord] = {}
        for rank, (record, rank_problem) in enumerate(self._ranks.collect((own, problem))):
            if rank_problem is not None:
                raise OSError(rank_problem.errno, f"rank {rank}: {rank_problem.strerror}")
            if record is not None:
                records[part_name(rank)] = record
        return records


def _sync_and_hash(path: Path) -> FileRecord:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size, digest = digest_of(path)
    return FileRecord(sha256=digest, size=size)


class Keeper:
    def __init__(
        self,
        folder: RunFolder,
        spec: RunSpec,
        ranks: Ranks | None = None,
        *,
        log: Log,
        sync_log: Callable[[], None],
    ) -> None:
        """`sync_log` returns when every logged line is on disk."""
        self.folder, self.spec, self.log, self.sync_log = folder, spec, log, sync_log
        self.ranks = ranks or Ranks()
        self.sharded = False
        """Whether every rank writes its own part of a checkpoint."""
        self.sync_rows: Callable[[], None] = lambda: None
        """Function that returns when the row hashes of every step are on disk."""
        self.saved_step = -1
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self._read_back: Path | None = None
        """The newest checkpoint that was read back in full after it was saved."""

    def save(self, trainer: Trainer, heldout_loss: float | None) -> Path:
        """Publish a checkpoint, log it once it is safe on disk, and return its path.

        With several ranks, the first rank writes tensors that it gathers from the others. With sharded checkpoints,
        each rank writes its own part.
        """
        # The norm is not finite if any weight is not. It takes one pass over the weights, far less than writing them.
        with torch.no_grad():
            norm = float(whole(nn.utils.get_total_norm(trainer.parameters)))
        if not math.isfinite(norm):
            stop_for_weights(self.log, trainer.step, "weight_norm", norm)
        best = heldout_loss is not None and (
            self.best_loss is None or heldout_loss < self.best_loss
        )
        if best:
            self.best_loss, self.best_step = heldout_loss, trainer.step
        captured = state.capture_trainer(trainer, self.spec, self.best_loss)
        files = state.pack(captured, sharded=self.sharded)
        parts = None
        if self.sharded:
            parts = Parts(state.sharded_tensors(captured), self.ranks, trainer.device)
        self.saved_step = trainer.step
        if not self.ranks.first:
            state.join_gathering(files) if parts is None else parts.follow()
            self.ranks.wait_for_all()
            return next(published(self.folder.checkpoints))
        # A run resumes from a checkpoint, so the log must hold all steps that led to it.
        self.sync_log()
        self.sync_rows()
        try:
            saved = checkpoint.save(self.folder.checkpoints, trainer.step, files, parts=parts)
        finally:
            if parts is not None:
                parts.give_up()
        self.ranks.wait_for_all()
        self.log(
            CheckpointSaved(
                step=trainer.step,
                path=str(saved.path),
                size_bytes=saved.bytes,
                save_s=saved.seconds,
                manifest_sha256=saved.manifest_sha256,
                best=best,
            )
        )
        self.sync_log()
        return saved.path

    def prune(self) -> None:
        """Delete the checkpoints that are no longer kept."""
        if not self.ranks.first:
            return
        kept = {self.best_step} if self.best_step is not None else set()
        checkpoint.prune(
            self.folder.checkpoints, self.spec.checkpoint.keep_last, kept, good=self._read_back
        )

    def restore(
        self,
        trainer: Trainer,
        before: RunView,
        allow_fallback: bool,
        allow_restart: bool = False,
    ) -> dict[str, float]:
        """Resume from the newest checkpoint; without one the trainer stays at step 0.

        `before` is the log of the earlier sessions. Returns the held-out losses in it, up to the restored step.
        Raises CheckpointError if the newest checkpoint is damaged, unless `allow_fallback`, and if the log
        reports a checkpoint but none is on disk, unless `allow_restart`.
        """
        require_logged_checkpoint(self.folder, before, allow_restart)
        last = (
            newest(self.folder.checkpoints, allow_fallback)
            if self.folder.checkpoints.is_dir()
            else None
        )
        if last is None:
            logged_step = newest_logged_step(before)
            why = (
                "there is no checkpoint yet"
                if logged_step is None
                else f"the checkpoint of step {logged_step} is gone, and a restart was allowed"
            )
            self.log(Note(level="warning", text=f"{why}: starting again from step 0"))
            return {}
        if missing := missing_newest(self.folder, before):
            self.log(Note(level="warning", text=missing))
        for path, reason in last.refused:
            aside = checkpoint.set_aside(path)
            text = f"{path.name} does not verify ({reason}): set aside as {aside.name}"
            self.log(Note(level="error", text=text))
        training_state = state.unpack(last)
        if changes := self._check_settings(training_state, last.path):
            text = f"settings changed since this checkpoint, as allowed: {', '.join(changes)}"
            self.log(Note(level="warning", text=text))
        state.restore_trainer(training_state, trainer)
        self.best_loss = training_state.best_held_out_loss
        done = [c for c in before.checkpoints if c.best and c.step <= training_state.step]
        self.best_step = done[-1].step if done else None
        return {
            e.subject: e.loss
            for e in before.evals
            if e.loss is not None and e.step <= training_state.step
        }

    def check_resumable(self, path: Path, trainer: Trainer) -> None:
        """Read all of the checkpoint in `path`. Raises CheckpointError if a resume would refuse it."""
        training_state = state.unpack(verify(path), numbers=False)
        self._read_back = path
        self._check_settings(training_state, path)
        state.check_fits(training_state, trainer)

    def _check_settings(self, training_state: state.TrainingState, path: Path) -> list[str] | None:
        """Return the allowed changes of settings since a checkpoint. Raises CheckpointError for any other change."""
        changes = changes_since(self.folder, training_state.spec_sha256)
        check_changes(self.folder, self.spec)
        if changes is None and training_state.spec_sha256 not in (
            self.spec.sha256,
            written_sha256(self.folder),
        ):
            raise CheckpointError(
                f"checkpoint: {path} — expected spec {self.spec.sha256[:12]}, "
                f"found {training_state.spec_sha256[:12]}",
                hint="a run continues with the settings of its first session; to change a setting, resume with "
                "`--resume RUN --set KEY=VALUE --allow-change KEY`",
            )
        return changes
