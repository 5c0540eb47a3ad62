"""Files of the `gguf` package are read here, and files of ours there, with equal content: the
package is the reference for the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import engine.demo
from engine.formats.gguf import open_gguf
from engine.formats.gguf_write import write_gguf
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.tensor import QuantTensor
from tests.support.kit import tiny_config
from tests.support.random_blocks import random_matrix

DEMO = Path(engine.demo.__file__).parent / "teacher" / "tokenizer.json"
QUANTIZED = [kind for kind, type_ in BLOCK_TYPES.items() if type_.block_size > 1]


def test_the_block_types_are_those_of_the_package() -> None:
    for kind, type_ in BLOCK_TYPES.items():
        theirs = gguf.GGMLQuantizationType[kind]
        assert theirs.value == type_.ggml_id
        assert gguf.GGML_QUANT_SIZES[theirs] == (type_.block_size, type_.block_bytes)


def test_a_file_of_ours_is_read_there_with_equal_content(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    torch.manual_seed(3)
    weights: dict[str, torch.Tensor | QuantTensor] = {
        "token_embd.weight": torch.randn(4096, 32).half(),
        "output_norm.weight": torch.randn(32),
        "blk.0.ffn_up.weight": torch.randn(3, 5).bfloat16(),
    }
    for kind in QUANTIZED:
        weights[f"{kind}.weight"] = random_matrix(kind, 3, 512)
    extra: dict[str, Any] = {
        "general.name": "naïve",
        "tokenizer.chat_template": "{{ messages }}",
        "x.count": 2**31,
    }
    write_gguf(
        path,
        config=tiny_config(head_dim=8, vocab_size=4096, eos_token_id=0),
        tensors=weights.items(),
        tokenizer_json=DEMO.read_bytes(),
        metadata=extra,
    )
    reader = gguf.GGUFReader(path)
    ours = open_gguf(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert theirs == dict(ours.metadata)
    assert [one.name for one in reader.tensors] == list(weights)
    for one in reader.tensors:
        expected = weights[one.name]
        assert tuple(reversed(one.shape.tolist())) == tuple(expected.shape)
        assert one.data_offset == ours.tensors[one.name].start
        raw = expected.blocks if isinstance(expected, QuantTensor) else expected.view(torch.uint8)
        assert one.data.tobytes() == raw.contiguous().numpy().tobytes()


def test_types_of_the_keys_are_those_that_llama_cpp_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = tiny_config(head_dim=8, vocab_size=4096, eos_token_id=0)
    write_gguf(path, config=config, tensors=[], tokenizer_json=DEMO.read_bytes())
    reader = gguf.GGUFReader(path)
    kinds = {key: "/".join(t.name for t in field.types) for key, field in reader.fields.items()}
    assert kinds["qwen2.block_count"] == kinds["general.file_type"] == "UINT32"
    assert kinds["qwen2.attention.layer_norm_rms_epsilon"] == "FLOAT32"
    assert kinds["qwen2.rope.freq_base"] == "FLOAT32"
    assert kinds["tokenizer.ggml.tokens"] == kinds["tokenizer.ggml.merges"] == "ARRAY/STRING"
    assert kinds["tokenizer.ggml.token_type"] == "ARRAY/INT32"
    assert kinds["tokenizer.ggml.eos_token_id"] == "UINT32"
    assert kinds["tokenizer.ggml.add_bos_token"] == "BOOL"


def written_there(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("naïve")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_context_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", "<|end|>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_scores([0.0, 0.5, 1.0, 2.0])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages }}")
    writer.add_uint8("x.u8", 200)
    writer.add_int16("x.i16", -3)
    writer.add_uint64("x.u64", 2**63)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.flag", False)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "token_embd.weight": rng.standard_normal((4, 64)).astype(np.float16),
        "output_norm.weight": rng.standard_normal(64).astype(np.float32),
        "cube": rng.standard_normal((2, 3, 5)).astype(np.float32),
    }
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    for kind in QUANTIZED:
        type_ = BLOCK_TYPES[kind]
        # Below 0x7c, so that no half-precision scale is infinite or NaN.
        raw = rng.integers(0, 120, (3, 512 // type_.block_size * type_.block_bytes), np.uint8)
        writer.add_tensor(kind, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        tensors[kind] = raw
    bf16 = gguf.quants.quantize(
        rng.standard_normal((3, 8)).astype(np.float32), gguf.GGMLQuantizationType.BF16
    )
    writer.add_tensor("bf16", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    tensors["bf16"] = bf16
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_file_of_theirs_is_read_here_with_equal_content(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = written_there(path)
    file = open_gguf(path)
    reader = gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(file.metadata) == theirs
    assert theirs["x.u64"] == 2**63
    assert list(file.tensors) == list(tensors)
    for name, expected in tensors.items():
        found = file.get(name)
        if isinstance(found, QuantTensor):
            assert found.shape == (3, 512)
            assert np.array_equal(found.blocks.numpy(), expected)
            values = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType[name])
            assert np.array_equal(found.dequantize().numpy(), values)
        elif name == "bf16":
            assert found.dtype == torch.bfloat16
            assert found.view(torch.uint8).numpy().tobytes() == expected.tobytes()
        else:
            assert np.array_equal(found.numpy(), expected)
    assert file.config_dict()["eos_token_id"] == 3
    assert file.tokenizer_json() is not None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_quantized_there_are_worth_the_same_here(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(values, type_)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(path).get("t")
    assert isinstance(found, QuantTensor)
    assert np.array_equal(found.dequantize().numpy(), gguf.quants.dequantize(raw, type_))


def test_a_model_split_there_is_read_here(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2", split_max_tensors=2)
    expected = {f"t{n}": np.full((2, n + 1), n, np.float32) for n in range(5)}
    for name, array in expected.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    for path in paths:
        file = open_gguf(path)
        assert {n: file.get(n).tolist() for n in file.tensors} == {  # type: ignore[union-attr]
            n: a.tolist() for n, a in expected.items()
        }
        assert file.metadata["general.architecture"] == "qwen2"
