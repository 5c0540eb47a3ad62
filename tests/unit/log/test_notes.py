"""Tags and notes of a run: kept beside it, bounded, and never lost to a second writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import limits
from engine.errors import BadInput, RunLogError
from engine.log.folder import RunFolder, create_run
from engine.log.notes import NAME, Notes, change_notes, read_notes


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run", "", {"spec": {}})


def test_a_run_without_notes_has_none(run: RunFolder) -> None:
    assert read_notes(run) == Notes()


def test_tags_are_added_removed_and_replaced_and_the_note_stays(run: RunFolder) -> None:
    change_notes(run, add=["good", "base", "good"], note="  lr was\n too high ")
    assert read_notes(run) == Notes(tags=("good", "base"), text="lr was too high")
    assert change_notes(run, remove=["good"], add=["new"]).tags == ("base", "new")
    assert change_notes(run, tags=["other"]) == Notes(tags=("other",), text="lr was too high")
    assert change_notes(run, note="") == read_notes(run) == Notes(tags=("other",))
    assert [path.name for path in run.path.glob("notes*")] == [NAME]


@pytest.mark.parametrize(
    "tags",
    [["two words"], [""], ["line\n"], ["x" * (limits.TAG.most + 1)], [f"t{n}" for n in range(17)]],
)
def test_a_bad_tag_changes_nothing(run: RunFolder, tags: list[str]) -> None:
    change_notes(run, add=["kept"])
    with pytest.raises(BadInput, match="tag"):
        change_notes(run, add=tags)
    assert read_notes(run).tags == ("kept",)


def test_a_note_that_is_too_long_is_refused(run: RunFolder) -> None:
    with pytest.raises(BadInput, match="note: expected at most 1,000 characters"):
        change_notes(run, note="x" * 1001)


@pytest.mark.parametrize("text", ["[]", "{", '{"tags": 3}', '{"note": []}', '{"tags": ["a b"]}'])
def test_a_broken_file_is_named_and_kept(run: RunFolder, text: str) -> None:
    (run.path / NAME).write_text(text)
    with pytest.raises(RunLogError, match="notes"):
        change_notes(run, add=["good"])
    assert (run.path / NAME).read_text() == text
