"""The kernel's OOM-kill counters and related readings. Two snapshots, before and after a run, show who killed it
(`engine.watch.exit_cause`).

`oom_kill` of a cgroup counts its processes killed by *any* run of the kernel's OOM killer, even one caused by
the whole machine or by a parent cgroup; `oom` counts how often this cgroup's own limit was the cause. v2
counters include the cgroups below; `.local` does not. v1 has only `oom_kill`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.machine.host import Cgroup, Host
from engine.machine.kernel_files import read_first, read_table
from engine.machine.reading import Reading, absent, event_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class KillCounters:
    """One snapshot of the counters that show who killed a run."""

    boot_id: Reading
    cgroup: Cgroup | None
    vmstat_oom_kill: Reading
    memcg_oom_kill: Reading
    memcg_oom_kill_local: Reading
    memcg_oom: Reading
    memcg_oom_group_kill: Reading
    memcg_limit_bytes: Reading
    memcg_peak_bytes: Reading
    host_available_bytes: Reading
    host_swap_free_bytes: Reading
    psi_memory_full_avg10_pct: Reading
    oom_score_adj: Reading

    def as_event_fields(self) -> dict[str, float | int | str | None]:
        """Return flat fields for one log line."""
        place = "" if self.cgroup is None else str(self.cgroup.directory)
        out: dict[str, float | int | str | None] = {"cgroup": place or None}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Reading):
                out |= event_fields(field.name, value)
        return out


def read_kill_counters(
    host: Host | None = None, *, pid: int | None = None, cgroup: Cgroup | None = None
) -> KillCounters:
    """Take a snapshot for `pid` (default: this process).

    After the process has ended, pass the `cgroup` of the first snapshot, because the `/proc` entry no longer
    exists.
    """
    host = host or Host()
    group = cgroup or host.find_cgroup("memory", pid)
    memory, usage = host.memory(), host.cgroup_memory(group)

    def counter(name: str, file: str = "memory.events") -> Reading:
        if isinstance(group, Reading):
            return group
        if group.version == 2:
            return read_table(group.directory / file).number(name)
        if (name, file) == ("oom_kill", "memory.events"):
            return read_table(group.directory / "memory.oom_control").number(name)
        return absent("cgroup v1 has no such counter", str(group.directory))

    who = "self" if pid is None else str(pid)
    return KillCounters(
        boot_id=host.boot_id(),
        cgroup=None if isinstance(group, Reading) else group,
        vmstat_oom_kill=host.vmstat_oom_kill(),
        memcg_oom_kill=counter("oom_kill"),
        memcg_oom_kill_local=counter("oom_kill", "memory.events.local"),
        memcg_oom=counter("oom"),
        memcg_oom_group_kill=counter("oom_group_kill"),
        memcg_limit_bytes=usage.limit_bytes,
        memcg_peak_bytes=usage.peak_bytes,
        host_available_bytes=memory.available_bytes,
        host_swap_free_bytes=memory.swap_free_bytes,
        psi_memory_full_avg10_pct=host.psi_pct("memory")[1],
        oom_score_adj=read_first(host.proc / who / "oom_score_adj", r"(-?\d+)\s", int),
    )
