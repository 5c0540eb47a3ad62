"""The metadata of .apr files of other writers: aliases, keys twice, configurations, tokenizers."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from engine.errors import TokenizerError, WeightsError
from engine.formats.apr import AprFile
from engine.formats.apr_metadata import EXACT, embed
from engine.formats.tokenizer import open_tokenizer
from engine.models.config import ModelConfig
from tests.support.apr_bytes import FLOATS, METADATA, Entry, build_apr
from tests.support.paths import DEMO

TOKENIZER = DEMO / "teacher" / "tokenizer.json"
HEAD = Entry("lm_head.weight", 0, [300, 32], bytes(300 * 32 * 4))


def opened(path: Path, metadata: dict[str, object] | bytes, *tensors: Entry) -> AprFile:
    path.write_bytes(build_apr(tensors or (FLOATS,), metadata))
    return AprFile(path)


@pytest.mark.parametrize(
    ("canonical", "alias"),
    [
        ("hidden_size", "hidden_dim"),
        ("hidden_size", "d_model"),
        ("hidden_size", "n_embd"),
        ("num_layers", "num_hidden_layers"),
        ("num_layers", "n_layers"),
        ("num_layers", "n_layer"),
        ("num_heads", "num_attention_heads"),
        ("num_heads", "n_heads"),
        ("num_heads", "n_head"),
        ("num_kv_heads", "num_key_value_heads"),
        ("num_kv_heads", "n_kv_heads"),
        ("vocab_size", "n_vocab"),
        ("intermediate_size", "ffn_dim"),
        ("intermediate_size", "intermediate_dim"),
        ("intermediate_size", "n_inner"),
        ("max_position_embeddings", "max_seq_len"),
        ("max_position_embeddings", "context_length"),
        ("max_position_embeddings", "n_ctx"),
        ("rms_norm_eps", "layer_norm_eps"),
        ("rms_norm_eps", "norm_eps"),
    ],
)
def test_an_alias_is_folded_into_its_canonical_key(
    tmp_path: Path, canonical: str, alias: str
) -> None:
    value = METADATA[canonical]
    without = {key: kept for key, kept in METADATA.items() if key != canonical}
    for metadata in (without | {alias: value}, without | {canonical: None, alias: value}):
        weights = opened(tmp_path / "m.apr", metadata)
        assert weights.metadata == METADATA
        assert weights.config_dict() == opened(tmp_path / "n.apr", METADATA).config_dict()


def test_the_canonical_key_counts_where_its_alias_differs(tmp_path: Path) -> None:
    weights = opened(tmp_path / "m.apr", METADATA | {"n_embd": 64, "d_model": 32})
    assert weights.metadata == METADATA


def test_a_key_twice_takes_its_last_value(tmp_path: Path) -> None:
    text = json.dumps(METADATA)[:-1] + ', "hidden_size": 64, "name": "x"}'
    weights = opened(tmp_path / "m.apr", text.encode())
    assert weights.metadata["hidden_size"] == 64


def test_keys_nobody_knows_are_kept(tmp_path: Path) -> None:
    extra = {"experiment": {"id": [1, None]}, "license": "apache-2.0"}
    assert opened(tmp_path / "m.apr", METADATA | extra).metadata == METADATA | extra


def test_a_configuration_is_made_from_the_canonical_keys(tmp_path: Path) -> None:
    metadata = METADATA | {
        "hf_architecture": "Qwen2ForCausalLM",
        "tokenizer.bos_token_id": 1,
        "tokenizer.eos_token_id": 2,
        "head_dim": 8,
    }
    config = opened(tmp_path / "m.apr", metadata).config_dict()
    assert config == {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 300,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert ModelConfig.from_dict(config, "here").head_dim == 8


def test_a_head_in_the_file_means_it_is_not_tied_unless_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    assert opened(path, METADATA, HEAD).config_dict()["tie_word_embeddings"] is False
    said = METADATA | {"tied_embeddings": True}
    assert opened(path, said, HEAD).config_dict()["tie_word_embeddings"] is True
    empty = HEAD._replace(shape=[0, 32], data=b"")
    weights = opened(path, METADATA, empty)
    assert weights.config_dict()["tie_word_embeddings"] is True


def test_reals_stored_as_fp32_come_back_as_the_decimals_that_were_meant(tmp_path: Path) -> None:
    metadata = METADATA | {"rms_norm_eps": 9.999999974752427e-07, "rope_theta": 1234567.8}
    config = opened(tmp_path / "m.apr", metadata).config_dict()
    assert config["rms_norm_eps"] == 1e-06
    assert config["rope_theta"] == 1234567.8, "no fp32 number, so it is left as it stands"


def test_heads_that_are_not_shared_may_go_unsaid(tmp_path: Path) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "num_kv_heads"}
    assert opened(tmp_path / "m.apr", metadata).config_dict()["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": None, "model_type": ""}, "expected the model's family under hf_model_"),
        ({"architecture": 3}, "the model's family"),
        ({"hf_config": [1]}, "expected hf_config to be an object, found"),
        ({EXACT: 3}, "found no text"),
        ({EXACT: "&&&"}, "expected a deflated tokenizer.json in base64"),
        ({EXACT: base64.b64encode(b"nothing deflated").decode()}, "incorrect header check"),
        ({EXACT: base64.b64encode(zlib.compress(b"x" * 999)[:-4]).decode()}, "no end within"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    weights = opened(tmp_path / "m.apr", METADATA | changes)
    with pytest.raises(WeightsError) as caught:
        (weights.tokenizer_json if EXACT in changes else weights.config_dict)()
    assert str(caught.value).startswith("AP09 apr") and words in str(caught.value)


def test_a_deflated_bomb_stops_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.formats.apr_metadata._LIMIT_BYTES", 10_000)
    bomb = base64.b64encode(zlib.compress(bytes(10_000_000), 9)).decode()
    weights = opened(tmp_path / "m.apr", METADATA | {EXACT: bomb})
    with pytest.raises(WeightsError, match=r"AP09 .*no end within 10,000 bytes"):
        weights.tokenizer_json()


TEXTS = (
    "def f(x):\n    return x + 1  # naïve café 12345\n",
    "  leading, trailing  \n\n\ttabs",
    "it's <|endoftext|> we'll 日本語 🙂",
)


def tables(**changes: Any) -> dict[str, Any]:
    """The keys that other writers know, of the demo's tokenizer."""
    found = embed(TOKENIZER.read_bytes())
    return METADATA | {key: value for key, value in found.items() if key != EXACT} | changes


