"""Every wrong program against tests of every form: none passes, and none spoils the evaluation."""

from __future__ import annotations

import io
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.evaluate.guest_judge import Judged, judge
from engine.evaluate.sandbox import Sandbox, Trial
from tests.support.exam_shapes import RIGHT, RIGHT_TOO, SHAPES, WRONG, exam
from tests.support.lacks import open_sandbox_here

pytestmark = [pytest.mark.attack, pytest.mark.soak]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox_here(cpu_s=1, clock_s=20)


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


KINDS = ("int", "tuple", "set", "frozenset", "dict", "bytes", "complex", "type", "object", "x", "")
KEYS = ("value", "raised", "text", "not_plain", "true", "method", "hello", "ready", "held", "nonce")


def value(draw: random.Random, depth: int) -> object:
    """Like an answer's, and wrong in many places."""
    if depth == 0 or draw.random() < 0.3:
        leaves = (
            0,
            -1,
            2**61 - 1,
            10**300,
            1e308,
            float("nan"),
            True,
            None,
            "",
            "ff",
            "\x00",
            [],
            {},
        )
        return draw.choice((*leaves, "StopIteration", "SystemExit", "x" * 5000))
    inner = [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if draw.random() < 0.3:
        return inner
    held: object = draw.choice((inner, [[one, one] for one in inner], *inner, "7" * 20_000))
    return {draw.choice(KINDS): held for _ in range(1 if draw.random() < 0.9 else 2)}


def line(draw: random.Random) -> bytes:
    record = {
        draw.choice(KEYS): value(draw, draw.randrange(6)) for _ in range(draw.randrange(1, 4))
    }
    text = json.dumps(record).encode()
    cut = draw.randrange(len(text))
    how = draw.randrange(8)
    if how == 0:
        text = text[:cut]
    elif how == 1:
        text = text[:cut] + draw.randbytes(draw.randrange(1, 9)) + text[cut:]
    elif how == 2:
        text = text[:cut] + draw.choice((b"[", b'{"a":')) * 3000 + text[cut:]
    elif how == 3:
        text = text.replace(b"0", b"9" * draw.choice((700, 5000)))
    return text + b"\n" * (draw.random() < 0.95)


RIGHT_ANSWERS: dict[str, tuple[object, ...]] = {
    "for got in map(f, [1, 2]):\n    assert got == 'right'": ("right", "right"),
    "node = Node(1)\nassert node.value == 'right'\nassert {f(node): 1} == {'right': 1}": (
        {"object": 0},
        "right",
        "right",
    ),
    "try:\n    got = f(1)\nexcept:\n    got = None\nassert str(got) == sorted([got])[0] == 'right'": (
        "right",
    ),
    "import contextlib\nwith contextlib.suppress(BaseException):\n    assert f(1) + f(2) == 'right'": (
        "ri",
        "ght",
    ),
}


def judged(tests: str, held: list[int] | None, answers: list[bytes]) -> Judged:
    task = {"setup": "", "tests": tests, "entries": ["f"], "classes": ["Node"], "held": held}
    lines = b"".join([b'{"hello": true}\n', b'{"ready": true}\n', *answers])
    return judge(task, io.BytesIO(), io.BytesIO(lines), lambda: None)


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_spoils_the_judge_or_passes_without_being_right(seed: int) -> None:
    draw = random.Random(seed)
    for tests, right in RIGHT_ANSWERS.items():
        answers = [json.dumps({"value": one}).encode() + b"\n" for one in right]
        reference = judged(tests, None, answers)
        assert reference.outcome == "pass"
        for _ in range(400):
            # Right up to some answer, and from there on anything.
            begun = answers[: draw.randrange(len(answers))]
            spoilt = [*begun, *(line(draw) for _ in range(4))]
            found = judged(tests, reference.held, spoilt)
            assert found.outcome == "fail", (found, spoilt)
            assert len(json.dumps(found)) < 10_000
