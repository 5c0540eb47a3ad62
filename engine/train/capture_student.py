"""Set how the student's layers run, and capture them as CUDA graphs where that was chosen.

They are captured on the run's first batch, before its first step, so that a failure shows before anything is trained.
The audit of the first steps compares what the graphs compute with a reference (`engine.audit`). Tests compare it with
layers that are launched one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.log.events import Note, Phase
from engine.models.activation_checkpointing import configure_layers
from engine.models.attention import record_documents
from engine.plan.knobs import give_up_graphs
from engine.plan.run_plan import Plan
from engine.train.cuda_graphs import Graphs
from engine.train.kernel_warm_up import build_cudnn_attention
from engine.train.to_events import Log
from engine.train.trainer import Trainer


def configure_student(trainer: Trainer, plan: Plan, log: Log) -> None:
    """Set how the student's layers run, and capture them as planned. Logs the reason when layers that were to be
    captured are not, now or in a later step."""
    student = plan.spec.student
    configure_layers(
        trainer.student,
        packed=student.attention == "packed",
        checkpointing=student.checkpointing == "on",
        kept_layers=plan.kept_layers,
    )
    trainer.student.cudnn = build_cudnn_attention(
        trainer.student, "student", plan.spec, trainer.device, log, trained=True
    )
    if student.graphs == "on":
        log(Phase(name="capturing the student's layers"))
        capture_student(
            trainer,
            length=plan.spec.data.seq_len,
            given_up=lambda why: log_no_graphs(trainer.step + 1, why, log),
        )


def log_no_graphs(step: int, why: str, log: Log) -> None:
    """Log that the layers run without a CUDA graph from `step` on."""
    decision = give_up_graphs(step, why)
    log(decision)
    text = f"{decision.knob}: {decision.reason}: {decision.rejected[0][1]}"
    log(Note(level="warning", text=text))


def capture_student(
    trainer: Trainer, *, length: int, given_up: Callable[[str], None] = lambda why: None
) -> None:
    """Capture the layers as CUDA graphs on the next batch. If that fails, here or in a later step,
    `given_up` is called with the reason, and the layers run without graphs."""
    trainer.graphs = Graphs(trainer.student, trainer.train.rows, length, trainer.dtype, given_up)
    batch = trainer.batches.take(trainer.position, trainer.train.rows)
    tokens_BT, documents_BT, _ = batch.to_torch(trainer.device)
    record_documents(documents_BT, batch.documents_BT)
    with trainer.autocast():
        trainer.hidden(tokens_BT, documents_BT)
