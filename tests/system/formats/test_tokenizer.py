from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.corpus import Document
from engine.errors import TokenizerError
from engine.formats import tokenizer as subject
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from tests.support.chats import make_tokenizer
from tests.support.train_tokenizer import train_bpe

TEXT = "def one(two):\n    return one(two) + two  # the one and the two\n" * 20
AWKWARD = [
    "",
    " ",
    "\t\tif x:\r\n\t\t\treturn\r\n",
    "  leading and trailing  ",
    "e\u0301 is not \u00e9, and n\u0303o\u0323\u0302 stays as it is",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭",
    "漢字かな العربية \u202eright to left",
    "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
    "a" * 5000,
    "<|endoftext|> in the middle <|endoftext|>",
]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The JSON of a small tokenizer."""
    parsed: dict[str, Any] = json.loads(train_bpe([Document(name="a", text=TEXT)], 300))
    return parsed


@pytest.fixture
def save(tmp_path: Path, record: dict[str, Any]) -> Callable[..., Path]:
    """Write the small tokenizer with some of its top-level fields replaced."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({**record, **fields}))
        return path

    return write


@pytest.fixture
def small(save: Callable[..., Path]) -> Tokenizer:
    return open_tokenizer(save())


def added(token_id: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def refused(path: Path | str, **options: str) -> TokenizerError:
    with pytest.raises(TokenizerError) as caught:
        open_tokenizer(path, **options)
    message = caught.value.message
    assert "\n" not in message and "expected" in message and "found" in message, message
    return caught.value


def test_decode_gives_back_awkward_text(small: Tokenizer) -> None:
    for text, ids in zip(AWKWARD, small.encode_documents(AWKWARD), strict=True):
        assert small.decode(ids.tolist()) == text
        assert small.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_decode_gives_back_any_text(record: dict[str, Any], text: str) -> None:
    from tokenizers import Tokenizer as Inner

    inner = Inner.from_str(json.dumps(record))
    tokenizer = Tokenizer(inner, path=Path("t"), raw=b"", sha256="", end_of_text=None)
    assert tokenizer.decode(tokenizer.encode_documents([text])[0]) == text


def test_folder_and_file_open_the_same_tokenizer(save: Callable[..., Path]) -> None:
    path = save()
    by_file, by_folder = open_tokenizer(path), open_tokenizer(str(path.parent))
    assert by_file.sha256 == by_folder.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert by_folder.path == path


def test_vocab_size_counts_added_tokens(save: Callable[..., Path], small: Tokenizer) -> None:
    size = small.vocab_size
    path = save(added_tokens=[added(0, "<|endoftext|>"), added(size, "<tool>", special=False)])
    assert open_tokenizer(path).vocab_size == size + 1


def test_vocab_size_is_the_highest_id_and_not_the_count(
    save: Callable[..., Path], record: dict[str, Any]
) -> None:
    vocab = {**record["model"]["vocab"], "zzz": 999}
    opened = open_tokenizer(save(model={**record["model"], "vocab": vocab}))
    assert opened.vocab_size == 1000


def test_no_special_token_is_added_around_a_text(
    save: Callable[..., Path], small: Tokenizer
) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    expected = small.encode_documents([TEXT])[0]
    found = open_tokenizer(save(post_processor=template)).encode_documents([TEXT])[0]
    np.testing.assert_array_equal(found, expected)


def test_stored_truncation_padding_and_dropout_are_switched_off(
    save: Callable[..., Path], record: dict[str, Any], small: Tokenizer
) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {
        "strategy": {"Fixed": 5000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    model = {**record["model"], "dropout": 0.9}
    opened = open_tokenizer(save(truncation=cut, padding=pad, model=model))
    expected = small.encode_documents([TEXT, "one"])
    for found, wanted in zip(opened.encode_documents([TEXT, "one"]), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_batching_changes_no_id(small: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT[:n] for n in (10, 0, 700, 3, 90, 1200)]
    at_once = small.encode_documents(texts)
    assert [ids.dtype for ids in at_once] == [np.uint32] * len(texts)
    monkeypatch.setattr(subject, "_BATCH_CHARACTERS", 100)
    in_parts = small.encode_documents(texts)
    for found, wanted in zip(in_parts, at_once, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_no_documents_encode_to_none(small: Tokenizer) -> None:
    assert small.encode_documents([]) == []


# The end-of-text token


def test_end_of_text_prefers_the_document_separator(
    save: Callable[..., Path], small: Tokenizer
) -> None:
    size = small.vocab_size
    tokens = [added(0, "<|endoftext|>"), added(size, "<|im_end|>"), added(size + 1, "</s>")]
    assert open_tokenizer(save(added_tokens=tokens)).end_of_text_id == 0
    path = save(added_tokens=tokens)
    assert open_tokenizer(path, end_of_text="<|im_end|>").end_of_text_id == size


def test_ordinary_token_of_that_name_does_not_end_documents(save: Callable[..., Path]) -> None:
    opened = open_tokenizer(save(added_tokens=[added(0, "<|endoftext|>", special=False)]))
    with pytest.raises(TokenizerError, match="<\\|im_end\\|>"):
        _ = opened.end_of_text_id


def test_end_of_text_that_is_no_token_is_refused(save: Callable[..., Path]) -> None:
    assert "'<eos>'" in refused(save(), end_of_text="<eos>").message


# Files that are not tokenizers


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b" \n", "begins with b' \\n'"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n",
            "a Git-LFS pointer",
        ),
        (b"<!DOCTYPE html>\n<html></html>", "an HTML page"),
        (b"\n  <html lang=en>", "an HTML page"),
        (b"PK\x03\x04 archive", "a zip archive"),
        (b"\xff\xfe{\x00", "begins with b'\\xff"),
        (b"[]", "begins with"),
        (b"{}", "Model missing"),
        (b'{"model": "\xff"}', "invalid unicode code point"),
        (b'{"version": "1.0", "mod', "at line 1 column 2"),
        (b'{"a": ' + b"[" * 200_000, "at line 1 column"),
        (b'{"a": ' + b"1" * 5000 + b"}", "at line 1 column 5"),
        (b'{"model": {"type": "Nope"}}', "did not match"),
    ],
)
def test_file_that_is_no_tokenizer_is_refused_by_what_it_is(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    message = refused(path).message
    assert found in message and str(path) in message


def test_tokenizer_cut_short_is_refused_at_every_length(save: Callable[..., Path]) -> None:
    path = save()
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, len(whole) // 23):
        path.write_bytes(whole[:length])
        refused(path)


def test_missing_tokenizer_says_what_is_there_instead(tmp_path: Path) -> None:
    assert "nothing there" in refused(tmp_path / "absent").message
    assert "tokenizer.json" in refused(tmp_path).message
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    error = refused(tmp_path)
    assert "merges.txt, vocab.json" in error.message and error.hint is not None


def test_special_file_and_impossible_path_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in refused(tmp_path / "pipe").message
    refused("a\0b")
    refused("x" * 5000)


def test_empty_vocabulary_is_refused(save: Callable[..., Path], record: dict[str, Any]) -> None:
    model = {**record["model"], "vocab": {}, "merges": []}
    assert "no token" in refused(save(model=model, added_tokens=[])).message


@pytest.mark.parametrize("token_id", [99_999, 5])
def test_added_token_that_would_get_another_id_is_refused(
    save: Callable[..., Path], token_id: int
) -> None:
    path = save(added_tokens=[added(0, "<|endoftext|>"), added(token_id, "<|x|>")])
    assert f"'<|x|>' at id {token_id:,}" in refused(path).message


# The fit to a model


def test_fits_up_to_the_last_row_and_not_beyond(small: Tokenizer) -> None:
    small.fits(small.vocab_size, "the student")
    small.fits(small.vocab_size + 100, "the student")
    with pytest.raises(TokenizerError) as caught:
        small.fits(small.vocab_size - 2, "the student")
    message = caught.value.message
    first = small.vocab_size - 2
    assert "the student" in message and f"id {first} (" in message


def test_first_differing_id_of_a_tokenizer_and_itself(
    small: Tokenizer, save: Callable[..., Path]
) -> None:
    assert small.first_differing_id(open_tokenizer(save())) is None


def test_first_differing_id_names_the_first_that_differs(
    small: Tokenizer, save: Callable[..., Path], record: dict[str, Any]
) -> None:
    names = {token_id: name for name, token_id in record["model"]["vocab"].items()}
    swapped = {**record["model"]["vocab"], names[40]: 70, names[70]: 40}
    other = open_tokenizer(save(model={**record["model"], "vocab": swapped}))
    assert small.first_differing_id(other) == other.first_differing_id(small) == 40


def test_first_differing_id_sees_a_token_only_one_has(
    small: Tokenizer, save: Callable[..., Path]
) -> None:
    size = small.vocab_size
    longer = open_tokenizer(save(added_tokens=[added(0, "<|endoftext|>"), added(size, "<|x|>")]))
    assert small.first_differing_id(longer) == longer.first_differing_id(small) == size


# Panics of the library


class _Panicking:
    """A library that panics, as one with a text that it does not foresee does."""

    def encode_batch_fast(self, *_: object, **__: object) -> None:
        raise type("PanicException", (BaseException,), {})("index out of range\nand more")

    decode = encode_batch_fast


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
@pytest.mark.parametrize("text", ["\u00e9", "##"])
def test_a_panic_while_a_file_is_opened_is_one_line(
    save: Callable[..., Path],
    record: dict[str, Any],
    affix: str,
    text: str,
) -> None:
    path = save(model={**record["model"], affix: text})
    if affix == "continuing_subword_prefix":
        assert "a panic of the library" in refused(path).message
    else:
        open_tokenizer(path)


@pytest.mark.parametrize("use", ["encode", "decode"])
def test_a_panic_in_use_is_one_line(small: Tokenizer, use: str) -> None:
    small._inner = _Panicking()  # type: ignore[assignment]
    with pytest.raises(TokenizerError, match="index out of range and more"):
        small.encode_documents(["one"]) if use == "encode" else small.decode([1])


def test_starts_belong_to_the_ids_and_to_the_text(tmp_path: Path) -> None:
    texts = ["", "  two words\n\n ", "e\u0301 \U0001f469\u200d\U0001f467 x", "the water 12 " * 9000]
    plain = make_tokenizer(tmp_path / "plain")
    for tokenizer in (
        plain,
        make_tokenizer(tmp_path / "trimming", trim_offsets=True),
        make_tokenizer(tmp_path / "nfc", nfc=True),
    ):
        expected = tokenizer.encode_documents(texts)
        for text, ids, (found, starts) in zip(
            texts, expected, tokenizer.encode_with_starts(texts), strict=True
        ):
            assert found.tolist() == ids.tolist() and len(starts) == len(ids)
            assert (np.diff(starts) >= 0).all() and (starts < max(len(text), 1)).all()
    for text, (ids, starts) in zip(texts, plain.encode_with_starts(texts), strict=True):
        # Where a character is whole, the text before it is that of the tokens before it.
        for at in range(0, len(ids), 97):
            if at and starts[at] != starts[at - 1]:
                assert plain.decode(ids[:at]) == text[: starts[at]]


def test_a_part_whose_type_is_a_list_is_refused(save: Callable[..., Path]) -> None:
    with pytest.raises(TokenizerError):
        open_tokenizer(save(normalizer={"type": ["NFC"]}))


def test_two_tokens_with_one_id_are_read_as_the_library_reads_them(
    save: Callable[..., Path], record: dict[str, Any]
) -> None:
    left, right = record["model"]["merges"][0]
    vocab = {**record["model"]["vocab"]}
    vocab[left + right] = vocab[left]
    tokenizer = open_tokenizer(save(model={**record["model"], "vocab": vocab}))
    ((ids, starts),) = tokenizer.encode_with_starts([TEXT])
    assert len(ids) == len(starts) and ids.tolist() == tokenizer.encode_whole(TEXT).tolist()


def test_texts_are_encoded_without_offsets_that_nobody_reads(save: Callable[..., Path]) -> None:
    tokenizer, asked = open_tokenizer(save()), list[str]()

    class Asked:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(inner, name)

    inner, tokenizer._inner = tokenizer._inner, Asked()
    expected = inner.encode(TEXT, add_special_tokens=False).ids
    assert [ids.tolist() for ids in tokenizer.encode_documents([TEXT])] == [expected]
    assert asked == ["encode_batch_fast"]
