"""What a run gives up so that it fits in the memory it may take, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.decision import Decision
from engine.errors import BadInput
from engine.machine.reading import absent, measured
from engine.plan.device import CONTEXT_BYTES, limit_allocator, limited
from engine.plan.fit_in_memory import FEWER_CHUNK_ROWS, fit
from engine.plan.memory import MemoryPlan
from engine.spec import spec_from_dict
from evidence.bench.shapes import config_named
from tests.support.budgets import planned

GIB = 2**30
SPEC: dict[str, dict[str, Any]] = {
    "teacher": {"path": "teacher.gguf"},
    "student": {"config": "student.json"},
    "data": {"seq_len": 1024},
    "train": {"rows": 8},
    "eval": {"rows": 8},
}
TEACHER = config_named("qwen2.5-7b")
STUDENT = config_named("qwen2.5-0.5b")
USUAL = 2208
"""Tokens in a chunk of the fused loss where memory is plenty."""


def fitted(
    available_gib: float | None,
    *,
    kernels: str = "fused",
    **settings: Any,
) -> tuple[MemoryPlan, dict[str, Decision]]:
    """For a Q4_K_M 7B teacher and a 0.5B student, 8 x 1024 tokens in bf16 on a GPU; `settings` with `__` for
    the dot."""
    tree = {section: dict(values) for section, values in SPEC.items()}
    for key, value in settings.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    asked = tree["teacher"].get("backend", "auto")
    whole = planned(
        spec_from_dict(tree),
        teacher=TEACHER,
        teacher_packed_bytes=4_677_000_000,
        teacher__backend=asked,
        student=STUDENT,
        available=absent("Not Supported", "a test")
        if available_gib is None
        else measured(round(available_gib * GIB), "a test"),
        kernels__layers=kernels,
        student__attention="packed",
        teacher__attention="packed",
        loss__kernel="fused",
    )
    plan, decisions = fit(whole, stored_words=None)
    return plan, {decision.knob: decision for decision in decisions}


def given_up(found: tuple[MemoryPlan, Any]) -> tuple[str, bool, int]:
    plan, _ = found
    return plan.spec.teacher.backend, plan.checkpointing, plan.chunk_rows


def test_a_run_that_fits_is_left_as_it_is() -> None:
    for plenty in (141.0, None):
        assert given_up(fitted(plenty)) == ("dequantized", False, USUAL)


def test_smaller_chunks_are_given_up_first_then_dense_weights_then_kept_activations() -> None:
    """In GiB: 33.8 for everything, and each thing that is given up takes less."""
    wanted = [
        (35.0, ("dequantized", False, USUAL)),
        (32.5, ("dequantized", False, 1024)),
        (30.8, ("dequantized", False, 512)),
        (25.0, ("quantized", False, USUAL)),
        (23.0, ("quantized", False, 1024)),
        (21.5, ("quantized", False, 512)),
        (17.5, ("quantized", True, USUAL)),
    ]
    assert [(gib, given_up(fitted(gib))) for gib, _ in wanted] == wanted
    needs = [fitted(gib)[0].total_bytes for gib, _ in wanted]
    assert needs == sorted(needs, reverse=True)
    assert all(need <= gib * GIB for need, (gib, _) in zip(needs, wanted, strict=True))


@pytest.mark.parametrize("kernels, rows", [("fused", 1024), ("torch", 512)])
def test_24_gib_hold_the_exact_path_with_the_teacher_in_its_blocks(kernels: str, rows: int) -> None:
    """Torch's operations keep more activations than our kernels."""
    plan, said = fitted(24.0, kernels=kernels)
    assert given_up((plan, said)) == ("quantized", False, rows)
    assert plan.budget().fits
    assert set(said) == {"teacher.backend", "student.checkpointing", "loss.chunk_rows"}
    assert "of 24.0 GiB available" in said["teacher.backend"].reason
    chunks = said["loss.chunk_rows"]
    assert chunks.choice == str(rows) and f"with chunks of {USUAL} tokens" in chunks.reason
    assert "of 24.0 GiB available" in chunks.reason


def test_only_as_many_layers_recompute_as_it_takes() -> None:
    kept = {}
    for gib in (20.0, 19.0, 18.0):
        plan, said = fitted(gib)
        assert plan.checkpointing and plan.total_bytes <= gib * GIB
        kept[gib] = plan.kept_layers
        # One layer more would not fit.
        more = replace(plan, kept_layers=plan.kept_layers + 1)
        assert more.total_bytes > gib * GIB
        if plan.kept_layers:
            count = plan.student.num_hidden_layers - plan.kept_layers
            assert f"of the first {count} of 24 layers" in said["student.checkpointing"].reason
    assert kept[20.0] > kept[19.0] > kept[18.0] > 0
    asked, _ = fitted(20.0, student__checkpointing="on")
    assert asked.checkpointing and asked.kept_layers == 0


def test_what_the_settings_name_is_kept_whatever_it_needs() -> None:
    kept = fitted(
        17.0,
        teacher__backend="dequantized",
        student__checkpointing="off",
        loss__chunk_rows=USUAL,
    )
    assert given_up(kept) == ("dequantized", False, USUAL)
    assert all(decision.overridden for decision in kept[1].values())
    with pytest.raises(BadInput, match="expected a run that fits in"):
        kept[0].budget().refuse_if_too_big()


def test_a_run_that_fits_in_no_way_is_refused_with_what_it_needs_at_least() -> None:
    plan, _ = fitted(8.0)
    assert plan.spec.teacher.backend == "quantized" and plan.chunk_rows == min(FEWER_CHUNK_ROWS)
    with pytest.raises(BadInput, match="found one of"):
        plan.budget().refuse_if_too_big()


def test_chunks_that_are_small_already_are_no_decision() -> None:
    plan, said = fitted(141.0, data__seq_len=256, train__rows=1)
    assert plan.chunk_rows == 256 and "loss.chunk_rows" not in said


def test_a_limit_is_the_least_of_itself_and_of_what_is_there() -> None:
    there = measured(30 * GIB, "cuMemGetInfo")
    assert limited(there, 0, on_gpu=False) is there
    assert limited(there, 40 * GIB, on_gpu=False) is there
    less = limited(there, 24 * GIB, on_gpu=False)
    assert (less.number, less.source) == (24 * GIB, "memory.limit_gib")
    unknown = absent("Not Supported", "cuMemGetInfo")
    assert limited(unknown, 24 * GIB, on_gpu=False).number == 24 * GIB
    assert limited(unknown, 0, on_gpu=True) is unknown


def test_a_limit_on_a_gpu_is_of_the_whole_process_and_leaves_room_for_fragments() -> None:
    there = measured(30 * GIB, "cuMemGetInfo")
    less = limited(there, 24 * GIB, on_gpu=True)
    assert less.number == round(0.97 * (24 * GIB - CONTEXT_BYTES))
    assert less.source == "memory.limit_gib less 1.4 GiB for CUDA's context and fragments"
    assert limited(there, GIB // 2, on_gpu=True).number == 0
    # What is free is already without the context.
    assert limited(there, 32 * GIB, on_gpu=True) is there


@pytest.mark.alone
@pytest.mark.gpu
def test_a_limit_less_the_context_is_what_torch_gives_at_most() -> None:
    torch.cuda.empty_cache()
    try:
        limit_allocator(torch.cuda.memory_reserved() + CONTEXT_BYTES + GIB)
        torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
