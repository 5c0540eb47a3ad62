"""Format answers for agents: one JSON object of at most the requested length, in which text from runs is marked as
data.

    {"id": "3f9a1c2b7d10", "rows": [{"step": 40, "untrusted_text": {"name": "kd-1"}}], "next_cursor": 20}

Outside `untrusted_text` there are only numbers, ids that the server made, and words from the engine's tables. So a
name, a note, a sample or an exception that contains instructions for its reader appears only in that field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.catalogue import BY_ID
from engine.cli.answers import plain
from engine.log.events import ALERT, CHECK, IDENTITY, LEVELS, NUMBER
from engine.log.view import GOING_ON
from engine.spec import KEYS
from engine.terminal import clipped
from engine.watch.exit_cause import ExitState
from engine.watch.verdict_line import NO_FAULT, SIGNS

UNTRUSTED = "untrusted_text"
DEFAULT_BYTES, LEAST_BYTES, MOST_BYTES = 4000, 1000, 200_000
_ROOM = 40
"""Bytes reserved for `next_cursor`."""
_WORDS = frozenset(
    {
        *(ALERT, CHECK, IDENTITY, NUMBER, "nan", "+inf", "-inf"),
        *(id for rows in BY_ID.values() for id in rows),
        *(*LEVELS, *KEYS, *GOING_ON, *NO_FAULT),
        *(word.lower() for word in (*SIGNS, *ExitState)),
    }
)
_ID = re.compile(r"[0-9a-f]{12}")


def page(head: Mapping[str, Any], rows: Sequence[Any], cursor: int, max_bytes: int) -> str:
    """Return `head` and as many of the rows from `cursor` as fit; `next_cursor` is present if rows are left. A row
    that is a function is called for its fields. If not even the first row fits, it is cut."""
    text = json.dumps(marked(head) | {"rows": []})[:-2]
    left = min(max(max_bytes, LEAST_BYTES), MOST_BYTES) - len(text) - _ROOM
    texts: list[str] = []
    for row in rows[cursor:]:
        # ASCII, so that invisible characters become visible escapes.
        row_text = json.dumps(marked(row() if callable(row) else row), allow_nan=False)
        if len(row_text) >= left:
            if texts:
                break
            # Escaping at most doubles the length of a character.
            row_text = json.dumps({UNTRUSTED: clipped(row_text, left // 2 - _ROOM), "is_cut": True})
        texts.append(row_text)
        left -= len(row_text) + 1
    after = cursor + len(texts)
    next_page = f', "next_cursor": {after}' if after < len(rows) else ""
    return f"{text}{','.join(texts)}]{next_page}}}"


def marked(value: Any) -> Any:
    """Put fields that may be text of a run under `untrusted_text`; fields without a value are left out."""
    value = plain(value)
    if not isinstance(value, dict):
        return value if _is_own(value) else {UNTRUSTED: value}
    filled = {name: field for name, field in value.items() if field not in ("", None, [], {})}
    own = {name: field for name, field in filled.items() if _is_own(field)}
    text = {name: field for name, field in filled.items() if name not in own}
    return own | ({UNTRUSTED: text} if text else {})


def _is_own(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_own, value))
    if isinstance(value, str):
        return value in _WORDS or _ID.fullmatch(value) is not None
    return not isinstance(value, dict)
