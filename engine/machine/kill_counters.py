"""The kernel's counters of processes killed for memory, and the readings next to them: two snapshots, before a run
and after it, say who killed it (`engine.watch.attribution`).

`oom_kill` of a group counts its processes killed by *any* run of the kernel's OOM killer, also one
caused by the whole machine or by a parent group; `oom` counts how often this group's own limit was
the cause. v2 counters include the groups below; `.local` does not. v1 has `oom_kill` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.machine.host import Cgroup, Host
from engine.machine.kernel_files import read_first, read_table
from engine.machine.reading import Reading, absent, event_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class KillCounters:
    """What has to be known before and after a run to say who killed it; one snapshot of it."""

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
        """Flat fields for one log line."""
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
    """A snapshot for `pid` (default: this process).

    After the process has ended, give the `cgroup` of the first snapshot: its own `/proc` entry is
    gone by then.
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
        psi_memory_full_avg10_pct=host.psi_memory_pct()[1],
        oom_score_adj=read_first(host.proc / who / "oom_score_adj", r"(-?\d+)\s", int),
    )
