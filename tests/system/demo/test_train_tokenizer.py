from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.data.corpus import Document, open_corpus
from engine.data.sources import STDLIB
from engine.formats.tokenizer import open_tokenizer
from tests.support.streams import documents_of
from tests.support.train_tokenizer import END_OF_TEXT, SMALLEST_VOCAB, main, train_bpe

SMALL = ["--corpus", STDLIB, "--vocab", "600", "--max-bytes", "200000"]


def test_trained_tokenizer_has_the_ids_promised(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert main([str(out), *SMALL]) == 0
    tokenizer = open_tokenizer(out)
    assert tokenizer.vocab_size == 600
    assert tokenizer.end_of_text_id == 0 and tokenizer.decode([0]) == END_OF_TEXT
    tokens = [tokenizer.decode([i]) for i in range(1, SMALLEST_VOCAB)]
    assert {t for t in tokens if t.isascii()} == {chr(i) for i in range(128)}
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_training_twice_gives_the_same_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.json", "b.json"):
        assert main([str(tmp_path / name), *SMALL]) == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    printed = capsys.readouterr().out
    assert printed.count("held-out: ") == 2 and "bytes per token" in printed


def test_heldout_text_takes_no_part_in_training(tmp_path: Path) -> None:
    main([str(tmp_path / "t.json"), *SMALL])
    corpus = open_corpus(STDLIB, heldout_fraction=0.08, max_bytes=200_000)
    assert (tmp_path / "t.json").read_text() == train_bpe(documents_of(corpus.train), 600)


def test_merges_make_text_shorter_and_stop_when_there_is_no_pair(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(train_bpe([Document(name="a", text="abab " * 9)], 5000))
    tokenizer = open_tokenizer(tmp_path / "t.json")
    assert SMALLEST_VOCAB < tokenizer.vocab_size < 270
    assert len(tokenizer.encode_documents(["abab"])[0]) == 1


def test_digits_are_single_and_line_ends_stay_with_punctuation(tmp_path: Path) -> None:
    text = "x = 2024;\n" * 50
    (tmp_path / "t.json").write_text(train_bpe([Document(name="a", text=text)], 400))
    tokenizer = open_tokenizer(tmp_path / "t.json")
    ids = tokenizer.encode_documents([text[:10]])[0]
    assert [tokenizer.decode([i]) for i in ids] == ["x", " =", " ", "2", "0", "2", "4", ";\n"]


def test_special_tokens_come_first_and_conversations_are_their_contents(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "abab abab"}]}
    chat = Document(name="a", text=json.dumps(record), is_chat=True)
    (tmp_path / "t.json").write_text(train_bpe([chat], 300, ["<|begin|>", "<|end|>"]))
    tokenizer = open_tokenizer(tmp_path / "t.json")
    assert [tokenizer.decode([i]) for i in range(3)] == [END_OF_TEXT, "<|begin|>", "<|end|>"]
    assert tokenizer.encode_documents(["<|end|>"])[0].tolist() == [2]
    assert len(tokenizer.encode_documents(["abab"])[0]) == 1
    assert len(tokenizer.encode_documents(["user"])[0]) == 4


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["OUT", "--vocab", "256"], 64),
        (["OUT", "--vocab", "258", "--special", "<|a|>", "--special", "<|b|>"], 64),
        (["OUT", "--vocab", "many"], 64),
        (["OUT", "--unknown"], 64),
        (["absent/OUT"], 64),
        (["OUT", "--corpus", "absent"], 65),
        (["."], 64),
        (["/proc/OUT", *SMALL], 65),
    ],
)
def test_wrong_arguments_exit_with_their_code_and_write_nothing(
    arguments: list[str],
    exit_code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == exit_code
    assert "expected" in capsys.readouterr().err or exit_code == 64
    assert list(tmp_path.iterdir()) == []
