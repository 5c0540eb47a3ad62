"""The surroundings of a process, for tests of the doctor."""

from __future__ import annotations

from engine.machine.reading import absent, measured
from engine.machine.surroundings import Surroundings

AROUND = Surroundings(
    versions={
        "engine": measured("0.1.0", "engine.version"),
        "torch": measured("2.13.0", "package metadata"),
    },
    c_compiler=measured("/usr/bin/cc", "PATH"),
    kernel_log=measured("readable", "dmesg"),
    attach=measured("allowed for processes of the same user", "ptrace_scope"),
    py_spy=absent("py-spy is not on the PATH", "PATH"),
    memory_pressure_pct=measured(0.0, "/proc/pressure/memory full"),
    vmstat_oom_kill=measured(0, "/proc/vmstat oom_kill"),
    memcg_oom_kill=measured(0, "memory.events oom_kill"),
    pci_gpus=measured(1, "/sys/bus/pci"),
)
