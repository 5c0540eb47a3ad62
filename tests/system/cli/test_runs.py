"""`engine runs --filter` and `engine tag`: what is listed, and what is kept beside a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from engine.log.folder import RunFolder
from tests.support.run_folders import completed, corrupt, killed
from tests.support.running import engine_here


def with_settings(run: RunFolder, **train: object) -> RunFolder:
    run.effective.write_text(json.dumps({"spec": {"train": train}}))
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with_settings(completed(tmp_path / "slow"), lr=0.0001)
    with_settings(killed(tmp_path / "fast"), lr=0.01)
    return tmp_path


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        ("lr>0.001", ["fast"]),
        ("train.lr<0.001 state:completed", ["slow"]),
        ("/^fast/", ["fast"]),
        ("tag:good", []),
    ],
)
def test_the_list_has_the_runs_for_which_all_terms_hold(
    folder: Path, terms: str, names: list[str]
) -> None:
    done = engine_here("runs", folder, "--json", "--filter", terms)
    assert done.returncode == 0, done.stderr
    assert [Path(run["run"]).name for run in json.loads(done.stdout)] == names


def test_since_leaves_out_runs_that_have_not_logged_since(folder: Path) -> None:
    for path in (folder / "slow").rglob("*"):
        os.utime(path, (1e9, 1e9))
    for when, names in (
        ("1h", ["fast"]),
        ("1000000000", ["fast", "slow"]),
        ("1000000001", ["fast"]),
        ("2001-09-08", ["fast", "slow"]),
        ("2001-09-11T00:00Z", ["fast"]),
    ):
        done = engine_here("runs", folder, "--json", "--since", when)
        assert [Path(run["run"]).name for run in json.loads(done.stdout)] == names, when
    done = engine_here("runs", folder, "--since", "yesterday")
    assert done.returncode == 64
    assert "expected 30m, 2h, 7d, a date or seconds of Unix time, found 'yesterday'" in done.stderr


def test_a_bad_term_is_refused_in_words(folder: Path) -> None:
    done = engine_here("runs", folder, "--filter", "lr>fast")
    assert done.returncode == 65
    assert "expected a number after >, found fast" in done.stderr


def test_tags_and_the_note_of_a_run_are_set_listed_and_filtered_by(folder: Path) -> None:
    run = folder / "slow"
    done = engine_here("tag", run, "good", "base", "--note", "keep this", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "schema": "apr-workbench/tag-1",
        "run": str(run),
        "tags": ["good", "base"],
        "note": "keep this",
    }
    done = engine_here("tag", run, "--remove", "base")
    assert done.stdout.splitlines() == ["tags  good", "note  keep this"]
    (found,) = json.loads(engine_here("runs", folder, "--filter", "tag:good", "--json").stdout)
    assert (found["tags"], found["note"]) == (["good"], "keep this")
    assert "[good]" in engine_here("runs", folder).stdout
    assert engine_here("tag", run, "two words").returncode == 65


def test_a_run_that_cannot_be_read_keeps_its_tags_in_the_list(tmp_path: Path) -> None:
    run = corrupt(tmp_path / "broken").path
    engine_here("tag", run, "odd")
    (found,) = json.loads(engine_here("runs", tmp_path, "--json", "--filter", "tag:odd").stdout)
    assert found["tags"] == ["odd"]
    assert "expected line number 20" in found["error"]
    done = engine_here("runs", tmp_path, "--filter", "state:unreadable")
    assert "expected line number 20" in done.stdout
