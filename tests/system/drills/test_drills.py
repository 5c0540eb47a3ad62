"""Drills: short real runs with an incident, and what counts as naming it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from engine.catalogue import BY_ID
from engine.data.batches import Batches
from engine.drills import inputs, planting
from engine.drills.catalogue import DRILLS, drill
from engine.drills.naming import ALERT, CHECK, EXIT, REFUSAL, Expected, named_as, names_of
from engine.errors import BadInput, InternalError
from engine.log.events import Event, Judged, Note, RunFinished, StepDone, TrainerExited
from engine.log.view import RunView
from engine.watch.exit_cause import ExitState
from engine.watch.rules import RULES
from tests.support.paths import ROOT
from tests.support.run_events import example_of, fold_events, opened

START = 1_700_000_000.0


# The catalogue


def test_every_drill_has_a_name_of_its_own_and_the_code_that_makes_it_happen() -> None:
    ids = [one.id for one in DRILLS]
    assert len(set(ids)) == len(ids)
    assert all(hasattr(planting, one.id) for one in DRILLS if one.planted)
    assert all(hasattr(inputs, one.id) for one in DRILLS if one.altered)


def test_what_must_name_an_incident_exists() -> None:
    known = {
        CHECK: set(BY_ID["check"]),
        ALERT: {rule.id for rule in RULES},
        EXIT: {state.value for state in ExitState},
        REFUSAL: {"memory", "kernel", "checkpoint", "student.path", "teacher.cache"},
    }
    for one in DRILLS:
        assert one.what and one.happened and one.expected
        assert all(name.id in known[name.kind] for name in one.expected), one.id


def test_everything_that_is_planted_is_undone() -> None:
    take = Batches.take
    for one in DRILLS:
        if one.planted:
            with planting.plant(one.id):
                pass
    assert Batches.take is take


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean deadlock"):
        drill("deadlok")


def test_what_is_kept_of_drills_names_every_one_of_them_on_some_machine() -> None:
    kept = ROOT / "evidence" / "drills"
    levels: dict[str, set[str]] = {one.id: set() for one in DRILLS}
    kinds = ("cpu", "cpu-late", "cpu-pace", "cpu-incidents", "h200")
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
        example_of(Judged, by="check", id="no_token_leaks", level="pass"),
        example_of(Judged, by="check", id="weights_alive", level="unknown"),
        example_of(Judged, by="check", id="weights_alive", level="fail", text="zero"),
        example_of(StepDone, step=1),
        Note(level="warning", text="w"),
        RunFinished(state="failed", reason="memory: cpu — too much", exit_code=65, step=0),
        watch=(
            example_of(
                Judged, by="alert", level="fail", id="stalled", flip="--set a=b", from_unix_s=5.0
            ),
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
    alert = example_of(
        Judged, by="alert", level="fail", id="stalled", text="waits for a lock", flip="--set a=b"
    )
    said = names_of(view_of(watch=(alert,)))
    assert (named_as(said, [expected]) is not None) == met


# What is planted


def test_a_stale_body_in_the_cache_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from engine.kernels.dequantize_triton import variant
    from engine.kernels.registry import KernelRegistry
    from engine.quant.blocks import BLOCK_TYPES

    wanted = variant(BLOCK_TYPES["Q4_K"], torch.bfloat16)
    with (
        planting.stale_body(),
        pytest.raises(InternalError, match="found another: BLOCKS: expected"),
    ):
        KernelRegistry(arch=90).get_or_compile(wanted)


def test_a_leak_keeps_something_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planting, "LEAK_BYTES", 4096)
    from engine.spec import TrainSection
    from engine.train import trainer

    made: list[int] = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: (made.append(1), ones(*a, **k))[1])
    with planting.memory_leak():
        optimizer = trainer.build_optimizer(
            torch.nn.Linear(2, 2), TrainSection(), torch.device("cpu")
        )
        for _ in range(3):
            optimizer.step()
    assert len(made) >= 3
