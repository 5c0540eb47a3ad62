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
    known = {owner: t for owner, t in context.tokenizers.items() if t is not None}
    unknown = [owner for owner in context.tokenizers if owner not in known]
    ids = context.student.config.vocab_size
    differing = one_sided = texts = 0
    for (owner, first), (other_owner, second) in combinations(known.items(), 2):
        if first.sha256 == second.sha256:
            continue
        comparison = compare(first, second, ids)
        differing += len(comparison.differing)
        one_sided += comparison.one_sided
        texts += comparison.texts
        if comparison.differing:
            id_, here, there = comparison.differing[0]
            return failed(
                f"{len(comparison.differing):,} of {ids:,} ids differ: id {id_} is {here!r} in {owner} "
                f"and {there!r} in {other_owner}",
                ids=ids,
                differing=len(comparison.differing),
                shared=comparison.shared,
            )
        if comparison.split:
            return failed(
                f"{len(comparison.split):,} of {comparison.texts:,} texts are tokenized differently: "
                f"{comparison.split[0].describe(owner, other_owner)}",
                ids=ids,
                differing=0,
                texts=comparison.texts,
                split=len(comparison.split),
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
        owner = next(iter(known))
        return numbers.passed(
            f"the only tokenizer is that of the {owner}, and the text is tokenized with it"
        )
    return numbers.passed(f"every id below {ids:,} is the same token in {', '.join(known)}")
