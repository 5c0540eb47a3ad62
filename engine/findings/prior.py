"""Records of the system before this one: findings.json and dispatch.json.

    findings.json   ticket, title, date, host, trigger | background, evidence{name: {command, result,
                    error, logfile, interpretation}}, five_whys[{why, question, answer, evidence}],
                    root_cause_summary, ...
    dispatch.json   ticket, phase, run_name, host, teacher, student_init, steps, batch_size,
                    learning_rate, ...: what was asked for

Neither says how a result was obtained or checked, so everything comes in unverified, whatever it claims
of itself, with a list of what it would have needed. The file itself is linked as what a person wrote.
Fields that this reader has no place for are named, not dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine import limits
from engine.errors import BadInput
from engine.files import read_json
from engine.findings.capture import Blob, capture_file
from engine.findings.finding import Finding, Kind, Node, now_utc
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
    """The finding in a findings.json, or the observation that a dispatch.json is. Raises BadInput."""
    value = read_json(path, "prior record", limits.FINDING)
    record = value if isinstance(value, dict) else {}
    if isinstance(record.get("five_whys"), list):
        finding = _findings(record, slug or _slug(record.get("title") or path.stem))
    elif all(name in record for name in _EVERY_DISPATCH):
        finding = _dispatch(record, slug or _slug(record.get("run_name") or path.stem))
    else:
        expected = "findings.json (five_whys) or dispatch.json (teacher, student_init, steps, ...)"
        raise BadInput.expected("prior record", path, expected, "another JSON value")
    capture = capture_file(path, Redactor())
    # It neither supports nor contradicts: it is where the words come from.
    return link(finding, finding.nodes[0].id, capture, says="source"), capture.blobs


def _findings(value: dict[str, Any], slug: str) -> Finding:
    signed: dict[str, Any] = {
        "author": _words(value.get("ticket")) or "not known",
        "at": _date(value.get("date")),
    }
    title = _words(value.get("title")) or slug
    seen = _words(value.get("trigger")) or _words(value.get("background")) or title
    finding = new_finding(slug, seen, title=title, **signed)

    def add(claim: str, parent: Node, missing: Iterable[str], kind: Kind) -> Node:
        nonlocal finding
        parents = [parent.id]
        finding = add_node(finding, claim, why_of=parents, kind=kind, missing=missing, **signed)
        return finding.nodes[-1]

    unread = ", ".join(sorted(set(value) - _FINDINGS))
    missing = ["a log or a number that shows it"]
    missing += [f"read, without a place here: {unread}"] if unread else []
    finding = _root_missing(finding, missing, _words(value.get("host")))
    parent = finding.nodes[0]
    for entry in value["five_whys"]:
        entry = entry if isinstance(entry, dict) else {"answer": entry}
        named = {"asked": "question", "its evidence was these words": "evidence"}
        said = [f"{how}: {w}" for how, key in named.items() if (w := _words(entry.get(key)))]
        claim = _words(entry.get("answer")) or "no answer was given"
        parent = add(claim, parent, (*said, *_WHY_MISSING), "hypothesis")
    if summary := _words(value.get("root_cause_summary")):
        add(summary, parent, _WHY_MISSING, "mechanism")
    tests = value.get("evidence")
    for name, test in tests.items() if isinstance(tests, dict) else ():
        fields = test if isinstance(test, dict) else {"result": test}
        said = [f"{part}: {text}" for part in _TEST if (text := _words(fields.get(part)))]
        absent = [f"{part} of the test" for part in _TEST if part not in fields]
        claim = f"{name}: {_words(fields.get('result')) or 'no result'}"
        add(claim, finding.nodes[0], (*said, *absent, *_TEST_MISSING), "observation")
    return finding


def _dispatch(value: dict[str, Any], slug: str) -> Finding:
    name = _words(value.get("run_name")) or slug
    asked = ", ".join(f"{key} {_words(value[key])}" for key in sorted(value))
    finding = new_finding(
        slug,
        f"{name} was asked for with {asked}",
        title=f"dispatch of {name}",
        author=_words(value.get("ticket")) or "not known",
        at=_date(value.get("dispatched_at")),
    )
    return _root_missing(finding, _DISPATCH_MISSING, _words(value.get("host")))


def _root_missing(finding: Finding, missing: Iterable[str], host: str) -> Finding:
    root = replace(finding.nodes[0], missing=tuple(missing))
    return replace(finding, nodes=(root, *finding.nodes[1:]), host=host or "not known")


def _words(value: Any) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _slug(text: Any) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", str(text).lower()).strip("-")[:48].strip("-")
    return slug or "imported"


def _date(value: Any) -> str:
    """As the record dates itself; now where it does not."""
    match = re.match(
        r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ]([0-9]{2}:[0-9]{2}:[0-9]{2}))?", str(value)
    )
    return f"{match[1]}T{match[2] or '00:00:00'}Z" if match else now_utc()
