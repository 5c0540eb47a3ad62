"""Check that a token id means the same token everywhere; `engine.teachers.vocabulary` compares.

Equal vocabulary sizes prove nothing: two tokenizers of one size may share no token, and two with the same tokens may
split a text differently.
"""

from __future__ import annotations

from itertools import combinations

from engine.checks.context import Context
from engine.teachers.vocabulary import compare
from engine.verdict import Answer, Numbers, failed


def vocabulary_by_bytes(context: Context) -> Answer:
    known = {whose: one for whose, one in context.tokenizers.items() if one is not None}
    unknown = [whose for whose, one in context.tokenizers.items() if one is None]
    ids = context.student.config.vocab_size
    differing = one_sided = texts = 0
    for (whose, one), (other, other_tokenizer) in combinations(known.items(), 2):
        if one.sha256 == other_tokenizer.sha256:
            continue
        found = compare(one, other_tokenizer, ids)
        differing += len(found.differing)
        one_sided += found.one_sided
        texts += found.texts
        if found.differing:
            id_, here, there = found.differing[0]
            return failed(
                f"{len(found.differing):,} of {ids:,} ids differ: id {id_} is {here!r} in {whose} "
                f"and {there!r} in {other}",
                ids=ids,
                differing=len(found.differing),
                shared=found.shared,
            )
        if found.split:
            return failed(
                f"{len(found.split):,} of {found.texts:,} texts are tokenized differently: "
                f"{found.split[0].said(whose, other)}",
                ids=ids,
                differing=0,
                texts=found.texts,
                split=len(found.split),
            )
    numbers = Numbers(
        ids=ids, differing=differing, one_sided=one_sided, texts=texts, compared=len(known)
    )
    if not known:
        return numbers.unknown("no tokenizer is known, so none were compared")
    if unknown:
        return numbers.unknown(
            f"the tokenizer of {', '.join(unknown)} is not known, so its ids were not compared"
        )
    if len(known) == 1:
        whose = next(iter(known))
        return numbers.passed(
            f"the only tokenizer is that of the {whose}, and the text is tokenized with it"
        )
    return numbers.passed(f"every id below {ids:,} is the same token in {', '.join(known)}")
