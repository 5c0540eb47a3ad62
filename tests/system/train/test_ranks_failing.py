"""What goes wrong on one of two ranks is said in its own words: at the end of the command, in its exit code, in `engine
checks` and in `engine diagnose`. On CPUs, with torchrun and gloo for real."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from engine.log.beats import read_lost_rank
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.faulty_rank import MODULE
from tests.support.kit import Kit
from tests.support.running import engine, engine_here

ROWS = "of the corpus, found"
PEER = "by peer"


def _ended(
    kit: Kit, folder: Path, patch: pytest.MonkeyPatch, faults: str, **changes: object
) -> tuple[int, str, RunFolder]:
    patch.setenv("APR_WORKBENCH_TRAINER", MODULE)
    patch.setenv("FAULTS", faults)
    quick = dict(train__steps=4, train__rows=2, checkpoint__every=0, eval__every=0)
    spec = kit.spec(folder, **(quick | changes))
    done = engine("distill", spec, "--gpus", 2, "--out", folder / "run")
    return done.returncode, done.stderr, RunFolder(folder / "run")


def _last_words(stderr: str) -> str:
    """The verdict at the end: its line and what was seen."""
    lines = stderr.splitlines()
    last = max(place for place, line in enumerate(lines) if line.startswith(("✗ ", "■ ")))
    return " ".join(lines[last : last + 2])


def _seen(run: RunFolder, *texts: str) -> None:
    for words in ("checks", "diagnose"):
        for more in ((), ("--json",)):
            done = engine_here(words, run.path, *more)
            assert done.returncode == 1, (words, more, done.stdout)
            out = " ".join(done.stdout.split())
            assert all(text in out for text in texts), (words, more, out)


@pytest.mark.soak  # half a minute each; what is said of each kind of end is told in test_ranks_said
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_how_the_run_ended(
    rank: int, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, stderr, run = _ended(kit, tmp_path, monkeypatch, f"raise:{rank}")
    who = "rank 1: " if rank else ""
    words = _last_words(stderr)
    assert code == 70 and f": {who}ZeroDivisionError: division by zero in a rank" in words
    assert PEER not in words
    lost = read_lost_rank(run)
    assert lost is not None and lost.rank == rank
    assert engine_here("diagnose", run.path).returncode == 1
    exit_ = Follower(run).read_all().exit
    assert exit_ is not None and "ZeroDivisionError" in exit_.sentence


@pytest.mark.soak
def test_a_rank_that_is_killed_is_named_with_its_exit_code(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, stderr, run = _ended(kit, tmp_path, monkeypatch, "kill:1")
    words = _last_words(stderr)
    assert code == 128 + signal.SIGKILL and ": rank 1 (process " in words and PEER not in words
    assert "own record" not in words
    _seen(run, "was ended by SIGKILL")
