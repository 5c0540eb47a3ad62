"""Kernel readings of this machine, its cgroups and one process, from text files.

    /proc/meminfo             MemTotal, MemAvailable, ... ("kB" there means KiB)
    /proc/vmstat              oom_kill: processes the kernel killed for memory, whatever the limit
    /proc/pressure/memory     PSI: share of the last 10 s in which some (full: all) tasks waited
    /proc/<pid>/stat, status  CPU seconds, start, state, resident bytes
    /proc/<pid>/cgroup        its cgroup, one line for each v1 hierarchy and `0::` for v2
    /proc/self/mountinfo      where a hierarchy is mounted and which cgroup is its root here:
                              a container sees a part of the tree
    <group>/memory.*, cpu.*   limits and counters; the names differ between v1 and v2

A limit holds for a cgroup and everything below it, so the limit of a process is the tightest one between its
cgroup and the mounted root, and its headroom is the smallest `limit - current` on that path. "No limit" is a
reason, not a number.

None of these readings includes the CUDA memory of an integrated GPU.

Nothing here raises for a missing or malformed file; the `Reading` carries the reason. Both roots can be
replaced by a folder of recorded texts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.machine.kernel_files import read_first, read_table, read_text
from engine.machine.reading import Reading, absent, measured

RESERVE_BYTES = 8 * 1024**3
RESERVE_SHARE = 0.08
"""Share of MemTotal, 0 to 1. The larger of the two is left to the operating system: judgement, not measurement."""
# A v1 cgroup without a limit reports the largest multiple of the page size; no machine has 4 EiB.
_NO_LIMIT_BYTES = 1 << 62
_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
    2: ("memory.max", "memory.current", "memory.peak"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """The cgroup of a process in the hierarchy of one controller."""

    version: int
    directory: Path
    mount: Path

    def levels(self) -> list[Path]:
        """Return this cgroup and its visible ancestors, nearest first."""
        above = [path for path in self.directory.parents if path.is_relative_to(self.mount)]
        return [self.directory, *above]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    total_bytes: Reading
    available_bytes: Reading
    """Memory available without swapping. Budgets use it because `free` counts the page cache as used."""
    free_bytes: Reading
    swap_total_bytes: Reading
    swap_free_bytes: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMemory:
    limit_bytes: Reading
    current_bytes: Reading
    peak_bytes: Reading
    headroom_bytes: Reading


def usable_host_bytes(memory: HostMemory, cgroup: CgroupMemory) -> Reading:
    """Return how much host RAM a process may still take:

    min(MemAvailable - max(8 GiB, 8 % of MemTotal), limit - current of the cgroup)
    """
    available, total = memory.available_bytes, memory.total_bytes
    if available.number is None or total.number is None:
        return available if available.number is None else total
    reserve = max(RESERVE_BYTES, int(RESERVE_SHARE * total.number))
    usable = measured(
        max(0, int(available.number) - reserve),
        f"{available.source} - max(8 GiB, {RESERVE_SHARE:.0%} of MemTotal)",
    )
    group = cgroup.headroom_bytes
    if group.number is not None and group.number < (usable.number or 0):
        return group
    return usable


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReadings:
    state: Reading
    """R running, S sleeping, D uninterruptible in the kernel, Z zombie."""
    rss_bytes: Reading
    """Resident bytes. On an integrated GPU they exclude CUDA memory."""
    cpu_s: Reading
    """User and system seconds of its threads since it started, without its children."""
    start_ticks: Reading
    """Clock ticks from boot to its start; with the pid it identifies a process uniquely."""
    oom_score_adj: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    proc: Path = Path("/proc")
    cgroups: Path = _CGROUP_MOUNT

    def memory(self) -> HostMemory:
        table = read_table(self.proc / "meminfo")
        return HostMemory(
            total_bytes=table.number("MemTotal"),
            available_bytes=table.number("MemAvailable"),
            free_bytes=table.number("MemFree"),
            swap_total_bytes=table.number("SwapTotal"),
            swap_free_bytes=table.number("SwapFree"),
        )

    def load1(self) -> Reading:
        return read_first(self.proc / "loadavg", r"(\d+\.\d+) ", float)

    def boot_id(self) -> Reading:
        return read_first(self.proc / "sys/kernel/random/boot_id", r"([0-9a-f-]{36})\s", str)

    def vmstat_oom_kill(self) -> Reading:
        return read_table(self.proc / "vmstat").number("oom_kill")

    def status_word(self, key: str) -> Reading:
        """Return the first word of a line of this process's own status, such as `CapEff`."""
        return read_table(self.proc / "self/status").word(key, r"^(\S+)", str)

    def own_memory(self) -> tuple[Reading, Reading]:
        """Return the resident bytes of this process: (now, peak)."""
        status = read_table(self.proc / "self/status")
        return status.number("VmRSS"), status.number("VmHWM")

    def vmstat(self, *keys: str) -> list[Reading]:
        """Return counters since boot, all from one read."""
        table = read_table(self.proc / "vmstat")
        return [table.number(key) for key in keys]

    def psi_pct(self, resource: str) -> tuple[Reading, Reading]:
        """Return PSI (some, full) of `memory`, `cpu` or `io` over the last 10 s, in percent."""
        table = read_table(self.proc / "pressure" / resource)
        some, full = (table.word(k, r"avg10=(\d+\.\d+)", float) for k in ("some", "full"))
        return some, full

    def cpu_count(self) -> Reading:
        """Return the number of online CPUs."""
        table = read_table(self.proc / "stat")
        count = sum(re.fullmatch(r"cpu\d+", key) is not None for key in table.rows)
        return (
            measured(count, str(table.path))
            if count
            else absent(table.missing or "the file has no line 'cpu0'", str(table.path))
        )

    def cpu_effective(self) -> Reading:
        """Return how many CPUs this process may use at once: its affinity limited by the tightest quota; may be
        a fraction."""
        allowed = read_table(self.proc / "self/status").word(
            "Cpus_allowed_list", r"^([\d,-]+)$", _count_of_list
        )
        quota = self._cpu_quota()
        known = [r for r in (allowed, quota) if r.number is not None]
        return min(known, key=lambda r: r.number or 0) if known else allowed

    def _cpu_quota(self) -> Reading:
        group = self.find_cgroup("cpu")
        if isinstance(group, Reading):
            return group
        quotas: list[Reading] = []
        for level in group.levels():
            name = "cpu.max" if group.version == 2 else "cpu.cfs_quota_us"
            text = read_text(level / name)
            words = [] if isinstance(text, Reading) else text.split()
            if group.version == 1 and words:
                period = read_text(level / "cpu.cfs_period_us")
                words += [] if isinstance(period, Reading) else period.split()
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
                quotas.append(measured(int(words[0]) / int(words[1]), str(level / name)))
        no_quota = absent("no CPU quota is set", str(group.directory))
        return min(quotas, key=lambda r: r.number or 0, default=no_quota)

    def process(self, pid: int) -> ProcessReadings:
        folder = self.proc / str(pid)
        status = read_table(folder / "status")
        # The name may contain spaces and brackets, so fields are counted after the last bracket.
        tail = r"(?s).*\) \S+"
        cpu_ticks = read_first(
            folder / "stat", tail + r"(?: \S+){10} (\d+ \d+) ", lambda t: sum(map(int, t.split()))
        )
        per_second = os.sysconf("SC_CLK_TCK")
        return ProcessReadings(
            state=status.word("State", r"^([A-Za-z])", str),
            rss_bytes=status.number("VmRSS"),
            cpu_s=cpu_ticks
            if cpu_ticks.number is None
            else measured(cpu_ticks.number / per_second, cpu_ticks.source),
            start_ticks=read_first(folder / "stat", tail + r"(?: \S+){18} (\d+)\b", int),
            oom_score_adj=read_first(folder / "oom_score_adj", r"(-?\d+)\s", int),
        )

    def find_cgroup(self, controller: str, pid: int | None = None) -> Cgroup | Reading:
        """Find the cgroup of a process (default: this one) for `memory` or `cpu`; otherwise return an absent Reading
        with the reason."""
        listing = self.proc / ("self" if pid is None else str(pid)) / "cgroup"
        text, mounts = read_text(listing), read_text(self.proc / "self/mountinfo")
        if isinstance(text, Reading):
            return text
        if isinstance(mounts, Reading):
            return mounts
        rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
        v1 = [path for _, names, path in rows if controller in names.split(",")]
        v2 = [path for number, names, path in rows if number == "0" and not names]
        if not v1 and not v2:
            return absent(f"no group with the {controller} controller", str(listing))
        version, path = (1, v1[0]) if v1 else (2, v2[0])
        for line in mounts.splitlines():
            before, _, after = line.partition(" - ")
            mount_fields, filesystem_fields = before.split(), after.split()
            if (
                len(mount_fields) < 5
                or len(filesystem_fields) < 3
                or filesystem_fields[0] != ("cgroup2", "cgroup")[version == 1]
            ):
                continue
            if version == 1 and controller not in filesystem_fields[2].split(","):
                continue
            # A container may mount only its part of the tree: `mount_fields[3]` is the root's cgroup.
            if ".." in Path(path).parts or not Path(path).is_relative_to(mount_fields[3]):
                continue
            mount = Path(mount_fields[4])
            if mount.is_relative_to(_CGROUP_MOUNT):
                mount = self.cgroups / mount.relative_to(_CGROUP_MOUNT)
            directory = mount / Path(path).relative_to(mount_fields[3])
            return Cgroup(version=version, directory=directory, mount=mount)
        return absent(f"group {path} of v{version} lies in no mount visible here", str(listing))

    def cgroup_memory(self, group: Cgroup | Reading) -> CgroupMemory:
        """Return the memory readings of a cgroup from `find_cgroup("memory")`; an absent reading is passed on."""
        if isinstance(group, Reading):
            return CgroupMemory(
                limit_bytes=group, current_bytes=group, peak_bytes=group, headroom_bytes=group
            )
        limit_name, current_name, peak_name = _MEMORY_FILES[group.version]
        limits: list[Reading] = []
        headrooms: list[Reading] = []
        for level in group.levels():
            limit = read_first(level / limit_name, r"(\d+)\s", int)
            current = read_first(level / current_name, r"(\d+)\s", int)
            if limit.number is None or limit.number >= _NO_LIMIT_BYTES:
                continue
            limits.append(limit)
            if current.number is not None:
                source = f"{limit.source} - {current_name}"
                headrooms.append(measured(max(0, limit.number - current.number), source))
        own = read_text(group.directory / limit_name)
        # Without the cgroup's own file nothing is known: it may be the root cgroup, which has none.
        no_limit = (
            own if isinstance(own, Reading) else absent("no limit is set", str(group.directory))
        )
        return CgroupMemory(
            limit_bytes=min(limits, key=lambda r: r.number or 0, default=no_limit),
            current_bytes=read_first(group.directory / current_name, r"(\d+)\s", int),
            peak_bytes=read_first(group.directory / peak_name, r"(\d+)\s", int),
            headroom_bytes=min(headrooms, key=lambda r: r.number or 0, default=no_limit),
        )


def _count_of_list(text: str) -> int:
    """Count the CPUs in a kernel list such as `0-3,8`."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return sum(end[-1] - end[0] + 1 for end in ends)
