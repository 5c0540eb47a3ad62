"""Push pages to their readers: a page that is open is rendered again about once a second.

A reader is sent what differs from what it has, when it can take it: between two sends only the newest state is kept,
so a slow one costs one message, however much happens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

EVERY_S = 1.0
"""Seconds between two renderings of a page."""
PING_S = 15.0
MOST_READERS = 64
MOST_TOPICS = 64

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
    """One page and its readers."""

    def __init__(self, render: Callable[[], State], pool: ThreadPoolExecutor) -> None:
        self._render, self._pool = render, pool
        self._lock = asyncio.Lock()
        self._state: State | None = None
        self._at_s = 0.0
        self._keeper: asyncio.Task[None] | None = None
        self.readers = 0
        self.changed = asyncio.get_running_loop().create_future()

    async def refresh(self) -> State:
        """Return the page, rendered again when it is older than EVERY_S."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._state is None or loop.time() >= self._at_s + EVERY_S:
                state = await loop.run_in_executor(self._pool, self._render)
                self._at_s = loop.time()
                if state is not self._state:
                    self._state = state
                    self.changed.set_result(None)
                    self.changed = loop.create_future()
            return self._state

    async def _keep(self) -> None:
        """Refresh the page while it has readers, at most half of the time."""
        loop = asyncio.get_running_loop()
        while self.readers:
            begin_s = loop.time()
            await self.refresh()
            took_s = loop.time() - begin_s
            await asyncio.sleep(max(EVERY_S - took_s, took_s))

    def keep(self) -> asyncio.Task[None]:
        """Return the task that refreshes the page, started when it does not run."""
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())
        return self._keeper


async def follow(topic: Topic, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an open page with what changes, as Server-Sent Events, until it is closed."""
    query = Request(scope).query_params
    wanted, have = query.get("filter", ""), query.get("have")
    gone = asyncio.create_task(_closed(receive))
    topic.readers += 1
    try:
        keeper = topic.keep()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = "retry: 1000\n\n"
        sent: dict[str, int] = {}
        while not (gone.done() or keeper.done()):
            changed = topic.changed
            parts = (await topic.refresh()).parts(wanted)
            if have == (version := version_of(parts)):
                sent = {id: hash(part) for id, part in parts.items()}
            have = None
            text += _news(sent, parts, version)
            body = (text or ": still here\n\n").encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            text = ""
            await asyncio.wait(
                {gone, keeper, changed}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED
            )
    finally:
        topic.readers -= 1
        gone.cancel()


def _news(sent: dict[str, int], parts: Parts, version: str) -> str:
    """Return the event that makes a page with the parts `sent` one with `parts`, and note it there."""
    hashes = {id: hash(part) for id, part in parts.items()}
    new = {id: part for id, part in parts.items() if sent.get(id) != hashes[id]}
    order = None if list(sent) == list(parts) else list(parts)
    sent.clear()
    sent.update(hashes)
    if not new and order is None:
        return ""
    return f"data: {json.dumps({'parts': new, 'order': order, 'version': version})}\n\n"


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
