"""What the supervisor writes: readings of the machine into device.jsonl; the trainer process, alerts and stacks into
watch.jsonl. Notes, which both write, are with the trainer's.
"""

# ruff: noqa: RUF012 (msgspec gives each event an empty list or dict of its own)

from __future__ import annotations

from typing import Any

from engine.log.envelope import Count, Event, GpuIndex, Number, Pid, UnixTime, Whole


class FactsRead(Event, frozen=True, kw_only=True, tag="device_facts"):
    facts: dict[str, Any]


class HostSample(Event, frozen=True, kw_only=True, tag="host"):
    host_available_bytes: Number | None = None
    host_total_bytes: Number | None = None
    swap_free_bytes: Number | None = None
    load1: Number | None = None
    psi_memory_some_avg10_pct: Number | None = None
    psi_memory_full_avg10_pct: Number | None = None
    psi_cpu_some_avg10_pct: Number | None = None
    psi_io_full_avg10_pct: Number | None = None
    major_faults_per_s: Number | None = None
    """Pages that were read from a disk because a process touched them, of the whole machine."""
    swap_in_pages_per_s: Number | None = None
    swap_out_pages_per_s: Number | None = None
    oom_kills: Number | None = None
    """Processes the kernel has killed for memory since the machine started."""
    cgroup_memory_bytes: Number | None = None
    cgroup_memory_limit_bytes: Number | None = None
    trainer_rss_bytes: Number | None = None
    trainer_cpu_pct: Number | None = None
    trainer_threads: Number | None = None
    family_cpu_pct: Number | None = None
    """Of the trainer and every process that it started; 100 is one core busy."""
    family_io_bytes_per_s: Number | None = None
    """What they read and wrote, by system calls and at disks."""
    memory_held_bytes: Number | None = None
    """What the trainer says it holds: bytes of tensors on a GPU, of the process on a CPU."""
    memory_reserved_bytes: Number | None = None
    """What torch's allocator keeps of the GPU for that."""
    memory_peak_bytes: Number | None = None
    """The most that was held in this session."""
    memory_source: str | None = None
    """Who counted these three."""
    duty_s: Number | None = None
    """What taking this sample cost."""
    duty_pct: Number | None = None
    """Share of the time that went into the last samples."""
    tick_s: Number | None = None
    """Seconds to the next sample."""
    absent: dict[str, str] = {}


class GpuSample(Event, frozen=True, kw_only=True, tag="gpu"):
    index: GpuIndex
    gpu_util_pct: Number | None = None
    """Share of the time in which any kernel ran, however small: not how much of the GPU worked."""
    gpu_mem_util_pct: Number | None = None
    gpu_mem_used_bytes: Number | None = None
    gpu_mem_total_bytes: Number | None = None
    gpu_power_w: Number | None = None
    gpu_power_limit_w: Number | None = None
    gpu_energy_j: Number | None = None
    """Since the driver was loaded."""
    gpu_temperature_c: Number | None = None
    sm_clock_mhz: Number | None = None
    sm_util_pct: Number | None = None
    """Share of the multiprocessors that were busy."""
    sm_occupancy_pct: Number | None = None
    tensor_util_pct: Number | None = None
    """Share of the time in which the tensor pipes worked, mean over all of them."""
    dram_util_pct: Number | None = None
    clock_event_reasons: str | None = None
    absent: dict[str, str] = {}

    @property
    def slowed(self) -> float | None:
        """1 when heat or a power brake holds the clocks down, 0 when not, None when not known."""
        if self.clock_event_reasons is None:
            return None
        return float(not SLOWED.isdisjoint(self.clock_event_reasons.split(",")))


SLOWED = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""Reasons for low clocks that a healthy machine does not have. A power cap is not among them: a card
under full load runs at its limit."""


class AlertRaised(Event, frozen=True, kw_only=True, tag="alert"):
    """Something is wrong, by the rule `id`; it stands until an `alert_cleared` of the same id."""

    id: str
    severity: str
    """`warning` or `error`."""
    title: str
    """What is seen, in one sentence with its most telling number."""
    numbers: list[tuple[str, Number, str]] = []
    """Each number with its unit in its name, its value, and what it is held against."""
    first_step: Count = 0
    last_step: Count = 0
    from_unix_s: UnixTime = 0.0
    to_unix_s: UnixTime = 0.0
    """The steps and the time that the numbers were taken from."""
    meaning: str = ""
    flip: str = ""
    """The argument that would test the suspicion: `--set knob=value`; empty where there is none."""
    no_flip: str = ""
    """Why there is none."""


class AlertCleared(Event, frozen=True, kw_only=True, tag="alert_cleared"):
    id: str
    stood_s: Number


class StackDump(Event, frozen=True, kw_only=True, tag="stack_dump"):
    """What the threads of a silent trainer were doing; the whole of it is in the file."""

    path: str
    """Relative to the run folder."""
    state: str
    """`computing`, `waiting for a lock`, `stopped by a signal`, ... of the main thread."""
    summary: str
    python_frame: str
    """Innermost Python line of the main thread: `file:line in function`; empty when not known."""
    native_frame: str
    """Innermost C function, or the system call, of the main thread; empty when not known."""
    python_stack: list[str] = []
    """The main thread, innermost first."""
    busy_threads: Count | None = None
    """Threads that computed when they were looked at, the main thread included."""
    missing: list[str] = []
    """What could not be had, each with the reason."""


class TrainerStarted(Event, frozen=True, kw_only=True, tag="trainer_started"):
    trainer_pid: Pid
    supervisor_pid: Pid


class TrainerExited(Event, frozen=True, kw_only=True, tag="trainer_exited"):
    """How the trainer process ended, as its parent saw it; `sentence` claims no more than was
    proved."""

    trainer_pid: Pid
    returncode: Whole
    state: str
    signal: str | None
    cause: str
    certainty: str
    sentence: str


class LauncherGone(Event, frozen=True, kw_only=True, tag="launcher_gone"):
    """Whoever started the run is no longer attached: `how` is `detached`, `hangup` or `killed`. The
    run goes on."""

    how: str


class StopForwarded(Event, frozen=True, kw_only=True, tag="stop_forwarded"):
    signal: str
