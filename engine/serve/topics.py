"""Keep pages for their readers: a page that is open asks about once a second for what has changed.

A reader names the version that it has and gets the parts that differ from it, or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

EVERY_S = 1.0
"""Seconds between two questions of a page."""
MOST_TOPICS = 64
MOST_VERSIONS = 64
"""Newest versions of a page, of all filters, of which the parts are known."""

Parts = Mapping[str, str]
"""HTML elements by their ids, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A page at one moment."""

    title: str
    parts: Callable[[str], Parts]
    """The elements of the page that fit a filter."""
    status: int = 200


def version_of(parts: Parts) -> str:
    """Return a hash of what is shown, the same after a restart."""
    digest = blake2b(digest_size=8)
    for part in parts.values():
        digest.update(part.encode())
    return digest.hexdigest()


class Topic:
    """One page and what its readers have of it."""

    def __init__(self, render: Callable[[], State], pool: ThreadPoolExecutor) -> None:
        self._render, self._pool = render, pool
        self._lock = asyncio.Lock()
        self._state: State | None = None
        self._at_s = 0.0
        self._sent: dict[str, dict[str, int]] = {}
        """Hashes of the parts by id, of each version."""

    async def refresh(self) -> State:
        """Return the page, rendered again when it is older than EVERY_S / 2."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._state is None or loop.time() >= self._at_s + EVERY_S / 2:
                self._state = await loop.run_in_executor(self._pool, self._render)
                self._at_s = loop.time()
            return self._state

    async def news(self, wanted: str, have: str) -> dict[str, Any] | None:
        """Return what makes a page of the version `have` the newest one that fits a filter; None if it is."""
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
