"""The fused form of the loss: on a GPU, against float64 on the same numbers and against the eager form;
and what it launches, which needs none. Its arithmetic is tested in `interpreted/test_kd_loss.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from engine.divergences import fused_divergences
from engine.kernels import dense_loss
from engine.kernels.compiler import Variant
from engine.kernels.registry import pointer_type
from engine.loss.chunks import LossKernel, default_chunk_rows
from engine.loss.kd_loss import (
    LARGEST_DZ_SUM,
    LOWEST_DIVERGENCE,
    LossTerms,
    distillation_loss,
)
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.head import Head, PackedHead
from engine.models.packed import reserve
from tests.support.budgets import (
    DEMO_STUDENT,
    DEMO_TEACHER,
    PLENTY,
    SEVEN_B,
    SMALL,
    budget_of,
    item,
    planned,
    spec_of,
)
from tests.support.driven_runs import drive

# Shapes: N tokens, V student vocabulary, W teacher vocabulary, D student width, E teacher width

SHAPES = [
    (257, 4099, 4160, 64, 96),
    (1, 7, 9, 32, 48),
    (33, 16385, 16385, 96, 64),
    (300, 512, 512, 8, 8),
]


class Case:
    def __init__(
        self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str = "cuda"
    ) -> None:
        n, v, w, d, e = shape
        random = torch.Generator().manual_seed(sum(shape))

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=random).to(device, dtype)

        self.hidden_ND = normal(n, d).requires_grad_()
        self.head_VD = (normal(v, d) * 0.3).requires_grad_()
        self.teacher_NE, self.teacher_WE = normal(n, e), normal(w, e) * 0.3
        self.labels_N = torch.randint(0, v, (n,), generator=random)
        self.labels_N[1::3] = -100
        self.labels_N[0] = v - 1

    def run(
        self,
        kernel: LossKernel,
        *,
        alpha: float = 0.3,
        temperature: float = 2.0,
        divergence: str = "forward_kl",
        beta: float = 0.2,
        wide: bool = False,
        head: Head | None = None,
        chunk_rows: int | None = 100,
    ) -> tuple[LossTerms, Tensor, Tensor]:
        def of(x: Tensor) -> Tensor:
            return x.detach().double() if wide else x.detach()

        hidden_ND, head_VD = of(self.hidden_ND).requires_grad_(), of(self.head_VD).requires_grad_()
        terms = distillation_loss(
            hidden_ND,
            head_VD,
            of(self.teacher_NE) if alpha != 1 else None,
            (of(self.teacher_WE) if head is None else head) if alpha != 1 else None,
            self.labels_N,
            alpha=alpha,
            temperature=temperature,
            denominator=float((self.labels_N >= 0).sum()),
            chunk_rows=chunk_rows,
            divergence=divergence,
            beta=beta,
            kernel=kernel,
        )
        dh_ND, dw_VD = torch.autograd.grad(terms.loss, (hidden_ND, head_VD))
        return terms, dh_ND, dw_VD


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "divergence", "alpha", "temperature"),
    [
        (BF16, "forward_kl", 0.3, 2.0),
        (BF16, "forward_kl", 0.0, 1.0),
        (BF16, "forward_kl", 1.0, 2.0),
        (BF16, "reverse_kl", 0.3, 2.5),
        (FP16, "forward_kl", 0.3, 2.0),
        (FP32, "forward_kl", 0.3, 2.5),
        (FP32, "reverse_kl", 0.0, 4.0),
        (BF16, "jsd", 0.3, 2.0),
        (FP32, "jsd", 0.0, 2.5),
    ],
)
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    divergence: str,
    alpha: float,
    temperature: float,
) -> None:
    case = Case(shape, dtype)
    setting: dict[str, Any] = dict(alpha=alpha, temperature=temperature, divergence=divergence)
    wanted, *slopes = case.run("eager", wide=True, **setting)
    found, *mine = case.run("fused", **setting)
    for name in ("loss", "ce", "kd", "agreement"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert float(a.detach()) == pytest.approx(float(b.detach()), rel=1e-5, abs=2e-6), name
    # dz, dH and dW are rounded to the dtype, once each
    tolerance = {torch.bfloat16: 5e-3, torch.float16: 8e-4, torch.float32: 1e-5}[dtype]
    for name, a, b in zip(("dH", "dW"), mine, slopes, strict=True):
        assert error(a, b) < tolerance, name
    if found.lowest_kl is not None:
        assert float(found.lowest_kl) >= LOWEST_DIVERGENCE
    assert found.largest_dz_sum is not None
    assert float(found.largest_dz_sum) <= LARGEST_DZ_SUM * max(1, temperature)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("temperature", "divergence"),
    [
        (1.0, "forward_kl"),
        (2.0, "forward_kl"),
        (3.0, "forward_kl"),
        (2.0, "reverse_kl"),
        (2.0, "jsd"),
    ],
)
def test_a_student_equal_to_its_teacher_has_divergence_and_gradient_exactly_zero(
    temperature: float, divergence: str
) -> None:
    case = Case((64, 9001, 9001, 64, 64), torch.bfloat16)
    case.teacher_NE, case.teacher_WE = case.hidden_ND.detach(), case.head_VD.detach()
    terms, dh_ND, dw_VD = case.run(
        "fused", alpha=0.0, temperature=temperature, divergence=divergence
    )
    assert terms.kd is not None and float(terms.kd) == 0
    assert terms.agreement is not None and float(terms.agreement) == 1
    assert float(dh_ND.abs().max()) == 0 and float(dw_VD.abs().max()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_non_finite_logit_reaches_the_loss(value: float, side: str) -> None:
    case = Case((16, 9001, 9001, 64, 64), torch.bfloat16)
    with torch.no_grad():
        (case.hidden_ND if side == "student" else case.teacher_NE)[3, 2] = value
    assert not torch.isfinite(case.run("fused")[0].loss)


@pytest.mark.gpu
def test_the_same_call_gives_the_same_bits() -> None:
    case = Case((500, 30011, 30011, 64, 96), torch.bfloat16)
    once, again = case.run("fused"), case.run("fused")
    assert torch.equal(once[0].loss, again[0].loss)
    assert torch.equal(once[1], again[1]) and torch.equal(once[2], again[2])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    case = Case((257, 4099, 4160, 64, 96), torch.bfloat16)
    case.run("fused")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run("fused")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_head_in_blocks_teaches_what_its_values_teach() -> None:
    from engine.kernels.linear import Scratch
    from engine.quant.blocks import BLOCK_TYPES
    from engine.quant.planes import pack
    from evidence.bench.random_weights import random_blocks

    case = Case((130, 3000, 3008, 64, 512), torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(0)
    weight = random_blocks(BLOCK_TYPES["Q6_K"], (3008, 512), generator)
    scratch = Scratch(torch.device("cuda"), torch.bfloat16, limit_bytes=512 * 512 * 2)
    packed = pack(weight)
    reserve(scratch, packed, whole=False)
    case.teacher_WE = weight.dequantize().to(torch.bfloat16)
    dense, sliced = case.run("fused"), case.run("fused", head=PackedHead(packed, scratch))
    assert error(sliced[0].loss, dense[0].loss) < 1e-5
    assert error(sliced[1], dense[1]) < 2e-3 and error(sliced[2], dense[2]) < 2e-3


@given(
    vocabulary=st.integers(2, 40000),
    rows=st.integers(1, 9),
    dtype=st.sampled_from(dense_loss.DTYPES),
    alpha=st.sampled_from([0.0, 0.4, 1.0]),
    temperature=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    divergence=st.sampled_from(fused_divergences()),
)
@settings(max_examples=25, deadline=None)
def test_warm_up_knows_each_variant_that_is_launched(
    vocabulary: int,
    rows: int,
    dtype: torch.dtype,
    alpha: float,
    temperature: float,
    divergence: str,
) -> None:
    launched: set[Variant] = set()

    def note(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        types = [pointer_type(x.dtype) for x in arguments if isinstance(x, Tensor)]
        assert types == [type_ for type_ in variant.types if type_.startswith("*")]
        assert len(arguments) == len(variant.types)
        launched.add(variant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_loss, "launch", note)
        # A CPU multiplies in fp32 whatever it is given; the kernel is told the dtype of a GPU.
        rows_of = dense_loss.LossRows.empty(
            rows, vocabulary, torch.device("cpu"), dense_loss.tuning_of(divergence)
        )
        z_CV, t_CV, dz_CV = (
            dense_loss.row_buffer(rows, vocabulary, kind, torch.device("cpu"))
            for kind in (torch.float32, torch.float32, dtype)
        )
        rows_of.differentiate(
            z_CV,
            t_CV if alpha < 1 else None,
            dz_CV,
            torch.zeros(rows, dtype=torch.int64),
            0,
            alpha=alpha,
            temperature=temperature,
            divergence=divergence,
        )
    warmed = dense_loss.variants(
        vocabulary, [dtype], teacher=alpha < 1, divergence=divergence, temperature=temperature
    )
    assert launched <= set(warmed) and launched


# Its memory


def test_the_plan_knows_the_buffers_of_each_form() -> None:
    spec = spec_of(train__rows=10**6)
    plan = planned(spec, teacher=None, student=SMALL, available=PLENTY, loss__kernel="fused")
    assert plan.chunk_rows == default_chunk_rows("cuda", SMALL.vocab_size, fused=True)
    few = spec_of(train__rows=4, data__seq_len=64)
    logits = SMALL.vocab_size * 256
    for divergence, fused, each in (
        ("forward_kl", True, 4 * 2 + 2),
        ("forward_kl", False, 4 * 4 + 2),
        ("jsd", True, 4 * 2 + 2),
        ("jsd", False, 4 * 6 + 2),
    ):
        spec = spec_of(train__rows=4, data__seq_len=64, loss__divergence=divergence)
        budget = budget_of(spec, SMALL, SEVEN_B, loss__kernel="fused" if fused else "eager")
        assert item(budget, "loss workspace") == each * logits, (divergence, fused)
    budget = budget_of(few, SMALL, None, loss__kernel="fused")
    assert item(budget, "loss workspace") == (4 + 2) * logits
    # Two buffers of one chunk, and dz of four, or of all there are.
    for rows, held in ((64, 256), (32, 128), (128, 256)):
        spec = spec_of(train__rows=4, data__seq_len=64, loss__chunk_rows=rows)
        budget = budget_of(spec, SMALL, SEVEN_B, loss__kernel="fused")
        assert item(budget, "loss workspace") == SMALL.vocab_size * (8 * rows + 2 * held)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("student", "teacher", "precision", "changes"),
    [
        (DEMO_STUDENT, DEMO_TEACHER, "fp32", dict(train__rows=16, data__seq_len=512)),
        (SMALL, replace(SEVEN_B, num_hidden_layers=2), "bf16", dict(train__rows=4)),
        (SMALL, None, "bf16", dict(train__rows=4)),
    ],
    ids=["demo-fp32", "0.5B-7B-wide", "0.5B-ce"],
)
def test_a_run_with_the_fused_loss_takes_what_was_predicted(
    student: ModelConfig, teacher: ModelConfig | None, precision: str, changes: dict[str, object]
) -> None:
    spec = spec_of(teacher is not None, loss__kernel="fused", **changes)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    drive(
        spec,
        on_gpu(student, torch.float32),
        None if teacher is None else on_gpu(teacher, dtype),
        "cuda",
        precision,
    )
    peak = torch.cuda.max_memory_allocated() - before
    budget = budget_of(
        spec,
        student,
        teacher,
        teacher__precision=precision,
        student__precision=precision,
        shares_heads=torch.cuda.get_device_capability()[0] == 9,
        loss__kernel="fused",
    )
    assert peak == pytest.approx(budget.total_bytes, rel=0.1), "\n".join(budget.lines())


def on_gpu(shape: ModelConfig, dtype: torch.dtype) -> Decoder:
    with torch.device("cuda"):
        return Decoder(shape).to(dtype)
