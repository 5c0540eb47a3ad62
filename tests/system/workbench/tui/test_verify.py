"""The outcome of `engine verify` among the checks of a run."""

from __future__ import annotations

from pathlib import Path

from engine.verdict import Level, Verdict
from engine.verify.kept_outcome import digest_log, keep_outcome
from tests.support.run_folders import completed, running
from tests.support.screens import texts_of
from workbench.feed import RunFeed
from workbench.panes import check_words


def test_the_kept_outcome_is_below_the_counts_of_the_checks(tmp_path: Path) -> None:
    run = completed(tmp_path / "run")
    feed = RunFeed(run)
    assert check_words(feed.read_all())[1] == "not verified"
    log = digest_log(run)
    assert log is not None
    kept = keep_outcome(run, log, Verdict(Level.FAIL, "steps: step 3: loss"), 3, "")
    words = f"verified: fail: steps: step 3: loss, {kept.at[:10]}"
    assert check_words(feed.read_all())[1] == words
    assert words in texts_of(run.path, (80, 24), "7")[-1]
    with run.events.open("ab") as file:
        file.write(b"{")
    assert check_words(feed.read_all())[1].startswith("verified: stale, the log has changed since")
    (run.path / "verified.json").write_text("[]")
    assert "expected a JSON object" in check_words(feed.read_all())[1]


def test_a_run_that_goes_on_is_not_verified(tmp_path: Path) -> None:
    scene = running(tmp_path / "active", done=5)
    assert not any("verified" in line for line in check_words(RunFeed(scene.run).read_all()))
    scene.close()
