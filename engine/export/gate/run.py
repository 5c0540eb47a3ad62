"""Run all gates of one subject, one after the other. A BadInput or NoAnswer in one gate makes it unknown, and
the others still run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from engine.errors import BadInput, NoAnswer
from engine.export.gate import IDS
from engine.export.gate.gate import Subject
from engine.export.gate.results import eval_threshold, heldout_target
from engine.export.gate.smoke import smoke
from engine.export.outcome import Outcome, unknown

GATES: dict[str, Callable[[Subject], Outcome]] = dict(
    zip(IDS, (smoke, heldout_target, eval_threshold), strict=True)
)


def run_gates(subject: Subject, only: Collection[str] = IDS) -> Iterator[Outcome]:
    for id_, gate in GATES.items():
        if id_ not in only:
            continue
        try:
            yield gate(subject)
        except (BadInput, NoAnswer) as error:
            yield unknown(id_, error.message)
