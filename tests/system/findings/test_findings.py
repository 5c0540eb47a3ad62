"""Findings: a cause is confirmed by an experiment that the engine ran and recorded, and by nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import EngineError
from engine.findings import changes
from engine.findings import finding as records
from engine.findings.bundle import FINDING, LOG, Bundle, find_bundles, logged_seal
from engine.findings.changes import Suspect
from engine.findings.check import check_bundle
from engine.findings.finding import CannotClose, Finding, sealed, to_bytes
from engine.findings.text import cause_words, state_words
from engine.flips.ending import ending_plan
from engine.flips.flip_folder import create_flip, read_plan_of
from engine.log.folder import RunFolder
from engine.sealing import digest
from engine.verdict import Level
from tests.support.findings import (
    ENDS,
    HERE,
    KEEPS,
    ROWS,
    SAME,
    THREADS,
    Shows,
    asked,
    begin_test,
    carry_out,
    end_test,
    flip,
    hanging_run,
    with_settings,
)
from tests.support.run_folders import completed


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.evidence = folder, folder / "evidence"
        self.run = hanging_run(folder / "runs" / "hang")

    def flip(self, name: str = "1") -> Path:
        return self.folder / "flips" / name

    def asked(self, *causes: str, **how: Any) -> Bundle:
        return asked(self.run, *causes, **how)

    def tested(self, shows: Shows = ENDS, *causes: str) -> Bundle:
        bundle = self.asked(*causes)
        carry_out(bundle, self.flip(), shows)
        return bundle


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


# What a test makes of a cause


@pytest.mark.parametrize(
    ("shows", "level"),
    [
        (ENDS, "confirmed"),
        (KEEPS, "refuted"),
        ([(True, False), (True, True)], "refuted"),
        ([(False, False)] * 3, "not refuted"),
        ([(True, False)] * 2, "not refuted"),
        ([(True, None)], "not refuted"),
        ([(True, None), (True, False), (None, False)], "could not be tested"),
    ],
)
def test_the_recorded_runs_decide_the_level_of_a_cause(
    world: World, shows: Shows, level: str
) -> None:
    bundle = world.tested(shows)
    finding = bundle.load()
    assert finding.level_of(finding.causes[0]) == level
    assert check_bundle(bundle).is_sound
    if level == "confirmed":
        closed = changes.close(bundle).closed
        assert closed is not None and closed.text.endswith("A shows it in 3 of 3 pairs, B in none)")
        assert check_bundle(bundle).verdict.level is Level.PASS
    else:
        with pytest.raises(CannotClose, match=f"c1 {level}"):
            changes.close(bundle)


def test_a_later_test_that_says_otherwise_takes_the_confirmation_back(world: World) -> None:
    bundle = world.tested()
    changes.close(bundle)
    chosen = bundle.load().causes[0]
    again = replace(read_plan_of(world.flip()), order_seed=99)
    test = changes.register(bundle, chosen, again, world.flip("2"))
    assert bundle.load().closed is None, "a new test opens it again"
    create_flip(world.flip("2"), again, HERE).close()
    end_test(world.flip("2"), KEEPS)
    finding = changes.record(bundle, test)
    assert finding.level_of(chosen) == "not refuted"
    with pytest.raises(CannotClose):
        changes.close(bundle)


def test_the_next_test_is_that_of_an_open_cause_that_none_has_tested(world: World) -> None:
    bundle = world.asked(THREADS, ROWS)
    assert changes.plan_test(bundle)[0].id == "c1"
    carry_out(bundle, world.flip(), [(False, False)] * 3)
    assert changes.plan_test(bundle)[0].id == "c2"
    carry_out(bundle, world.flip("2"), KEEPS)
    assert changes.plan_test(bundle)[0].id == "c1", "not seen is not refuted"
    carry_out(bundle, world.flip("3"), [(True, False)] * 6)
    with pytest.raises(EngineError, match="one that is confirmed"):
        changes.plan_test(bundle)


def test_tests_in_another_finding_about_the_same_thing_count_as_attempts(world: World) -> None:
    first = world.tested([(True, True)])
    again = changes.begin(world.evidence, world.run, slug="again")
    changes.suspect(again, ROWS)
    assert changes.plan_test(again)[1].attempt == len(first.load().tests) + 1 == 2


def test_a_cause_says_what_it_changes_on_purpose(world: World) -> None:
    bundle = world.tested(ENDS, f"data: {ROWS}")
    finding = bundle.load()
    assert finding.confirmed and check_bundle(bundle).is_sound
    assert "data: train.rows" in cause_words(finding, finding.causes[0])
    assert "data: train.rows=2 ends it" in state_words(changes.close(bundle))
    changes.suspect(bundle, ROWS)
    with pytest.raises(EngineError, match="which it has"):
        changes.suspect(bundle, f"data: {ROWS}")


def test_five_whys_are_a_chain_of_findings(world: World) -> None:
    first = world.tested()
    with pytest.raises(EngineError, match="a run that had c1"):
        other = hanging_run(world.folder / "runs" / "other", later_s=5.0)
        changes.begin(world.evidence, other, "exit", why_of=first)
    second = changes.begin(world.evidence, world.run, "exit", slug="second", why_of=first)
    arm = RunFolder(world.flip() / "arms" / "01-a")
    third = changes.begin(world.evidence, arm, slug="third", why_of=first)
    for bundle in (second, third):
        parent = bundle.load().parent
        assert parent is not None and (parent.finding, parent.cause) == (first.path.name, "c1")
        assert check_bundle(bundle).is_sound
    with pytest.raises(EngineError, match="one with a confirmed cause"):
        changes.begin(world.evidence, world.run, "exit", slug="fourth", why_of=second)


# Nonsense that does not close


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    """Edit a JSON file, or each line of a log."""
    if path.suffix == ".jsonl":
        lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2, sort_keys=True))


def suspecting(change: str) -> Callable[[World], object]:
    return lambda world: world.asked(change)


def seeing(name: str) -> Callable[[World], object]:
    return lambda world: changes.begin(world.evidence, world.run, name, [Suspect(THREADS)])


def shows(*pairs: tuple[bool | None, bool | None]) -> Callable[[World], object]:
    return lambda world: world.tested(pairs)


def spoilt(
    spoil: Callable[[World, Path], object], pairs: Shows = ENDS
) -> Callable[[World], object]:
    """A test that would confirm, but its flip was touched before it was recorded."""

    def attempt(world: World) -> None:
        bundle = world.asked()
        test = begin_test(bundle, world.flip())
        end_test(world.flip(), pairs)
        spoil(world, world.flip())
        changes.record(bundle, test)

    return attempt


def of_pair(
    number: int, change: Callable[[dict[str, Any]], object]
) -> Callable[[World, Path], object]:
    def spoil(_: World, flip: Path) -> None:
        def one(line: dict[str, Any]) -> dict[str, Any]:
            if line.get("number") == number:
                change(line)
            return line

        edited(flip / "pairs.jsonl", one)

    return spoil


def of_settings(arm: str, **to: object) -> Callable[[World, Path], object]:
    def spoil(_: World, flip: Path) -> None:
        def change(tree: dict[str, Any]) -> dict[str, Any]:
            tree["spec"]["compute"] |= to
            return tree

        edited(flip / "arms" / arm / "effective.json", change)

    return spoil


def of_plan(**to: object) -> Callable[[World, Path], object]:
    return lambda _, flip: edited(flip / "plan.json", lambda plan: plan | to)


def in_log(
    arm: str, log: str, change: Callable[[dict[str, Any]], Any]
) -> Callable[[World, Path], object]:
    return lambda _, flip: edited(flip / "arms" / arm / f"{log}.jsonl", change)


def without_alert(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "kind": "note", "text": "x"} if line.get("by") == "alert" else line


def copied(source: str, target: str) -> Callable[[World, Path], object]:
    def spoil(world: World, flip: Path) -> None:
        place = flip / "arms" / target
        shutil.rmtree(place)
        shutil.copytree(world.run.path if source == "observed" else flip / "arms" / source, place)

    return spoil


def pair_twice(_: World, flip: Path) -> None:
    lines = (flip / "pairs.jsonl").read_text().splitlines(keepends=True)
    (flip / "pairs.jsonl").write_text("".join([*lines, lines[-1]]))


def alert_put_in(line: dict[str, Any]) -> dict[str, Any]:
    alert = {"kind": "judged", "by": "alert", "id": "gpu_idle", "level": "fail", "step": 0}
    return line | (alert if line["kind"] == "trainer_started" else {})


def another_flip(make: Callable[[World, Path], object]) -> Callable[[World], object]:
    """A test is registered, and something else lies where its flip belongs."""

    def attempt(world: World) -> None:
        bundle = world.asked()
        test = begin_test(bundle, world.flip())
        shutil.rmtree(world.flip())
        make(world, world.flip())
        changes.record(bundle, test)

    return attempt


def of_another_finding(world: World, flip: Path) -> None:
    other = world.asked(slug="other", folder=world.folder / "others")
    carry_out(other, world.flip("other"))
    shutil.copytree(world.flip("other"), flip)


def registered_late(world: World) -> None:
    """The flip first, the finding that predicts its outcome afterwards."""
    chosen, plan = changes.plan_test(world.asked(slug="other"))
    create_flip(world.flip(), plan, HERE).close()
    end_test(world.flip(), ENDS)
    bundle = world.asked()
    changes.register(bundle, chosen, plan, world.flip())


def backdated(world: World) -> None:
    bundle = world.asked()
    test = begin_test(bundle, world.flip())
    end_test(world.flip(), ENDS)
    edited(
        world.flip() / "pairs.jsonl",
        lambda line: line | ({"at": "2020-01-01T00:00:00Z"} if "at" in line else {}),
    )
    changes.record(bundle, test)


def interrupted(world: World, flip: Path) -> None:
    edited(flip / "verdict.json", lambda verdict: verdict | {"interrupted": True})


def of_two_changes(world: World) -> None:
    bundle = world.asked()
    chosen, plan = changes.plan_test(bundle)
    more = replace(
        plan, changes=(*plan.changes, replace(plan.changes[0], key="train.rows", a=8, b=2))
    )
    test = changes.register(bundle, chosen, more, world.flip())
    create_flip(world.flip(), more, HERE).close()
    end_test(world.flip(), ENDS)
    changes.record(bundle, test)


def of_fewer_steps(world: World) -> None:
    """Runs with the change end before the step at which the run showed it."""
    far = replace(world.asked().load().observed, step=7)
    ending_plan(world.run.path, far, THREADS, order_seed=1, steps=6)


def of_the_other_cause(world: World) -> None:
    bundle = world.asked(THREADS, ROWS)
    plan = changes.plan_test(bundle, "c2")[1]
    test = changes.register(bundle, bundle.load().cause("c1"), plan, world.flip())
    create_flip(world.flip(), plan, HERE).close()
    end_test(world.flip(), ENDS)
    changes.record(bundle, test)


def of_other_settings(world: World) -> None:
    """Arm A is not the observed run."""
    bundle = world.asked()
    chosen, plan = changes.plan_test(bundle)
    spec = {name: dict(part) for name, part in plan.spec.items()}
    spec["train"]["rows"] = 1
    other = replace(plan, spec=spec)
    test = changes.register(bundle, chosen, other, world.flip())
    create_flip(world.flip(), other, HERE).close()
    end_test(world.flip(), ENDS)
    changes.record(bundle, test)


def asked_easily(world: World) -> None:
    """One pair is to be enough."""
    bundle = world.asked()
    chosen, plan = changes.plan_test(bundle)
    easy = replace(plan, pairs_min=1)
    test = changes.register(bundle, chosen, easy, world.flip())
    create_flip(world.flip(), easy, HERE).close()
    end_test(world.flip(), ENDS[:1])
    changes.record(bundle, test)


def another_observation(world: World) -> None:
    bundle = world.asked()
    chosen, plan = changes.plan_test(bundle)
    assert plan.observed is not None
    changes.register(
        bundle, chosen, replace(plan, observed=replace(plan.observed, id="x")), world.flip()
    )


def nothing_observed(world: World) -> None:
    bundle = world.asked()
    chosen, plan = changes.plan_test(bundle)
    changes.register(bundle, chosen, replace(plan, observed=None), world.flip())


def noted(world: World) -> None:
    bundle = world.asked()
    for text in ("it is the threads", "verified by hand", "root cause"):
        changes.note(bundle, text)


def of_a_healthy_run(world: World) -> None:
    run = completed(world.folder / "runs" / "healthy")
    changes.begin(world.evidence, run, "", [Suspect(THREADS)])


def of_another_run_in_its_place(world: World) -> None:
    bundle = world.asked()
    shutil.rmtree(world.run.path)
    hanging_run(world.run.path, later_s=60.0)
    changes.plan_test(bundle)


NONSENSE: dict[str, Callable[[World], object]] = {
    "no cause": lambda world: changes.begin(world.evidence, world.run, "alert gpu_idle"),
    "no test": lambda world: world.asked(),
    "a test that never began": lambda world: changes.register(
        bundle := world.asked(), *changes.plan_test(bundle), world.flip()
    ),
    "a test that goes on": lambda world: begin_test(world.asked(), world.flip()),
    "notes alone": noted,
    # Runs that do not say it.
    "it goes on with the change": shows((True, True)),
    "it goes on with the change once": shows((True, False), (True, False), (True, True)),
    "it goes on with the change alone": shows((False, True)),
    "nobody sees it again": shows(*[(False, False)] * 3),
    "it is seen again and again without telling": shows(*[(False, False)] * 8),
    "one pair": shows((True, False)),
    "two pairs": shows((True, False), (True, False)),
    "now and then, too seldom": shows(*[(True, False), (False, False)] * 4),
    "the changed run breaks": shows((True, None)),
    "the changed run breaks at last": shows((True, False), (True, False), (True, None)),
    "both break": shows((None, None)),
    # Causes that are none.
    "a cause of words": suspecting("the moon is full"),
    "a cause of nothing": suspecting(""),
    "a cause of a line": suspecting("\n"),
    "a setting that is none": suspecting("moon.phase=full"),
    "a value that is none": suspecting("compute.threads=many"),
    "the value that it has": suspecting("compute.threads=2"),
    "a setting without a value": suspecting("compute.threads"),
    "a command that succeeds": suspecting("true"),
    "words of a run that has none": suspecting("--lr 1"),
    "a variable of a run of ours": suspecting("MOON=full"),
    "who looks: the watch": suspecting("watch.stall_seconds=100000"),
    "who looks: how often": suspecting("watch.sample_seconds=3600"),
    "who looks: the checks": suspecting("checks.on_fail=report"),
    "who looks: the evaluation": suspecting("eval.every=0"),
    "where the run is stored": suspecting("run.name=other"),
    # Observations that are none.
    "an alert that was not raised": seeing("alert data_wait"),
    "a check that did not fail": seeing("check step_rows"),
    "an observation of words": seeing("it is slow"),
    "an observation of a line": seeing("\n"),
    "another end": seeing("exit crashed"),
    "a healthy run": of_a_healthy_run,
    "another run in its place": of_another_run_in_its_place,
    # Flips of something else.
    "a flip of another finding": another_flip(of_another_finding),
    "a flip that was equivalent": another_flip(lambda _, path: flip(path, SAME)),
    "a flip that was faster": another_flip(lambda _, path: flip(path)),
    "no flip at all": another_flip(lambda _, path: path.mkdir(parents=True)),
    "the flip before the finding": registered_late,
    "a flip that was backdated": backdated,
    "two changes at once": of_two_changes,
    "the test of the other cause": of_the_other_cause,
    "another run as it was": of_other_settings,
    "fewer pairs asked for": asked_easily,
    "fewer steps asked for": of_fewer_steps,
    "a plan of another observation": another_observation,
    "a plan of no observation": nothing_observed,
    "an interrupted flip": spoilt(interrupted),
    # Flips that were touched.
    "a verdict that its pairs do not say": spoilt(
        lambda _, flip: edited(flip / "verdict.json", lambda v: v | {"verdict": "B_ENDS_IT"}), KEEPS
    ),
    "pairs that its logs do not say": spoilt(
        of_pair(1, lambda line: line["b"].update(shown=False)), [(True, True), *ENDS]
    ),
    "a pair in another order": spoilt(
        of_pair(2, lambda line: line.update(b_first=not line["b_first"]))
    ),
    "a pair with another number": spoilt(of_pair(3, lambda line: line.update(number=4))),
    "one pair twice": spoilt(pair_twice),
    "a plan that was eased": spoilt(of_plan(pairs_min=1)),
    "a plan with another hypothesis": spoilt(of_plan(hypothesis="the moon")),
    "a plan with another source": spoilt(of_plan(source="/elsewhere")),
    "more settings of an arm": spoilt(of_settings("02-b", gpus=2)),
    "arms that are the same": spoilt(of_settings("02-b", threads=2)),
    "an alert taken out of a run with the change": spoilt(
        in_log("01-b", "watch", without_alert), [(True, True), *ENDS]
    ),
    "an alert put into a run as it was": spoilt(
        in_log("01-a", "watch", alert_put_in), [(False, False), *ENDS]
    ),
    "a run for two": spoilt(copied("01-a", "02-a")),
    "the observed run as an arm": spoilt(copied("observed", "01-a")),
    "runs of the arms exchanged": spoilt(copied("01-a", "01-b")),
    "a run that is missing": spoilt(lambda _, flip: shutil.rmtree(flip / "arms" / "03-b")),
    "a run of before the flip": spoilt(
        in_log("02-a", "events", lambda line: line | ({"unix_s": 1.0} if "unix_s" in line else {}))
    ),
    "a run of another flip": spoilt(
        lambda _, flip: edited(
            flip / "arms" / "02-b" / "effective.json", lambda t: t | {"flip_sha256": "0" * 64}
        )
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_does_not_close(world: World, name: str) -> None:
    try:
        NONSENSE[name](world)
    except EngineError as refused:
        assert str(refused).strip()
    for bundle in find_bundles(world.evidence):
        with pytest.raises(EngineError):
            changes.close(bundle)
        assert check_bundle(bundle).verdict.level is not Level.PASS


def test_a_flip_that_was_touched_is_recorded_as_invalid_and_the_next_test_goes_on(
    world: World,
) -> None:
    spoilt(of_plan(pairs_min=1))(world)
    (bundle,) = find_bundles(world.evidence)
    (test,) = bundle.load().tests
    assert test.verdict == "INVALID" and "another plan than the one" in test.reason
    assert check_bundle(bundle).is_sound and changes.pending(bundle) is None
    carry_out(bundle, world.flip("2"), [(True, False)] * 5)
    changes.close(bundle)
    assert check_bundle(bundle).verdict.level is Level.PASS


def test_what_is_tried_would_close_if_it_were_no_nonsense(world: World) -> None:
    """The control of the attempts: the same steps, with nothing spoilt."""
    spoilt(lambda *_: None)(world)
    (bundle,) = find_bundles(world.evidence)
    changes.close(bundle)
    assert check_bundle(bundle).verdict.level is Level.PASS
    assert len(NONSENSE) >= 60


# Changes that do not verify


@pytest.fixture(scope="module")
def closed_once(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("closed"))
        bundle = World(folder).tested(ENDS, THREADS, ROWS)
        changes.close(bundle)
    return bundle


@pytest.fixture
def closed(closed_once: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A copy for each test."""
    monkeypatch.chdir(tmp_path)
    copy = Bundle(tmp_path / "evidence" / closed_once.path.name)
    shutil.copytree(closed_once.path, copy.path)
    assert check_bundle(copy).verdict.level is Level.PASS
    return copy


