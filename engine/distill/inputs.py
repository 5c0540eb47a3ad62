"""Everything that can be wrong with a run's inputs and be seen without torch: checked before a run
folder exists.

Reads headers, configs and names, not tensors, so it takes well under a second for a 7B teacher. The
trainer repeats what it can only see with the data in hand.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from engine.data.corpus import check_corpus
from engine.errors import BadInput, DiskFull, TokenizerError
from engine.formats.safetensors import open_safetensors
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.models.config import ModelConfig, count_parameters, read_config
from engine.models.names import check_fits
from engine.spec import RunSpec
from engine.units import format_bytes

ADAM_COPIES = 3
"""Weights and AdamW's two moments, each in fp32: what one checkpoint holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What was read on the way: shapes of both models and the tokenizer."""

    teacher: ModelConfig | None
    student: ModelConfig
    tokenizer: Tokenizer
    tokenizer_path: Path


def _model(path: str) -> ModelConfig:
    config = read_config(Path(path))
    with open_safetensors(Path(path)) as weights:
        check_fits(config, weights, path)
    return config


def _tokenizer_path(spec: RunSpec) -> Path:
    for path in (spec.data.tokenizer, spec.teacher.path, spec.student.path):
        if path:
            return Path(path)
    raise TokenizerError(
        "data.tokenizer: expected a tokenizer.json, found neither a teacher nor a student that brings one",
        hint="set data.tokenizer to a folder or file",
    )


def check_inputs(spec: RunSpec, run: Path | None = None) -> Inputs:
    """Open and check every input of `spec`; with `run`, also that there is room for its
    checkpoints. Raises BadInput.
    """
    teacher = _model(spec.teacher.path) if spec.teacher.path else None
    student = (
        _model(spec.student.path) if spec.student.path else read_config(Path(spec.student.config))
    )
    if teacher is not None and student.vocab_size > teacher.vocab_size:
        raise BadInput(
            f"vocabulary: student — expected at most the teacher's {teacher.vocab_size} ids, "
            f"found {student.vocab_size}",
            hint="ids that the teacher does not have cannot be taught; cut the student's embedding",
        )
    tokenizer_path = _tokenizer_path(spec)
    tokenizer = open_tokenizer(tokenizer_path)
    tokenizer.fits(student.vocab_size, f"student {spec.student.path or spec.student.config}")
    if spec.data.seq_len > student.max_position_embeddings:
        raise BadInput(
            f"data.seq_len: expected at most the student's {student.max_position_embeddings} positions, "
            f"found {spec.data.seq_len}"
        )
    if teacher is not None and spec.data.seq_len > teacher.max_position_embeddings:
        raise BadInput(
            f"data.seq_len: expected at most the teacher's {teacher.max_position_embeddings} positions, "
            f"found {spec.data.seq_len}"
        )
    check_corpus(spec.data.corpus)
    if run is not None:
        _check_room(spec, student, run)
    return Inputs(
        teacher=teacher, student=student, tokenizer=tokenizer, tokenizer_path=tokenizer_path
    )


def _check_room(spec: RunSpec, student: ModelConfig, run: Path) -> None:
    """Room for every checkpoint that is ever there at once: the kept ones, the best, and the one
    being written.
    """
    folder = next(p for p in (run, *run.resolve().parents) if p.exists())
    each = count_parameters(student) * 4 * ADAM_COPIES
    needed = round(each * (spec.checkpoint.keep_last + 1 + 1.5))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"run folder: {run} — expected {format_bytes(needed)} free for {spec.checkpoint.keep_last + 2} checkpoints "
            f"of {format_bytes(each)}, found {format_bytes(free)}",
            hint="free space there, choose another --out, or lower checkpoint.keep_last",
        )
