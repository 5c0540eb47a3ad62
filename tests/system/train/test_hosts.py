"""A run over two hosts, played on one machine: each samples its own, and one that is lost ends the run and is named. On
CPUs, with torchrun and gloo for real.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine.log.beats import read_beats
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.write import HOST, read_host
from engine.report.page import content_of, page_body
from tests.support.hosts import NAMES, lose_host, start_hosts
from tests.support.kit import Kit
from tests.support.running import engine_here, wait_for


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_host_that_is_lost_ends_the_run_and_is_named(lost: int, kit: Kit, tmp_path: Path) -> None:
    hosts = start_hosts(kit, tmp_path, train__steps=5000, eval__every=0)
    run = tmp_path / "run"
    lose_host(run, lost)
    _, stderr = hosts[1 - lost].communicate(timeout=120)
    hosts[lost].communicate(timeout=120)
    words = f"host {NAMES[lost]} with rank {lost} was lost"
    follower = Follower(RunFolder(run))
    view = follower.read_all()
    assert follower.state == "host_lost" and view.exit is not None and words in view.exit.sentence
    if not lost:
        assert f"ENDED at step {view.last_step}: {words}" in stderr
    assert hosts[1 - lost].returncode == 70
    for command in ("diagnose", "tail"):
        shown = engine_here(command, run).stdout
        assert f"ENDED at step {view.last_step}: {words}" in shown, shown
    page = page_body(content_of(run))
    assert words in page and "Ranks, slowest first" in page and NAMES[1 - lost] in page


@pytest.mark.soak
def test_a_rank_that_is_killed_on_another_host_is_named_with_that_host(
    kit: Kit, tmp_path: Path
) -> None:
    hosts = start_hosts(kit, tmp_path, train__steps=5000, eval__every=0)
    run = tmp_path / "run"
    wait_for(run, lambda view: view.last_step >= 3)
    os.kill(read_beats(RunFolder(run))[1].pid, signal.SIGKILL)
    for host in hosts:
        host.communicate(timeout=120)
    exit_ = Follower(RunFolder(run)).read_all().exit
    assert exit_ is not None and (exit_.rank, exit_.returncode) == (1, 128 + signal.SIGKILL)
    assert exit_.sentence.startswith(f"on host {NAMES[1]}: rank 1 (process ")


@pytest.mark.soak  # what it reads of two hosts is in tests/unit/log/test_hosts.py
def test_each_host_samples_its_own_machine_and_both_end_with_the_run(
    kit: Kit, tmp_path: Path
) -> None:
    hosts = start_hosts(kit, tmp_path, train__steps=3, eval__every=0)
    for host in hosts:
        _, stderr = host.communicate(timeout=120)
        assert host.returncode == 0, stderr
    run = RunFolder(tmp_path / "run")
    follower = Follower(run)
    view = follower.read_all()
    assert follower.state == "completed" and [*view.hosts_now] == [NAMES[1]]
    other = view.hosts_now[NAMES[1]]
    assert view.clocks["device"].host == NAMES[0] and other.clocks["device"].host == NAMES[1]
    assert len(other.hosts) and other.exit is not None and other.exit.state == "COMPLETED"
    assert view.rank_hosts == dict(enumerate(NAMES))
    assert engine_here("evidence", "receipt", run.path).returncode == 0


def test_the_name_of_a_host_can_be_set_and_is_one_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HOST, "../pod 3")
    assert read_host() == "..-pod-3"