def fails(bundle: Bundle) -> bool:
    return check_bundle(bundle).verdict.level is Level.FAIL


def damages(file: Path) -> list[Callable[[], object]]:
    raw = file.read_bytes()
    middle = len(raw) // 2

    def link() -> None:
        other = file.with_name(f"{file.name}.other")
        file.rename(other)
        file.symlink_to(other)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    return [
        file.unlink,
        lambda: file.write_bytes(b""),
        lambda: file.write_bytes(raw[:-1]),
        lambda: file.write_bytes(raw[:100]) if len(raw) > 100 else file.write_bytes(raw[:3]),
        lambda: file.write_bytes(raw + b"\n"),
        lambda: file.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]),
        link,
        folder,
    ]


def test_any_change_of_any_file_fails_or_cannot_be_read(closed: Bundle, tmp_path: Path) -> None:
    names = ["finding.json", *closed.load().files]
    tried = 0
    for name in names:
        for at in range(8):
            copy = Bundle(tmp_path / f"copy-{tried}")
            shutil.copytree(closed.path, copy.path)
            damages(copy.path / name)[at]()
            level = check_bundle(copy).verdict.level
            assert level is Level.FAIL or (name == FINDING and level is Level.UNKNOWN), (name, at)
            shutil.rmtree(copy.path)
            tried += 1
    assert tried >= 60


