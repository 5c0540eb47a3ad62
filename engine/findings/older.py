"""Findings of the first version, which are read-only: claims with evidence, by rules over their text.

Nothing in them is an experiment that named its observation beforehand, so by today's rules all are open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.errors import BadInput
from engine.files import parse_json
from engine.log.text import one_line
from engine.sealing import canonical, digest

SCHEMA = "apr-workbench/finding/1"
LEVEL = "open: of an earlier version, which tested no cause by today's rules; read-only"


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
    if SCHEMA.encode() not in raw:
        return None
    tree = parse_json(raw, where, "finding")
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        return None
    if canonical(tree) != raw or digest(canonical({**tree, "seal": ""})) != tree.get("seal"):
        raise BadInput.expected("finding", where, "the content that was sealed", "other content")
    try:
        kept = [artifact for artifact in tree.get("artifacts", ()) if artifact.get("kept", True)]
        files = {_path_of(artifact): artifact["sha256"] for artifact in kept} | tree.get(
            "derived", {}
        )
        return Older(tree["title"], tuple(_lines(tree)), files, tree["seal"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInput.expected("finding", where, f"a finding ({SCHEMA})", repr(error)) from None


def _path_of(artifact: dict[str, Any]) -> str:
    _, dot, suffix = artifact["name"].rpartition(".")
    plain = suffix.isalnum() and suffix.isascii() and len(suffix) <= 8
    return f"artifacts/{artifact['sha256']}{f'.{suffix.lower()}' if dot and plain else ''}"


def _lines(finding: dict[str, Any]) -> Iterator[str]:
    closed = finding.get("closed")
    end = f"was closed as {closed.get('outcome')}: {closed.get('text')}" if closed else "open"
    yield f"{one_line(finding['title'])}  [{LEVEL}]"
    yield f"  {one_line(end)}"
    for node in finding["nodes"]:
        parents = node.get("why_of")
        why = f", why of {', '.join(parents)}" if parents else ""
        claim = f"{node['id']}  {node['kind']}, recorded as {node['status']}{why}: {node['claim']}"
        yield f"  {one_line(claim)}"
        if evidence := node.get("evidence"):
            kinds = ", ".join(
                f"{item['says']} by {item['locator'].get('type')}" for item in evidence
            )
            yield f"      {one_line(kinds)}"
