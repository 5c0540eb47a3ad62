"""Drills: short real runs with a planted defect, and what counts as naming it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from engine.checks.catalogue import ABOUT
from engine.data.batches import Batches
from engine.drills import defects_host, defects_process
from engine.drills.catalogue import DRILLS, OTHERS, drill, planted
from engine.drills.defects_kernels import kernel_key_deaf, stale_body
from engine.drills.defects_training import DEFECTS
from engine.drills.naming import ALERT, CHECK, EXIT, REFUSAL, Expected, named_as, names_of
from engine.drills.runs import DEMO
from engine.errors import BadInput, InternalError
from engine.log.events import (
    AlertRaised,
    Checked,
    Event,
    Note,
    RunFinished,
    StepDone,
    TrainerExited,
)
from engine.log.view import RunView
from engine.models.decoder import AttentionInputs
from engine.teachers.build import build_teacher
from engine.watch.exit_cause import ExitState
from engine.watch.rules import RULES
from tests.support.paths import ROOT
from tests.support.run_events import example_of, fold_events, opened

START = 1_700_000_000.0
ISSUE = (
    *("host_operators", "identical_teacher", "random_teacher", "zero_teacher"),
    *("rotary_neighbours", "qkv_bias_missing", "norm_eps_fixed", "causal_mask_missing"),
    *("labels_unshifted", "labels_shifted_twice", "teacher_ids_differ", "last_row_only"),
    *("t_squared_missing", "denominator_per_pass", "rate_lost", "frozen_embedding"),
    *("kernel_key_deaf", "stale_body", "small_checkpoint", "plan_that_cannot_fit"),
    *("killed_from_outside", "memory_leak", "degenerate_batch", "padding_trained"),
    *("loader_stalls", "deadlock", "cuda_wait", "optimizer_lost", "position_lost"),
)


# The catalogue


def test_every_defect_that_must_be_drilled_is() -> None:
    ids = [one.id for one in DRILLS]
    assert len(set(ids)) == len(ids) and set(ISSUE) <= set(ids)
    assert {one.id for one in (*DEFECTS, *OTHERS)} <= set(ids)


def test_what_must_name_a_defect_exists() -> None:
    known = {
        CHECK: set(ABOUT),
        ALERT: {rule.id for rule in RULES},
        EXIT: {state.value for state in ExitState},
        REFUSAL: {"memory", "kernel"},
    }
    for one in DRILLS:
        assert one.what and one.happened and one.expected
        assert all(name.id in known[name.kind] for name in one.expected), one.id


def test_every_planted_defect_can_be_planted_and_is_undone() -> None:
    take = Batches.take
    for one in DRILLS:
        if one.planted:
            with planted(one.id).plant():
                pass
    assert Batches.take is take


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean deadlock"):
        drill("deadlok")


def test_what_is_kept_of_drills_names_every_one_of_them_on_some_machine() -> None:
    kept = ROOT / "evidence" / "drills"
    levels: dict[str, set[str]] = {one.id: set() for one in DRILLS}
    kinds = (
        "cpu",
        "cpu-steps",
        "cpu-late",
        "cpu-data",
        "cpu-files",
        "cpu-pace",
        "h200",
    )
    for file in (f"{kind}.json" for kind in kinds):
        for row in json.loads((kept / file).read_text())["drills"]:
            # Some have no drill any more.
            levels.setdefault(row["drill"], {"pass"}).add(row["level"])
    assert {id for id, seen in levels.items() if "pass" not in seen or "fail" in seen} == set()


# What counts as a name


def view_of(*events: Event, watch: tuple[Event, ...] = ()) -> RunView:
    """A run whose trainer wrote `events` and whose supervisor wrote `watch` after that."""
    view = RunView()
    for source, found in (("events", events), ("watch", watch)):
        lines = [opened(START), *found] if found else []
        begin = 100.0 if source == "watch" else 0.0
        timed = [
            msgspec.structs.replace(event, seq=seq, t_s=begin + seq if seq else 0.0)
            for seq, event in enumerate(lines)
        ]
        view = fold_events(view, source, timed)  # type: ignore[arg-type]
    return view


def test_failed_checks_alerts_refusals_and_exits_are_names_and_nothing_else_is() -> None:
    view = view_of(
        example_of(Checked, id="no_token_leaks", level="pass"),
        example_of(Checked, id="eval_baseline", level="unknown"),
        example_of(Checked, id="weights_alive", level="fail", reason="zero"),
        example_of(StepDone, step=1),
        Note(level="warning", text="w"),
        RunFinished(state="failed", reason="memory: cpu — too much", exit_code=65, step=0),
        watch=(
            example_of(AlertRaised, id="stalled", flip="--set a=b", from_unix_s=5.0),
            example_of(TrainerExited, state="KILLED_EXTERNAL"),
        ),
    )
    assert [n.name for n in names_of(view)] == [
        "check weights_alive",
        "refusal memory",
        "alert stalled",
        "exit KILLED_EXTERNAL",
    ]


@pytest.mark.parametrize("state", ["COMPLETED", "TERMINATED", "INTERRUPTED", "FAILED", "BAD_INPUT"])
def test_an_end_that_was_asked_for_or_explained_is_no_name(state: str) -> None:
    assert names_of(view_of(watch=(example_of(TrainerExited, state=state),))) == []


def test_a_run_that_checks_ended_is_named_by_the_checks_alone() -> None:
    end = RunFinished(state="failed", reason="check weights_alive: zero", exit_code=1, step=0)
    assert names_of(view_of(end)) == []


@pytest.mark.parametrize(
    ("expected", "met"),
    [
        (Expected(kind=ALERT, id="stalled"), True),
        (Expected(kind=ALERT, id="stalled", text="for a lock", flip="a=b"), True),
        (Expected(kind=CHECK, id="stalled"), False),
        (Expected(kind=ALERT, id="gpu_idle"), False),
        (Expected(kind=ALERT, id="stalled", text="in a driver"), False),
        (Expected(kind=ALERT, id="stalled", flip="c=d"), False),
    ],
)
def test_a_name_must_be_of_its_kind_and_say_what_it_must(expected: Expected, met: bool) -> None:
    alert = example_of(AlertRaised, id="stalled", title="waits for a lock", flip="--set a=b")
    said = names_of(view_of(watch=(alert,)))
    assert (named_as(said, [expected]) is not None) == met


# Defects that no check of `test_checks_defects` covers


def test_operators_on_the_host_answer_what_the_teacher_answers() -> None:
    tokens_BT = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    documents_BT = (torch.arange(24) >= 9).long()[None].repeat(2, 1)

    def answer() -> torch.Tensor:
        teacher, _ = build_teacher(
            DEMO / "teacher.gguf",
            backend="quantized",
            precision="fp32",
            kernel="auto",
            device=torch.device("cpu"),
            student_vocab=4096,
        )
        return teacher.hidden(tokens_BT, documents_BT)

    sound = answer()
    with defects_host.host_operators():
        slow = answer()
    torch.testing.assert_close(slow, sound, rtol=1e-4, atol=1e-4)
    assert not torch.equal(slow, sound)


def test_operators_on_the_host_know_packed_documents() -> None:
    # Two rows of six tokens: documents begin at 0 and 4, and at 0 and 1 of the second row.
    starts = torch.tensor([0, 4, 6, 7, 12], dtype=torch.int32)
    packed = AttentionInputs(torch.empty(0), torch.empty(0), None, starts, torch.empty(5))
    seen_TT = defects_host._mask(packed, 1, 6) == 0
    assert seen_TT.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        *([0, *([1] * n), *([0] * (5 - n))] for n in range(1, 6)),
    ]
    causal = defects_host._mask(AttentionInputs(torch.empty(0), torch.empty(0), None), 0, 6) == 0
    assert causal.equal(torch.ones(6, 6).tril().bool())


def test_a_deaf_key_takes_two_products_for_one() -> None:
    pytest.importorskip("triton")
    from engine.kernels.small_m import variants
    from engine.quant.blocks import BLOCK_TYPES

    def distinct() -> int:
        found = [
            variant
            for bias in (None, torch.bfloat16)
            for variant in variants(
                BLOCK_TYPES["Q4_K"], 256, 256, torch.bfloat16, bias, arch=90, m=[48]
            )
        ]
        return len(set(found)) - len({variant.constants for variant in found})

    sound = distinct()
    with kernel_key_deaf():
        assert distinct() < sound


def test_a_stale_body_in_the_cache_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from engine.kernels.dequantize_triton import variant
    from engine.kernels.registry import KernelRegistry
    from engine.quant.blocks import BLOCK_TYPES

    wanted = variant(BLOCK_TYPES["Q4_K"], torch.bfloat16)
    with stale_body(), pytest.raises(InternalError, match="found another: BLOCKS: expected"):
        KernelRegistry(arch=90).get_or_compile(wanted)


def test_a_leak_keeps_something_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defects_process, "LEAK_BYTES", 4096)
    from engine.spec import TrainSection
    from engine.train import trainer

    made: list[int] = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: (made.append(1), ones(*a, **k))[1])
    with defects_process.memory_leak():
        optimizer = trainer.build_optimizer(
            torch.nn.Linear(2, 2), TrainSection(), torch.device("cpu")
        )
        for _ in range(3):
            optimizer.step()
    assert len(made) >= 3
