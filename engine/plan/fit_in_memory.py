"""Make a run fit into its available memory with the cheapest changes, in this order:

    setting                 change                                                  cost
    loss.chunk_rows         logits of fewer tokens at a time                        1 to 2 ms of a step of 8192 tokens
    teacher.backend         teacher weights in quantised blocks                     3 to 5 % of a step
    student.checkpointing   activations of as few layers as necessary are           a third of these layers' forward
                            recomputed in the backward pass                         pass
    teacher.shard           teacher layers are gathered from the other ranks        a collective for each layer

teacher.shard is considered only if the first three are not enough, which are then decided again with it. Each change is
made before the run begins, holds for the whole run, and is logged. Values that the user set are kept. A run that fits
is not changed. A run that cannot fit is refused by its memory budget.
"""

from __future__ import annotations

from dataclasses import replace

from engine.decision import Decision
from engine.plan.knobs import KNOBS
from engine.plan.memory import MemoryPlan
from engine.units import format_bytes

FEWER_CHUNK_ROWS = (1024, 512)
"""Numbers of tokens whose logits are computed at a time when memory is short, largest first. Matmuls with
fewer rows are slower, and a quantised head is dequantised again for each chunk.
"""


def fit(plan: MemoryPlan, *, stored_words: str | None) -> tuple[MemoryPlan, list[Decision]]:
    """Return the plan with the backend, checkpointing and chunk size that make it fit, and the decisions.

    `stored_words` describes the stored teacher outputs, if there are any. If the available memory is unknown, every
    plan counts as fitting. Raises BadInput for a backend that cannot run the teacher.
    """
    spec, number = plan.spec, plan.available.number
    available_bytes = None if number is None else int(number)
    wanted_rows = spec.loss.chunk_rows
    default_rows = wanted_rows or plan.chunk_rows
    fewer = [] if wanted_rows else [rows for rows in FEWER_CHUNK_ROWS if rows < default_rows]

    def with_rows(backend: str, recompute: bool, rows: int) -> MemoryPlan:
        recomputes = "on" if recompute else "off"
        chosen = {"teacher.backend": backend, "student.checkpointing": recomputes}
        return plan.changed({**chosen, "loss.chunk_rows": rows})

    def fitted(backend: str, recompute: bool) -> MemoryPlan:
        """Return the plan with the most tokens per chunk that fits; if none fits, the one with the fewest."""
        tried = [with_rows(backend, recompute, rows) for rows in (default_rows, *fewer)]
        if available_bytes is None:
            return tried[0]
        return next((p for p in tried if p.total_bytes <= available_bytes), tried[-1])

    always_recompute, blocks = (
        spec.student.checkpointing == "on",
        plan.teacher_packed_bytes is not None,
    )
    backend = KNOBS["teacher.backend"].decide(
        plan,
        quantised_blocks=blocks,
        dense_bytes=fitted("dequantized", always_recompute).total_bytes,
        packed_bytes=fitted("quantized", always_recompute).total_bytes if blocks else None,
        available_bytes=available_bytes,
        stored_words=stored_words,
    )
    recompute = KNOBS["student.checkpointing"].decide(
        plan,
        without_bytes=fitted(backend.choice, False).total_bytes,
        with_bytes=fitted(backend.choice, True).total_bytes,
        available_bytes=available_bytes,
    )
    chosen_plan = fitted(backend.choice, recompute.choice == "on")
    if recompute.choice == "on" and not always_recompute and available_bytes is not None:
        chosen_plan = _fewest_layers(chosen_plan, available_bytes)
        count = plan.student.num_hidden_layers
        if chosen_plan.kept_layers:
            layers = f"; of the first {count - chosen_plan.kept_layers} of {count} layers"
            layers += f", with {format_bytes(chosen_plan.total_bytes)}"
            recompute = replace(recompute, reason=recompute.reason + layers)
    decisions = [backend, recompute]
    if wanted_rows or fewer:
        rows = chosen_plan.spec.loss.chunk_rows
        default_plan = with_rows(backend.choice, recompute.choice == "on", default_rows)
        decisions.append(
            KNOBS["loss.chunk_rows"].decide(
                plan,
                taken_rows=rows,
                usual_rows=default_rows,
                fewer_rows=fewer,
                usual_bytes=default_plan.total_bytes,
                available_bytes=available_bytes,
            )
        )
    return chosen_plan, decisions


def _fewest_layers(plan: MemoryPlan, available_bytes: int) -> MemoryPlan:
    """Return the plan that fits with the fewest recomputed layers; `plan` itself if all layers must be recomputed."""
    count = plan.student.num_hidden_layers
    tried = (replace(plan, kept_layers=kept) for kept in range(count - 1, 0, -1))
    return next((p for p in tried if p.total_bytes <= available_bytes), plan)
