"""Checks of rows and splits. No model runs: numpy on the rows that the next steps will train on.

The rows of LOOKED_AT steps are taken from the current position, as the trainer will take them.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.audit.corpus import (
    Records,
    bytes_of_tokens,
    copies_of,
    files_of,
    is_held_out,
    plain,
    read_records,
    size_of_text,
    spelling_of,
    taken,
    text_of,
)
from engine.checks.check import Answer, Numbers, unknown
from engine.checks.context import Context
from engine.data.batches import IGNORED, Batch
from engine.data.overlap import SHINGLE, WINDOW, near_copies, predicted, shared_windows
from engine.data.sources import column_names
from engine.data.token_cache import Made
from engine.data.tokens import READ_AT_ONCE, Encoded, TokenStream
from engine.formats.tokenizer import Tokenizer

LOOKED_AT = 4
"""Number of steps whose rows are checked."""

SMALLEST_DISTINCT = 8
SMALLEST_ENTROPY = 1.0
"""Nats. Python source has some 4.5 with a vocabulary of 300, and some 7 with 150k; one repeated token has 0."""

LARGEST_DEVIATION = 5.5
LEAST_TAKEN = 0.95
"""Of the documents that data.max_bytes has room for, where some are left out: what takes their room may be larger."""
WEIGHED = 1 << 24
"""Tokens of a split whose bytes are counted."""

PADDING_RUN = 8
"""Number of equal tokens at the end of a row that look like padding and not like text."""
PADDING_SHARE = 0.02
"""Allowed share of the labels: rows of text do end in a run of spaces or dashes now and then."""

ENDS, LEAST_ENDS = 64, 4
"""Ends of documents that are looked for, and special tokens that must be there for a verdict."""

NEAR_COPIES = 0.4
"""Share of held-out documents that may be near copies: of Python's library, split by file, one in six is the variant
of a file, mostly of character codes, and of a small split 10 of 44."""
LEAST_NEAR_COPIES = 3
"""Of a sample of the training documents, where a single one says little about the others."""
SHARED_SHARE = 0.5
"""Share of held-out windows that must be found in the training text to count as a leak. Source code
repeats itself: of Python's library, split by file, a quarter is found, mostly in tables of character
codes. Leaked text is found completely.
"""
MOST_ROWS = 512
"""Largest number of rows that are checked, however many make up one step."""


def next_rows(context: Context) -> Batch:
    """Return the rows of the next steps as one batch."""
    train = context.spec.train
    rows = LOOKED_AT * train.rows * train.accumulation
    return context.batches.take(context.position, min(rows, max(MOST_ROWS, train.rows)))


def batch_not_degenerate(context: Context) -> Answer:
    batch = next_rows(context)
    tokens_BT = batch.tokens_BT
    _, counts = np.unique(tokens_BT, return_counts=True)
    share = counts / counts.sum()
    entropy = float(-(share * np.log(share)).sum())
    repeated = len(tokens_BT) - len(np.unique(tokens_BT, axis=0))
    # A short corpus repeats within these steps: such repetitions are expected.
    expected = len(batch.row_ids) - len(np.unique(batch.row_ids))
    numbers = Numbers(
        distinct=len(counts), entropy=entropy, rows=len(tokens_BT), repeated=repeated - expected
    )
    if repeated - expected > len(tokens_BT) // 2:
        return numbers.failed(
            f"{repeated} of {len(tokens_BT)} rows are copies of others in the batch"
        )
    if len(counts) < SMALLEST_DISTINCT or entropy < SMALLEST_ENTROPY:
        return numbers.failed(
            f"{len(counts)} distinct tokens in {tokens_BT.size:,} places, {entropy:.2f} nats of "
            "entropy: hardly any text"
        )
    return numbers.passed(
        f"{len(counts):,} distinct tokens, {entropy:.1f} nats, {repeated - expected} rows repeated"
    )


def documents_in_rows(context: Context) -> Answer:
    """Count the documents of both streams, and compare some with what is read and tokenized anew."""
    if context.made is None:
        return unknown("what the rows were made of is not known")
    numbers = Numbers(looked_at=0)
    for wrong in _wrong_documents(context, context.made, numbers):
        return numbers.failed(wrong)
    if not numbers["looked_at"]:
        return numbers.unknown("no document is small enough to be read again")
    return numbers.passed(
        f"{numbers['looked_at']:.0f} documents, read and tokenized again, are in the rows of their split; no other is "
        "missing or there twice"
    )


def _wrong_documents(context: Context, made: tuple[Made, Made], numbers: Numbers) -> Iterator[str]:
    """Yield what is wrong with the documents in the rows; `numbers` gets what was counted on the way."""
    for (split, stream), wanted in zip(context.streams.items(), made, strict=True):
        filled = stream.lengths > 0
        if stream.padding is not None:
            filled &= ~stream.padding
        expected = wanted.documents - sum(one.count for one in stream.left_out)
        if (found := int(filled.sum())) != expected:
            yield f"the {split} rows have {found:,} documents, the corpus has {expected:,} for them"
        if wanted.missing or wanted.doubled:
            yield (
                f"{wanted.missing:,} documents of the {split} split are in no row, {wanted.doubled:,} are in the rows "
                "too often or altered"
            )
    data = context.spec.data
    source, columns, fraction = data.corpus, column_names(data.columns), data.heldout_fraction
    records = read_records(source, columns)
    there, names = (None, ()) if records is None else (records.sizes, records.names)
    # With columns a folder is one of records, whatever else is in it.
    if records is None and not columns:
        files = files_of(source, include_tests=data.include_tests) or {}
        there, names = [*files.values()] or None, [*files]
    if there is not None:
        yield from _miscounted(context, made, there, records, numbers)
    again = {
        name: split for split, one in zip(context.streams, made, strict=True) for name in one.again
    }
    if wrong := [n for n in again if (again[n] == "held-out") != is_held_out(n, fraction)]:
        yield (
            f"{len(wrong)} of {len(again)} documents are on the other side of the split than their names say, as "
            f"{wrong[0]}, which is among the {again[wrong[0]]} ones at a data.heldout_fraction of {fraction:g}"
        )
    if there is not None and (otherwise := _split_otherwise(context, made, names, there, records)):
        yield otherwise
    yield from _read_otherwise(context, again, records, numbers)
    if records is None or records.are_texts:
        yield from _weighed_otherwise(context, made, there)


def _read_otherwise(
    context: Context, again: Mapping[str, str], records: Records | None, numbers: Numbers
) -> Iterator[str]:
    """Yield how documents that are read and tokenized anew, by name with their split, are not those in the rows."""
    source, tokenizer = context.spec.data.corpus, context.tokenizer
    answers = Answers.of(context, records)
    gone = set(again)
    for name, one in context.read_again(again.keys()):
        numbers["looked_at"] += 1
        gone.discard(name)
        found_in = [split for split, stream in context.streams.items() if _has(stream, one)]
        if found_in != [again[name]] and len(one.ids):
            where = " and ".join(found_in) or "no"
            yield (
                f"{name}, read and tokenized again, is whole in {where} rows, and belongs into the {again[name]} ones"
            )
        if answers is not None and (other := answers.not_said(one)) is not None:
            yield (
                f"{name} has labels on {other!r:.80}: the records of {source}, read by another library, have no "
                "conversation whose answers these are"
            )
        if answers is not None and (missing := answers.not_asked(one)):
            yield (
                f"{name} has not in it what its record of {source} says in front of an answer: {missing!r:.80}"
            )
        if tokenizer is None or one.left_out or one.labelled is not None:
            continue
        if (text := text_of(source, name)) is not None:
            (ids,) = tokenizer.encode_documents([text])
            if len(one.ids) > len(ids) + 1 or not np.array_equal(ids, one.ids[: len(ids)]):
                yield f"{name} in the rows is not the text of that file of {source}"
    if gone:
        yield (
            f"{len(gone)} documents that are in the rows are no longer in the corpus, first {min(gone)}"
        )


def _miscounted(
    context: Context,
    made: tuple[Made, Made],
    there: Sequence[int],
    records: Records | None,
    numbers: Numbers,
) -> Iterator[str]:
    """Hold the number of documents against the sizes of the texts that the source has."""
    data, documents = context.spec.data, [one.documents for one in made]
    sizes, known = np.sort(there)[::-1], context.left_out + sum(documents)
    what = "records, read by another library" if records else "files of text"
    numbers |= dict(there=len(sizes), documents=known)
    budgets = (data.max_bytes, int(data.max_bytes * data.heldout_fraction))
    # Where as many documents as there are, and one more, fit whichever they are, none is left out by max_bytes.
    all_fit = not data.max_bytes or all(
        sizes[: count + 1].sum() <= budget for count, budget in zip(documents, budgets, strict=True)
    )
    # What is left out of a folder is not only records.
    counted = records is not None and records.of_one_file
    if (all_fit and known < len(sizes)) or (counted and known > len(sizes)):
        yield (
            f"{data.corpus} has {len(sizes):,} {what}; {known:,} are in a split or known to be left out"
        )
    if data.max_bytes and (least := int(sizes[::-1][: documents[0]].sum())) > data.max_bytes:
        yield (
            f"{documents[0]:,} training documents of {data.corpus} are {least:,} bytes long at least, data.max_bytes "
            f"allows {data.max_bytes:,}"
        )


def _split_otherwise(
    context: Context,
    made: tuple[Made, Made],
    names: Sequence[str],
    sizes: Sequence[int],
    records: Records | None,
) -> str:
    """Say how the documents of the two splits are others, or another number, than their names and sizes prescribe;
    empty where they are not. Copies and what cannot be read are not known here, so some may be others."""
    data, held = context.spec.data, made[1].documents
    fraction, said = data.heldout_fraction, f"data.heldout_fraction of {data.heldout_fraction:g}"
    if names and data.max_bytes:
        wanted = taken(zip(names, sizes, strict=True), fraction, data.max_bytes)
        for one, those, split in zip(made, wanted, ("training", "held-out"), strict=True):
            least = LEAST_TAKEN if context.left_out else 1.0
            if one.documents < least * len(those) - context.left_out:
                return (
                    f"{one.documents:,} {split} documents are taken, {len(those):,} fit into a data.max_bytes of "
                    f"{data.max_bytes:,}"
                )
            other = [name for name in one.again if name not in those]
            if len(other) > max(1, len(one.again) // 2):
                return (
                    f"{len(other)} of {len(one.again)} {split} documents, as {other[0]}, are none of the first by the "
                    f"hash of their names that fit into a data.max_bytes of {data.max_bytes:,}"
                )
    elif names:
        wanted_held = sum(is_held_out(name, fraction) for name in names)
        if abs(held - wanted_held) > context.left_out:
            return f"{held:,} documents are held out, by their names and a {said} it is {wanted_held:,}"
        # Records of one text have one name, so none is a copy across the split.
        known = dict(zip(names, sizes, strict=True)) if records is None else {}
        copies = copies_of(data.corpus, known, fraction)
        if abs(copies - context.copies) > context.left_out - context.copies:
            return (
                f"{context.copies:,} training documents are left out as copies of held-out text, "
                f"{copies:,} of {data.corpus} are"
            )
    elif records is not None and not data.max_bytes:
        # Records of one content have one name, and are in one split.
        deviation = math.sqrt(fraction * (1 - fraction) * sum(n * n for n in records.alike))
        expected = fraction * sum(records.alike)
        if abs(held - expected) > LARGEST_DEVIATION * deviation + context.left_out:
            return f"{held:,} documents are held out, a {said} gives some {expected:,.0f}"
    return ""


def _weighed_otherwise(
    context: Context, made: tuple[Made, Made], there: Sequence[int] | None
) -> Iterator[str]:
    """Weigh every document by the bytes of its tokens: each is as long as a text of the source, whose sizes are
    `there`, and the passages of a source that is one file of text are all of it."""
    data, tokenizer = context.spec.data, context.tokenizer
    file_size = size_of_text(data.corpus)
    if tokenizer is None or (there is None and file_size is None):
        return
    table, spelt = bytes_of_tokens(tokenizer.raw), spelling_of(tokenizer.raw)
    if table is None:
        return
    train, held = (_bytes_of_documents(stream, table) for stream in context.streams.values())
    if there is not None:
        if data.max_bytes and (total := int(train.sum())) > data.max_bytes:
            yield f"the training text is {total:,} bytes long, data.max_bytes allows {data.max_bytes:,}"
        weighed = Counter([*train.tolist(), *held.tolist()])
        other = weighed - Counter(there)
        # Only texts that are not in their normal form, which few are, must be read for that.
        if other and spelt is not None:
            records = read_records(data.corpus, column_names(data.columns), spelt)
            files = files_of(data.corpus, include_tests=data.include_tests, spelt=spelt) or {}
            other = weighed - Counter(records.sizes if records is not None else files.values())
        if other:
            yield (
                f"{other.total():,} of {len(train) + len(held):,} documents are as long as no text of {data.corpus}, "
                f"as one of {min(other):,} bytes: something of them is lost or added on the way to the rows"
            )
    documents, total = sum(one.documents for one in made), int(train.sum() + held.sum())
    is_all = not context.left_out and not data.max_bytes and len(train) + len(held) == documents
    if file_size is not None and spelt is None and is_all and total != file_size:
        yield (
            f"the {documents:,} passages of {data.corpus} are {total:,} bytes long in all, the file {file_size:,}: "
            "something of it is in no row, or twice"
        )


def _bytes_of_documents(stream: TokenStream, table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of each of the first documents without the token that ends it; none of those that are empty,
    fill a row, or have a token whose bytes are not known."""
    last = int(np.searchsorted(stream.starts, WEIGHED, side="right")) - 1
    starts = stream.starts[: last + 1]
    known = np.diff(starts) > 0
    if stream.padding is not None:
        known &= ~stream.padding[:last]
    # Of all tokens before each one.
    bytes_before = np.zeros(int(starts[-1]) + 1, np.int64)
    for first in range(0, int(starts[-1]), READ_AT_ONCE):
        ids = stream.tokens[first : min(first + READ_AT_ONCE, int(starts[-1]))]
        sizes = table[np.minimum(ids, len(table) - 1)]
        unknown_at = first + np.flatnonzero((sizes < 0) | (ids >= len(table)))
        known[np.searchsorted(starts, unknown_at, side="right") - 1] = False
        bytes_before[first + 1 : first + 1 + len(ids)] = sizes
        stream.release()
    np.cumsum(bytes_before, out=bytes_before)
    begin, last_token = starts[:-1][known], starts[1:][known] - 1
    found: NDArray[np.int64] = bytes_before[last_token] - bytes_before[begin]
    return found


