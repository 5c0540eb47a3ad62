"""The checkpoints of one run: written, kept, deleted, and restored from.

The newest `checkpoint.keep_last` and the best by held-out loss are kept. A checkpoint is said to
exist only once it is safe, and what it replaces is deleted only after that.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from engine.errors import CheckpointError
from engine.log.events import CheckpointSaved, Note
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.runtime.ranks import Ranks, whole
from engine.spec import RunSpec
from engine.train import record
from engine.train.checkpoint import retention, state, state_files
from engine.train.checkpoint import write as checkpoint
from engine.train.checkpoint.continuing import check_promised, missing_newest, promised_step
from engine.train.checkpoint.manifest import newest, published
from engine.train.checkpoint.parts import Parts
from engine.train.drift import changes_since, written_sha256
from engine.train.trainer import Trainer


class Keeper:
    def __init__(
        self, log: LogWriter, folder: RunFolder, spec: RunSpec, ranks: Ranks | None = None
    ) -> None:
        self.log, self.folder, self.spec = log, folder, spec
        self.ranks = ranks or Ranks()
        self.sharded = False
        """Whether every rank writes its own part of a checkpoint."""
        self.saved_step = -1
        self.best_loss: float | None = None
        self.best_step: int | None = None

    def save(self, trainer: Trainer, heldout_loss: float | None) -> Path:
        """Publish a checkpoint, say so once it is safe, then delete what is no longer kept; returns
        where it is. Of several ranks the first writes, and the others give it their parts, or write
        them themselves.
        """
        # One pass over the weights, far cheaper than writing them.
        with torch.no_grad():
            norm = float(whole(nn.utils.get_total_norm(trainer.parameters)))
        if not math.isfinite(norm):
            record.fail_at(self.log, trainer.step, "weight_norm", norm)
        best = heldout_loss is not None and (
            self.best_loss is None or heldout_loss < self.best_loss
        )
        if best:
            self.best_loss, self.best_step = heldout_loss, trainer.step
        captured = state.capture(
            trainer.student,
            trainer.optimizer,
            step=trainer.step,
            seed=self.spec.train.seed,
            spec_sha256=self.spec.sha256,
            position={"rows": trainer.position},
            best_held_out_loss=self.best_loss,
        )
        files = state_files.pack(captured, sharded=self.sharded)
        parts = None
        if self.sharded:
            parts = Parts(state_files.sharded_tensors(captured), self.ranks, trainer.device)
        self.saved_step = trainer.step
        if not self.ranks.first:
            state_files.take_part(files) if parts is None else parts.follow()
            self.ranks.wait_for_all()
            return next(published(self.folder.checkpoints))
        # A run goes on from a checkpoint: the log must not have lost the steps that led to it.
        self.log.sync()
        try:
            saved = checkpoint.save(self.folder.checkpoints, trainer.step, files, parts=parts)
        finally:
            if parts is not None:
                parts.give_up()
        self.ranks.wait_for_all()
        self.log.write(
            CheckpointSaved(
                step=trainer.step,
                path=str(saved.path),
                size_bytes=saved.bytes,
                save_s=saved.seconds,
                manifest_sha256=saved.manifest_sha256,
                best=best,
            )
        )
        self.log.sync()
        kept = {self.best_step} if self.best_step is not None else set()
        retention.prune(self.folder.checkpoints, self.spec.checkpoint.keep_last, kept)
        return saved.path

    def restore(
        self,
        trainer: Trainer,
        before: RunView,
        allow_fallback: bool,
        allow_restart: bool = False,
    ) -> dict[str, float]:
        """Continue from the newest checkpoint; the trainer stays at step 0 when the run died before
        its first. `before` is what the log says of the earlier sessions; returns the held-out losses
        it knows up to the step restored.

        Raises CheckpointError when the newest is damaged, unless `allow_fallback`, and when the log
        promised one and there is none at all, unless `allow_restart`."""
        check_promised(self.folder, before, allow_restart)
        last = (
            newest(self.folder.checkpoints, allow_fallback)
            if self.folder.checkpoints.is_dir()
            else None
        )
        if last is None:
            promised = promised_step(before)
            why = (
                "there is no checkpoint yet"
                if promised is None
                else f"the checkpoint of step {promised} is gone, and a restart was allowed"
            )
            self.log.write(Note(level="warning", text=f"{why}: starting again from step 0"))
            return {}
        if missing := missing_newest(self.folder, before):
            self.log.write(Note(level="warning", text=missing))
        for path, reason in last.refused:
            aside = retention.set_aside(path)
            text = f"{path.name} does not verify ({reason}): set aside as {aside.name}"
            self.log.write(Note(level="error", text=text))
        found = state_files.unpack(last)
        changes = changes_since(self.folder, found.spec_sha256)
        if changes is not None:
            text = f"settings changed since this checkpoint, as allowed: {', '.join(changes)}"
            self.log.write(Note(level="warning", text=text))
        elif found.spec_sha256 not in (self.spec.sha256, written_sha256(self.folder)):
            raise CheckpointError(
                f"checkpoint: {last.path} — expected spec {self.spec.sha256[:12]}, "
                f"found {found.spec_sha256[:12]}",
                hint="a run continues with the settings it began with; `--resume RUN --set KEY=VALUE "
                "--allow-change KEY` changes one",
            )
        state.restore(found, trainer.student, trainer.optimizer)
        trainer.step, trainer.position = found.step, found.position["rows"]
        self.best_loss = found.best_held_out_loss
        done = [c for c in before.checkpoints if c.best and c.step <= found.step]
        self.best_step = done[-1].step if done else None
        return {
            e.subject: e.loss for e in before.evals if e.loss is not None and e.step <= found.step
        }
