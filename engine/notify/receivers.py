"""Receivers of messages: a webhook, a command or the terminal. Those of all runs are in the user's `notify.toml`:

    [team]
    webhook = "https://hooks.slack.com/services/..."      # Slack, Discord and ntfy are known by their hosts
    [phone]
    webhook = "https://ntfy.example.org/my-runs"
    format = "ntfy"
    [mail]
    command = ["send-mail", "--to", "me"]                 # the message as JSON on stdin, and in APR_NOTIFY_* variables
    [here]
    desktop = true                                        # by the terminal that the run was started in

A URL and the arguments of a command may be secrets. Only this package reads them; anything that is logged, printed or
raised has the name of a receiver and `where`: a scheme and a host, or a program.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine import limits
from engine.errors import BadInput
from engine.files import read_text, user_config

NOTIFY_VARIABLE = "APR_WATCH_NOTIFY"
"""Environment variable with the receivers of a watched script, as `engine watch --notify` has them."""
ALL, NOBODY = "all", "none"
FORMATS = ("json", "slack", "discord", "ntfy")
_HOSTS = {
    "hooks.slack.com": "slack",
    "discord.com": "discord",
    "discordapp.com": "discord",
    "ntfy.sh": "ntfy",
}
NAME = re.compile(r"[A-Za-z0-9_-]+")
VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_KINDS = ("webhook", "command", "desktop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    name: str
    url: str = field(default="", repr=False)
    format: str = ""
    command: tuple[str, ...] = field(default=(), repr=False)
    """The terminal, without a URL and a command."""

    @property
    def where(self) -> str:
        """Where messages go, without secrets."""
        if self.url:
            parts = urlsplit(self.url)
            return f"{self.format} {parts.scheme}://{parts.hostname}"
        return f"command {Path(self.command[0]).name}" if self.command else "terminal"


def config_file() -> Path:
    return user_config("notify.toml")


def read_receivers() -> dict[str, Receiver]:
    """Return the receivers of the user's file by name; none without it. Raises BadInput."""
    path = config_file()
    if not os.path.lexists(path):
        return {}
    text = read_text(path, "receivers", limits.NOTIFY_FILE)
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "other text"
        raise BadInput.expected("receivers", path, "TOML", found) from None
    if len(tree) > limits.RECEIVERS.most:
        raise BadInput.expected("receivers", path, str(limits.RECEIVERS), f"{len(tree):,}")
    return {name: _receiver(f"{path} [{name}]", name, table) for name, table in tree.items()}


def choose_receivers(
    wanted: str, environ: Mapping[str, str], *, urls: bool = False
) -> list[Receiver]:
    """Return the receivers in a list with commas: names of the user's file, `all` of them, `none`, `$VARIABLE` with a
    URL in it, and a URL itself where `urls` allows it. Raises BadInput."""
    words = list(dict.fromkeys(word.strip() for word in wanted.split(",") if word.strip()))
    if (problem := wanted_problem(wanted, urls=urls)) is not None:
        raise BadInput(f"notify: {problem}")
    found: list[Receiver] = []
    # A broken file concerns only those who use it.
    known = read_receivers() if any(NAME.fullmatch(w) and w != NOBODY for w in words) else {}
    for word in words:
        if word == ALL:
            found += known.values()
        elif "://" in word:
            found.append(_webhook("--notify", f"url-{len(found) + 1}", word))
        elif word.startswith("$"):
            if not (url := environ.get(word[1:], "")):
                raise BadInput.expected("notify", word, "a URL in this variable", "none")
            found.append(_webhook(f"notify: {word}", word, url))
        elif word in known:
            found.append(known[word])
        elif word != NOBODY:
            names = ", ".join(known) or "none"
            expected = f"a receiver of {config_file()}, which has {names}"
            raise BadInput.expected("notify", word, expected, "no such name")
    return found


def wanted_problem(wanted: str, *, urls: bool = False) -> str | None:
    """Return what is wrong with a list of receivers, without its text, which may be a secret; None where sound."""
    for word in filter(None, map(str.strip, wanted.split(","))):
        if not (NAME.fullmatch(word) or VARIABLE.fullmatch(word) or (urls and "://" in word)):
            found = "a URL, which may hold a secret" if "://" in word else "another text"
            return f"expected names of receivers, all, none or $VARIABLE, found {found}"
    return None


def _receiver(where: str, name: str, table: Any) -> Receiver:
    def refused(expected: str, found: str) -> BadInput:
        return BadInput.expected("receiver", where, expected, found)

    if not NAME.fullmatch(name) or name in (ALL, NOBODY):
        raise refused("a name of letters, digits, - and _ other than all and none", "another")
    if not isinstance(table, dict):
        raise refused("a section", type(table).__name__)
    if unknown := set(table) - {*_KINDS, "format"}:
        raise refused(f"{', '.join(_KINDS)} or format", f"the key {min(unknown)[:40]!r}")
    kinds = [kind for kind in _KINDS if kind in table]
    if len(kinds) != 1:
        raise refused(f"one of {', '.join(_KINDS)}", ", ".join(kinds) or "none")
    value = table[kinds[0]]
    if kinds == ["webhook"]:
        given = table.get("format", "")
        if given not in ("", *FORMATS):
            raise refused(f"a format of {', '.join(FORMATS)}", "another")
        return _webhook(f"receiver: {where}", name, value, given)
    if kinds == ["command"]:
        if not value or not isinstance(value, list) or not all(isinstance(w, str) for w in value):
            raise refused('a command as a list of texts, as ["mail-me"]', type(value).__name__)
        return Receiver(name=name, command=tuple(value))
    if value is not True:
        raise refused("desktop = true", "another value")
    return Receiver(name=name)


def _webhook(where: str, name: str, url: object, format: str = "") -> Receiver:
    """Return a receiver at a URL. The message of an error has nothing of the URL, which may be a secret."""
    host = ""
    if isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url:
        try:
            parts = urlsplit(url)
            is_sound = parts.scheme in ("http", "https") and (parts.port or 1) > 0
            host = parts.hostname or "" if is_sound else ""
        except ValueError:
            host = ""
    if not host or len(str(url)) > limits.SPEC_TEXT.most:
        raise BadInput(f"{where} — expected a URL of http or https, found another text")
    known = next((f for h, f in _HOSTS.items() if host == h or host.endswith(f".{h}")), "json")
    return Receiver(name=name, url=str(url), format=format or known)
