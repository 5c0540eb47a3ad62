"""What one way to load a model has shown: its answer, held against the reference's.

    as_float    it computes in fp32 from the same weights: ids, tokens, text and logits are the same
    within      its weights are in blocks: logits within the noise of the block type

A way that is absent is unknown; one that is there and crashes, or answers otherwise, has failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.export.compare import FLOAT_TOLERANCE, distance, divergence, first_difference
from engine.export.peers import Absent, Answered, Crashed
from engine.verdict import Level, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    id: str
    verdict: Verdict
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.id}: {self.verdict}"


# contract: publication-v1
def as_float(id_: str, answer: Answered | Absent | Crashed, reference: Answered) -> Outcome:
    """A way that computes in fp32 from the same weights: everything has to be the same."""
    if isinstance(answer, Absent):
        return Outcome(id=id_, verdict=Verdict(Level.UNKNOWN, answer.reason))
    if isinstance(answer, Crashed):
        return Outcome(id=id_, verdict=Verdict(Level.FAIL, answer.reason))
    for index, (ours, theirs) in enumerate(zip(reference.ids, answer.ids, strict=True)):
        if ours != theirs:
            text = f"prompt {index + 1} is {theirs} there and {ours} here: another tokenizer"
            return Outcome(id=id_, verdict=Verdict(Level.FAIL, f"{answer.version}: {text}"))
    if any(a.shape != b.shape for a, b in zip(answer.logits, reference.logits, strict=True)):
        sizes = f"{answer.logits[0].shape[1]:,} ids, expected {reference.logits[0].shape[1]:,}"
        return Outcome(id=id_, verdict=Verdict(Level.FAIL, f"{answer.version}: {sizes}"))
    apart = distance(reference.logits, answer.logits)
    steps = len(reference.tokens[0])
    numbers = {"logits_apart": apart, "limit": FLOAT_TOLERANCE, "steps": float(steps)}
    ties = []
    for row, ours, theirs, logits_TV in zip(
        reference.rows, reference.tokens, answer.tokens, reference.logits, strict=True
    ):
        at = first_difference(row[: len(row) - len(ours)], ours, theirs, logits_TV)
        if at is not None and not at.tie:
            return Outcome(
                id=id_, verdict=Verdict(Level.FAIL, f"{answer.version}: {at}"), numbers=numbers
            )
        ties += [at] if at is not None else []
    # Written so that NaN fails.
    if not apart <= FLOAT_TOLERANCE:
        found = (
            f"{answer.version}: logits {apart:.2g} of their size apart, at most {FLOAT_TOLERANCE:g}"
        )
        return Outcome(id=id_, verdict=Verdict(Level.FAIL, found), numbers=numbers)
    if ties:
        found = f"{answer.version}: {len(ties)} of {len(reference.rows)} texts differ from a tie on: {ties[0]}"
        return Outcome(id=id_, verdict=Verdict(Level.UNKNOWN, found), numbers=numbers)
    if answer.text != reference.text:
        at_text = next(
            i for i, (a, b) in enumerate(zip(answer.text, reference.text, strict=True)) if a != b
        )
        found = f"{answer.version}: the same tokens are other text: {answer.text[at_text][:60]!r}"
        return Outcome(id=id_, verdict=Verdict(Level.FAIL, found), numbers=numbers)
    text = (
        f"{answer.version}: the same ids, {steps} greedy tokens and text of {len(reference.rows)} prompts; "
        f"logits {apart:.1e} of their size apart"
    )
    return Outcome(id=id_, verdict=Verdict(Level.PASS, text), numbers=numbers)


# contract: publication-v1
def within(
    id_: str, answer: Answered | Absent | Crashed, reference: Answered, limit: float, than: str
) -> Outcome:
    if not isinstance(answer, Answered):
        level = Level.UNKNOWN if isinstance(answer, Absent) else Level.FAIL
        return Outcome(id=id_, verdict=Verdict(level, answer.reason))
    if any(a.shape != b.shape for a, b in zip(answer.logits, reference.logits, strict=True)):
        return Outcome(
            id=id_, verdict=Verdict(Level.FAIL, f"{answer.version}: another number of ids")
        )
    kl, agreement = divergence(reference.logits, answer.logits)
    numbers = {"kl": kl, "limit": limit, "top1_agreement": agreement}
    text = f"{answer.version}: KL {kl:.2g} from {than}, top-1 {agreement:.1%}; noise of the type {limit:.2g}"
    level = Level.PASS if kl <= limit else Level.FAIL
    return Outcome(id=id_, verdict=Verdict(level, text), numbers=numbers)