@pytest.mark.parametrize(
    "name",
    ["x", "tests/x", "observed/x.py", "tests/t1/arms/04-a/events.jsonl", "tests/t2/plan.json"],
)
def test_a_file_that_the_finding_does_not_name_fails(closed: Bundle, name: str) -> None:
    (closed.path / name).parent.mkdir(parents=True, exist_ok=True)
    (closed.path / name).write_text("x")
    assert fails(closed)


def test_a_folder_that_the_finding_does_not_name_fails(closed: Bundle) -> None:
    (closed.path / "more").mkdir()
    assert fails(closed)


def rewritten(bundle: Bundle, change: Callable[[Finding], Finding]) -> None:
    """Write a finding whose hashes and seal are right, as somebody would who has the tool's code."""
    made = sealed(change(bundle.load()))
    (bundle.path / FINDING).write_bytes(to_bytes(made))


def with_file(bundle: Bundle, name: str, change: Callable[[bytes], bytes]) -> None:
    raw = change((bundle.path / name).read_bytes())
    (bundle.path / name).write_bytes(raw)
    file = records.File(sha256=digest(raw), size=len(raw))
    rewritten(bundle, lambda f: msgspec.structs.replace(f, files={**f.files, name: file}))


def of_test(**to: object) -> Callable[[Finding], Finding]:
    def change(finding: Finding) -> Finding:
        (test,) = finding.tests
        return msgspec.structs.replace(finding, tests=(msgspec.structs.replace(test, **to),))

    return change


