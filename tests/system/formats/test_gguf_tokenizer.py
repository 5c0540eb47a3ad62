"""A tokenizer through GGUF and back gives the same ids for every text; what GGUF cannot say is
refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import engine.demo
from engine.errors import TokenizerError, WeightsError
from engine.formats.gguf import parse_header
from engine.formats.gguf_metadata import TOKEN_TYPES, TokenType
from engine.formats.gguf_tokenizer import (
    build_tokenizer_json,
    tokenizer_metadata,
    unsupported_tokenizer,
)
from engine.formats.gguf_values import GgufMetadata, encode_value
from engine.formats.tokenizer import PRE_TOKENIZERS, open_tokenizer
from tests.support.gguf_files import (
    BOOL,
    STRING,
    TOKENS,
    UINT32,
    build,
    pair,
    text,
    u32,
    vocabulary,
)

DEMO = Path(engine.demo.__file__).parent / "teacher" / "tokenizer.json"
ROWS = 4096

# Contractions in both cases, digits, combining marks and their composed forms, white space of all
# kinds, astral characters, controls, right-to-left, special tokens whole, cut and doubled.
AWKWARD = [
    "",
    " ",
    "def f(x):\n    return x ** 2  # 12345 \t\n\n\n",
    "I'LL we'll THEY'RE 'S 's\u017f don't 'd'm",
    "e\u0301 \u00e9 \u212b \u1e9b\u0323 \ufb01 \u0958 \uac00 \u1100\u1161",
    "\u0660\u0661\u0662 \u00b2\u2159 \u2167 12 345 6789",
    "\r\n\r\n  \u00a0\u2003\u3000x\u2028y\u0085z \v\f ",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U00020000 \ufffd\x00\x7f\u200b",
    "\u0645\u0631\u062d\u0628\u0627 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u65e5\u672c\u8a9e",
    "<|endoftext|><|endoftext|> <|endoftext |> a<|endoftext|>b <|end",
    "$x+=<y>^~|z; [PAD7] <0x41> ![]{}()\\/_--..",
]


def ids(raw: bytes, content: str) -> list[int]:
    found: list[int] = Tokenizer.from_buffer(raw).encode(content).ids
    return found


def there(raw: bytes, rows: int = ROWS) -> GgufMetadata:
    values = tokenizer_metadata(raw, rows, "tokenizer.json")
    pairs = [text(key) + encode_value(value) for key, value in values.items()]
    return parse_header(build(pairs), Path("m")).metadata


def and_back(raw: bytes, rows: int = ROWS) -> bytes:
    found = build_tokenizer_json(there(raw, rows))
    assert found is not None
    return found


def changed(**changes: Any) -> bytes:
    """The demo tokenizer with some keys replaced; `model__x` is x of the model."""
    record = json.loads(DEMO.read_bytes())
    for key, value in changes.items():
        if key.startswith("model__"):
            record["model"][key.removeprefix("model__")] = value
        else:
            record[key] = value
    return json.dumps(record).encode()


def trained(pre: str) -> bytes:
    """A small tokenizer that cuts text as `pre` does and has merges and tokens of its own."""
    from tokenizers import (
        AddedToken,
        Regex,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    row = PRE_TOKENIZERS[pre]
    inner = Tokenizer(models.BPE(ignore_merges=row.ignore_merges))
    cuts = [
        pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False)
        for split in row.splits
    ]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    inner.decoder = decoders.ByteLevel()
    if row.normalizer == "NFC":
        inner.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|begin|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = Path(__file__).read_text() + "12345 678 1234 99 ''' ... 2024-01-31 e\u0301\u00e9"
    inner.train_from_iterator([source, *AWKWARD], trainer)
    inner.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("  ")])
    result: str = inner.to_str()
    return result.encode()


@pytest.mark.parametrize("content", AWKWARD)
def test_the_demo_tokenizer_gives_equal_ids_after_the_round_trip(content: str) -> None:
    raw = DEMO.read_bytes()
    assert ids(and_back(raw), content) == ids(raw, content)


def test_special_tokens_are_control_tokens_and_other_added_ones_are_the_user_s() -> None:
    raw = trained("qwen2")
    said = tokenizer_metadata(raw, 700, "here")
    kinds = dict(zip(said["tokenizer.ggml.tokens"].value, said[TOKEN_TYPES].value, strict=True))
    added = {one["content"]: one["special"] for one in json.loads(raw)["added_tokens"]}
    assert added["<|endoftext|>"] and not added["<tool_call>"]
    for token, special in added.items():
        assert kinds[token] == (TokenType.CONTROL if special else TokenType.USER_DEFINED), token
    assert kinds["a"] == TokenType.NORMAL


@pytest.fixture(scope="module")
def pairs_of_tokenizers() -> list[tuple[Tokenizer, Tokenizer]]:
    originals = [DEMO.read_bytes(), *(trained(pre) for pre in PRE_TOKENIZERS)]
    return [(Tokenizer.from_buffer(raw), Tokenizer.from_buffer(and_back(raw))) for raw in originals]


@settings(max_examples=150, deadline=None)
@given(content=st.text(max_size=60) | st.lists(st.sampled_from(AWKWARD)).map("".join))
def test_any_text_gives_equal_ids_after_the_round_trip(
    pairs_of_tokenizers: list[tuple[Tokenizer, Tokenizer]], content: str
) -> None:
    for before, after in pairs_of_tokenizers:
        one, other = before.encode(content), after.encode(content)
        assert one.ids == other.ids
        assert before.decode(one.ids, skip_special_tokens=False) == after.decode(
            one.ids, skip_special_tokens=False
        )


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_way_to_cut_text_has_its_name(pre: str) -> None:
    raw = trained(pre)
    metadata = there(raw)
    assert metadata["tokenizer.ggml.pre"] == pre
    assert "apr_workbench.tokenizer.normalizer" not in metadata
    found = and_back(raw)
    for content in AWKWARD:
        assert ids(found, content) == ids(raw, content)
    record, original = json.loads(found), json.loads(raw)
    assert record["model"]["ignore_merges"] == original["model"]["ignore_merges"]
    assert record["normalizer"] == original["normalizer"]
    assert [t["content"] for t in record["added_tokens"] if t["special"]] == [
        "<|begin|>",
        "<|endoftext|>",
    ]
    assert [t["content"] for t in record["added_tokens"] if not t["special"]] == [
        "<tool_call>",
        "  ",
    ]


def test_the_ways_to_cut_text_differ_where_they_should() -> None:
    content = "It'S 1234567, e\u0301 ++=x"
    cuts = {}
    for pre in PRE_TOKENIZERS:
        inner = Tokenizer.from_buffer(trained(pre))
        spelt = content if inner.normalizer is None else inner.normalizer.normalize_str(content)
        cuts[pre] = [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(spelt)]
    assert len({tuple(pieces) for pieces in cuts.values()}) == len(PRE_TOKENIZERS)
    assert "1" in cuts["qwen2"] and "123" in cuts["llama-bpe"] and "1234567" not in cuts["default"]


def test_gpt2_own_pre_tokenizer_is_the_same_way_under_its_short_name() -> None:
    short = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    raw = changed(pre_tokenizer={**short, "use_regex": True})
    assert there(raw)["tokenizer.ggml.pre"] == "gpt-2"
    for content in AWKWARD:
        assert ids(and_back(raw), content) == ids(raw, content)


def test_a_file_that_names_no_way_to_cut_text_means_the_default() -> None:
    pairs = [one for one in vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"]) if b"ggml.pre" not in one]
    found = build_tokenizer_json(parse_header(build(pairs), Path("m")).metadata)
    assert found is not None
    splits = json.loads(found)["pre_tokenizer"]["pretokenizers"][:-1]
    assert tuple(one["pattern"]["Regex"] for one in splits) == PRE_TOKENIZERS["default"].splits


def test_rows_without_a_token_are_filled_and_left_out_again(tmp_path: Path) -> None:
    raw = DEMO.read_bytes()
    metadata = there(raw, ROWS + 3)
    assert metadata["tokenizer.ggml.tokens"][-2:] == ["[PAD4097]", "[PAD4098]"]
    assert metadata["tokenizer.ggml.token_type"][-3:] == [TokenType.UNUSED] * 3
    path = tmp_path / "tokenizer.json"
    path.write_bytes(and_back(raw, ROWS + 3))
    assert open_tokenizer(path).vocab_size == ROWS
    assert open_tokenizer(path).first_differing_id(open_tokenizer(DEMO)) is None


def test_qwen2_without_a_word_about_it_has_nfc() -> None:
    pairs = vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"])
    found = build_tokenizer_json(parse_header(build(pairs), Path("m")).metadata)
    assert found is not None and json.loads(found)["normalizer"] == {"type": "NFC"}


TEMPLATE: dict[str, Any] = {
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
BYTES: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": False,
    "use_regex": True,
}


@pytest.mark.parametrize(
    "post", [TEMPLATE, {"type": "Sequence", "processors": [BYTES, TEMPLATE]}, BYTES, None]
)
def test_the_first_token_of_a_text_is_kept(post: dict[str, Any] | None) -> None:
    raw = changed(post_processor=post)
    metadata = there(raw)
    assert metadata["tokenizer.ggml.add_bos_token"] is (post not in (BYTES, None))
    assert metadata["tokenizer.ggml.add_eos_token"] is False
    assert ids(and_back(raw), "a b") == ids(raw, "a b")


def test_llama_adds_its_first_token_unless_told_otherwise() -> None:
    def first(*more: bytes) -> int:
        pairs = vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"])
        pairs[1] = pair("tokenizer.ggml.pre", STRING, text("llama-bpe"))
        pairs.append(pair("tokenizer.ggml.bos_token_id", UINT32, u32(3)))
        found = build_tokenizer_json(parse_header(build([*pairs, *more]), Path("m")).metadata)
        assert found is not None
        return ids(found, "ab")[0]

    assert first() == 3
    assert first(pair("tokenizer.ggml.add_bos_token", BOOL, b"\0")) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.__setitem__(0, pair("tokenizer.ggml.model", STRING, text("llama"))), "llama"),
        (lambda v: v.__setitem__(0, pair("tokenizer.ggml.model", UINT32, u32(1))), "model 1"),
        (lambda v: v.__setitem__(1, pair("tokenizer.ggml.pre", STRING, text("tekken"))), "tekken"),
        (lambda v: v.__setitem__(1, pair("tokenizer.ggml.pre", UINT32, u32(1))), "pre 1"),
        (lambda v: v.pop(), "merges missing"),
        (lambda v: v.clear(), "no tokenizer"),
    ],
)
def test_another_kind_of_tokenizer_gives_none_and_a_warning_that_says_which(
    change: Callable[[list[bytes]], object], said: str
) -> None:
    pairs = vocabulary(TOKENS, [1, 1, 1, 3, 5], ["a b"])
    change(pairs)
    metadata = parse_header(build(pairs), Path("m")).metadata
    assert build_tokenizer_json(metadata) is None
    (warning,) = unsupported_tokenizer(metadata)
    assert said in warning


@pytest.mark.parametrize(
    ("tokens", "kinds", "merges", "said"),
    [
        (["a", "b", "ab", "a"], [1, 1, 1, 1], ["a b"], "token 3"),
        (["a", "b", "ab", ""], [1, 1, 1, 1], ["a b"], "token 3"),
        (["a", "b", "ab"], [1, 1, 1], ["a b", "ab"], "merge 1"),
        (["a", "b", "ab"], [1, 1, 1], ["a c"], "a c"),
        (["a", "b", "ab"], [1, 1, 1], ["b a"], "b a"),
        (["a", "b", "ab"], [1, 1, 1], [""], "merge 0"),
    ],
)
def test_tokens_and_merges_that_contradict_each_other_are_refused(
    tokens: list[str], kinds: list[int], merges: list[str], said: str
) -> None:
    metadata = parse_header(build(vocabulary(tokens, kinds, merges)), Path("m")).metadata
    with pytest.raises(WeightsError, match=r"^GG08 gguf: m, ") as caught:
        build_tokenizer_json(metadata)
    assert said in str(caught.value)


SPLIT = json.loads(DEMO.read_bytes())["pre_tokenizer"]["pretokenizers"][0]
TOKEN = json.loads(DEMO.read_bytes())["added_tokens"][0]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "a tokenizer of the tokenizers library"),
        (b"\xff", "a tokenizer of the tokenizers library"),
        (
            changed(model={"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "a"}),
            "WordLevel",
        ),
        (changed(model__byte_fallback=True), "byte_fallback"),
        (changed(model__ignore_merges=True), "ignore_merges"),
        (changed(normalizer={"type": "Lowercase"}), "Lowercase"),
        (changed(pre_tokenizer=None), "ByteLevel"),
        (changed(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (changed(pre_tokenizer={**BYTES, "add_prefix_space": True}), "prefix space"),
        (
            changed(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {**SPLIT, "pattern": {"Regex": "x+"}},
                        {**BYTES, "add_prefix_space": False, "use_regex": False},
                    ],
                }
            ),
            "x+",
        ),
        (changed(added_tokens=[{**TOKEN, "lstrip": True}]), "lstrip"),
        (changed(added_tokens=[{**TOKEN, "content": "new", "id": 9000}]), "id 9,000"),
        (
            changed(post_processor={"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}),
            "BertProcessing",
        ),
        (changed(post_processor={**TEMPLATE, "single": TEMPLATE["single"][:1] * 2}), "one token"),
    ],
)
def test_a_tokenizer_that_gguf_cannot_say_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(TokenizerError, match="tokenizer for GGUF: here") as caught:
        tokenizer_metadata(raw, ROWS, "here")
    assert said in str(caught.value)


def test_ids_beyond_the_rows_are_refused() -> None:
    with pytest.raises(TokenizerError, match="ids below 4,095"):
        tokenizer_metadata(DEMO.read_bytes(), ROWS - 1, "here")
