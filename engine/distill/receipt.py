"""What a finished run leaves behind: the student in Hugging Face layout, and a receipt of what
was really done.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from typing import Any

import torch

from engine.distill.inputs import Inputs
from engine.formats.safetensors import tensors_sha256
from engine.formats.tokenizer import FILE_NAME as TOKENIZER_FILE
from engine.models.decoder import Decoder
from engine.models.load import save_decoder
from engine.runlog.events import DataReady, StudentSaved
from engine.runlog.folder import RunFolder, write_whole
from engine.runlog.write import LogWriter
from engine.runtime.device import torch_dtype
from engine.spec import RunSpec
from engine.version import VERSION


def save_student(
    log: LogWriter, folder: RunFolder, student: Decoder, inputs: Inputs, save_as: str
) -> str:
    """Save the student with its tokenizer, complete or not at all; returns the sha256 of its
    tensors before they are rounded to `save_as`.
    """
    sha256 = tensors_sha256(dict(student.named_parameters()))
    if folder.student.is_dir():
        # Left by a session that was killed after saving it and before saying so; this one made the
        # same steps.
        shutil.rmtree(folder.student)
    # A teacher in one file brings its tokenizer inside it, so it is written from memory.
    tokenizer = folder.path / TOKENIZER_FILE
    write_whole(tokenizer, inputs.tokenizer.raw.decode("utf-8"))
    save_decoder(student, folder.student, torch_dtype(save_as), extra_files=[tokenizer])
    size = sum(file.stat().st_size for file in folder.student.iterdir())
    log.write(StudentSaved(path=str(folder.student), size_bytes=size, sha256=sha256))
    return sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The facts of a completed run that its receipt states."""

    spec: RunSpec
    data: DataReady
    model_sha256: dict[str, str]
    """Tensor hashes: `teacher`, `student_start`, `student`."""
    heldout_losses: dict[str, float]
    """Nats per token: `teacher`, `untrained`, `student`."""
    best_step: int | None
    steps: int
    rows: int
    device: str
    session_s: float


def write_receipt(folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Write receipt.json, whole or not at all; returns what it holds."""
    losses = outcome.heldout_losses
    receipt: dict[str, Any] = {
        "run": folder.name,
        "engine": VERSION,
        "torch": str(torch.__version__),
        "device": outcome.device,
        "spec": outcome.spec.to_dict(),
        "spec_sha256": outcome.spec.sha256,
        "train_sha256": outcome.data.train_sha256,
        "heldout_sha256": outcome.data.heldout_sha256,
        "model_sha256": outcome.model_sha256,
        "steps": outcome.steps,
        "rows_trained": outcome.rows,
        "tokens_trained": outcome.rows * outcome.spec.data.seq_len,
        "heldout_loss_nats": losses,
        "best_step": outcome.best_step,
        "student": str(folder.student),
        "last_session_s": round(outcome.session_s, 3),
        "finished_unix_s": time.time(),
    }
    write_whole(folder.receipt, json.dumps(receipt, indent=2, sort_keys=True) + "\n")
    return receipt
