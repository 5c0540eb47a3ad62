"""Lines of a log that say what was judged, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.log.events import (
    ALERT,
    CHECK,
    FAIL,
    IDENTITY,
    NUMBER,
    Judged,
    alert_over,
    by_name,
)


def alert_event(
    id: str, level: str, text: str, numbers: Sequence[tuple[str, float, str]] = (), **more: Any
) -> Judged:
    values, compared = by_name(numbers)
    more = {"step": 0} | more
    return Judged(
        by=ALERT, id=id, level=level, text=text, numbers=values, compared=compared, **more
    )


def alert_end(id: str, active_s: float) -> Judged:
    return alert_over(id, active_s=active_s, step=0)


def check_event(id: str, level: str, text: str, step: int, **more: Any) -> Judged:
    return Judged(by=CHECK, id=id, level=level, text=text, step=step, **more)


def identity_event(id: str, level: str, step: int, text: str, **more: Any) -> Judged:
    return Judged(by=IDENTITY, id=id, level=level, text=text, step=step, **more)


def number_event(step: int, field: str, value: str) -> Judged:
    return Judged(by=NUMBER, id=field, level=FAIL, text=value, step=step)


def is_alert(event: object) -> bool:
    """Whether an event raises an alert."""
    return isinstance(event, Judged) and event.raises_alert


def is_alert_end(event: object) -> bool:
    return isinstance(event, Judged) and event.by == ALERT and not event.raises_alert


def numbers_of(alert: Judged) -> list[tuple[str, Any, str]]:
    """Return the numbers of an alert, each with what it is compared with."""
    return [(name, value, alert.compared[name]) for name, value in alert.numbers.items()]
