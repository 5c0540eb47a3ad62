"""Redaction: remove secrets from everything that is kept, and record how many.

All text that enters a bundle or a receipt passes through here before it is hashed, so that not even a digest
of a secret remains. A secret becomes `[redacted: SORT]`, and the count of each sort is returned and stored
with the text. Detected are:

    forms       keys and webhooks of known services, `Authorization` headers, cookies, user and password in
                a URL, signatures in its query, private keys
    values      the value that follows a secret-like name, of any length: `HF_TOKEN=abc`, `--api-key x`,
                `"password": "a b"`, YAML, headers, XML, URL-encoded (`named_values`)
    copies      of the secrets in this process's environment, and of those found above in the same text, whole

A replacement holds no quote or backslash, so JSON stays JSON.

Not covered: a secret of no known form that follows no secret-like name and is in no variable; a piece of one; an
encoded copy; a phrase of several words without quotes in the middle of a line; and text inside archives, images and
weights, which are never copied.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

# Values after a secret-like name

_KEYS = "access api secret private auth signing encryption session master account client license webhook"
# The search is fast because every alternative begins with a plain character, and the text is in lower case.
NAME = (
    r"(?:token|secrets?|passw(?:or)?ds?|passphrase|pwd|credentials?|access[ _-]?keys?[ _-]?id|_pat|-pat|"
    + "|".join(f"{word}[ _-]?keys?" for word in _KEYS.split())
    + ")"
)
"""Pattern of the end of a secret's name."""

_NAMED = re.compile(
    rf"({NAME})(?:[_-]?[0-9]{{1,3}})?"
    r"(?P<close>\\*[\"'`]\]?|%22|&quot;)?"
    r"(?P<sep>"
    r"[ \t]*:[ \t]*(?:str|bytes|text|secretstr|optional\[str\]|str \| none)[ \t]*=(?!=)[ \t]*"
    r"|\s*(?:=>|:=|=(?!=)|:(?![:/=]))[ \t]*"
    r"|%3d|%3a(?!%2f)(?:%20|\+)?"
    r"|>(?=[^\s<])|\s*,\s*|[ \t]+)"
)
_BEFORE = re.compile(r"[A-Za-z0-9_.-]*$")
_LONGEST_NAME = 128
_LINE_START = re.compile(r"(?:^|\n|\\n)[ \t]*(?:-[ \t]+)?(?:export[ \t]+|set[ \t]+)?[\"']?$")
_SET = re.compile(r"(?:^|[\s\"'])(?:ENV|ARG|setenv|set -x|set -gx)[ \t]+$")

# Up to a quote with as many backslashes: one with twice as many and one more belongs to the value (JSON in JSON), and
# one with fewer ends the text around it.
_QUOTED = (
    r"(?P<end>(?P<slashes>\\{0,31})(?P<mark>\"\"\"|'''|[\"'`]|%22|&quot;))"
    r"(?P<quoted>(?:(?P=slashes)\\(?P=slashes).|(?!(?P=end))(?:\\(?!(?P=mark)).|(?!(?P=mark))[^\n\\]))*)"
)
_ENCLOSED = re.compile(
    # XML, up to the next tag; a block of YAML, up to its last indented line
    r"(?<=>)(?<!=>)(?P<xml>[^<]*)"
    r"|[|>][-+]?\s*\n[ \t]+(?P<block>[^\n]*(?:\n[ \t]+[^\n]*)*)"
    rf"|[bBrRuUfF]{{0,2}}{_QUOTED}"
)
_OPENED = re.compile(r"(?:[\[{(](?!redacted:)\s*)+")
_NESTED = re.compile(rf"(?<![\w\\]){_QUOTED}(?P=end)|[\[{{(]|[\]}})]|\"")
# `a: b c` on a line of its own is YAML; `a=b;c` is a line of a variables file.
_WHOLE_LINE = {
    ":": re.compile(r"(?![^\n\"'\\]*: [ \t]*[^\s\"'\\])[^\n\"'\\]*[^\s\"'\\]"),
    "=": re.compile(r"[^\s\"'\\]+(?=[ \t]*(?:[\n\"'\\]|\Z))"),
}
# Commas, brackets and the like belong to a value unless a new item begins after them.
_BARE = re.compile(
    r"(?:[^\s\"'\\<>,;&)\]}]|[,;&](?!\s|$|[\"'\\]|[\w.-]+\\*[\"']?[ \t]*[=:])"
    r"|[)\]}](?![\s,;:.)\]}\"'\\]|$)|\\(?![\"'nrtubf/\\])|(?<=\w)['](?=\w))+"
)
_LONGEST_BLOCK = 1 << 16

