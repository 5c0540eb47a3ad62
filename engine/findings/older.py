"""Findings of the first version, which are read-only: claims with evidence, by rules over their text.

Nothing in them is an experiment that named its observation beforehand, so by today's rules all are open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import BadInput
from engine.files import parse_json
from engine.log.text import one_line
from engine.sealing import canonical, digest

SCHEMA = "apr-workbench/finding/1"
LEVEL = "open: of an earlier version, which tested no cause by today's rules; read-only"


class _Artifact(msgspec.Struct):
    sha256: str
    name: str
    kept: bool = True

    @property
    def path(self) -> str:
        _, dot, suffix = self.name.rpartition(".")
        plain = suffix.isalnum() and suffix.isascii() and len(suffix) <= 8
        return f"artifacts/{self.sha256}{f'.{suffix.lower()}' if dot and plain else ''}"


class _Evidence(msgspec.Struct):
    id: str
    says: str
    locator: dict[str, Any]


class _Node(msgspec.Struct):
    id: str
    claim: str
    kind: str
    status: str
    why_of: tuple[str, ...] = ()
    evidence: tuple[_Evidence, ...] = ()


class _Finding(msgspec.Struct):
    title: str
    nodes: tuple[_Node, ...]
    artifacts: tuple[_Artifact, ...] = ()
    derived: dict[str, str] = {}
    closed: dict[str, str] | None = None
    seal: str = ""


@dataclass(frozen=True, slots=True)
class Older:
    title: str
    lines: tuple[str, ...]
    """Its claims, with the kinds of evidence under them."""
    files: dict[str, str]
    """sha256 by path."""
    seal: str


def read_older(raw: bytes, where: object) -> Older | None:
    """Decode a finding of the first version; None for any other bytes. Raises BadInput for one that was changed."""
    try:
        tree = parse_json(raw, where, "finding")
        if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
            return None
        found = msgspec.convert(tree, _Finding)
    except (BadInput, msgspec.ValidationError) as error:
        if SCHEMA.encode() not in raw:
            return None
        raise BadInput.expected("finding", where, f"a finding ({SCHEMA})", str(error)) from None
    if canonical(tree) != raw or digest(canonical({**tree, "seal": ""})) != found.seal:
        raise BadInput.expected("finding", where, "the content that was sealed", "other content")
    closed = found.closed or {}
    end = f"was closed as {closed.get('outcome')}: {closed.get('text')}" if closed else "open"
    lines = [f"{one_line(found.title)}  [{LEVEL}]", f"  {one_line(end)}"]
    for node in found.nodes:
        of = f", why of {', '.join(node.why_of)}" if node.why_of else ""
        kinds = ", ".join(f"{one.says} by {one.locator.get('type')}" for one in node.evidence)
        claim = f"{node.id}  {node.kind}, recorded as {node.status}{of}: {node.claim}"
        lines += [f"  {one_line(claim)}", *([f"      {one_line(kinds)}"] if kinds else ())]
    files = {one.path: one.sha256 for one in found.artifacts if one.kept} | found.derived
    return Older(found.title, tuple(lines), files, found.seal)