def of_cause(**to: object) -> Callable[[Finding], Finding]:
    def change(finding: Finding) -> Finding:
        first, *others = finding.causes
        return msgspec.structs.replace(
            finding, causes=(msgspec.structs.replace(first, **to), *others)
        )

    return change


def of_observed(**to: object) -> Callable[[Finding], Finding]:
    return lambda f: msgspec.structs.replace(f, observed=replace(f.observed, **to))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        of_test(verdict="B_KEEPS_IT"),
        of_test(verdict="NOT_SEEN"),
        of_test(verdict="INVALID"),
        of_test(plan_sha256="0" * 64),
        of_test(cause="c2"),
        of_test(at="2020-01-01T00:00:00Z"),
        of_test(at="2099-01-01T00:00:00Z"),
        of_cause(at="2099-01-01T00:00:00Z"),
        of_cause(assignment="data: compute.threads=1"),
        lambda f: of_cause(change=f.causes[1].change)(f),
        lambda f: of_cause(change=replace(f.causes[0].change, b=3))(f),
        of_observed(id="data_wait"),
        of_observed(text="another text"),
        of_observed(seq=0),
        of_observed(run_id="0" * 16),
        of_observed(sha256="0" * 64),
        of_observed(step=1),
        lambda f: msgspec.structs.replace(f, tests=()),
    ],
)
def test_a_finding_that_was_rewritten_and_sealed_again_fails(
    closed: Bundle, change: Callable[[Finding], Finding]
) -> None:
    rewritten(closed, change)
    assert fails(closed)


