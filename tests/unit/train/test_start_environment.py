"""What a trainer's environment says before torch is imported: Triton's folder and assembler are named as Triton would
choose them, so that nothing names others later."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import engine.train.__main__ as trainer


@pytest.fixture
def assembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    found.parent.mkdir(parents=True)
    found.touch()
    spec = ModuleSpec("triton", None, origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(trainer, "find_spec", lambda name: spec)
    return found


def test_tritons_own_folder_and_assembler_are_named(assembler: Path, tmp_path: Path) -> None:
    environment = {"TRITON_HOME": str(tmp_path)}
    trainer.name_triton(environment)
    assert environment == {
        "TRITON_HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / ".triton" / "cache"),
        "TRITON_PTXAS_PATH": str(assembler),
    }


def test_those_of_the_user_are_left(assembler: Path) -> None:
    theirs = {"TRITON_CACHE_DIR": "/kernels", "TRITON_PTXAS_PATH": "/usr/bin/ptxas"}
    environment = dict(theirs)
    trainer.name_triton(environment)
    assert environment == theirs


def test_triton_itself_would_choose_that_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    import triton

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    environment: dict[str, str] = {}
    trainer.name_triton(environment)
    assert environment["TRITON_CACHE_DIR"] == triton.knobs.cache.dir
