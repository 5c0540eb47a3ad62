from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from engine.data.corpus import Document, open_corpus
from engine.data.sources import STDLIB
from engine.data.tokens import starts_of
from engine.errors import TokenizerError
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from tests.support.streams import documents_of, make_stream, tokenize
from tests.support.train_tokenizer import train_bpe

DOCUMENTS = [
    Document(name=str(i), text=text)
    for i, text in enumerate(["one two\n", "", "é 👩‍👧", "holds <|endoftext|> itself", "x" * 300])
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe(DOCUMENTS, 300))
    return open_tokenizer(path)


def test_each_document_is_followed_by_one_end_of_text(tokenizer: Tokenizer) -> None:
    stream = tokenize(DOCUMENTS, tokenizer)
    for i, document in enumerate(DOCUMENTS):
        ids = stream.tokens[stream.documents_at(np.arange(len(stream))) == i]
        assert ids[-1] == tokenizer.end_of_text_id
        assert tokenizer.decode(ids[:-1]) == document.text
    assert len(stream) == len(stream.tokens) == stream.starts[-1]


def test_ids_take_16_bits_only_when_all_fit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    narrow = tokenize(DOCUMENTS, tokenizer)
    record = json.loads(tokenizer.path.read_text())
    record["model"]["vocab"]["far"] = 1 << 16
    (tmp_path / "wide.json").write_text(json.dumps(record))
    wide = tokenize(DOCUMENTS, open_tokenizer(tmp_path / "wide.json"))
    assert narrow.tokens.dtype == np.uint16 and wide.tokens.dtype == np.uint32
    np.testing.assert_array_equal(narrow.tokens, wide.tokens)
    assert narrow.sha256 == wide.sha256


def test_sha256_sees_tokens_boundaries_and_order(tokenizer: Tokenizer) -> None:
    stream = tokenize(DOCUMENTS, tokenizer)
    assert tokenize(DOCUMENTS, tokenizer).sha256 == stream.sha256
    assert tokenize(DOCUMENTS[::-1], tokenizer).sha256 != stream.sha256
    tokens, starts = stream.tokens.copy(), stream.starts.copy()
    tokens[3] += 1
    assert make_stream(tokens, stream.starts.copy()).sha256 != stream.sha256
    starts[1] += 1
    assert make_stream(stream.tokens.copy(), starts).sha256 != stream.sha256


@pytest.mark.parametrize("hashed_at_once", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("lengths", [[], [0], [3], [0, 0, 5, 0, 9, 64, 0, 2, 0], [1] * 70])
def test_sha256_is_that_of_the_tokens_and_of_the_document_of_each(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], hashed_at_once: int
) -> None:
    monkeypatch.setattr("engine.data.tokens._HASHED_AT_ONCE", hashed_at_once)
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    labelled = tokens % 3 == 0
    whole = tokens.astype("<u4").tobytes() + documents.astype("<u4").tobytes()
    stream = make_stream(tokens, starts_of(lengths))
    assert stream.sha256 == hashlib.sha256(whole).hexdigest()
    whole += np.packbits(labelled).tobytes()
    stream = make_stream(tokens, starts_of(lengths), labelled=labelled)
    assert stream.sha256 == hashlib.sha256(whole).hexdigest()
    assert stream.documents_at(np.arange(len(tokens))).tolist() == documents.tolist()


def test_stream_cannot_be_written_to(tokenizer: Tokenizer) -> None:
    stream = tokenize(DOCUMENTS, tokenizer)
    with pytest.raises(ValueError, match="read-only"):
        stream.tokens[0] = 1


def test_no_documents_make_an_empty_stream(tokenizer: Tokenizer) -> None:
    assert len(tokenize([], tokenizer)) == 0


def test_tokenizer_without_end_of_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    record = json.loads(tokenizer.path.read_text())
    record["added_tokens"] = []
    (tmp_path / "none.json").write_text(json.dumps(record))
    with pytest.raises(TokenizerError):
        tokenize(DOCUMENTS, open_tokenizer(tmp_path / "none.json"))


def test_standard_library_comes_back_from_its_stream(tokenizer: Tokenizer) -> None:
    documents = documents_of(open_corpus(STDLIB, heldout_fraction=0.08, max_bytes=100_000).train)
    stream = tokenize(documents, tokenizer)
    for i, document in enumerate(documents):
        assert (
            tokenizer.decode(stream.tokens[stream.documents_at(np.arange(len(stream))) == i][:-1])
            == document.text
        )
