"""Convert records of earlier versions to the records that this version logs in their place."""

from __future__ import annotations

from typing import Any

from engine.log.events import ALERT, CHECK, FAIL, IDENTITY, NUMBER, PASS, SUSPICION

_RECORDS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "check": (CHECK, {"reason": "text"}, {}),
    "identity": (IDENTITY, {"degree": "level"}, {}),
    "non_finite": (NUMBER, {"field": "id", "value": "text"}, {"level": FAIL}),
    "alert": (ALERT, {"severity": "level", "title": "text", "last_step": "step"}, {}),
    "alert_cleared": (ALERT, {"stood_s": "numbers"}, {"level": PASS, "text": "over", "step": 0}),
}
"""Kinds that are now logged as `judged`: the value of `by`, the renamed fields, and the fields that must be added."""
_LEVELS = {"contradiction": FAIL, "error": FAIL, "warning": SUSPICION}


def as_now(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record that this version logs in the place of `record`."""
    if record["kind"] not in _RECORDS:
        return record
    by, renamed, lacking = _RECORDS[record["kind"]]
    now = {"step": 0} | {renamed.get(name, name): value for name, value in record.items()}
    now |= lacking | {"kind": "judged", "by": by}
    now["level"] = _LEVELS.get(now["level"], now["level"])
    numbers = now.get("numbers")
    if isinstance(numbers, float | int):
        now["numbers"] = {"active_s": numbers}
    elif isinstance(numbers, list):
        compared: dict[str, str] = {}
        for name, _, reference in numbers:
            compared[name] = f"{compared[name]}; {reference}" if name in compared else reference
        now |= {"numbers": {name: value for name, value, _ in numbers}, "compared": compared}
        # A path with the index of a number becomes a path with its name.
        escaped = [name.replace("~", "~0").replace("/", "~1") for name, _, _ in numbers]
        names = {f"numbers/{at}/1": f"numbers/{name}" for at, name in enumerate(escaped)}
        now["nf"] = {names[path]: value for path, value in (record.get("nf") or {}).items()}
    return now
