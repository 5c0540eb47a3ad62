"""The decoder against transformers, for every row of the table of families, and the properties that packing and
training rely on.

Both sides run fp32 on the same weights. Differences come from the order of sums, so 1e-4 on logits
of order 1 is wide; the planted bugs show that the smallest real mistakes are far outside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import InternalError
from engine.generation.forward import NativeForward
from engine.generation.pages import PagedCache
from engine.model_families import FAMILIES
from engine.models import decoder as subject
from engine.models.config import ModelConfig, count_parameters
from engine.models.decoder import Decoder, dense_linear
from engine.models.load import new_decoder
from engine.models.names import hf_names, joined, parts
from engine.models.rope import LongRope, RopeScaling, divisors
from tests.support.families import CHANGES

# Shapes: B rows, T tokens, D model width, V vocabulary, R pairs of a head

TOLERANCE = 1e-4
PADDING = -1


def make_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        **changes,
    }
    return ModelConfig(**values)  # type: ignore[arg-type]


def of_family(family: str, **changes: object) -> dict[str, object]:
    return {"family": family, **CHANGES[family], **changes}


OF_FAMILIES = [of_family(family) for family in FAMILIES]
QWEN3, LLAMA31, MISTRAL, SMOLLM3, OLMO2, PHI3, GEMMA3 = map(
    of_family, ("qwen3", "llama", "mistral", "smollm3", "olmo2", "phi3", "gemma3_text")
)
# Eight pairs; of 128 positions, 20 were there at first.
LONG = LongRope(
    short_factor=tuple(1 + 0.05 * pair for pair in range(8)),
    long_factor=tuple(1 + 0.7 * pair for pair in range(8)),
    original_max_position_embeddings=20,
)
PHI3_LONG = of_family(
    "phi3", head_dim=16, partial_rotary_factor=1.0, sliding_window=None, long_rope=LONG
)
LLAMA: dict[str, object] = {"family": "llama", "rms_norm_eps": 1e-5}


def lively(config: ModelConfig, seed: int = 0) -> Decoder:
    """Random weights, biases and norms too, so large that every part shows in the logits."""
    decoder = new_decoder(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.12, generator=generator)
    return decoder.eval()


def reference(decoder: Decoder) -> Any:
    import transformers

    # Where a class assumes a padding token, its embedding would get no gradient.
    raw: Any = {**decoder.config.to_hf_dict(), "pad_token_id": None}
    config = transformers.AutoConfig.for_model(**raw)
    theirs: Any = getattr(transformers, raw["architectures"][0])(config)
    theirs.eval()
    missing, unexpected = theirs.load_state_dict(in_theirs(decoder.state_dict(), decoder), False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if decoder.config.tie_word_embeddings else [])
    return theirs


def in_theirs(tensors: Mapping[str, Tensor], decoder: Decoder) -> dict[str, Tensor]:
    """The same tensors as transformers' class has them."""
    names = hf_names(decoder.config)
    return dict(joined(names, ((ours, tensors[ours]) for ours in names)))


