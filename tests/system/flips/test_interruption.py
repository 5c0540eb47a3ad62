"""A flip that Ctrl-C interrupts, and what goes on from it, through the command. The outcomes of its arms are
made up: no run is started."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.flips import flip
from engine.flips.arms import Outcome, Stopped
from engine.flips.flip_folder import create_flip, read_pairs
from engine.flips.plan import Plan
from engine.flips.surroundings import find_surroundings
from tests.support.flip_pairs import outcome, plan
from tests.support.running import engine_here


class MadeUpArms:
    """In place of `run_arm`; Ctrl-C comes while the arm `interrupted` (pair, whether it is B) runs."""

    def __init__(self, interrupted: tuple[int, bool]) -> None:
        self.interrupted = interrupted
        self.asked: list[tuple[int, bool]] = []

    def __call__(
        self,
        plan: Plan,
        *,
        b: bool,
        pair: int,
        folder: Path,
        watch: Callable[[object], object],
        stop: Callable[[], bool],
    ) -> Outcome:
        self.asked.append((pair, b))
        folder.mkdir(parents=True)
        spec = plan.arm(b, folder.parent, folder.name, pair)
        (folder / "effective.json").write_text(json.dumps({"spec": spec.to_dict()}))
        if (pair, b) == self.interrupted:
            self.interrupted = 0, False
            os.kill(os.getpid(), signal.SIGINT)
        if stop():
            raise Stopped
        return outcome("B" if b else "A", 0.5 if b else 1.0, run=f"arms/{folder.name}")


def test_an_interrupted_flip_keeps_its_pairs_and_resumes_with_the_pair_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    registered, folder = plan(pairs_min=2, pairs_max=3), tmp_path / "flip"
    create_flip(folder, registered, find_surroundings(registered)).close()
    first, second, _ = ([b_first, not b_first] for b_first in registered.order())
    arms = MadeUpArms((2, second[1]))
    monkeypatch.setattr(flip, "run_arm", arms)
    handler = signal.getsignal(signal.SIGINT)

    stopped = engine_here("flip", "--resume", folder, "--controls", "skip")
    assert stopped.returncode == 130, stopped.stderr
    assert "interrupted after 1 pair" in stopped.stdout and f"--resume {folder}" in stopped.stdout
    assert "the pairs before it are kept" in stopped.stderr
    assert arms.asked == [(1, b) for b in first] + [(2, b) for b in second]
    (kept,) = read_pairs(folder)
    assert signal.getsignal(signal.SIGINT) is handler

    arms.asked.clear()
    done = engine_here("flip", "--resume", folder, "--controls", "skip", "--json")
    verdict = json.loads(done.stdout)
    assert arms.asked[:2] == [(2, b) for b in second], "the pair that was cut off is made again"
    assert read_pairs(folder)[0] == kept and not verdict["interrupted"]
    assert verdict["prereg_sha"] == registered.sha256
    assert [one.b_first for one in read_pairs(folder)] == registered.order()[: verdict["pairs_run"]]

    ended = engine_here("flip", "--resume", folder)
    assert ended.returncode == 65 and "one that ended" in ended.stderr
    other = engine_here("flip", "--resume", folder, "--set", "compute.threads=4")
    assert other.returncode == 64 and "without --set" in other.stderr
