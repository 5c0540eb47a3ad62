"""Checks that a token id means the same to the teacher, to the student and in the training text.

Distillation compares probabilities id by id. With two tokenizers of different families every number
is still finite, every curve still falls, and the student is trained on noise. So where the
tokenizers are known, every id is compared by the text of its token. An id that only one of the two
defines is reported but is no error (checkpoints of one family add special tokens, and pad). An
unknown tokenizer is also reported, never assumed to be equal.

Ids at and beyond the student's vocabulary are cut from the teacher, so they are not compared.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import TokenizerError
from engine.formats.tokenizer import Tokenizer

LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two tokenizers id by id, below a limit."""

    differing: tuple[tuple[int, str, str], ...]
    """Ids that map to different tokens in the two: (id, token here, token there)."""
    one_sided: int
    """Number of ids that only one of them defines."""
    shared: int
    """Number of ids that map to the same token in both."""


def compare(here: Tokenizer, there: Tokenizer, ids: int) -> Comparison:
    """Compare the tokens with ids below `ids` of both."""
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
    """Compare each pair of tokenizers below `ids`, the student's vocabulary size.

    `known` maps the owner of a tokenizer (`teacher`, `student`, `data.tokenizer`) to the tokenizer,
    or to None if it is not known. Returns notes about what could not be compared and about ids that
    only one side defines. Raises TokenizerError with the first differing ids of the first pair that
    differs.
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
