"""What a run gives up so that it fits in the memory it may take: what costs least first. Pure.

    loss.chunk_rows         logits of fewer tokens at a time: 1 ms or two of a step of 8192 tokens
    teacher.backend         weights that stay in their blocks: 3 to 5 % of a step
    student.checkpointing   activations made again in the backward pass: a third more of its forward
    teacher.shard           layers gathered from the other ranks when they compute, where all of that is not
                            enough; then the others are asked anew

Each is given up for the whole run, before it begins, and said. What the settings name is kept as it is;
a run that fits is left as it is, and one that fits in no way is refused by its budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.decision import SET_BY_USER, Decision
from engine.models.config import ModelConfig
from engine.plan.budget import MemoryBudget
from engine.plan.choices import choose_checkpointing
from engine.teachers.choose import choose_backend
from engine.units import format_bytes

FEWER_CHUNK_ROWS = (1024, 512)
"""Tokens whose logits are held at a time where memory is short, most first; products of fewer rows are
slower, and a head in blocks is made floats for each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """How the run will be, and what it then needs."""

    backend: str
    checkpointing: bool
    chunk_rows: int
    budget: MemoryBudget
    decisions: tuple[Decision, ...]
    teacher_shard: bool = False
    """Whether the ranks share the teacher's layers (`engine.plan.choose_ranks`)."""
    graphs: bool = False
    """Whether the student's layers are captured (`engine.train.graphed`)."""
    reshard: bool = True
    """Whether ranks gather every layer twice a step (`engine.plan.choose_ranks`)."""


def fit(
    need: Callable[[str, bool, int], MemoryBudget],
    *,
    available_bytes: int | None,
    backend: str,
    checkpointing: str,
    chunk_rows: int,
    usual_chunk_rows: int,
    teacher: ModelConfig | None,
    quantised_blocks: bool,
    precision: str,
    stored: str | None,
) -> Fitted:
    """`need` is the budget with a backend, with activations made again or not, and with some tokens in
    a chunk. `backend`, `checkpointing` and `chunk_rows` (0: not given) are as the settings have them,
    `usual_chunk_rows` what is taken where memory is plenty. `precision` is the teacher's; `stored` says
    what there is of its outputs. With `available_bytes` None everything fits.

    Raises BadInput for a backend that the teacher does not have.
    """
    usual = chunk_rows or usual_chunk_rows
    fewer = [] if chunk_rows else [rows for rows in FEWER_CHUNK_ROWS if rows < usual]

    def fits(budget: MemoryBudget) -> bool:
        return available_bytes is None or budget.total_bytes <= available_bytes

    def rows(kind: str, again: bool) -> int:
        """The most tokens in a chunk that fit; where none do, the fewest."""
        tried = [usual, *fewer]
        return next((count for count in tried if fits(need(kind, again, count))), tried[-1])

    def least(kind: str, again: bool) -> int:
        return need(kind, again, rows(kind, again)).total_bytes

    forced = checkpointing == "on"
    teaching = choose_backend(
        backend,
        config=teacher,
        quantised_blocks=quantised_blocks,
        dense_bytes=least("dequantized", forced),
        packed_bytes=least("quantized", forced) if quantised_blocks else None,
        available_bytes=available_bytes,
        precision=precision,
        stored=stored,
    )
    again = choose_checkpointing(
        checkpointing,
        without_bytes=least(teaching.choice, False),
        with_bytes=least(teaching.choice, True),
        available_bytes=available_bytes,
    )
    kind, makes_again = teaching.choice, again.choice == "on"
    taken = rows(kind, makes_again)
    decisions = [teaching, again]
    if chunk_rows or fewer:
        with_usual = need(kind, makes_again, usual).total_bytes
        decisions.append(_chunks(taken, usual, fewer, with_usual, available_bytes))
    return Fitted(
        backend=kind,
        checkpointing=makes_again,
        chunk_rows=taken,
        budget=need(kind, makes_again, taken),
        decisions=tuple(decisions),
    )


def _chunks(
    taken: int, usual: int, fewer: list[int], with_usual: int, available_bytes: int | None
) -> Decision:
    if not fewer:
        return Decision(
            knob="loss.chunk_rows", choice=str(taken), reason=SET_BY_USER, overridden=True
        )
    room = "" if available_bytes is None else f" of {format_bytes(available_bytes)} available"
    needs = f"with chunks of {usual} tokens the run needs {format_bytes(with_usual)}{room}"
    if taken == usual:
        return Decision(
            knob="loss.chunk_rows",
            choice=str(usual),
            reason=needs,
            rejected=((str(fewer[0]), "smaller products, which are slower"),),
        )
    return Decision(
        knob="loss.chunk_rows",
        choice=str(taken),
        reason=f"{needs}; smaller products are a little slower and need less",
        rejected=((str(usual), needs),),
    )
