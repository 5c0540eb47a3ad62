"""What a run gives up so that it fits in the memory it may take, in this order, what costs least first:

    loss.chunk_rows         logits of fewer tokens at a time: 1 ms or two of a step of 8192 tokens
    teacher.backend         weights that stay in their blocks: 3 to 5 % of a step
    student.checkpointing   activations recomputed in the backward pass: a third more of its forward
    teacher.shard           layers gathered from the other ranks when they compute, where all of that is not
                            enough; then the others are asked anew

Each is given up for the whole run, before it begins, and logged. What the settings name is kept as it is;
a run that fits is left as it is, and one that fits in no way is refused by its budget.
"""

from __future__ import annotations

from dataclasses import replace

from engine.decision import Decision
from engine.plan.knobs import KNOBS
from engine.plan.memory import MemoryPlan

FEWER_CHUNK_ROWS = (1024, 512)
"""Tokens whose logits are held at a time where memory is short, most first; products of fewer rows are
slower, and a head in blocks is made floats for each chunk."""


def fit(
    plan: MemoryPlan, *, usual_chunk_rows: int, stored: str | None
) -> tuple[MemoryPlan, list[Decision]]:
    """The plan with the backend, the checkpointing and the chunks that let it fit, and why. `usual_chunk_rows`
    are taken where memory is plenty; `stored` says what there is of the teacher's outputs. Where nobody
    knows what is available everything fits.

    Raises BadInput for a backend that the teacher does not have.
    """
    spec, number = plan.spec, plan.available.number
    available_bytes = None if number is None else int(number)
    wanted_rows = spec.loss.chunk_rows
    usual = wanted_rows or usual_chunk_rows
    fewer = [] if wanted_rows else [rows for rows in FEWER_CHUNK_ROWS if rows < usual]

    def with_rows(backend: str, again: bool, rows: int) -> MemoryPlan:
        chunks = replace(spec, loss=replace(spec.loss, chunk_rows=rows))
        return replace(plan, spec=chunks, backend=backend, checkpointing=again)

    def fitted(backend: str, again: bool) -> MemoryPlan:
        """With the most tokens in a chunk that fit; where none do, the fewest."""
        tried = [with_rows(backend, again, rows) for rows in (usual, *fewer)]
        if available_bytes is None:
            return tried[0]
        return next((p for p in tried if p.total_bytes <= available_bytes), tried[-1])

    forced, blocks = spec.student.checkpointing == "on", plan.teacher_packed_bytes is not None
    backend = KNOBS["teacher.backend"].decide(
        plan,
        quantised_blocks=blocks,
        dense_bytes=fitted("dequantized", forced).total_bytes,
        packed_bytes=fitted("quantized", forced).total_bytes if blocks else None,
        available_bytes=available_bytes,
        stored=stored,
    )
    again = KNOBS["student.checkpointing"].decide(
        plan,
        without_bytes=fitted(backend.choice, False).total_bytes,
        with_bytes=fitted(backend.choice, True).total_bytes,
        available_bytes=available_bytes,
    )
    found = fitted(backend.choice, again.choice == "on")
    decisions = [backend, again]
    if wanted_rows or fewer:
        rows = found.spec.loss.chunk_rows
        usually = with_rows(backend.choice, again.choice == "on", usual)
        decisions.append(
            KNOBS["loss.chunk_rows"].decide(
                plan,
                taken_rows=rows,
                usual_rows=usual,
                fewer_rows=fewer,
                usual_bytes=usually.total_bytes,
                available_bytes=available_bytes,
            )
        )
    return found, decisions
