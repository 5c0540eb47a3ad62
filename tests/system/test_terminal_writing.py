"""What reaches a terminal: nothing that it obeys, nothing without an end, and from one module only."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from engine import terminal
from engine.cli.answers import put_json
from engine.limits import PRINTED_LINE
from engine.terminal import aligned, clipped, printable, put
from tests.support.paths import ROOT

GUESTS = {"engine/evaluate/guest.py"}
"""Runs inside a sandbox, where stdout goes nowhere."""
PROTOCOLS = {
    "engine/export/peers.py",
    "engine/contracts/proving.py",
    "engine/machine/cuda_driver.py",
    "engine/runtime/rates.py",
}
"""Helper processes whose stdout is a pipe to the engine."""
PROBE = {
    "engine/attach/probe/apr_watch/__init__.py",
    "engine/attach/probe/apr_watch/line.py",
}
"""In the process of somebody's script, where the engine is not: whether it is watched, on the script's own stderr."""


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J\x1b[H",
        "\x1b]0;title\x07",
        "\x1b]52;c;cm0gLXJm\x07",
        "\x9b31m",
        "\x9d0;x\x9c",
        "a\rb",
        "\x00\x08\x7f",
        "\u202eevil",
        "\u2028",
        "\ud800",
    ],
)
def test_nothing_that_a_terminal_obeys_is_printable(hostile: str) -> None:
    kept = printable(f"before {hostile} after")
    assert kept.isprintable()
    assert kept.startswith("before ") and kept.endswith(" after")


def test_newline_and_tab_and_letters_of_all_languages_stay() -> None:
    text = "a\tb\nübergrößenträger 日本語 ελληνικά ∑ │ …"
    assert printable(text) == text


def test_a_long_line_is_cut_and_says_how_long_it_was() -> None:
    long = "x" * 5_000_000
    kept = printable(f"short\n{long}\nend").split("\n")
    assert kept[0] == "short" and kept[2] == "end"
    assert kept[1] == "x" * PRINTED_LINE.most + "… (5,000,000 characters)"
    assert clipped("four", 4) == "four"


def test_columns_of_a_table_are_as_wide_as_their_widest_cell() -> None:
    rows = [("arm", "us", "why"), ("engine", "1.5", ""), ("x", "12.5", "slow")]
    assert aligned(rows, right={1}) == ["arm       us  why", "engine   1.5", "x       12.5  slow"]
    assert aligned([]) == []


def test_exact_data_is_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    odd = "runs/\x1b[31m" + "y" * 10_000
    put(odd, exact=True)
    assert out.getvalue() == odd + "\n"


def test_exact_data_is_printable_on_a_terminal() -> None:
    text = _on_a_terminal("from engine.terminal import put; put('a\\x1b[31mb', exact=True)")
    assert "\x1b[31m" not in text and "a\\x1b[31mb" in text


def test_a_character_that_the_stream_cannot_encode_is_written_as_its_escape() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from engine.terminal import put, say; put('a — b'); say('α')"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert ran.stdout == b"a \\u2014 b\n" and ran.stderr == b"\\u03b1\n"


def test_json_names_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    put_json("checks", {"loss": [float("nan"), float("-inf"), 1.5], "text": "\x1b"})
    line = capsys.readouterr().out
    found = {"loss": ["nan", "-inf", 1.5], "text": "\x1b"}
    assert json.loads(line) == {"schema": "apr-workbench/checks-1"} | found
    assert line.rstrip("\n").isprintable()


def test_a_status_line_never_wraps_and_leaves_nothing_behind() -> None:
    text = _on_a_terminal(
        "from engine.terminal import StatusLine\n"
        "s = StatusLine(plain_every_s=1)\n"
        "s.show('x' * 500)\ns.say('done\\x1b[2J')\n",
        COLUMNS="40",
    )
    assert re.search(r"\r\x1b\[Kx{39,}\r\x1b\[K", text), text
    assert "done\\x1b[2J" in text and "\x1b[2J" not in text


def _on_a_terminal(code: str, **environ: str) -> str:
    """What a program writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", **environ},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    read = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        read += piece
    os.close(ours)
    assert process.wait() == 0
    return read.decode()


def test_no_other_module_writes_to_a_terminal() -> None:
    found = []
    for package in ("engine", "workbench"):
        for file in (ROOT / package).rglob("*.py"):
            name = str(file.relative_to(ROOT))
            if name in GUESTS | PROTOCOLS | PROBE or name == "engine/terminal.py":
                continue
            text = file.read_text()
            if not any(word in text for word in ("print", "sys.std", "sys.__std")):
                continue
            nodes = ast.walk(ast.parse(text))
            found += [f"{name}:{node.lineno}" for node in nodes if _writes(node)]  # type: ignore[attr-defined]
    assert not found, "use engine.terminal: " + ", ".join(found)


def _writes(node: ast.AST) -> bool:
    """Whether a node is `print`, or a write to the standard streams by any of their names."""
    if isinstance(node, ast.Name) and node.id == "print":
        return True
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr in ("write", "writelines", "print_exc", "print_exception"):
        of = ast.unparse(node.value)
        return of.startswith(("sys.stdout", "sys.stderr", "sys.__std")) or of == "traceback"
    return False


def test_the_list_of_modules_that_write_to_a_pipe_is_of_modules_that_are_there() -> None:
    for name in GUESTS | PROTOCOLS | PROBE:
        assert (ROOT / name).is_file(), name
    assert terminal.__doc__
