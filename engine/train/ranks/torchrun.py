"""`python -m engine.train.ranks.torchrun RUN --gpus N [--host PLACE]`: run one trainer process on each of N GPUs of
this machine, or on this host's share of N GPUs, under torchrun's agent. A supervisor starts this process in place of a
single trainer.

    supervisor -> this agent -> N ranks, each `python -m engine.train RUN`

- SIGTERM and SIGINT are forwarded to every rank; the ranks agree on the step after which they save and
  stop. The agent itself keeps running: torchrun's own handler would kill the ranks after 30 s, in the
  middle of a save.
- When a rank dies, the other ranks are ended, because they would wait for it for ever. The run is not restarted
  automatically. The number of the dead rank, and how it ended, are written to `ranks/lost.json`.
- A rank that hangs is identified by the beats (`engine.log.beats`): it has not done its part of a step that
  others have done. When the others have waited `compute.collective_timeout_s` for it, it is killed, and the run
  ends. If all ranks hang in the same collective, the beats do not identify one. Then the collectives time out,
  and the first rank whose collective timed out is reported.
- When the supervisor dies, the ranks receive SIGTERM, and SIGKILL if they have not stopped after a time.
- When this agent dies, the kernel sends each rank a SIGTERM (`die_with_parent`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from engine import child
from engine.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, RunLogError
from engine.log.beats import (
    LostRank,
    behind,
    forget,
    read_beats,
    read_lost_rank,
    waited_for,
    write_lost_rank,
)
from engine.log.fold import Follower
from engine.log.folder import RunFolder, open_run
from engine.spec import spec_from_dict
from engine.terminal import say
from engine.train.stop_request import GRACE_S
from engine.watch.hosts import Place

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SHUTDOWN_S = 5
"""Time that the other ranks get to exit after one has failed, in seconds."""
LEEWAY_S = 5.0
"""Time to wait beyond a collective's own timeout, in seconds. Where that timeout works, as in gloo, its error message
is more precise than that of `HangWatch`."""
_PR_SET_PDEATHSIG = 1
RANK = "engine.train"
"""The module that each rank runs."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.train.ranks.torchrun", description=__doc__
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--host", type=Place.parse, default=Place(0, 1, "127.0.0.1:0"))
    parser.add_argument("--keep-alive-fd", type=int)
    arguments, flags = parser.parse_known_args()
    run = open_run(arguments.run)
    ranks = arguments.host.ranks(arguments.gpus)
    forget(run, ranks, arguments.gpus)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _forward)
    if arguments.keep_alive_fd is not None:
        threading.Thread(
            target=_end_with_supervisor, args=(arguments.keep_alive_fd,), daemon=True
        ).start()
    spec = spec_from_dict(run.read_effective()["spec"])
    hangs = HangWatch(run, spec.compute.collective_timeout_s + LEEWAY_S, ranks)
    hangs.start()
    return launch(run, arguments.host, ranks, flags, hangs)


class HangWatch(threading.Thread):
    """Kills each of this host's `ranks` for which the other ranks have waited `limit_s` seconds, and sets `sentence`,
    which describes the hang."""

    def __init__(
        self, run: RunFolder, limit_s: float, ranks: range, interval_s: float = 1.0
    ) -> None:
        super().__init__(daemon=True, name="hang watch")
        self.ranks = ranks
        self.run_folder, self.limit_s, self.interval_s = run, limit_s, interval_s
        self.sentence: str | None = None

    def run(self) -> None:
        before, since_s = read_beats(self.run_folder), time.monotonic()
        read_s = since_s
        while True:
            time.sleep(self.interval_s)
            beats, now_s = read_beats(self.run_folder), time.monotonic()
            # While this process was suspended, it could not see whether the ranks advanced.
            suspended = now_s - read_s > self.interval_s + LEEWAY_S
            read_s = now_s
            late = [beat for beat in behind(beats) if beat.rank in self.ranks]
            if suspended or beats != before or not late:
                before, since_s = beats, now_s
            elif now_s - since_s >= self.limit_s:
                self.sentence = f"{waited_for(beats)}, for {self.limit_s:g} s"
                children = _children()
                for beat in late:
                    if beat.pid in children:
                        os.kill(beat.pid, signal.SIGKILL)
                return


