"""A decoder whose layers run in kernels has the hidden states and the gradients of the decoder as written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels import layer_functions, layer_parts
from engine.kernels.registry import REGISTRY
from engine.model_families import FAMILIES
from engine.models import fused
from engine.models.activation_checkpointing import configure_layers
from engine.models.decoder import rotate
from engine.models.frozen import JoinedLinear, freeze, join
from engine.models.fused import kernels_of, use_kernels
from engine.models.load import load_packed_decoder
from engine.teachers import frozen as teachers_frozen
from engine.teachers.frozen import FrozenDecoder
from tests.support.families import CHANGES
from tests.support.packed_models import lively, make_config, random_tokens, write

LENGTH = 12


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run here, in the interpreter, and gradients of norms in few programs that loop over their rows."""
    monkeypatch.setattr(fused, "has_kernels", lambda _device: True)
    monkeypatch.setattr(teachers_frozen, "has_kernels", lambda _device: True)
    for module in (layer_functions, layer_parts):
        monkeypatch.setattr(module, "PARTS", 4)
    monkeypatch.setattr(layer_parts, "VALUES_PER_PROGRAM", 1024)


def batch(rows: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens_BT = random_tokens(rows, length)
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[:, length // 3 :] = 1
    return tokens_BT, documents_BT


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "documents"),
    [
        # Without documents attention has another mask, in whichever family.
        pytest.param(
            family, documents, marks=[pytest.mark.soak] * (family != "qwen2" and not documents)
        )
        for family in FAMILIES
        for documents in (True, False)
    ],
)
def test_kernels_compute_what_the_layers_of_every_family_compute(
    family: str, documents: bool
) -> None:
    config = make_config(family, **CHANGES[family])
    plain, found = (freeze(lively(config)) for _ in range(2))
    use_kernels(join(found), frozen=True)
    tokens_BT, documents_BT = batch(2)
    given = documents_BT if documents else None
    before = REGISTRY.requested()
    with torch.inference_mode():
        found_BTD, wanted_BTD = found.hidden(tokens_BT, given), plain.hidden(tokens_BT, given)
    torch.testing.assert_close(found_BTD, wanted_BTD, rtol=1e-4, atol=1e-4)
    assert REGISTRY.requested() - before <= set(kernels_of(found, torch.float32, frozen=True))
    assert any(each.function is layer_parts._gate for each in REGISTRY.requested())


FEW = ("qwen3", "phi3", "gemma3_text")
"""Norms of heads; a part of each head that is rotated, and a window; norms after sums, and two kinds of layers."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[pytest.mark.soak] * (one not in FEW)) for one in FAMILIES],
)
def test_kernels_of_a_student_have_the_gradients_of_its_layers(family: str) -> None:
    config = make_config(family, **CHANGES[family])
    plain, found = (lively(config) for _ in range(2))
    use_kernels(found, frozen=False)
    upstream_BTD = torch.randn(
        2, LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    before = REGISTRY.requested()
    for decoder in (plain, found):
        torch.autograd.backward(decoder.hidden(*batch(2)), upstream_BTD)
    for (name, wanted), (_, gradient) in zip(
        plain.named_parameters(), found.named_parameters(), strict=True
    ):
        if wanted.grad is None:
            assert gradient.grad is None, name
            continue
        torch.testing.assert_close(gradient.grad, wanted.grad, rtol=2e-4, atol=2e-4, msg=name)
    assert REGISTRY.requested() - before <= set(kernels_of(found, torch.float32, frozen=False))


@pytest.mark.usefixtures("kernels")
def test_frozen_norms_and_recomputed_layers_have_the_same_gradients() -> None:
    """As with adapters: no gradient for the weights of norms, and layers that run twice."""
    plain, found = (lively(make_config()) for _ in range(2))
    use_kernels(found, frozen=False)
    for decoder in (plain, found):
        for name, weight in decoder.named_parameters():
            weight.requires_grad = "norm" not in name and "embed" not in name
        configure_layers(decoder, packed=False, checkpointing=decoder is found)
        torch.autograd.backward(decoder.hidden(*batch(2)).square().mean())
    for (name, wanted), (_, gradient) in zip(
        plain.named_parameters(), found.named_parameters(), strict=True
    ):
        assert (gradient.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(gradient.grad, wanted.grad, rtol=2e-4, atol=2e-6)


@pytest.mark.usefixtures("kernels")
def test_a_frozen_decoder_in_blocks_runs_its_layers_in_kernels(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q4_K")
    plain = freeze(load_packed_decoder(path))
    teacher = FrozenDecoder(load_packed_decoder(path))
    with torch.inference_mode():
        wanted_BTD = plain.hidden(*batch(2))
    torch.testing.assert_close(teacher.hidden(*batch(2)), wanted_BTD, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", [5, 10])
def test_heads_are_rotated_in_place_and_what_lies_beside_them_is_not_touched(
    positions: int,
) -> None:
    """Queries and keys lie side by side in one tensor; only the first 2 R numbers of a head are rotated."""
    generator = torch.Generator().manual_seed(positions)
    joined_BTN = torch.randn(2, 5, 7 * 16, generator=generator)
    x_BTHE = torch.unflatten(joined_BTN[..., 16:64], -1, (3, 16))
    angle_XT1R = torch.randn(positions // 5, 5, 1, 6, generator=generator)
    cos, sin = angle_XT1R.cos(), angle_XT1R.sin()
    before_BTN = joined_BTN.clone()
    wanted_BTHE = rotate(x_BTHE, cos, sin)
    x_MHE = x_BTHE.flatten(0, 1)
    layer_parts.rotate_into(x_MHE, cos.view(-1, 6), sin.view(-1, 6), x_MHE)
    torch.testing.assert_close(x_BTHE, wanted_BTHE)
    assert torch.equal(joined_BTN[..., :16], before_BTN[..., :16])
    assert torch.equal(joined_BTN[..., 64:], before_BTN[..., 64:])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_joining_dense_layers_moves_no_value_and_no_name(family: str) -> None:
    config = make_config(family)
    before, joined = freeze(lively(config)), join(freeze(lively(config)))
    assert {n for n, _ in joined.named_buffers()} == {n for n, _ in before.named_buffers()}
    for name, buffer in before.named_buffers():
        assert torch.equal(joined.get_buffer(name), buffer), name
    with torch.no_grad():
        wanted_BTD = before.hidden(random_tokens(2, 20))
        assert torch.allclose(joined.hidden(random_tokens(2, 20)), wanted_BTD, atol=1e-5)
    first = joined.layers[0].mlp.gate
    assert isinstance(first, JoinedLinear)
    up = joined.layers[0].mlp.up.weight
    assert up.untyped_storage().data_ptr() == first.weight_NK.untyped_storage().data_ptr()
