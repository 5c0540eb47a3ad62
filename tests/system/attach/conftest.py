"""What several files of tests look at in one process: importing torch takes longer than their trainings."""

from __future__ import annotations

import pytest

from tests.support.attached import watched_once
from tests.system.attach import test_pitfalls, test_scaling, test_windows
from tests.system.attach.test_identities import SETUP, Found, outcomes


@pytest.fixture(scope="session")
def loop_programs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    # Windows come last: one of them ends with the process.
    script = SETUP + test_scaling.SCRIPT + test_pitfalls.SCRIPT + test_windows.SCRIPT
    return outcomes(watched_once(tmp_path_factory, "loop_programs", script, twice=False))
