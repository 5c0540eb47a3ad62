"""Model folders: exchanged with transformers both ways, whole or absent, refused with a reason; and
weight files of other conventions, which give the same decoder.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.cli.main import main
from engine.errors import DiskFull, InternalError, WeightsError
from engine.formats.open import open_weights
from engine.formats.safetensors import tensors_sha256
from engine.formats.weights import Convention, TensorInfo
from engine.model_families import FAMILIES, ROPE_DIVISORS
from engine.models import load as subject
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder, save_decoder
from engine.models.names import names_for, permute_rows, rotated_heads
from engine.models.read_config import config_of
from engine.models.rope import RopeScaling, divisors
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.quantize import quantize
from engine.quant.tensor import QuantTensor
from tests.support.families import CHANGES

TOKENS_BT = torch.randint(97, (2, 37), generator=torch.Generator().manual_seed(0))
TOLERANCE = 1e-4


def make_config(tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=tied,
        eos_token_ids=(3, 4),
    )


def make_decoder(tied: bool = False) -> Decoder:
    decoder = new_decoder(make_config(tied), seed=1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator()))
    return decoder.eval()


def make_reference(tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    theirs: Any = Qwen2ForCausalLM(Qwen2Config.from_dict(make_config(tied).to_hf_dict()))
    theirs.eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator()))
    return theirs


@torch.no_grad()
def assert_same_logits(decoder: Decoder, theirs: Any) -> None:
    expected_BTV: Tensor = theirs(TOKENS_BT).logits
    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(decoder(TOKENS_BT), expected_BTV, rtol=0, atol=TOLERANCE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_decoder(make_decoder(), tmp_path / "model", torch.float32)
    return tmp_path / "model"


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replaces tensors of a saved model, named by the end of their names; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, tensor in changes.items():
        name = next((n for n in tensors if n.replace(".", "_").endswith(key)), key)
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    path.unlink()
    save_file(tensors, path)


def refusal(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(WeightsError) as caught:
        load_decoder(folder, dtype)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_decoder_is_a_transformers_model(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = make_decoder(tied)
    save_decoder(decoder, tmp_path / "model", torch.float32)
    load: Any = AutoModelForCausalLM.from_pretrained
    theirs, report = load(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    assert theirs.config.rope_parameters["rope_theta"] == 5e5
    assert_same_logits(decoder, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_loads(tied: bool, tmp_path: Path) -> None:
    theirs = make_reference(tied)
    theirs.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    assert decoder.config == make_config(tied)
    assert_same_logits(decoder, theirs)


def test_a_sharded_transformers_model_loads(tmp_path: Path) -> None:
    theirs = make_reference(tied=False)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(load_decoder(tmp_path), theirs)
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    assert "1 missing: model-00001-of-" in refusal(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load_keep_every_bit(tied: bool, tmp_path: Path) -> None:
    decoder = make_decoder(tied)
    save_decoder(decoder, tmp_path / "full", torch.float32)
    loaded = load_decoder(tmp_path / "full")
    assert loaded.config == decoder.config
    assert tensors_sha256(loaded.state_dict()) == tensors_sha256(decoder.state_dict())
    save_decoder(decoder, tmp_path / "half", torch.bfloat16)
    half = load_decoder(tmp_path / "half", torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(half.get_parameter(name), parameter.bfloat16()), name
    with open_weights(tmp_path / "half") as weights:
        assert {info.dtype for info in weights.tensors.values()} == {"BF16"}


def test_a_loaded_decoder_trains_and_does_not_need_its_files(saved: Path) -> None:
    decoder = load_decoder(saved)
    assert str(saved) not in Path("/proc/self/maps").read_text()
    for path in saved.iterdir():
        path.unlink()
    decoder(TOKENS_BT).logsumexp(-1).mean().backward()
    assert all(p.is_leaf and p.requires_grad and p.grad is not None for p in decoder.parameters())


def test_a_head_that_comes_with_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    decoder = make_decoder(tied=True)
    save_decoder(decoder, folder, torch.float32)
    rewrite(folder, **{"lm_head.weight": decoder.embed.weight.detach().clone()})
    assert load_decoder(folder).head is None
    rewrite(folder, **{"lm_head.weight": decoder.embed.weight.detach() + 1e-6})
    text = refusal(folder)
    assert "lm_head.weight equal to model.embed_tokens.weight" in text
    assert "hint: set tie_word_embeddings to false" in text


def test_nan_and_infinity_are_refused_by_name_with_their_share(saved: Path) -> None:
    bad = torch.zeros(64)
    bad[:16] = torch.nan
    bad[20] = -torch.inf
    rewrite(
        saved, model_norm_weight=bad, layers_1_self_attn_q_proj_bias=torch.full((64,), torch.inf)
    )
    text = refusal(saved)
    assert (
        "model.norm.weight: 16 of 64 values (25.00%) are NaN, 1 of 64 values (1.56%) are infinite"
        in text
    )
    assert "q_proj.bias: 64 of 64 values (100.00%) are infinite" in text


def test_a_value_too_large_for_the_dtype_is_refused(saved: Path) -> None:
    rewrite(saved, model_norm_weight=torch.full((64,), 1e6))
    load_decoder(saved, torch.bfloat16)
    assert "model.norm.weight: a largest value of 1e+06, too large for torch.float16" in refusal(
        saved, torch.float16
    )


def test_weights_that_do_not_fit_are_refused_before_any_is_read(saved: Path) -> None:
    rewrite(saved, model_norm_weight=None, extra=torch.zeros(2), lm_head_weight=torch.zeros(9, 64))
    text = refusal(saved)
    assert "1 missing, 1 unexpected, 1 misshapen, 0 of another dtype" in text


def test_an_integer_checkpoint_is_refused(saved: Path) -> None:
    rewrite(saved, model_norm_weight=torch.ones(64, dtype=torch.int32))
    assert "dtype of model.norm.weight: expected F32, BF16, F16, found I32" in refusal(saved)


def test_a_cut_file_is_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "100 bytes are missing" in refusal(saved)


def test_a_folder_without_config_is_refused(saved: Path) -> None:
    (saved / "config.json").unlink()
    assert "expected a file, found nothing" in refusal(saved)


def test_extra_files_come_along(tmp_path: Path) -> None:
    extra = tmp_path / "tokenizer.json"
    extra.write_text("{}")
    save_decoder(make_decoder(), tmp_path / "a" / "model", torch.float32, [extra])
    folder = tmp_path / "a" / "model"
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_saving_never_touches_what_is_there(tmp_path: Path) -> None:
    decoder = make_decoder()
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("keep me")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("model", "file", "link"):
        with pytest.raises(WeightsError, match="expected a new path"):
            save_decoder(decoder, tmp_path / name, torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "model"]
    assert list((tmp_path / "model").iterdir()) == []


def test_a_save_that_cannot_work_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file"):
        save_decoder(make_decoder(), tmp_path / "m", torch.float32, [tmp_path / "absent.json"])
    with pytest.raises(InternalError, match="not dense weights"):
        save_decoder(
            Decoder(make_config(False), lambda *_, **__: torch.nn.Identity()),
            tmp_path / "m",
            torch.float32,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        assert path.parent.name.endswith(".partial"), "the target is there before it is whole"
        raise DiskFull("no room")

    monkeypatch.setattr(subject, "_fsync", full)
    with pytest.raises(DiskFull):
        save_decoder(make_decoder(), tmp_path / "m", torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(WeightsError, match="expected a path that can be written, found Not a dir"):
        save_decoder(make_decoder(), tmp_path / "file" / "model", torch.float32)


SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def small_config(family: str, tied: bool = False) -> ModelConfig:
    return replace(make_config(tied), **{"family": family, "head_dim": 0, **CHANGES[family]})  # type: ignore[arg-type]


def family_config(family: str, tied: bool = False) -> ModelConfig:
    """Rows of 256 values wherever there are blocks, and three blended pairs of sixteen."""
    return replace(
        make_config(tied),
        family=family,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        head_dim=32,
        rope_theta=1e4,
        rope_scaling=SCALING if family == "llama" else None,
    )


def lively(config: ModelConfig) -> Decoder:
    decoder = new_decoder(config, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.06 * torch.randn(parameter.shape, generator=generator))
    return decoder.eval()


class MemoryFile:
    """A `WeightFile` in memory, with the tensors of a decoder under the names of a convention."""

    warnings: tuple[str, ...] = ()

    def __init__(
        self, decoder: Decoder, convention: Convention, blocks: str = "", permuted: bool = False
    ) -> None:
        self.path = Path("memory")
        self.format: Literal["gguf"] = "gguf"
        self.convention = convention
        self.metadata: dict[str, Any] = {"rope_type": 0 if permuted else 2}
        self.config = decoder.config.to_hf_dict()
        self.held: dict[str, Tensor | QuantTensor] = {}
        names = names_for(convention, decoder.config)
        for ours, tensor in decoder.state_dict().items():
            found: Tensor | QuantTensor = tensor
            if blocks and tensor.dim() == 2:
                found = quantize(tensor, BLOCK_TYPES[blocks])
            if permuted and (heads := rotated_heads(decoder.config, ours)):
                found = permute_rows(found, heads)
            self.held[names[ours]] = found

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: self.info(name) for name in self.held}

    def info(self, name: str) -> TensorInfo:
        tensor = self.held[name]
        return TensorInfo(
            name=name,
            dtype=tensor.type.name if isinstance(tensor, QuantTensor) else "F32",
            shape=tuple(tensor.shape),
            file=self.path,
            start=0,
            bytes=tensor.nbytes,
        )

    def get(self, name: str) -> Tensor | QuantTensor:
        return self.held[name]

    def config_dict(self) -> dict[str, Any]:
        return dict(self.config)

    def tokenizer_json(self) -> bytes | None:
        return None

    def close(self) -> None: ...

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_exchanged_with_transformers(
    family: str, tied: bool, tmp_path: Path
) -> None:
    import transformers

    decoder = lively(small_config(family, tied))
    save_decoder(decoder, tmp_path / "ours", torch.float32)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs, report = load(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert type(theirs) is getattr(transformers, FAMILIES[family].hf_class)
    expected_BTV: Tensor = theirs(TOKENS_BT).logits
    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(decoder(TOKENS_BT), expected_BTV, rtol=0, atol=TOLERANCE)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_decoder(tmp_path / "theirs")
    assert again.config == decoder.config
    assert tensors_sha256(again.state_dict()) == tensors_sha256(decoder.state_dict())


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("missing", "missing model.layers.1.mlp.down_proj.weight [64, 88]"),
        ("shape", "misshapen model.norm.weight: expected [64], found [63]"),
        ("rope", "rope_type: expected"),
        ("activation", "hidden_act: expected"),
    ],
)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_broken_model_of_every_family_is_refused_with_a_reason(
    family: str, broken: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_decoder(lively(small_config(family)), tmp_path / "model", torch.float32)
    held, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    tensors, raw = load_file(held), json.loads(config.read_text())
    if broken == "missing":
        del tensors["model.layers.1.mlp.down_proj.weight"]
    elif broken == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][1:]
    elif broken == "rope":
        rope = raw["rope_parameters"]
        rope.get("full_attention", rope)["rope_type"] = "unheard-of"
    else:
        raw["hidden_act"] = "relu"
    save_file(tensors, held, {"format": "pt"})
    config.write_text(json.dumps(raw))
    target = tmp_path / "new"
    assert main(["convert", str(tmp_path / "model"), str(target), "--quant", "f32"]) == 65
    (line,) = [line for line in capsys.readouterr().err.splitlines() if words in line]
    assert "expected" in line or "missing" in line
    assert not target.exists()


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "convention", "permuted", "blocks"),
    [
        # Every row with the blocks of most parts, and every kind of blocks with rows that are permuted.
        pytest.param(
            *row, blocks, marks=() if blocks == "Q4_K" or all(row[1:]) else pytest.mark.soak
        )
        for row in [
            ("qwen2", "gguf", False),
            ("qwen3", "gguf", False),
            ("llama", "gguf", True),
            ("llama", "apr", True),
            ("llama", "apr", False),
            ("qwen3", "apr", False),
        ]
        for blocks in ["", "Q8_0", "Q4_K", "Q6_K"]
    ],
)
def test_logits_of_blocks_equal_those_of_the_dequantised_weights(
    family: str, convention: Convention, permuted: bool, blocks: str, tmp_path: Path
) -> None:
    decoder = lively(family_config(family))
    weights = MemoryFile(decoder, convention, blocks, permuted)
    for parameter in decoder.parameters() if blocks else ():
        if parameter.dim() == 2:
            parameter.copy_(quantize(parameter, BLOCK_TYPES[blocks]).dequantize())
    save_decoder(decoder, tmp_path / "plain", torch.float32)
    plain, loaded = load_decoder(tmp_path / "plain"), load_decoder(weights)
    for name, parameter in plain.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert torch.equal(loaded(TOKENS_BT), plain(TOKENS_BT))


@torch.no_grad()
def test_rows_in_the_order_of_the_other_convention_are_another_model() -> None:
    decoder = lively(family_config("llama"))
    weights = MemoryFile(decoder, "apr", permuted=True)
    weights.metadata["rope_type"] = 2
    gap_BTV = (load_decoder(weights)(TOKENS_BT) - decoder(TOKENS_BT)).abs()
    assert gap_BTV.max() > 10 * TOLERANCE


def test_blocks_become_the_wanted_dtype_rounded_once() -> None:
    decoder = lively(family_config("qwen3"))
    weights = MemoryFile(decoder, "gguf", "Q4_K")
    loaded = load_decoder(weights, torch.bfloat16)
    blocks = weights.held["blk.1.ffn_up.weight"]
    assert isinstance(blocks, QuantTensor)
    assert torch.equal(
        loaded.get_parameter("layers.1.mlp.up.weight"), blocks.dequantize().bfloat16()
    )
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}


def test_nan_in_a_block_is_refused_by_name_with_its_share() -> None:
    weights = MemoryFile(lively(family_config("qwen2")), "gguf", "Q8_0")
    bad = weights.held["blk.0.attn_q.weight"]
    assert isinstance(bad, QuantTensor)
    bad.blocks[3, 0:2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
    with pytest.raises(WeightsError) as caught:
        load_decoder(weights)
    assert "blk.0.attn_q.weight: 32 of 65,536 values (0.05%) are NaN" in str(caught.value)


def test_a_tied_file_may_bring_its_head_in_the_same_blocks() -> None:
    weights = MemoryFile(lively(family_config("qwen3", tied=True)), "gguf", "Q6_K")
    weights.held["output.weight"] = weights.held["token_embd.weight"]
    assert load_decoder(weights).head is None
    weights.held["output.weight"] = quantize(torch.ones(97, 256), BLOCK_TYPES["Q6_K"])
    with pytest.raises(WeightsError, match=r"output\.weight equal to token_embd\.weight"):
        load_decoder(weights)


def with_divisors(path: Path, stored: list[float]) -> MemoryFile:
    """A `llama` GGUF: the configuration does not say how it is stretched, the tensor does."""
    config = family_config("llama")
    weights = MemoryFile(lively(config), "gguf", permuted=True)
    weights.config = replace(config, rope_scaling=None).to_hf_dict()
    path.write_bytes(struct.pack(f"<{len(stored)}f", *stored))
    weights.path = path
    weights.held[ROPE_DIVISORS] = torch.tensor(stored)
    return weights


def test_rope_divisors_in_the_file_become_the_scaling(tmp_path: Path) -> None:
    stored = divisors(SCALING, 1e4, 32)
    weights = with_divisors(tmp_path / "rope", stored)
    assert config_of(weights).rope_scaling == SCALING
    assert load_decoder(weights).config.rope_scaling == SCALING
    weights = with_divisors(tmp_path / "rope", [1.0] * 16)
    assert config_of(weights).rope_scaling is None


def test_rope_divisors_that_no_scaling_has_are_refused(tmp_path: Path) -> None:
    weights = with_divisors(tmp_path / "rope", [1.0] * 8 + [3.0] + [8.0] * 7)
    with pytest.raises(WeightsError, match="the divisors of a llama3 rope scaling, found"):
        config_of(weights)
    weights = with_divisors(tmp_path / "rope", divisors(SCALING, 1e4, 32))
    weights.config = replace(
        family_config("llama"), rope_scaling=replace(SCALING, factor=4.0)
    ).to_hf_dict()
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight: .* the divisors of RopeScaling"):
        config_of(weights)
    weights.held[ROPE_DIVISORS] = torch.ones(2, 8)
    with pytest.raises(WeightsError, match=r"expected a row of F32, found F32 \[2, 8\]"):
        config_of(weights)
