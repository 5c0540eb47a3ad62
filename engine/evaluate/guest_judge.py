"""Runs a problem's tests inside a sandbox of its own, against a program in another.

Runs with the standard library and `guest_wire` alone. The functions that the tests call are stand-ins:
they send the arguments to the program and give back what it answers. So a program can neither replace
`assert`, nor end this process, nor read the nonce: it is not here. Objects of its classes stay with it: the
tests hold a `Reference`, which equals itself alone, so that no `__eq__` of a program decides an assertion.

Writes one record, `{"nonce", "outcome", "reason"}`, and exits 0. Outcomes: `pass`; `fail`, which is the
program's doing; `harness`, which is not, or not for certain.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from engine.evaluate.guest_wire import NotPlain, limit, pack, read_task, receive, send, unpack


class Harness(BaseException):
    """The tests cannot be run; nothing is said about the program."""


class Gone(BaseException):
    """The program ended, or answers what is no answer."""


class Reference:
    """An object of the program, of a class that the tests name: its attributes and methods are asked for."""

    __slots__ = ("_asked",)
    _asked: tuple[Callable[..., object], int]

    def __init__(self, ask: Callable[..., object], number: int) -> None:
        object.__setattr__(self, "_asked", (ask, number))

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python asks of any object, as `copy` does
        ask, number = self._asked
        return ask(f".{name}", of=number, get=name)

    def __setattr__(self, name: str, value: object) -> None:
        ask, number = self._asked
        ask(f".{name}", of=number, set=name, value=value)


class Other:
    """An answer that is no plain data: it is true or false, and anything else asked of it is a failure."""

    __slots__ = ("_said", "_true")

    def __init__(self, said: str, *, true: bool) -> None:
        self._said, self._true = said, true

    def __bool__(self) -> bool:
        return self._true

    def _refuse(self, *_: object) -> Any:
        raise Gone(self._said)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __getattr__ = __call__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._said}>"  # of no form that a test expects; an error's text may hold it


class Function:
    """A function, class or method of the program."""

    def __init__(self, ask: Callable[..., object], name: str, **more: object) -> None:
        self.ask, self.name, self.more = ask, name, more

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.ask(self.name, name=self.name, args=args, kwargs=kwargs, **self.more)


def main() -> None:
    task = read_task(sys.argv[1])
    limit(task["limits"])
    calls, answers = os.fdopen(1, "wb"), os.fdopen(0, "rb")
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    with open(int(sys.argv[2]), "wb") as result:

        def begin() -> None:
            # Fails where whoever started this is gone: then a program must not begin. Once it has, both
            # sandboxes end with their starter.
            result.write(b"\n")
            result.flush()
            send(calls, {"go": True})

        outcome, reason = judge(task, calls, answers, begin)
        record = {"nonce": task["nonce"], "outcome": outcome, "reason": reason}
        result.write(json.dumps(record).encode())
    sys.stderr.flush()
    os._exit(0)  # nothing of the tests runs after the outcome


def judge(
    task: dict[str, Any],
    calls: IO[bytes],
    answers: IO[bytes],
    begin: Callable[[], None],
) -> tuple[str, str]:
    """The outcome and its reason."""
    count = 0
    references: dict[int, Reference] = {}

    def answer() -> dict[str, Any] | None:
        try:
            return receive(answers)
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            raise Gone(f"the program answers nonsense: {str(error)[:200]}") from None

    def number(value: object) -> int | None:
        if isinstance(value, Other):
            raise Gone(value._said)
        if isinstance(value, Function) and "of" in value.more:
            # What the tests took for data is the program's doing.
            raise Gone(f"the program has a method {value.name} where the tests want data")
        return value._asked[1] if isinstance(value, Reference) else None

    def of(number: object) -> Reference:
        if not (isinstance(number, int) and task["classes"]):
            raise ValueError("an object where none is known")
        return references.setdefault(number, Reference(ask, number))

    def ask(what: str, **request: object) -> object:
        nonlocal count
        count += 1
        try:
            for key in {"args", "kwargs", "value"} & request.keys():
                request[key] = pack(request[key], number)
        except NotPlain as error:
            raise Harness(f"the tests pass a {error} to {what}, which is no plain data") from None
        try:
            send(calls, request)
        except OSError:
            raise Gone("the program ended before its tests did") from None
        found = answer()
        if found is None:
            raise Gone("the program ended before its tests did")
        if "raised" in found:
            raise transported(found)
        if "not_plain" in found:
            said = f"{what} gives a {found['not_plain']}, which is no plain data"
            return Other(said, true=found.get("true") is True)
        if "method" in found and "get" in request:
            return Function(ask, str(request["get"]), of=request["of"])
        try:
            return unpack(found["value"], of)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            raise Gone("the program answers nonsense") from None

    def define(wanted: Iterable[str]) -> None:
        for name in wanted:
            names[name] = Function(ask, name, keep=name in task["classes"])

    try:
        names: dict[str, Any] = {"__name__": "tests"}
        try:
            setup = ast.parse(task["setup"], "<setup>")
            tree = ast.parse(task["tests"])
            code, test_code = compile(setup, "<setup>", "exec"), compile(tree, "<tests>", "exec")
        except Exception as error:  # noqa: BLE001 - whatever the problem's code raises
            raise own(error) from None
        first = answer()
        if not first or "hello" not in first:
            raise Harness("the program's sandbox did not start")
        try:
            begin()
        except OSError:
            raise Harness("nobody waits for the outcome, or the program is gone") from None
        second = answer()
        if second is None:
            raise Gone("the program ended while it was defined")
        if "raised" in second:
            raise transported(second)
        if "ready" not in second:
            raise Gone("the program answers nonsense")
        random.seed(0)  # tests that draw their cases draw the same ones every time
        given = {*task["entries"], *task["classes"]}
        plain = {"__name__", *dir(builtins)} - given
        # Before the setup, which may make objects of the program's classes.
        define(loaded(setup) - set(defined(setup)) - plain)
        try:
            exec(code, names)
        except Exception as error:
            if count:
                raise  # the reference solution gets past it: the self-test
            raise own(error) from None
        define((loaded(tree) - set(defined(tree)) - plain - set(names)) | given)
        exec(test_code, names)
        if not count:
            raise Harness("the tests call nothing")
    except Harness as error:
        return "harness", str(error)
    except Gone as error:
        return "fail", str(error)
    except BaseException as error:  # noqa: BLE001 - nothing but an outcome leaves this process
        if getattr(error, "from_program", False):
            return "fail", f"the program raises {said(error)}"
        if isinstance(error, AssertionError):
            return "fail", f"an assertion does not hold: {line_of(error, task['tests'])}"
        if isinstance(error, NotPlain):
            return "harness", str(error)
        return "fail", f"the tests raise {said(error)}: {line_of(error, task['tests'])}"
    return "pass", f"{count} calls"


def transported(found: dict[str, Any]) -> Exception:
    """The exception that the program raised, as the built-in one of its name."""
    kind: Any = getattr(builtins, str(found["raised"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    error: Exception
    try:
        error = kind(str(found.get("text", "")))
    except TypeError:  # UnicodeDecodeError and its like want more than a text
        error = RuntimeError(f"{found['raised']}: {found.get('text', '')}")
    error.from_program = True  # type: ignore[attr-defined]  # told from what the tests raise
    return error


def own(error: Exception) -> Harness:
    return Harness(f"the problem's own code raises {said(error)}")


def loaded(tree: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that the tests give themselves."""
    for one in ast.walk(tree):
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.arg):
            yield one.arg
        elif isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            yield one.id
        elif isinstance(one, ast.alias):
            yield (one.asname or one.name).split(".")[0]
        elif isinstance(one, ast.ExceptHandler) and one.name:
            yield one.name


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def line_of(error: BaseException, text: str) -> str:
    """The last line of the tests on the way to an error."""
    at, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            at = trace.tb_lineno
        trace = trace.tb_next
    lines = text.splitlines()
    return lines[at - 1].strip()[:300] if 0 < at <= len(lines) else "?"
