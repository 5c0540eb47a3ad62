"""Check that a token id means the same to the teacher, to the student and in the training text.

Distillation compares probabilities id by id. With two tokenizers of different families every number
is still finite, every curve still falls, and the student is trained on noise. So where the
tokenizers are known, every id is compared by the text of its token. An id that only one of the two
defines is reported but is no error (checkpoints of one family add special tokens, and pad). An
unknown tokenizer is also reported, never assumed to be equal.

Where no id has two different tokens, both tokenizers also encode texts made for this check
(`engine.formats.tokenizer_probes`): with other merges, or another normalizer, a model reads its text in tokens that it
was not trained on. Texts with an id that only one of the two defines are not compared.

Ids at and beyond the student's vocabulary are cut from the teacher, so they are not compared.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import TokenizerError
from engine.formats.tokenizer import Tokenizer
from engine.formats.tokenizer_probes import probes

LISTED = 3
SHOWN_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A text that two tokenizers encode as different tokens."""

    text: str
    here: tuple[str, ...]
    there: tuple[str, ...]

    def describe(self, whose: str, other: str) -> str:
        """Show the text and the tokens of each tokenizer."""
        return (
            f"{self.text!r} is {_listed(self.here)} in {whose} and {_listed(self.there)} in {other}"
        )


def _listed(tokens: tuple[str, ...]) -> str:
    more = f" and {len(tokens) - SHOWN_TOKENS} more" if len(tokens) > SHOWN_TOKENS else ""
    return " ".join(map(repr, tokens[:SHOWN_TOKENS])) + more if tokens else "no token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two tokenizers id by id, below a limit."""

    differing: tuple[tuple[int, str, str], ...]
    """Ids that map to different tokens in the two tokenizers: (id, token here, token there)."""
    one_sided: int
    """Number of ids that only one tokenizer defines."""
    shared: int
    """Number of ids that map to the same token in both tokenizers."""
    texts: int = 0
    """Number of texts that both encoded; 0 where ids differ, or nothing in the files can make texts differ."""
    split: tuple[Split, ...] = ()
    """Texts that the two encode as different tokens although both tokenizers have all of these tokens."""


def compare(here: Tokenizer, there: Tokenizer, ids: int) -> Comparison:
    """Compare the tokens of both with ids below `ids` and, if none differs, the tokens that both encode texts into."""
    tokens_here, tokens_there = here.tokens(), there.tokens()
    differing = []
    shared = set()
    one_sided = 0
    for id_ in range(ids):
        token_here, token_there = tokens_here.get(id_), tokens_there.get(id_)
        if token_here is None or token_there is None:
            one_sided += token_here is not token_there
        elif token_here == token_there:
            shared.add(id_)
        else:
            differing.append((id_, token_here, token_there))
    texts = [] if differing else probes(here, there)
    split = [
        Split(
            text=text,
            here=tuple(tokens_here[i] for i in ids_here),
            there=tuple(tokens_there[i] for i in ids_there),
        )
        for text, ids_here, ids_there in zip(
            texts, here.encode_each(texts), there.encode_each(texts), strict=True
        )
        if ids_here != ids_there and shared.issuperset(ids_here) and shared.issuperset(ids_there)
    ]
    return Comparison(
        differing=tuple(differing),
        one_sided=one_sided,
        shared=len(shared),
        texts=len(texts),
        split=tuple(split),
    )


# contract: vocabulary-alignment-v1
def check_vocabularies(known: Mapping[str, Tokenizer | None], ids: int) -> tuple[str, ...]:
    """Compare each pair of tokenizers below `ids`, the student's vocabulary size.

    `known` maps the owner of a tokenizer (`teacher`, `student`, `data.tokenizer`) to the tokenizer,
    or to None if it is not known. Returns notes about what could not be compared and about ids that
    only one side defines. Raises TokenizerError with the first differing ids, or the first text that
    is encoded in different tokens, of the first pair that differs.
    """
    notes = [
        f"vocabulary: the {whose}'s tokenizer is not known, so its ids were not compared"
        for whose, tokenizer in known.items()
        if tokenizer is None
    ]
    present = [(whose, tokenizer) for whose, tokenizer in known.items() if tokenizer is not None]
    for index, (whose, tokenizer) in enumerate(present):
        for other_owner, other_tokenizer in present[index + 1 :]:
            if tokenizer.sha256 == other_tokenizer.sha256:
                continue
            found = compare(tokenizer, other_tokenizer, ids)
            if found.differing:
                raise _refusal(whose, tokenizer, other_owner, other_tokenizer, found, ids)
            if found.split:
                raise _refusal_of_text(whose, tokenizer, other_owner, other_tokenizer, found)
            if found.one_sided:
                notes.append(
                    f"vocabulary: {found.shared:,} of {ids:,} ids are the same token in "
                    f"{whose} and {other_owner}, no id is a different token; {found.one_sided:,} are a "
                    "token in one of them alone"
                )
    return tuple(notes)


def _refusal(
    whose: str,
    tokenizer: Tokenizer,
    other_owner: str,
    other_tokenizer: Tokenizer,
    found: Comparison,
    ids: int,
) -> TokenizerError:
    listed = "".join(
        f"\n  id {id_:,}: {whose} {a!r}, {other_owner} {b!r}"
        for id_, a, b in found.differing[:LISTED]
    )
    unlisted = len(found.differing) - LISTED
    more = f"\n  ... and {unlisted:,} more" if unlisted > 0 else ""
    return TokenizerError.expected(
        "vocabulary",
        f"{tokenizer.path} ({whose}), {other_tokenizer.path} ({other_owner})",
        f"the same token for every id below {ids:,}",
        f"{len(found.differing):,} that differ:{listed}{more}",
        hint="teacher and student must come from one family: probabilities are compared id by id",
    )


def _refusal_of_text(
    whose: str,
    tokenizer: Tokenizer,
    other_owner: str,
    other_tokenizer: Tokenizer,
    found: Comparison,
) -> TokenizerError:
    listed = "".join(f"\n  {split.describe(whose, other_owner)}" for split in found.split[:LISTED])
    unlisted = len(found.split) - LISTED
    more = f"\n  ... and {unlisted:,} more" if unlisted > 0 else ""
    return TokenizerError.expected(
        "vocabulary",
        f"{tokenizer.path} ({whose}), {other_tokenizer.path} ({other_owner})",
        "the same tokens for every text",
        f"{len(found.split):,} of {found.texts:,} texts in other tokens, although no id differs:{listed}{more}",
        hint="both models read the text in one tokenizer's tokens; if a model was trained with the other "
        "tokenizer.json, put that file in place of its own, else take models of one family",
    )
