"""Arguments that several commands have, each declared once; and numbers of a command line: whole or real,
finite, and in a range.

    parser.add_argument("--jobs", type=whole(1024))
    parser.add_argument("--timeout", type=real(86400))

A number beyond its range is a slip that costs the machine. What is below the lower end that a command has
for a reason of its own is said by that command, so here both ends are as far from 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from engine import limits
from engine.terminal import clipped

T = TypeVar("T", int, float)
_SHOWN = 40


def add_json(parser: argparse.ArgumentParser, what: str = "print one JSON value") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def add_run(parser: argparse.ArgumentParser, *, or_nothing: bool = False) -> None:
    nargs = "?" if or_nothing else None
    parser.add_argument("run", type=Path, nargs=nargs, metavar="RUN", help="a run folder")


def add_set(parser: argparse.ArgumentParser) -> None:
    add_repeated(parser, "--set", "KEY=VALUE", "change one setting; may be repeated")


def add_repeated(
    parser: argparse.ArgumentParser, option: str, metavar: str, what: str, **more: Any
) -> None:
    """An option that may be given several times: its value is a list."""
    parser.add_argument(option, action="append", default=[], metavar=metavar, help=what, **more)


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it computes (`engine.cli.generate.open_asked`)."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="weight file, folder or run")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument(
        "--weights",
        choices=("dense", "packed"),
        default="dense",
        help="packed: matrices stay in the blocks of their file (dense)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="instead of the model's")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        type=positive(limits.POSITIONS.most),
        metavar="N",
        help="(512, or what the model has room for)",
    )
    parser.add_argument(
        "--temperature", type=real(1e6), default=0.0, help="0 takes the likeliest token (0)"
    )
    parser.add_argument(
        "--top-k",
        type=whole(limits.VOCABULARY.most),
        default=0,
        help="draw among the K likeliest; 0: all",
    )
    parser.add_argument(
        "--top-p", type=real(1e6), default=1.0, help="draw among those that reach P (1)"
    )
    parser.add_argument("--seed", type=whole(limits.SEED.most), default=0, help="of the draws (0)")
    parser.add_argument(
        "--cuda-graph",
        choices=("auto", "on", "off"),
        default="auto",
        help="replay the steps of a GPU as one graph; the same tokens, faster (auto)",
    )


def prepare_threads(wanted: str = "auto") -> None:
    """How CPU threads wait; before torch loads, because OpenMP reads it once."""
    from engine.machine.threads import VARIABLE, choose_thread_wait

    os.environ[VARIABLE] = choose_thread_wait(wanted, os.environ).choice


def whole(most: int) -> Callable[[str], int]:
    """Integers up to `most`, and down to -`most`."""
    return _number(int, "a whole number", most)


def real(most: float) -> Callable[[str], float]:
    """Finite numbers up to `most`, and down to -`most`."""
    return _number(float, "a number", most)


def positive(most: int) -> Callable[[str], int]:
    """Integers from 1 to `most`."""
    parse = whole(most)

    def parse_positive(text: str) -> int:
        value = parse(text)
        if value < 1:
            raise argparse.ArgumentTypeError("at least 1")
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
