"""A message about a run, and its body in the format of each service."""

from __future__ import annotations

import base64
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from engine.terminal import clipped, printable

ENDED, WORSE, STALLED, TEST = "ended", "worse", "stalled", "test"
_TITLES = {
    ENDED: "the run ended",
    WORSE: "the verdict got worse",
    STALLED: "the run stalled",
    TEST: "a test message",
}
_LONGEST = 1500
"""Maximum length of a text, in characters: the services refuse or cut longer messages (Discord: 2,000)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    event: str
    run: str
    host: str
    step: int | None
    level: str
    """Level of the verdict, such as `HEALTHY`."""
    verdict: str
    """The verdict line."""
    do: str
    """Action to take; empty for none."""
    folder: str
    look: str
    """The command that shows the run."""

    @property
    def title(self) -> str:
        return _line(f"{self.run} on {self.host}: {_TITLES[self.event]}")

    @property
    def text(self) -> str:
        at = [] if self.step is None else [f"step {self.step:,}"]
        do = [f"do: {self.do}"] if self.do else []
        return "\n".join(_line(line) for line in [self.verdict, *do, *at, f"look: {self.look}"])

    def as_dict(self) -> dict[str, Any]:
        fields = {
            name: _line(value) if isinstance(value, str) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return fields | {"title": self.title, "text": self.text}


def _line(text: str) -> str:
    return clipped(printable(text).replace("\n", " "), _LONGEST)


def body_of(format: str, message: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a POST, from `Message.as_dict`."""
    title, text = message["title"], message["text"]
    whole = clipped(f"{title}\n{text}", _LONGEST)
    if format == "ntfy":
        # A header is ASCII only; ntfy would make an attachment of a long body.
        coded = base64.b64encode(title.encode()).decode()
        headers = {"Title": f"=?UTF-8?B?{coded}?=", "Content-Type": "text/plain"}
        return clipped(text, _LONGEST).encode(), headers
    body: dict[str, Any] = message
    if format == "slack":
        # Slack reads text between < and > as a link or a mention.
        safe = whole.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        body = {"text": safe}
    elif format == "discord":
        body = {"content": whole, "allowed_mentions": {"parse": []}}
    return json.dumps(body).encode(), {"Content-Type": "application/json"}
