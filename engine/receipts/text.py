"""Render a receipt as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

_ENTRIES_SHOWN = 200
"""Maximum number of entries printed for one part of a receipt."""


def receipt_lines(receipt: dict[str, Any]) -> Iterator[str]:
    """Render a receipt: the identity of the run, its work and its decisions."""
    for name in (
        *("run", "tool", "outcome", "config", "seeds", "data", "weights", "device_facts"),
        *("times", "environment", "rows", "heldout_loss_nats"),
    ):
        value = receipt.get(name)
        if not isinstance(value, dict | list):
            yield f"{name}: {_compact(value)}"
            continue
        yield name
        items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
        for key, inner in islice(items, _ENTRIES_SHOWN):
            yield f"  {_compact(inner)}" if key is None else f"  {key}: {_compact(inner)}"
        if (hidden := len(value) - _ENTRIES_SHOWN) > 0:
            yield f"  and {hidden:,} more"
    yield "decisions"
    for decision in receipt.get("decisions") or []:
        how = "set by the user" if decision["overridden"] else f"because {decision['reason']}"
        yield f"  {decision['knob']}: {decision['choice']}, {how}"


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
