"""Several trainings below one command: each has a folder of its own, beside that of the command, and an end of its
own; the ranks of one training share a folder, and a hang names the rank that the others wait for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.attach.command import PROBE, RUN_VARIABLE
from engine.attach.probe.apr_watch.trainings import Trainings
from engine.attach.supervisor import training_process
from engine.log.beats import behind, read_beats, read_lost_rank, waited_for
from engine.log.events import Note, ScriptEnded
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run, find_runs
from engine.log.read import LogReader
from tests.support.running import environment

CHILD = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for number in range(int(sys.argv[2])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if len(sys.argv) > 3:
    raise ValueError(sys.argv[3])
"""
SWEEP = """
import subprocess, sys
for words in (("0.1", "2"), ("0.2", "3", "too large")):
    subprocess.run([sys.executable, "child.py", *words], stderr=subprocess.DEVNULL)
import torch
for rate in (0.3, 0.4):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
sys.exit(6)
"""


@pytest.mark.soak
def test_each_training_of_a_sweep_has_a_folder_and_an_end_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "sweep.py").write_text(SWEEP)
    # A folder of somebody else's that has the name of the third is passed over.
    create_run(tmp_path / "runs" / "lr-3", "", {"spec": {}})
    words = [sys.executable, "-m", "engine", "watch", "--name", "lr", "--"]
    done = subprocess.run(
        [*words, sys.executable, "sweep.py"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        timeout=120,
    )
    assert done.returncode == 6
    assert b"3 later trainings, each with its own run: lr-2" in done.stderr
    runs = {run.name: run for run in find_runs(tmp_path / "runs")}
    assert sorted(runs) == ["lr", "lr-2", "lr-3", "lr-4", "lr-5"]
    found = {}
    for name in sorted(runs.keys() - {"lr-3"}):
        view = Follower(runs[name]).read_all()
        rate = view.steps.values("lr")[0]
        found[name] = (rate, len(view.steps), view.state(runs[name].liveness()))
        about = runs[name].read_effective()["command"]
        assert about.get("part_of") == (None if name == "lr" else "lr")
        assert about["arguments"] == [sys.executable, "sweep.py"]
    # The first is the command's: it ends as the command does.
    assert found == {
        "lr": (0.1, 2, "failed"),
        "lr-2": (0.2, 3, "failed"),
        "lr-4": (0.3, 1, "completed"),
        "lr-5": (0.4, 1, "completed"),
    }
    (end,) = [e for e in LogReader(runs["lr-2"].events).poll() if isinstance(e, ScriptEnded)]
    assert (end.how, end.exception, end.message) == ("raised", "ValueError", "too large")
    assert end.where is not None and end.where.endswith("child.py:9 in <module>")
    exit_ = Follower(runs["lr-2"]).read_all().exit
    assert exit_ is not None and exit_.returncode is None and "too large" in exit_.sentence


def optimizers(count: int) -> list[SimpleNamespace]:
    class Optimizer(SimpleNamespace):
        __hash__ = object.__hash__

    return [Optimizer() for _ in range(count)]


def test_an_optimizer_made_after_the_first_step_begins_a_training_and_one_made_before_does_not() -> (
    None
):
    first, second, third = optimizers(3)
    trainings = Trainings()
    assert trainings.begin_with(first) and trainings.counts_steps_of(first)
    assert not trainings.begin_with(second) and not trainings.counts_steps_of(second)
    assert not trainings.begin_with(first) and trainings.counts_steps_of(first)
    trainings.optimizer_created(third)
    assert (
        trainings.begin_with(third) and trainings.counts_steps_of(third) and trainings.number == 2
    )


def test_trainings_that_take_turns_are_one_from_then_on() -> None:
    trainings = Trainings()
    first, second, third = optimizers(3)
    trainings.begin_with(first)
    trainings.optimizer_created(second)
    assert trainings.begin_with(second)
    assert not trainings.begin_with(first) and trainings.counts_steps_of(first)
    trainings.optimizer_created(third)
    assert not trainings.begin_with(third) and not trainings.counts_steps_of(third)
    assert trainings.number == 2


RANKS = """
import os, subprocess, sys, threading, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if (rank, number) == (1, 2) and "RANK" in os.environ:
            raise ValueError("mine")
        if (rank, number) == (1, 2):
            print("hangs", flush=True)
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    port = store.port
    del store
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(sys.argv[1]))
    elif sys.argv[1:]:
        ranks = [subprocess.Popen([sys.executable, "ranks.py", str(port)], env=os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in (0, 1)]
        sys.exit(max(rank.wait() for rank in ranks))
    else:
        mp.spawn(work, (port,), nprocs=2)
"""


@pytest.mark.soak
def test_a_rank_that_hangs_is_told_from_the_one_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    run = create_run(tmp_path / "run", "", {"spec": {}, "command": {"arguments": ["python"]}})
    environment = os.environ | {"PYTHONPATH": str(PROBE), RUN_VARIABLE: str(run.path)}
    with subprocess.Popen(
        [sys.executable, "ranks.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "hangs\n"
            while len(beats := read_beats(run)) < 2 or beats[0].entered < 5:
                os.sched_yield()
        finally:
            os.killpg(process.pid, 9)
    (late,) = behind(beats)
    assert (late.rank, late.step, late.entered, beats[0].entered) == (1, 2, 4, 5)
    assert "rank 1" in str(waited_for(beats))
    pid, file = training_process(run, process.pid, Follower(run).read_all(), late)
    assert pid == late.pid and Path(file).exists()


@pytest.mark.soak
def test_of_several_ranks_the_one_whose_exception_ended_the_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    words = [sys.executable, "-m", "engine", "watch", "--name", "run", "--"]
    done = subprocess.run(
        [*words, sys.executable, "ranks.py", "launches"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    run = RunFolder(tmp_path / "runs" / "run")
    lost = read_lost_rank(run)
    assert lost is not None and lost.rank == 1
    assert lost.sentence.startswith(f"rank 1 (process {lost.pid}) ended with ValueError at ")
    view = Follower(run).read_all()
    assert view.exit is not None and view.exit.sentence.startswith(lost.sentence)
    assert "why        rank 1 (process" in done.stderr


FULL = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(200):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""


# With a summary at its end more is written, and read, where nothing can be.
@pytest.mark.soak
@pytest.mark.parametrize("quiet", [True, False])
def test_a_full_disk_never_touches_the_command(tmp_path: Path, quiet: bool) -> None:
    (tmp_path / "train.py").write_text(FULL)
    words = [sys.executable, "-m", "engine", "watch", "--name", "run", *(["--quiet"] * quiet)]
    # No file may grow beyond 8 KiB: what a full disk does to each log, on any machine.
    shell = ["sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *words, "--", sys.executable, "train.py"]
    more: dict[str, Any] = {"cwd": tmp_path, "env": environment(), "timeout": 120}
    done = subprocess.run(shell, capture_output=True, text=True, **more)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    run = RunFolder(tmp_path / "runs" / "run")
    # Every line that stands in the log is whole.
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert 0 < sum(line["kind"] == "step" for line in lines) < 200
    assert run.events.read_bytes().endswith(b"\n")
    notes = [e for e in LogReader(run.watch).poll() if isinstance(e, Note)]
    assert notes and "Traceback" not in done.stderr
