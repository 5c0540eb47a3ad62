"""A teacher that begins with the next batch: the same bits, only for the very tensors it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.load import load_packed_decoder
from engine.plan.knobs import choose_prefetch
from engine.teachers.frozen import DequantizedTeacher, QuantizedTeacher
from engine.teachers.prefetching import PrefetchingTeacher
from engine.teachers.protocol import Prefetches
from engine.teachers.truncating import TruncatingTeacher
from tests.support.packed_models import lively, make_config, random_tokens, write

CPU = torch.device("cpu")


def batch(seed: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    tokens_BT = random_tokens(2, 16 + seed).to(device)
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[:, 9:] = 1
    return tokens_BT, documents_BT


class Counting(DequantizedTeacher):
    asked = 0

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        self.asked += 1
        return super().hidden(tokens_BT, documents_BT)


@pytest.fixture
def inner() -> Counting:
    return Counting(lively(make_config()))


def test_a_prefetched_batch_has_the_bits_of_one_that_was_not(inner: Counting) -> None:
    teacher = PrefetchingTeacher(TruncatingTeacher(inner, 99), CPU)
    assert isinstance(teacher, Prefetches) and not isinstance(inner, Prefetches)
    first, second = batch(0), batch(1)
    wanted = [inner.hidden(*first), inner.hidden(*second)]
    teacher.prefetch(*first)
    found = [teacher.hidden(*first)]
    teacher.prefetch(*second)
    found.append(teacher.hidden(*second))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert inner.asked == 4 and (teacher.used, teacher.unused) == (2, 0)
    assert teacher.vocab_size == 99 and teacher.head().vocab_size == 99


def test_another_batch_is_computed_at_once(inner: Counting) -> None:
    teacher = PrefetchingTeacher(inner, CPU)
    ahead, other = batch(0), batch(1)
    teacher.prefetch(*ahead)
    assert torch.equal(teacher.hidden(*other), inner.hidden(*other))
    assert (teacher.used, teacher.unused) == (0, 1)
    # What was dropped does not come back.
    asked = inner.asked
    assert torch.equal(teacher.hidden(*ahead), inner.hidden(*ahead)) and inner.asked == asked + 2


def test_equal_tokens_in_another_tensor_are_another_batch(inner: Counting) -> None:
    teacher = PrefetchingTeacher(inner, CPU)
    (tokens_BT, documents_BT), (same_BT, equal_BT) = batch(0), batch(0)
    for other in ((same_BT, documents_BT), (tokens_BT, equal_BT)):
        teacher.prefetch(tokens_BT, documents_BT)
        teacher.hidden(*other)
    assert (teacher.used, teacher.unused) == (0, 2)


@pytest.mark.parametrize("which", [0, 1])
def test_a_batch_that_was_written_to_since_is_another(inner: Counting, which: int) -> None:
    teacher = PrefetchingTeacher(inner, CPU)
    given = batch(0)
    teacher.prefetch(*given)
    given[which][:, 12:] = 3
    assert torch.equal(teacher.hidden(*given), inner.hidden(*given))
    assert (teacher.used, teacher.unused) == (0, 1)


def test_one_batch_is_held_at_most(inner: Counting) -> None:
    teacher = PrefetchingTeacher(inner, CPU)
    first, second = batch(0), batch(1)
    teacher.prefetch(*first)
    teacher.prefetch(*second)
    teacher.hidden(*second)
    assert (teacher.used, teacher.unused) == (1, 1)


def test_auto_is_off_with_the_measured_gain() -> None:
    for device in ("cpu", "cuda"):
        found = choose_prefetch("auto", device=device)
        assert found.choice == "off" and not found.overridden
        assert found.override == "--set teacher.prefetch=on"
    assert "measured gain: 0.5 % of a step" in found.reason
    assert choose_prefetch("on", device="cuda").rejected[0][0] == "off"


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
def test_streams_change_no_bit(blocks: bool, tmp_path: Path) -> None:
    """Prefetched beside other work, many times, with weights in blocks too: their scratch is shared
    with the head, which is read right before."""
    device = torch.device("cuda")
    config = make_config(hidden_size=1024, num_hidden_layers=4, head_dim=128)
    path = write(tmp_path / "m.gguf", lively(config), "Q4_K")
    decoder = load_packed_decoder(path, torch.bfloat16, device)
    inner = QuantizedTeacher(decoder, "bf16")
    if not blocks:
        inner = DequantizedTeacher(lively(config).to(device, torch.bfloat16), "bf16")  # type: ignore[assignment]
    teacher = PrefetchingTeacher(inner, device)
    given = [(random_tokens(8, 200 + n).to(device), n) for n in range(12)]
    batches = [(tokens, torch.zeros_like(tokens)) for tokens, _ in given]
    wanted = [inner.hidden(*each).clone() for each in batches]
    left = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    found = []
    for index, each in enumerate(batches):
        found.append(teacher.hidden(*each))
        for first, slice_RE in teacher.head().slices(101, torch.bfloat16):
            left[first : first + len(slice_RE), :1024] += slice_RE
        left = left @ left
        if index + 1 < len(batches):
            teacher.prefetch(*batches[index + 1])
        left = torch.tanh(left)
    assert teacher.used == len(batches) - 1
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), index
