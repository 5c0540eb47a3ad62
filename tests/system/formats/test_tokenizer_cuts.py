"""A long document is tokenized in pieces: its tokens are those of the whole, and its memory is bounded."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.corpus import Document
from engine.errors import TokenizerError
from engine.formats import tokenizer as subject
from engine.formats.tokenizer import PRE_TOKENIZERS, Tokenizer, open_tokenizer
from engine.limits import UNCUT_TEXT
from tests.support.paths import ROOT
from tests.support.train_tokenizer import train_bpe

ATOMS = [
    *(
        "7",
        "77",
        "1234567",
        "0.5",
        "9,9",
        "²",
        "٣",
        "a",
        "Z",
        "don't",
        "we'LL",
        "'s",
        "'ſ",
        "l'été",
    ),
    *(" ", "  ", "     ", "\t", "\n", "\r\n", "\n\n  \n", "\r", "\x0b", "\x1c", "\x85", "\u2003"),
    *("=", "==", "...", "`", "_", "$", "\x00", "\x7f", "。", "、", "漢", "漢字", "한", "가\u11a8"),
    *("e\u0301", "\u0301", "\u0323\u0307", "\u200d", "👩\u200d👧", "\u212b", "\ufb01", "か\u3099"),
    *("<|x|>", "<|x", "|>", "<|reserved_77|>", "<tool>", "tool", " <l> ", "Ab", "ﬁx", "\u2460"),
    "x" * 40,
    "5" * 40,
    " " * 40,
    "\n" * 40,
]
TEXT = "def one(two):\n    return 12 + 1234 == 77777  # don't, e\u0301 \u00e9 漢字。\r\n\n\n" * 20


def added(*contents: str, **flags: bool) -> list[dict[str, Any]]:
    known = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    known["special"] = True
    return [{"content": one, **known, **flags} for one in contents]


def split(expression: str, **fields: Any) -> dict[str, Any]:
    known = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    return {**known, "invert": False, **fields}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


QWEN = sequence(split(PRE_TOKENIZERS["qwen2"].splits[0]), BYTES)
LLAMA = sequence(split(PRE_TOKENIZERS["llama-bpe"].splits[0]), BYTES)
DEFAULT = sequence(*map(split, PRE_TOKENIZERS["default"].splits), BYTES)
N = 400
FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen": lambda: {"normalizer": {"type": "NFC"}, "pre_tokenizer": QWEN},
    "qwen removed": lambda: {
        "pre_tokenizer": sequence(
            split(PRE_TOKENIZERS["qwen2"].splits[0], behavior="Removed", invert=True), BYTES
        )
    },
    "qwen, tokens": lambda: {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": QWEN,
        "added_tokens": added("<|x|>", "<|reserved_77|>", "<tool>", "77", "1.5"),
    },
    "llama": lambda: {"pre_tokenizer": LLAMA},
    "llama, tokens": lambda: {
        "pre_tokenizer": LLAMA,
        "added_tokens": added("<|x|>", "<|reserved_77|>", "<|reserved_777|>"),
    },
    "llama, digits at the edge of a token": lambda: {
        "pre_tokenizer": LLAMA,
        "added_tokens": added("a7", "7a", "77"),
    },
    "tokens that take in what is beside them": lambda: {
        "pre_tokenizer": QWEN,
        "added_tokens": [
            *added("<l>", lstrip=True),
            *added("<r>", "=", rstrip=True),
            *added("tool", "a", "7", single_word=True),
        ],
    },
    "tokens of the normalized text": lambda: {
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": LLAMA,
        "added_tokens": added("fi", "fix", "Ab", "77", "漢字", normalized=True, special=False),
    },
    "decomposed": lambda: {"normalizer": {"type": "NFKD"}, "pre_tokenizer": LLAMA},
    "gpt-2": lambda: {"pre_tokenizer": {**BYTES, "use_regex": True}},
    "gguf default": lambda: {"pre_tokenizer": DEFAULT},
}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(train_bpe([Document(name="a", text=TEXT)], N))
    vocab = parsed["model"]["vocab"]
    while len(vocab) < N:
        vocab[f"unused {len(vocab)}"] = len(vocab)
    # Merges over blanks, digits and signs, so that a wrong cut shows in the ids.
    for pair in ("ĠĠ", "ĊĊ", "77", "==", "..", "55", "xx", "čĊ"):
        if pair not in vocab and (unused := next((k for k in vocab if k[:6] == "unused"), None)):
            vocab[pair] = vocab.pop(unused)
            parsed["model"]["merges"].append(list(pair))
    return parsed


@pytest.fixture
def opened(record: dict[str, Any], tmp_path: Path) -> Callable[..., Tokenizer]:
    def of(**fields: Any) -> Tokenizer:
        path = tmp_path / "tokenizer.json"
        tokens = [*added("<|endoftext|>"), *fields.pop("added_tokens", [])]
        vocab, following = record["model"]["vocab"], N
        for token in tokens:
            # A token of the vocabulary keeps its id.
            token["id"] = vocab.get(token["content"], following)
            following += token["id"] == following
        path.write_text(json.dumps({**record, "added_tokens": tokens, **fields}))
        return open_tokenizer(path)

    return of


def in_one(tokenizer: Tokenizer, text: str) -> list[int]:
    (encoding,) = tokenizer._inner.encode_batch([text], add_special_tokens=False)
    return list(encoding.ids)


# A rule of cuts that is left out, or a place too many, shows within 60 texts of some family.
@pytest.mark.parametrize("texts", [300, pytest.param(1500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_the_pieces_are_those_of_the_whole(
    opened: Callable[..., Tokenizer], monkeypatch: pytest.MonkeyPatch, family: str, texts: int
) -> None:
    tokenizer = opened(**FAMILIES[family]())
    monkeypatch.setattr(subject, "_CHUNK_CHARACTERS", 3)
    draw = random.Random(family)
    pieces = 0
    for _ in range(texts):
        weights = draw.choices(ATOMS, k=6)
        text = "".join(draw.choices(weights, k=draw.randint(1, 40)))
        (ids,) = tokenizer.encode_documents([text])
        assert ids.tolist() == in_one(tokenizer, text), repr(text)
        pieces += sum(1 for _ in tokenizer._chunks([text]))
    assert pieces > 2.7 * texts, "hardly anything was cut"


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": BYTES},
        {"pre_tokenizer": {**BYTES, "use_regex": True, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": QWEN, "normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": split(PRE_TOKENIZERS["qwen2"].splits[0], behavior="MergedWithPrevious")},
        {"pre_tokenizer": sequence(split(r"\p{N}{1,3}"), BYTES)},
    ],
    ids=str,
)
def test_a_tokenizer_of_other_parts_takes_a_document_whole_or_refuses_it(
    opened: Callable[..., Tokenizer], fields: dict[str, Any]
) -> None:
    tokenizer = opened(**fields)
    text = "a1 " * 30_000
    (ids,) = tokenizer.encode_documents([text])
    assert ids.tolist() == in_one(tokenizer, text)
    with pytest.raises(TokenizerError) as caught:
        tokenizer.encode_documents(["a1 " * (UNCUT_TEXT.most // 3 + 1)])
    assert "1,048,576 bytes" in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("run", ["x", "7", " ", "=", "\n", "\u0301", "👩"])
def test_a_run_that_nothing_cuts_is_refused_beyond_the_limit(
    opened: Callable[..., Tokenizer], run: str
) -> None:
    tokenizer = opened(pre_tokenizer=QWEN)
    with pytest.raises(TokenizerError, match="found none in"):
        tokenizer.encode_documents(["one " * 20_000 + run * (UNCUT_TEXT.most + 1)])


MEASURE = """
import sys
from pathlib import Path
from engine.data.corpus import Document
from tests.support.streams import tokenize
from engine.formats.tokenizer import open_tokenizer
tokenizer = open_tokenizer(Path(sys.argv[1]))
text = (Path(sys.argv[2]).read_text() * 4000)[: int(sys.argv[3])] 
tokenize([Document(name="warm", text="one")], tokenizer)
def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) << 10
open("/proc/self/clear_refs", "w").write("5")
before = peak()
stream = tokenize([Document(name="a", text=text)], tokenizer)
print((peak() - before), len(stream))
"""


@pytest.mark.parametrize(
    "family",
    [
        # What is cut, and where, is the same code for both.
        "qwen",
        pytest.param("llama", marks=pytest.mark.soak),
    ],
)
def test_the_memory_of_a_document_is_8_times_its_bytes_and_a_constant(
    opened: Callable[..., Tokenizer], family: str
) -> None:
    path = opened(**FAMILIES[family]()).path
    size = 4_000_000
    source = str(ROOT / "engine/formats/tokenizer.py")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), source, str(size)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    taken = int(done.stdout.split()[0])
    # The constant is far smaller for text that can be cut anywhere than the stated one.
    assert taken < 8 * size + (160 << 20), f"{taken / size:.1f} times"
