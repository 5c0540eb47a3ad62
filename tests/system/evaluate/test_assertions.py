"""A pass needs every assertion of the tests: no exception and no value of a program gets round one, and what
keeps the judge from a verdict counts against the program and never against the evaluation.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cli.main import main
from engine.evaluate import guest_wire, humaneval
from engine.evaluate.guest_judge import Judged, judge
from engine.evaluate.problems import read_problems
from engine.evaluate.sandbox import TRIES, Exam, Sandbox
from engine.generation.complete import Piece
from engine.limits import ANSWER_BITS, ANSWER_BYTES, ANSWER_DEPTH
from tests.support.exam_shapes import RIGHT, RIGHT_TOO, SHAPES, WRONG, everywhere, exam
from tests.support.kit import Kit
from tests.support.lacks import open_sandbox_here


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox_here(cpu_s=2, clock_s=20)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_program_passes_tests_of_every_form(shape: str, sandbox: Sandbox) -> None:
    trial = sandbox.try_program(RIGHT, exam(shape))
    assert trial.outcome == "pass", trial.reason


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        ("map", "raise StopIteration"),
        ("map in a list", "raise StopIteration"),
        ("all", "raise StopIteration"),
        ("next", "raise StopIteration"),
        ("sentinel", "raise StopIteration"),
        ("sequence", "raise IndexError"),
        ("attribute", "raise AttributeError('value')"),
        ("bare except", "raise ValueError"),
        ("bare except", "raise GeneratorExit"),
        ("suppress", "return None"),
        ("finally", "return None"),
        ("loop over the answer", "return []"),
        ("unittest", "return None"),
        ("generator", "raise KeyboardInterrupt"),
    ],
)
def test_no_exception_and_no_value_gets_a_wrong_program_past_an_assertion(
    shape: str, wrong: str, sandbox: Sandbox
) -> None:
    trial = sandbox.try_program(WRONG[wrong], exam(shape))
    assert trial.outcome == "fail", trial.reason


def test_the_reason_says_which_assertion_was_missed_or_which_exception_was_lost(
    sandbox: Sandbox,
) -> None:
    empty = sandbox.try_program(WRONG["return []"], exam("loop over the answer"))
    assert empty.reason.endswith("than with the reference solution: assert got == 2 * n")
    lost = sandbox.try_program(everywhere("raise StopIteration('over')"), exam("map"))
    assert "StopIteration: over, which no handler of the tests caught" in lost.reason


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        # A handler of the tests is theirs, whatever it catches.
        ("try:\n    f(1)\nexcept StopIteration as error:\n    assert str(error) == 'no'", "StopIteration"),
        (
            "def kind():\n    try:\n        return f(1)\n    except LookupError as error:\n"
            "        raise ValueError('so') from error\ntry:\n    kind()\nexcept ValueError:\n"
            "    assert True",
            "KeyError",
        ),
        (
            "import contextlib\nwith contextlib.suppress(ArithmeticError):\n    f(1)\n"
            "assert not hasattr(f, 'x')",
            "ZeroDivisionError",
        ),
        (
            "import unittest\ncase = unittest.TestCase()\ncase.assertRaises(OSError, f, 1)",
            "OSError",
        ),
    ],
)  # fmt: skip
def test_tests_that_want_an_exception_get_it(tests: str, program: str, sandbox: Sandbox) -> None:
    right = f"def f(x): raise {program}('no')"
    wanted = Exam(setup="", tests=tests, reference=right)
    assert sandbox.try_program(right, wanted).outcome == "pass"
    assert sandbox.try_program("def f(x): raise EOFError('no')", wanted).outcome == "fail"


def test_every_assertion_holds_as_often_as_with_the_reference_and_no_exception_is_lost() -> None:
    def judged(tests: str, held: list[int] | None, *answers: object) -> Judged:
        said = [{"hello": True}, {"ready": True}, *answers]
        lines = io.BytesIO("".join(json.dumps(one) + "\n" for one in said).encode())
        task = {"setup": "", "tests": tests, "entries": [], "classes": [], "held": held}
        return judge(task, io.BytesIO(), lines, lambda: None)

    loop = "assert seq(1)\nfor got in seq(3):\n    assert got"
    some: object = {"value": [1, 2]}
    right = judged(loop, None, some, some)
    assert right == ("pass", "2 calls, 3 assertions", [1, 2])
    assert judged(loop, right.held, some, some).outcome == "pass"
    assert judged(loop, right.held, some, {"value": [1, 2, 3]}).outcome == "pass"
    for fewer in ([], [1]):
        outcome, reason, _ = judged(loop, right.held, some, {"value": fewer})
        assert outcome == "fail" and reason.endswith("reference solution: assert got")
    ended = judged(
        "assert f(1)\nassert not list(map(f, [1]))", None, some, {"raised": "StopIteration"}
    )
    assert ended.outcome == "fail" and "which no handler of the tests caught" in ended.reason


def test_tests_without_an_assertion_pass_nothing(sandbox: Sandbox) -> None:
    trial = sandbox.try_program(RIGHT, Exam(setup="", tests="print(f(1))"))
    assert trial == ("fail", "the tests get to their end without an assertion")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1 << 70_000", "a number of 70,001 bits, more than 65,536"),
        ("'x' * (5 << 20)", "nonsense"),
        ("{n * (2 ** 61 - 1) for n in range(60_000)}", "of CPU time"),
        ("eval('[' * 95 + ']' * 95) and [[[[[[[[[eval('[' * 95 + ']' * 95)]]]]]]]]]", "100 deep"),
    ],
)
def test_an_answer_that_costs_more_to_judge_than_there_is_fails(
    answer: str, reason: str, sandbox: Sandbox
) -> None:
    trial = replace(sandbox, cpu_s=1).try_program(
        everywhere(f"return {answer}"), Exam(setup="", tests="assert set(f()) == {1}")
    )
    assert trial.outcome == "fail" and reason in trial.reason


def test_what_the_tests_make_of_an_answer_is_the_programs_doing_too(sandbox: Sandbox) -> None:
    """Each of these takes the judge all its memory, or its CPU time."""
    for tests, answer in (
        ("assert 'x' * f() == ''", "1 << 40"),
        ("kept = f()\nwhile True: kept += kept", "['x']"),
        ("import re\nassert not re.match('(a|a)*$', f())", "'a' * 40 + 'b'"),
    ):
        trial = replace(sandbox, cpu_s=1).try_program(
            everywhere(f"return {answer}"), Exam(setup="", tests=tests)
        )
        assert trial.outcome == "fail", tests


def test_the_limits_of_answers_are_those_of_the_table() -> None:
    held = (guest_wire.MOST_BYTES, guest_wire.MOST_BITS, guest_wire.MOST_DEPTH)
    assert held == (ANSWER_BYTES.most, ANSWER_BITS.most, ANSWER_DEPTH.most)


def test_an_attribute_that_raises_is_an_exception_as_any_other(sandbox: Sandbox) -> None:
    program = "class Node:\n    def __init__(self, value): self.value = value\n"
    wrong = (
        "class Node:\n    def __init__(self, value): pass\n    @property\n"
        "    def value(self): raise StopIteration\n"
    )
    tests = (
        "nodes = [Node(1), Node(2)]\nassert not hasattr(nodes[0], 'next')\n"
        "assert all(n == 1 + i for i, n in enumerate(map(lambda node: node.value, nodes)))"
    )
    wanted = Exam(setup="", tests=tests, reference=program, classes=("Node",))
    assert sandbox.try_program(program, wanted).outcome == "pass"
    assert sandbox.try_program(wrong, wanted).outcome == "fail"


def test_numbers_of_many_digits_are_judged_as_any_other(sandbox: Sandbox) -> None:
    tests = Exam(setup="", tests="assert power(n) == 3 ** n\nassert power(-n) == 0")
    tests = replace(tests, setup="n = 20_000\n")
    program = "def power(n): return 3 ** n if n > 0 else 0"
    assert sandbox.try_program(program, tests).outcome == "pass"
    assert sandbox.try_program(program.replace("0 else", "0 else 1 +"), tests).outcome == "fail"


def test_a_sandbox_that_does_not_start_is_tried_again_and_then_unknown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    broken = tmp_path / "bwrap"
    broken.write_text(f"#!/bin/sh\necho x >> {log}\nexit 1\n")
    broken.chmod(0o755)
    sandbox = Sandbox(bwrap=str(broken), version="", clock_s=20)
    trial = sandbox.try_program(RIGHT, Exam(setup="", tests="assert f(1) == 2"))
    assert trial.outcome == "harness" and "without a verdict" in trial.reason
    assert 0 < len(log.read_text().split()) <= 2 * TRIES
    gone = replace(sandbox, bwrap=str(tmp_path / "gone"))
    assert gone.try_program(RIGHT, Exam(setup="", tests="assert f(1) == 2")).outcome == "harness"


def test_a_reference_solution_that_fails_says_nothing_about_another(sandbox: Sandbox) -> None:
    wanted = replace(exam("plain"), reference=WRONG["return None"])
    assert sandbox.try_program(WRONG["return None"], wanted).outcome == "fail"
    trial = sandbox.try_program(RIGHT, wanted)
    assert trial.outcome == "harness" and "the reference solution does not pass" in trial.reason


@pytest.mark.parametrize("right", RIGHT_TOO)
def test_a_program_that_is_right_in_another_way_passes(right: str, sandbox: Sandbox) -> None:
    for shape in ("map", "sentinel", "unittest"):
        trial = sandbox.try_program(right, exam(shape))
        assert trial.outcome == "pass", (shape, trial.reason)


def test_problem_files_hold_programs_to_the_assertions_of_their_reference(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """In both public formats."""
    check = "".join(
        f"    {line}\n" for line in SHAPES["map"].replace("f,", "candidate,").splitlines()
    )
    humaneval = {
        "task_id": "Own/0",
        "prompt": "def f(x):\n    '''Twice x.'''\n",
        "entry_point": "f",
        "canonical_solution": "    return 2 * x\n",
        "test": f"def check(candidate):\n{check}",
    }
    mbpp = {
        "task_id": 1,
        "text": "Twice x.",
        "code": "def f(x):\n    return 2 * x\n",
        "test_setup_code": "",
        "test_list": ["assert [n for n in map(f, [1, 2])][:2] in ([], [2, 4])", "assert f(2) == 4"],
    }
    for name, line, wrong in (
        ("humaneval", humaneval, "    raise StopIteration\n"),
        ("mbpp", mbpp, "def f(x):\n    if x == 2: return 4\n    raise StopIteration\n"),
    ):
        path = tmp_path / name
        path.write_text(json.dumps(line) + "\n")
        (problem,) = read_problems(path, name).problems
        tried = [problem.program(text) for text in (problem.reference, wrong)]
        trials = [sandbox.try_program(one, problem.tests) for one in tried]
        assert [one.outcome for one in trials] == ["pass", "fail"], trials


def test_one_hostile_program_neither_passes_nor_keeps_the_command_from_a_figure(
    kit: Kit,
    sandbox: Sandbox,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [
        "    return 2 * x\n",
        "    raise StopIteration\n",
        "    return {n * (2 ** 61 - 1) for n in range(60_000)}\n",
        "    return 1 << 15_000_000\n",
        "    import os\n    os._exit(0)\n",
    ]
    lines = [
        {
            "task_id": f"Own/{index}",
            "prompt": f"def f(x):\n    '''Twice x, {index}.'''\n",
            "entry_point": "f",
            "canonical_solution": texts[0],
            "test": "def check(candidate):\n"
            "    for got, want in zip(map(candidate, [1, 2]), [2, 4]):\n"
            "        assert got == want and len({got}) == 1\n"
            "        assert got in set([want]) | set([got]) - set([0])\n",
        }
        for index in range(len(texts))
    ]
    data = tmp_path / "own.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked: list[int] = []

    def completed(*given: object, keys: list[str], **_: object) -> Iterator[Piece]:
        asked.extend(int(key.split("/")[1]) for key in keys)
        for place, key in enumerate(keys):
            text = texts[int(key.split("/")[1])]
            yield Piece(prompt=place, text=text, ended="stop", tokens=5)

    monkeypatch.setattr(humaneval, "complete", completed)
    monkeypatch.setattr(humaneval, "not_contained", lambda *_: [])
    monkeypatch.setattr("engine.evaluate.sandbox.open_sandbox", lambda: replace(sandbox, cpu_s=1))
    given = ["eval", "humaneval", str(kit.teacher), "--data", str(data), "--json"]
    given += ["--max-tokens", "8", "--results", str(tmp_path / "results.jsonl")]
    assert main(given) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["mode"] == "measured" and printed["passed"] == 1
    assert [one["outcome"] for one in printed["per_problem_results"]] == ["pass"] + ["fail"] * 4
    assert main(given) == 0 and asked == list(range(len(texts)))