def test_a_tokenizer_made_from_tables_gives_the_first_differing_id(tmp_path: Path) -> None:
    theirs = tmp_path / "tokenizer.json"
    raw = opened(tmp_path / "m.apr", tables()).tokenizer_json()
    assert raw is not None
    theirs.write_bytes(raw)
    ours, found = open_tokenizer(TOKENIZER), open_tokenizer(theirs)
    assert ours.first_differing_id(found) is None
    for mine, other in zip(
        ours.encode_documents(TEXTS), found.encode_documents(TEXTS), strict=True
    ):
        assert mine.tolist() == other.tolist()
        assert found.decode(mine) == ours.decode(mine)


def test_a_file_from_before_pre_types_is_cut_as_its_architecture(tmp_path: Path) -> None:
    said = opened(tmp_path / "m.apr", tables()).tokenizer_json()
    metadata = {key: value for key, value in tables().items() if key != "tokenizer.pre_type"}
    assert opened(tmp_path / "n.apr", metadata).tokenizer_json() == said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.pre_type": "tekken"}, "tokenizer.pre_type 'tekken' is not supported; qwen2"),
        ({"architecture": "gpt9", "tokenizer.pre_type": None}, "pre_type None is not supported"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_none_with_the_reason(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    weights = opened(tmp_path / "m.apr", tables(**changes))
    assert weights.tokenizer_json() is None
    assert any(words in line for line in weights.warnings)


def test_a_vocabulary_without_token_types_gives_no_tokenizer(tmp_path: Path) -> None:
    """Which tokens are special is not known, so ids could be nearly right."""
    metadata = {key: value for key, value in tables().items() if key != "tokenizer.token_type"}
    weights = opened(tmp_path / "m.apr", metadata)
    assert weights.tokenizer_json() is None
    assert any(
        "tokenizer.token_type missing, though the file has" in line for line in weights.warnings
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.vocabulary": [1]}, "tokenizer.merges as lists of texts"),
        ({"tokenizer.token_type": [1]}, "as many tokenizer.token_type as tokens"),
        ({"tokenizer.merges": 4}, "tokenizer.merges as lists of texts"),
        ({"tokenizer.merges": ["a"]}, "two tokens that make a third"),
        ({"tokenizer.vocabulary": ["a", "a"], "tokenizer.token_type": [1, 1]}, "text of its own"),
    ],
)
def test_damaged_tables_are_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(WeightsError, match=rf"AP09 .*{words}"):
        opened(tmp_path / "m.apr", tables(**changes)).tokenizer_json()


def test_what_is_no_tokenizer_is_not_embedded() -> None:
    for raw in (b"", b"\xff", b"[]", b"{}", b'{"model": {"vocab": {"a": []}}}'):
        with pytest.raises(TokenizerError, match=r"tokenizer: to write"):
            embed(raw)


def test_a_tokenizer_that_gguf_cannot_say_is_embedded_without_tables() -> None:
    record = json.loads(TOKENIZER.read_bytes())
    record["normalizer"] = {"type": "Lowercase"}
    assert set(embed(json.dumps(record).encode())) == {EXACT}
