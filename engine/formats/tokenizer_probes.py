"""Texts on which two tokenizers with the same tokens are compared.

Two files may give each id the same token and still cut a text in other places: by the order of merges, by a
normalizer, by the expression that splits words, by what becomes of digits, white space or unknown characters.
So both encode about `COUNT` short texts, made of their own tokens and of characters that such parts treat apart:

    merges      what one file alone merges, and each three tokens whose first merge is another in the two
    tokens      the text of tokens evenly spread over the ids, and of those that no merge makes
    neighbours  the texts of merges that follow each other in rank, and phrases of tokens far apart
    variants    of some texts: repeated, in other case, with white space around, followed by digits and marks
    characters  numbers, contractions, white space, accents in both normal forms, scripts, symbols, control characters
    added       tokens that are matched in the text, alone, between words and between spaces

The probes depend on the two files alone, so their order and number are the same in each process.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from engine.formats.tokenizer import Tokenizer

COUNT = 10_000
"""Number of probes of a large vocabulary, about."""
_TOKENS = 3_000
_NEIGHBOURS = 1_500
_PHRASES = 300
_VARIED = 250
"""Number of texts that are also compared in variants."""
_MERGES = 1_000
"""Probes of each kind that are made of merges in another order."""
_RIVALS = 4
"""Number of merges that one merge of another rank is combined with."""
_BROKEN = "\ufffd"
"""Character that the library decodes for invalid UTF-8: encoding the text of such a token gives other tokens."""
_IRRELEVANT = ("version", "truncation", "padding", "decoder")
"""Parts of a file that do not change the ids of a text in this engine."""

T = TypeVar("T")

_SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\xa0", "\u3000", "\u200b")
_NUMBERS = (
    "0",
    "7",
    "10",
    "42",
    "123",
    "1234",
    "12345",
    "123456",
    "1234567",
    "3.14",
    "1,000,000",
    "2024-07-26",
    "0x1F",
)
_WORDS = (
    "'s",
    "'S",
    "don't",
    "I'LL",
    "we\u2019re",
    "o'clock",
    "x_y",
    "a-b",
    "e.g.",
    "f(x)",
    "a+b==c",
    "#!/usr",
    "...",
    "?!",
    "/*--*/",
)
_ACCENTED = (
    "\xe9\xc9\xfc\xf1\xe7\xc5\xdf\u0130\u0131\u01c5\u03a9\u2126\u212b\u1e9e\uac00\ud55c"
    "\u0439\u0622\ufb01\uff21\uff11\xb2\xbd\u2160\u2460\u337f\ufdfa"
)
_MARKS = "\u0301\u0308\u0327\u20d7\u0345\u093c\u0e31"
_OTHERS = (
    "\u4e2d\u3042\u30ab\u0905\u0e01\u05d0\u0627\u0663\u0967\U0001f600\U00020000"
    "\u2581\u0120\u2014\u2026\x00\x07\x7f\xad\ufeff\ue000\u2028"
)


def probes(first: Tokenizer, second: Tokenizer) -> list[str]:
    """Return the texts to compare, each once; an empty list if the two files cannot give a text different ids."""
    if first.sha256 == second.sha256:
        return []
    first_record, second_record = _record(first), _record(second)
    if _id_parts(first_record) == _id_parts(second_record):
        return []
    tokens = first.tokens()
    ids = sorted(tokens)
    id_of = {token: id_ for id_, token in tokens.items()}

    def decoded(spellings: Iterable[Sequence[str]]) -> list[str]:
        known = (
            [id_of[token] for token in each] for each in spellings if id_of.keys() >= set(each)
        )
        return [text for text in first.decode_each(known) if text and _BROKEN not in text]

    first_merges = _merges(first_record)
    second_merges = _merges(second_record)
    by_merges = decoded(_differing_merges(first_merges, second_merges))
    by_merges += decoded(
        (token,)
        for token in _evenly(
            _unmerged_tokens(first_record, second_record, first_merges, second_merges), _MERGES
        )
    )
    texts = decoded([tokens[id_]] for id_ in _evenly(ids, _TOKENS))
    pairs = list(itertools.pairwise(first_merges or [(tokens[id_],) for id_ in ids]))
    neighbours = decoded((*token, *next_token) for token, next_token in _evenly(pairs, _NEIGHBOURS))
    varied = _evenly(texts, _VARIED)
    # Each phrase has six tokens that are far apart in the vocabulary.
    phrases = [
        "".join(_evenly(texts[start:], 6))
        for start in range(0, len(texts), max(1, len(texts) // _PHRASES))
    ]
    phrases += [
        " ".join(_evenly(texts[start:], 6))
        for start in range(0, len(texts), max(1, len(texts) // _PHRASES))
    ]
    added = {*_added(first_record), *_added(second_record)}
    texts_of_all = itertools.chain(
        by_merges,
        texts,
        neighbours,
        phrases,
        itertools.chain.from_iterable(map(_variants, varied)),
        _characters(),
        itertools.chain.from_iterable(_around_added(token) for token in sorted(added)[:_VARIED]),
    )
    return list(dict.fromkeys(texts_of_all))


def _characters() -> Iterator[str]:
    yield from _SPACES
    for text in (*_NUMBERS, *_WORDS):
        yield from (text, f" {text}", f"a{text}", f"{text}b", f"{text} {text}", text.upper())
    for letter in _ACCENTED:
        for form in ("NFC", "NFD", "NFKC"):
            text = unicodedata.normalize(form, letter)
            yield from (text, f"a{text}b", f" {text}", text.lower(), text.upper())
    for mark in _MARKS:
        yield from (mark, f"e{mark}", f"a {mark}", f"e{mark}{_MARKS[0]}", f"e{_MARKS[0]}{mark}x")
    for letter in _OTHERS:
        yield from (letter, letter * 3, f"a{letter}b", f"a {letter} b", f"{letter}1")
    for space in _SPACES:
        yield from (
            f"a{space}b",
            f"{space}a",
            f"a{space}",
            f"{space}a{space}",
            f".{space}A",
            f"1{space}2",
            f"a{space}{space}b",
        )


def _variants(text: str) -> Iterator[str]:
    yield from (text.upper(), text.lower(), text.title(), text.swapcase(), text * 2, text * 30)
    yield from (
        f" {text}",
        f"{text} ",
        f"  {text}",
        f"\t{text}",
        f"\n{text}\n",
        text.strip(),
        f"{text}\r\n",
        f"a  {text}",
    )
    yield from (
        f"{text}1",
        f"{text}2024",
        f"12{text}",
        f"{text}'s",
        f"{text}.",
        f"({text})",
        f"{text}\u0301",
        f"\xe9{text}",
    )


def _around_added(token: str) -> Iterator[str]:
    yield from (
        token,
        token * 2,
        f"a{token}b",
        f"a {token} b",
        f"  {token}  ",
        f"\n{token}\n",
        f"1{token}2",
        token.upper(),
        token.lower(),
    )


def _differing_merges(
    first_merges: Sequence[tuple[str, ...]], second_merges: Sequence[tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """Yield sequences of tokens that the two lists may merge differently."""
    first_rank = {merge: rank for rank, merge in enumerate(first_merges)}
    second_rank = {merge: rank for rank, merge in enumerate(second_merges)}
    in_one_only = [merge for merge in first_merges if merge not in second_rank] + [
        merge for merge in second_merges if merge not in first_rank
    ]
    yield from _evenly(in_one_only, _MERGES)
    common = [merge for merge in first_rank if merge in second_rank]
    place = {
        merge: number for number, merge in enumerate(sorted(common, key=second_rank.__getitem__))
    }
    moved = [
        (-abs(place[merge] - number), number)
        for number, merge in enumerate(common)
        if place[merge] != number
    ]
    if not moved:
        return
    begin, end = (
        defaultdict[str, list[tuple[str, ...]]](list),
        defaultdict[str, list[tuple[str, ...]]](list),
    )
    for merge in common:
        begin[merge[0]].append(merge)
        end[merge[-1]].append(merge)

    def turned(
        merge: tuple[str, ...], rivals: Iterable[tuple[str, ...]]
    ) -> Iterator[tuple[str, ...]]:
        return itertools.islice(
            (
                rival
                for rival in rivals
                if (first_rank[rival] < first_rank[merge])
                != (second_rank[rival] < second_rank[merge])
            ),
            _RIVALS,
        )

    def rows() -> Iterator[tuple[str, ...]]:
        # The merge that moved farthest in rank passed the most other merges.
        for _, number in sorted(moved)[:_MERGES]:
            first, *rest = merge = common[number]
            yield from ((rival[0], *merge) for rival in turned(merge, end[first]))
            yield from ((first, *rest, rival[-1]) for rival in turned(merge, begin[rest[-1]]))

    yield from itertools.islice(rows(), _MERGES)


def _evenly(values: Sequence[T], count: int) -> list[T]:
    """Return at most `most` of the values, spread over all of them."""
    size = min(count, len(values))
    return [values[number * len(values) // size] for number in range(size)]


def _record(tokenizer: Tokenizer) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(tokenizer.raw)
    return record


def _id_parts(record: dict[str, Any]) -> dict[str, Any]:
    parts = {key: value for key, value in record.items() if key not in _IRRELEVANT}
    return {
        **parts,
        "model": {key: value for key, value in record["model"].items() if key != "dropout"},
    }


def _unmerged_tokens(
    first: dict[str, Any],
    second: dict[str, Any],
    first_merges: Sequence[tuple[str, ...]],
    second_merges: Sequence[tuple[str, ...]],
) -> list[str]:
    """Return the tokens that no merge makes; of vocabularies with scores, the tokens whose scores differ."""
    first_vocab, second_vocab = (
        first["model"].get("vocab") or (),
        second["model"].get("vocab") or (),
    )
    if isinstance(first_vocab, list) and isinstance(second_vocab, list):
        return [
            one[0] for one, other in zip(first_vocab, second_vocab, strict=False) if one != other
        ]
    merged = {"".join(merge) for merge in first_merges} & {
        "".join(merge) for merge in second_merges
    }
    return (
        [token for token in first_vocab if len(token) > 1 and token not in merged] if merged else []
    )


def _merges(record: dict[str, Any]) -> list[tuple[str, ...]]:
    merges = record["model"].get("merges") or ()
    return [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges]


def _added(record: dict[str, Any]) -> list[str]:
    return [token["content"] for token in record.get("added_tokens") or ()]
