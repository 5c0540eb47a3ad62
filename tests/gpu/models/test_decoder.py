"""The decoder on a GPU: the kernels that CUDA picks give what the CPU gives."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import WeightsError
from engine.export.convert import convert
from engine.model_families import FAMILIES
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder, save_decoder
from tests.support.families import CHANGES

# Shapes: B rows, T tokens, D model width

PADDING = -1
pytestmark = pytest.mark.gpu


def make_config(heads: int = 8, shared: int = 2, family: str = "qwen2") -> ModelConfig:
    values: dict[str, Any] = dict(
        family=family,
        vocab_size=97,
        hidden_size=64 * heads,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
    )
    return ModelConfig(**values | (CHANGES[family] if heads == 8 else {}))


def run(decoder: Decoder, documents: list[list[int]] | None) -> dict[str, Tensor]:
    """Hidden states, and the gradient of every weight under a fixed random pull on them."""
    device, dtype = decoder.embed.weight.device, decoder.embed.weight.dtype
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(97, (2, 101), generator=generator).to(device)
    documents_BT = None if documents is None else torch.tensor(documents, device=device)
    hidden_BTD = decoder.hidden(tokens_BT, documents_BT)
    pull_BTD = torch.randn(hidden_BTD.shape, generator=generator).to(device, dtype)
    torch.autograd.backward(hidden_BTD, pull_BTD)
    found = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    return {n: t.detach().cpu().float() for n, t in {"hidden": hidden_BTD, **found}.items()}


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize(
    ("heads", "shared", "family", "dtype"),
    [
        (heads, shared, family, dtype)
        for heads, shared, family in (
            (8, 8, "qwen2"),
            (14, 2, "qwen2"),
            *((8, 2, family) for family in FAMILIES),
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        # Gradients through norms behind fresh layers leave the range of fp16.
        if dtype != torch.float16 or not FAMILIES[family].has_post_norms
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_cuda_equals_the_cpu(
    dtype: torch.dtype, heads: int, shared: int, family: str, packed: bool
) -> None:
    """Each attention kernel that CUDA picks, forward and backward, against the CPU in fp32.

    In half precision, CUDA may be as far from it as twice what the CPU's own rounding costs.
    """
    documents = [[0] * 50 + [1] * 40 + [PADDING] * 11, [PADDING] * 3 + [4] * 98] if packed else None
    decoder = new_decoder(make_config(heads, shared, family), 0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith((".q.weight", ".k.weight", ".q_norm.weight", ".k_norm.weight")):
                parameter.mul_(3)  # fresh attention is flat, and would show little of its kernel
    rounded = run(copy.deepcopy(decoder).to(dtype), documents)
    found = run(copy.deepcopy(decoder).to("cuda", dtype), documents)
    expected = run(decoder, documents)
    for name, tensor in expected.items():
        # The bias of a key moves all scores of a query alike: its gradient is rounding alone.
        if not name.endswith(".k.bias"):
            limit = max(1e-4, 2 * gap(rounded[name], tensor))
            assert gap(found[name], tensor) < limit, f"{name} {gap(found[name], tensor):.2e}"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_never_waits_for_the_gpu(family: str) -> None:
    decoder = new_decoder(make_config(family=family), 0, torch.bfloat16, "cuda")
    tokens_BT = torch.zeros(2, 33, dtype=torch.int64, device="cuda")
    decoder.hidden(tokens_BT, tokens_BT)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.hidden(tokens_BT)
        torch.autograd.backward(decoder.hidden(tokens_BT, tokens_BT).sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_grouped_heads_need_no_score_matrix() -> None:
    """Nothing falls to the unfused product, whose (B, H, T, T) scores alone would be 1 GiB here."""
    for dtype in (torch.float32, torch.bfloat16):
        decoder = new_decoder(make_config(), 0, dtype, "cuda").requires_grad_(False)
        tokens_BT = torch.zeros(8, 2048, dtype=torch.int64, device="cuda")
        for documents_BT in (None, tokens_BT):
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
            decoder.hidden(tokens_BT, documents_BT)
            used_bytes = torch.cuda.max_memory_allocated() - before_bytes
            # The mask and what makes it: 8 x 2048 x 2048 as bool, int64 sums and `dtype`.
            assert used_bytes < 700 * 2**20, f"{dtype} {used_bytes / 2**20:.0f} MiB"


def test_a_model_loads_onto_the_gpu_and_saves_from_it(tmp_path: Path) -> None:
    decoder = new_decoder(make_config(), 0, device="cuda")
    save_decoder(decoder, tmp_path / "model", torch.bfloat16)
    loaded = load_decoder(tmp_path / "model", torch.bfloat16, "cuda")
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.bfloat16(), loaded.get_parameter(name)), name
    with torch.no_grad():
        decoder.norm.weight[0] = torch.nan
    save_decoder(decoder, tmp_path / "broken", torch.bfloat16)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: 1 of 512 values"):
        load_decoder(tmp_path / "broken", torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_blocks_become_the_same_floats_on_the_gpu(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    # A scaling that so few pairs cannot tell is not read back.
    shape = replace(make_config(family=family), rope_scaling=None)
    save_decoder(new_decoder(shape, 0), tmp_path / "model", torch.float32)
    for quant in ("q4_k_m", "q6_k", "q8_0"):
        path = convert(tmp_path / "model", tmp_path / f"{quant}.gguf", quant).target
        on_gpu, on_cpu = load_decoder(path, dtype, "cuda"), load_decoder(path, dtype)
        for name, parameter in on_cpu.named_parameters():
            assert torch.equal(on_gpu.get_parameter(name).cpu(), parameter), (quant, name)


def test_a_conversion_on_the_gpu_writes_a_model_as_near_as_one_on_the_cpu(tmp_path: Path) -> None:
    save_decoder(new_decoder(make_config(), 0), tmp_path / "model", torch.float32)
    exact = load_decoder(tmp_path / "model")
    for quant in ("q4_k_m", "q6_k", "q8_0"):
        found = {}
        for device in ("cpu", "cuda"):
            target = tmp_path / f"{quant}-{device}.gguf"
            convert(tmp_path / "model", target, quant, device=device)
            found[device] = dict(load_decoder(target).named_parameters())
        for name, parameter in exact.named_parameters():
            # Sums in another order move a few blocks to another scale, no better and no worse.
            if not parameter.any():
                continue
            near = gap(found["cuda"][name], parameter)
            assert near <= 1.02 * gap(found["cpu"][name], parameter) + 1e-7, (quant, name)
