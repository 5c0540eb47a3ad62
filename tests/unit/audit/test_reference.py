"""The references of the audit against what others compute: torch's AdamW, autograd over whole logits, the schedule."""

from __future__ import annotations

import math

import pytest
import torch

from engine.audit import bounds, reference
from engine.audit.judge import ROUNDED_PER_SHOWN
from engine.audit.reference import AdamW, Objective, PlainDecoder, Shape, Targets
from engine.checks.weights import shape_of, weights_of
from engine.loss.chunks import SparseTargets
from engine.loss.kd_loss import distillation_loss
from engine.model_families import FAMILIES
from engine.models.rope import LongRope
from tests.support.families import CHANGES
from tests.support.model_files import tensor_names
from tests.support.packed_models import lively, make_config, random_tokens

N, D, E, V = 7, 6, 10, 30


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_update_is_torchs_adamw_over_several_steps() -> None:
    weight = torch.nn.Parameter(drawn(5, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    adam = AdamW(beta1=0.8, beta2=0.9, eps=1e-6)
    mine, mean, square = weight.detach().clone(), torch.zeros(5, 3), torch.zeros(5, 3)
    for count in range(1, 4):
        weight.grad = drawn(5, 3, seed=count)
        optimizer.step()
        mean, square = reference.moments(adam, weight.grad, mean, square)
        mine = mine + reference.step_of_adamw(
            adam, mine, mean, square, rate=0.01, decay=0.2, count=count
        )
        torch.testing.assert_close(mine, weight.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_the_loss_against_stored_targets_is_the_engines(kind: str) -> None:
    hidden_ND, head_VD = drawn(N, D).requires_grad_(), drawn(V, D, seed=1)
    labels_N = torch.tensor([3, -100, 5, 29, 0, 1, 2])
    log_p_NV = drawn(N, V, seed=2).log_softmax(1)
    ids_NK = log_p_NV.topk(4, dim=1).indices
    log_probs_NK = log_p_NV.gather(1, ids_NK) if kind == "top_k" else None
    terms = distillation_loss(
        hidden_ND,
        head_VD,
        None,
        None,
        labels_N,
        alpha=0.3,
        temperature=2.0,
        denominator=6.0,
        targets=SparseTargets(ids_NK=ids_NK, log_probs_NK=log_probs_NK),
    )
    terms.loss.backward()  # type: ignore[no-untyped-call]
    head_gradient_VD = torch.zeros(V, D, dtype=torch.float64)
    sums, gradient_ND = reference.loss(
        Objective(alpha=0.3, temperature=2.0, divergence="forward_kl", beta=0.5),
        hidden_ND.detach(),
        lambda first, count: head_VD[first : first + count],
        labels_N,
        Targets(ids_NK=ids_NK, log_probs_NK=log_probs_NK),
        vocabulary=V,
        denominator=6.0,
        head_gradient_VD=head_gradient_VD,
        chunk_numbers=1,
    )
    assert terms.kd is not None
    assert math.isclose(sums.ce / 6, float(terms.ce), rel_tol=1e-10)
    assert math.isclose(4 * sums.divergence / 6, float(terms.kd), rel_tol=1e-10)
    torch.testing.assert_close(gradient_ND, hidden_ND.grad, rtol=1e-8, atol=1e-12)


# The documents are of 5, 32 and 37 tokens.
LONG = LongRope(
    short_factor=tuple(1 + 0.05 * pair for pair in range(24)),
    long_factor=tuple(1 + 0.7 * pair for pair in range(24)),
    original_max_position_embeddings=33,
)


@pytest.mark.parametrize(
    ("family", "more"),
    [*((family, {}) for family in FAMILIES), ("phi3", {"head_dim": 64, "long_rope": LONG})],
    ids=[*FAMILIES, "phi3-long"],
)
def test_hidden_states_and_gradients_are_those_of_the_engines_decoder(
    family: str, more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "ATTENTION_WEIGHTS", 16 * 2 * 37)
    decoder = lively(make_config(family, **{**CHANGES[family], **more}))
    tokens_BT = random_tokens(2, 37)
    documents_BT = torch.tensor([[0] * 5 + [1] * 32, [2] * 37])
    hidden_BTD = decoder.hidden(tokens_BT, documents_BT)
    upstream_BTD = drawn(*hidden_BTD.shape).float()
    torch.autograd.backward(hidden_BTD, upstream_BTD)
    plain = PlainDecoder(shape_of(decoder.config), weights_of(decoder))
    one = plain.forward(tokens_BT, documents_BT, keep=True)
    torch.testing.assert_close(one.hidden_ND, hidden_BTD.flatten(0, 1), rtol=1e-4, atol=1e-4)
    found = dict(plain.backward([one], [upstream_BTD.flatten(0, 1)]))
    assert sorted([*found, "head.weight"]) == sorted(tensor_names(plain.shape))
    for name, gradient in found.items():
        wanted = decoder.get_parameter(name).grad
        assert wanted is not None
        # What a key's bias adds is the same for all keys of a query: its gradient is rounding.
        largest = wanted.abs().max() if not name.endswith("k.bias") else 1.0
        assert (gradient - wanted).abs().max() <= 1e-4 * largest, name


def test_the_memory_plan_counts_the_attention_weights_that_the_reference_takes() -> None:
    assert bounds.ATTENTION_WEIGHTS == reference.ATTENTION_WEIGHTS


def test_a_long_document_has_the_gradients_of_attention_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Shape(
        layers=2,
        intermediate_size=12,
        heads=4,
        kv_heads=2,
        head_dim=4,
        eps=1e-6,
        theta=100.0,
        bias=True,
        qk_norm=False,
        tied=True,
    )
    sizes = {"q": (16, 8), "k": (8, 8), "v": (8, 8), "o": (8, 16)}
    weights = {"embed.weight": drawn(V, 8), "norm.weight": drawn(8)}
    for index in range(2):
        at = f"layers.{index}"
        for name, size in sizes.items():
            weights[f"{at}.attention.{name}.weight"] = drawn(*size, seed=index)
            if name != "o":
                weights[f"{at}.attention.{name}.bias"] = drawn(size[0], seed=index)
        for name, size in {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}.items():
            weights[f"{at}.mlp.{name}.weight"] = drawn(*size, seed=index)
        weights |= {f"{at}.{name}_norm.weight": drawn(8, seed=3) for name in ("attention", "mlp")}

    def weight(name: str, rows_N: torch.Tensor | None = None) -> torch.Tensor:
        held = weights[name].float()
        return held if rows_N is None else held[rows_N]

    tokens_BT = torch.arange(22).view(2, 11) % V
    documents_BT = torch.tensor([[0] * 3 + [1] * 8, [2] * 11])
    upstream = drawn(22, 8, seed=9).float()

    def gradients() -> dict[str, torch.Tensor]:
        plain = PlainDecoder(shape, weight)
        one = plain.forward(tokens_BT, documents_BT, keep=True)
        return dict(plain.backward([one], [upstream]))

    at_once = gradients()
    monkeypatch.setattr(reference, "ATTENTION_WEIGHTS", 4 * 2 * 11)
    in_parts = gradients()
    assert set(at_once) == set(weights)
    for name, gradient in at_once.items():
        torch.testing.assert_close(in_parts[name], gradient, rtol=1e-4, atol=1e-5)


def test_rounding_of_scores_whose_terms_cancel_is_shown_as_large_as_attention_has_it() -> None:
    torch.manual_seed(0)
    q, k, v, flow = (torch.randn(1, 2, 64, 32) for _ in range(4))
    # A score of size 1 is the difference of terms of size 1e4, as with weights that one update made huge.
    q[..., :2] = 100.0
    k[..., 0] += 100.0
    k[..., 1] = -k[..., 0]
    seen_BTS = torch.ones(1, 64, 64, dtype=torch.bool).tril()

    def gradient(kind: torch.dtype, rounding: float | None) -> torch.Tensor:
        inputs = [x.clone().to(kind).detach().requires_grad_() for x in (q, k, v)]
        of_q, of_k, of_v = inputs
        if rounding is None:
            found = torch.nn.functional.scaled_dot_product_attention(
                of_q, of_k, of_v, is_causal=True
            )
            flat = found.transpose(1, 2).flatten(2)
        else:
            flat = reference._attend(of_q, of_k, of_v, seen_BTS, 32.0, rounding)
        given = flow.transpose(1, 2).flatten(2).to(kind)
        return torch.autograd.grad(flat, inputs[0], given)[0].double()

    exact = gradient(torch.float64, 0.0)
    error = float((gradient(torch.float32, None) - exact).norm())
    shown = float((gradient(torch.float64, reference.FP32_ROUNDING) - exact).norm())
    assert error > 3e-4 * float(exact.norm()), "the case has nothing to show"
    assert error <= ROUNDED_PER_SHOWN * shown
    assert shown <= 0.2 * float(exact.norm()), "a bound that accepts everything"
