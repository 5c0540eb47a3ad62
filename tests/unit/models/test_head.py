"""Heads in slices: whatever the slices, the loss and its gradients are those of the dense head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.linear import Scratch
from engine.loss.kd_loss import LossTerms, distillation_loss
from engine.models.head import DenseHead, Head, PackedHead, Slices, multiply, project
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix, pack, unpack
from engine.quant.quantize import quantize
from engine.train.heldout import heldout_loss
from tests.support.packed_models import lively, make_batch, make_config
from tests.support.reference_loss import reference_loss

# Shapes: N tokens, V student vocabulary, W teacher vocabulary, D student width, E teacher width

N, V, W, D, E = 37, 90, 117, 24, 256


@dataclass
class Cut:
    """A head that gives out slices of the lengths that a test asks for, and says what was read."""

    weight_WE: Tensor
    lengths: tuple[int, ...]
    read: int = 0

    @property
    def vocab_size(self) -> int:
        return self.weight_WE.shape[0]

    @property
    def width(self) -> int:
        return self.weight_WE.shape[1]

    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        head = self

        class Walk:
            def __iter__(self) -> Iterator[tuple[int, Tensor]]:
                first = 0
                for length in (*head.lengths, columns):
                    count = min(length, columns - first)
                    if count:
                        # Another memory each time, poisoned when the next slice is asked for.
                        slice_RE = head.weight_WE[first : first + count].to(dtype, copy=True)
                        yield first, slice_RE
                        slice_RE.fill_(float("nan"))
                    first += count
                    head.read = max(head.read, first)

        return Walk()


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def packed_head(
    blocks: str = "Q6_K", *, dtype: torch.dtype = torch.float32, rows: int = 32
) -> tuple[PackedHead, PackedMatrix]:
    """A head of W rows whose slices have at most `rows`."""
    weight = pack(quantize(normal(W, E, seed=1) / 8, BLOCK_TYPES[blocks]))
    scratch = Scratch(torch.device("cpu"), dtype)
    scratch.reserve(rows, E)
    return PackedHead(weight, scratch), weight


def values_of(head: Head, columns: int = W) -> Tensor:
    return torch.cat([s.clone() for _, s in head.slices(columns, torch.float32)])


def loss_of(head: Head | Tensor, chunk_rows: int = 11) -> tuple[LossTerms, Tensor, Tensor]:
    """Terms, dH and dW."""
    hidden_ND, head_VD = (normal(*s, seed=2).requires_grad_() for s in ((N, D), (V, D)))
    labels_N = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
    labels_N[::5] = -100
    terms = distillation_loss(
        hidden_ND,
        head_VD,
        normal(N, E, seed=4),
        head,
        labels_N,
        alpha=0.3,
        temperature=2.0,
        denominator=29.0,
        chunk_rows=chunk_rows,
    )
    return terms, *torch.autograd.grad(terms.loss, (hidden_ND, head_VD))


def assert_same_loss(
    found: tuple[LossTerms, Tensor, Tensor], expected: tuple[LossTerms, Tensor, Tensor]
) -> None:
    for name in ("loss", "ce", "kd", "agreement"):
        a, b = getattr(found[0], name), getattr(expected[0], name)
        torch.testing.assert_close(a, b, rtol=2e-6, atol=0, msg=name)
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("blocks", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_head_in_blocks_gives_the_loss_and_gradients_of_its_values(blocks: str) -> None:
    head, _ = packed_head(blocks)
    assert len(list(head.slices(V, torch.float32))) > 2
    dense_WE = values_of(head)
    assert_same_loss(loss_of(head), loss_of(dense_WE))


def test_a_head_in_blocks_gives_the_loss_of_the_oracle() -> None:
    head, _ = packed_head()
    terms, *_ = loss_of(head)
    hidden_ND, head_VD = (normal(*s, seed=2) for s in ((N, D), (V, D)))
    labels_N = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
    labels_N[::5] = -100
    logits_NW = normal(N, E, seed=4).double() @ values_of(head).double().T
    oracle = reference_loss(hidden_ND.double() @ head_VD.double().T, logits_NW, labels_N, 0.3, 2.0)
    assert terms.kd is not None and oracle.kd is not None
    assert float(terms.kd) == pytest.approx(float(oracle.kd), rel=2e-5)
    assert float(terms.loss.detach()) == pytest.approx(float(oracle.loss), rel=2e-5)


@given(lengths=st.lists(st.integers(1, 40), max_size=8).map(tuple))
def test_any_slices_give_the_loss_of_the_whole_and_read_nothing_beyond(
    lengths: tuple[int, ...],
) -> None:
    weight_WE = normal(W, E, seed=1) / 8
    weight_WE[V:] = float("nan")
    head = Cut(weight_WE, lengths)
    assert_same_loss(loss_of(head), loss_of(weight_WE))
    assert head.read == V


def test_a_dense_head_is_one_slice_and_no_copy() -> None:
    weight_WE = normal(W, E, seed=1).requires_grad_()
    head = DenseHead(weight_WE)
    ((first, slice_VE),) = head.slices(V, torch.float32)
    assert first == 0 and slice_VE.shape == (V, E)
    assert slice_VE.data_ptr() == weight_WE.data_ptr() and not slice_VE.requires_grad


def test_slices_of_blocks_begin_at_multiples_of_16_and_end_at_the_last_column() -> None:
    head, weight = packed_head(rows=48)
    assert (head.vocab_size, head.width) == (W, E)
    slices = [(first, len(s)) for first, s in head.slices(V, torch.float32)]
    assert slices == [(0, 48), (48, 42)]
    expected_WE = torch.empty(W, E)
    for first, slice_RE in head.slices(W, torch.float32):
        expected_WE[first : first + len(slice_RE)] = slice_RE
    assert torch.equal(expected_WE, unpack(weight).dequantize())


def test_slices_are_rounded_to_the_dtype_of_the_model_whatever_is_asked_for() -> None:
    exact, _ = packed_head(dtype=torch.float32)
    narrow, _ = packed_head(dtype=torch.bfloat16)
    assert torch.equal(values_of(narrow), values_of(exact).bfloat16().float())


def test_a_product_into_some_columns_leaves_the_others_alone() -> None:
    out_NV = torch.full((5, 12), 7.0)
    left, right = normal(5, 8, seed=5), normal(4, 8, seed=6)
    multiply(out_NV[:, 4:8], left, right.t(), scale=0.5)
    torch.testing.assert_close(out_NV[:, 4:8], 0.5 * left @ right.T)
    assert (out_NV[:, :4] == 7).all() and (out_NV[:, 8:] == 7).all()


def test_projecting_fills_every_column_it_is_given() -> None:
    head, _ = packed_head()
    out_NW = torch.full((6, W), float("nan"))
    hidden_NE = normal(6, E, seed=7)
    project(out_NW, hidden_NE, head.slices(W, torch.float32), scale=0.25)
    torch.testing.assert_close(out_NW, 0.25 * hidden_NE @ values_of(head).T)


def test_a_packed_teacher_is_evaluated_as_its_values_are() -> None:
    decoder = lively(make_config(vocab_size=W))
    head, _ = packed_head()
    batches = [make_batch(3, 21, W), make_batch(2, 21, W)]
    device = torch.device("cpu")
    found, labelled = heldout_loss(decoder.hidden, head, batches, device)
    expected, _ = heldout_loss(decoder.hidden, DenseHead(values_of(head)), batches, device)
    assert labelled == 100 and found == pytest.approx(expected, rel=1e-6)
    with torch.no_grad():
        tokens_BT, documents_BT, labels_BT = batches[0].to_torch(device)
        logits_BTW = decoder.hidden(tokens_BT, documents_BT) @ values_of(head).T
        by_hand = torch.nn.functional.cross_entropy(logits_BTW.flatten(0, 1), labels_BT.flatten())
    begun: list[int] = []
    alone, _ = heldout_loss(decoder.hidden, head, batches[:1], device, begun=begun.append)
    assert begun == [0]
    assert alone == pytest.approx(float(by_hand), rel=1e-6)
