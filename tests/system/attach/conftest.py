"""What several files of tests look at in one process: importing torch takes longer than their trainings."""

from __future__ import annotations

import pytest

from tests.support.attached import watched_once
from tests.system.attach import test_pitfalls, test_scaling, test_token_weights, test_windows
from tests.system.attach.test_identities import SETUP, Found, outcomes


@pytest.fixture(scope="session")
def loop_programs(tmp_path_factory: pytest.TempPathFactory) -> Found:
    # Windows come last: one of them ends with the process.
    scripts = (test_scaling, test_pitfalls, test_token_weights, test_windows)
    script = SETUP + "".join(one.SCRIPT for one in scripts)
    return outcomes(watched_once(tmp_path_factory, "loop_programs", script, twice=False))
