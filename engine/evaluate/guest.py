"""Run a generated program and then its tests, inside the sandbox, with the standard library alone.

Arguments are two file descriptors. From the first it reads the task: `{"limits", "nonce", "program", "tests"}` in JSON.
To the second it writes the result: an empty line before the program begins, and one record `{"nonce", "outcome",
"reason"}` after the tests have ended. A program that ends this process leaves no record.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from typing import Any

_LONGEST_REASON = 500
"""Longest reason, in characters."""


def main() -> None:
    with open(int(sys.argv[1]), "rb") as file:
        task: dict[str, Any] = json.load(file)
    for name, value in task["limits"].items():
        # At the limit of CPU time the process gets SIGXCPU, which names the cause. If it ignores the signal, it is
        # killed one second later.
        hard = value + 1 if name == "CPU" else value
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))
    with open(int(sys.argv[2]), "wb") as result:
        # This write fails if the parent process has died; the program is then not started.
        result.write(b"\n")
        result.flush()
        outcome, reason = run(task["program"], task["tests"])
        record = {"nonce": task["nonce"], "outcome": outcome, "reason": reason[:_LONGEST_REASON]}
        result.write(json.dumps(record).encode())
    os._exit(0)  # skips atexit handlers and threads of the program


# contract: eval-no-fake-pass-v1
def run(program: str, tests: str) -> tuple[str, str]:
    """Run the program and its tests; return the outcome (`pass`, `fail` or `harness`) and its reason."""
    names: dict[str, Any] = {"__name__": "program"}
    try:
        test_code = compile(tests, "<tests>", "exec")
    except Exception as error:  # noqa: BLE001 - whatever the problem's code raises
        return "harness", f"the tests do not compile: {_describe(error)}"
    try:
        exec(compile(program, "<program>", "exec"), names)
        random.seed(0)  # tests with random cases are then deterministic
        exec(test_code, names)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises, SystemExit too
        line = _test_line(error, tests)
        if line and isinstance(error, AssertionError):
            return "fail", f"an assertion does not hold: {line}"
        return "fail", _describe(error) + (f", in {line}" if line else "")
    return "pass", ""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _test_line(error: BaseException, tests: str) -> str:
    """Return the last line of the tests in an error's traceback; empty if there is none."""
    number, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = tests.splitlines()
    return lines[number - 1].strip()[:300] if 0 < number <= len(lines) else ""
