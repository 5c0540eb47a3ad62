"""Every verdict is one sentence and one next action, in numbers that the interval leaves certain."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.flips import text
from engine.flips.command import Command
from engine.flips.controls import SAME, Control
from engine.flips.flip_folder import create_flip
from engine.flips.judge import conclude, judge
from engine.flips.pair import Pair
from engine.flips.plan import Change, Plan
from engine.flips.surroundings import Surroundings
from engine.flips.verdicts import Answer, answer
from engine.verdict import Level, Verdict
from tests.support.flip_pairs import hang, incomplete, outcome, pair, plan, timed

HERE = Surroundings(machine="m", device="cpu", device_name="the CPU", engine="1")
PASSED = {name: Verdict(Level.PASS, "passed") for name in ("AA", "positive")}
FASTER = [-0.301, -0.299, -0.3, -0.302]
NOISY = [0.09, -0.06, 0.08, -0.09, 0.05, -0.07]
FAIL = Verdict(Level.FAIL, "as planted")


def fields_of(
    folder: Path,
    pairs: list[Pair],
    made: Plan | None = None,
    controls: dict[str, Verdict] = PASSED,
    **known: Any,
) -> dict[str, Any]:
    """The fields of verdict.json for some pairs; `known` replaces those of the verdict."""
    made = made or plan()
    flip = create_flip(folder / "f", made, HERE)
    for one in pairs:
        flip.add(one)
    judgement = judge(made, flip.pairs, "no more pairs")
    assert judgement is not None
    verdict = conclude(made, flip, judgement, controls, HERE, interrupted=False, cost_s=1.0)
    flip.close()
    fields: dict[str, Any] = json.loads(json.dumps(verdict | known))
    said = answer(fields)
    return fields | {"sentence": said.sentence, "action": said.action}


def loaded(pairs: list[Pair], others: float) -> list[Pair]:
    return [replace(p, a=replace(p.a, neighbour_load=others)) for p in pairs]


def slow(pairs: list[Pair], seconds: float) -> list[Pair]:
    return [
        replace(p, a=replace(p.a, seconds=seconds), b=replace(p.b, seconds=seconds)) for p in pairs
    ]


def test_a_faster_setting_is_named_with_its_effect_and_is_to_be_set(tmp_path: Path) -> None:
    assert answer(fields_of(tmp_path, timed(FASTER))) == Answer(
        "compute.threads=1 is faster: time per step -26.0 % [-26.2, -25.7], more than the margin of 5 %",
        "set compute.threads=1",
    )


def test_a_slower_setting_is_not_to_be_set(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, timed([-d for d in FASTER])))
    assert said.sentence.startswith("compute.threads=1 is slower: time per step +35.1 % [")
    assert said.action == "keep compute.threads=2"


def test_equal_arms_end_the_suspicion(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, timed([0.001, -0.002, 0.0015, -0.001])))
    assert said.sentence.startswith("compute.threads=1 makes no difference that matters: time per")
    assert said.sentence.endswith("within the margin of 5 %")
    assert said.action == "keep compute.threads=2 and look for another cause"


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("peak_memory_bytes", "needs less memory: peak memory -26.0 %"),
        ("energy_per_token_j", "needs less energy: energy per token -26.0 %"),
        ("final_loss", "ends at a lower loss: final loss -26.0 %"),
    ],
)
def test_each_metric_has_its_own_words(metric: str, words: str, tmp_path: Path) -> None:
    assert words in answer(fields_of(tmp_path, timed(FASTER), plan(metric=metric))).sentence


def test_without_controls_the_setting_is_used_and_the_number_not_quoted(tmp_path: Path) -> None:
    controls = PASSED | {"AA": Verdict(Level.UNKNOWN, "skipped")}
    fields = fields_of(tmp_path, timed(FASTER), controls=controls)
    assert fields["action"] == (
        "set compute.threads=1; to quote the number, run it with both controls"
    )
    assert fields["next"] == ["run: engine flip /kd.toml --set compute.threads=1 --controls run"]


def test_a_failed_control_keeps_the_verdict_from_being_used(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, timed(FASTER), controls=PASSED | {"AA": FAIL}))
    assert said.action.startswith("do not rely on it: the control A against A failed")


def test_a_control_that_ran_out_of_pairs_has_not_failed(tmp_path: Path) -> None:
    control = Control(
        kind=SAME,
        at_unix_s=time.time(),
        surroundings={},
        metric="step_s",
        margin=0.05,
        verdict="INCONCLUSIVE",
        ratio=1.08,
        deviation=0.09,
        pairs=2,
        folder="controls/same",
        spec={},
    )
    undecided = control.answer()
    assert undecided.level == Level.UNKNOWN
    assert undecided.reason.startswith("too few pairs to tell after 2 pairs, B/A 1.080")
    said = answer(fields_of(tmp_path, timed(FASTER), controls=PASSED | {"AA": undecided}))
    assert said.action == (
        "do not rely on it yet: the control A against A had too few pairs to tell; "
        "run 16 pairs (about 6 min) with both controls"
    )
    assert said.options == "--pairs 16 --budget 8m --controls run"
    assert replace(control, verdict="B_SLOWER").answer().level == Level.FAIL


LOSS_OF_ONE_SEED = replace(
    plan(metric="final_loss"), command=Command(words=("python", "t.py"), folder="/", settings={})
)


def test_a_loss_under_one_seed_takes_one_pair_and_no_idle_machine(tmp_path: Path) -> None:
    made, one = LOSS_OF_ONE_SEED, loaded(timed([-0.2]), 4.2)
    found = judge(made, one)
    assert found is not None and found.verdict == "B_FASTER"
    said = answer(fields_of(tmp_path / "1", one, made))
    assert "final loss -18.1 % for this seed, more than the margin of 5 %" in said.sentence
    # Without a seed of the script's own its first losses differ already.
    other = [replace(p, b=replace(p.b, losses=[5.1, 4.0, 3.0])) for p in one]
    assert judge(made, other) is None
    assert judge(plan(metric="final_loss"), one) is None
    assert judge(replace(made, metric="step_s"), one) is None
    # Copies whose first losses differ by what B changes.
    copies = [replace(p, number=n) for p in other for n in (1, 2)]
    found = judge(made, copies)
    assert found is not None and found.verdict == "B_FASTER"


def test_load_is_not_named_for_what_it_cannot_change(tmp_path: Path) -> None:
    for metric in ("final_loss", "peak_memory_bytes"):
        pairs = loaded(timed(NOISY), 4.2)
        said = answer(
            fields_of(tmp_path / metric, pairs, plan(metric=metric), pairs_needed=2569550)
        )
        assert said.sentence.startswith("cannot be decided: pairs differ by ")


def test_a_changed_plan_asks_for_another_run(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, timed(FASTER), **{"class": "exploratory"}))
    assert said.action == "set compute.threads=1; run it again before you quote the number"


def test_a_bundle_names_no_single_cause(tmp_path: Path) -> None:
    changes = (Change(key="compute.threads", a=2, b=1), Change(key="train.rows", a=8, b=4))
    said = answer(fields_of(tmp_path, timed(FASTER), plan(*changes)))
    assert said.sentence.startswith("the bundle of 2 settings is faster")
    assert said.action == "set compute.threads=1, train.rows=4"


def test_a_hang_says_at_least_how_much_longer_it_takes(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, [pair(1, outcome("A", seconds=30.0), hang("B"))])
    assert fields["sentence"] == (
        "B (compute.threads=1) did not finish in the only pair (over the limit) and"
        " A (compute.threads=2) did, so it takes at least 10.0 times as long"
    )
    assert fields["action"] == "keep compute.threads=2, and read the log of B"
    assert fields["next"][0].startswith("look: engine tail ")
    assert fields["next"][0].endswith("arms/01-b")


def test_one_crash_may_be_chance_and_five_are_not(tmp_path: Path) -> None:
    one = pair(1, outcome("A"), incomplete("B", "alloc_failed"))
    said = answer(fields_of(tmp_path / "1", [one]))
    assert "(alloc failed)" in said.sentence
    assert said.action == "run 5 pairs (about 2 min): so few failures may be chance"
    assert said.options == "--pairs 5 --budget 5m"
    said = answer(fields_of(tmp_path / "5", [replace(one, number=n) for n in range(1, 6)]))
    assert "did not finish in any of 5 pairs" in said.sentence
    assert said.action == "keep compute.threads=2, and read the log of B"


def test_an_affordable_number_of_pairs_is_proposed_with_its_minutes(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, slow(timed([0.09, 0.02, 0.06, 0.14]), 30.0), plan(margin=0.02))
    assert 4 < fields["pairs_needed"] <= 64
    assert fields["sentence"].startswith("not decided: time per step +8 % [")
    assert fields["action"] == (
        f"run {fields['pairs_needed']} pairs (about {fields['pairs_needed']} min)"
    )
    assert f"--pairs {fields['pairs_needed']} --budget " in fields["next"][0]


def test_a_busy_machine_is_named_with_those_that_want_its_cpus(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, loaded(timed(NOISY), 4.2), pairs_needed=2569550)
    assert fields["sentence"] == (
        "cannot be decided on this busy machine: 4 others want its CPUs;"
        " time per step +0 % [-12, +14], margin 5 %"
    )
    assert fields["action"] == "close them and run it again"
    details = "\n".join(text.verdict_lines(fields))
    assert "2569550" not in details


def test_a_busy_machine_with_few_pairs_missing_is_closed_and_measured_again(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, loaded(timed(NOISY), 1.0), pairs_needed=20))
    assert said.sentence.startswith("not decided on this busy machine: others want its CPUs;")
    assert said.action == "close them and run 20 pairs (about 7 min)"


def test_noise_that_no_number_of_pairs_beats_asks_for_a_larger_margin(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, timed(NOISY), pairs_needed=2569550)
    assert fields["sentence"].startswith("cannot be decided: pairs differ by ")
    assert fields["action"] == "run it again with more steps, or with a larger margin"


def test_pairs_that_take_many_hours_are_not_proposed(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, slow(timed(NOISY), 3600.0), pairs_needed=20))
    assert said.action == "run it again with more steps, or with a larger margin"


def test_a_margin_that_says_nothing_is_not_proposed(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, timed([10 * d for d in NOISY]), pairs_needed=100_000)
    assert fields["action"] == "run it again with more steps, or with a larger margin"
    busy = fields_of(
        tmp_path / "b", loaded(timed([10 * d for d in NOISY]), 3.0), pairs_needed=100_000
    )
    assert busy["action"] == "close them and run it again" and busy["next"] == []


def test_too_few_pairs_ask_for_the_fewest_that_decide(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, timed(FASTER[:2]), pairs_needed=None))
    assert said.sentence == "not decided: time per step -26 % after 2 pairs, too few to tell"
    assert said.action == "run 4 pairs (about 2 min)"


def test_runs_ended_from_outside_are_said(tmp_path: Path) -> None:
    killed = pair(1, outcome("A"), incomplete("B", "killed_external"))
    said = answer(fields_of(tmp_path, [killed]))
    assert said.sentence == ("not decided: no pair could be compared; runs were ended from outside")
    assert said.action == "run 4 pairs (about 2 min)"


def test_an_interrupted_flip_is_continued(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, timed(FASTER[:2]), interrupted=True))
    assert said.sentence.startswith("not decided yet, it was interrupted: time per step -26 %")
    assert said.action == "continue it"


@pytest.mark.parametrize(
    ("proof", "sentence", "action"),
    [
        ("parity", "not comparable, the arms compute different things", "keep compute.threads=2"),
        ("flipped", "the setting was not tested", "read in the log of B why"),
        ("equal", "more than the setting differs between the arms", "remove that difference"),
    ],
)
def test_a_proof_that_fails_is_said_with_its_reason(
    proof: str, sentence: str, action: str, tmp_path: Path
) -> None:
    pairs = timed(FASTER)
    pairs[1] = replace(pairs[1], proofs={**pairs[1].proofs, proof: FAIL})
    said = answer(fields_of(tmp_path, pairs))
    assert said.sentence == f"{sentence}: as planted" and said.action.startswith(action)


def test_pairs_that_depend_on_their_order_are_run_again(tmp_path: Path) -> None:
    b_first = [True, False] * 4
    pairs = timed([0.4 + 0.05 * first + 0.001 * i for i, first in enumerate(b_first)], b_first)
    said = answer(fields_of(tmp_path, pairs, plan(pairs_min=8)))
    assert said.sentence.startswith("the pairs are not independent: pairs that began with B differ")
    assert said.action == "let the machine become idle and run it again"
    loss = plan(pairs_min=8, metric="final_loss")
    said = answer(fields_of(tmp_path / "loss", loaded(pairs, 4.2), loss))
    assert said.action == "raise --pairs and run it again"


def test_an_arm_that_fails_now_and_then_is_no_fair_comparison(tmp_path: Path) -> None:
    pairs = [*timed(FASTER), pair(5, outcome("A"), incomplete("B", "crashed"))]
    said = answer(fields_of(tmp_path, pairs))
    assert said.sentence == (
        "not comparable: 1 of 10 runs did not finish, in arm B, first in pair 5 (crashed)"
    )
    assert said.action == "read the log of arms/01-b"


def test_two_arms_that_fail_are_no_comparison(tmp_path: Path) -> None:
    said = answer(fields_of(tmp_path, [pair(1, hang("A"), hang("B"))]))
    assert "2 of 2 runs did not finish, in both arms" in said.sentence
    assert said.action == "run it again with a larger --budget"


def test_a_metric_that_is_not_measured_is_said_with_its_reason(tmp_path: Path) -> None:
    a = outcome("A", None, no_value="torch keeps no peak of CPU memory")
    made = plan(metric="peak_memory_bytes")
    said = answer(fields_of(tmp_path, [pair(1, a, outcome("B"))], made))
    assert said.sentence.startswith("nothing was measured: no peak_memory_bytes of arm A: torch")
    assert said.action == "choose another --metric"


def test_the_verdict_of_an_older_engine_is_put_into_the_same_words() -> None:
    (path,) = Path("evidence/2026-11-21-hang-at-step-zero/artifacts").glob("73cbeb89*.json")
    fields = json.loads(path.read_text())
    assert "sentence" not in fields
    assert text.answer_lines(fields)[1] == (
        "next: set teacher.backend=dequantized, and read the log of A"
    )


def test_the_sentence_and_the_action_come_first_and_the_statistics_after(tmp_path: Path) -> None:
    fields = fields_of(tmp_path, timed(FASTER))
    lines = text.verdict_lines(fields)
    assert lines[:3] == [fields["sentence"], f"next: {fields['action']}", "details"]
    assert all(line.startswith("  ") for line in lines[3:])


# The margins at which the present pairs would decide