def random_tokens(config: ModelConfig, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    return torch.randint(config.vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def difference(
    decoder: Decoder, theirs: Any, tokens_BT: Tensor, mask_BT: Tensor | None = None
) -> float:
    """Largest difference of the logits over all real tokens."""
    expected_BTV = theirs(tokens_BT, attention_mask=mask_BT).logits
    if mask_BT is None:
        found_BTV = decoder(tokens_BT)
        mask_BT = torch.ones_like(tokens_BT)
    else:
        found_BTV = decoder(tokens_BT, torch.where(mask_BT == 1, 0, PADDING))
    assert found_BTV.isfinite().all(), "padding gave NaN"
    assert expected_BTV.std() > 0.3, "the logits are too flat to compare anything"
    gap_BTV = (found_BTV - expected_BTV).abs()[mask_BT == 1]
    print(f"max {gap_BTV.max():.2e} mean {gap_BTV.mean():.2e}")
    return float(gap_BTV.max())


@pytest.mark.parametrize("length", [16, 37, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 8},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_theta": 1e6},
        {"num_attention_heads": 14, "hidden_size": 56, "rms_norm_eps": 1e-2},
        {"num_attention_heads": 4, "head_dim": 32},
    ],
)
def test_logits_equal_transformers(changes: dict[str, object], length: int) -> None:
    decoder = lively(make_config(**changes))
    tokens_BT = random_tokens(decoder.config, 2, length)
    assert difference(decoder, reference(decoder), tokens_BT) <= TOLERANCE


@pytest.mark.parametrize("length", [96, 71, 1])
@pytest.mark.parametrize(
    "changes",
    [
        QWEN3,
        {**QWEN3, "tie_word_embeddings": True},
        {**QWEN3, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 10},
        {"family": "qwen3"},
        LLAMA,
        LLAMA31,
        of_family("gemma3_text"),
        of_family("gemma3_text", tie_word_embeddings=True, layers_without_window=()),
        of_family("gemma3_text", num_key_value_heads=4, layers_without_window=(0, 1, 2)),
        of_family("gemma3_text", num_attention_heads=2, num_key_value_heads=1, head_dim=10),
        of_family("gemma3_text", intermediate_size=7, rope_factor=1.0, query_pre_attn_scalar=24),
        of_family("mistral"),
        of_family("mistral", tie_word_embeddings=True, sliding_window=1),
        of_family("mistral", num_key_value_heads=5, sliding_window=None),
        of_family("olmo2"),
        of_family("olmo2", num_attention_heads=2, num_key_value_heads=1, head_dim=10),
        of_family("olmo2", tie_word_embeddings=True, num_key_value_heads=4),
        of_family("phi3"),
        of_family("phi3", tie_word_embeddings=True, sliding_window=None),
        of_family("phi3", num_attention_heads=5, num_key_value_heads=5, head_dim=14),
        of_family("phi3", partial_rotary_factor=1.0, num_key_value_heads=1, intermediate_size=7),
        PHI3_LONG,
        {**PHI3_LONG, "long_rope": dataclasses.replace(LONG, original_max_position_embeddings=71)},
        {**PHI3_LONG, "long_rope": dataclasses.replace(LONG, attention_factor=0.8)},
        of_family("smollm3"),
        of_family("smollm3", tie_word_embeddings=True, layers_without_rope=(0, 2)),
        of_family("smollm3", num_attention_heads=5, num_key_value_heads=5, head_dim=18),
        {**LLAMA31, "tie_word_embeddings": True},
        {**LLAMA31, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 0},
    ],
)
def test_logits_of_other_families_equal_transformers(
    changes: dict[str, object], length: int
) -> None:
    decoder = lively(make_config(**changes))
    tokens_BT = random_tokens(decoder.config, 2, length)
    assert difference(decoder, reference(decoder), tokens_BT) <= TOLERANCE


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("changes", OF_FAMILIES, ids=list(FAMILIES))
def test_logits_equal_transformers_with_padding(changes: dict[str, object], side: str) -> None:
    decoder = lively(make_config(**changes))
    tokens_BT = random_tokens(decoder.config, 3, 79 if "rope_scaling" in changes else 37)
    mask_BT = torch.ones_like(tokens_BT)
    if side in ("left", "both"):
        mask_BT[0, :11] = 0
    if side in ("right", "both"):
        mask_BT[1, 20:] = 0
    assert difference(decoder, reference(decoder), tokens_BT, mask_BT) <= TOLERANCE


def adjacent_pairs(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
    even, odd = x_BTHE[..., ::2], x_BTHE[..., 1::2]
    turned = (even * cos_XT1R - odd * sin_XT1R, odd * cos_XT1R + even * sin_XT1R)
    return torch.stack(turned, dim=-1).flatten(-2)


def no_bias(in_features: int, out_features: int, bias: bool) -> nn.Module:
    return dense_linear(in_features, out_features, bias=False)


@pytest.mark.parametrize("bug", ["adjacent pairs", "no bias", "one key bias", "eps", "sees ahead"])
def test_the_comparison_catches_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = lively(make_config())
    theirs = reference(decoder)
    tokens_BT = random_tokens(decoder.config, 2, 37)
    assert difference(decoder, theirs, tokens_BT) <= TOLERANCE
    if bug == "adjacent pairs":
        monkeypatch.setattr(subject, "rotate", adjacent_pairs)
    elif bug == "no bias":
        broken = Decoder(decoder.config, no_bias).eval()
        broken.load_state_dict(decoder.state_dict(), strict=False)
        decoder = broken
    elif bug == "one key bias":
        with torch.no_grad():
            decoder.get_parameter("layers.2.attention.v.bias")[5] = 0
    elif bug == "eps":
        for module in decoder.modules():
            if isinstance(module, subject.RMSNorm):
                module.eps = 1e-3
    else:
        attend = subject.attend
        open_mask = torch.zeros(2, 1, 37, 37)
        monkeypatch.setattr(
            subject, "attend", lambda q, k, v, mask, scale: attend(q, k, v, open_mask)
        )
    assert difference(decoder, theirs, tokens_BT) > 10 * TOLERANCE


def all_stretched(scaling: RopeScaling) -> RopeScaling:
    """Plain division by the factor, as `rope_type: linear` has it."""
    return dataclasses.replace(scaling, original_max_position_embeddings=1)


def norm_after_turning(
    self: Any, x_BTD: Tensor, attention_inputs: subject.AttentionInputs
) -> Tensor:
    heads = (-1, self.head_dim)
    q_BTHE, k_BTKE = (
        norm(
            subject.rotate(
                linear(x_BTD).unflatten(-1, heads),
                attention_inputs.cos_XT1R,
                attention_inputs.sin_XT1R,
            )
        )
        for norm, linear in ((self.q_norm, self.q), (self.k_norm, self.k))
    )
    v_BTKE = self.v(x_BTD).unflatten(-1, heads)
    y_BTD: Tensor = self.o(
        subject.attend(q_BTHE, k_BTKE, v_BTKE, attention_inputs.mask_B1TT).flatten(-2)
    )
    return y_BTD


OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "windows exchanged": {"layers_without_window": (0, 2)},
    "one RoPE base": {"rope_local_base_freq": 1e6},
    "RoPE bases exchanged": {"rope_local_base_freq": 1e6, "rope_theta": 1e4},
    "no linear scaling": {"rope_factor": 1.0},
    "short factors": {"long_rope": dataclasses.replace(LONG, long_factor=LONG.short_factor)},
    "angles of size 1": {"long_rope": dataclasses.replace(LONG, attention_factor=1.0)},
}


@pytest.mark.parametrize(
    ("changes", "bug"),
    [
        (QWEN3, "no qk norm"),
        (QWEN3, "no k norm"),
        (QWEN3, "norm after turning"),
        (QWEN3, "norm over all heads"),
        (QWEN3, "bias added"),
        (GEMMA3, "no window"),
        (GEMMA3, "windows exchanged"),
        (GEMMA3, "one RoPE base"),
        (GEMMA3, "RoPE bases exchanged"),
        (GEMMA3, "no linear scaling"),
        (GEMMA3, "scores by the width of a head"),
        (GEMMA3, "silu"),
        (GEMMA3, "exact gelu"),
        (GEMMA3, "embeddings as they are"),
        (GEMMA3, "norms without 1"),
        (GEMMA3, "no norm behind mlp"),
        (GEMMA3, "no k norm"),
        (MISTRAL, "no window"),
        (MISTRAL, "a window of one more"),
        (PHI3, "no window"),
        (PHI3, "RoPE on all of a head"),
        (PHI3, "RoPE on the last numbers"),
        (PHI3, "gate and up exchanged"),
        (PHI3_LONG, "short factors"),
        (PHI3_LONG, "angles of size 1"),
        (SMOLLM3, "RoPE in every layer"),
        (OLMO2, "norm of each head"),
        (OLMO2, "no k norm"),
        (OLMO2, "no norm behind mlp"),
        (LLAMA31, "no rope scaling"),
        (LLAMA31, "all pairs stretched"),
        (LLAMA31, "no pair blended"),
        (LLAMA31, "neighbours"),
        (LLAMA31, "bias added"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value["family"]),
)
def test_the_comparison_catches_another_family(
    changes: dict[str, object], bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = lively(make_config(**changes))
    theirs = reference(decoder)
    tokens_BT = random_tokens(decoder.config, 2, 96)
    assert difference(decoder, theirs, tokens_BT) <= TOLERANCE
    scaling = decoder.config.rope_scaling
    if bug == "neighbours":
        monkeypatch.setattr(subject, "rotate", adjacent_pairs)
    elif bug == "norm after turning":
        monkeypatch.setattr(subject.Attention, "forward", norm_after_turning)
    elif scaling is not None and bug != "bias added":
        wrong = {
            "no rope scaling": None,
            "all pairs stretched": all_stretched(scaling),
            "no pair blended": dataclasses.replace(scaling, high_freq_factor=1.0001),
        }[bug]
        decoder.config = dataclasses.replace(decoder.config, rope_scaling=wrong)
    elif "window" in bug and bug not in OTHER_CONFIGS:
        more = None if bug == "no window" else 10
        decoder.config = dataclasses.replace(decoder.config, sliding_window=more)
    elif bug in OTHER_CONFIGS:
        decoder.config = dataclasses.replace(decoder.config, **OTHER_CONFIGS[bug])
    elif bug == "embeddings as they are":
        monkeypatch.setattr(decoder, "scaled", lambda embedded_BTD: embedded_BTD)
    elif bug == "RoPE on all of a head":
        decoder.config = dataclasses.replace(decoder.config, partial_rotary_factor=1.0)
    elif bug == "RoPE on the last numbers":
        first = subject.rotate
        monkeypatch.setattr(subject, "rotate", lambda x, *angles: first(x.flip(-1), *angles))
    for module in decoder.modules():
        if isinstance(module, subject.FeedForward):
            if bug == "gate and up exchanged":
                module.gate, module.up = module.up, module.gate
            elif bug in ("silu", "exact gelu"):
                module.activation = F.silu if bug == "silu" else F.gelu
        if isinstance(module, subject.RMSNorm) and bug == "norms without 1":
            module.offset = 0.0
        if isinstance(module, subject.Layer) and bug == "no norm behind mlp":
            module.mlp_out_norm = None
        if not isinstance(module, subject.Attention):
            continue
        if bug == "scores by the width of a head":
            module.scale = None
        elif bug == "RoPE in every layer":
            module.rotates = True
        elif bug == "no qk norm":
            module.q_norm = module.k_norm = None
        elif bug == "no k norm":
            module.k_norm = nn.Identity()  # type: ignore[assignment]
        elif bug == "norm of each head":
            for norm in (module.q_norm, module.k_norm):
                monkeypatch.setattr(norm, "forward", partial(norm_of_each, norm, module.head_dim))
        elif bug == "norm over all heads":
            monkeypatch.setattr(subject.RMSNorm, "forward", norm_of_last_two)
        elif bug == "bias added":
            for linear in (module.k, module.v):
                assert isinstance(linear, nn.Linear)
                linear.bias = nn.Parameter(torch.full((linear.out_features,), 0.05))
    assert difference(decoder, theirs, tokens_BT) > 10 * TOLERANCE


def norm_of_each(self: Any, width: int, x_BTD: Tensor) -> Tensor:
    heads_BTHE = x_BTD.unflatten(-1, (-1, width))
    scale_BTH1 = torch.rsqrt(heads_BTHE.square().mean(-1, keepdim=True) + self.eps)
    scaled: Tensor = (heads_BTHE * scale_BTH1).flatten(-2) * self.weight
    return scaled


def norm_of_last_two(self: Any, x: Tensor) -> Tensor:
    """One norm over the heads of a token together, where there are heads."""
    dims = (-2, -1) if x.dim() == 4 else (-1,)
    scaled: Tensor = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + self.eps) * self.weight
    return scaled


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("width", [16, 64, 128])
def test_frequencies_on_tensors_are_those_of_the_formula(theta: float, width: int) -> None:
    config = make_config(**{**LLAMA31, "rope_theta": theta, "head_dim": width})
    assert config.rope_scaling is not None
    plain = dataclasses.replace(config, rope_scaling=None)
    cpu = torch.device("cpu")
    ratio_R = subject.frequencies(plain, cpu) / subject.frequencies(config, cpu)
    expected_R = torch.tensor(divisors(config.rope_scaling, theta, width))
    assert len(set(expected_R.tolist())) > 1
    torch.testing.assert_close(ratio_R, expected_R, rtol=1e-5, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("changes", [*OF_FAMILIES, PHI3_LONG], ids=[*FAMILIES, "long"])
def test_packed_documents_equal_separate_documents(changes: dict[str, object]) -> None:
    decoder = lively(make_config(**changes))
    tokens_BT = random_tokens(decoder.config, 2, 37)
    # Of 21 tokens and more, and fewer.
    documents_BT = torch.tensor([[5] * 1 + [2] * 21 + [9] * 11 + [PADDING] * 4, [7] * 37])
    packed_BTV = decoder(tokens_BT, documents_BT)
    assert packed_BTV.isfinite().all()
    for row, document in ((0, 5), (0, 2), (0, 9), (1, 7)):
        own = documents_BT[row] == document
        alone_TV = decoder(tokens_BT[row][own][None])[0]
        torch.testing.assert_close(packed_BTV[row][own], alone_TV, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_a_long_prompt_and_what_follows_have_the_long_factors() -> None:
    decoder = lively(make_config(**PHI3_LONG))
    tokens_BT = random_tokens(decoder.config, 1, 26)
    wanted_TD = decoder.hidden(tokens_BT)[0]
    # Pages of 64 tokens: page 0 is nobody's.
    cache = PagedCache(
        decoder.config,
        pages=2,
        slots=1,
        slot_pages=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    forward = NativeForward(decoder, cache)
    found = []
    for first, last in ((0, 22), (22, 23), (23, 26)):
        position_BT = torch.arange(first, last)[None]
        caches = forward._torch_caches(position_BT, torch.tensor([[1]]))
        length_BT = torch.tensor([[last]])
        found.append(
            decoder.hidden_with_cache(tokens_BT[:, first:last], position_BT, length_BT, caches)[0]
        )
    torch.testing.assert_close(torch.cat(found), wanted_TD, rtol=0, atol=TOLERANCE)


def test_factors_that_inference_has_kept_serve_training() -> None:
    decoder = lively(make_config(**PHI3_LONG)).train()
    tokens_BT = random_tokens(decoder.config, 1, 26)
    subject._long_factors.cache_clear()
    with torch.inference_mode():
        wanted_BTV = decoder(tokens_BT)
    found_BTV = decoder(tokens_BT)
    found_BTV.sum().backward()
    assert torch.equal(found_BTV.detach(), wanted_BTV)


@torch.no_grad()
def test_documents_may_alternate_in_a_row() -> None:
    decoder = lively(make_config())
    tokens_BT = random_tokens(decoder.config, 1, 20)
    documents_BT = (torch.arange(20) % 3)[None]
    packed_BTV = decoder(tokens_BT, documents_BT)
    for document in range(3):
        alone_TV = decoder(tokens_BT[:, document::3])[0]
        torch.testing.assert_close(packed_BTV[0, document::3], alone_TV, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_only_later_tokens_of_the_same_document_see_a_token() -> None:
    decoder = lively(make_config())
    tokens_BT = random_tokens(decoder.config, 1, 24)
    documents_BT = torch.tensor([[0] * 12 + [1] * 12])
    before_TV = decoder(tokens_BT, documents_BT)[0]
    tokens_BT[0, 6] = (tokens_BT[0, 6] + 1) % decoder.config.vocab_size
    moved_T = (decoder(tokens_BT, documents_BT)[0] != before_TV).any(-1)
    assert moved_T.tolist() == [False] * 6 + [True] * 6 + [False] * 12


@pytest.mark.parametrize("changes", OF_FAMILIES, ids=list(FAMILIES))
def test_gradients_are_finite_with_padding_and_reach_every_weight(
    changes: dict[str, object],
) -> None:
    decoder = lively(make_config(**changes)).train()
    tokens_BT = random_tokens(decoder.config, 2, 19)
    documents_BT = torch.tensor([[0] * 10 + [1] * 5 + [PADDING] * 4, [PADDING] * 3 + [4] * 16])
    real_BT = documents_BT != PADDING
    decoder(tokens_BT, documents_BT)[real_BT].logsumexp(-1).sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # A constant added to all keys of a query changes no softmax, so a key's bias may get none.
        if not name.endswith("k.bias"):
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("changes", [*OF_FAMILIES, PHI3_LONG], ids=[*FAMILIES, "long"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("second", [37, 20], ids=["whole rows", "documents"])
def test_gradients_equal_transformers(changes: dict[str, object], tied: bool, second: int) -> None:
    """`second` is where a second document begins in a row of 37 tokens; transformers runs each by itself."""
    decoder = lively(make_config(**changes, tie_word_embeddings=tied))
    theirs = reference(decoder)
    tokens_BT = random_tokens(decoder.config, 2, 37)
    documents_BT = (torch.arange(37) >= second).long().expand(2, -1)
    decoder(tokens_BT, documents_BT).logsumexp(-1).mean().backward()
    alone = [
        theirs(part).logits for part in tokens_BT.tensor_split((second,), dim=1) if part.numel()
    ]
    torch.cat(alone, dim=1).logsumexp(-1).mean().backward()
    names = hf_names(decoder.config)
    gradients = {ours: decoder.get_parameter(ours).grad for ours in names}
    expected = dict(theirs.named_parameters())
    for ours, hf, shape, first in parts(decoder.config, "hf"):
        found, wanted = gradients[ours], expected[hf].grad[first : first + shape[0]]
        gap = float((found - wanted).abs().max() / wanted.abs().max())
        # What a key's bias adds is the same for all keys of a query: its gradient is rounding.
        assert gap <= TOLERANCE or ours.endswith("k.bias"), f"{ours}: {gap:.2e}"


@torch.no_grad()
def test_embeddings_and_norms_in_16_bits_are_those_of_transformers() -> None:
    # The root of 56 is no number of bf16, and 1 + w would lose most of w.
    config = make_config(**{**GEMMA3, "hidden_size": 56, "num_key_value_heads": 1})
    decoder = lively(config).to(torch.bfloat16)
    theirs = reference(decoder).to(torch.bfloat16)
    tokens_BT = random_tokens(config, 2, 37)
    found_BTD = decoder.scaled(decoder.embed(tokens_BT))
    assert torch.equal(found_BTD, theirs.model.embed_tokens(tokens_BT))
    with torch.no_grad():
        decoder.norm.weight.mul_(0.01)
        theirs.model.norm.weight.mul_(0.01)
    assert torch.equal(decoder.norm(found_BTD), theirs.model.norm(found_BTD))


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_hidden_states_and_head_give_the_logits(tied: bool) -> None:
    decoder = lively(make_config(tie_word_embeddings=tied))
    tokens_BT = random_tokens(decoder.config, 2, 9)
    assert decoder.head_weight.shape == (97, 64)
    expected_BTV = decoder.hidden(tokens_BT) @ decoder.head_weight.T
    torch.testing.assert_close(decoder.logits(tokens_BT), expected_BTV, rtol=0, atol=1e-5)
    assert (decoder.head_weight is decoder.embed.weight) is tied


def test_a_head_without_a_dense_weight_is_our_mistake() -> None:
    decoder = Decoder(make_config(), lambda in_features, out_features, bias: nn.Identity())
    with pytest.raises(InternalError, match="Identity has no dense weight"):
        _ = decoder.head_weight


def test_every_linear_comes_from_make_linear() -> None:
    made: list[tuple[int, int, bool]] = []

    def recording(in_features: int, out_features: int, bias: bool) -> nn.Module:
        made.append((in_features, out_features, bias))
        return dense_linear(in_features, out_features, bias)

    decoder = Decoder(make_config(), recording)
    assert len(made) == 3 * 7 + 1
    assert sum(isinstance(module, nn.Linear) for module in decoder.modules()) == len(made)
    assert made[:4] == [(64, 64, True), (64, 16, True), (64, 16, True), (64, 64, False)]
    made.clear()
    Decoder(make_config(**QWEN3), recording)
    assert made[:4] == [(64, 128, False), (64, 64, False), (64, 64, False), (128, 64, False)]


@torch.no_grad()
@pytest.mark.parametrize("changes", OF_FAMILIES, ids=list(FAMILIES))
def test_bf16_on_the_cpu_stays_near_fp32(changes: dict[str, object]) -> None:
    decoder = lively(make_config(**changes))
    tokens_BT = random_tokens(decoder.config, 2, 37)
    documents_BT = torch.tensor([[0] * 20 + [1] * 17, [0] * 30 + [PADDING] * 7])
    exact_BTV = decoder(tokens_BT, documents_BT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed_BTV = decoder(tokens_BT, documents_BT)
    rounded_BTV = decoder.to(torch.bfloat16)(tokens_BT, documents_BT)
    assert rounded_BTV.dtype == torch.bfloat16
    for found_BTV in (mixed_BTV, rounded_BTV):
        # bf16 keeps 8 bits: each of some 20 roundings on the way costs up to 0.4 %.
        error = (found_BTV.float() - exact_BTV).std() / exact_BTV.std()
        assert error < 0.05, f"{error:.3f}"


@pytest.mark.parametrize("changes", OF_FAMILIES, ids=list(FAMILIES))
def test_autocast_gives_fp32_gradients_to_fp32_weights(changes: dict[str, object]) -> None:
    decoder = lively(make_config(**changes)).train()
    tokens_BT = random_tokens(decoder.config, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BTD = decoder.hidden(tokens_BT, torch.zeros_like(tokens_BT))
    assert hidden_BTD.dtype == torch.float32
    torch.autograd.backward(hidden_BTD.square().mean())
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32
        for name, p in decoder.named_parameters()
        if name != "head.weight"
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_fresh_weights_have_the_stated_spread_and_follow_the_seed(family: str) -> None:
    config = make_config(family=family, hidden_size=128, intermediate_size=256)
    decoder = new_decoder(config, seed=3)
    assert sum(p.numel() for p in decoder.parameters()) == count_parameters(config)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1 - config.kind.norm_offset).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            residual = name.endswith((".o.weight", ".down.weight"))
            std = 0.02 / math.sqrt(6) if residual else 0.02
            # At least 4096 samples: the spread of the estimate is 1.1 %, so 5 % is over four sigma.
            assert abs(float(parameter.detach().std()) / std - 1) < 0.05, name
    again, other = new_decoder(config, seed=3), new_decoder(config, seed=4)
    rounded = new_decoder(config, seed=3, dtype=torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert torch.equal(parameter.bfloat16(), rounded.get_parameter(name)), name
    assert not torch.equal(decoder.embed.weight, other.embed.weight)
