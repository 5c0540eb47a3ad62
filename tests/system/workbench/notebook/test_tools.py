"""Flip, Whys and Compare in a kernel without a page: the real engine answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import BadInput, UsageError
from engine.findings.bundle import find_bundles
from engine.findings.finding import CannotClose
from engine.flips.flip_folder import read_verdict
from tests.support.findings import THREADS, carry_out, hanging_run
from tests.support.notebook_pages import drawn, until
from tests.support.run_folders import completed, killed
from workbench.notebook import Compare, Flip, Whys

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def own_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A lock of its own, so that tests beside this one may flip too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def test_choosing_a_suspicion_fills_the_form_and_shows_its_plan(
    ended_run: Path, tmp_path: Path
) -> None:
    flip = Flip(ended_run, flips=tmp_path / "flips", refresh_s=0.05)
    until(lambda: len(flip._choice.options) > 1)
    label, value = flip._choice.options[1]
    flip._choice.value = value
    assert flip._set.value == value[0] and label.startswith(value[0])
    flip._set.value = "compute.thread_wait=active"
    until(
        lambda: "compute.thread_wait" in flip._progress.value and "margin" in flip._progress.value
    )
    flip._set.value = "compute.thread_wait=dance"
    until(lambda: "passive, active" in flip._progress.value)
    flip._budget.value = "soon"
    until(lambda: "expected a time as 90s" in flip._progress.value)
    assert flip.result is None and not (tmp_path / "flips").exists()
    with pytest.raises(UsageError):
        flip.start()
    flip.close()


@pytest.mark.soak  # a flip is run from its screen in test_flip
def test_a_click_runs_the_flip_whose_verdict_is_an_object_and_evidence(
    ended_run: Path, tmp_path: Path
) -> None:
    # Long enough for a pair, too short for two or three.
    flip = Flip(
        ended_run,
        set="compute.slow_by=3",
        hypothesis="<b>",
        budget="9s",
        out=tmp_path / "flips" / "slow",
        refresh_s=0.05,
    )
    flip._start_button.click()
    until(lambda: flip._feed is not None)
    assert flip.wait(120) and flip.result is not None, flip._progress.value
    result, folder = flip.result, flip._feed.folder
    assert result == read_verdict(folder)
    assert result["changes"] == ["compute.slow_by: 0.0 -> 3.0"]
    assert result["verdict"] in flip._progress.value and "<svg" in flip._progress.value
    # What a person wrote is text, not markup.
    assert "<b>" not in flip._progress.value and "&lt;b&gt;" in flip._progress.value
    # The cell, run again in another kernel, shows the same flip and starts none.
    again = Flip(ended_run, out=folder)
    assert again.wait(30) and again.result == result
    assert again.start() == folder and again._started is None
    again.close()
    flip.close()


def test_a_refused_flip_says_why_and_may_be_tried_again(ended_run: Path, tmp_path: Path) -> None:
    flip = Flip(ended_run, set="compute.threads=1", out=tmp_path / "flips" / "x", refresh_s=0.05)
    flip.start()
    assert flip.wait(60) and flip.result is None
    assert "refused" in "\n".join(flip.still()[1])
    until(lambda: flip._feed is None)
    assert "another value than arm A" in flip._progress.value
    assert not flip._start_button.disabled
    flip._set.value = "compute.thread_wait=active"
    until(lambda: "margin" in flip._progress.value)
    flip.close()


def test_a_finding_is_begun_suspected_tested_and_closed(tmp_path: Path) -> None:
    run = hanging_run(tmp_path / "runs" / "<hang>")
    evidence = tmp_path / "evidence"
    whys = Whys.of(run.path, "alert gpu_idle", folder=evidence)
    until(lambda: "no cause was named" in whys._tree.value)
    assert "&lt;hang&gt;" in whys._tree.value and "<hang>" not in whys._tree.value
    whys._change.value = THREADS
    whys._buttons["add cause"].click()
    until(lambda: whys._said.value == "added c1")
    until(lambda: "test c1: does compute.threads=1 end it?" in whys._tree.value)
    with pytest.raises(CannotClose, match="c1 open"):
        whys.close_finding()
    whys._buttons["close"].click()
    until(lambda: "expected a cause that a test confirms" in whys._said.value)
    carry_out(whys.bundle, tmp_path / "flips" / "1")
    until(lambda: "t1  B_ENDS_IT: A shows it in 3 of 3 pairs" in whys._tree.value)
    whys.note("seen by <me>")
    whys._buttons["close"].click()
    until(lambda: "root cause: " in whys._tree.value)
    assert whys.check().verdict.level.name == "PASS"
    assert whys.export() == whys.bundle.path and (evidence / "LOG.md").is_file()
    again = Whys("hang-gpu-idle", folder=evidence)
    assert again.bundle == whys.bundle and len(find_bundles(evidence)) == 1
    with pytest.raises(BadInput):
        again.cause("the moon is full")
    for shown in (whys, again):
        shown.close()


def test_runs_are_compared_in_a_figure_and_a_frame(tmp_path: Path) -> None:
    runs = [completed(tmp_path / "a", nan=(7,)).path, killed(tmp_path / "b").path]
    compare = Compare(runs)
    bundle = compare._repr_mimebundle_()
    figure = bundle["application/vnd.plotly.v1+json"]
    metrics = [x["text"] for x in figure["layout"]["annotations"]]
    assert metrics[:3] == ["loss, nats", "held-out, nats", "step time, s"]
    assert [trace["name"] for trace in figure["data"]] == ["a", "b"] * len(metrics)
    assert [trace["showlegend"] for trace in figure["data"]].count(True) == 2
    losses = figure["data"][0]["y"]
    assert losses[6] is None and losses[5] == pytest.approx(4.963, abs=0.01)
    json.dumps(figure, allow_nan=False, default=list)
    assert drawn(bundle["text/html"]).count("<svg") == len(metrics)
    assert "KILLED" in bundle["text/plain"]
    assert dict(compare.frame()["run"].value_counts()) == {"a": 60, "b": 30}
    with pytest.raises(UsageError, match="a list"):
        Compare(runs[0])  # type: ignore[arg-type]
