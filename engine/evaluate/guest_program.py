"""Runs a generated program inside the sandbox, and answers calls of its functions.

Runs with the standard library and `guest_wire` alone. This process is the program's own: whatever the
program does to it, all it can bring out are answers, which the judge compares. It holds no secret.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from engine.evaluate.guest_wire import NotPlain, limit, pack, read_task, receive, send, unpack


def main() -> None:
    # The program's own input and output are nothing; answers have a descriptor of their own.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    task = read_task(sys.argv[1])
    limit(task["limits"])
    send(answers, {"hello": True})
    if receive(calls) is None:
        return  # nobody waits for the answers any more
    names: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(task["program"], "<program>", "exec"), names)
    except Exception as error:  # noqa: BLE001 - whatever the program raises is its answer
        send(answers, {"raised": type(error).__name__, "text": str(error)[:500]})
        return
    send(answers, {"ready": True})
    while (call := receive(calls)) is not None:
        args, kwargs = unpack(call["args"]), unpack(call["kwargs"])
        try:
            if call["name"] not in names:
                raise NameError(f"name {call['name']!r} is not defined")
            answer: dict[str, object] = {"value": pack(names[call["name"]](*args, **kwargs))}
        except NotPlain as error:
            answer = {"not_plain": str(error)[:500]}
        except Exception as error:  # noqa: BLE001 - whatever the program raises is its answer
            answer = {"raised": type(error).__name__, "text": str(error)[:500]}
        send(answers, answer)
