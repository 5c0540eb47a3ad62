"""The man pages: every command and option of the parsers is in them, and `man` renders them without a warning."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cli.main import build_parser
from tests.support.lacks import needs
from wheels.man import below, pages, roff
from workbench.cli import demo_parser, watch_parser

PAGES = pages()


def with_page(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each parser with the name of the page that must have it."""
    for one in below(parser):
        yield "-".join(one.prog.split()[:2]), one


@pytest.mark.parametrize("parser", [build_parser(), watch_parser(), demo_parser()])
def test_every_command_and_option_is_in_the_pages(parser: argparse.ArgumentParser) -> None:
    for name, one in with_page(parser):
        text = PAGES["apr-workbench.1" if "apr-" in name else f"{name}.1"]
        assert roff(one.prog) in text
        for option in {*one._option_string_actions} - {"-h", "--help"}:
            assert f"\\fB{roff(option)}" in text or f", {roff(option)}" in text, (name, option)


@needs("man", shutil.which("man"))
@pytest.mark.parametrize(
    "name",
    [
        # One with most options, one with commands of its own, and the other program's.
        pytest.param(
            name,
            marks=[pytest.mark.soak]
            * (name not in ("engine-distill.1", "engine-why.1", "apr-workbench.1")),
        )
        for name in PAGES
    ],
)
def test_a_page_is_rendered_without_a_warning(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(PAGES[name])
    done = subprocess.run(
        ["man", "--warnings=all", "-l", tmp_path / name],
        capture_output=True,
        text=True,
        env={**os.environ, "MANWIDTH": "130", "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert name.removesuffix(".1").upper() in done.stdout
