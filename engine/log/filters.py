"""Filter a list of runs by terms separated by spaces, all of which must hold.

    lr>0.001            a setting, by its short name or as section.key; also loss, held-out and step
    loss.kernel=eager   > < >= <= compare numbers; = and != also compare strings
    state:failed        the state of the run
    tag:baseline        one of its tags
    /lr-\\d+$/           a regular expression, searched in the run's name, state, tags and other text
    sweep               a plain word, searched in the same text

Case is ignored, except in the names of settings. A run without the compared value never matches a comparison.

The module is pure, so the terminal and the command line filter alike.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from engine.errors import BadInput
from engine.log.text import one_line

MEASURED = ("loss", "held-out", "step")
"""Names of measured numbers; any other name is a setting."""
_TERM = re.compile(r"/(?:\\.|[^/\\])*/(?!\S)|\S+")
_COMPARISON = re.compile(r"([A-Za-z_][\w.-]*)(>=|<=|!=|=|>|<)(.*)", re.DOTALL)
_FIELD = re.compile(r"([A-Za-z]+):(.*)", re.DOTALL)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
FORMS = "a word, /regex/, state:WORD, tag:WORD or a comparison like lr>0.001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The properties of one run that a filter can test."""

    state: str
    tags: Collection[str]
    values: Mapping[str, object]
    """Each setting by section.key, and the MEASURED numbers."""
    words: str
    """Text that is searched for words and regular expressions: name, state, tags and more."""


Term = Callable[[Subject], bool]


@dataclass(frozen=True, slots=True)
class Filter:
    """The terms of a filter; a filter without terms matches every run."""

    terms: tuple[Term, ...] = ()

    def matches(self, subject: Subject) -> bool:
        return all(term(subject) for term in self.terms)


def number_of(value: object) -> float | None:
    """Return a number, or a string that can be parsed as a number, as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def setting_text(value: object) -> str:
    """Format a setting as a short string: 0.001, true, a/b, one,two."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(map(setting_text, value))
    return str(value)


def parse_filter(text: str, names: Collection[str] = ()) -> Filter:
    """Parse a filter; `names` are the settings of the listed runs, each as section.key. Without `names`, a setting's
    name is looked up unchanged in each run. Raises BadInput for a bad term."""
    return Filter(tuple(_term(term, names) for term in _TERM.findall(text)))


def _bad(term: str, expected: str, found: str) -> BadInput:
    return BadInput.expected("filter", one_line(term), expected, found)


def _term(term: str, names: Collection[str]) -> Term:
    if term.startswith("/"):
        return _regex(term)
    if (match := _COMPARISON.fullmatch(term)) is not None:
        return _comparison(term, match[1], match[2], match[3], names)
    if (match := _FIELD.fullmatch(term)) is not None:
        return _field(term, match[1].casefold(), match[2].casefold())
    if term[0] in "<>=!" or term.startswith(":"):
        raise _bad(term, FORMS, f"{term[0]} without a name before it")
    word = term.casefold()
    return lambda run: word in run.words.casefold()


def _regex(term: str) -> Term:
    if len(term) < 3 or not term.endswith("/"):
        raise _bad(
            term, "a regular expression between slashes", "no expression, or no second slash"
        )
    try:
        pattern = re.compile(term[1:-1], re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise _bad(term, "a regular expression", str(error)) from None
    return lambda run: pattern.search(run.words) is not None


def _field(term: str, field: str, word: str) -> Term:
    if field not in ("state", "tag"):
        raise _bad(term, "state: or tag: before the word", f"{field}:")
    if not word:
        example = "failed" if field == "state" else "baseline"
        raise _bad(term, f"a word after {field}:, as in {field}:{example}", "nothing")
    if field == "state":
        return lambda run: run.state.casefold() == word
    return lambda run: word in {tag.casefold() for tag in run.tags}


def _comparison(term: str, name: str, sign: str, text: str, names: Collection[str]) -> Term:
    if not text:
        raise _bad(term, f"a value after {sign}, as in {name}{sign}0.001", "nothing")
    key, number = _full_name(term, name, names), number_of(text)
    if sign not in ("=", "!=") and (number is None or math.isnan(number)):
        raise _bad(term, f"a number after {sign}", one_line(text))
    wanted, compare = text.casefold(), _OPERATORS[sign]

    def matches(run: Subject) -> bool:
        value = run.values.get(key)
        if value is None:
            return False
        measured = number_of(value)
        if number is not None and measured is not None:
            return compare(measured, number)
        return sign in ("=", "!=") and (setting_text(value).casefold() == wanted) == (sign == "=")

    return matches


def _full_name(term: str, name: str, names: Collection[str]) -> str:
    """Return the section.key that a name abbreviates. A measured number has priority over a setting with the same
    short name."""
    if name in MEASURED or name in names or not names:
        return name
    full = sorted(key for key in names if key.rpartition(".")[2] == name)
    if len(full) > 1:
        raise _bad(term, "the section too", f"{name} in {' and '.join(full)}")
    if not full:
        near = difflib.get_close_matches(
            name, [*names, *(key.rpartition(".")[2] for key in names)], 1
        )
        like = f" (like {near[0]})" if near else ""
        raise _bad(term, f"a setting of these runs, or {', '.join(MEASURED)}{like}", name)
    return full[0]
