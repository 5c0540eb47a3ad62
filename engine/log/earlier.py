"""Events of earlier versions, converted to those that are logged in their place now."""

from __future__ import annotations

from typing import TypeAlias, get_args

import msgspec

from engine.log.events import (
    ALERT,
    CHECK,
    FAIL,
    IDENTITY,
    NUMBER,
    SUSPICION,
    Count,
    Event,
    Judged,
    Number,
    UnixTime,
    alert_over,
    by_name,
)


class Checked(Event, frozen=True, kw_only=True, tag="check"):
    id: str
    level: str
    reason: str
    numbers: dict[str, Number] = {}  # noqa: RUF012 - msgspec copies it
    cost_s: Number | None
    step: Count


class Identity(Event, frozen=True, kw_only=True, tag="identity"):
    id: str
    degree: str
    step: Count
    text: str
    numbers: dict[str, Number | None] = {}  # noqa: RUF012 - msgspec copies it
    framework: str = ""


class NonFinite(Event, frozen=True, kw_only=True, tag="non_finite"):
    step: Count
    field: str
    value: str


class AlertRaised(Event, frozen=True, kw_only=True, tag="alert"):
    id: str
    severity: str
    title: str
    numbers: list[tuple[str, Number, str]] = []  # noqa: RUF012 - msgspec copies it
    first_step: Count = 0
    last_step: Count = 0
    from_unix_s: UnixTime = 0.0
    to_unix_s: UnixTime = 0.0
    meaning: str = ""
    flip: str = ""
    no_flip: str = ""


class AlertCleared(Event, frozen=True, kw_only=True, tag="alert_cleared"):
    id: str
    stood_s: Number


Earlier: TypeAlias = Checked | Identity | NonFinite | AlertRaised | AlertCleared
EARLIER: dict[str, type[Earlier]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Earlier)
}


def as_now(event: Earlier) -> Judged:
    """Return the event that is logged now in the place of `event`."""
    judged = _judged(event)
    envelope = {"v": event.v, "seq": event.seq, "t_s": event.t_s}
    return msgspec.structs.replace(judged, **envelope)


def _judged(event: Earlier) -> Judged:
    match event:
        case Checked():
            return Judged(
                by=CHECK,
                id=event.id,
                level=event.level,
                text=event.reason,
                numbers=dict(event.numbers),
                cost_s=event.cost_s,
                step=event.step,
            )
        case Identity():
            return Judged(
                by=IDENTITY,
                id=event.id,
                level=FAIL if event.degree == "contradiction" else event.degree,
                text=event.text,
                numbers=event.numbers,
                step=event.step,
                framework=event.framework,
            )
        case NonFinite():
            return Judged(by=NUMBER, id=event.field, level=FAIL, text=event.value, step=event.step)
        case AlertRaised():
            numbers, compared = by_name(event.numbers)
            return Judged(
                by=ALERT,
                id=event.id,
                level=FAIL if event.severity == "error" else SUSPICION,
                text=event.title,
                numbers=numbers,
                compared=compared,
                step=event.last_step,
                first_step=event.first_step,
                from_unix_s=event.from_unix_s,
                to_unix_s=event.to_unix_s,
                meaning=event.meaning,
                flip=event.flip,
                no_flip=event.no_flip,
            )
        case AlertCleared():
            return alert_over(event.id, active_s=event.stood_s, step=0)
