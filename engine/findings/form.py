"""finding.json as bytes: the one form in which it is written, its seal, and the strict reader.

The file is the root of its bundle. It lists the hash of every other file, it is written in one form
only (sorted keys, one space of indent), and its `seal` is the sha256 of that form with an empty seal.
So any byte that is not as the tool wrote it is found. The seal is not a signature: whoever rewrites
the whole bundle with this tool gets a sound one, with another seal. LOG.md beside the bundle holds the
seal too, and so may anything else that should notice.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Any

import msgspec
from msgspec import UNSET

from engine.errors import BadInput
from engine.findings.finding import CommandRun, Finding, FlipResult

SCHEMA = "apr-workbench/finding/1"
_DERIVED = re.compile(r"README\.md|plots/e[0-9]+\.svg")


def now_utc(unix_s: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def to_bytes(finding: Finding) -> bytes:
    """The one form in which a finding is written."""
    return canonical(msgspec.to_builtins(finding))


def canonical(value: Any) -> bytes:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def sealed(finding: Finding) -> Finding:
    """The finding as it will be read again, with the seal that its content has. Raises BadInput for a
    value that the schema does not allow."""
    try:
        checked = msgspec.convert(msgspec.to_builtins(finding), Finding)
    except msgspec.ValidationError as error:
        raise BadInput.expected(
            "finding", finding.slug, "what its schema allows", str(error)
        ) from None
    bare = msgspec.structs.replace(checked, seal="")
    return msgspec.structs.replace(bare, seal=hashlib.sha256(to_bytes(bare)).hexdigest())


def load(raw: bytes, where: object) -> Finding:
    """The finding in `raw`. Raises BadInput for one that is not exactly as the tool writes it."""
    try:
        finding = msgspec.json.decode(raw, type=Finding)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput.expected("finding", where, f"a finding ({SCHEMA})", str(error)) from None
    check_form(finding, where)
    if sealed(finding).seal != finding.seal:
        raise BadInput.expected("finding", where, "the content that was sealed", "other content")
    if to_bytes(finding) != raw:
        raise BadInput.expected("finding", where, "the form the tool writes", "another form")
    return finding


def check_form(finding: Finding, where: object) -> None:
    """What the schema cannot say. Raises BadInput."""

    def refuse(expected: str, found: str) -> BadInput:
        return BadInput.expected("finding", where, expected, found)

    ids = [node.id for node in finding.nodes]
    ids += [a.id for node in finding.nodes for a in node.alternatives]
    ids += [evidence.id for _, evidence in finding.evidence()]
    if twice := sorted({id_ for id_ in ids if ids.count(id_) > 1}):
        raise refuse("each id once", f"{', '.join(twice)} twice")
    hashes = [artifact.sha256 for artifact in finding.artifacts]
    if hashes != sorted(set(hashes)):
        raise refuse("artifacts in the order of their hashes", "another order, or one twice")
    if odd := [name for name in finding.derived if not _DERIVED.fullmatch(name)]:
        raise refuse("README.md and plots alone to be made from it", odd[0])
    seen: set[str] = set()
    for node in finding.nodes:
        # A node names only nodes before it, so there is no circle.
        if unknown := [id_ for id_ in node.why_of if id_ not in seen]:
            raise refuse(f"{node.id} to be a why of nodes before it", ", ".join(unknown))
        seen.add(node.id)
        own = {evidence.id for evidence in node.evidence}
        for other in node.alternatives:
            if other.answer is not None and other.answer.evidence not in own:
                raise refuse(f"evidence of {node.id} to answer {other.id}", other.answer.evidence)
    if not finding.nodes or finding.nodes[0].why_of:
        raise refuse("a first node that is a why of nothing", "none")
    for _, evidence in finding.evidence():
        wanted = [evidence.artifact, *evidence.attached]
        if isinstance(evidence.locator, FlipResult):
            wanted += [evidence.locator.plan, evidence.locator.pairs]
        if isinstance(evidence.locator, CommandRun) and evidence.locator.started is not UNSET:
            wanted.append(evidence.locator.started.log)
        if lost := [sha for sha in wanted if sha not in hashes]:
            raise refuse(f"the artifacts of {evidence.id} in the list", f"no {lost[0][:12]}")


def schema() -> bytes:
    """The JSON schema, as it is published in finding.schema.json."""
    return canonical(msgspec.json.schema(Finding))
