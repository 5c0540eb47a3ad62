"""Every kind of file that the engine writes, opened by another path than its writer's.

The models are made and saved by transformers, so that values, names and configuration are not the engine's; what the
engine writes of them is opened by `safetensors`, by `transformers` and by the `gguf` package, and an .apr byte by byte.
A value may differ by the rounding of the type that the file names for its tensor, and by nothing else.
"""

from __future__ import annotations

import functools
import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors import safe_open
from torch import Tensor

from engine.export.convert import convert
from engine.log.folder import RunFolder
from engine.models.load import load_decoder, save_decoder
from engine.spec.sections import ModelSection
from tests.support.apr_bytes import take_apart
from tests.support.finished_runs import finish
from tests.support.kit import Kit
from tests.support.other_models import LIBRARY, make_other
from tests.system.export.test_publish import published

Values = dict[str, Tensor]
IDS, LAYERS, HEADS = 300, 2, 4
SIZES: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
TOKENS_BT = (torch.arange(24) * 7 % IDS)[None]
TEXT = "def one(two):\n    return  two + 12  # \u00e9"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
RMS = {"Q8_0": 0.006, "Q6_K": 0.03, "Q4_K": 0.12}
"""Largest error of a matrix in blocks, of its root mean square."""
MATRIX = {"f32": "F32", "bf16": "BF16", "q8_0": "Q8_0", "q6_k": "Q6_K", "q4_k_m": "Q4_K"}
"""What most matrices of a file are in."""


@dataclass(frozen=True)
class Source:
    family: str
    tied: bool
    dtype: torch.dtype
    sharded: bool = False
    tokenizer: bool = True


SOURCES = {
    "tied, fp32": Source("qwen2", True, torch.float32),
    "own head, bf16, in shards": Source("qwen2", False, torch.bfloat16, sharded=True),
    "tied Llama, fp16, in shards, without a tokenizer": Source(
        "llama", True, torch.float16, sharded=True, tokenizer=False
    ),
    "Llama with its own head, fp32": Source("llama", False, torch.float32),
}


