"""Trees of /proc and /sys files."""

from __future__ import annotations

from pathlib import Path

from engine.machine.host import Host

KIB, GIB = 1024, 1024**3

MEMINFO = """\
MemTotal:       24684092 kB
MemFree:        24066372 kB
MemAvailable:   24174216 kB
Buffers:            3272 kB
Cached:           286096 kB
SwapCached:            0 kB
SwapTotal:       2097148 kB
SwapFree:        2090000 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
DirectMap1G:    25165824 kB
"""

VMSTAT = """\
nr_free_pages 6016593
pgmajfault 1102
oom_kill 3
swap_ra 12
thp_fault_alloc 77
"""

PRESSURE = """\
some avg10=12.34 avg60=5.00 avg300=1.20 total=123456789
full avg10=3.10 avg60=0.50 avg300=0.10 total=23456789
"""

STATUS = """\
Name:\tpython3 (a) b
Umask:\t0022
State:\tD (disk sleep)
Pid:\t4242
VmPeak:\t  812340 kB
VmRSS:\t  401004 kB
Threads:\t27
Cpus_allowed:\tff0f
Cpus_allowed_list:\t0-3,8-15
"""

STAT = (
    "4242 (python3 (a) b) D 4200 4200 3614 0 -1 4194304 15000 0 12 0 1234 66 0 0 20 0 27 0 "
    "108877 3133440000 100251 18446744073709551615 1 1 0 0 0 0 0 0 17 0 0 0 17 1 0 0 0 0 0\n"
)

V2_MOUNT = (
    "23 27 0:22 / /sys rw,nosuid - sysfs sysfs rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)

EVENTS = "low 0\nhigh 2\nmax 41\noom 5\noom_kill 4\noom_group_kill 1\n"

EVENTS_LOCAL = "low 0\nhigh 0\nmax 40\noom 5\noom_kill 2\noom_group_kill 1\n"

SCOPE = "cgroup/user.slice/run.scope"

MACHINE = {
    "proc/meminfo": MEMINFO,
    "proc/vmstat": VMSTAT,
    "proc/loadavg": "1.25 0.90 0.40 3/412 4242\n",
    "proc/pressure/memory": PRESSURE,
    "proc/stat": "cpu  1 2 3\ncpu0 1 2 3\ncpu1 1 2 3\ncpu10 1 2 3\nintr 5\n",
    "proc/sys/kernel/random/boot_id": "8300c0b7-2146-4700-9edc-62838ce80617\n",
    "proc/self/status": STATUS,
    "proc/self/cgroup": "0::/user.slice/run.scope\n",
    "proc/self/mountinfo": V2_MOUNT,
    "proc/self/oom_score_adj": "-500\n",
    "proc/4242/status": STATUS,
    "proc/4242/stat": STAT,
    "proc/4242/cgroup": "0::/user.slice/run.scope\n",
    "proc/4242/oom_score_adj": "200\n",
    f"{SCOPE}/memory.max": "max\n",
    f"{SCOPE}/memory.current": f"{3 * GIB}\n",
    f"{SCOPE}/memory.peak": f"{5 * GIB}\n",
    f"{SCOPE}/memory.events": EVENTS,
    f"{SCOPE}/memory.events.local": EVENTS_LOCAL,
    f"{SCOPE}/cpu.max": "max 100000\n",
    "cgroup/user.slice/memory.max": f"{8 * GIB}\n",
    "cgroup/user.slice/memory.current": f"{6 * GIB}\n",
    "cgroup/user.slice/cpu.max": "150000 100000\n",
}


def write_tree(root: Path, texts: dict[str, str]) -> Host:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Host(proc=root / "proc", cgroups=root / "cgroup")
