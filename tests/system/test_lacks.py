"""A file of tests that imports what the machine lacks is skipped in words, and one with a fault of its own is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.running import environment


def test_files_that_import_what_is_lacked_are_skipped_and_a_misspelt_import_is_an_error(
    tmp_path: Path,
) -> None:
    lacked = ("gguf", "gguf.constants", "pyarrow", "wandb", "nbformat")
    for name in (*lacked, "misspelt"):
        fails = f"raise ModuleNotFoundError('No module', name={name!r})\n"
        (tmp_path / f"test_{name.replace('.', '_')}.py").write_text(fails)
    words = ["-m", "pytest", "-p", "tests.support.lacks", "-p", "no:cacheprovider", "-rsE", "."]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert "5 skipped, 1 error" in done.stdout, done.stdout + done.stderr
    assert "this machine lacks the gguf package: No module" in done.stdout
    assert "ERROR test_misspelt.py" in done.stdout
