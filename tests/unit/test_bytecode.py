"""Compiled modules are kept in the user's cache where torch has none, and nowhere else than before otherwise."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from engine.bytecode import keep_bytecode, with_bytecode
from engine.files import user_cache


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch without compiled modules, in a process that keeps none."""
    module = tmp_path / "torch" / "__init__.py"
    module.parent.mkdir()
    module.touch()
    spec = ModuleSpec("torch", None, origin=str(module))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return module


def test_modules_that_python_would_compile_at_each_start_are_kept_in_the_cache(torch: Path) -> None:
    keep_bytecode()
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(user_cache("bytecode")), False)
    assert with_bytecode({"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/root"}) == {
        "HOME": "/root",
        "PYTHONPYCACHEPREFIX": str(user_cache("bytecode")),
    }


def test_modules_that_are_there_stay_where_they_are(torch: Path) -> None:
    compiled = Path(importlib.util.cache_from_source(str(torch)))
    compiled.parent.mkdir()
    compiled.touch()
    keep_bytecode()
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, True)
    assert with_bytecode({"PYTHONDONTWRITEBYTECODE": "1"}) == {"PYTHONDONTWRITEBYTECODE": "1"}


def test_python_keeps_them_itself_where_it_may(
    torch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    keep_bytecode()
    assert sys.pycache_prefix is None


def test_a_folder_of_the_users_choice_is_left(
    torch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    keep_bytecode()
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(tmp_path), True)
    assert with_bytecode({"PYTHONDONTWRITEBYTECODE": "1"}) == {"PYTHONDONTWRITEBYTECODE": "1"}
