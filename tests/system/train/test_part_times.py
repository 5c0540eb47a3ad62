"""What the parts of a step take beside what their arithmetic needs on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine.data.batches import Batch, epoch_order
from engine.log.events import PartsMeasured
from engine.machine.accounts import look
from engine.models.config import ModelConfig
from engine.train import machine_rates, part_times
from engine.train.machine_rates import KEPT, LEAST_KEPT, KeptRates, Rates, measure
from engine.train.part_times import (
    ALL_PARTS,
    FIRST,
    OF_STUDENT,
    PartTimes,
    _slow,
    arithmetic,
    evaluated_slowly,
)
from engine.train.prescribed_rows import PrescribedRows
from engine.train.roofline import flops_per_token
from engine.watch.active_alerts import RULES
from engine.watch.rules import pace
from tests.support.checked_runs import SEQ_LEN, Run, World, make_run, make_world
from tests.support.diagnosing import healthy_step
from tests.support.kit import Kit, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


def looked(run: Run) -> PartsMeasured:
    trainer = run.trainer
    teacher = trainer.teacher.decoder.config  # type: ignore[union-attr]
    prescribed = PrescribedRows(run.stream, SEQ_LEN, run.spec.train.seed)
    parts = PartTimes(
        trainer,
        trainer.student.config,
        teacher,
        SEQ_LEN,
        read=lambda position, rows: prescribed.rows(prescribed.ids_at(position, rows)),
    )
    found = [parts.look(step) for step in run.step(FIRST)]
    assert found[:-1] == [None] * (FIRST - 1) and found[-1] is not None
    return found[-1]


@contextmanager
def rates_of(rates: list[Rates]) -> Iterator[None]:
    """Give a machine these rates, one at each measurement."""
    before, part_times.measure = part_times.measure, lambda device, dtype: rates.pop(0)
    try:
        yield
    finally:
        part_times.measure = before


def test_the_flops_of_the_parts_are_those_of_a_step() -> None:
    student = ModelConfig.from_dict(tiny_config(), "student")
    teacher = ModelConfig.from_dict(tiny_config(hidden_size=48), "teacher")
    parts = arithmetic(student, teacher, tokens=640, seq_len=64, passes=2)
    # Activations may be recomputed, which the roofline leaves out.
    layers = 3 * parts["student"].flops + parts["teacher"].flops
    heads = parts["loss"].flops
    assert layers + heads == pytest.approx(640 * flops_per_token(student, teacher, 64))
    assert parts["backward"].flops == 3 * parts["student"].flops
    assert "teacher" not in arithmetic(student, None, tokens=640, seq_len=64, passes=1)


def test_a_machine_has_rates() -> None:
    rates = measure(CPU, torch.float32)
    assert rates.flops > 1e8 and rates.bytes > 1e7
    assert rates.seconds(rates.flops, rates.bytes) == pytest.approx(2.0)


def test_every_part_is_told_beside_what_it_needs(world: World) -> None:
    found = looked(make_run(world, train__steps=FIRST))
    assert found.step == FIRST and found.slow == []
    assert set(found.seconds) == set(found.needed) >= {"teacher", "student", "loss", "backward"}
    assert all(value > 0 for value in found.needed.values())


@pytest.mark.parametrize("rows_of_order", [0, 200_000])
def test_rows_that_take_many_times_what_reading_them_takes_are_named(
    world: World, monkeypatch: pytest.MonkeyPatch, rows_of_order: int
) -> None:
    run = make_run(world, train__steps=FIRST)
    take = run.trainer.batches.take

    def sorted_anew(position: int, rows: int) -> Batch:
        epoch_order(rows_of_order, 0, 0)
        return take(position, rows)

    monkeypatch.setattr(run.trainer.batches, "take", sorted_anew)
    found = looked(run)
    assert found.slow == (["data"] if rows_of_order else []), found


def test_a_part_is_accused_by_the_lower_of_two_rates(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that somebody else uses when it is measured again accuses nobody."""
    monkeypatch.setattr(part_times, "LEAST_S", 0.0)
    monkeypatch.setattr(part_times, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(part_times, "LAUNCH_S", {"cpu": 0.0})
    # Reading rows has no rates.
    monkeypatch.setattr(part_times, "DATA_TIMES", math.inf)
    fast, slow = Rates(1e18, 1e18), Rates(1e3, 1e3)
    with rates_of([fast, fast]):
        assert looked(make_run(world, train__steps=FIRST)).slow
    with rates_of([fast, slow]):
        found = looked(make_run(world, train__steps=FIRST))
    assert found.slow == [] and found.matmul_flops_per_s == slow.flops


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptRates:
    """A cache of its own, on a machine that nobody else uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(part_times, "others_want_the_cpus", lambda *since: False)
    return KeptRates(CPU, torch.float32)


def test_a_machine_is_told_beside_its_rates_in_earlier_runs_and_measured_twice_where_it_is_slower(
    world: World, alone: KeptRates
) -> None:
    usual, slow = Rates(1e12, 1e10), Rates(0.3e12, 1e10)
    for _ in range(LEAST_KEPT):
        assert alone.usual is None
        with rates_of([usual]):
            assert looked(make_run(world, train__steps=FIRST)).usual_flops_per_s is None
    assert alone.usual == usual
    for again, counts in ((slow, slow), (usual, usual)):
        with rates_of([slow, again]):
            found = looked(make_run(world, train__steps=FIRST))
        assert (found.usual_flops_per_s, found.usual_bytes_per_s) == (1e12, 1e10)
        assert found.matmul_flops_per_s == counts.flops


def test_rates_of_a_time_in_which_others_want_the_cpus_are_neither_kept_nor_judged(
    world: World, alone: KeptRates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(LEAST_KEPT):
        alone.add(Rates(1e12, 1e10))
    monkeypatch.setattr(part_times, "others_want_the_cpus", lambda *since: True)
    with rates_of([Rates(1e11, 1e9)]):
        assert looked(make_run(world, train__steps=FIRST)).usual_flops_per_s is None
    assert len(alone._read()) == LEAST_KEPT


@pytest.mark.parametrize(("wanted_s", "said"), [(0.1, False), (0.5, True)])
def test_others_want_the_cpus_that_threads_of_a_run_waited_for(
    monkeypatch: pytest.MonkeyPatch, wanted_s: float, said: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    before = look()
    assert before is not None
    (main,) = (tid for tid in before.threads if tid == os.getpid())
    one = before.threads[main]
    later = one._replace(cpu_s=one.cpu_s + 1.0, wanted_s=one.wanted_s + wanted_s)
    after = replace(before, threads={main: later})
    monkeypatch.setattr(machine_rates, "look", lambda: after)
    assert machine_rates.others_want_the_cpus(before) == said
    assert not machine_rates.others_want_the_cpus()


def test_what_was_usual_at_an_earlier_look_is_not_held_against_a_busy_machine(
    world: World, alone: KeptRates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(LEAST_KEPT):
        alone.add(Rates(1e12, 1e10))
    run = make_run(world, train__steps=FIRST)
    *_, last = run.step(FIRST)
    parts = PartTimes(run.trainer, run.trainer.student.config, None, SEQ_LEN)
    parts._begun_at = 0
    with rates_of([Rates(1e12, 1e10), Rates(1e11, 1e9)]):
        first = parts.look(last)
        monkeypatch.setattr(part_times, "others_want_the_cpus", lambda *since: True)
        later = parts.look(msgspec.structs.replace(last, step=10 * FIRST))
    assert first is not None and first.usual_flops_per_s == 1e12
    assert later is not None and later.usual_flops_per_s is later.usual_bytes_per_s is None


@pytest.mark.parametrize(
    "content", [None, "", "[1]", '{"rates": [[1]]}', '{"rates": [["a", "b"]]}']
)
def test_kept_rates_that_cannot_be_read_are_none(alone: KeptRates, content: str | None) -> None:
    for _ in range(LEAST_KEPT):
        alone.add(Rates(2.0, 3.0))
    assert alone.usual == Rates(2.0, 3.0)
    if content is None:
        alone._path.unlink()
    else:
        alone._path.write_text(content)
    assert alone.usual is None
    for _ in range(KEPT + 2):
        alone.add(Rates(4.0, 5.0))
    assert alone.usual == Rates(4.0, 5.0) and len(alone._read()) == KEPT


def test_a_cache_that_cannot_be_written_keeps_nothing(alone: KeptRates) -> None:
    alone._path.parent.parent.mkdir()
    alone._path.parent.touch()
    alone.add(Rates(2.0, 3.0))
    assert alone.usual is None


@pytest.mark.parametrize(("waits", "judged"), [(OF_STUDENT, ["teacher"]), (ALL_PARTS, None)])
def test_of_ranks_the_parts_are_judged_in_which_none_waits_for_another(
    world: World, waits: frozenset[str], judged: list[str] | None
) -> None:
    run = make_run(world, train__steps=FIRST)
    *before, last = run.step(FIRST)
    teacher = run.trainer.teacher.decoder.config  # type: ignore[union-attr]
    run.trainer.ranks = replace(run.trainer.ranks, world=2)  # type: ignore[type-var]
    parts = PartTimes(run.trainer, run.trainer.student.config, teacher, SEQ_LEN, waits)
    parts._begun_at = 0
    assert [parts.look(step) for step in before] == [None] * (FIRST - 1)
    found = parts.look(last)
    if judged is None:
        assert found is None
        return
    assert found is not None and [*found.seconds] == [*found.needed] == judged
    # Its own half of the tokens.
    rates = Rates(found.matmul_flops_per_s, found.copy_bytes_per_s)
    need = arithmetic(
        run.trainer.student.config, teacher, (last.tokens or 0) // 2, SEQ_LEN, passes=1
    )["teacher"]
    launching_s = need.launches * part_times.LAUNCH_S["cpu"]
    wanted = rates.seconds(need.flops, need.moved_bytes) + launching_s
    assert found.needed["teacher"] == pytest.approx(wanted)


def test_the_rules_say_the_limits_that_the_trainer_has() -> None:
    assert part_times.SLOWER == pace.SLOW_SHARE and LEAST_KEPT == 3
    (rule,) = (one for one in RULES if one.id == "slow_part")
    assert rule.threshold.startswith(f"{part_times.TIMES:g} times")
    assert part_times.LEAST_SHARE == 1 / 10 and "a tenth of the step" in rule.threshold


def test_a_run_has_them_in_its_log(whole: Path) -> None:
    assert b'"kind":"parts_measured"' in (whole / "events.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("subject", "seconds", "busy", "told"),
    [
        ("student", 3.9, False, False),
        ("student", 5.0, False, True),
        ("student", 5.0, True, False),
        ("teacher", 5.0, False, False),
        ("teacher", 13.0, False, True),
        ("untrained", 5.0, False, True),
    ],
)
def test_an_evaluation_that_takes_many_times_what_a_step_does_is_told(
    monkeypatch: pytest.MonkeyPatch, subject: str, seconds: float, busy: bool, told: bool
) -> None:
    monkeypatch.setattr(part_times, "others_want_the_cpus", lambda *since: busy)
    phases = {"student": 0.5, "teacher": 2.5, "loss": 0.5, "backward": 9.0}
    step = healthy_step(1, tokens=1000, phases=phases)
    assert bool(evaluated_slowly(step, subject, seconds, 1000)) == told
    assert not evaluated_slowly(None, subject, seconds, 1000)


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        # As each other: the machine is slow.
        ({"student": 5.0, "teacher": 5.0, "backward": 5.0, "loss": 6.0}, []),
        ({"student": 1.2, "teacher": 1.2, "backward": 1.0, "loss": 5.0}, ["loss"]),
        ({"student": 1.2, "teacher": 3.8, "backward": 1.0, "loss": 1.2}, []),
        ({"student": 3.0, "teacher": 3.0, "backward": 3.0, "loss": 8.5}, []),
        ({"student": 3.0, "teacher": 3.0, "backward": 3.0, "loss": 9.5}, ["loss"]),
        # One other says nothing of the machine.
        ({"student": 1.0, "loss": 9.0}, []),
        ({"student": 1.0, "loss": 11.0}, ["loss"]),
    ],
)
def test_a_part_is_slow_beside_the_others_or_by_itself(
    times: dict[str, float], slow: list[str]
) -> None:
    needed = dict.fromkeys(times, 0.1)
    seconds = {part: 0.1 * each for part, each in times.items()}
    assert _slow(needed, seconds, sum(seconds.values())) == slow
