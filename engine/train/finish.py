"""Save the results of a finished run: the student in Hugging Face layout, and a receipt."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.data.batches import epoch_order
from engine.data.chat_template import CONFIG_FILE, DEFAULT, TEMPLATE_FILE, ChatTemplate
from engine.errors import write_error
from engine.formats.safetensors import tensors_sha256
from engine.formats.tokenizer import FILE_NAME as TOKENIZER_FILE
from engine.log.events import DataReady, ReceiptWritten, StudentSaved
from engine.log.folder import RunFolder, write_whole
from engine.log.write import read_boot_id
from engine.models.decoder import Decoder
from engine.models.load import save_decoder
from engine.plan.inputs import Inputs
from engine.receipts.context import allowed_environment, engine_source, package_versions, view_of
from engine.receipts.receipt import digest_rest, facts_of
from engine.redact import Redactor
from engine.runtime.device import torch_dtype
from engine.sealing import digest, now_utc
from engine.spec import RunSpec
from engine.spec.sections import StudentSection
from engine.train.background import Background
from engine.version import VERSION


def save_student(
    folder: RunFolder, student: Decoder, inputs: Inputs, section: StudentSection
) -> StudentSaved:
    """Save the student with its tokenizer, atomically, and return the event to log.

    The event's sha256 is that of the tensors in the dtype `student.save_as`.
    """
    dtype = torch_dtype(section.save_as)
    sha256 = Background(partial(tensors_sha256, _Cast(student, dtype)), "hash of the student")
    if folder.student.is_dir():
        # An earlier session was killed after it saved the student and before it logged the save. This session
        # took the same steps, so its student replaces the saved one.
        try:
            shutil.rmtree(folder.student)
        except OSError as error:
            raise write_error("student", folder.student, "to replace it", error) from error
    # A single-file teacher embeds its tokenizer, so the tokenizer is written from memory.
    tokenizer = folder.path / TOKENIZER_FILE
    write_whole(tokenizer, inputs.tokenizer.raw.decode("utf-8"))
    files = [tokenizer]
    if inputs.template is not None:
        files += _template_files(folder, inputs.template)
    save_decoder(student, folder.student, dtype, extra_files=files, section=section)
    size = sum(file.stat().st_size for file in folder.student.iterdir())
    return StudentSaved(path=str(folder.student), size_bytes=size, sha256=sha256.result())


class _Cast(Mapping[str, Tensor]):
    """The parameters of a student, each cast to a dtype when it is read."""

    def __init__(self, student: Decoder, dtype: torch.dtype) -> None:
        self._parameters, self._dtype = dict(student.named_parameters()), dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name].detach().to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _template_files(folder: RunFolder, template: ChatTemplate) -> list[Path]:
    """Write the chat template that the student was trained with, and its special tokens, as files that transformers
    reads."""
    text = folder.path / TEMPLATE_FILE
    write_whole(
        text,
        template.texts[DEFAULT]
        if DEFAULT in template.texts
        else next(iter(template.texts.values())),
    )
    config = folder.path / CONFIG_FILE
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **template.special_tokens}
    write_whole(config, json.dumps(tokenizer_config, indent=2, sort_keys=True) + "\n")
    return [text, config]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The facts that the receipt of a completed run states."""

    spec: RunSpec
    data: DataReady
    student_files: dict[str, dict[str, Any]]
    """Size and hash of each file of the student, by name."""
    model_sha256: dict[str, str]
    """Tensor hashes: `teacher`, `student_start`, `student`."""
    heldout_losses: dict[str, float]
    """Nats per token: `teacher`, `untrained` and `student`. The last one is of the saved student, read back."""
    best_step: int | None
    steps: int
    rows: int
    device: str
    session_s: float


def write_receipt(folder: RunFolder, outcome: Outcome) -> ReceiptWritten:
    """Write receipt.json atomically, and return the event to log.

    The facts that identify the run come first, then its results and measurements. Everything except the
    fields of `outcome` is read back from the run folder: logs, settings and files.
    """
    facts = facts_of(folder, view_of(folder))
    spec = outcome.spec
    ended_unix_s, ended_monotonic_s = time.time(), time.monotonic()
    begun_unix_s = ended_unix_s - outcome.session_s
    receipt: dict[str, Any] = {
        "run": folder.name,
        "engine": VERSION,
        "tool": engine_source(begun_unix_s),
        "config": facts["config"],
        "seeds": {
            "train.seed": spec.train.seed,
            "torch.manual_seed": spec.train.seed,
            "philox_key_of_the_order": [spec.train.seed, "epoch"],
        },
        "data": (facts["data"] or {}) | {"order_sha256": order_sha256(outcome)},
        "weights": facts["weights"],
        "device_facts": facts["device"],
        "environment": allowed_environment(),
        "times": facts["times"]
        | {
            "session_started": now_utc(begun_unix_s),
            "session_ended": now_utc(ended_unix_s),
            "session_started_monotonic_s": round(ended_monotonic_s - outcome.session_s, 6),
            "session_ended_monotonic_s": round(ended_monotonic_s, 6),
            "boot_id": read_boot_id(),
        },
        "outcome": "completed",
        "packages": package_versions() | {"torch": str(torch.__version__)},
        "decisions": facts["decisions"],
        "rows": facts["rows"] | {"position": outcome.rows},
        "eval_seal": {"sha256": None, "why": "no sealed evaluation takes part in a run"},
        "logs": facts["logs"],
        "student_files": outcome.student_files,
        "files": digest_rest(folder),
        "torch": str(torch.__version__),
        "device": outcome.device,
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
        "train_sha256": outcome.data.train_sha256,
        "heldout_sha256": outcome.data.heldout_sha256,
        "model_sha256": outcome.model_sha256,
        "steps": outcome.steps,
        "rows_trained": facts["rows"]["rows_trained"],
        "tokens_trained": facts["rows"]["rows_trained"] * spec.data.seq_len,
        "heldout_loss_nats": outcome.heldout_losses,
        "best_step": outcome.best_step,
        "student": str(folder.student),
        "last_session_s": round(outcome.session_s, 3),
        "finished_unix_s": ended_unix_s,
    }
    redacted_bytes, redacted = Redactor().bytes((json.dumps(receipt, indent=2) + "\n").encode())
    if redacted:
        receipt = json.loads(redacted_bytes) | {"redacted": redacted}
    data = (json.dumps(receipt, indent=2) + "\n").encode()
    write_whole(folder.receipt, data.decode())
    hashed_files = sum(len(receipt[part]) for part in ("logs", "student_files", "files"))
    return ReceiptWritten(sha256=digest(data), files=hashed_files)


def order_sha256(outcome: Outcome) -> str:
    """Hash the row numbers in training order, as little-endian 64-bit integers.

    Together with the hash of the tokens this identifies which data was trained on, and in which order.
    """
    hasher = hashlib.sha256()
    rows, seed, left = outcome.data.epoch_rows, outcome.spec.train.seed, outcome.rows
    epoch = 0
    while left > 0:
        part = epoch_order(rows, seed, epoch)[:left]
        hasher.update(part.astype("<i8").tobytes())
        left, epoch = left - len(part), epoch + 1
    return hasher.hexdigest()
