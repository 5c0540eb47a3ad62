"""Keep pages up to date: an open page requests its changes about once a second.

A reader sends the version of its page and gets the parts that differ from that version, or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

EVERY_S = 1.0
"""Seconds between two requests of an open page."""
MOST_TOPICS = 64
MOST_VERSIONS = 64
"""Number of newest versions of a page, over all filters, whose parts are kept."""

Parts = Mapping[str, str]
"""HTML elements by id, in the order of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The content of a page at one moment."""

    title: str
    parts: Callable[[str], Parts]
    """Function that returns the elements of the page for a filter."""
    status: int = 200


def version_of(parts: Parts) -> str:
    """Return a hash of the page's content, which is the same after a restart of the server."""
    digest = blake2b(digest_size=8)
    for part in parts.values():
        digest.update(part.encode())
    return digest.hexdigest()


class Topic:
    """One page, and the versions of it that readers may have."""

    def __init__(self, render: Callable[[], State], pool: ThreadPoolExecutor) -> None:
        self._render, self._pool = render, pool
        self._lock = asyncio.Lock()
        self._state: State | None = None
        self._at_s = 0.0
        self._sent: dict[str, dict[str, int]] = {}
        """Hashes of the parts by id, for each version."""

    async def refresh(self) -> State:
        """Return the page, rendered again if it is older than EVERY_S / 2."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._state is None or loop.time() >= self._at_s + EVERY_S / 2:
                self._state = await loop.run_in_executor(self._pool, self._render)
                self._at_s = loop.time()
            return self._state

    async def news(self, wanted: str, have: str) -> dict[str, Any] | None:
        """Return the changes that turn a page of version `have` into the newest page for a filter; None if it is
        already the newest."""
        parts = (await self.refresh()).parts(wanted)
        hashes = {id: hash(part) for id, part in parts.items()}
        before, version = self._sent.get(have, {}), version_of(parts)
        self._sent[version] = hashes
        if len(self._sent) > MOST_VERSIONS:
            del self._sent[next(iter(self._sent))]
        if version == have:
            return None
        new = {id: part for id, part in parts.items() if before.get(id) != hashes[id]}
        order = None if list(before) == list(parts) else list(parts)
        return {"parts": new, "order": order, "version": version}
