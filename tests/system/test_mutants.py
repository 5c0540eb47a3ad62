"""A few of `tests/mutants`, always the same; `make mutants` plants them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run import HERE, KINDS, SPECS, VERIFY, EditError, killer, mutated, read_table

TABLE = {mutant.name: mutant for mutant in read_table()}
PLANTED = {
    "labels_rolled": (),
    "label_behind_turn": pytest.mark.soak,
    "with_replacement": pytest.mark.soak,
    "document_twice": pytest.mark.soak,
    "kd_without_t_squared": pytest.mark.soak,
    "half_of_the_draws": pytest.mark.soak,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, marks in PLANTED.items()]
)
def test_the_test_that_the_table_names_fails_in_a_mutated_copy(name: str, tmp_path: Path) -> None:
    """One of them shows that a copy is mutated and its test fails there; the others show that of other tests."""
    found = killer(TABLE[name], tmp_path)
    assert found is not None and found.split("[")[0] in TABLE[name].killed_by


@pytest.mark.parametrize("name", TABLE)
def test_the_text_that_a_mutant_replaces_is_in_its_file_once(name: str) -> None:
    assert mutated(name)


def test_a_text_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    name = "labels_rolled"
    (file,) = mutated(name)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("nothing of it\n")
    with pytest.raises(EditError, match=f"expected once in {file}, found 0"):
        mutated(name, tmp_path)


def test_each_line_of_the_table_names_a_killer_or_a_reason() -> None:
    for mutant in TABLE.values():
        assert mutant.kind in KINDS and mutant.what, mutant.name
        assert bool(mutant.killed_by) != bool(mutant.why), mutant.name
        assert mutant.killed_by != VERIFY or mutant.run.split()[0] in SPECS, mutant.name


def test_the_table_and_the_edits_name_the_same_mutants() -> None:
    assert sorted(TABLE) == sorted(path.stem for path in (HERE / "edits").iterdir())
