"""Conversations from a file to the labels of rows: over all rows together, what is to be predicted is what the
assistants wrote, each turn with its end, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.data.batches import IGNORED, Batches, gather_rows, heldout_rows, labelled_rows
from engine.data.chat_labels import Chat, encode_chats
from engine.data.conversations import read_conversation
from engine.data.corpus import Corpus, Document, check_corpus, open_corpus
from engine.data.tokens import TokenStream
from engine.errors import CorpusError
from engine.formats.tokenizer import Tokenizer
from tests.support.chats import CHATML, QWEN3, STYLES, Style, conversations, make_tokenizer
from tests.support.streams import documents_of, make_stream, tokenize

SEQ_LEN = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    # Every 60 of them, the kinds come again.
    lines = [json.dumps(record) for record in conversations(100)]
    # Beside conversations a file may have texts.
    lines += [json.dumps({"text": f"a text of its own, number {n}"}) for n in range(20)]
    path.write_text("\n".join(lines) + "\n")
    assert check_corpus(str(path))
    return open_corpus(str(path), heldout_fraction=0.2)


def labels_of(stream: TokenStream) -> tuple[list[int], list[int]]:
    """The labels of all rows in order, and the document of each."""
    batch = gather_rows(stream, SEQ_LEN, np.arange(len(stream) // SEQ_LEN))
    has = batch.labels_BT != IGNORED
    return batch.labels_BT[has].tolist(), batch.documents_BT[has].tolist()


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
@pytest.mark.parametrize("turns", ["all", "last"])
def test_labels_of_all_rows_are_what_the_assistants_wrote(
    corpus: Corpus, tokenizer: Tokenizer, style: Style, turns: str
) -> None:
    which = "last" if turns == "last" else "all"
    documents, template = documents_of(corpus.train), style.template()
    stream = tokenize(documents, tokenizer, template=template, turns=which)
    labels, places = labels_of(stream)
    found: dict[int, list[int]] = {}
    for label, place in zip(labels, places, strict=True):
        found.setdefault(place, []).append(label)
    last = int(stream.documents_at(np.array(len(stream) // SEQ_LEN * SEQ_LEN - 1)))
    compared = 0
    for number, document in enumerate(documents[:last]):
        if not stream.lengths[number]:
            assert number not in found
            continue
        if not document.is_chat:
            assert found[number][:-1] == list(tokenizer.encode_documents([document.text])[0])[1:]
            continue
        conversation = read_conversation(json.loads(document.text), document.name)
        (chat,) = encode_chats([conversation], tokenizer, template, turns=which)
        assert isinstance(chat, Chat)
        # The first token of a document is not predicted, and every other one that is labelled is.
        assert found[number] == chat.ids[chat.labelled].tolist()
        compared += 1
    assert compared > 30


def test_decoded_labels_are_the_words_and_the_end_of_each_turn(tokenizer: Tokenizer) -> None:
    record = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "first answer"},
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "second answer"},
        ]
    }
    documents = [
        Document(name=f"chat-{n}", text=json.dumps(record), is_chat=True) for n in range(3)
    ]
    stream = tokenize(documents, tokenizer, template=CHATML.template())
    labels, places = labels_of(stream)
    first = [label for label, place in zip(labels, places, strict=True) if place == 0]
    assert tokenizer.decode(first) == "first answer<|im_end|>second answer<|im_end|>"
    # No token of ours is between two conversations.
    assert tokenizer.decode(stream.tokens.tolist()).count("<|endoftext|>") == 0


def test_conversations_that_are_equal_are_on_one_side_and_change_nothing_else(
    tmp_path: Path,
) -> None:
    lines = [json.dumps(record) for record in conversations()]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines))
    before = open_corpus(str(path), heldout_fraction=0.3)
    sides = [{d.name for d in documents_of(one)} for one in (before.train, before.heldout)]
    path.write_text(
        "\n".join([*lines, *(json.dumps(json.loads(line), indent=None) for line in lines)])
    )
    after = open_corpus(str(path), heldout_fraction=0.3)
    assert sides == [{d.name for d in documents_of(one)} for one in (after.train, after.heldout)]


def test_the_digest_of_a_stream_is_of_its_labels_too(tokenizer: Tokenizer, corpus: Corpus) -> None:
    documents, template = documents_of(corpus.train), QWEN3.template(marks=True)
    every = tokenize(documents, tokenizer, template=template)
    last = tokenize(documents, tokenizer, template=template, turns="last")
    assert (every.tokens == last.tokens).all() and every.sha256 != last.sha256


def test_rows_without_a_label_are_not_taken() -> None:
    tokens, starts = np.arange(40, dtype=np.uint16), np.array([0, 40])
    labelled = np.zeros(40, dtype=np.bool_)
    # Tokens 10 and 16 are predicted by the positions before them, in row 1 and in row 1; 33 in row 4.
    labelled[[10, 16, 33]] = True
    stream = make_stream(tokens, starts, labelled=labelled)
    assert labelled_rows(stream, 8, "train").tolist() == [1, 4]
    batches = Batches(stream, seq_len=8, rows_per_batch=2, seed=3)
    assert batches.rows_per_epoch == 2
    for position in range(6):
        assert sorted(batches.row_ids_at(2 * position, 2)) == [1, 4]
    assert heldout_rows(stream, 8, 5).row_ids.tolist() == [1, 4]
    unlabelled = make_stream(tokens.copy(), starts.copy(), labelled=np.zeros(40, dtype=np.bool_))
    with pytest.raises(CorpusError, match="assistant wrote"):
        labelled_rows(unlabelled, 8, "train")


def test_conversations_that_no_template_can_write_are_refused_with_the_first_reason(
    tokenizer: Tokenizer,
) -> None:
    record = {"messages": [{"role": "user", "content": "and then?"}]}
    documents = [Document(name="chat-0", text=json.dumps(record), is_chat=True)]
    with pytest.raises(CorpusError, match=r"chat-\w+: no assistant turn"):
        tokenize(documents, tokenizer, template=CHATML.template())
    record = {"messages": [{"role": "assistant", "content": "yes"}]}
    documents = [Document(name="chat-0", text=json.dumps(record), is_chat=True)]
    with pytest.raises(CorpusError, match="a tokenizer with a chat template"):
        tokenize(documents, tokenizer)