_NO_SECRETS = tuple(
    tuple(re.compile(pattern, re.DOTALL) for pattern in row)
    for row in (
        # the name, what separates it (with " where the value is enclosed), and the value
        (  # special tokens and counts of a tokenizer
            r"(?i)(?:.*[^a-z])?(?:bos|eos|pad|unk|sep|cls|mask|max|min|num|n|per|next|first|last|stop|image|special)"
            r"[_-]?token",
            r".*",
            r".*",
        ),
        (  # what was redacted, references, placeholders
            r".*",
            r".*",
            r"\[redacted.*|\*+|<[^<>\s]*>|\[[A-Z]+\]|\$(?:[A-Z0-9_]+|[a-z_]+|\{[^{}]*\})|%[A-Za-z_]+%|\{\{.*\}\}",
        ),
        (  # no value, and types
            r".*",
            r"[^\"]*",
            r"(?i)null|none|nil|undefined|true|false"
            r"|str|bytes|int|float|bool|string|number|any|list|dict|object|optional|secretstr",
        ),
        (  # prose
            r".*",
            r"\s+",
            r"(?i)is|to|and|or|was|are|for|in|of|on|the|a|an|that|this|needs|must|may|can|has|with|as|from|not"
            r"|if|by|be|will",
        ),
        (r".*", r" \s*=\s*", r"[A-Za-z_][\w.]*[(\[].*"),  # a call in source text
        (r"(?i)(?:old)?pwd", r"[^\"]*", r"[/~].*"),  # the working folder
        # `token: 17` counts; `hf_token: 17` and `token=17` do not
        (r"(?:[a-z0-9_.]*\.)?token", r"\s*[:,]?\s*", r"[-+]?[0-9][0-9_.,]*(?:[eE][-+]?[0-9]+)?"),
    )
)
"""Patterns of values after a secret-like name that are no secrets, so that logs and code stay readable."""