@pytest.fixture(scope="module")
def source(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    @functools.cache
    def made(name: str) -> tuple[Path, Any]:
        about, folder = SOURCES[name], tmp_path_factory.mktemp("source") / "model"
        model = make_other(
            about.family, vocab_size=IDS, tie_word_embeddings=about.tied, **SIZES
        ).to(about.dtype)
        model.save_pretrained(folder, max_shard_size="1MB" if about.sharded else "1GB")
        assert (len(list(folder.glob("*.safetensors"))) > 1) == about.sharded
        if about.tokenizer:
            shutil.copyfile(kit.teacher / "tokenizer.json", folder / "tokenizer.json")
        # Not the model itself: a cast would round what it turns positions by.
        return folder, LIBRARY.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return made


def values_of(model: Any) -> Values:
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def assert_rounded(found: Tensor, wanted: Tensor, kind: str, name: str) -> None:
    """Assert that values are those of a model, rounded to a type of tensors and no further."""
    assert found.shape == wanted.shape, name
    if kind in FLOATS:
        assert torch.equal(found, wanted.to(FLOATS[kind]).float()), f"{name} in {kind}"
    else:
        error = float((found - wanted).norm() / wanted.norm())
        assert 0 < error < RMS[kind], f"{name} in {kind}: {error:.3f}"


# The readers: each yields the type, and the values in fp32, of every tensor by its name in transformers


def by_safetensors(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_slice(name).get_dtype(), opened.get_tensor(name).float()


def halves(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k of a Llama as transformers has them: the halves of a head alternate in a GGUF."""
    whole = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return whole.transpose(1, 2).reshape(rows.shape)


def by_gguf(path: Path, family: str) -> Iterator[tuple[str, str, Tensor]]:
    arch = {"qwen2": gguf.MODEL_ARCH.QWEN2, "llama": gguf.MODEL_ARCH.LLAMA}[family]
    names = gguf.get_tensor_name_map(arch, LAYERS)
    found = {one.name: one for one in gguf.GGUFReader(path).tensors}
    model = LIBRARY.AutoModelForCausalLM.from_config(
        LIBRARY.AutoConfig.for_model(family, vocab_size=IDS, **SIZES)
    )
    for name in values_of(model):
        one = found.pop(names.get_name(name, (".weight", ".bias")), None)
        if one is None:
            assert name == "lm_head.weight"
            continue
        values = torch.from_numpy(dequantize(one.data, one.tensor_type).copy()).float()
        turned = family == "llama" and ("q_proj" in name or "k_proj" in name)
        heads = HEADS if "q_proj" in name else 2
        yield name, one.tensor_type.name, halves(values, heads) if turned else values
    assert not found


def by_bytes(path: Path) -> Iterator[tuple[str, str, Tensor]]:
    whole = path.read_bytes()
    at, size = struct.unpack("<QI", whole[12:24])
    # Readers of kind 0 rotate the two neighbours of a pair together.
    neighbours = json.loads(whole[at : at + size])["rope_type"] == 0
    for name, (code, shape, raw) in take_apart(whole).items():
        kind = gguf.GGMLQuantizationType(code)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // block * block_bytes
        rows = np.frombuffer(raw, np.uint8).reshape(*shape[:-1], row_bytes)
        values = torch.from_numpy(dequantize(rows, kind).copy()).float()
        turned = neighbours and ("q_proj" in name or "k_proj" in name)
        heads = HEADS if "q_proj" in name else 2
        yield name, kind.name, halves(values, heads) if turned else values


def assert_same_model(found: Iterator[tuple[str, str, Tensor]], wanted: Values, kind: str) -> None:
    kinds = {}
    for name, its_kind, values in found:
        assert_rounded(values, wanted[name], its_kind, name)
        kinds[name] = its_kind
    assert kinds.keys() == wanted.keys()
    assert kinds["model.layers.1.mlp.up_proj.weight"] == kind


@torch.no_grad()
def assert_same_in_transformers(folder: Path, model: Any, dtype: torch.dtype) -> None:
    theirs = LIBRARY.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = json.loads((folder / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == str(dtype).removeprefix("torch.")
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    wanted = values_of(model)
    for name, values in values_of(theirs).items():
        assert torch.equal(values, wanted[name].to(dtype).float()), name
    if dtype == torch.float32 or all(
        torch.equal(one, one.to(dtype).float()) for one in wanted.values()
    ):
        assert torch.equal(theirs(input_ids=TOKENS_BT).logits, model(input_ids=TOKENS_BT).logits)


def encoded(path: Path) -> list[int]:
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(path)).encode(TEXT, add_special_tokens=False).ids
    return found


# The tables


def crossed(others: Iterable[str]) -> list[Any]:
    """Return the pairs of a source and another thing; the suite has each source and each other thing once or more."""
    many = list(others)
    return [
        pytest.param(
            name, other, marks=[pytest.mark.soak] * (place > 0 and other != many[place % len(many)])
        )
        for place, name in enumerate(SOURCES)
        for other in many
    ]


@pytest.mark.parametrize(("name", "quant"), list(product(SOURCES, ("f32", "bf16"))))
def test_a_converted_folder_is_the_model_in_safetensors_and_in_transformers(
    name: str, quant: str, source: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = source(name)
    made = convert(folder, tmp_path / "made", quant).target
    assert_same_model(by_safetensors(made), values_of(model), MATRIX[quant])
    assert_same_in_transformers(made, model, FLOATS[MATRIX[quant]])
    assert (made / "tokenizer.json").exists() == SOURCES[name].tokenizer
    if SOURCES[name].tokenizer:
        assert encoded(made / "tokenizer.json") == encoded(folder / "tokenizer.json")


@pytest.mark.parametrize(("name", "quant"), crossed(MATRIX))
def test_a_gguf_is_the_model_in_the_package_gguf(
    name: str, quant: str, source: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = source(name)
    about = SOURCES[name]
    made = convert(folder, tmp_path / "made.gguf", quant).target
    assert_same_model(by_gguf(made, about.family), values_of(model), MATRIX[quant])
    fields = {key: one.contents() for key, one in gguf.GGUFReader(made).fields.items()}
    assert fields["general.architecture"] == about.family
    for key, value in (
        ("block_count", LAYERS),
        ("context_length", SIZES["max_position_embeddings"]),
        ("embedding_length", SIZES["hidden_size"]),
        ("feed_forward_length", SIZES["intermediate_size"]),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", 2),
    ):
        assert fields[f"{about.family}.{key}"] == value
    assert ("tokenizer.ggml.tokens" in fields) == about.tokenizer
    if about.tokenizer:
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        tokens = fields["tokenizer.ggml.tokens"]
        assert {token: tokens[id_] for token, id_ in vocabulary.items()} == {
            token: token for token in vocabulary
        }


@pytest.mark.parametrize(("name", "quant"), crossed(one for one in MATRIX if one != "q8_0"))
def test_an_apr_is_the_model_byte_by_byte(
    name: str, quant: str, source: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, model = source(name)
    made = convert(folder, tmp_path / "made.apr", quant).target
    assert_same_model(by_bytes(made), values_of(model), MATRIX[quant])


@pytest.mark.parametrize(("name", "engine"), list(product(SOURCES, ("native", "transformers"))))
@pytest.mark.parametrize("dtype", list(FLOATS.values()), ids=str)
def test_a_saved_student_of_either_engine_is_the_model_in_transformers(
    name: str,
    engine: str,
    dtype: torch.dtype,
    source: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    folder, model = source(name)
    decoder = load_decoder(folder, how=ModelSection(engine=engine))
    save_decoder(decoder, tmp_path / "student", dtype)
    kind = next(kind for kind, its_dtype in FLOATS.items() if its_dtype == dtype)
    assert_same_model(by_safetensors(tmp_path / "student"), values_of(model), kind)
    assert_same_in_transformers(tmp_path / "student", model, dtype)


@pytest.fixture(scope="module")
def run(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finish(kit, tmp_path_factory.mktemp("published"))


def test_a_published_student_is_the_runs_in_every_file(run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    folder = published(RunFolder(tmp_path / "run"), tmp_path / "tiny", gguf="f32", apr="f32").folder
    wanted = {name: values for name, _, values in by_safetensors(run.student)}
    model = LIBRARY.AutoModelForCausalLM.from_pretrained(run.student, dtype=torch.float32).eval()
    assert_same_model(by_safetensors(folder), wanted, "F32")
    assert_same_in_transformers(folder, model, torch.float32)
    (apr,) = folder.glob("*.apr")
    assert_same_model(by_bytes(apr), wanted, "F32")
    (file,) = folder.glob("*.gguf")
    tensors = {one.name: one for one in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, LAYERS)
    for name, values in wanted.items():
        one = tensors.pop(names.get_name(name, (".weight", ".bias")))
        assert np.array_equal(dequantize(one.data, one.tensor_type), values.numpy()), name
    assert not tensors
