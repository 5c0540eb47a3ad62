"""The kernels between the products of a step in Triton's interpreter, beside torch and the decoder.

In float32: the interpreter does not round to bf16 as a GPU does. What is written as whole numbers of 13
bits is half of one away from the reference at most.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from engine.kernels.decode_choose import IDS, choose, empty_best
from engine.kernels.decode_launch import (
    CHUNKS_AHEAD,
    Heads,
    Out,
    Parts,
    Undivided,
    attend,
    empty_scratch,
    empty_squares,
    gate,
    norm,
)
from engine.kernels.small_m_inputs import Inputs, empty_inputs
from engine.models.decoder import attend as attend_whole
from engine.models.decoder import rotate

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
    upper, lower = codes.codes_MB2E.int().unbind(2)
    numbers_MBE = 128 * upper + lower
    sums_MB8 = numbers_MBE.unflatten(2, (8, 32)).sum(3)
    assert torch.equal(codes.sums_MB8, sums_MB8.int())
    return (numbers_MBE * codes.scales_MB[:, :, None]).flatten(1)


def check(found: Out, expected_MK: Tensor) -> None:
    if found.codes is None:
        torch.testing.assert_close(found.floats_MK, expected_MK, rtol=1e-5, atol=1e-5)
        return
    largest_MB = expected_MK.unflatten(1, (-1, 256)).abs().amax(2)
    torch.testing.assert_close(found.codes.scales_MB, largest_MB / 4095, rtol=1e-4, atol=0)
    off_MB = (values_of(found.codes) - expected_MK).unflatten(1, (-1, 256)).abs().amax(2)
    assert (off_MB <= 0.52 * largest_MB / 4095).all()


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
def test_a_norm_of_whole_rows_adds_parts_in_order_and_norms_what_it_keeps(
    rows: int, columns: int, splits: int, part_rows: int, codes: bool
) -> None:
    if codes:
        columns -= columns % 256
    weight, kept = random(columns), random(rows, columns, seed=1)
    squares = empty_squares(rows, columns, CPU)
    for parts in (None, Parts(random(splits, part_rows, columns, seed=2))):
        expected = kept.clone()
        if parts is not None:
            first, *others = parts.parts_PMN[:, :rows]
            expected += sum(others, first)
        out = outs(rows, columns, codes)
        assert norm(parts, kept, weight, EPS, out, squares, late=False) is None
        assert torch.equal(kept, expected)
        check(out, F.rms_norm(expected, (columns,), weight, EPS))


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
    out, squares = outs(rows, columns, True), empty_squares(rows, columns, CPU)
    undivided = norm(parts, kept, weight, EPS, out, squares, late=True)
    torch.testing.assert_close(kept, expected)
    check(out, expected * weight)
    assert undivided is not None and out.codes is not None
    # What a product and its reader make of it: here the gate, of two products in 2 parts.
    inner = 300
    matrices = random(2, inner, columns, seed=3) / columns**0.5
    products = values_of(out.codes) @ matrices.transpose(1, 2)
    halves = torch.stack([0.25 * products, 0.75 * products]).transpose(1, 2).flatten(2)
    given = outs(rows, inner, False)
    gate(Parts(halves), Parts(halves, inner), undivided, given, rows)
    left, right = (normed @ matrices.transpose(1, 2)).unbind(0)
    # Whole numbers of 13 bits.
    torch.testing.assert_close(given.floats_MK, F.silu(left) * right, rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize(
    ("rows", "columns", "splits", "part_rows"),
    [
        (2, 300, 2, 8),
        pytest.param(1, 512, 1, 8, marks=pytest.mark.soak),
        pytest.param(8, 256, 8, 8, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("codes", [False, True])
def test_a_gate_opens_what_is_up(
    rows: int, columns: int, splits: int, part_rows: int, codes: bool
) -> None:
    if codes:
        columns -= columns % 256
    # Aligned to 16 bytes, as launches want it.
    first = -(-columns // 4) * 4
    both = random(splits, part_rows, 2 * first)
    out = outs(rows, columns, codes)
    gate(Parts(both), Parts(both, first), None, out, rows)
    left, right = both.sum(0)[:rows].unflatten(1, (2, first))[:, :, :columns].unbind(1)
    check(out, F.silu(left) * right)


class Case(NamedTuple):
    shared: int
    group: int
    width: int
    positions: tuple[int, ...]
    splits: int
    bias: bool
    norm: bool
    divided: bool


# Columns that are whole blocks, and not; positions at the edges of chunks of 128, and in more of them than a
# join has in flight.
CASES = [
    Case(2, 3, 32, (0, 255), 2, True, True, False),
    Case(1, 8, 32, (128 * CHUNKS_AHEAD + 5,), 3, False, False, True),
    *(
        pytest.param(case, marks=pytest.mark.soak)
        for case in (
            Case(4, 7, 128, (127,), 5, True, False, False),
            Case(2, 3, 32, (0, 1, 127, 255, 300), 2, True, True, True),
            Case(2, 4, 64, (129, 0), 1, False, True, False),
            Case(3, 1, 128, (50, 256), 8, False, False, True),
            Case(1, 8, 32, (128 * (2 * CHUNKS_AHEAD + 1) + 5,), 3, True, False, False),
            Case(2, 2, 64, tuple(range(120, 136, 2)), 4, False, False, True),
        )
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_the_decoder_over_the_cache_and_the_token_itself(case: Case) -> None:
    rows, slots = len(case.positions), max(case.positions) + 3
    columns = case.shared * case.group * case.width
    sizes = [columns, case.shared * case.width, case.shared * case.width]
    # Of more rows than are run, as products of floats have.
    parts = random(case.splits, rows + 1, sum(sizes)) / case.splits**0.5
    vectors = random(sum(sizes) + 2 * case.width, seed=1)
    bias_q, bias_k, bias_v = vectors[: -2 * case.width].split(sizes)  # type: ignore[no-untyped-call]
    norms = (vectors[-case.width :].clone(), vectors[-2 * case.width : -case.width].clone())
    frequency = 1 / 10000 ** (torch.arange(0, case.width, 2) / case.width)
    angle_SR = torch.arange(slots)[:, None].float() * frequency
    turns = torch.stack([angle_SR.cos(), angle_SR.sin()], dim=1)
    biases = (bias_q, bias_k, bias_v) if case.bias else None
    heads = Heads(biases, norms if case.norm else None, EPS, turns)
    position = torch.tensor(case.positions, dtype=torch.int32)
    # Three blocks: not a power of 2.
    squares = 768 * (0.5 + random(rows, 3, seed=3).square())
    undivided = None if case.divided else Undivided(squares, 768, EPS)
    caches = random(2, rows, slots, case.shared, case.width, seed=2)
    caches[:, torch.arange(slots)[None] > position[:, None]] = torch.nan
    q, k, v = (Parts(parts, first) for first in (0, sizes[0], sizes[0] + sizes[1]))
    codes = columns % 256 == 0
    scratch = empty_scratch(rows, slots, case.shared, case.shared * case.group, case.width, CPU)
    scratch.sums_CMHE.fill_(torch.nan)
    scratch.softmax_CMH2.fill_(torch.nan)

    found = []
    for _ in range(2):
        keys, values = caches.clone()
        out = outs(rows, columns, codes)
        attend(q, k, v, heads, undivided, keys, values, position, scratch, out)
        found.append(out)
    assert same(*found), "a launch leaves what the next one begins with"

    expected_keys, expected_values = caches.clone()
    sums = parts.sum(0)[:rows]
    if undivided is not None:
        sums = sums / (squares.sum(1, keepdim=True) / 768 + EPS).sqrt()
    turned = attention_inputs(case, sums.split(sizes, dim=1), heads, position)  # type: ignore[no-untyped-call]
    row = torch.arange(rows)
    expected_keys[row, position.long()], expected_values[row, position.long()] = turned[1:]
    torch.testing.assert_close(keys, expected_keys, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5, equal_nan=True)
    mask = torch.zeros(rows, 1, 1, slots)
    mask.masked_fill_(torch.arange(slots) > position[:, None, None, None], -torch.inf)
    whole = attend_whole(
        turned[0][:, None], expected_keys.nan_to_num(), expected_values.nan_to_num(), mask
    )
    check(found[1], whole.flatten(1))


def attention_inputs(
    case: Case, qkv: tuple[Tensor, ...], heads: Heads, position: Tensor
) -> tuple[Tensor, ...]:
    """Queries, keys and values of each row's token, (rows, heads, width), as they are attended to."""
    biases = heads.biases or (0, 0, 0)
    q, k, v = (
        (each + bias).unflatten(1, (-1, case.width)) for each, bias in zip(qkv, biases, strict=True)
    )
    if heads.norms is not None:
        q, k = (
            F.rms_norm(each, (case.width,), weight, EPS)
            for each, weight in zip((q, k), heads.norms, strict=True)
        )
    cos, sin = heads.turns_S2R[position.long()][:, :, None].unbind(1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


# The interpreter's numpy warns of the NaN that are wanted.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_lowest_of_the_likeliest_ids_is_chosen_and_what_is_not_finite_is_counted() -> None:
    logits = random(3, 2 * IDS + 100)
    logits[0, [IDS + 7, 5000, 2 * IDS + 3]] = 9.0
    logits[1, 2 * IDS + 99] = 9.0
    logits[2, [0, IDS, IDS + 1]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    token = torch.full((3,), -1)
    position, chosen = torch.tensor([3, 8, 9]).int(), torch.full((3,), -1).int()
    choose(logits, empty_best(3, logits.shape[1], CPU), token, position, chosen, 9)
    assert chosen.tolist() == [IDS + 7, 2 * IDS + 99, -3]
    assert token.tolist() == [IDS + 7, 2 * IDS + 99, 0]
    assert position.tolist() == [4, 9, 9]
