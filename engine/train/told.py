"""The numbers that a session's log has of its data, models and arithmetic, each counted once more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.log.view import RunView
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.spec import RunSpec
from engine.train.data import Data
from engine.train.part_times import arithmetic, in_one_piece
from engine.train.prescribed_rows import PrescribedRows
from engine.train.trainer import Trainer

COUNTED_TOKENS = 1 << 26
"""Labels of a longer corpus are not counted again."""
SAME_FLOPS = 1e-6
"""Relative; both are sums of floats."""

Told = Iterator[tuple[str, float | None, float]]
"""What a number is of, as the log has it, and as it is."""


def wrongly_told(
    log: RunView,
    spec: RunSpec,
    trainer: Trainer,
    data: Data,
    prescribed: PrescribedRows,
    teacher: Decoder | None,
    configs: tuple[ModelConfig, ModelConfig | None],
) -> list[str]:
    """Return each number that is another than in the log, with both. `teacher` is None where its outputs are stored;
    `configs` are those of student and teacher, the latter where it is part of the objective."""
    models = {"student": trainer.student, "teacher": teacher}
    told = [
        *_of_data(log, spec, data, prescribed),
        *_of_models(log, models),
        *_of_run(log, spec, trainer, configs),
    ]
    return [
        f"{name} is {said} in the log, and {is_}"
        for name, said, is_ in told
        if said is not None and abs(said - is_) > SAME_FLOPS * abs(is_)
    ]


def _of_data(log: RunView, spec: RunSpec, data: Data, prescribed: PrescribedRows) -> Told:
    if log.data is None:
        return
    for name, said, stream in (
        ("training tokens", log.data.train_tokens, data.stream),
        ("held-out tokens", log.data.heldout_tokens, data.heldout_stream),
    ):
        fills = 0 if stream.padding is None else int(stream.lengths[stream.padding].sum())
        yield name, said, len(stream.tokens) - fills
        if stream is data.stream:
            yield "padding", log.data.padding, fills
    rows = len(data.stream.tokens) // spec.data.seq_len
    yield "rows of an epoch", log.data.epoch_rows, prescribed.per_epoch
    yield "rows without a label", log.data.unlabelled_rows, rows - prescribed.per_epoch
    labelled = data.stream.labelled
    if labelled is not None and len(labelled) <= COUNTED_TOKENS:
        yield "labelled tokens", log.data.labelled_tokens, int(np.count_nonzero(labelled))
        data.stream.release()


def _of_models(log: RunView, models: dict[str, Decoder | None]) -> Told:
    for role, model in models.items():
        said = log.models.get(role)
        if said is None or model is None or not (model.config.native and in_one_piece(model)):
            continue
        if model.shards is not None:
            continue
        yield f"layers of the {role}", said.layers, len(model.layers)
        vocabulary, width = model.embed.weight.shape
        yield f"vocabulary of the {role}", said.vocab_size, vocabulary
        yield f"width of the {role}", said.hidden_size, width
        if said.precision != "fp8":
            # Those of a frozen model are buffers; a tied one is there twice.
            tensors = {one.data_ptr(): one for one in model.state_dict().values()}.values()
            parameters = sum(one.numel() for one in (*model.parameters(),) or tensors)
            yield f"parameters of the {role}", said.parameters, parameters


def _of_run(
    log: RunView,
    spec: RunSpec,
    trainer: Trainer,
    configs: tuple[ModelConfig, ModelConfig | None],
) -> Told:
    if log.started is None:
        return
    # Read after the session's first step, before another is launched.
    yield "the step it is resumed from", log.started.resumed_from or 0, trainer.step - 1
    trained = sum(one.numel() for one in trainer.parameters)
    yield "trained parameters", log.started.trainable_parameters, trained
    student, teacher = configs
    same = teacher is None or teacher.vocab_size == student.vocab_size
    if same and student.native and (teacher is None or teacher.native):
        tokens = spec.data.seq_len
        parts = arithmetic(student, teacher, tokens, spec.data.seq_len, passes=1)
        flops = 2 * parts["student"].flops + sum(
            parts[part].flops for part in parts.keys() & {"student", "teacher", "loss"}
        )
        yield "operations for a token", log.started.flops_per_token, flops / tokens
