"""What tests of the workbench share: a real run that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kit import Kit
from tests.support.made_once import made_once
from tests.support.running import engine


@pytest.fixture(scope="session")
def ended_run(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, alone in its folder. Nothing writes into it."""

    def make(folder: Path) -> None:
        spec = kit.spec(folder, train__steps=2, eval__every=0, checkpoint__every=0)
        done = engine("distill", spec, "--out", folder / "runs" / "first")
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "ended", make) / "runs" / "first"
