"""The hosts of a run over several machines: the number of this host, and the detection of lost hosts.

Each host has an agent of torchrun for its ranks, and a supervisor that samples the machine. When the agent of a host
other than the first ends, its supervisor records that at once. If the run fails, the first host waits for these
records before it records the end of the run, and the other hosts wait for that record. A host is lost if its
supervisor ended without a record, or has written nothing for WAIT_S when the wait is over.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from engine.errors import UsageError
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.read import writer_is_alive
from engine.units import format_seconds

POLL_S = 0.1
WAIT_S = 30.0
"""Maximum time to wait for the records of the other hosts once the run has failed on one of them, in seconds."""
_PLACE = re.compile(r"(\d{1,5})/(\d{1,5})@([^\s@]+:\d{1,5})", re.ASCII)


class Place(NamedTuple):
    """The number of this host in a run over several hosts; as text `1/2@node0:29400`."""

    number: int
    hosts: int
    meet: str
    """Address at which the agents meet (HOST:PORT); the first host listens there."""

    @classmethod
    def parse(cls, text: str) -> Place:
        match = _PLACE.fullmatch(text)
        if match is None or int(match[1]) >= int(match[2]):
            raise UsageError(
                f"host: {text} — expected NUMBER/HOSTS@HOST:PORT, the numbers from 0 on",
                hint="engine distill --join RUN --host 0/2 --meet HOST:29400",
            )
        return cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.number}/{self.hosts}@{self.meet}"

    def ranks(self, world: int) -> range:
        """Return the ranks on this host. Raises UsageError if the ranks cannot be divided equally over the hosts."""
        per_host, rest = divmod(world, self.hosts)
        if rest or not per_host:
            raise UsageError(
                f"compute.gpus: {world} — expected as many GPUs on each of {self.hosts} hosts",
                hint=f"--gpus {max(per_host, 1) * self.hosts}",
            )
        return range(self.number * per_host, (self.number + 1) * per_host)


def lost_hosts(run: RunFolder) -> str:
    """Wait until the other hosts have recorded their ends, WAIT_S at most, and describe those that were lost; empty
    for none."""
    whole_run = RunFolder(run.path)
    follower, deadline_s, lost = Follower(whole_run), time.monotonic() + WAIT_S, {}
    while True:
        # Test the locks before reading the logs: a supervisor writes its record before it releases its lock.
        unlocked = {path for path in whole_run.logs().values() if not writer_is_alive(path)}
        view = follower.read_all()
        logs = (
            {} if not run.host else {"": (whole_run.watch, view.clocks.get("watch"), view.own_exit)}
        )
        for host, host_view in view.hosts_now.items():
            if host != run.host:
                path = RunFolder(run.path, host).watch
                logs[host] = path, host_view.clocks["watch"], host_view.own_exit
        pending = {host: log for host, log in logs.items() if log[1] is not None and log[2] is None}
        is_late = time.monotonic() >= deadline_s
        for host, (path, clock, _) in pending.items():
            assert clock is not None
            silent_s = max(
                0.0,
                time.time() - path.with_name(path.name.replace("watch", "device")).stat().st_mtime,
            )
            if path in unlocked or (is_late and silent_s >= WAIT_S):
                ranks = ", ".join(
                    str(n) for n, name in view.rank_hosts.items() if name == clock.host
                )
                lost[host] = (
                    f"host {clock.host}{f' with rank {ranks}' if ranks else ''} was lost: its supervisor recorded no "
                    f"end, and last wrote {format_seconds(silent_s)} ago"
                )
        if is_late or not pending.keys() - lost.keys():
            return "; ".join(lost.values())
        time.sleep(POLL_S)
