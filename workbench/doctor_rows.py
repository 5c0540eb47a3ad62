"""The doctor's screen: everything that `engine doctor --json` reports, as rows.

The doctor queries the CUDA driver, NVML and the kernel, which takes seconds, so it runs in its own
process and never in a viewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.log.text import one_line
from engine.units import format_bytes, format_seconds
from engine.verdict import Level
from workbench.engine_commands import ask_json
from workbench.listing import TONE_OF, Listing, Row

REFUSAL = "engine doctor --json — expected one JSON value, found code {code}: {said}"


def diagnosis() -> dict[str, Any]:
    """Run the doctor and return its diagnosis as JSON. Raises InternalError when there is none."""
    return ask_json(["doctor", "--json"], REFUSAL, dict[str, Any])


class DoctorFeed:
    """Runs the doctor once, and again after `forget`."""

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] | None = None
        self._asked_s = 0.0
        self._took_s = 0.0
        self._head = ""

    def forget(self) -> None:
        """Make the next poll run the doctor again."""
        self._rows = None

    def poll(self) -> Listing:
        """Return the doctor's report and its age. Raises InternalError when there is none."""
        if self._rows is None:
            begun_s = time.monotonic()
            fields = diagnosis()
            self._asked_s = time.monotonic()
            self._took_s = self._asked_s - begun_s
            self._rows = tuple(rows_of(fields))
            self._head = f"doctor: {fields['verdict'].upper()}"
        age = format_seconds(float(int(time.monotonic() - self._asked_s)))
        took = format_seconds(self._took_s)
        return Listing(head=f"{self._head} (asked {age} ago, took {took})", rows=self._rows)


def rows_of(fields: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the parts of a diagnosis, its verdict first."""
    level = fields["verdict"]
    missing = [_missing(m) for m in fields["missing"] if m["counts"]]
    not_needed = [_missing(m) for m in fields["missing"] if not m["counts"]]
    verdict = [f"verdict: {level.upper()}", f"  {one_line(fields['reason'])}"]
    yield _row("verdict", level.upper(), verdict, TONE_OF[Level[level.upper()]])
    broken = [f"  {one_line(text)}" for text in fields["broken"]]
    yield _row("broken", _count(broken), ["broken", *broken], "bad" if broken else "good")
    yield _row(
        "cannot be measured",
        _count(missing),
        ["cannot be measured here", *(line for lines in missing for line in lines)],
        "unsure" if missing else "good",
    )
    yield _row(
        "not needed",
        _count(not_needed),
        ["not here, and not needed by a run", *(line for lines in not_needed for line in lines)],
    )
    allocator = fields["allocator"]
    allocator_lines = [
        f"{allocator['knob']} = {allocator['choice']}",
        f"  {one_line(allocator['reason'])}",
        *(f"  not {name}: {one_line(why)}" for name, why in allocator["rejected"]),
    ]
    yield _row("memory allocator", allocator["choice"], allocator_lines)
    yield _row("facts", "what the machine reports", ["facts", *_readings(fields["facts"])])
    surroundings = fields["surroundings"]
    yield _row("around a run", "what a run can read", ["around a run", *_readings(surroundings)])
    versions = fields["versions"]
    numbers = [f"  {name}: {version or 'not here'}" for name, version in versions.items()]
    yield _row("versions", f"engine {versions.get('engine')}", ["versions", *numbers])
    for gpu in sorted({query["gpu"] for query in fields["nvml_queries"]}):
        queries = [query for query in fields["nvml_queries"] if query["gpu"] == gpu]
        works = sum(query["works"] for query in queries)
        lines = [
            f"  {'+' if q['works'] else '?'} {q['what']}: {q['absent'] or 'answers'}, "
            f"{format_seconds(q['cost_s'])}; {q['asked']}"
            for q in queries
        ]
        text = f"{works} of {len(queries)} answer"
        yield _row(f"NVML of GPU {gpu}", text, [f"NVML queries, GPU {gpu}", *lines])


def _row(name: str, text: str, lines: Sequence[str], tone: Any = "plain") -> Row:
    return Row(key=name, name=name, text=one_line(text), tone=tone, lines=tuple(lines))


def _count(parts: Sequence[object]) -> str:
    return f"{len(parts)}" if parts else "nothing"


def _missing(missing: Mapping[str, Any]) -> list[str]:
    return [
        f"  {missing['what']}: {one_line(missing['reason'])}",
        f"      rules out: {one_line(missing['rules_out'])}",
    ]


def _readings(fields: Mapping[str, Any], indent: str = "  ") -> Iterator[str]:
    """Yield numbers with their sources, and the reasons for absent ones."""
    for name, value in fields.items():
        if name.endswith(("_source", "_absent")) and name.rpartition("_")[0] in fields:
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for index, part in enumerate(value):
                yield f"{indent}{name} {index}:"
                yield from _readings(part, indent + "  ")
            continue
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _readings(value, indent + "  ")
            continue
        source, absent = fields.get(f"{name}_source"), fields.get(f"{name}_absent")
        text = (
            f"not here: {one_line(str(absent))}" if value is None and absent else _text(name, value)
        )
        yield f"{indent}{name}: {text}{f' ({source})' if source else ''}"


def _text(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int | float):
        return format_bytes(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return one_line(str(value))
