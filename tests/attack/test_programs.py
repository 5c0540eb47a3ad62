"""Every wrong program against tests of every form: none passes, and none spoils the evaluation."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from exam_shapes import RIGHT, RIGHT_TOO, SHAPES, WRONG, exam

from engine.errors import NoAnswer
from engine.evaluate.sandbox import Sandbox, Trial, open_sandbox

pytestmark = [pytest.mark.attack, pytest.mark.soak]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox(cpu_s=1, clock_s=20)
    except NoAnswer as error:
        pytest.skip(f"no sandbox here: {error.message}")


def tried(sandbox: Sandbox, programs: list[str], *, every: int = 1) -> dict[tuple[str, int], Trial]:
    """Each program against all forms of tests, or against one in `every`, each form with as many."""
    pairs = [
        (shape, number)
        for at, shape in enumerate(SHAPES)
        for number in range(len(programs))
        if (at + number) % every == 0
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        trials = pool.map(lambda pair: sandbox.try_program(programs[pair[1]], exam(pair[0])), pairs)
        return dict(zip(pairs, trials, strict=True))


def test_no_wrong_program_passes_tests_of_any_form(sandbox: Sandbox) -> None:
    assert len(WRONG) >= 60
    names = list(WRONG)
    for (shape, number), trial in tried(sandbox, list(WRONG.values()), every=2).items():
        assert trial.outcome == "fail", (shape, names[number], trial.reason)


def test_every_right_program_passes_tests_of_every_form(sandbox: Sandbox) -> None:
    for (shape, number), trial in tried(sandbox, [RIGHT, *RIGHT_TOO]).items():
        assert trial.outcome == "pass", (shape, number, trial.reason)