@dataclass(frozen=True, slots=True)
class Answers:
    """What the assistant says in the records of a source, to be compared with what has labels."""

    tokenizer: Tokenizer
    special: tuple[str, ...]
    known: frozenset[tuple[str, ...]]
    last: bool
    """Whether only last answers are to have labels."""
    asked: Mapping[tuple[str, ...], Sequence[Sequence[str]]]
    """What stands in front of them, by the answers: of each record that has these."""

    @staticmethod
    def of(context: Context, records: Records | None) -> Answers | None:
        """Return None where a record is more than plain text: what a template writes of it is its own matter."""
        tokenizer = context.tokenizer
        if records is None or tokenizer is None:
            return None
        special = tuple(sorted(tokenizer.special_tokens, key=len, reverse=True))
        known: dict[tuple[str, ...], list[Sequence[str]]] = {}
        for one, asked in zip(records.answers, records.asked, strict=True):
            if one is None:
                return None
            said = tuple(plain(text, special) for text in one)
            known.setdefault(said, []).append(
                [plain(text, special, reasoning=True) for text in asked]
            )
        last = context.spec.data.turns == "last"
        asked_before = known if context.writes_system else {}
        return Answers(tokenizer, special, frozenset(known), last, asked_before)

    def not_asked(self, one: Encoded) -> str:
        """Return what a record says in front of an answer and its conversation does not; empty when all is there."""
        if one.labelled is None or not len(one.ids) or self.last or one.partly_labelled:
            return ""
        said = tuple(
            plain(self.tokenizer.decode(one.ids[first:end]), self.special)
            for first, end in _runs(one.labelled)
        )
        whole = plain(self.tokenizer.decode(one.ids), self.special, reasoning=True)
        missing = [
            next((text for text in asked if text not in whole), "")
            for asked in self.asked.get(said, [])
        ]
        return "" if not missing or "" in missing else missing[0]

    def not_said(self, one: Encoded) -> str | None:
        """Return what has labels in a conversation that has other ones than the answers of a record."""
        if one.labelled is None or not len(one.ids):
            return None
        runs = _runs(one.labelled)
        texts = tuple(self.tokenizer.decode(one.ids[first:end]) for first, end in runs)
        exact = tuple(plain(text, self.special) for text in texts)
        # A token that begins with the prompt's white space and reaches into the answer has no label.
        before = [self.tokenizer.decode(one.ids[max(0, first - 1) : first]) for first, _ in runs]
        whole = tuple(
            plain(head + text, self.special) if head[:1].isspace() else own
            for head, text, own in zip(before, texts, exact, strict=True)
        )
        known = {one[-1:] for one in self.known} if self.last else self.known
        said = {text for one in self.known for text in one}
        if exact in known or whole in known:
            return None
        if one.partly_labelled and (said.issuperset(exact) or said.issuperset(whole)):
            return None
        return next((t for t, own in zip(texts, exact, strict=True) if own not in said), texts[0])


