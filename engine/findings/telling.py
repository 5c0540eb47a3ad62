"""Values that stand directly behind a name which says that they are secret.

    HF_TOKEN=abc    --api-key x    "password": "a b"    secret: |       <password>x</password>
    X-Auth-Token: x    'token', 'x' behind a dash    token%3Dabc        ENV HF_TOKEN abc

A name tells by its end (`NAME`), whatever is before it. Special tokens and counts of a tokenizer
(`eos_token`, `max_token`), references (`$HF_TOKEN`), placeholders (`<token>`, `***`), types and calls in
source text are no secrets and stay, so that logs and code stay readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

NAME = (
    r"(?:token|secrets?|passw(?:or)?ds?|passphrase|pwd|credentials?|access[ _-]?keys?(?:[ _-]?id)?"
    r"|(?:api|secret|private|auth)[ _-]?keys?"
    r"|(?:signing|encryption|session|master|account|client|license|webhook)[_-]?keys?|[_-]pat)"
)
"""How the name of a secret ends."""

_NAMED = re.compile(
    rf"(?i)({NAME})(?:[_-]?[0-9]{{1,3}})?"
    r"(?P<close>\\*[\"'`]\]?|%22|&quot;)?"
    r"(?P<sep>"
    r"[ \t]*:[ \t]*(?:str|bytes|Text|SecretStr|Optional\[str\]|str \| None)[ \t]*=(?!=)[ \t]*"
    r"|\s*(?:=>|:=|=(?!=)|:(?![:/=]))[ \t]*"
    r"|%3D|%3A(?!%2F)(?:%20|\+)?"
    r"|>(?=[^\s<])|\s*,\s*|[ \t]+)"
)
_BEGINNINGS = (
    *(
        "token",
        "secret",
        "passw",
        "passphrase",
        "pwd",
        "credential",
        "access",
        "api",
        "private",
        "auth",
    ),
    *("signing", "encryption", "session", "master", "account", "client", "license", "webhook"),
    *("_pat", "-pat"),
)
"""How what `NAME` matches begins: found first, because the expression alone is slow on a long log."""
_BEFORE = re.compile(r"[A-Za-z0-9_.-]*$")
_LONGEST_NAME = 128
_NO_SECRET = re.compile(
    r"(?i)(?:bos|eos|pad|unk|sep|cls|mask|max|min|num|n|per|next|first|last|stop|image|special)[_-]?token$"
)
_LINE_START = re.compile(r"(?:^|\n|\\n)[ \t]*(?:-[ \t]+)?(?:export[ \t]+|set[ \t]+)?[\"']?$")
_SET = re.compile(r"(?:^|[\s\"'])(?:ENV|ARG|setenv|set -x|set -gx)[ \t]+$")

_QUOTED = re.compile(r"[bBrRuUfF]{0,2}(\\*)(\"\"\"|'''|[\"'`])")
# Commas, brackets and the like belong to a value unless something begins behind them.
_BARE = re.compile(
    r"(?:[^\s\"'\\<>,;&)\]}]|[,;&](?!\s|$|[\"'\\]|[\w.-]+\\*[\"']?[ \t]*[=:])"
    r"|[)\]}](?![\s,;:.)\]}\"'\\]|$)|\\(?![\"'nrtubf/\\])|(?<=\w)['](?=\w))+"
)
_NUMBER = re.compile(r"[-+]?[0-9][0-9_.,]*(?:[eE][-+]?[0-9]+)?")
_KEPT = re.compile(
    r"null|none|nil|undefined|true|false|\*+|<[^<>\s]*>|\[[A-Z]+\]"
    r"|\$\{?[A-Za-z_][A-Za-z0-9_.]*\}?|%[A-Za-z_]+%|\{\{.*\}\}"
    r"|str|bytes|int|float|bool|string|number|Any|list|dict|object|Optional|SecretStr",
    re.IGNORECASE,
)
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[]")
_PROSE = re.compile(
    r"(?i)(?:is|to|and|or|was|are|for|in|of|on|the|a|an|that|this|needs|must|may|can|has|with|as|from|not|if|by"
    r"|be|will)"
)
_LONGEST_BLOCK = 1 << 16


def named_values(text: str) -> Iterator[tuple[int, int, str]]:
    """Where secret values stand, in order and apart: start, stop, and the quote that has to enclose what
    is put there so that JSON stays JSON."""
    done = 0
    for match in _names(text):
        if match.start() < done:
            continue
        name_start = match.start() - len(
            _BEFORE.search(text[max(0, match.start() - _LONGEST_NAME) : match.start()])[0]  # type: ignore[index]
        )
        name = text[name_start : match.end(1)]
        found = _value(text, match, name, name_start)
        if found is not None:
            yield found
            done = found[1]


def _names(text: str) -> Iterator[re.Match[str]]:
    lower = text.lower()
    if len(lower) != len(text):  # a letter of another script that becomes two
        yield from _NAMED.finditer(text)
        return
    starts: set[int] = set()
    for beginning in _BEGINNINGS:
        at = lower.find(beginning)
        while at >= 0:
            starts.add(at)
            at = lower.find(beginning, at + 1)
    for start in sorted(starts):
        if match := _NAMED.match(text, start):
            yield match


def _value(
    text: str, match: re.Match[str], name: str, name_start: int
) -> tuple[int, int, str] | None:
    sep, start = match["sep"], match.end()
    close = match["close"] or ""
    if _NO_SECRET.search(name) or text.startswith("[redacted", start):
        return None
    if not _separates(text, name, name_start, sep):
        return None
    if sep.endswith(">"):
        return _span(text, start, text.find("<", start))
    if block := re.compile(r"[|>][-+]?[ \t]*\n((?:[ \t]+[^\n]*(?:\n|\Z))+)").match(text, start):
        inner = len(block[0]) - len(block[1])
        indent = len(block[1]) - len(block[1].lstrip())
        return _span(text, start + inner + indent, start + len(block[0].rstrip()))
    for coded in ("%22", "&quot;"):
        if text.startswith(coded, start):
            return _span(text, start + len(coded), text.find(coded, start + len(coded)))
    if quoted := _QUOTED.match(text, start):
        return _quoted_span(text, quoted)
    if text[start : start + 1] in ("[", "{") and not _KEPT.match(text, start):
        stop = _closing(text, start)
        return None if stop < 0 else (start, stop, close.rstrip("]") or "")
    return _bare_span(text, start, name, name_start, sep, close)


def _separates(text: str, name: str, name_start: int, sep: str) -> bool:
    """Whether what stands between a name and a value makes it one of that name."""
    option = name.startswith("-")
    bare = sep.strip()
    if bare == ",":
        return option
    if not bare:
        return option or _SET.search(text[max(0, name_start - 16) : name_start]) is not None
    return bare != ">" or text[max(0, name_start - 1) : name_start] == "<"


def _quoted_span(text: str, quoted: re.Match[str]) -> tuple[int, int, str] | None:
    slashes, quote = quoted[1], quoted[2]
    start = quoted.end()
    if slashes or len(quote) == 3:
        return _span(text, start, text.find(slashes + quote, start), text.find("\n", start))
    end = re.compile(rf"(?:[^\\{quote}\n]|\\.)*").match(text, start)
    assert end is not None, "it may be empty"
    body = end[0]
    if _KEPT.fullmatch(body) and not re.fullmatch(r"[A-Za-z]+", body):
        return None
    return _span(text, start, end.end())


def _bare_span(
    text: str, start: int, name: str, name_start: int, sep: str, close: str
) -> tuple[int, int, str] | None:
    at_line_start = _LINE_START.search(text[max(0, name_start - 24) : name_start]) is not None
    rest = re.compile(r"[^\n\"'\\]*").match(text, start)
    found = _BARE.match(text, start)
    if found is None or rest is None:
        return None
    value, stop = found[0], found.end()
    # `a: b c` on a line of its own is YAML, `a=b;c` a file of variables.
    whole = rest[0].rstrip()
    own_line = at_line_start and not close and sep.strip() in (":", "=")
    if own_line and ((sep.strip() == ":" and ": " not in whole) or not re.search(r"\s", whole)):
        value, stop = whole, start + len(whole)
    trimmed = value.rstrip(".,;:") or value
    if _KEPT.fullmatch(trimmed):
        return None
    if sep.strip() == "" and _PROSE.fullmatch(trimmed):
        return None
    if sep.startswith(" ") and sep.strip() == "=" and _CALL.match(text, start):
        return None
    if name.lower() in ("pwd", "oldpwd") and value.startswith(("/", "~")):
        return None
    number = _NUMBER.fullmatch(trimmed) is not None
    if number and name.lower().endswith("token") and name.lower() == name and "-" not in name:
        # `token: 17` counts; `hf_token=17` does not.
        bare_name = name.rpartition(".")[2] == "token"
        if bare_name and sep.strip() != "=":
            return None
    # Without quotes a number in JSON would become no value.
    return (start, stop, close.rstrip("]")) if close else (start, stop, "")


def _span(text: str, start: int, *stops: int) -> tuple[int, int, str] | None:
    """Up to the first of `stops` that was found, or to the end of the text."""
    stop = min((x for x in stops if x >= 0), default=len(text))
    if stop <= start or text.startswith("[redacted", start):
        return None
    return start, stop, ""


def _closing(text: str, start: int) -> int:
    """Behind the bracket that closes the one at `start`; -1 where none does."""
    depth = 0
    for i in range(start, min(len(text), start + _LONGEST_BLOCK)):
        if text[i] in "[{":
            depth += 1
        elif text[i] in "]}":
            depth -= 1
            if depth == 0:
                return i + 1
    return -1
