"""Every file operation of the engine fails in turn, and the power goes at every one of them: what was
acknowledged is there, nothing half-made is taken for whole, and the error names the file and its cause.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fault_server import FaultServer, fault_server
from tests.support.faults import CODES, compiled
from tests.support.kit import Kit


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    with fault_server(compiled(tmp_path_factory.mktemp("faults"))) as server:
        yield server


@pytest.fixture(scope="module")
def kit_file(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kit-file") / "kit.json"
    path.write_text(json.dumps({k: str(v) for k, v in dataclasses.asdict(kit).items()}))
    return path


MANY, FEW = tuple(CODES), ("ENOSPC", "EINTR")
REST = ("EIO", "EDQUOT", "EROFS")


@pytest.mark.parametrize(
    ("name", "codes", "least"),
    [
        ("log", FEW, 56),
        ("log that goes on", MANY, 70),
        ("run folder", MANY, 150),
        ("small file", MANY, 50),
        ("flip", FEW, 60),
        ("student", FEW, 120),
        ("evidence", ("EINTR/once",), 40),
        pytest.param("log", REST, 84, marks=pytest.mark.soak),
        pytest.param("flip", REST, 110, marks=pytest.mark.soak),
        pytest.param("checkpoint", ("ENOSPC", "EINTR", *REST), 560, marks=pytest.mark.soak),
        pytest.param("student", REST, 150, marks=pytest.mark.soak),
        pytest.param("evidence", (*FEW, *REST), 400, marks=pytest.mark.soak),
    ],
)
def test_every_operation_may_fail_in_every_way(
    server: FaultServer, tmp_path: Path, name: str, codes: tuple[str, ...], least: int
) -> None:
    """A full disk and an interrupted call stand for every error; those of a checkpoint are in test_checkpoint.py."""
    answer = server.ask(tmp_path, "fault_scenarios.py", name, tmp_path, *codes)
    assert not answer["problems"], "\n".join(answer["problems"][:5])
    assert answer["points"] >= least, "operations have gone that used to be seen"


@pytest.mark.parametrize(
    ("code", "mode", "first", "step"),
    [
        # Every operation of each file fails above; a power loss at any of them is below.
        pytest.param("ENOSPC", "once", 5, 300, marks=pytest.mark.soak),
        pytest.param("EIO", "persistent", 11, 193, marks=pytest.mark.soak),
        *(
            pytest.param(code, mode, first, 5, marks=pytest.mark.soak)
            for first, (code, mode) in enumerate(
                [
                    ("ENOSPC", "once"),
                    ("ENOSPC", "persistent"),
                    ("EIO", "once"),
                    ("EIO", "persistent"),
                    ("EROFS", "persistent"),
                ],
                start=1,
            )
        ),
    ],
)
def test_a_run_that_meets_an_error_of_the_disk_says_so_and_is_resumed_to_the_same_end(
    server: FaultServer, kit_file: Path, tmp_path: Path, code: str, mode: str, first: int, step: int
) -> None:
    answer = server.ask(
        tmp_path, "whole_runs.py", "fail", kit_file, tmp_path, code, mode, first, step
    )
    assert not answer["problems"], "\n".join(answer["problems"][:5])
    assert answer["points"] == len(range(first, answer["calls"] + 1, step)) >= 3


@pytest.mark.parametrize(
    ("seed", "resume_every", "one_in"),
    [(0, 30, 7), *(pytest.param(seed, 50, 1, marks=pytest.mark.soak) for seed in range(21))],
)
def test_a_power_loss_at_any_operation_of_a_run_loses_nothing_that_was_acknowledged(
    server: FaultServer, kit_file: Path, tmp_path: Path, seed: int, resume_every: int, one_in: int
) -> None:
    """One state in seven stands for each of them, and four resumed ones for all that can be resumed."""
    how = (seed, resume_every, one_in)
    answer = server.ask(tmp_path, "whole_runs.py", "power", kit_file, tmp_path, *how)
    assert answer["journal_is_whole"], "a write was not seen: the states prove nothing"
    assert not answer["problems"], "\n".join(answer["problems"][:5])
    assert answer["states"] >= 90 and answer["resumed"] >= 3


@pytest.mark.soak  # a run that is killed once is in test_run_lifecycle.py
@pytest.mark.parametrize("seed", range(2, 24))
def test_runs_killed_at_random_moments_come_to_the_same_end(
    server: FaultServer, kit_file: Path, tmp_path: Path, seed: int
) -> None:
    answer = server.ask(tmp_path, "whole_runs.py", "kills", kit_file, tmp_path, seed, 50)
    assert not answer["problems"], "\n".join(answer["problems"][:5])
    assert answer["kills"] >= 50
