"""Redaction: remove secrets from everything that is kept, and record how many.

All text that enters a bundle or a receipt passes through here before it is hashed, so that not even a digest
of a secret remains. A secret becomes `[redacted: SORT]`, and the count of each sort is returned and stored
beside the text. Detected are:

    forms       keys of known services, `Authorization` headers, cookies, user and password in a URL,
                signatures in its query, private keys
    values      the value that follows a secret-like name, of any length: `HF_TOKEN=abc`, `--api-key x`,
                `"password": "a b"`, YAML, headers, XML, URL-encoded (`named_values`)
    copies      of the secrets in this process's environment, and of those found above in the same text:
                any 8 consecutive characters of one, of its base64 in each of the three alignments (plain
                and URL-safe) or of its URL encoding, and any 16 of its hexadecimal digits

A replacement holds no quote or backslash, so JSON stays JSON.

Not covered: a secret of no known form that follows no secret-like name and is in no variable; a piece of
fewer than 8 characters; a copy that was encrypted, compressed or encoded twice; a phrase of several words
without quotes in the middle of a line; and text inside archives, images and weights, which are never copied.
"""

from __future__ import annotations

import base64
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

# Values behind a secret-like name

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
"""How a match of `NAME` can begin. These are searched first, because the expression alone is slow on a long
log."""
_BEFORE = re.compile(r"[A-Za-z0-9_.-]*$")
_LONGEST_NAME = 128
_NO_SECRET = re.compile(
    r"(?i)(?:^|[^a-z])(?:bos|eos|pad|unk|sep|cls|mask|max|min|num|n|per|next|first|last|stop|image|special)"
    r"[_-]?token$"
)
_LINE_START = re.compile(r"(?:^|\n|\\n)[ \t]*(?:-[ \t]+)?(?:export[ \t]+|set[ \t]+)?[\"']?$")
_SET = re.compile(r"(?:^|[\s\"'])(?:ENV|ARG|setenv|set -x|set -gx)[ \t]+$")

_QUOTED = re.compile(r"[bBrRuUfF]{0,2}(\\*)(\"\"\"|'''|[\"'`])")
# Commas, brackets and the like belong to a value unless a new item begins after them.
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
    """Yield where secret values directly follow a secret-like name, in order and without overlap.

    Each is (start, stop, quote), where the quote must enclose the replacement so that JSON stays JSON.

        HF_TOKEN=abc    --api-key x    "password": "a b"    secret: |       <password>x</password>
        X-Auth-Token: x    'token', 'x' behind a dash    token%3Dabc        ENV HF_TOKEN abc

    Only the end of a name counts (`NAME`), whatever stands before it. Special tokens and counts of a
    tokenizer (`eos_token`, `max_token`), references (`$HF_TOKEN`), placeholders (`<token>`, `***`), and types
    and calls in source text are no secrets and stay, so that logs and code stay readable.
    """
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
    if len(lower) != len(text):  # a letter of another script whose lower case is two characters
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
    """Whether the text between a name and a value makes it the value of that name."""
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
    # `a: b c` on a line of its own is YAML; `a=b;c` is a line of a variables file.
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
    # In JSON, replacing an unquoted number without quotes would give no valid value.
    return (start, stop, close.rstrip("]")) if close else (start, stop, "")


def _span(text: str, start: int, *stops: int) -> tuple[int, int, str] | None:
    """The span up to the first of `stops` that was found (not negative), or to the end of the text."""
    stop = min((x for x in stops if x >= 0), default=len(text))
    if stop <= start or text.startswith("[redacted", start):
        return None
    return start, stop, ""


