"""What the suite shares: `kit` is a whole tiny distillation to run, `whole` a run of it. What is skipped, and
what is said of it, is in `tests/support/lacks.py`.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.kit import Kit, kit_in, make_kit
from tests.support.made_once import made_once

pytest_plugins = ["tests.support.gpu_turns", "tests.support.lacks", "tests.support.perf"]

# A busy machine is not a fault of what is tested; hangs are pytest-timeout's business. The examples are the
# same each time: a new one that fails belongs to whoever looks for it (`--hypothesis-profile explore`).
settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")

# Runs started by tests are tiny: one thread each leaves the other core to the other worker, and
# fixes the order of sums.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a run has a thread for each core, one that spins takes its core from the other worker: two thirds of the
# CPU time of such runs.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


# Without bytecode each of hundreds of processes compiles torch and the engine anew, and each worker the tests:
# seconds at each start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True, scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Reports of internal errors that tests provoke stay out of the home of whoever runs them."""
    state = tmp_path_factory.mktemp("state")
    (state / "apr-workbench").mkdir()
    os.environ["XDG_STATE_HOME"] = str(state)


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokens and compiled libraries that tests make stay out of it too."""
    cache = tmp_path_factory.mktemp("cache")
    # A file where rates would be kept: tests run beside others, so what is usual of the machine is not theirs to say.
    (cache / "apr-workbench").mkdir()
    (cache / "apr-workbench" / "rates").touch()
    os.environ["XDG_CACHE_HOME"] = str(cache)


@pytest.fixture(autouse=True, scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nobody's receivers hear of the runs of tests."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(autouse=True, scope="session")
def one_parser() -> Iterator[None]:
    """Commands that are run in this process share a parser: making it, of all commands and options, takes
    longer than most of them."""
    import engine.cli.main as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build_parser", cache(module.build_parser))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_answer_of_the_driver() -> Iterator[None]:
    """Runs in this process share what the CUDA driver answers, which is asked in another one."""
    from engine.machine import facts

    ask, answers = facts.ask_in_child, {}

    def answer() -> object:
        read = [
            item for item in os.environ.items() if item[0].startswith(("CUDA", "LD_", "PYTHON"))
        ]
        key = tuple(sorted(read))
        if key not in answers:
            answers[key] = ask()
        return answers[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "ask_in_child", answer)
        yield


# A trainer or a command run in this process takes these signals for good, as its own process would end with
# it. Each test, and its fixtures, begin with the handlers that the suite began with.
HANDLERS = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}


def give_signals_back() -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


def seed_generators() -> None:
    """What a test takes from a generator of its process does not depend on the tests before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    give_signals_back()
    seed_generators()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    give_signals_back()


# What test files import stays: looking through it for garbage, while they are imported and ever after,
# is a tenth of the CPU time of a suite.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    # The default, 700 new objects, is reached thousands of times in tests of screens: a seventh of their CPU time.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reverse", action="store_true", help="the last test first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.reverse:
        items.reverse()


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return kit_in(made_once(tmp_path_factory, "kit", make_kit))


@pytest.fixture(scope="session")
def whole(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps through the command that nothing disturbed, to be looked at or copied; its processes
    say what they import, and what the command printed is in result.json beside it."""
    from tests.support.running import engine

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPROFILEIMPORTTIME", "1")
            asked = ("--set", "compute.thread_wait=active", "--json")
            done = engine("distill", kit.spec(folder), "--out", folder / "run", *asked)
        assert done.returncode == 0, done.stderr
        (folder / "result.json").write_text(done.stdout)

    return made_once(tmp_path_factory, "whole", make) / "run"


@pytest.fixture
def trainer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that start a trainer carry it out in this process: another one would only add its start-up time."""
    from tests.support.finished_runs import train_here

    train_here(monkeypatch)
