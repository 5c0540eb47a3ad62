"""One value of a spec: read from `--set`, and checked against its field's type and range."""

from __future__ import annotations

import json
import math
import tomllib
from typing import Any

from engine.errors import SpecError
from engine.spec.sections import Option


def parse_set(argument: str) -> tuple[str, Any]:
    """`key=value` of `--set`; the value is TOML where it parses as TOML, else the text itself."""
    key, equals, text = argument.partition("=")
    if not equals or not key.strip():
        raise SpecError([f"--set {argument}: expected key=value, found no key or no ="])
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    return key.strip(), value


def check_value(option: Option, metadata: Any, value: Any) -> tuple[Any, str | None]:
    """The value in its field's type, or what is wrong with it."""
    found = f"found {json.dumps(value, default=str)}"
    match option.type_name:
        case "bool":
            if not isinstance(value, bool):
                return value, f"expected true or false, {found}"
        case "str":
            if not isinstance(value, str):
                return value, f"expected a text in quotes, {found}"
            if option.allowed and value not in option.allowed:
                return value, f"expected one of {', '.join(option.allowed)}, {found}"
        case "int" | "float":
            if isinstance(value, bool) or not isinstance(value, int | float):
                return value, f"expected a number, {found}"
            if option.type_name == "int" and not (isinstance(value, int)):
                return value, f"expected a whole number, {found}"
            if not math.isfinite(value):
                return value, f"expected a finite number, {found}"
            if (range_text := _range_problem(metadata, value)) is not None:
                return value, f"expected {range_text}, found {value}"
            if option.type_name == "float":
                value = float(value)
    return value, None


def _range_problem(metadata: Any, value: float) -> str | None:
    low, high, above = metadata["low"], metadata["high"], metadata["above"]
    inside = (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if inside:
        return None
    if above is not None:
        return f"a number above {above:g}" + (f", at most {high:g}" if high is not None else "")
    if high is not None:
        return f"a number in [{low:g}, {high:g}]"
    return f"a number of at least {low:g}"
