"""Import records of the predecessor system: findings.json and dispatch.json.

    findings.json   ticket, title, date, host, trigger | background, evidence{name: {command, result,
                    error, logfile, interpretation}}, five_whys[{why, question, answer, evidence}],
                    root_cause_summary, ...
    dispatch.json   ticket, phase, run_name, host, teacher, student_init, steps, batch_size,
                    learning_rate, ...: the requested run

Neither records how a result was obtained or checked. So every claim is imported as unverified, whatever
status it gives itself, with a list of the evidence that it lacks. The file itself is linked as a source that
a person wrote. Fields that have no counterpart here are listed, not dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine import limits
from engine.errors import BadInput
from engine.files import read_json
from engine.findings.capture import Blob, capture_file
from engine.findings.changes import slug_of
from engine.findings.finding import Finding, Kind, now_utc
from engine.findings.redact import Redactor
from engine.findings.whys import add_node, link, new_finding

_FINDINGS = frozenset(
    (
        *("ticket", "title", "date", "host", "trigger", "background", "evidence", "five_whys"),
        "root_cause_summary",
    )
)
_TEST = ("command", "result", "error", "logfile", "interpretation")
_EVERY_DISPATCH = ("teacher", "student_init", "steps", "batch_size")
_TEST_MISSING = (
    "exit status and hash of the output",
    "the log itself, by hash",
    "how the interpretation was checked",
    "another explanation, and a test that would tell",
)
_WHY_MISSING = (
    "evidence that a tool captured, by hash",
    "a flip or a reproduction",
    "another explanation, its test and what that costs",
)
_DISPATCH_MISSING = (
    "the effective settings: these are the requested ones",
    "exit status and outcome",
    "hashes of teacher, student, data and settings",
    "the seed",
    "the version and the hash of the program",
    "device, driver, environment",
)


def read_prior(path: Path, slug: str = "") -> tuple[Finding, list[Blob]]:
    """Read a findings.json as a finding, or a dispatch.json as a finding with one observation. Raises
    BadInput."""
    value = read_json(path, "prior record", limits.FINDING)
    record = value if isinstance(value, dict) else {}
    ticket, host = (_words(record.get(key)) or "not known" for key in ("ticket", "host"))
    whys = isinstance(record.get("five_whys"), list)
    name, at = map(record.get, ("title", "date") if whys else ("run_name", "dispatched_at"))
    slug = slug or slug_of(str(name or path.stem), "imported")
    title = _words(name) or slug
    if whys:
        seen = _words(record.get("trigger")) or _words(record.get("background")) or title
        unread = ", ".join(sorted(set(record) - _FINDINGS))
        missing = ["a log or a number that shows it"]
        missing += [f"read, without a place here: {unread}"] if unread else []
    elif all(name in record for name in _EVERY_DISPATCH):
        asked = ", ".join(f"{key} {_words(record[key])}" for key in sorted(record))
        seen, missing = f"{title} was asked for with {asked}", [*_DISPATCH_MISSING]
        title = f"dispatch of {title}"
    else:
        expected = "findings.json (five_whys) or dispatch.json (teacher, student_init, steps, ...)"
        raise BadInput.expected("prior record", path, expected, "another JSON value")
    finding = new_finding(slug, seen, title=title, author=ticket, at=_date(at))
    root = replace(finding.nodes[0], missing=tuple(missing))
    finding = replace(finding, nodes=(root,), host=host)
    if whys:
        for claim, of, kind, missing in _answers(record):
            parent = finding.nodes[of].id
            signed: dict[str, Any] = {"author": root.author, "at": root.at}
            finding = add_node(
                finding, claim, why_of=[parent], kind=kind, missing=missing, **signed
            )
    capture = capture_file(path, Redactor())
    # This evidence neither supports nor contradicts: it is the source of the words.
    return link(finding, root.id, capture, says="source"), capture.blobs


def _answers(record: dict[str, Any]) -> Iterator[tuple[str, int, Kind, list[str]]]:
    """Yield each why, the root cause and each test as (claim, parent, kind, missing). The parent is the index
    of the node that the claim explains, -1 (newest) or 0 (first); `missing` lists what the record lacks."""
    for entry in record["five_whys"]:
        entry = entry if isinstance(entry, dict) else {"answer": entry}
        named = {"asked": "question", "its evidence was these words": "evidence"}
        said = [f"{how}: {w}" for how, key in named.items() if (w := _words(entry.get(key)))]
        claim = _words(entry.get("answer")) or "no answer was given"
        yield claim, -1, "hypothesis", [*said, *_WHY_MISSING]
    if summary := _words(record.get("root_cause_summary")):
        yield summary, -1, "mechanism", [*_WHY_MISSING]
    tests = record.get("evidence")
    for name, test in tests.items() if isinstance(tests, dict) else ():
        fields = test if isinstance(test, dict) else {"result": test}
        said = [f"{part}: {text}" for part in _TEST if (text := _words(fields.get(part)))]
        absent = [f"{part} of the test" for part in _TEST if part not in fields]
        claim = f"{name}: {_words(fields.get('result')) or 'no result'}"
        yield claim, 0, "observation", [*said, *absent, *_TEST_MISSING]


def _words(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _date(value: Any) -> str:
    """The date that the record gives; the current time when it gives none."""
    match = re.match(
        r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]([0-9]{2}:[0-9]{2}:[0-9]{2}))?", str(value)
    )
    return f"{match[1]}T{match[2] or '00:00:00'}Z" if match else now_utc()
