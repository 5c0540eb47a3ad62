"""Write canonical JSON, hashes and times for records that are verified later."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Any

_HALF_PAIR = re.compile("[\ud800-\udfff]")


def canonical(value: Any) -> bytes:
    """Write JSON in canonical form: sorted keys, one space of indent."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A file name that is not UTF-8 holds halves of surrogate pairs, which JSON decoders refuse: write them as escapes.
    text = _HALF_PAIR.sub(lambda half: f"\\\\{ascii(half[0])[2:-1]}", text)
    return text.encode() + b"\n"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def now_utc(unix_s: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