def launch(run: RunFolder, place: Place, ranks: range, flags: list[str], hangs: HangWatch) -> int:
    """Run this host's `ranks` to their end and return the exit code of the first rank that failed.

    The code is 128 + n when signal n ended that rank, and 0 when no rank failed.
    """
    # A rank that waits for a dead one cannot finish its step, so it gets only SHUTDOWN_S to exit.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    several_hosts = place.hosts > 1
    config = LaunchConfig(
        min_nodes=place.hosts,
        max_nodes=place.hosts,
        nproc_per_node=len(ranks),
        run_id=run.name,
        # A static rendezvous puts the first rank on the first host, where the run's logs are.
        rdzv_backend="static" if several_hosts else "c10d",
        rdzv_configs={"rank": place.number} if several_hosts else {},
        rdzv_endpoint=place.meet,
        local_addr=None if several_hosts else "127.0.0.1",
        max_restarts=0,
        # SIGTERM and SIGINT, which request a stop, are handled in this module.
        signals_to_handle="SIGQUIT",
    )
    python, *words = child.command(RANK, str(run.path), *flags, options=child.TRACEBACKS)
    # The ranks inherit the environment of this process, which starts no other processes.
    environment = child.environment()
    os.environ.pop(child.PYTHONPATH, None)
    os.environ.update(environment)
    try:
        elastic_launch(config, python)(*words)
    except ChildFailedError as failed:
        rank = _first_failed(failed.failures, _failure_times(run))
        failure = failed.failures[rank]
        codes = {failure.exitcode for failure in failed.failures.values()}
        for requested in _stop_signals[:1]:
            as_requested = {128 + requested, -requested}
            # No rank was lost: the ranks stopped as requested, or were killed because another rank had stopped.
            if codes & as_requested and codes <= as_requested | {-signal.SIGKILL}:
                return 128 + requested
        # The request to stop was received on another host, and the ranks of this host stopped with the others.
        if several_hosts and codes in ({EXIT_TERMINATED}, {EXIT_INTERRUPTED}):
            return codes.pop()
        lost = _lost_rank(run, rank, failure.pid, failure.exitcode, hangs.sentence)
        say(lost.sentence)
        # Keep the record of a rank that another host has lost, unless a signal ended this host's rank.
        if read_lost_rank(run) is None or lost.returncode < 0:
            write_lost_rank(run, lost)
        code = failure.exitcode
        return code if code >= 0 else 128 - code
    return 0


def _failure_times(run: RunFolder) -> dict[int, float]:
    """Return the time at which each failed rank recorded its failure; ranks without a record are left out."""
    follower = Follower(run)
    with contextlib.suppress(RunLogError):
        follower.read_all()
    view = follower.view
    times = {
        rank: state.ended_unix_s
        for rank, state in view.ranks_now.items()
        if state.ended is not None
    }
    if view.own_finished is not None and view.own_finished.state == "failed":
        times[0] = view.own_finished_unix_s
    return times


def _first_failed(failures: Mapping[int, ProcessFailure], recorded: Mapping[int, float]) -> int:
    """Return the rank that failed first, by the times that the ranks recorded. torchrun's times are whole seconds, but
    a rank fails within milliseconds after another one. A rank without a record was killed before it could write one."""

    def when(rank: int) -> tuple[float, int]:
        failure = failures[rank]
        if rank in recorded:
            return recorded[rank], rank
        # SIGTERM is what the agent sends to the remaining ranks.
        by_agent = failure.exitcode == -signal.SIGTERM
        return failure.timestamp + (1.0 if by_agent else -1.0), rank

    return min(failures, key=when)


def _lost_rank(
    run: RunFolder,
    rank: int,
    pid: int,
    returncode: int,
    hang: str | None = None,
) -> LostRank:
    how = (
        f"was ended by {signal.Signals(-returncode).name}"
        if returncode < 0
        else f"ended with exit code {returncode}"
    )
    sentence = f"rank {rank} (process {pid}) {how}"
    beats = read_beats(run)
    late = behind(beats)
    # A rank whose wait for another rank timed out is not the cause.
    if hang is not None and rank in {beat.rank for beat in late}:
        sentence = f"{hang}; it was ended"
    elif late and rank not in {beat.rank for beat in late}:
        sentence = f"{waited_for(beats)}; {sentence} when it had waited too long"
        rank, pid = late[0].rank, late[0].pid
    return LostRank(rank=rank, pid=pid, returncode=returncode, sentence=sentence)


def die_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


_stop_signals: list[int] = []
"""The signals received so far that request a stop."""


def _forward(number: int, _frame: FrameType | None) -> None:
    _stop_signals.append(number)
    if not _children():
        # No rank has been started, so there is nothing to save.
        os._exit(128 + number)
    _send(number)


def _send(number: int) -> None:
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> list[int]:
    """Return the pids of the ranks, the only children of this process."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    return pids


def _end_with_supervisor(keep_alive_fd: int) -> None:
    # Nothing is ever written to this pipe: `read` returns when its last writer has closed it.
    os.read(keep_alive_fd, 1)
    say("the supervisor is gone: requesting all ranks to save and stop")
    _send(signal.SIGTERM)
    time.sleep(GRACE_S)
    _send(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