@pytest.mark.parametrize(
    "log",
    [
        "observed/watch",
        "tests/t1/arms/01-a/watch",
        "tests/t1/arms/02-b/watch",
        "tests/t1/arms/02-b/events",
    ],
)
def test_a_log_that_was_rewritten_and_sealed_again_fails(closed: Bundle, log: str) -> None:
    with_file(closed, f"{log}.jsonl", lambda raw: raw[: raw.index(b"\n") + 1])
    assert fails(closed)


def test_a_rewritten_finding_that_is_consistent_has_another_seal_than_the_log(
    closed: Bundle,
) -> None:
    changes.export(closed)
    assert logged_seal(closed.path) == closed.load().seal
    assert check_bundle(closed).verdict.level is Level.PASS
    with_file(closed, "README.md", lambda raw: raw + b"and more")
    assert fails(closed)
    assert any(fault.where == LOG for fault in check_bundle(closed).faults)


def test_a_closed_finding_whose_test_was_taken_out_fails(closed: Bundle) -> None:
    with_settings(RunFolder(closed.path / "tests" / "t1" / "arms" / "01-a"), {})
    assert fails(closed)
    with pytest.raises(EngineError, match="one that verifies"):
        changes.export(closed)
    with pytest.raises(EngineError, match="one that verifies"):
        changes.close(closed)
