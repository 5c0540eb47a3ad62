"""Run a generated program inside the sandbox, and serve calls of its functions.

This module runs with the standard library and `guest_wire` alone. The process belongs to the program:
whatever the program does to it, it can only send replies, which the judge checks. It holds no secret.

    {"name", "args", "kwargs"}          call a function of the program
    {"name", .., "keep": true}          call a class: what it makes, and every object of that type, is sent
                                        as a reference
    {"of": 3, "name", "args", ..}       call a method of object number 3
    {"of": 3, "get": "left"}            read an attribute; a method is not sent, only that there is one
    {"of": 3, "set": "left", "value"}   set an attribute
"""

from __future__ import annotations

import os
import sys
from typing import Any

from engine.evaluate.guest_wire import (
    TYPES,
    NotPlain,
    limit,
    pack,
    read_task,
    receive,
    send,
    unpack,
)


class Objects:
    """The program's objects of classes that the tests name."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        self.kept: list[object] = []  # kept as long as the program runs, so that an id stays unique
        self.numbers: dict[int, int] = {}

    def keep_like(self, value: object) -> None:
        # A built-in type is sent as a value, even if it replaces a class of the tests.
        if type(value) not in TYPES.values():
            self.kinds.add(type(value))

    def number(self, value: object) -> int | None:
        if type(value) not in self.kinds:
            return None
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)
        return number

    def of(self, number: int) -> object:
        return self.kept[number]


def main() -> None:
    # The program's own input and output are /dev/null; replies have a descriptor of their own.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    task = read_task(sys.argv[1])
    limit(task["limits"])
    send(answers, {"hello": True})
    if receive(calls) is None:
        return  # the replies are no longer awaited
    names: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(task["program"], "<program>", "exec"), names)
    except Exception as error:  # noqa: BLE001 - whatever the program raises is its answer
        send(answers, {"raised": type(error).__name__, "text": str(error)[:500]})
        return
    send(answers, {"ready": True})
    objects = Objects()
    while (call := receive(calls)) is not None:
        try:
            answer = answer_call(call, names, objects)
        except Exception as error:  # noqa: BLE001 - whatever the program raises is its answer
            answer = {"raised": type(error).__name__, "text": str(error)[:500]}
        send(answers, answer)


def answer_call(call: dict[str, Any], names: dict[str, Any], objects: Objects) -> dict[str, object]:
    target: Any
    if "of" in call:
        owner = objects.of(call["of"])
        if "set" in call:
            setattr(owner, call["set"], unpack(call["value"], objects.of))
            return {"value": None}
        target = getattr(owner, call["get"] if "get" in call else call["name"])
        if "get" in call:
            if callable(target) and objects.number(target) is None:
                return {"method": True}
            return encode_result(target, objects)
    elif call["name"] in names:
        target = names[call["name"]]
    else:
        raise NameError(f"name {call['name']!r} is not defined")
    value = target(*unpack(call["args"], objects.of), **unpack(call["kwargs"], objects.of))
    if call.get("keep"):
        objects.keep_like(value)
    return encode_result(value, objects)


def encode_result(value: object, objects: Objects) -> dict[str, object]:
    try:
        return {"value": pack(value, objects.number)}
    except NotPlain as error:
        return {"not_plain": str(error)[:500], "true": bool(value)}
