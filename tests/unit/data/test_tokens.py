from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.data.corpus import Document, open_corpus
from engine.data.sources import STDLIB
from engine.data.tokens import make_stream, tokenize
from engine.demo.train_tokenizer import train_bpe
from engine.errors import TokenizerError
from engine.formats.tokenizer import Tokenizer, open_tokenizer

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
        ids = stream.tokens[stream.documents == i]
        assert ids[-1] == tokenizer.end_of_text_id
        assert tokenizer.decode(ids[:-1]) == document.text
    assert np.all(np.diff(stream.documents) >= 0)
    assert len(stream) == len(stream.tokens) == len(stream.documents)


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
    tokens, documents = stream.tokens.copy(), stream.documents.copy()
    tokens[3] += 1
    assert make_stream(tokens, stream.documents.copy()).sha256 != stream.sha256
    documents[-1] += 1
    assert make_stream(stream.tokens.copy(), documents).sha256 != stream.sha256


def test_stream_cannot_be_written_to(tokenizer: Tokenizer) -> None:
    stream = tokenize(DOCUMENTS, tokenizer)
    with pytest.raises(ValueError, match="read-only"):
        stream.tokens[0] = 1


def test_no_documents_make_an_empty_stream(tokenizer: Tokenizer) -> None:
    assert len(tokenize([], tokenizer)) == 0


def test_progress_ends_at_the_total(tokenizer: Tokenizer) -> None:
    seen: list[tuple[int, int]] = []
    tokenize(DOCUMENTS, tokenizer, lambda done, total: seen.append((done, total)))
    total = sum(len(document.text) for document in DOCUMENTS)
    assert seen[-1] == (total, total)


def test_tokenizer_without_end_of_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    record = json.loads(tokenizer.path.read_text())
    record["added_tokens"] = []
    (tmp_path / "none.json").write_text(json.dumps(record))
    with pytest.raises(TokenizerError):
        tokenize(DOCUMENTS, open_tokenizer(tmp_path / "none.json"))


def test_standard_library_comes_back_from_its_stream(tokenizer: Tokenizer) -> None:
    documents = open_corpus(STDLIB, heldout_fraction=0.08, max_bytes=100_000).train.documents
    stream = tokenize(documents, tokenizer)
    for i, document in enumerate(documents):
        assert tokenizer.decode(stream.tokens[stream.documents == i][:-1]) == document.text