def _runs(labelled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where each run of labels begins and ends, (runs, 2)."""
    return np.flatnonzero(np.diff(labelled, prepend=False, append=False)).reshape(-1, 2)


def _has(stream: TokenStream, one: Encoded) -> bool:
    """Say whether a stream has a document, with the same labels."""
    for index in np.flatnonzero(stream.lengths == len(one.ids)):
        place = slice(stream.starts[index], stream.starts[index + 1])
        if np.array_equal(stream.tokens[place], one.ids):
            return stream.labelled is None or np.array_equal(stream.labelled[place], one.labels)
    return False


def padding_not_trained(context: Context) -> Answer:
    """Fail if padding has labels. Padding is a run of one token up to the end of a row."""
    batch = next_rows(context)
    same_BT = batch.tokens_BT == batch.tokens_BT[:, -1:]
    # Number of positions at the end of each row that hold its last token without a gap.
    run_B = np.where(same_BT.all(1), same_BT.shape[1], np.argmin(same_BT[:, ::-1], axis=1))
    place_T = np.arange(same_BT.shape[1])[::-1]
    padding_BT = (place_T < run_B[:, None]) & (run_B[:, None] >= PADDING_RUN)
    labelled_BT = batch.labels_BT != IGNORED
    trained, labelled = int((padding_BT & labelled_BT).sum()), int(labelled_BT.sum())
    numbers = Numbers(padding=int(padding_BT.sum()), padding_labelled=trained, labelled=labelled)
    if trained > PADDING_SHARE * labelled:
        ids = np.unique(batch.tokens_BT[:, -1][run_B >= PADDING_RUN])
        listed = ", ".join(str(int(token)) for token in ids[:3])
        return numbers.failed(
            f"{trained / labelled:.0%} of the labels stand on runs of one token at the end of rows "
            f"(id {listed}): padding is trained on"
        )
    return numbers.passed(f"{trained:,} of {labelled:,} labels stand on what could be padding")


def end_is_learnt(context: Context) -> Answer:
    """Fail if special tokens follow others of their document, in rows where documents end, and none is a label."""
    tokenizer = context.tokenizer
    if tokenizer is None:
        return unknown("no tokenizer is known, so which tokens are special ones is not either")
    special = map(tokenizer.id_of, tokenizer.special_tokens)
    ids = [tokenizer.end_of_text_id, *(one for one in special if one is not None)]
    stream, length = context.train_stream, context.spec.data.seq_len
    rows = np.unique((stream.starts[1 : 1 + ENDS] - 1) // length)
    batch = context.batches.rows(rows[rows < len(stream) // length])
    # What begins a document follows nothing, and is no label.
    follows_BT = batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1]
    special_BT = np.isin(batch.tokens_BT[:, 1:], ids) & follows_BT
    labelled_BT = special_BT & (batch.labels_BT[:, :-1] == batch.tokens_BT[:, 1:])
    count, labelled = int(special_BT.sum()), int(labelled_BT.sum())
    numbers = Numbers(special=count, labelled=labelled, rows=len(batch.row_ids))
    if count < LEAST_ENDS:
        return unknown(f"{count} special tokens were found: too few to tell")
    if labelled:
        return numbers.passed(
            f"of {count:,} special tokens in {len(batch.row_ids)} rows {labelled:,} are labels"
        )
    found = sorted(set(batch.tokens_BT[:, 1:][special_BT].tolist()))
    names = ", ".join(repr(tokenizer.decode([one])) for one in found[:4])
    return numbers.failed(f"{names}: {count:,} times in {len(batch.row_ids)} rows, never a label")


def split_disjoint(context: Context, step: object = None) -> Answer:
    """Asked after the first step, whichever it is: no run ends by it, and a large corpus takes seconds."""
    train, held = context.train_stream, context.heldout_stream
    if other := _other_rows(context):
        return Numbers(other_rows=other).failed(
            f"{other} of the rows that are evaluated are not rows of the held-out text"
        )
    wanted = set(_digests(held, np.ones(len(held.lengths), dtype=bool)))
    # Only documents with the length of a held-out one can be copies of it.
    candidates = np.isin(train.lengths, held.lengths)
    copies = len({one for one in _digests(train, candidates) if one in wanted})
    looked_at, held_tokens = predicted(train), predicted(held)
    found = shared_windows(looked_at, held_tokens)
    shared, windows = int(found.sum()), len(found)
    near = near_copies(train, held)
    train.release()
    held.release()
    share = shared / windows if windows else 0.0
    numbers = Numbers(
        copied_documents=copies,
        near_copies=len(near.pairs),
        compared_documents=near.compared,
        searched_documents=near.searched,
        shared_windows=shared,
        windows=windows,
        searched_tokens=len(looked_at),
    )
    if copies:
        return numbers.failed(
            f"{copies} held-out document{'s are' if copies > 1 else ' is'} trained on, token by token"
        )
    if share > SHARED_SHARE:
        return numbers.failed(
            f"{share:.0%} of held-out stretches of {WINDOW} tokens are in the training text too"
        )
    allowed = NEAR_COPIES * near.compared * near.searched
    if len(near.pairs) > allowed and (near.searched == 1 or len(near.pairs) >= LEAST_NEAR_COPIES):
        one, _, alike = near.pairs[0]
        return numbers.failed(
            f"{len(near.pairs)} of {near.compared} held-out documents are training documents but for few tokens, as "
            f"{_beginning(context, one)} ({alike:.0%} alike)"
        )
    sample = "" if near.searched == 1 else f" of a sample of {near.searched:.1%} of them"
    return numbers.passed(
        f"no held-out document is trained on, {len(near.pairs)} of {near.compared} are nearly training "
        f"documents{sample}; {share:.1%} of held-out stretches of {WINDOW} tokens are in the training text"
    )


def _beginning(context: Context, document: int) -> str:
    """Return how a held-out document begins."""
    stream = context.heldout_stream
    begin, end = stream.starts[document : document + 2].tolist()
    ids = stream.tokens[begin : min(end, begin + SHINGLE)].tolist()
    tokenizer = context.tokenizer
    return f"document {document:,}" if tokenizer is None else repr(tokenizer.decode(ids))


def _other_rows(context: Context) -> int:
    """Return how many rows that are evaluated are not what the held-out text has in their place."""
    length, tokens = context.spec.data.seq_len, context.heldout_stream.tokens
    other = 0
    for batch in context.heldout:
        places_BT = batch.row_ids[:, None] * length + np.arange(length)
        there_BT = tokens[np.minimum(places_BT, len(tokens) - 1)]
        other += int((batch.tokens_BT != there_BT).any(1).sum())
    return other


def _digests(stream: TokenStream, wanted: NDArray[np.bool_]) -> Iterator[bytes]:
    """Yield a digest of the tokens of each wanted document."""
    # An empty document consists only of its end-of-text token and is no leak, and neither is padding.
    wanted = wanted & (stream.lengths > 1)
    if stream.padding is not None:
        wanted &= ~stream.padding
    read = 0
    for index in np.flatnonzero(wanted):
        tokens = stream.tokens[stream.starts[index] : stream.starts[index + 1]]
        read += len(tokens)
        if read > READ_AT_ONCE:
            stream.release()
            read = 0
        yield hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u4").data).digest()
