"""A plan is checked and fixed before anything runs: what it refuses, what it hashes, what its arms are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import BadInput, EngineError, SpecError, UsageError
from engine.flips.pair import asks_parity
from engine.flips.plan import Plan, load_source, make_plan, read_plan
from engine.log.events import DecisionMade
from engine.log.folder import create_run
from engine.log.write import LogWriter
from engine.spec import KEYS, load_spec
from engine.units import parse_share, parse_time
from tests.support.flip_pairs import plan
from tests.support.kit import Kit


@pytest.fixture
def spec(kit: Kit, tmp_path: Path) -> Path:
    return kit.spec(tmp_path)


def test_the_arms_differ_in_the_planned_setting_and_nothing_else(
    spec: Path, tmp_path: Path
) -> None:
    made = make_plan(spec, ["compute.threads=2"], order_seed=3)
    a, b = (made.arm(side, tmp_path, "same").to_dict() for side in (False, True))
    assert (a["compute"].pop("threads"), b["compute"].pop("threads")) == (1, 2)
    assert a == b
    # Its length is the run's own, so that what goes by it is chosen as the run chooses.
    assert a["train"]["stop_after"] == made.steps and a["train"]["steps"] == 20
    assert a["checkpoint"]["at_end"] is False


def test_a_setting_that_is_gone_cannot_be_flipped(spec: Path) -> None:
    with pytest.raises(SpecError, match=r"--set teacher\.kernel: .* it was removed, because"):
        make_plan(spec, ["teacher.kernel=dequantize"], order_seed=3)


def test_a_run_folder_is_as_good_a_source_as_its_spec(spec: Path, tmp_path: Path) -> None:
    settings, text = load_spec(spec)
    run = create_run(tmp_path / "run", text, {"spec": settings.to_dict()})
    from_spec = make_plan(spec, ["compute.threads=2"], order_seed=3)
    from_run = make_plan(run.path, ["compute.threads=2"], order_seed=3)
    assert replace(from_run, source="") == replace(from_spec, source="")


def test_what_the_run_chose_by_itself_is_not_compared_with_itself(
    spec: Path, tmp_path: Path
) -> None:
    settings, text = load_spec(spec, ["student.graphs=auto"])
    run = create_run(tmp_path / "run", text, {"spec": settings.to_dict()})
    assert make_plan(run.path, ["student.graphs=off"], order_seed=3).changes, "nothing is logged"
    chosen = DecisionMade(knob="student.graphs", choice="off", reason="it does not pay")
    with LogWriter(run.events, writer="trainer") as log:
        log.write(chosen)
    with pytest.raises(BadInput, match="the run chose off by itself: it does not pay"):
        make_plan(run.path, ["student.graphs=off"], order_seed=3)
    assert make_plan(run.path, ["student.graphs=on"], order_seed=3).changes
    assert make_plan(spec, ["student.graphs=off"], order_seed=3, base_sets=["student.graphs=auto"])


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"spec": 3}'])
def test_a_run_folder_whose_settings_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "effective.json").write_text(text)
    with pytest.raises(EngineError, match=r"effective\.json"):
        load_source(tmp_path)


def test_a_plan_survives_its_file_and_every_part_of_it_is_hashed(spec: Path) -> None:
    made = make_plan(spec, ["compute.threads=2"], order_seed=3)
    assert read_plan(made.to_json()) == made and read_plan(made.to_json()).sha256 == made.sha256
    for name, value in json.loads(made.to_json()).items():
        if isinstance(value, int | float):
            assert replace(made, **{name: value + 1}).sha256 != made.sha256, name
    assert replace(made, hypothesis="another").sha256 != made.sha256


def test_the_order_is_a_coin_of_the_seed() -> None:
    assert plan(order_seed=5).order() == plan(order_seed=5).order()
    orders = [first for seed in range(200) for first in plan(order_seed=seed).order()]
    assert 0.45 < sum(orders) / len(orders) < 0.55
    for seed in range(50):
        order = plan(order_seed=seed, pairs_max=7).order()
        assert len(order) == 7 and all(sum(order[i : i + 2]) == 1 for i in (0, 2, 4))
    assert len({tuple(plan(order_seed=seed, pairs_max=4).order()) for seed in range(50)}) == 4


def test_a_loss_is_compared_over_seeds_and_a_time_over_runs_of_one_seed(spec: Path) -> None:
    timed = make_plan(spec, ["loss.alpha=0.5"], order_seed=1)
    learnt = make_plan(spec, ["loss.alpha=0.5"], order_seed=1, metric="final_loss")

    def seeds(made: Plan) -> set[int]:
        return {
            made.arm(b, Path("/"), "x", pair).train.seed for b in (False, True) for pair in (1, 2)
        }

    assert seeds(timed) == {0}
    assert seeds(learnt) == {1, 2}


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["compute.thread=2"], "did you mean compute.threads?"),
        (["compute.threads=1"], "another value than arm A's, found 1 in both"),
        (["compute.threads=many"], "expected a number"),
        (["run.name=x"], "where the run is stored"),
        (["teacher.path=nowhere"], "found nothing there"),
        (["compute.threads"], "expected key=value"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(spec: Path, sets: list[str], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_plan(spec, sets, order_seed=1)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("metric", "speed", "one of step_s"),
        ("margin", 0.0, "share between 0 and 1"),
        ("steps", 5, "at least 6"),
        ("pairs_max", 0, "1 to 64"),
        ("budget_s", 0.0, "more than 0 seconds"),
    ],
)
def test_numbers_out_of_range_are_refused(spec: Path, name: str, value: object, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        make_plan(spec, ["compute.threads=2"], order_seed=1, **{name: value})  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_one_pair_always_fits_the_budget(spec: Path) -> None:
    made = make_plan(spec, ["compute.threads=2"], order_seed=1, budget_s=40)
    assert 2 * made.run_limit_s <= made.budget_s


def test_the_slow_control_slows_a_alone_by_twice_the_margin() -> None:
    control = plan().control(slow=True)
    assert control.arm(False, Path("/"), "a").compute.slow_by == pytest.approx(0.1)
    assert control.arm(True, Path("/"), "b").compute.slow_by == 0
    assert plan().control(slow=False).slow_a_by == 0


def test_parity_is_asked_of_all_settings_but_those_of_what_is_learnt() -> None:
    asked = {key for key in KEYS if asks_parity([key])}
    assert {"teacher.backend", "teacher.precision", "compute.threads", "loss.chunk_rows"} <= asked
    assert not {"loss.alpha", "train.lr", "train.seed", "data.corpus", "student.path"} & asked
    assert not asks_parity(["compute.threads", "train.lr"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("45", 45), ("0.5m", 30)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time("--budget", text) == seconds


@pytest.mark.parametrize("text", ["", "five", "5 m", "5x", "-3s", "m"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--budget: expected a time as 90s"):
        parse_time("--budget", text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("12.5%", 0.125)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share("--margin", text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "1", "%", "-5%", "a lot"])
def test_a_share_that_could_mean_either_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--margin: expected a share as 5%"):
        parse_share("--margin", text)
