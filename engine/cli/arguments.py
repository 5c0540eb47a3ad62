"""Arguments that several commands share, each declared once, and parsers for bounded, finite numbers.

    add_number(parser, "--jobs", limits.JOBS, "so many at once")
    parser.add_argument("--timeout", type=real(86400))

A number out of range is a slip that would cost the machine. The ranges here are symmetric about 0, except with
`least`: any other lower bound is checked by the command that has it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from engine import limits
from engine.errors import UsageError
from engine.terminal import clipped, say

if TYPE_CHECKING:
    from engine.spec.hub_cache import Wanted

Parser: TypeAlias = argparse._ActionsContainer
"""A parser, or a group of its arguments."""
T = TypeVar("T", int, float)
_SHOWN = 40


def actions_of(
    parser: argparse.ArgumentParser,
) -> Callable[[str, str], argparse.ArgumentParser]:
    """Return a function that adds an action to a command, from the action's name and its description."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    return lambda name, text: actions.add_parser(name, help=text, description=text)


def add_flag(parser: Parser, name: str, what: str) -> None:
    parser.add_argument(name, action="store_true", help=what)


def add_path(parser: Parser, name: str, metavar: str | None, what: str, **more: Any) -> None:
    parser.add_argument(name, type=Path, metavar=metavar, help=what, **more)


def add_choice(
    parser: Parser, name: str, choices: Sequence[str], default: str, what: str | None = None
) -> None:
    parser.add_argument(name, choices=choices, default=default, help=what)


def add_number(
    parser: Parser,
    name: str,
    limit: limits.Limit,
    what: str,
    *,
    least: int | None = None,
    **more: Any,
) -> None:
    """Add an integer option within `limit` in absolute value; with `least` (only 1 is supported) it must be 1 or
    more."""
    kind = whole if least is None else positive
    parser.add_argument(name, type=kind(limit.most), help=what, **more)


def add_real(parser: Parser, name: str, most: float, what: str, **more: Any) -> None:
    """Add an option for a finite number of at most `most` in absolute value."""
    parser.add_argument(name, type=real(most), help=what, **more)


def add_repeated(parser: Parser, name: str, metavar: str, what: str, **more: Any) -> None:
    """Add an option that may be given several times: its value is a list."""
    parser.add_argument(name, action="append", default=[], metavar=metavar, help=what, **more)


def read_variable(option: str, text: str) -> tuple[str, str]:
    """Read the name and the value of a variable from `NAME=VALUE`. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{option}: expected NAME=VALUE, found {clipped(text, _SHOWN)!r}")
    return name, value


def add_json(parser: Parser, what: str = "print one JSON value") -> None:
    add_flag(parser, "--json", what)


def add_set(parser: Parser) -> None:
    add_repeated(parser, "--set", "KEY=VALUE", "change one setting; may be repeated")


def add_run(parser: Parser, *, or_nothing: bool = False) -> None:
    add_path(parser, "run", "RUN", "a run folder", nargs="?" if or_nothing else None)


def add_model(parser: Parser) -> None:
    """Add MODEL and the options for how it computes (`engine.cli.generate.open_asked`)."""
    add_path(parser, "model", "MODEL", "weight file, folder, run, or ORG/NAME of the hub")
    add_choice(parser, "--device", ("auto", "cpu", "cuda"), "auto")
    add_choice(parser, "--precision", ("auto", "fp32", "bf16"), "auto")
    add_choice(
        parser,
        "--weights",
        ("dense", "packed"),
        "dense",
        "packed: matrices stay quantized as in their file (dense)",
    )
    add_path(parser, "--tokenizer", "FILE", "in place of the model's")


def model_argument(given: Path, wanted: Wanted = "model") -> Path:
    """Return the path of the model that an argument names: a path as it is, and for ORG/NAME that of its snapshot in
    the hub's cache, which is also printed. Raises BadInput for a name that is not in the hub's cache."""
    from engine.spec import hub_cache

    path = hub_cache.local_path(given, wanted)
    if path != given and (snapshot := hub_cache.snapshot_of(path)) is not None:
        say(snapshot.text)
    return path


def add_sampling(parser: Parser) -> None:
    add_number(
        parser,
        "--max-tokens",
        limits.POSITIONS,
        "maximum number of tokens to generate (512, or what the model's context leaves)",
        metavar="N",
        least=1,
    )
    parser.add_argument("--temperature", type=real(1e6), default=0.0, help="0 is greedy (0)")
    add_number(
        parser,
        "--top-k",
        limits.VOCABULARY,
        "sample from the K most likely tokens; 0: all",
        default=0,
    )
    parser.add_argument(
        "--top-p",
        type=real(1e6),
        default=1.0,
        help="sample from the most likely tokens that reach P (1)",
    )
    parser.add_argument(
        "--min-p",
        type=real(1e6),
        default=0.0,
        help="sample from tokens at least P times as likely as the likeliest (0)",
    )
    add_number(parser, "--seed", limits.SEED, "of the sampling (0)", default=0)


def prepare_threads(wanted: str = "auto") -> None:
    """Set how CPU threads wait. Call it before torch loads, because OpenMP reads it once."""
    from engine.machine.threads import VARIABLE, choose_thread_wait

    os.environ[VARIABLE] = choose_thread_wait(wanted, os.environ).choice


def whole(most: int) -> Callable[[str], int]:
    """Return a parser of integers in [-`most`, `most`]."""
    return _number(int, "an integer", most)


def real(most: float) -> Callable[[str], float]:
    """Return a parser of finite numbers in [-`most`, `most`]."""
    return _number(float, "a number", most)


def positive(most: int) -> Callable[[str], int]:
    """Return a parser of integers from 1 to `most`."""
    parse = whole(most)

    def parse_positive(text: str) -> int:
        value = parse(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
        return value

    return parse_positive


def _number(kind: Callable[[str], T], expected: str, most: float) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:  # no number, or thousands of digits
            raise _wrong(expected, text) from None
        # Written so that NaN is refused.
        if not abs(value) <= most:
            end = f"{most:,}" if isinstance(most, int) else f"{most:,.0f}"
            raise _wrong(f"a number of at most {end}", text)
        return value

    return parse


def _wrong(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, found {clipped(text, _SHOWN)!r}")
