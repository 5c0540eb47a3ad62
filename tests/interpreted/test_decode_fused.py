"""The fused small kernels of a step in Triton's interpreter, beside the separate ones and torch.

Where the order of sums is the same, so are the bits. It is not in attention, whose chunk is one tile
here and two there; and a norm in blocks is divided behind the product.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1]))

from packed_models import lively, make_config, write

from engine.errors import InternalError
from engine.kernels import decode_fused_launch as fused
from engine.kernels import decode_launch as separate
from engine.kernels.decode_fused_launch import CHUNKS_AHEAD
from engine.kernels.decode_launch import Heads, Out, Parts
from engine.kernels.key import Variant
from engine.kernels.registry import REGISTRY, launch
from engine.kernels.small_m_inputs import Inputs, empty_inputs
from engine.models.decode import DecodeSteps, SmallKernels
from engine.models.decoder import Decoder, rotate
from engine.models.decoder import attend as attend_whole
from engine.models.load_packed import load_packed_decoder

CPU = torch.device("cpu")
EPS = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outs(rows: int, columns: int, codes: bool) -> Out:
    floats = torch.full((rows, columns), torch.nan)
    return Out(floats, empty_inputs(rows, columns, CPU) if codes else None)


def same(found: Out, expected: Out) -> bool:
    if found.codes is None or expected.codes is None:
        return torch.equal(found.floats_MK, expected.floats_MK)
    return all(map(torch.equal, found.codes, expected.codes))


def values_of(codes: Inputs) -> Tensor:
    """What whole numbers stand for, (M, K)."""
    upper, lower = codes.codes_MB2E.float().unbind(2)
    return ((128 * upper + lower) * codes.scales_MB[:, :, None]).flatten(1)


# Rows, columns, parts; more rows of parts than are run, as products of floats have.
NORMS = [
    (2, 300, 3, 8),
    *(
        pytest.param(*case, marks=pytest.mark.soak)
        for case in [(1, 512, 1, 8), (5, 768, 8, 5), (8, 256, 5, 8), (1, 1000, 7, 1)]
    ),
]


@pytest.mark.parametrize(("rows", "columns", "splits", "part_rows"), NORMS)
@pytest.mark.parametrize("codes", [False, True])
def test_a_norm_of_whole_rows_has_the_bits_of_the_separate_one(
    rows: int, columns: int, splits: int, part_rows: int, codes: bool
) -> None:
    if codes:
        columns -= columns % 256
    weight, kept = random(columns), random(rows, columns, seed=1)
    squares = fused.empty_squares(rows, columns, CPU)
    for parts in (None, Parts(random(splits, part_rows, columns, seed=2))):
        out, expected = outs(rows, columns, codes), outs(rows, columns, codes)
        kept_there = kept.clone()
        separate.norm(parts, kept_there, weight, EPS, expected, early=False)
        undivided = fused.norm(parts, kept, weight, EPS, out, squares, late=False, early=False)
        assert undivided is None
        assert torch.equal(kept, kept_there)
        assert same(out, expected)


@pytest.mark.parametrize(
    ("rows", "columns", "splits"),
    [
        (1, 768, 7),
        pytest.param(5, 256, 1, marks=pytest.mark.soak),
        pytest.param(8, 512, 8, marks=pytest.mark.soak),
    ],
)
def test_a_norm_in_blocks_is_the_norm_once_its_product_is_divided(
    rows: int, columns: int, splits: int
) -> None:
    weight, kept = random(columns), 3 * random(rows, columns, seed=1)
    parts = Parts(random(splits, rows, columns, seed=2))
    expected = kept + parts.parts_PMN.sum(0)
    normed = F.rms_norm(expected, (columns,), weight, EPS)
    out, squares = outs(rows, columns, True), fused.empty_squares(rows, columns, CPU)
    undivided = fused.norm(parts, kept, weight, EPS, out, squares, late=True, early=False)
    torch.testing.assert_close(kept, expected)
    assert undivided is not None and out.codes is not None
    # What a product and its reader make of it: here the gate, of two products in 2 parts.
    inner = 300
    matrices = random(2, inner, columns, seed=3) / columns**0.5
    products = values_of(out.codes) @ matrices.transpose(1, 2)
    halves = torch.stack([0.25 * products, 0.75 * products]).transpose(1, 2).flatten(2)
    gate, up = Parts(halves), Parts(halves, inner)
    given = outs(rows, inner, False)
    fused.gate(gate, up, undivided, given, rows, early=False)
    left, right = (normed @ matrices.transpose(1, 2)).unbind(0)
    # Whole numbers of 13 bits.
    torch.testing.assert_close(given.floats_MK, F.silu(left) * right, rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize(
    ("rows", "columns", "splits"),
    [
        (2, 300, 2),
        pytest.param(1, 512, 1, marks=pytest.mark.soak),
        pytest.param(8, 256, 8, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("codes", [False, True])
def test_a_gate_has_the_bits_of_the_separate_one(
    rows: int, columns: int, splits: int, codes: bool
) -> None:
    if codes:
        columns -= columns % 256
    # Aligned to 16 bytes, as launches want it.
    first = -(-columns // 4) * 4
    both = random(splits, rows, 2 * first)
    out, expected = outs(rows, columns, codes), outs(rows, columns, codes)
    gate, up = Parts(both), Parts(both, first)
    separate.gate(gate, up, expected, rows, early=False)
    fused.gate(gate, up, None, out, rows, early=False)
    assert same(out, expected)


class Case(NamedTuple):
    shared: int
    group: int
    width: int
    positions: tuple[int, ...]
    splits: int
    bias: bool
    norm: bool


# Of heads of 7 x 128 columns two fill whole blocks, of 3 x 32 none does before the row ends; positions
# at the edges of chunks of 128, and in more of them than a join has in flight.
CASES = [
    # A later chunk has a larger score for some heads.
    Case(2, 3, 32, (0, 255), 2, True, True),
    *(
        pytest.param(case, marks=pytest.mark.soak)
        for case in (
            Case(4, 7, 128, (127,), 5, True, False),
            Case(2, 3, 32, (0, 1, 127, 255, 300), 2, True, True),
            Case(2, 4, 64, (129, 0), 1, False, True),
            Case(3, 1, 128, (50, 256), 8, False, False),
            Case(1, 8, 32, (128 * (CHUNKS_AHEAD + 1) + 5,), 3, True, False),
            Case(2, 2, 64, tuple(range(120, 136, 2)), 4, False, False),
        )
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_the_separate_kernels_and_of_torch(
    case: Case,
) -> None:
    shared, group, width, positions, splits, bias, norm = case
    rows, slots = len(positions), max(positions) + 3
    columns = shared * group * width
    sizes = [columns, shared * width, shared * width]
    parts = random(splits, rows, sum(sizes)) / splits**0.5
    vectors = random(2 * columns + 2 * width, seed=1)
    biases = tuple(vectors[: sum(sizes)].split(sizes)) if bias else None  # type: ignore[no-untyped-call]
    norms = (vectors[-width:].clone(), vectors[-2 * width : -width].clone()) if norm else None
    frequency = 1 / 10000 ** (torch.arange(0, width, 2) / width)
    heads = Heads(biases, norms, frequency, EPS)
    angle_SR = torch.arange(slots)[:, None].float() * frequency
    turns = torch.stack([angle_SR.cos(), angle_SR.sin()], dim=1)
    position = torch.tensor(positions, dtype=torch.int32)
    caches = random(2, rows, slots, shared, width, seed=2)
    caches[:, torch.arange(slots)[None] > position[:, None]] = torch.nan
    q, k, v = (Parts(parts, first) for first in (0, sizes[0], sizes[0] + sizes[1]))
    codes = columns % 256 == 0
    scratch = fused.empty_scratch(rows, slots, shared, shared * group, width, CPU)
    scratch.sums_CMHE.fill_(torch.nan)
    scratch.softmax_CMH2.fill_(torch.nan)

    found = []
    for _ in range(2):
        keys, values = caches.clone()
        out = outs(rows, columns, codes)
        fused.attend(
            *(q, k, v, heads, turns, None, keys, values, position, scratch, out), early=False
        )
        assert not scratch.arrived_MU.any()
        found.append((keys, values, out))
    assert same(found[0][2], found[1][2])

    joined = outs(rows, columns, codes)
    separate.join(scratch.sums_CMHE, scratch.softmax_CMH2, position, joined, early=False)
    assert same(out, joined), "a join of the same chunks has the same bits"

    expected_keys, expected_values = caches.clone()
    expected = outs(rows, columns, False)
    sums, softmax = torch.empty_like(scratch.sums_CMHE), torch.empty_like(scratch.softmax_CMH2)
    separate.attend(
        *(q, k, v, heads, expected_keys, expected_values, position, sums, softmax), early=False
    )
    separate.join(sums, softmax, position, expected, early=False)
    for mine, theirs in ((keys, expected_keys), (values, expected_values)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, equal_nan=True)
    whole = torch_attention(case, parts.sum(0).split(sizes, dim=1), heads, turns, keys, values)
    given = out.floats_MK if out.codes is None else values_of(out.codes)
    limit = 1e-5 if out.codes is None else 1e-3
    torch.testing.assert_close(given, expected.floats_MK, rtol=limit, atol=limit)
    torch.testing.assert_close(given, whole, rtol=limit, atol=limit)


def torch_attention(
    case: Case, qkv: tuple[Tensor, ...], heads: Heads, turns: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    rows, position = len(case.positions), torch.tensor(case.positions)
    q = qkv[0] + (0 if heads.biases is None else heads.biases[0])
    q = q.view(rows, 1, -1, case.width)
    if heads.norms is not None:
        q = F.rms_norm(q, (case.width,), heads.norms[0], EPS)
    cos, sin = turns[position].unbind(1)
    q = rotate(q, cos[:, None, None], sin[:, None, None])
    slots = torch.arange(keys.shape[1])
    mask = torch.zeros(rows, 1, 1, len(slots))
    mask.masked_fill_(slots > position[:, None, None, None], -torch.inf)
    return attend_whole(q, keys.nan_to_num(), values.nan_to_num(), mask).flatten(1)


def test_nothing_is_joined_before_every_chunk_of_every_head_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_last_chunk(variant: Any, grid: tuple[int, int], *rest: Any) -> None:
        launch(variant, (grid[0], grid[1] - 1), *rest)

    monkeypatch.setattr("engine.kernels.decode_fused_launch.launch", without_last_chunk)
    width, slots = 32, 300
    parts = random(1, 1, 6 * width)
    keys, values = random(2, 1, slots, 2, width)
    q, k, v = Parts(parts), Parts(parts, 2 * width), Parts(parts, 4 * width)
    scratch = fused.empty_scratch(1, slots, 2, 2, width, CPU)
    turns, position = random(slots, 2, width // 2), torch.tensor([290], dtype=torch.int32)
    out = outs(1, 2 * width, False)
    heads = Heads(None, None, turns[0, 0], EPS)
    fused.attend(q, k, v, heads, turns, None, keys, values, position, scratch, out, early=False)
    assert scratch.arrived_MU.tolist() == [[4]]
    assert out.floats_MK.isnan().all()


def test_heads_that_no_shared_memory_holds_are_refused() -> None:
    decoder = lively(make_config(head_dim=256, num_hidden_layers=1))
    with pytest.raises(InternalError, match="expected heads up to 128 wide, found 256"):
        DecodeSteps(decoder, 1, 20, graph=False, small_kernels="fused")


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5] * 16, [8]]
"""The second fills a chunk of the cache, so that its next tokens are in another."""


@torch.inference_mode()
def steps_of(
    decoder: Decoder, prompts: list[list[int]], count: int, small_kernels: SmallKernels = "fused"
) -> tuple[list[list[int]], Tensor]:
    """The tokens of each prompt, and the logits of the last step."""
    steps = DecodeSteps(decoder, len(prompts), 200, graph=False, small_kernels=small_kernels)
    found = [[steps.start(row, prompt).wait()[row]] for row, prompt in enumerate(prompts)]
    for _ in range(count):
        for row, token in enumerate(steps.step().wait()):
            found[row].append(token)
    return found, steps.logits()


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        pytest.param("qwen3", "", marks=pytest.mark.soak),
        pytest.param("qwen2", "Q4_K", marks=pytest.mark.soak),
        pytest.param("qwen3", "Q6_K", marks=pytest.mark.soak),
    ],
)
@torch.inference_mode()
def test_steps_give_the_logits_of_the_decoder(family: str, blocks: str, tmp_path: Path) -> None:
    decoder = lively(make_config(family, num_hidden_layers=1, intermediate_size=256))
    if blocks:
        decoder = load_packed_decoder(write(tmp_path / "model.gguf", decoder, blocks))
    prompts, count = (PROMPTS[1:2], 1) if blocks else (PROMPTS, 2)
    tokens, logits_MV = steps_of(decoder, prompts, count)
    assert tokens == steps_of(decoder, prompts, count, "separate")[0]
    for prompt, row, logits_V in zip(prompts, tokens, logits_MV, strict=True):
        expected_V = decoder(torch.tensor([prompt + row[:-1]]))[0, -1]
        error = float((logits_V - expected_V).norm() / expected_V.norm())
        assert error < (3e-3 if blocks else 1e-5), (len(prompt), error)


@pytest.mark.soak
def test_a_row_is_the_same_bits_whatever_is_beside_it() -> None:
    decoder = lively(make_config(num_hidden_layers=1, intermediate_size=256))
    tokens, logits_MV = steps_of(decoder, PROMPTS, 1)
    alone, logits_1V = steps_of(decoder, PROMPTS[:1], 1)
    assert alone[0] == tokens[0]
    assert torch.equal(logits_1V[0], logits_MV[0])


@torch.inference_mode()
def test_what_is_warmed_up_is_what_is_launched_and_steps_give_the_logits_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = lively(make_config("qwen3", num_hidden_layers=1, intermediate_size=256))
    steps = DecodeSteps(decoder, 1, 20, graph=False, small_kernels="fused")
    token = steps.start(0, PROMPTS[0]).wait()[0]
    with REGISTRY.noting() as noted:
        steps._run()
    launched: set[Variant] = set()
    monkeypatch.setattr(REGISTRY, "_interpreted", launched)
    steps.step()
    names = {variant.name for variant in launched}
    assert {"norm_blocks", "attend_joined", "gate_blocks"} <= names
    assert not names & {"norm", "attend", "join", "gate"}
    assert launched <= set(noted)
    expected_V = decoder(torch.tensor([[*PROMPTS[0], token]]))[0, -1]
    torch.testing.assert_close(steps.logits()[0], expected_V, rtol=1e-4, atol=1e-5)
