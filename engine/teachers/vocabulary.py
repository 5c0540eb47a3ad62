"""Whether an id means the same to the teacher, to the student and in the training text.

A distillation compares probabilities id by id. With two tokenizers of different families every
number is still finite, every curve still falls, and the student is taught noise. So where
tokenizers are known, every id is compared by the text of its token. An id that only one of the
two has a token for is no contradiction (checkpoints of one family add special tokens, and pad), but
is said. A tokenizer that is not known is said too, never taken for equal.

Ids at and beyond the student's vocabulary are cut from the teacher, so they are not compared.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import TokenizerError
from engine.formats.tokenizer import Tokenizer

LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two tokenizers, id by id, below a number of ids."""

    differing: tuple[tuple[int, str, str], ...]
    """Ids that are one token here and another there: (id, token here, token there)."""
    one_sided: int
    """Ids that only one of them has a token for."""
    shared: int
    """Ids that are the same token in both."""


def compare(here: Tokenizer, there: Tokenizer, ids: int) -> Comparison:
    """Ids 0 to `ids` of both."""
    mine, theirs = here.tokens(), there.tokens()
    differing = []
    one_sided = shared = 0
    for id_ in range(ids):
        a, b = mine.get(id_), theirs.get(id_)
        if a is None or b is None:
            one_sided += a is not b
        elif a == b:
            shared += 1
        else:
            differing.append((id_, a, b))
    return Comparison(differing=tuple(differing), one_sided=one_sided, shared=shared)


# contract: vocabulary-alignment-v1
def check_vocabularies(known: Mapping[str, Tokenizer | None], ids: int) -> tuple[str, ...]:
    """Compares tokenizers by whose they are (`teacher`, `student`, `data.tokenizer`), each pair
    below `ids`, the student's vocabulary. None stands for one that is not known.

    Returns notes on what could not be compared and on ids that only one side has. Raises
    TokenizerError with the first differing ids of the first pair that contradicts itself.
    """
    notes = [
        f"vocabulary: the {whose}'s tokenizer is not known, so its ids were not compared"
        for whose, tokenizer in known.items()
        if tokenizer is None
    ]
    present = [(whose, tokenizer) for whose, tokenizer in known.items() if tokenizer is not None]
    for index, (whose, tokenizer) in enumerate(present):
        for other, another in present[index + 1 :]:
            if tokenizer.sha256 == another.sha256:
                continue
            found = compare(tokenizer, another, ids)
            if found.differing:
                raise _refusal(whose, tokenizer, other, another, found, ids)
            if found.one_sided:
                notes.append(
                    f"vocabulary: {found.shared:,} of {ids:,} ids are the same token in "
                    f"{whose} and {other}, none is another; {found.one_sided:,} are a token "
                    "in one of them alone"
                )
    return tuple(notes)


def _refusal(
    whose: str, tokenizer: Tokenizer, other: str, another: Tokenizer, found: Comparison, ids: int
) -> TokenizerError:
    listed = "".join(
        f"\n  id {id_:,}: {whose} {a!r}, {other} {b!r}" for id_, a, b in found.differing[:LISTED]
    )
    left = len(found.differing) - LISTED
    more = f"\n  ... and {left:,} more" if left > 0 else ""
    return TokenizerError.expected(
        "vocabulary",
        f"{tokenizer.path} ({whose}), {another.path} ({other})",
        f"the same token for every id below {ids:,}",
        f"{len(found.differing):,} that differ:{listed}{more}",
        hint="teacher and student must come from one family: probabilities are compared id by id",
    )
