"""`python -m engine.train.ranks.launch RUN --gpus N`: one trainer process for each of N GPUs of
this machine, started by torchrun's agent; what a supervisor starts in place of a single trainer.

    supervisor -> this agent -> N ranks, each `python -m engine.distill RUN`

- SIGTERM and SIGINT go on to every rank, which agree on the step after which they save and stop. The
  agent itself stays: torchrun's own would give them 30 s and then kill them, in the middle of a save.
- A rank that dies takes the others with it, because they would wait for it for ever; the run is
  never restarted by itself. Which rank it was, and how it ended, is left in `ranks/lost.json`.
- A rank that hangs is named by the beats: it has not done its part of a step that others have done
  (`engine.log.beats`). When they have waited `compute.collective_timeout_s` for it, it is ended, and
  with it the run. Where no beat tells, because all ranks are in the same collective, one that a signal has
  stopped is named; where none is, the collectives time out, and whoever gives up waiting first is named.
- When the supervisor dies, the ranks are asked to stop, and ended when they do not.
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
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from engine.log.beats import (
    Beat,
    LostRank,
    behind,
    forget,
    read_beats,
    waited_for,
    write_lost_rank,
)
from engine.log.folder import RunFolder, open_run
from engine.spec import spec_from_dict
from engine.terminal import say
from engine.train.stopping import GRACE_S

SHUTDOWN_S = 5
LEEWAY_S = 5.0
"""More than a collective's own limit: where that one works, as gloo's does, it says more."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.train.ranks.launch", description=__doc__
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--keep-alive-fd", type=int)
    arguments, flags = parser.parse_known_args()
    run = open_run(arguments.run)
    forget(run)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _pass_on)
    if arguments.keep_alive_fd is not None:
        threading.Thread(
            target=_end_with_supervisor, args=(arguments.keep_alive_fd,), daemon=True
        ).start()
    spec = spec_from_dict(run.read_effective()["spec"])
    hangs = HangWatch(run, spec.compute.collective_timeout_s + LEEWAY_S)
    hangs.start()
    return launch(run, arguments.gpus, flags, hangs)


class HangWatch(threading.Thread):
    """Ends the ranks that the others have waited for `limit_s`; `sentence` then says so."""

    def __init__(self, run: RunFolder, limit_s: float, look_every_s: float = 1.0) -> None:
        super().__init__(daemon=True, name="hang watch")
        self.run_folder, self.limit_s, self.look_every_s = run, limit_s, look_every_s
        self.sentence: str | None = None
        self.stopped: list[Beat] = []
        """Ranks that were seen stopped since the last beat of any: those that time out may end first."""

    def run(self) -> None:
        before, since_s = read_beats(self.run_folder), time.monotonic()
        looked_s = since_s
        while True:
            time.sleep(self.look_every_s)
            beats, now_s = read_beats(self.run_folder), time.monotonic()
            # Whoever was stopped itself does not know what the others did meanwhile.
            absent = now_s - looked_s > self.look_every_s + LEEWAY_S
            looked_s = now_s
            stopped = _stopped(beats)
            if stopped or beats != before:
                self.stopped = stopped
            late = behind(beats) or stopped
            if absent or beats != before or not late:
                before, since_s = beats, now_s
            elif now_s - since_s >= self.limit_s:
                self.sentence = f"{_held_up_by(beats, stopped)}, for {self.limit_s:g} s"
                children = _children()
                for beat in late:
                    if beat.pid in children:
                        os.kill(beat.pid, signal.SIGKILL)
                return


def launch(run: RunFolder, ranks: int, flags: list[str], hangs: HangWatch) -> int:
    """Run `ranks` trainers to their end; the exit code is that of the first that failed, 128 + n
    when signal n ended it.
    """
    # How long a rank that waits for a dead one may take to leave: it cannot finish its step.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        # The two that ask a run to stop are ours.
        signals_to_handle="SIGQUIT",
    )
    command = ["-X", "faulthandler", "-u", "-m", "engine.distill", str(run.path), *flags]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if _asked:
            codes = {one.exitcode for one in failed.failures.values()}
            as_asked = {128 + _asked[0], -_asked[0]}
            # Nothing is lost: they left as they were asked to, or were ended because another one had.
            if codes & as_asked and codes <= as_asked | {-signal.SIGKILL}:
                return 128 + _asked[0]
        lost = _who_failed(run, rank, failure.pid, failure.exitcode, hangs.sentence, hangs.stopped)
        say(lost.sentence)
        write_lost_rank(run, lost)
        code = failure.exitcode
        return code if code >= 0 else 128 - code
    return 0


def _who_failed(
    run: RunFolder,
    rank: int,
    pid: int,
    returncode: int,
    hang: str | None = None,
    stopped: Sequence[Beat] = (),
) -> LostRank:
    how = (
        f"was ended by {signal.Signals(-returncode).name}"
        if returncode < 0
        else f"ended with exit code {returncode}"
    )
    sentence = f"rank {rank} (process {pid}) {how}"
    beats = read_beats(run)
    late = behind(beats) or [beat for beat in beats if beat in stopped]
    # A rank that gave up waiting is not the one that failed.
    if hang is not None and rank in {beat.rank for beat in late}:
        sentence = f"{hang}; it was ended"
    elif late and rank not in {beat.rank for beat in late}:
        sentence = f"{_held_up_by(beats, late)}; {sentence} when it had waited too long"
        rank, pid = late[0].rank, late[0].pid
    return LostRank(rank=rank, pid=pid, returncode=returncode, sentence=sentence)


def _stopped(beats: list[Beat]) -> list[Beat]:
    """The ranks that a signal has stopped; none when it stopped all of them, for then nobody waits."""
    found = []
    for beat in beats:
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: the state, T for stopped (t is for traced).
            state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(") ")[2][:1]
            found += [beat] if state == "T" else []
    return found if len(found) < len(beats) else []


def _held_up_by(beats: list[Beat], stopped: list[Beat]) -> str:
    """In words: which ranks the others wait for, by the beats or else because they are stopped."""
    names = ", ".join(f"rank {beat.rank} (process {beat.pid})" for beat in stopped)
    are = "is" if len(stopped) == 1 else "are"
    waiting = f"{len(beats) - len(stopped)} of {len(beats)} wait for it"
    return waited_for(beats) or f"{names} {are} stopped by a signal; {waiting}"


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


_asked: list[int] = []
"""The signals that ask for a stop, as they came."""


def _pass_on(number: int, _frame: FrameType | None) -> None:
    _asked.append(number)
    if not _children():
        # No rank was started yet, and none will be: there is nobody who could save anything.
        os._exit(128 + number)
    _send(number)


def _send(number: int) -> None:
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _children() -> list[int]:
    """The ranks: this process has no other children."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text().split())
    return pids


def _end_with_supervisor(keep_alive_fd: int) -> None:
    # Nothing is ever written to this pipe: read returns when its last writer is gone.
    os.read(keep_alive_fd, 1)
    say("the supervisor is gone: the ranks are asked to save and stop")
    _send(signal.SIGTERM)
    time.sleep(GRACE_S)
    _send(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
