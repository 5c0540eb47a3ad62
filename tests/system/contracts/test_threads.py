"""What several threads that run contracts share, and what of this machine a receipt keeps."""

from __future__ import annotations

import ast
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import main
from engine.contracts.measured import read_receipts
from engine.contracts.run import without_machine
from engine.contracts.source import Sources
from engine.parsing import PARSING
from tests.support.contract_files import TESTS, make_project


def test_sources_that_are_read_together_are_parsed_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.7 fails at random where two threads make syntax trees (SystemError)."""
    root = make_project(tmp_path)
    parse, inside, together = ast.parse, list[int](), threading.Event()

    def watched(*arguments: Any, **options: Any) -> ast.AST:
        inside.append(threading.get_ident())
        try:
            if len(set(inside)) > 1:
                together.set()
            together.wait(0.05)  # Time for another thread to come in.
            return parse(*arguments, **options)
        finally:
            inside.remove(threading.get_ident())

    def read(number: int) -> int:
        sources, file = Sources(root), root / "tests" / "test_thing.py"
        return len(sources.helpers(file)) + len(sources.names(file))

    monkeypatch.setattr(ast, "parse", watched)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(read, range(4)))) == 1
    assert not together.is_set()


def test_reading_sources_waits_for_whoever_else_parses(tmp_path: Path) -> None:
    sources = Sources(make_project(tmp_path))
    read = threading.Event()

    def names() -> None:
        sources.names(tmp_path / "thing" / "double.py")
        read.set()

    thread = threading.Thread(target=names)
    with PARSING:
        thread.start()
        assert not read.wait(0.1)
    thread.join(10.0)
    assert read.is_set()


def test_a_receipt_names_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path / "project")
    named = "assert double(x) == 2 * x, f'{tmp_path}/a.txt and {tempfile.mkdtemp()}'"
    tests = TESTS.replace("def test_doubles(x)", "def test_doubles(x, tmp_path)")
    tests = "import tempfile\n" + tests.replace("assert double(x) == 2 * x", named)
    (root / "tests" / "test_thing.py").write_text(tests, encoding="utf-8")
    monkeypatch.chdir(root)
    assert main(["contracts", "run"]) == 0
    found = read_receipts(root / "evidence" / "contracts", "thing-v1")
    detail = found["B-1"].detail
    assert "TMP/test_doubles_1_0/a.txt and TMP/" in detail, detail
    assert found["F-1"].counts["F-1"]["passed"] == 2
    kept = (root / "evidence" / "contracts" / "thing-v1.json").read_text("utf-8")
    assert tempfile.gettempdir() not in kept and "pytest-of" not in kept


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (
            "run log: /tmp/pytest-of-root/pytest-40/test_an0/a.jsonl @254",
            "run log: TMP/test_an0/a.jsonl @254",
        ),
        ("'/tmp/apr-contract-x_1y/site', /tmp/tmp0a_b1cd2/x", "'TMP/site', TMP/x"),
        ("cut: /tmp/pytest-of-ro", "cut: TMP/"),
        ("cut: /tmp/pytest-of-root/pytest-1", "cut: TMP/"),
        ("/own/scratch/other/file and /own/project/a.py", "TMP/other/file and ./a.py"),
        ("/var/tmp/file, a/tmp/file, /tmpfs/x", "/var/tmp/file, a/tmp/file, /tmpfs/x"),
    ],
)
def test_what_is_kept_of_a_text(said: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/own/scratch")
    assert without_machine(said, Path("/own/project")) == kept
