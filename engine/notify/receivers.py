"""Read the receivers of messages: webhooks and commands. The user's `notify.toml` has receivers for all runs:

    [team]
    webhook = "https://hooks.slack.com/services/..."      # Slack, Discord and ntfy are known by their hosts
    [phone]
    webhook = "https://ntfy.example.org/my-runs"
    format = "ntfy"
    [mail]
    command = ["send-mail", "--to", "me"]                 # the message as JSON on stdin, and in APR_NOTIFY_* variables

A URL and the arguments of a command may be secrets. Only this package reads them; logs, messages and errors have only
the name of a receiver and `where`: a scheme and a host, or a program.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine import limits
from engine.errors import BadInput
from engine.files import read_text, user_config

NOTIFY_VARIABLE = "APR_WATCH_NOTIFY"
"""Environment variable with the receivers of a watched script, in the form of `engine watch --notify`."""
ALL, NOBODY = "all", "none"
FORMATS = ("json", "slack", "discord", "ntfy")
_HOSTS = {
    "hooks.slack.com": "slack",
    "discord.com": "discord",
    "discordapp.com": "discord",
    "ntfy.sh": "ntfy",
}
NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    name: str
    url: str = field(default="", repr=False)
    format: str = ""
    command: tuple[str, ...] = field(default=(), repr=False)
    """Program and arguments; empty for a webhook."""

    @property
    def where(self) -> str:
        """Destination of messages, without secrets."""
        if self.url:
            parts = urlsplit(self.url)
            return f"{self.format} {parts.scheme}://{parts.hostname}"
        return f"command {Path(self.command[0]).name}"


def config_file() -> Path:
    return user_config("notify.toml")


def read_receivers() -> dict[str, Receiver]:
    """Return the receivers in the user's file by name; empty if there is no file. Raises BadInput."""
    path = config_file()
    if not os.path.lexists(path):
        return {}
    text = read_text(path, "receivers", limits.NOTIFY_FILE)
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "other text"
        raise BadInput.expected("receivers", path, "TOML", found) from None
    return {
        name: _receiver(f"receiver: {path} [{name}]", name, table) for name, table in tree.items()
    }


def choose_receivers(wanted: str, environ: Mapping[str, str]) -> list[Receiver]:
    """Return the receivers in a comma-separated list. An entry is a name in the user's file, `all` for all names,
    `none` for no receiver, `$VARIABLE` for a variable with a URL, or a URL. Raises BadInput."""
    receivers: list[Receiver] = []
    for word in dict.fromkeys(map(str.strip, wanted.split(","))):
        if word == ALL:
            receivers += read_receivers().values()
        elif "://" in word:
            receivers.append(_webhook("--notify", f"url-{len(receivers) + 1}", word))
        elif re.fullmatch(r"\$\w+", word):
            receivers.append(_webhook(f"notify: {word}", word, environ.get(word[1:], "")))
        elif word not in ("", NOBODY):
            known = read_receivers()
            if word not in known:
                names = (
                    f"one of its receivers ({', '.join(known)})" if known else "a receiver in it"
                )
                shown = f"no {word!r}" if NAME.fullmatch(word) else "another text"
                expected = f"{names}, all, none, $VARIABLE or a URL"
                raise BadInput.expected("notify", config_file(), expected, shown)
            receivers.append(known[word])
    return receivers


def _receiver(where: str, name: str, table: Any) -> Receiver:
    if not NAME.fullmatch(name) or name in (ALL, NOBODY):
        raise BadInput(f"{where} — expected a name of letters, digits, - and _, not all or none")
    match table:
        case {"webhook": url, **more} if more in ({}, *({"format": known} for known in FORMATS)):
            return _webhook(where, name, url, str(more.get("format", "")))
        case {"command": [*words], **more} if words and not more:
            return Receiver(name=name, command=tuple(map(str, words)))
    expected = 'webhook = "URL" (with or without a format) or command = ["PROGRAM"]'
    raise BadInput(f"{where} — expected {expected}; formats: {', '.join(FORMATS)}")


def _webhook(where: str, name: str, url: object, format: str = "") -> Receiver:
    """Return a receiver at a URL. The message of an error does not quote the URL, which may be a secret."""
    host = ""
    if isinstance(url, str) and re.fullmatch(r"https?://[!-~]+", url):
        with suppress(ValueError):
            parts = urlsplit(url)
            host = parts.hostname or "" if parts.port != 0 else ""
    if not host:
        raise BadInput(
            f"{where} — expected a URL of http or https, found {'another' if url else 'none'}"
        )
    known = next((f for h, f in _HOSTS.items() if host == h or host.endswith(f".{h}")), "json")
    return Receiver(name=name, url=str(url), format=format or known)
