"""The rows that a run trained on are on record by content: whole, without what a killed writer left, up to the step
that a resume goes on from."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from engine.errors import DiskFull, RunLogError
from engine.log.folder import RunFolder
from engine.log.rows import NO_ROWS, RowsWriter, path_of, read_ranks, read_rows


def hash_of(*numbers: int) -> bytes:
    return bytes(numbers).ljust(8, b"\0")


ROWS = {
    # Of each step the third row has two documents.
    step: [
        (hash_of(step, row), (hash_of(step, row, 1), hash_of(step, row, 2)) if row == 2 else ())
        for row in range(3)
    ]
    for step in range(1, 6)
}


def written(run: RunFolder, until: int, *, behind: int = 0, ranks: int = 1) -> RowsWriter:
    writer = RowsWriter(run, 0, ranks, behind)
    for step in range(behind + 1, until + 1):
        writer.append(step, ROWS[step])
    return writer


def test_rows_are_read_back_in_order_with_their_steps(tmp_path: Path) -> None:
    written(RunFolder(tmp_path), 5)
    found = list(read_rows(path_of(RunFolder(tmp_path), 0)))
    assert found == [(step, *one) for step, rows in ROWS.items() for one in rows]


@pytest.mark.parametrize("torn", [0, 1, 15])
def test_a_resume_goes_on_behind_its_step_with_the_digest_of_an_uninterrupted_run(
    torn: int, tmp_path: Path
) -> None:
    whole = RunFolder(tmp_path / "whole")
    stopped = RunFolder(tmp_path / "stopped")
    for run in (whole, stopped):
        run.path.mkdir()
    wanted = written(whole, 5).digest
    assert wanted != NO_ROWS
    written(stopped, 4)
    path = path_of(stopped, 0)
    path.write_bytes(path.read_bytes() + b"\xff" * torn)
    assert written(stopped, 5, behind=2).digest == wanted
    assert path.read_bytes() == path_of(whole, 0).read_bytes()


def test_zeros_that_a_power_loss_left_in_the_place_of_rows_are_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    wanted = written(run, 5).digest
    path = path_of(run, 0)
    whole = path.read_bytes()
    written(run, 2, behind=2)
    path.write_bytes(path.read_bytes() + bytes(40))
    assert written(run, 5, behind=2).digest == wanted
    assert path.read_bytes() == whole


def test_a_writer_that_could_not_write_its_header_is_no_hindrance_to_the_next(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(DiskFull):
            RowsWriter(run, 0, 1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written(run, 2)
    assert [one.step for one in read_rows(path_of(run, 0))] == [1, 1, 1, 2, 2, 2]


def test_what_a_killed_writer_left_of_a_record_is_not_read(tmp_path: Path) -> None:
    written(RunFolder(tmp_path), 2)
    path = path_of(RunFolder(tmp_path), 0)
    whole = list(read_rows(path))
    path.write_bytes(path.read_bytes()[:-3])
    *others, last = read_rows(path)
    assert others == whole[:-1] and last == whole[-1]._replace(documents=whole[-1].documents[:1])


def test_rows_of_another_number_of_ranks_are_set_aside(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    written(run, 3)
    assert written(run, 4, behind=3, ranks=2).digest != NO_ROWS
    assert [one.step for one in read_rows(path_of(run, 0))] == [4, 4, 4]
    assert read_ranks(path_of(run, 0)) == 2
    assert len(list(read_rows(tmp_path / "rows" / "0-until-3.bin"))) == 9


def test_rows_of_an_earlier_form_are_set_aside(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    written(run, 3)
    path = path_of(run, 0)
    path.write_bytes(path.read_bytes().replace(b"aprrows2", b"aprrows1"))
    assert written(run, 4, behind=3).digest != NO_ROWS
    assert [one.step for one in read_rows(path)] == [4, 4, 4]
    assert (tmp_path / "rows" / "0-until-3.bin").read_bytes().startswith(b"aprrows1")


@pytest.mark.parametrize("content", [b"", b"apr", b"something else, longer than a header"])
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "0.bin"
    path.write_bytes(content)
    with pytest.raises(RunLogError, match="expected a file that begins with"):
        list(read_rows(path))
