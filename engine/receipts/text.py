"""A receipt in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

_ENTRIES_SHOWN = 200
"""Entries printed of one part of a receipt, at most."""


def receipt_lines(receipt: dict[str, Any]) -> Iterator[str]:
    """Render a receipt for people: what identifies the run, what it did, and what differs from the request."""
    for name in (
        *("run", "tool", "outcome", "config", "seeds", "data", "weights", "device_facts"),
        *("times", "environment", "rows", "heldout_loss_nats", "lineage"),
    ):
        value = receipt.get(name)
        if not isinstance(value, dict | list):
            yield f"{name}: {_compact(value)}"
            continue
        yield name
        items = value.items() if isinstance(value, dict) else ((None, one) for one in value)
        for key, inner in islice(items, _ENTRIES_SHOWN):
            yield f"  {_compact(inner)}" if key is None else f"  {key}: {_compact(inner)}"
        if (more := len(value) - _ENTRIES_SHOWN) > 0:
            yield f"  and {more:,} more"
    yield "decisions"
    for made in receipt.get("decisions") or []:
        how = "set by the user" if made["overridden"] else f"because {made['reason']}"
        yield f"  {made['knob']}: {made['choice']}, {how}"
    yield "asked for, and done otherwise"
    for one in receipt.get("differences") or []:
        yield f"  {one['key']}: asked {one['requested']}, did {one['effective']} ({one['why']})"


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
