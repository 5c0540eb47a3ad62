"""Two tokenizers with the same tokens must also cut every text in the same places."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.corpus import Document
from engine.errors import BadInput, TokenizerError
from engine.evaluate.model import open_model
from engine.evaluate.perplexity import perplexity
from engine.formats.tokenizer import PRE_TOKENIZERS, Tokenizer, open_tokenizer
from engine.formats.tokenizer_probes import probes
from engine.teachers.vocabulary import check_vocabularies, compare
from tests.support.kit import Kit
from tests.support.paths import ROOT
from tests.support.train_tokenizer import train_bpe

Record = dict[str, Any]
TEXT = "def one(two):\n    return one(two) + two  # the one and The two's other\n" * 20
DEMO = ROOT / "engine" / "demo" / "teacher"


def by_bytes() -> Record:
    """BPE over bytes, as most models have it, with a token of two digits and one that no merge makes."""
    record: Record = json.loads(train_bpe([Document(name="a", text=TEXT)], 300))
    vocabulary = record["model"]["vocab"]
    for token in ("12", "otwo"):
        vocabulary[token] = max(vocabulary.values()) + 1
    record["model"]["merges"].append(["1", "2"])
    return record


def by_characters() -> Record:
    """BPE over characters with bytes for what it lacks, as SentencePiece has it."""
    letters = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"abehtn\u2581",
        "th",
        "the",
        "\u2581the",
        "e\u2581",
    ]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "<unk>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "first",
            "split": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: id_ for id_, letter in enumerate(letters)},
            "merges": [["t", "h"], ["th", "e"], ["\u2581", "the"], ["e", "\u2581"]],
        },
    }


def by_scores() -> Record:
    record = by_characters()
    scored = [
        ["<unk>", 0.0],
        ["\u2581", -2.0],
        ["a", -3.0],
        ["b", -3.1],
        ["ab", -4.0],
        ["ba", -5.0],
        ["aba", -6.0],
    ]
    return {
        **record,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": False},
    }


def by_words() -> Record:
    record = by_characters()
    pieces = ["<unk>", "the", "##n", "then", "a", "##b", "##e", "b", "th", "t", "##h"]
    return {
        **record,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: id_ for id_, piece in enumerate(pieces)},
        },
    }


def model(**changes: object) -> Callable[[Record], None]:
    return lambda record: record["model"].update(changes)


def normalizer(**part: object) -> Callable[[Record], None]:
    return lambda record: record.update(normalizer=part)


def splits(expression: str, **changes: object) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        first, *_ = record["pre_tokenizer"]["pretokenizers"]
        first.update(changes, pattern={"Regex": expression})

    return change


def bytes_part(**changes: object) -> Callable[[Record], None]:
    return lambda record: record["pre_tokenizer"]["pretokenizers"][-1].update(changes)


def metaspace(**changes: object) -> Callable[[Record], None]:
    return lambda record: record["pre_tokenizer"].update(changes)


def added(**changes: object) -> Callable[[Record], None]:
    return lambda record: record["added_tokens"][0].update(changes)


def reverse_merges(record: Record) -> None:
    record["model"]["merges"].reverse()


def lose_merge(record: Record) -> None:
    del record["model"]["merges"][10]


def gain_merge(record: Record) -> None:
    record["model"]["merges"].append(["o", "two"])


def exchange_rivals(record: Record) -> None:
    """Exchange the ranks of a merge and of the next that begins with the token that it ends with."""
    merges = record["model"]["merges"]
    first = next(i for i, (_, b) in enumerate(merges) if any(a == b for a, _ in merges[i + 1 :]))
    second = next(i for i in range(first + 1, len(merges)) if merges[i][0] == merges[first][1])
    merges[first], merges[second] = merges[second], merges[first]


def exchange_scores(record: Record) -> None:
    vocabulary = record["model"]["vocab"]
    vocabulary[4][1], vocabulary[5][1] = -9.0, -3.0


QWEN, LLAMA, GPT2 = (PRE_TOKENIZERS[name].splits[0] for name in ("qwen2", "llama-bpe", "gpt-2"))
OTHERS = {
    "reversed merges": (by_bytes, reverse_merges),
    "a lost merge": (by_bytes, lose_merge),
    "one more merge": (by_bytes, gain_merge),
    "two merges exchanged": (by_bytes, exchange_rivals),
    "ignore_merges": (by_bytes, model(ignore_merges=True)),
    "Lowercase": (by_bytes, normalizer(type="Lowercase")),
    "NFC": (by_bytes, normalizer(type="NFC")),
    "NFKC": (by_bytes, normalizer(type="NFKC")),
    "StripAccents": (by_bytes, normalizer(type="StripAccents")),
    "Strip": (by_bytes, normalizer(type="Strip", strip_left=True, strip_right=True)),
    "Strip of the end": (by_bytes, normalizer(type="Strip", strip_left=False, strip_right=True)),
    "Prepend": (by_bytes, normalizer(type="Prepend", prepend=" ")),
    "Replace": (by_bytes, normalizer(type="Replace", pattern={"String": "\r\n"}, content="\n")),
    "digits in threes": (by_bytes, splits(LLAMA)),
    "the expression of GPT-2": (by_bytes, splits(GPT2)),
    "an expression that drops the rest": (by_bytes, splits(QWEN, behavior="Removed")),
    "add_prefix_space": (by_bytes, bytes_part(add_prefix_space=True)),
    "an added token that takes the space before it": (by_bytes, added(lstrip=True)),
    "an added token that takes the space behind it": (by_bytes, added(rstrip=True)),
    "an added token of whole words": (by_bytes, added(single_word=True)),
    "byte_fallback": (by_characters, model(byte_fallback=True)),
    "unknown characters dropped": (by_characters, model(unk_token=None)),
    "unknown characters joined": (by_characters, model(fuse_unk=True)),
    "a space at each part": (by_characters, metaspace(prepend_scheme="always")),
    "no space in front": (by_characters, metaspace(prepend_scheme="never")),
    "spaces within parts": (by_characters, metaspace(split=False)),
    "other scores": (by_scores, exchange_scores),
    "long words unknown": (by_words, model(max_input_chars_per_word=5)),
    "another prefix inside words": (by_words, model(continuing_subword_prefix="#")),
}


def opened(folder: Path, name: str, record: Record) -> Tokenizer:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record))
    return open_tokenizer(path)


def pair(
    folder: Path, record: Record, change: Callable[[Record], None]
) -> dict[str, Tokenizer | None]:
    other = copy.deepcopy(record)
    change(other)
    return {"teacher": opened(folder, "one", record), "student": opened(folder, "other", other)}


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_tokens_cut_in_other_places_are_refused(name: str, tmp_path: Path) -> None:
    make, change = OTHERS[name]
    with pytest.raises(TokenizerError, match="the same tokens for every text") as caught:
        check_vocabularies(pair(tmp_path, make(), change), 400)
    shown = caught.value.message.splitlines()[1]
    assert " in teacher and " in shown and shown.endswith(" in student")


def test_reversed_merges_are_refused_with_a_text_and_both_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        check_vocabularies(pair(tmp_path, by_bytes(), reverse_merges), 400)
    first = caught.value.message.splitlines()[1].strip()
    text, _, tokens = first.partition(" is ")
    here, _, there = tokens.removesuffix(" in student").partition(" in teacher and ")
    cut = [
        "".join(json.loads(f"[{row.replace(chr(39), chr(34)).replace(' ', ',')}]"))
        for row in (here, there)
    ]
    assert (
        cut[0] == cut[1] == json.loads(text.replace("'", '"')).replace(" ", "\u0120")
        and here != there
    )


SAME = {
    "dropout, which is switched off": model(dropout=0.1),
    "merges written as texts": lambda record: record["model"].update(
        merges=[" ".join(one) for one in record["model"]["merges"]]
    ),
    "another decoder": lambda record: record.update(decoder=None),
    "truncation": lambda record: record.update(
        truncation={"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    ),
    "a template for special tokens": lambda record: record.update(
        post_processor={
            "type": "TemplateProcessing",
            "pair": [],
            "special_tokens": {},
            "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        }
    ),
    "byte_fallback, where every byte is a token": model(byte_fallback=True),
    "fuse_unk, where nothing is unknown": model(fuse_unk=True),
}


@pytest.mark.parametrize("name", SAME)
def test_files_that_give_the_same_tokens_are_passed_in_silence(name: str, tmp_path: Path) -> None:
    assert check_vocabularies(pair(tmp_path, by_bytes(), SAME[name]), 400) == ()


def test_texts_with_a_token_that_one_side_lacks_are_not_compared(tmp_path: Path) -> None:
    def extra(record: Record) -> None:
        size = len(record["model"]["vocab"])
        token = {
            **record["added_tokens"][0],
            "id": size,
            "content": "one(two)",
            "normalized": False,
        }
        record["added_tokens"].append(token)

    (note,) = check_vocabularies(pair(tmp_path, by_bytes(), extra), 400)
    assert "1 are a token in one of them alone" in note


def test_one_merge_among_thousands_is_found(tmp_path: Path) -> None:
    record = json.loads((DEMO / "tokenizer.json").read_text())
    merges = len(record["model"]["merges"])
    for number in (0, merges // 2, merges - 1):
        known = pair(tmp_path, record, lambda other, n=number: other["model"]["merges"].pop(n))
        with pytest.raises(TokenizerError, match="the same tokens for every text"):
            check_vocabularies(known, 5_000)


def test_the_probes_are_some_thousand_and_always_the_same(tmp_path: Path) -> None:
    record = json.loads((DEMO / "tokenizer.json").read_text())
    known = pair(tmp_path, record, reverse_merges)
    one, other = known["teacher"], known["student"]
    assert one is not None and other is not None
    found = probes(one, other)
    assert found == probes(one, other) and len(set(found)) == len(found)
    assert 5_000 < len(found) < 20_000
    assert probes(one, one) == []
    assert compare(one, one, 5_000).texts == 0


def test_two_models_with_other_merges_have_no_common_perplexity(kit: Kit, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(kit.teacher, tmp_path / "other")
    path = folder / "tokenizer.json"
    record = json.loads(path.read_text())
    reverse_merges(record)
    path.write_text(json.dumps(record))
    one, other = open_model(kit.teacher, device="cpu"), open_model(folder, device="cpu")
    with pytest.raises(BadInput, match="probe strings tokenised differently"):
        perplexity(one, [Document(name="a", text=TEXT)], against=other)