def _closing(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`; -1 when none does."""
    depth = 0
    for i in range(start, min(len(text), start + _LONGEST_BLOCK)):
        if text[i] in "[{":
            depth += 1
        elif text[i] in "]}":
            depth -= 1
            if depth == 0:
                return i + 1
    return -1


# Forms, copies, and redacting

_SECRET_VARIABLE = re.compile(
    rf"(?i)(?:^|[_-]){NAME}(?:[_-]?[0-9]+)?$|passw(?:or)?d(?:[_-]?[0-9]+)?$"
)
_SHORTEST = 8
"""Shorter values are common words, and would be cut out of every text."""
_HEX_DIGITS = 16
_HEADER = r"(?i)(\b(?:proxy-)?authorization(?:\\*[\"'])?\s*[:=]\s*+(?:\\*[\"'])?+)(?!\[redacted)"

_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (sort, re.compile(pattern))
    for sort, pattern in (
        (
            "private key",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^\"]*?(?:-----END [A-Z ]*PRIVATE KEY-----|(?=\")|\Z)",
        ),
        # A password may hold an @, and a / when a colon shows that it is not a path.
        ("URL credentials", r"(?i)(?<=://)(?!\[redacted)[^/\s\"'<>\\]+@(?=[^\s/])"),
        (
            "URL credentials",
            r"(?i)(?<=://)(?!\[redacted)[^/\s\"'<>\\:@]*:(?![0-9]*/)[^\s\"'<>\\@?#]+@(?=[^\s/])",
        ),
        ("encoded URL credentials", r"(?i)(?<=%3A%2F%2F)(?:(?!%2F|%40)[^\s\"'<>\\])+(?=%40)"),
        (
            "URL signature",
            r"(?i)(?<=[?&])(?:sig|signature|token|access_token|auth|key|api_key|password"
            r"|x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential))=[^&\s\"'\\<>]+",
        ),
        # These two extend over commas and quotes to the end of the line.
        ("authorization header", _HEADER + r"(?:digest|aws4-[a-z0-9-]+)\b(?:[^\n\\]|\\[\"'])*"),
        ("authorization header", _HEADER + r"(?:[a-z][a-z0-9-]*[ \t]+)?[^\s\"'\\,;]+"),
        (
            "cookie",
            r"(?i)(\b(?:set-)?cookie(?:\\*[\"'])?\s*:\s*+(?:\\*[\"'])?+)(?!\[redacted)[^\n\"'\\]+",
        ),
        ("bearer token", r"(?i)\bbearer\s+(?:[a-z0-9._~+/=-]{12,}|(?=\S*[0-9])[a-z0-9._~+/=-]+)"),
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
        # .netrc
        ("password of a login", r"(?i)(\blogin\s+\S+\s+password\s++)(?!\[redacted)[^\s\"'\\]+"),
    )
)
_OPTION = re.compile(rf"(?i)^--?[a-z0-9_-]*{NAME}$")
_OF_VARIABLE, _OF_SETTING = "value of a secret variable", "value of a secret setting"
_OF_ARGUMENT = "argument of a secret option"
_COPY = "copy of a secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redacted:
    text: str
    found: dict[str, int] = field(default_factory=dict)
    """Number of replacements of each sort; empty when there were none."""


class Redactor:
    """Redacts text, given the secret values of an environment. The same text always gives the same result."""

    def __init__(
        self, environ: Mapping[str, str] | None = None, *, known: Iterable[str] = ()
    ) -> None:
        environ = os.environ if environ is None else environ
        self._values = frozenset(_secrets_of(environ)) | frozenset(known)
        self._pieces = _Pieces(self._values)

    def knowing(self, argv: Sequence[str]) -> Redactor:
        """Return a redactor that also knows the secrets in these arguments, wherever a program prints them."""
        found = {value for value, behind in _after_options(argv) if behind and _is_telling(value)}
        for argument in argv:
            _, _, learnt = self._once(argument, _is_telling)
            found |= learnt
        return Redactor({}, known=self._values | found)

    def text(self, text: str) -> Redacted:
        text, found, learnt = self._once(text)
        # A value that once followed a secret-like name may stand without one elsewhere.
        if learnt:
            text, count = _Pieces(learnt).cut(text, _COPY)
            found[_COPY] += count
        return Redacted(text=text, found={k: n for k, n in sorted(found.items()) if n})

    def _once(
        self, text: str, tells: Callable[[str], bool] | None = None
    ) -> tuple[str, Counter[str], set[str]]:
        """Redact known values, forms and named values in one pass. Return the text, the count of each sort,
        and the values to search for elsewhere: those that `tells` accepts, by default those that look random."""
        tells = tells or _is_random
        found: Counter[str] = Counter()
        learnt: set[str] = set()

        def put(sort: str) -> Callable[[re.Match[str]], str]:
            def replace(match: re.Match[str]) -> str:
                found[sort] += 1
                kept = match[1] if match.re.groups else ""
                taken = match[0][len(kept) :]
                learnt.update(filter(tells, re.split(r"[\s:@=&]+", taken)))
                return f"{kept}[redacted: {sort}]{'@' if sort == 'URL credentials' else ''}"

            return replace

        text, count = self._pieces.cut(text, _OF_VARIABLE)
        found[_OF_VARIABLE] += count
        for sort, pattern in _FORMS:
            text = pattern.sub(put(sort), text)
        parts: list[str] = []
        end = 0
        for start, stop, enclosed in named_values(text):
            mark = f"[redacted: {_OF_SETTING}]"
            parts += [text[end:start], f"{enclosed}{mark}{enclosed}"]
            learnt.update(filter(tells, re.split(r"[\s\"'\\,]+", text[start:stop])))
            end = stop
            found[_OF_SETTING] += 1
        return "".join([*parts, text[end:]]), found, learnt

    def bytes(self, data: bytes) -> tuple[bytes, dict[str, int]]:
        """Redact UTF-8 text; bytes that are not UTF-8 are unchanged."""
        done = self.text(data.decode("utf-8", "surrogateescape"))
        return done.text.encode("utf-8", "surrogateescape"), done.found

    def argv(self, argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
        """Redact a command's arguments; the value after `--token` and the like is removed whatever it is."""
        out: list[str] = []
        found: Counter[str] = Counter()
        for argument, behind in _after_options(argv):
            if behind:
                found[_OF_ARGUMENT] += 1
                out.append(f"[redacted: {_OF_ARGUMENT}]")
                continue
            done = self.text(argument)
            found.update(done.found)
            out.append(done.text)
        return tuple(out), dict(sorted(found.items()))


def _after_options(argv: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each argument, and whether it is the value of a secret option before it."""
    before, behind = "", False
    for argument in argv:
        # A value may begin with a dash; another option begins with two, or is a single letter like `-x`.
        option = re.match(r"--[a-zA-Z]|-[a-zA-Z]$", argument) is not None
        behind = not behind and _OPTION.match(before) is not None and not option
        yield argument, behind
        before = argument


class _Pieces:
    """The pieces of some secrets and of their encodings, which are cut out wherever they occur."""

    def __init__(self, values: Iterable[str]) -> None:
        self._by_width: dict[int, set[str]] = {}
        for value in values:
            for text, width in _copies(value):
                known = self._by_width.setdefault(width, set())
                known.update(text[i : i + width] for i in range(len(text) - width + 1))

    def cut(self, text: str, sort: str) -> tuple[str, int]:
        """Return the text without the pieces, and how many stretches were cut out."""
        found = bytearray(len(text))
        for width, known in self._by_width.items():
            for i in range(len(text) - width + 1):
                if text[i : i + width] in known:
                    found[i : i + width] = b"x" * width
        spans = [match.span() for match in re.finditer(rb"x+", found)]
        for start, stop in reversed(spans):
            text = f"{text[:start]}[redacted: {sort}]{text[stop:]}"
        return text, len(spans)


def _copies(value: str) -> Iterator[tuple[str, int]]:
    """Yield a secret in each encoding to search for, with the length of a piece that identifies it."""
    yield value, _SHORTEST
    raw = value.encode("utf-8", "surrogateescape")
    for before in range(3):
        # Leave out the first and last characters, whose bits depend on the neighbouring bytes.
        whole = (before + len(raw)) * 8 // 6
        text = base64.b64encode(b"\0" * before + raw).decode()[(before * 8 + 5) // 6 : whole]
        yield text, _SHORTEST
        yield text.translate(str.maketrans("+/", "-_")), _SHORTEST
    for text in {quote(value, safe="", errors="replace"), quote(value, errors="replace")} - {value}:
        yield text, _SHORTEST
    yield raw.hex(), _HEX_DIGITS
    yield raw.hex().upper(), _HEX_DIGITS


def _secrets_of(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if is_secret_name(name):
            # A key of several lines is searched for line by line.
            yield from (x for line in value.splitlines() if _is_telling(x := line.strip(" \t\"'")))
        for password in re.findall(r"://[^/\s:@]*:([^\s]+)@", value):
            yield from (x for x in {password, unquote(password)} if _is_telling(x))


def is_secret_name(name: str) -> bool:
    """Whether a variable or a setting of that name holds a secret."""
    return _SECRET_VARIABLE.search(name) is not None and name.upper() not in ("PWD", "OLDPWD")


def _is_telling(value: str) -> bool:
    """Whether a value is long enough, and unlike a small number or a path, so that cutting it out of every
    text is safe."""
    if len(value) < _SHORTEST or not value.isprintable() or value.startswith("-----"):
        return False
    if "[redacted" in value:
        return False
    if re.match(r"[.~]{0,2}/", value):
        # A key in base64 may begin with a slash; a path has no long part that looks random.
        return any(len(part) >= 2 * _SHORTEST and _is_random(part) for part in value.split("/"))
    if re.fullmatch(r"[-+0-9.eE]+", value):
        return value.isdigit() and len(set(value)) > 3
    return True


def _is_random(value: str) -> bool:
    """Whether a value looks random rather than written: no word of a language, so no word of a log."""
    mixed = re.search(r"[0-9]", value) and re.search(r"[A-Za-z]", value)
    changes = len(re.findall(r"[a-z][A-Z]", value))
    return _is_telling(value) and bool(mixed or (len(value) >= 12 and changes > 2))


def words(found: Mapping[str, int]) -> str:
    """Return `2 redacted: AWS key, JWT`; empty when nothing was redacted."""
    return f"{sum(found.values())} redacted: {', '.join(sorted(found))}" if found else ""
