"""Collect the state of a trainer that the checks of `engine.checks` read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.checks.context import Context, Memory
from engine.data.batches import Batch
from engine.data.tokens import TokenStream
from engine.formats.tokenizer import Tokenizer
from engine.models.decoder import Decoder
from engine.spec import RunSpec
from engine.train.trainer import Trainer


def context_of(
    trainer: Trainer,
    spec: RunSpec,
    *,
    teacher_decoder: Decoder | None,
    train_stream: TokenStream,
    heldout_stream: TokenStream,
    heldout: Sequence[Batch],
    tokenizers: Mapping[str, Tokenizer | None],
    memory: Callable[[], Memory | None] = lambda: None,
    late_compiles: Callable[[], Sequence[str]] = tuple,
) -> Context:
    """Return the context of the trainer's current state, before the first step of its session."""
    return Context(
        spec=spec,
        device=trainer.device,
        step=trainer.step,
        position=trainer.position,
        student=trainer.student,
        teacher=trainer.teacher if trainer.has_teacher else None,
        teacher_decoder=teacher_decoder if trainer.has_teacher else None,
        batches=trainer.batches,
        train_stream=train_stream,
        heldout_stream=heldout_stream,
        heldout=heldout,
        tokenizers=tokenizers,
        autocast=trainer.autocast,
        memory=memory,
        late_compiles=late_compiles,
    )
