"""What is judged of a table that another tool has logged."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.interchange import importing
from engine.log.events import FAIL, NUMBER, Judged
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.view import RunView

BEGAN_S = 1_750_000_000


def imported(
    folder: Path, loss: Callable[[int], float], count: int = 300, every: int = 1
) -> RunFolder:
    steps = range(every, count + every, every)
    rows = [f"{step},{BEGAN_S + step},{loss(step)!r},1e-3" for step in steps]
    table = folder / "table.csv"
    table.write_text("\n".join(["step,unix_s,loss,lr", *rows]))
    return importing.import_run("csv", table, folder / "runs")[0]


def read(run: RunFolder) -> RunView:
    follower = Follower(run)
    follower.read_all()
    return follower.view


def test_losses_that_are_not_finite_are_logged_with_their_steps(tmp_path: Path) -> None:
    run = imported(tmp_path, lambda n: math.nan if 150 <= n < 160 else 300.0 / (n + 100))
    view = read(run)
    said = [(one.by, one.id, one.level, one.text, one.step) for one in view.non_finite]
    assert said == [(NUMBER, "loss", FAIL, "nan", step) for step in range(150, 160)]


def test_infinite_losses_are_named_with_their_sign_and_a_healthy_table_says_nothing(
    tmp_path: Path,
) -> None:
    view = read(imported(tmp_path, lambda n: -math.inf if n == 7 else 1.0))
    assert [(one.text, one.step) for one in view.non_finite] == [("-inf", 7)]
    (tmp_path / "b").mkdir()
    assert read(imported(tmp_path / "b", lambda n: 1.0)).non_finite == ()


def diverged(step: int) -> float:
    updates = step - 1
    return 2.3 + 6 * min(1.0, updates / 20) + 0.3 * math.sin(7 * step)


@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_rises_for_good_is_named_in_a_table(tmp_path: Path, every: int) -> None:
    view = read(imported(tmp_path, lambda n: diverged(n // every), 300 * every, every))
    alert = view.alerts["loss_rose_for_good"]
    assert (
        isinstance(alert, Judged)
        and alert.no_flip == "set a learning rate 100 times lower in the script"
    )
    (tmp_path / "b").mkdir()
    healthy = read(
        imported(tmp_path / "b", lambda n: 1.5 + 3 * math.exp(-n / 40), 300 * every, every)
    )
    assert not healthy.alerts
