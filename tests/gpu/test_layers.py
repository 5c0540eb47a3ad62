"""On a GPU, layers run in warmed kernels and differ from the layers as written by rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.registry import REGISTRY
from engine.models import fp8
from engine.models.activation_checkpointing import configure_layers
from engine.models.attention import record_documents
from engine.models.decoder import Decoder
from engine.models.frozen import freeze
from engine.models.fused import use_kernels
from engine.models.head import OwnMatmul, logits_of
from engine.models.load import load_packed_decoder
from engine.models.packed import head_of
from engine.teachers.frozen import FrozenDecoder
from engine.train.kernel_warm_up import Compiles
from tests.support.packed_models import lively, make_config, random_tokens, write

pytestmark = pytest.mark.gpu


def on_gpu(kind: str, folder: Path) -> Decoder:
    config = make_config(num_hidden_layers=3)
    if kind == "blocks":
        path = write(folder / "m.gguf", lively(config), "Q4_K")
        return load_packed_decoder(path, torch.bfloat16, "cuda")
    decoder = freeze(lively(config).to("cuda", torch.bfloat16))
    if kind == "fp8":
        for layer in decoder.layers:
            fp8.round_layer(layer)
    return decoder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["dense", "blocks", "fp8"])
def test_on_a_gpu_every_kernel_of_a_teacher_is_warmed_and_rounds_as_its_layers_do(
    kind: str, packed: bool, tmp_path: Path
) -> None:
    decoder = on_gpu(kind, tmp_path)
    decoder.packed = packed
    tokens_BT = random_tokens(8, 128).cuda()
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[:, 40:] = 1
    record_documents(documents_BT, documents_BT.cpu().numpy())
    with torch.inference_mode():
        wanted_BTD = decoder.hidden(tokens_BT, documents_BT).float()
    teacher = FrozenDecoder(decoder, "fp8" if kind == "fp8" else "bf16")
    if kind == "fp8":
        fp8.round_norms(decoder)
    Compiles().warm_up(decoder, torch.device("cuda"), lambda _event: None)
    warmed = REGISTRY.requested()
    found_BTD = teacher.hidden(tokens_BT, documents_BT).float()
    with REGISTRY.noting() as launched:
        teacher.hidden(tokens_BT, documents_BT)
    assert launched and set(launched) <= warmed and REGISTRY.requested() == warmed
    # Each of 6 branches is rounded to 8 bits, and in fp8 a value between two codes goes either way.
    limit = 0.1 if kind == "fp8" else 2**-7
    assert (found_BTD - wanted_BTD).norm() <= limit * wanted_BTD.norm()


def test_logits_of_a_head_in_fp8_are_those_of_its_values_and_of_what_it_reads() -> None:
    decoder = freeze(lively(make_config(vocab_size=1024)).to("cuda", torch.bfloat16))
    fp8.round_head(decoder)
    head, weight_VD = head_of(decoder), decoder.head_weight
    assert weight_VD is not None
    hidden_ND = decoder.norm(torch.randn(300, head.width, device="cuda", dtype=torch.bfloat16))
    for columns in (1024, 500):
        slices = head.slices(columns, torch.bfloat16)
        assert isinstance(slices, OwnMatmul)
        wanted_NV = slices.operand(hidden_ND).double() @ weight_VD[:columns].double().t()
        found_NV = logits_of(hidden_ND, head, columns)
        assert torch.allclose(found_NV.double(), wanted_NV, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_gradients_of_a_student_are_no_farther_from_fp32_than_those_of_its_layers_as_written(
    family: str, packed: bool, checkpointing: bool
) -> None:
    config = make_config(family, num_hidden_layers=3)
    tokens_BT = random_tokens(8, 128).cuda()
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[:, 40:] = 1
    record_documents(documents_BT, documents_BT.cpu().numpy())
    upstream_BTD = torch.randn(8, 128, config.hidden_size, device="cuda")
    found: list[list[torch.Tensor]] = []
    for arm in ("fp32", "torch", "kernels"):
        decoder = lively(config).cuda()
        configure_layers(decoder, packed=packed, checkpointing=checkpointing)
        if arm == "kernels":
            use_kernels(decoder, frozen=False)
            Compiles().warm_up_student(decoder, torch.bfloat16, lambda _event: None)
        warmed = REGISTRY.requested()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=arm != "fp32"):
            hidden_BTD = decoder.hidden(tokens_BT, documents_BT)
        torch.autograd.backward(hidden_BTD, upstream_BTD.to(hidden_BTD.dtype))
        assert REGISTRY.requested() == warmed, "every kernel was compiled before"
        found.append(
            [hidden_BTD.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)]
        )
    exact, torchs, kernels = found
    assert len(exact) == len(torchs) == len(kernels)
    far = [
        sum(float((a.float() - b).square().sum()) for a, b in zip(arm, exact, strict=True)) ** 0.5
        for arm in (torchs, kernels)
    ]
    assert 0 < far[1] <= 1.1 * far[0]


def test_a_pass_may_have_more_tokens_than_an_axis_of_a_grid_has_programs() -> None:
    from engine.kernels.layer_parts import gate, gate_backward

    gate_BD, up_BD, dout_BD = torch.randn(3, 65_537, 8, device="cuda").bfloat16()
    out_BD = torch.empty_like(up_BD)
    gate(gate_BD, up_BD, "silu", out_BD)
    wanted_BD = torch.nn.functional.silu(gate_BD) * up_BD
    torch.testing.assert_close(out_BD, wanted_BD, rtol=2**-7, atol=1e-6)
    dgate_BD, dup_BD = gate_backward(gate_BD, up_BD, dout_BD, "silu")
    torch.testing.assert_close(
        dup_BD, dout_BD * torch.nn.functional.silu(gate_BD), rtol=2**-7, atol=1e-6
    )
    assert bool(dgate_BD.isfinite().all()) and bool(dgate_BD[-1].any())
