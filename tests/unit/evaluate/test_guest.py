"""What runs inside the sandbox: a program, and then its tests."""

from __future__ import annotations

import pytest

from engine.evaluate.guest import run

TESTS = "assert f(1) == 2\nassert f(2) == 4"


@pytest.mark.parametrize(
    ("program", "outcome", "reason"),
    [
        ("def f(x): return 2 * x", "pass", ""),
        ("def f(x): return 2", "fail", "an assertion does not hold: assert f(2) == 4"),
        ("import sys\nsys.exit(0)", "fail", "SystemExit: 0"),
        ("import sys\ndef f(x): sys.exit(0)", "fail", "SystemExit: 0, in assert f(1) == 2"),
        ("def f(x): return {}[x]", "fail", "KeyError: 1, in assert f(1) == 2"),
        ("raise KeyboardInterrupt", "fail", "KeyboardInterrupt: "),
        ("def f(", "fail", "SyntaxError: '(' was never closed (<program>, line 1)"),
    ],
)
def test_a_program_whose_tests_did_not_run_to_their_end_is_no_pass(
    program: str, outcome: str, reason: str
) -> None:
    assert run(program, TESTS) == (outcome, reason)


def test_tests_that_do_not_compile_say_nothing_about_the_program() -> None:
    outcome, reason = run("def f(x): return 2 * x", "assert f(")
    assert outcome == "harness" and reason.startswith("the tests do not compile: SyntaxError")
