"""Parse one value of a `--set` argument, and check it against its field's type and range."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine import limits
from engine.errors import SpecError
from engine.spec.sections import Option
from engine.terminal import clipped, printable

_SHOWN = 120


def parse_set(argument: str) -> tuple[str, Any]:
    """Parse the `key=value` of `--set`; a value that does not parse as TOML is a string."""
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not key:
        argument_text = shown(argument)
        raise SpecError([f"--set {argument_text}: expected key=value, found no key or no ="])
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return key, text
    except (RecursionError, ValueError) as error:
        raise SpecError([f"--set {shown(key)}: {refusal_of_toml(error)}"]) from None
    # A value with a line break could define further keys.
    return key, parsed["v"] if len(parsed) == 1 else text


def refusal_of_toml(error: RecursionError | ValueError) -> str:
    """Return the message for TOML that is nested too deeply, or has an integer of too many digits."""
    if isinstance(error, RecursionError):
        return "expected a value, found lists or tables nested too deep to read"
    return f"expected integers of {limits.SPEC_DIGITS}, found one with thousands of digits"


def shown(text: str) -> str:
    """Shorten a user's key or text for a message: one line of limited length."""
    return printable(clipped(text, _SHOWN)).replace("\n", "\\n")


def check_value(option: Option, value: Any) -> tuple[Any, str | None]:
    """Return the value in its field's type, or what is wrong with it."""
    if isinstance(value, int) and abs(value) >= 10**limits.SPEC_DIGITS.most:
        # Checked before it is shown: Python does not format integers of thousands of digits.
        return value, f"expected a number of {limits.SPEC_DIGITS}, found one that has more"
    found = f"found {_json(value)}"
    match option.type_name:
        case "bool":
            if not isinstance(value, bool):
                return value, f"expected true or false, {found}"
        case "str":
            if not isinstance(value, str):
                return value, f"expected a string in quotes, {found}"
            if option.allowed and value not in option.allowed:
                return value, f"expected one of {', '.join(option.allowed)}, {found}"
            limit = limits.SPEC_TEXT
            if option.most is not None:
                limit = replace(limit, most=int(option.most))
            if (problem := text_problem(value, limit)) is not None:
                return value, problem
        case "int" | "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                return value, f"expected a number, {found}"
            if option.type_name == "int" and not (isinstance(value, int)):
                return value, f"expected an integer, {found}"
            if not math.isfinite(value):
                return value, f"expected a finite number, {found}"
            if (range_text := _range_problem(option, value)) is not None:
                return value, f"expected {range_text}, found {value}"
            if option.type_name == "float":
                value = float(value)
    return value, None


def text_problem(text: str, limit: limits.Limit = limits.SPEC_TEXT) -> str | None:
    """Return why a setting cannot have this string; None if it can."""
    size = len(text.encode("utf-8", "surrogateescape"))
    if size > limit.most:
        return f"expected a string of {limit}, found {size:,}"
    if "\0" in text:
        return "expected a string without NUL, found one"
    return None


def _json(value: Any) -> str:
    if isinstance(value, list | Mapping):
        # A number inside may have more digits than Python formats.
        return "a list" if isinstance(value, list) else "a table"
    return clipped(json.dumps(value, default=str), _SHOWN)


def _range_problem(option: Option, value: float) -> str | None:
    low, high, above, most = option.low, option.high, option.above, option.most
    inside = (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    # `most` is far above real use and only catches slips, so other messages leave it out.
    if inside and most is not None and value > most:
        return f"a number of at most {most if isinstance(most, int) else f'{most:g}'}"
    if inside:
        return None
    if above is not None:
        return f"a number above {above:g}" + (f", at most {high:g}" if high is not None else "")
    if high is not None:
        return f"a number in [{low:g}, {high:g}]"
    return f"a number of at least {low:g}"
