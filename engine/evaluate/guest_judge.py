"""Run a problem's tests inside a sandbox of their own, against a program in another sandbox.

This module runs with the standard library and the other guest modules alone. The functions that the tests
call are stand-ins: they send the arguments to the program and return its reply. So a program can neither
replace `assert`, nor end this process, nor read the nonce, which is not in its process. Replies are rebuilt
from Python's own types, within limits, before the tests see them (`guest_wire`). Objects of the program's
classes stay in the program's process: the tests hold a `Reference`, which equals only itself, so that no
`__eq__` of a program decides an assertion. The tests' assertions are counted (`guest_assertions`): to pass,
each must hold, and at least as often as with the reference solution when its counts are given.

The judge writes an empty line when the program may begin, and then one record, `{"nonce", "outcome",
"reason", "held"}`, and exits 0. Outcomes: `pass`; `fail`; `harness` for a failure that cannot be the
program's fault, because none of its replies was used.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from engine.evaluate.guest_assertions import Ended, Watch, watched
from engine.evaluate.guest_wire import NotPlain, limit, pack, read_task, receive, send, unpack

MOST_REASON = 500
"""Longest reason, in characters."""


class Judged(NamedTuple):
    outcome: str
    reason: str
    held: list[int]
    """Number of times that each assertion of the tests held."""


class Reference:
    """An object of the program, of a class that the tests name. Its attributes and methods are requested from
    the program."""

    __slots__ = ("_asked",)
    _asked: tuple[Callable[..., object], int]

    def __init__(self, ask: Callable[..., object], number: int) -> None:
        object.__setattr__(self, "_asked", (ask, number))

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # Python looks these up on any object, as `copy` does
        ask, number = self._asked
        return ask(f".{name}", of=number, get=name)

    def __setattr__(self, name: str, value: object) -> None:
        ask, number = self._asked
        ask(f".{name}", of=number, set=name, value=value)


class Other:
    """A return value that is no plain data. Only its truth value can be used; any other operation fails the
    program."""

    __slots__ = ("_message", "_true", "_watch")

    def __init__(self, message: str, watch: Watch, *, true: bool) -> None:
        self._message, self._watch, self._true = message, watch, true

    def __bool__(self) -> bool:
        return self._true

    def _refuse(self, *_: object) -> Any:
        raise self._watch.end("fail", self._message)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __getattr__ = __call__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse

    def __repr__(self) -> str:
        return f"<{self._message}>"  # matches no form that a test expects; an error's text may contain it


class Function:
    """A function, class or method of the program."""

    def __init__(self, ask: Callable[..., object], name: str, **fields: object) -> None:
        self.ask, self.name, self.fields = ask, name, fields

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.ask(self.name, name=self.name, args=args, kwargs=kwargs, **self.fields)


def main() -> None:
    task = read_task(sys.argv[1])
    limit(task["limits"])
    calls, answers = os.fdopen(1, "wb"), os.fdopen(0, "rb")
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    with open(int(sys.argv[2]), "wb") as result:

        def begin() -> None:
            # Fails when the process that started this one is gone; then the program must not begin. Once it
            # has begun, both sandboxes end together with the process that started them.
            result.write(b"\n")
            result.flush()
            send(calls, {"go": True})

        judged = judge(task, calls, answers, begin)
        record = {"nonce": task["nonce"], **judged._asdict()}
        result.write(json.dumps(record).encode())
    sys.stderr.flush()
    os._exit(0)  # no code of the tests runs after the outcome


def judge(
    task: dict[str, Any],
    calls: IO[bytes],
    answers: IO[bytes],
    begin: Callable[[], None],
) -> Judged:
    """Run the tests and return the outcome, its reason, and how often each assertion held."""
    count = 0
    references: dict[int, Reference] = {}
    watch = Watch()

    def answer() -> dict[str, Any] | None:
        try:
            return receive(answers)
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            reason = f"the program answers nonsense: {str(error)[:200]}"
            raise watch.end("fail", reason) from None

    def number(value: object) -> int | None:
        if isinstance(value, Other):
            raise watch.end("fail", value._message)
        if isinstance(value, Function) and "of" in value.fields:
            # The program returned this method where the tests expect data.
            reason = f"the program has a method {value.name} where the tests want data"
            raise watch.end("fail", reason)
        return value._asked[1] if isinstance(value, Reference) else None

    def reference_to(number: object) -> Reference:
        if not (isinstance(number, int) and task["classes"]):
            raise ValueError("an object where none is known")
        return references.setdefault(number, Reference(ask, number))

    def ask(what: str, **request: object) -> object:
        nonlocal count
        watch.go_on()
        try:
            for key in {"args", "kwargs", "value"} & request.keys():
                request[key] = pack(request[key], number)
        except NotPlain as error:
            # Once the program has replied, the arguments may be made of its replies.
            outcome = "fail" if count else "harness"
            reason = f"the tests pass a {error} to {what}, which is no plain data"
            raise watch.end(outcome, reason) from None
        count += 1
        try:
            send(calls, request)
        except OSError:
            raise watch.end("fail", "the program ended before its tests did") from None
        reply = answer()
        if reply is None:
            raise watch.end("fail", "the program ended before its tests did")
        if "raised" in reply:
            thrown = rebuild_exception(reply)
            if "get" in request and isinstance(thrown, AttributeError):
                raise thrown  # `hasattr` must see that the attribute does not exist
            raise watch.raised(thrown)
        if "not_plain" in reply:
            message = f"{what} gives a {str(reply['not_plain'])[:200]}, which is no plain data"
            return Other(message, watch, true=reply.get("true") is True)
        if "method" in reply and "get" in request:
            return Function(ask, str(request["get"]), of=request["of"])
        try:
            return unpack(reply["value"], reference_to)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError):
            raise watch.end("fail", "the program answers nonsense") from None
        except MemoryError:
            raise watch.end("fail", "the program answers more than there is memory for") from None

    def define(function_names: Iterable[str]) -> None:
        for name in function_names:
            names[name] = Function(ask, name, keep=name in task["classes"])

    def run() -> None:
        try:
            setup, tree = ast.parse(task["setup"], "<setup>"), ast.parse(task["tests"])
            setup_reads, setup_defines = names_read(setup), set(names_defined(setup))
            tests_read = names_read(tree) - set(names_defined(tree))
            code = compile(watched(setup, watch, task["setup"]), "<setup>", "exec")
            test_code = compile(watched(tree, watch, task["tests"]), "<tests>", "exec")
        except Exception as error:  # noqa: BLE001 - whatever the problem's code raises
            raise end_for_own_error(error, watch) from None
        hello = answer()
        if not hello or "hello" not in hello:
            raise watch.end("harness", "the program's sandbox did not start")
        try:
            begin()
        except OSError:
            reason = "the outcome is not awaited, or the program is gone"
            raise watch.end("harness", reason) from None
        ready = answer()
        if ready is None:
            raise watch.end("fail", "the program ended while it was defined")
        if "raised" in ready:
            raise rebuild_exception(ready)
        if "ready" not in ready:
            raise watch.end("fail", "the program answers nonsense")
        random.seed(0)  # tests that draw random cases draw the same ones every time
        program_names = {*task["entries"], *task["classes"]}
        plain = {"__name__", *dir(builtins)} - program_names
        # Before the setup, which may create objects of the program's classes.
        define(setup_reads - setup_defines - plain)
        try:
            exec(code, names)
        except Exception as error:
            if count:
                raise  # the reference solution gets past this point, as the self-test showed
            raise end_for_own_error(error, watch) from None
        define((tests_read - plain - set(names)) | program_names)
        exec(test_code, names)
        watch.go_on()

    def decide() -> tuple[str, str]:
        try:
            run()
        except Ended as error:
            return error.args[0], error.args[1]
        except BaseException as error:  # noqa: BLE001 - nothing but an outcome leaves this process
            if getattr(error, "from_program", False):
                return "fail", f"the program raises {describe(error)}"
            if isinstance(error, AssertionError):
                return "fail", f"an assertion does not hold: {last_test_line(error, task['tests'])}"
            return (
                "fail",
                f"the tests raise {describe(error)}: {last_test_line(error, task['tests'])}",
            )
        if not count:
            return "harness", "the tests call nothing"
        if task["held"] is not None and (missed := watch.missed(task["held"])):
            reason = "the tests get past an assertion less often than with the reference solution"
            return "fail", f"{reason}: {missed}"
        if not any(watch.held):
            return "fail", "the tests get to their end without an assertion"
        return "pass", f"{count} calls, {sum(watch.held)} assertions"

    names: dict[str, Any] = {"__name__": "tests", **watch.names()}
    outcome, reason = decide()
    return Judged(outcome, reason[:MOST_REASON], watch.held)


def rebuild_exception(reply: dict[str, Any]) -> Exception:
    """Rebuild the exception that the program raised, as the built-in one of its name."""
    kind: Any = getattr(builtins, str(reply["raised"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    error: Exception
    text = str(reply.get("text", ""))[:MOST_REASON]
    try:
        error = kind(text)
    except TypeError:  # UnicodeDecodeError and the like need more than a text
        error = RuntimeError(f"{str(reply['raised'])[:100]}: {text}")
    error.from_program = True  # type: ignore[attr-defined]  # distinguishes it from what the tests raise
    return error


def end_for_own_error(error: Exception, watch: Watch) -> Ended:
    return watch.end("harness", f"the problem's own code raises {describe(error)}")


def names_read(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def names_defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that the tests define themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def last_test_line(error: BaseException, text: str) -> str:
    """The last line of the tests in an error's traceback."""
    number, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            number = trace.tb_lineno
        trace = trace.tb_next
    lines = text.splitlines()
    return lines[number - 1].strip()[:300] if 0 < number <= len(lines) else "?"
