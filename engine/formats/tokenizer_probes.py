"""Probe strings on which two tokenizers with the same vocabulary are compared.

Two files may give each id the same token and still tokenize a document differently, if they differ in the order of
merges, the normalizer, the expression of the pre-tokenizer, or the treatment of digits, white space or unknown
characters. So both encode some thousand short strings, made of their tokens and of characters that these components
treat specially:

    merges      the two tokens of a merge whose rank differs, alone, and before or after a token that another merge
                would join with one of them
    tokens      tokens evenly spread over the ids, each alone and followed by the next
    words       numbers, contractions, white space, accents in both normal forms, scripts, symbols, control characters
    added       added tokens

Each is tried alone and between other characters. The strings depend on the two files alone. This module does not
import torch.
"""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from engine.formats.tokenizer import Tokenizer

_TOKENS, _MERGES, _RIVALS = 2_000, 1_000, 4
"""Maximum number of tokens and of merges that probe strings are made of, and of competing merges for each merge."""
_BROKEN = "\ufffd"
"""Character that the library decodes for invalid UTF-8. Strings with it are dropped, because they do not encode to the
tokens they came from."""
_IRRELEVANT = ("version", "truncation", "padding", "decoder")
"""Keys of a tokenizer.json that do not change ids in this engine."""
_WORDS = (
    "0 7 10 42 123 1234 12345 123456 1234567 3.14 1,000,000 2024-07-26 0x1F 's 'S don't I'LL we\u2019re o'clock x_y "
    "a-b e.g. f(x) a+b==c #!/usr ... ?! /*--*/ \xe9 \xc9 \xfc \xf1 \xe7 \xdf \u0130 \u01c5 \u03a9 \u2126 \u212b \u1e9e "
    "\uac00 \u0439 \u0622 \ufb01 \uff21 \uff11 \xb2 \xbd \u2160 \u2460 \u337f e\u0301 e\u0308\u0301 \u20d7 \u093c "
    "\u4e2d \u3042 \u30ab \u0905 \u0e01 \u05d0 \u0627 \u0663 \u0967 \U0001f600 \U00020000 \u2581 \u0120 \u2014 \u2026 "
    "\x00 \x07 \x7f \xad \ufeff \ue000"
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\xa0",
    "\u3000",
    "\u200b",
    "\u2028",
)

T = TypeVar("T")


def probes(first: Tokenizer, second: Tokenizer) -> list[str]:
    """Return the strings on which to compare, each once; an empty list if the two files cannot give any document
    different ids."""
    if first.sha256 == second.sha256:
        return []
    records = [json.loads(tokenizer.raw) for tokenizer in (first, second)]
    if _id_parts(records[0]) == _id_parts(records[1]):
        return []
    tokens = first.tokens()
    ids = {token: id_ for id_, token in tokens.items()}
    spellings = [
        *_differing_merges(*map(_merges, records)),
        *((token,) for record in records for token in _evenly(_unmerged(record), _TOKENS)),
        *((tokens[id_],) for id_ in _evenly(sorted(tokens), _TOKENS)),
        *(
            (tokens[one], tokens[two])
            for one, two in _evenly([*itertools.pairwise(sorted(tokens))], _TOKENS)
        ),
    ]
    known = ([ids[token] for token in each] for each in spellings if ids.keys() >= set(each))
    texts = [text for text in first.decode_each(known) if text and _BROKEN not in text]
    added = [one["content"] for record in records for one in record.get("added_tokens") or ()]
    words = [form for word in _WORDS.split(" ") for form in _forms(word)]
    around = [*words, *_SPACES, *added, *_evenly(texts, 250)]
    return list(dict.fromkeys([*texts, *(text for word in around for text in _variants(word))]))


def _forms(word: str) -> list[str]:
    return [unicodedata.normalize(form, word) for form in ("NFC", "NFD", "NFKC")]


def _variants(text: str) -> Iterator[str]:
    yield from (
        text,
        text.upper(),
        text.lower(),
        text * 2,
        text * 30,
        f"{text}1",
        f"12{text}",
        f".{text}A",
    )
    yield from (
        f" {text}",
        f"{text} ",
        f"  {text}  ",
        f"\n{text}\r\n",
        f"a{text}b",
        f"a {text} b",
        f"{text}\u0301",
    )


def _differing_merges(
    first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """Yield sequences of tokens that two lists of merges may merge differently.

    The sequence is the two tokens of a merge that one list lacks or has at another rank. It is yielded alone,
    followed by a token that some merge joins to its second token, and preceded by a token that some merge joins to its
    first token.
    """
    ranks = [{merge: rank for rank, merge in enumerate(merges)} for merges in (first, second)]
    differing = [
        merge for merge in {**ranks[0], **ranks[1]} if ranks[0].get(merge) != ranks[1].get(merge)
    ]
    begin, end = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for merge in ranks[0]:
        begin[merge[0]].append(merge[-1])
        end[merge[-1]].append(merge[0])
    for merge in _evenly(differing, _MERGES):
        yield merge
        yield from ((*merge, after) for after in _evenly(begin[merge[-1]], _RIVALS))
        yield from ((before, *merge) for before in _evenly(end[merge[0]], _RIVALS))


def _unmerged(record: dict[str, Any]) -> list[str]:
    """Return the tokens of several characters that no merge produces."""
    made = {"".join(merge) for merge in _merges(record)}
    vocabulary: Iterable[Any] = record["model"].get("vocab") or ()
    names = [one if isinstance(one, str) else one[0] for one in vocabulary]
    return [name for name in names if len(name) > 1 and name not in made]


def _evenly(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the values, spread over all of them."""
    size = min(count, len(values))
    return [values[number * len(values) // size] for number in range(size)]


def _id_parts(record: dict[str, Any]) -> dict[str, Any]:
    parts = {key: value for key, value in record.items() if key not in _IRRELEVANT}
    model = {key: value for key, value in record["model"].items() if key != "dropout"}
    return {**parts, "model": {**model, "merges": _merges(record)}}


def _merges(record: dict[str, Any]) -> list[tuple[str, ...]]:
    merges = record["model"].get("merges") or ()
    return [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges]