def named_values(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield where secret values directly follow a secret-like name, in order and without overlap.

    Each is (start, stop, quote), where the quote must enclose the replacement so that JSON stays JSON.

        HF_TOKEN=abc    --api-key x    "password": "a b"    secret: |       <password>x</password>
        X-Auth-Token: x    'token', 'x' after a dash     token%3Dabc        ENV HF_TOKEN abc

    Only the end of a name counts (`NAME`), whatever precedes it; values in `_NO_SECRETS` are left out.
    """
    done = 0
    # İ is the only letter whose lower case is two characters.
    for match in _NAMED.finditer(text.replace("İ", "I").lower()):
        if match.start() < done:
            continue
        prefix = _BEFORE.search(text, max(0, match.start() - _LONGEST_NAME), match.start())
        assert prefix is not None, "it may be empty"
        name = text[prefix.start() : match.end(1)]
        before = text[max(0, prefix.start() - 24) : prefix.start()]
        sep = match["sep"].strip()
        option = name.startswith("-")
        separates = {
            ">": before.endswith("<"),
            ",": option,
            "": option or _SET.search(before) is not None,
        }
        if not separates.get(sep, True):
            continue
        own_line = not match["close"] and _LINE_START.search(before) is not None
        start, stop, enclosed = _value(
            text, match.end(), _WHOLE_LINE.get(sep) if own_line else None
        )
        parts = (name, match["sep"] + '"' * enclosed, text[start:stop].rstrip(".,;:"))
        if start == stop or any(
            all(pattern.fullmatch(part) for pattern, part in zip(row, parts, strict=True))
            for row in _NO_SECRETS
        ):
            continue
        yield start, stop, "" if enclosed else (match["close"] or "").rstrip("]")
        done = stop


def _value(text: str, start: int, whole_line: re.Pattern[str] | None) -> tuple[int, int, bool]:
    """Return the span of the value that begins at `start`, without what encloses it, and whether something does."""
    if found := _ENCLOSED.match(text, start):
        return *found.span(found.lastgroup or 0), True
    if opened := _OPENED.match(text, start):
        stop = _closing(text, start)
        return (start, stop, False) if stop else _value(text, opened.end(), whole_line)
    found = (whole_line and whole_line.match(text, start)) or _BARE.match(text, start)
    return start, found.end() if found else start, False


def _closing(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; 0 when none does."""
    depth = 0
    for found in _NESTED.finditer(text, start, start + _LONGEST_BLOCK):
        if found[0] == '"':  # the text around the value ends
            return 0
        depth += (found[0] in "[{(") - (found[0] in "]})")
        if depth == 0:
            return found.end()
    return 0


# Forms, copies, and redacting

_SECRET_VARIABLE = re.compile(rf"(?i)(?:(?:^|[_-]){NAME}|passw(?:or)?d)(?:[_-]?[0-9]+)?$")
_SHORTEST = 8
"""Shorter values are common words, and would be cut out of every text."""
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (sort, re.compile(pattern))
    for sort, pattern in (
        # A first group is kept.
        (
            "private key",
            r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[^\"]*?"
            r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|(?=\")|\Z)",
        ),
        # A password may hold an @, and a / when a colon shows that it is not a path.
        (
            "URL credentials",
            r"(?i)(?<=://)(?!\[redacted)"
            r"(?:[^/\s\"'<>\\]+|[^/\s\"'<>\\:@]*:(?![0-9]*/)[^\s\"'<>\\@?#]+)(?=@[^\s/])",
        ),
        ("encoded URL credentials", r"(?i)(?<=%3A%2F%2F)(?:(?!%2F|%40)[^\s\"'<>\\])+(?=%40)"),
        (
            "URL signature",
            r"(?i)(?<=[?&])(?:sig|signature|token|access_token|auth|key|api_key|password"
            r"|x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential))=[^&\s\"'\\<>]+",
        ),
        # A signature extends over commas and quotes to the end of the line.
        (
            "authorization header",
            r"(?i)(\b(?:proxy-)?authorization(?:\\*[\"'])?\s*[:=]\s*+(?:\\*[\"'])?+)(?!\[redacted)"
            r"(?:(?:digest|aws4-[a-z0-9-]+)\b(?:[^\n\\]|\\[\"'])*|(?:[a-z][a-z0-9-]*[ \t]+)?[^\s\"'\\,;]+)",
        ),
        (
            "cookie",
            r"(?i)(\b(?:set-)?cookie(?:\\*[\"'])?\s*:\s*+(?:\\*[\"'])?+)(?!\[redacted)[^\n\"'\\]+",
        ),
        ("bearer token", r"(?i)\bbearer\s+(?:[a-z0-9._~+/=-]{12,}|(?=\S*[0-9])[a-z0-9._~+/=-]+)"),
        ("Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
        ("AWS key", r"\bA(?:KIA|SIA|GPA|IDA|ROA|NPA|NVA|IPA|BIA|CCA|3T[A-Z0-9])[A-Z0-9]{16}\b"),
        ("GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
        ("API key", r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bAIza[A-Za-z0-9_-]{30,}"),
        (
            "service token",
            r"\b(?:xox[abeprs]-[\w-]{10,}|xapp-[0-9][\w-]{10,}|npm_[\w-]{20,}|nvapi-[\w-]{20,}|pypi-[\w-]{30,}"
            r"|gl(?:pat|dt|ft|soat|rt|ptt|cbt|imt|agent|oas)-[\w-]{16,}|GR1348941[\w-]{16,}"
            r"|sq0(?:at|cs)p-[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,})",
        ),
        (
            "webhook",
            r"((?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks|api\.telegram\.org)/)"
            r"(?!\[redacted)[\w:/-]+",
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

    def text(self, text: str) -> Redacted:
        text, found, learnt = self._once(text)
        # A value that once followed a secret-like name may stand without one elsewhere.
        if learnt:
            text, found[_COPY] = _cut(text, learnt, _COPY)
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
                return f"{kept}[redacted: {sort}]"

            return replace

        text, found[_OF_VARIABLE] = _cut(text, self._values, _OF_VARIABLE)
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
        arguments: list[str] = []
        found: Counter[str] = Counter()
        for argument, is_value in _after_options(argv):
            if is_value:
                found[_OF_ARGUMENT] += 1
                arguments.append(f"[redacted: {_OF_ARGUMENT}]")
                continue
            done = self.text(argument)
            found.update(done.found)
            arguments.append(done.text)
        return tuple(arguments), dict(sorted(found.items()))


def _after_options(argv: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each argument, and whether it is the value of a secret option before it."""
    before, is_value = "", False
    for argument in argv:
        # A value may begin with a dash; another option begins with two, or is a single letter like `-x`.
        option = re.match(r"--[a-zA-Z]|-[a-zA-Z]$", argument) is not None
        is_value = not is_value and _OPTION.match(before) is not None and not option
        yield argument, is_value
        before = argument


def _cut(text: str, secrets: Iterable[str], sort: str) -> tuple[str, int]:
    """Return the text without these secrets, and the number of replacements."""
    longest_first = sorted(secrets, key=len, reverse=True)
    if not longest_first:
        return text, 0
    return re.subn("|".join(map(re.escape, longest_first)), f"[redacted: {sort}]", text)


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
