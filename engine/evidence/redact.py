"""Taking secrets out of what is kept, and saying so.

Everything that enters a bundle or a receipt as text passes through here before it is hashed, so that
not even a digest of a secret remains. A secret becomes `[redacted: SORT]`, and the number of each sort
is returned and kept beside the text.

Found are: the forms that keys of known services have; `Authorization` headers; user and password in a
URL, and signatures in its query; private keys; values behind a name such as `api_key=`; the argument
behind an option such as `--token`; and, whatever its form, the value of every variable of this process
whose name says that it is secret. What is left holds no quote or backslash, so JSON stays JSON.

Not covered: a secret of no known form that stands behind no telling name, and text inside of archives,
images and weights, which are never copied.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_SECRET_NAME = (
    r"(?:token|secret|secrets|passw(?:or)?d|passphrase|pwd|api[_-]?key|apikey|access[_-]?key"
    r"|access[_-]?key[_-]?id|secret[_-]?key|private[_-]?key|auth[_-]?key|credentials?)"
)
_SECRET_VARIABLE = re.compile(rf"(?i)(?:^|[_-]){_SECRET_NAME}$|^{_SECRET_NAME}$")
_SHORTEST = 8
"""Shorter values are words that would be cut out of every text."""

_VALUE = r"""[^\s"'\\,;&<>]"""
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (sort, re.compile(pattern))
    for sort, pattern in (
        (
            "private key",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^\"]*?(?:-----END [A-Z ]*PRIVATE KEY-----|(?=\")|\Z)",
        ),
        ("URL credentials", r"(?i)(?<=://)[^/\s\"'<>\\@]+@(?=[^\s/])"),
        (
            "URL signature",
            r"(?i)(?<=[?&])(?:sig|signature|token|access_token|auth|key|api_key|password"
            r"|x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential))=[^&\s\"'\\<>]+",
        ),
        (
            "authorization header",
            r"(?i)(\bauthorization(?:\\?[\"'])?\s*[:=]\s*(?:\\?[\"'])?)(?:[a-z]+\s+)?[^\s\"'\\,;]{6,}",
        ),
        ("bearer token", r"(?i)\bbearer\s+[a-z0-9._~+/=-]{12,}"),
        ("Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
        ("AWS key", r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA|AIPA)[A-Z0-9]{16}\b"),
        ("GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
        ("API key", r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bAIza[A-Za-z0-9_-]{30,}"),
        (
            "service token",
            r"\bxox[abeprs]-[A-Za-z0-9-]{10,}|\bglpat-[A-Za-z0-9_-]{16,}|\bnpm_[A-Za-z0-9]{30,}"
            r"|\bpypi-[A-Za-z0-9_-]{30,}",
        ),
        ("JWT", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    )
)
# A number behind such a name is a count: `"max_token": 2048`.
_ASSIGNED = re.compile(
    rf"(?i)((?<![a-z0-9_.-])[a-z0-9_.-]*{_SECRET_NAME}(?:\\?[\"'])?\s*[=:]\s*(?:\\?[\"'])?)"
    rf"(?!\[redacted)(?![-+0-9.eE]+(?![^\s\"'\\,;}}\])])){_VALUE}{{{_SHORTEST},}}"
)
_OPTION = re.compile(rf"(?i)^--?[a-z0-9-]*{_SECRET_NAME}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Redacted:
    text: str
    found: dict[str, int] = field(default_factory=dict)
    """How many of each sort were replaced; empty where nothing was."""


class Redactor:
    """Knows the secret values of an environment. The same text gives the same result every time."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        values = {
            value for name, value in environ.items() if is_secret_name(name) and _is_telling(value)
        }
        # Longest first: one value may be part of another.
        self._values = sorted(values, key=lambda v: (-len(v), v))

    def text(self, text: str) -> Redacted:
        found: Counter[str] = Counter()

        def put(sort: str) -> Callable[[re.Match[str]], str]:
            def replace(match: re.Match[str]) -> str:
                found[sort] += 1
                kept = match[1] if match.re.groups else ""
                at = "@" if sort == "URL credentials" else ""
                return f"{kept}[redacted: {sort}]{at}"

            return replace

        for value in self._values:
            if count := text.count(value):
                found["value of a secret variable"] += count
                text = text.replace(value, "[redacted: value of a secret variable]")
        for sort, pattern in _FORMS:
            text = pattern.sub(put(sort), text)
        text = _ASSIGNED.sub(put("value of a secret setting"), text)
        return Redacted(text=text, found=dict(sorted(found.items())))

    def bytes(self, data: bytes) -> tuple[bytes, dict[str, int]]:
        """UTF-8 text without its secrets; bytes that are no text stay as they are."""
        done = self.text(data.decode("utf-8", "surrogateescape"))
        return done.text.encode("utf-8", "surrogateescape"), done.found

    def argv(self, argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
        """Arguments of a command; one behind `--token` and the like goes whatever it is."""
        out: list[str] = []
        found: Counter[str] = Counter()
        for argument in argv:
            if out and _OPTION.match(out[-1]) and not argument.startswith("-"):
                found["argument of a secret option"] += 1
                out.append("[redacted: argument of a secret option]")
                continue
            done = self.text(argument)
            found.update(done.found)
            out.append(done.text)
        return tuple(out), dict(sorted(found.items()))


def is_secret_name(name: str) -> bool:
    """Whether a variable or a setting of that name holds a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def _is_telling(value: str) -> bool:
    """Whether a value is so long and so unlike a number or a path that it is safe to cut out of every
    text."""
    if len(value) < _SHORTEST or not value.isprintable() or value.startswith(("/", "./", "~")):
        return False
    return not re.fullmatch(r"[-+0-9.eE]+", value)


def words(found: Mapping[str, int]) -> str:
    """`2 redacted: AWS key, JWT`; empty where nothing was."""
    return f"{sum(found.values())} redacted: {', '.join(sorted(found))}" if found else ""
