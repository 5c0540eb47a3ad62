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
"""Texts of which there are variants."""
_MERGES = 1_000
"""Probes of each kind that are made of merges in another order."""
_RIVALS = 4
"""Merges that are compared with one that has another rank."""
_BROKEN = "\ufffd"
"""Character that the library decodes for invalid UTF-8: encoding the text of such a token gives other tokens."""
_IRRELEVANT = ("version", "truncation", "padding", "decoder")
"""Parts of a file that do not change the ids of a text, as this engine opens it."""

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


def probes(here: Tokenizer, there: Tokenizer) -> list[str]:
    """Return the texts to compare, each once; none where all is the same that decides the ids of a text."""
    if here.sha256 == there.sha256:
        return []
    mine, theirs = _record(here), _record(there)
    if _relevant(mine) == _relevant(theirs):
        return []
    tokens = here.tokens()
    ids = sorted(tokens)
    id_of = {token: id_ for id_, token in tokens.items()}

    def decoded(spellings: Iterable[Sequence[str]]) -> list[str]:
        known = ([id_of[one] for one in each] for each in spellings if id_of.keys() >= set(each))
        return [text for text in here.decode_each(known) if text and _BROKEN not in text]

    merges = _merges(mine)
    others = _merges(theirs)
    by_merges = decoded(_merged_otherwise(merges, others))
    by_merges += decoded(
        (one,) for one in _evenly(_set_apart(mine, theirs, merges, others), _MERGES)
    )
    texts = decoded([tokens[id_]] for id_ in _evenly(ids, _TOKENS))
    pairs = list(itertools.pairwise(merges or [(tokens[id_],) for id_ in ids]))
    neighbours = decoded((*one, *other) for one, other in _evenly(pairs, _NEIGHBOURS))
    some = _evenly(texts, _VARIED)
    # Tokens far apart in the vocabulary, in an order in which all of them come up.
    phrases = [
        "".join(_evenly(texts[start:], 6))
        for start in range(0, len(texts), max(1, len(texts) // _PHRASES))
    ]
    phrases += [
        " ".join(_evenly(texts[start:], 6))
        for start in range(0, len(texts), max(1, len(texts) // _PHRASES))
    ]
    added = {*_added(mine), *_added(theirs)}
    found = itertools.chain(
        by_merges,
        texts,
        neighbours,
        phrases,
        itertools.chain.from_iterable(map(_variants, some)),
        _characters(),
        itertools.chain.from_iterable(_beside(one) for one in sorted(added)[:_VARIED]),
    )
    return list(dict.fromkeys(found))


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


def _beside(token: str) -> Iterator[str]:
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


def _merged_otherwise(
    mine: Sequence[tuple[str, ...]], theirs: Sequence[tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """Yield tokens in a row that the two lists of merges may join in another way."""
    here = {merge: rank for rank, merge in enumerate(mine)}
    there = {merge: rank for rank, merge in enumerate(theirs)}
    alone = [merge for merge in mine if merge not in there] + [
        merge for merge in theirs if merge not in here
    ]
    yield from _evenly(alone, _MERGES)
    common = [merge for merge in here if merge in there]
    place = {merge: number for number, merge in enumerate(sorted(common, key=there.__getitem__))}
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
            (one for one in rivals if (here[one] < here[merge]) != (there[one] < there[merge])),
            _RIVALS,
        )

    def rows() -> Iterator[tuple[str, ...]]:
        # What moved farthest passed most others.
        for _, number in sorted(moved)[:_MERGES]:
            first, *rest = merge = common[number]
            yield from ((rival[0], *merge) for rival in turned(merge, end[first]))
            yield from ((first, *rest, rival[-1]) for rival in turned(merge, begin[rest[-1]]))

    yield from itertools.islice(rows(), _MERGES)


def _evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, spread over all of them."""
    count = min(most, len(values))
    return [values[number * len(values) // count] for number in range(count)]


def _record(tokenizer: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.raw)
    return found


def _relevant(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key not in _IRRELEVANT}
    return {
        **kept,
        "model": {key: value for key, value in record["model"].items() if key != "dropout"},
    }


def _set_apart(
    mine: dict[str, Any],
    theirs: dict[str, Any],
    merges: Sequence[tuple[str, ...]],
    others: Sequence[tuple[str, ...]],
) -> list[str]:
    """Return the tokens that no merge makes, and those that have another score in the two vocabularies."""
    here, there = mine["model"].get("vocab") or (), theirs["model"].get("vocab") or ()
    if isinstance(here, list) and isinstance(there, list):
        return [one[0] for one, other in zip(here, there, strict=False) if one != other]
    made = {"".join(merge) for merge in merges} & {"".join(merge) for merge in others}
    return [token for token in here if len(token) > 1 and token not in made] if made else []


def _merges(record: dict[str, Any]) -> list[tuple[str, ...]]:
    merges = record["model"].get("merges") or ()
    return [tuple(one.split(" ", 1) if isinstance(one, str) else one) for one in merges]


def _added(record: dict[str, Any]) -> list[str]:
    return [one["content"] for one in record.get("added_tokens") or ()]
