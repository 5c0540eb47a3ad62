"""The kept outcome of a verification: bound to its log, read with limits, and never better than what was seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import RunLogError
from engine.limits import RUN_FILE
from engine.log.folder import RunFolder, create_run
from engine.verdict import Level, Verdict
from engine.verify.kept_outcome import (
    NAME,
    Log,
    Outcome,
    digest_log,
    is_stale,
    keep_outcome,
    outcome_text,
    read_outcome,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = create_run(tmp_path / "run", "", {"spec": {}})
    made.events.write_text('{"kind": "log_opened"}\n')
    return made


def log_of(run: RunFolder) -> Log:
    log = digest_log(run)
    assert log is not None
    return log


def keep(run: RunFolder, level: Level, steps: int, rounding: str = "") -> Outcome:
    return keep_outcome(run, log_of(run), Verdict(level, "why"), steps, rounding)


def test_a_run_that_was_not_verified_has_no_outcome(run: RunFolder) -> None:
    assert read_outcome(run) is None
    assert outcome_text(None, stale=False, last_step=30) == "not verified"


def test_an_outcome_is_read_as_it_was_kept(run: RunFolder) -> None:
    kept = keep(run, Level.PASS, 30)
    assert read_outcome(run) == kept and not is_stale(run, kept)
    assert sorted(path.name for path in run.path.glob("verified*")) == [NAME]


@pytest.mark.parametrize("change", ["grown", "altered", "lost"])
def test_a_log_that_has_changed_makes_the_outcome_stale(run: RunFolder, change: str) -> None:
    kept = keep(run, Level.PASS, 30)
    was = run.events.read_bytes()
    if change == "lost":
        run.events.unlink()
    else:
        run.events.write_bytes(was + b"\n" if change == "grown" else was.replace(b"o", b"0"))
    assert is_stale(run, kept)
    assert outcome_text(kept, stale=True, last_step=30).startswith(
        "stale, the log has changed since "
    )


def test_a_log_that_grows_during_a_verification_makes_its_outcome_stale(run: RunFolder) -> None:
    log = log_of(run)
    with run.events.open("ab") as file:
        file.write(b"{}\n")
    assert is_stale(run, keep_outcome(run, log, Verdict(Level.PASS, "why"), 30, ""))


def test_fewer_steps_replace_more_steps_only_where_they_fail(run: RunFolder) -> None:
    longer = keep(run, Level.PASS, 30)
    assert keep(run, Level.PASS, 2) == keep(run, Level.UNKNOWN, 29) == longer
    failed = keep(run, Level.FAIL, 3)
    assert keep(run, Level.PASS, 2) == read_outcome(run) == failed
    again = keep(run, Level.PASS, 3)
    assert read_outcome(run) == again and again.level == "pass"
    run.events.write_text("another\n")
    assert keep(run, Level.PASS, 1).steps == 1


def test_the_line_says_steps_rounding_and_day(run: RunFolder) -> None:
    kept = keep(run, Level.PASS, 30)
    day = kept.at[:10]
    told = outcome_text(kept, stale=False, last_step=30)
    assert told == f"pass, 30 steps to the bit, {day}"
    partly = keep(run, Level.PASS, 31, rounding="of a GPU")
    told = outcome_text(partly, stale=False, last_step=2000)
    assert told == f"pass, 31 of 2,000 steps within rounding, {day}"
    wrong = keep_outcome(run, log_of(run), Verdict(Level.FAIL, "step 3:\nloss"), 3, "")
    assert outcome_text(wrong, stale=False, last_step=30) == f"fail: step 3: loss, {day}"


@pytest.mark.parametrize(
    "change",
    [
        {"level": "passed"},
        {"steps": -1},
        {"steps": True},
        {"at": "yesterday"},
        {"log": {"bytes": 1, "sha256": "0"}},
        {"log": None},
        {"reason": 3},
    ],
)
def test_a_malformed_outcome_is_refused_and_replaced(
    run: RunFolder, change: dict[str, object]
) -> None:
    keep(run, Level.PASS, 30)
    written = json.loads((run.path / NAME).read_text())
    (run.path / NAME).write_text(json.dumps(written | change))
    with pytest.raises(RunLogError, match="expected the fields of an outcome"):
        read_outcome(run)
    assert keep(run, Level.PASS, 1) == read_outcome(run)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "expected a JSON object"),
        (b"{", "expected JSON"),
        (b"{}", "expected the fields of an outcome"),
        (b" " * (RUN_FILE.most + 1), "expected at most"),
    ],
)
def test_what_is_no_outcome_is_named(run: RunFolder, content: bytes, words: str) -> None:
    (run.path / NAME).write_bytes(content)
    with pytest.raises(RunLogError, match=words):
        read_outcome(run)
