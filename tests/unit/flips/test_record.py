"""The flip folder, the class of a verdict, controls, the device lock and the words: no run is needed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadInput, RunLogError
from engine.flips import controls, surroundings, text
from engine.flips.controls import SAME, SLOW, Control
from engine.flips.flip import why_no_more
from engine.flips.flip_folder import (
    create_flip,
    find_flips,
    open_flip,
    read_pairs,
    read_verdict,
)
from engine.flips.judge import conclude, interval_of, judge
from engine.flips.pair import Pair
from engine.flips.plan import Change, Plan
from engine.flips.surroundings import Surroundings, device_lock, find_surroundings
from engine.flips.verdicts import VERDICTS
from engine.verdict import Level, Verdict
from tests.support.flip_pairs import hang, incomplete, outcome, pair, plan, timed

HERE = Surroundings(machine="m", device="cpu", device_name="the CPU", engine="1")
PASSED = {name: Verdict(Level.PASS, "yes") for name in ("AA", "positive")}
FASTER = [-0.301, -0.299, -0.3, -0.302]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def concluded(
    folder: Path,
    pairs: list[Pair],
    *,
    made: Plan | None = None,
    answers: dict[str, Verdict] = PASSED,
    edit: bool = False,
    engine: str = "1",
) -> dict[str, Any]:
    made = made or plan()
    flip = create_flip(folder, made, HERE)
    for one in pairs:
        flip.add(one)
    if edit:
        (folder / "plan.json").write_text(replace(made, margin=0.2).to_json())
    judgement = judge(made, flip.pairs, "no more pairs")
    assert judgement is not None
    here = replace(HERE, engine=engine)
    verdict = conclude(made, flip, judgement, answers, here, interrupted=False, cost_s=1.0)
    flip.write(verdict)
    flip.close()
    return verdict


def test_everything_proved_and_both_controls_passed_is_measured(tmp_path: Path) -> None:
    verdict = concluded(tmp_path / "f", timed(FASTER))
    assert (verdict["verdict"], verdict["class"], verdict["why_grade"]) == (
        "B_FASTER",
        "measured",
        [],
    )
    assert verdict["prereg_sha"] == plan().sha256
    assert verdict["effect"] == pytest.approx(0.74, abs=0.01)


@pytest.mark.parametrize("name", ["AA", "positive"])
@pytest.mark.parametrize("level", [Level.UNKNOWN, Level.FAIL])
def test_without_a_control_a_verdict_is_a_screen(tmp_path: Path, name: str, level: Level) -> None:
    verdict = concluded(
        tmp_path / "f", timed(FASTER), answers=PASSED | {name: Verdict(level, "planted")}
    )
    assert verdict["class"] == "screen" and "planted" in verdict["why_grade"][0]


@pytest.mark.parametrize("name", ["flipped", "equal", "parity"])
def test_without_a_proof_a_verdict_is_a_screen(tmp_path: Path, name: str) -> None:
    pairs = timed(FASTER)
    pairs[0] = replace(
        pairs[0], proofs={**pairs[0].proofs, name: Verdict(Level.UNKNOWN, "planted")}
    )
    assert concluded(tmp_path / "f", pairs)["class"] == "screen"


def test_parity_that_is_not_asked_keeps_nothing_from_being_measured(tmp_path: Path) -> None:
    pairs = [replace(p, proofs={**p.proofs, "parity": None}) for p in timed(FASTER)]
    verdict = concluded(tmp_path / "f", pairs)
    assert verdict["class"] == "measured" and verdict["controls"]["parity"]["level"] == "not asked"


def test_a_plan_edited_after_the_start_makes_the_verdict_exploratory(tmp_path: Path) -> None:
    verdict = concluded(tmp_path / "f", timed(FASTER), edit=True)
    assert verdict["class"] == "exploratory" and "plan.json was changed" in verdict["why_grade"][0]


def test_another_engine_that_went_on_makes_the_verdict_exploratory(tmp_path: Path) -> None:
    assert concluded(tmp_path / "f", timed(FASTER), engine="2")["class"] == "exploratory"


@pytest.mark.parametrize(
    ("pairs", "level"),
    [
        (timed(FASTER), Level.PASS),
        ([pair(1, hang("A"), outcome("B"))], Level.PASS),
        (timed(FASTER[:2]), Level.UNKNOWN),
        ([pair(1, outcome("A"), outcome("B"), parity=Verdict(Level.FAIL, "no"))], Level.FAIL),
        ([pair(1, outcome("A"), outcome("B"), flipped=Verdict(Level.FAIL, "no"))], Level.UNKNOWN),
    ],
)
def test_a_verdict_answers_as_everything_else_does(
    tmp_path: Path, pairs: list[Pair], level: Level
) -> None:
    assert VERDICTS[concluded(tmp_path / "f", pairs)["verdict"]].level == level


def test_a_hang_is_a_screen_with_a_bound_and_no_effect(tmp_path: Path) -> None:
    verdict = concluded(tmp_path / "f", [pair(1, hang("A"), outcome("B"))])
    assert (verdict["verdict"], verdict["class"]) == ("A_DID_NOT_COMPLETE", "screen")
    assert verdict["effect"] is None and verdict["interval"] == [None, None]
    assert verdict["raw_runs"][0]["value"] is None
    assert "1 pair alone" in verdict["why_grade"][0]


def test_a_crash_in_every_one_of_five_pairs_is_measured_without_timing_controls(
    tmp_path: Path,
) -> None:
    pairs = [pair(n, outcome("A"), incomplete("B", "crashed")) for n in range(1, 6)]
    none = {name: Verdict(Level.UNKNOWN, "none") for name in PASSED}
    assert concluded(tmp_path / "f", pairs, answers=none)["class"] == "measured"


def test_an_inconclusive_flip_says_how_many_pairs_would_decide(tmp_path: Path) -> None:
    verdict = concluded(tmp_path / "f", timed([0.2, -0.1, 0.15, -0.12]))
    assert verdict["verdict"] == "INCONCLUSIVE" and verdict["pairs_needed"] > 4


def test_others_on_the_gpu_are_named_and_make_it_a_screen(tmp_path: Path) -> None:
    pairs = timed(FASTER)
    pairs[2] = replace(pairs[2], a=replace(pairs[2].a, gpu_used_before_bytes=8 * 2.0**30))
    verdict = concluded(tmp_path / "f", pairs)
    assert (
        verdict["class"] == "screen"
        and "8.0 GiB of its memory were in use" in verdict["why_grade"][0]
    )


def test_pairs_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    pairs = [
        *timed([0.1]),
        replace(
            pair(2, outcome("A"), incomplete("B", "crashed")), proofs={"flipped": None} | PROOFS
        ),
    ]
    concluded(tmp_path / "f", pairs)
    assert read_pairs(tmp_path / "f") == pairs
    first = json.loads((tmp_path / "f" / "pairs.jsonl").read_text().splitlines()[0])
    assert first["plan_sha256"] == plan().sha256 and first["order_seed"] == 1


PROOFS: dict[str, Any] = {"equal": Verdict(Level.UNKNOWN, "?"), "parity": None}


def test_a_torn_last_line_is_cut_off_and_the_pair_made_again(tmp_path: Path) -> None:
    concluded(tmp_path / "f", timed(FASTER))
    log = tmp_path / "f" / "pairs.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"number": 5, "a": {"ar')
    assert len(read_pairs(tmp_path / "f")) == 4, "a viewer reads on past it"
    flip, _ = open_flip(tmp_path / "f")
    flip.close()
    assert log.read_bytes() == whole


def test_a_flip_has_one_writer(tmp_path: Path) -> None:
    flip = create_flip(tmp_path / "f", plan(), HERE)
    with pytest.raises(RunLogError, match="one that is alive"):
        open_flip(tmp_path / "f")
    flip.close()
    with pytest.raises(BadInput, match="one that exists"):
        create_flip(tmp_path / "f", plan(), HERE)


def test_an_interrupted_run_keeps_its_folder_and_the_next_try_has_its_own(tmp_path: Path) -> None:
    flip = create_flip(tmp_path / "f", plan(), HERE)
    assert flip.run_folder(3, "B").name == "03-b"
    flip.run_folder(3, "B").mkdir(parents=True)
    assert flip.run_folder(3, "B").name == "03-b.2"
    flip.close()


def test_flips_are_listed_and_those_of_controls_are_not(tmp_path: Path) -> None:
    concluded(tmp_path / "flips" / "one", timed(FASTER))
    concluded(tmp_path / "flips" / "one" / "controls" / "same", timed(FASTER))
    assert find_flips(tmp_path / "flips") == [tmp_path / "flips" / "one"]
    assert find_flips(tmp_path / "nowhere") == []
    # A folder that was half copied is the oldest, and keeps none of the others from being listed.
    (tmp_path / "flips" / "two").mkdir()
    (tmp_path / "flips" / "two" / "pairs.jsonl").touch()
    assert [path.name for path in find_flips(tmp_path / "flips")] == ["one", "two"]
    fields = read_verdict(tmp_path / "flips" / "one")
    assert fields is not None and fields["class"] == "measured"
    (tmp_path / "flips" / "one" / "verdict.json").write_text("[]")
    with pytest.raises(RunLogError, match="a verdict"):
        read_verdict(tmp_path / "flips" / "one")


# Budget and resources


def test_no_pair_is_begun_that_would_not_end_within_the_budget() -> None:
    pairs = [replace(p, seconds=20.0) for p in timed([0.1, 0.2, 0.3])]
    assert why_no_more(plan(budget_s=80.0), pairs) == ""
    assert "3 pairs took 1m00s" in why_no_more(plan(budget_s=79.0), pairs)
    assert "the most that the plan allows" in why_no_more(plan(pairs_max=3), pairs)
    assert why_no_more(plan(budget_s=1.0), []) == ""


def known(run_s: float | None) -> surroundings.Resources:
    return surroundings.Resources(
        run_s=run_s,
        run_source="kd-1",
        peak_bytes=2.0**30,
        memory_available_bytes=2.0**33,
        device_name=HERE.device_name,
    )


def test_what_cannot_fit_is_refused_before_anything_runs() -> None:
    surroundings.check_resources(plan(budget_s=100.0), known(50.0))
    surroundings.check_resources(plan(budget_s=100.0), known(None))
    with pytest.raises(BadInput, match="at least one pair, 1m42s"):
        surroundings.check_resources(plan(budget_s=100.0), known(51.0))


def test_a_run_that_is_slow_to_load_is_not_taken_for_a_hang() -> None:
    slow = surroundings.with_time_limits(plan(run_limit_s=300.0, budget_s=3600.0), known(400.0))
    assert slow.run_limit_s == 1200.0
    assert (
        surroundings.with_time_limits(
            plan(run_limit_s=300.0, budget_s=900.0), known(400.0)
        ).run_limit_s
        == 450.0
    )
    for quick in (known(10.0), known(None)):
        assert surroundings.with_time_limits(plan(run_limit_s=300.0), quick).run_limit_s == 300.0


def test_the_budget_covers_the_pairs_that_the_estimate_names() -> None:
    short = plan(budget_s=300.0)
    made = surroundings.with_time_limits(short, known(60.0), own_budget=False)
    said = "\n".join(surroundings.resource_lines(made, known(60.0), 0))
    assert "8m00s to 16m00s for 4 to 8 pairs" in said and "at most 20m00s" in said
    pairs = [replace(p, seconds=130.0) for p in timed([0.1] * 8)]
    assert [why_no_more(made, pairs[:n]) for n in range(8)] == [""] * 8
    # The user's own budget stays, and so does that of pairs which nobody would wait for.
    assert surroundings.with_time_limits(short, known(60.0)).budget_s == 300.0
    assert surroundings.with_time_limits(short, known(2e3), own_budget=False).budget_s == 300.0


def test_the_resource_plan_names_time_memory_and_device() -> None:
    said = "\n".join(surroundings.resource_lines(plan(), known(30.0), 2))
    assert "about 1m00s a pair (kd-1), 4m00s to 8m00s" in said
    assert "2 controls of the same length" in said
    assert "1.0 GiB predicted by the source, 8.0 GiB available" in said
    assert "device: the CPU" in said


# Controls


def control(kind: str, **fields: Any) -> Control:
    known: dict[str, Any] = {
        "kind": kind,
        "at_unix_s": time.time() - 60,
        "surroundings": asdict(HERE),
        "metric": "step_s",
        "margin": 0.05,
        "verdict": controls.EXPECTED[kind],
        "ratio": 1.0,
        "deviation": 0.01,
        "pairs": 4,
        "folder": "/flips/x",
        "spec": json.loads(json.dumps(plan().spec)),
    }
    return Control(**(known | fields))


def test_controls_of_this_machine_and_spec_count_in_whatever_the_flipped_setting_was() -> None:
    other = json.loads(json.dumps(plan().spec))
    other["compute"]["threads"] = 7
    controls.remember(control(SAME, spec=other))
    controls.remember(control(SLOW))
    found = controls.answers(plan(), controls.find(plan(), HERE), "none")
    assert {answer.level for answer in found.values()} == {Level.PASS}
    assert "EQUIVALENT in 4 pairs, B/A 1.000, deviation 1.0%" in found["AA"].reason


@pytest.mark.parametrize(
    "fields",
    [
        {"at_unix_s": time.time() - 25 * 3600},
        {"surroundings": asdict(replace(HERE, machine="another"))},
        {"surroundings": asdict(replace(HERE, device="GPU"))},
        {"surroundings": asdict(replace(HERE, engine="0"))},
        {"metric": "final_loss"},
        {"margin": 0.1},
        {"spec": {}},
    ],
)
def test_a_control_of_something_else_does_not_count(fields: dict[str, Any]) -> None:
    controls.remember(control(SAME, **fields))
    assert SAME not in controls.find(plan(), HERE)


def test_the_newest_control_counts_even_when_it_failed(state: Path) -> None:
    controls.remember(control(SAME))
    controls.remember(control(SAME, verdict="B_FASTER"))
    with (state / "apr-workbench" / "controls.jsonl").open("a") as file:
        file.write('{"kind": "sa')
    answer = controls.answers(plan(), controls.find(plan(), HERE), "none")["AA"]
    assert answer.level == Level.FAIL


def test_a_metric_that_waiting_does_not_lengthen_has_no_positive_control() -> None:
    made = plan(metric="final_loss")
    answer = controls.answers(made, controls.find(made, HERE), "none")["positive"]
    assert answer.level == Level.UNKNOWN and "no positive control" in answer.reason
    assert controls.kinds_of(made) == (SAME,)


# The device


def test_two_experiments_do_not_share_a_device_unless_told_to() -> None:
    with device_lock("GPU-1", "a flip in /flips/x"):
        with (
            pytest.raises(BadInput, match=r"a flip in /flips/x \(pid \d+\)"),
            device_lock("GPU-1", "me"),
        ):
            pass
        with device_lock("GPU-2", "me"), device_lock("GPU-1", "me", share=True):
            pass
    with device_lock("GPU-1", "me"):
        pass


def test_a_cpu_experiment_asks_for_no_gpu() -> None:
    tree = json.loads(json.dumps(plan().spec))
    tree["compute"]["device"] = "cpu"
    found = find_surroundings(plan(spec=tree))
    assert found.device == "cpu" and found.machine


# Words


def test_the_words_of_a_verdict_hold_what_it_rests_on(tmp_path: Path) -> None:
    killed = pair(1, outcome("A"), incomplete("B", "killed_external", reason="from outside"))
    pairs = [killed, *(replace(p, number=p.number + 1) for p in timed(FASTER))]
    verdict = concluded(tmp_path / "f", pairs)
    said = "\n".join(text.verdict_lines(verdict))
    for part in (
        "B_FASTER (measured): step_s of B and A: -26.0%",
        "4 of 5 pairs compared",
        "left out: pair 1: B killed_external after 0 steps: from outside",
        "manipulation: pass",
        "also changed: tokens_per_s B/A 1.35",
        "next: set compute.threads=1",
    ):
        assert part in said, said


def test_the_table_grows_by_a_line_for_each_pair() -> None:
    made, pairs = plan(), timed(FASTER)
    heading = text.pair_heading(made)
    for count, one in enumerate(pairs, start=1):
        line = text.pair_line(made, one, interval_of(made, pairs[:count]))
        assert line.startswith(f"{count:>4}  ") and "\n" not in line and len(heading) < 80
    assert "0.740 [" in line
    broken = text.pair_line(made, pair(5, hang("A"), outcome("B")), None)
    assert "A made 0 steps in" in broken.splitlines()[1]


def test_more_than_one_changed_setting_is_called_a_bundle(tmp_path: Path) -> None:
    changes = (Change(key="compute.threads", a=2, b=1), Change(key="train.rows", a=8, b=4))
    made = plan(*changes)
    assert "bundle: its verdict names no single cause" in "\n".join(text.plan_lines(made))
    verdict = concluded(tmp_path / "f", timed(FASTER), made=made)
    assert verdict["sentence"].startswith("the bundle of 2 settings")
