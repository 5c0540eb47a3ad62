"""Make a run fit into its available memory, by the changes that cost least, in this order:

    loss.chunk_rows         logits of fewer tokens at a time: 1 or 2 ms of a step of 8192 tokens
    teacher.backend         block-quantised weights: 3 to 5 % of a step
    student.checkpointing   activations recomputed in the backward pass, of as few layers as it takes: a third
                            more of their forward
    teacher.shard           teacher layers gathered from the other ranks when they compute, if the first
                            three are not enough; those are then decided again

Each change holds for the whole run, is made before it begins, and is logged. Values that the user set are
kept. A run that fits is not changed, and a run that cannot fit is refused by its budget.
"""

from __future__ import annotations

from dataclasses import replace

from engine.decision import Decision
from engine.plan.knobs import KNOBS
from engine.plan.memory import MemoryPlan
from engine.units import format_bytes

FEWER_CHUNK_ROWS = (1024, 512)
"""Numbers of tokens whose logits are kept at a time when memory is short, largest first. Matmuls with
fewer rows are slower, and a quantised head is dequantised again for each chunk.
"""


def fit(plan: MemoryPlan, *, stored: str | None) -> tuple[MemoryPlan, list[Decision]]:
    """Return the plan with the backend, checkpointing and chunk size that make it fit, and the decisions.

    `stored` describes the stored teacher outputs, if any. When the available memory is unknown, everything
    counts as fitting. Raises BadInput for a backend that the teacher does not have.
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
        """Return the plan with the most tokens per chunk that fits; if none fits, with the fewest."""
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
        stored=stored,
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
    """Return the plan that fits with the fewest layers recomputing their activations; `plan` itself if all must."""
    count = plan.student.num_hidden_layers
    tried = (replace(plan, kept_layers=kept) for kept in range(count - 1, 0, -1))
    return next((p for p in tried if p.total_bytes <= available_bytes), plan)
