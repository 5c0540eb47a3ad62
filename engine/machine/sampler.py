"""Sample the machine once per tick, as records that the caller writes to a log.

    sampler = Sampler(pid_of_trainer, open_nvml(), Host())
    every sampler.tick_s:  for sample in sampler.sample(): write(sample)

A tick gives one sample of kind `host` and one of kind `gpu` for each GPU. Its fields are flat; a field
without a value is None and must never be drawn as 0. `absent` gives the reason. To keep the log small a
reason is logged once, when it appears or changes, and again after the field has had a value in between, so
that a reader of the whole log always knows it. Without NVML there are no `gpu` samples and the host sample
has a reason for `gpu`.

Fast fields are read at every tick. Slow ones (temperature, power limit, energy and processes of a GPU; free swap, CPU
and I/O pressure, paging, OOM kills; CPU, I/O and memory of the trainer and its descendants) are read at every tenth
and repeated in between, so that every record is complete; they are at most nine ticks old.

Rates are the difference of a counter between two reads, divided by the seconds between them; they are absent
until there were two reads. One of them is `trainer_cpu_pct`, where 100 is one core busy. The kernel counts
CPU time in ticks of 10 ms, so at 1 Hz it is accurate to 1. It is absent on the first tick of a process, and
when the pid belongs to another process than before.

The sampler measures its own cost. `duty_s` is the cost of the tick itself, GPU queries included; `duty_pct`
is the share of the time spent on up to DUTY_TICKS ticks. When all of them together exceed DUTY_LIMIT_PCT the sampling
rate is halved, and `news` reports it.

The pid to watch is looked up every tick, because the trainer may start after the sampler and may end before
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.machine.family import members, read_family
from engine.machine.host import Host
from engine.machine.nvml import Nvml
from engine.machine.reading import Reading, absent, measured

TICK_S = 1.0
"""Initial seconds between two ticks: 1 Hz for the fast fields, 0.1 Hz for the slow ones."""
DUTY_LIMIT_PCT = 0.5
"""Maximum share of the time that ticks may take, in percent."""
DUTY_TICKS = 30
"""Number of ticks over which the duty is measured, so that one tick delayed by another process does not decide."""
LONGEST_TICK_S = 16.0
"""Maximum interval between two ticks, in seconds; from it on the interval is not doubled."""
_NEEDS_TWO = "needs two readings, some time apart"
_FAMILY_FIELDS = (
    *("family_cpu_pct", "family_io_bytes_per_s"),
    *("family_rss_bytes", "family_processes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    kind: str
    """`host` or `gpu`."""
    fields: dict[str, float | int | str | None]
    """Names carry units. A GPU's sample has its NVML number as `index`."""
    absent: dict[str, str]
    """Reasons that are new since the last sample of the same subject, by field."""


class Sampler:
    def __init__(
        self,
        pid_of_trainer: Callable[[], int | None],
        nvml: Nvml | Reading,
        host: Host | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        tick_s: float = TICK_S,
        slow_every: int = 10,
        own_memory: Callable[[], Mapping[str, Reading]] = dict,
        family: int | None = None,
        launched: int | None = None,
    ) -> None:
        """`nvml` is the result of `open_nvml()`; `clock` is a monotonic clock in seconds; `own_memory` returns
        the memory that the trainer itself reports, under the field names of a host sample. `family` is the process
        whose descendants are counted, if it is not the trainer; `launched` is the one whose descendants' GPU memory is
        counted, if the trainer is one of several ranks."""
        self._pid_of_trainer = pid_of_trainer
        self._nvml = nvml
        self._host = host or Host()
        self._family, self._launched = family, launched
        self._clock = clock
        self._slow_every, self._own_memory = slow_every, own_memory
        self.tick_s = tick_s
        """Seconds from one tick to the next."""
        self._duty = _Duty()
        self._last_duty = absent(_NEEDS_TWO, "the sampler's clock")
        self._news: str | None = None
        self._tick = 0
        self._slow: dict[int, dict[str, Reading]] = {}
        self._slow_host: dict[str, Reading] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._last_trainer: tuple[int, float, float, float] | None = None
        """(pid, its start in ticks, its CPU seconds, the time) at the last read of the trainer."""
        self._last_counts: dict[str, tuple[float, float]] = {}
        """(time, count) at the last read of each kernel counter."""

    def sample(self) -> list[Sample]:
        """Take one tick: the host's sample first, then one for each GPU."""
        began_s = self._clock()
        nvml, readings = self._nvml, self._host_readings()
        gpus: list[Sample] = []
        if isinstance(nvml, Reading):
            readings["gpu"] = nvml
        else:
            gpus = [self._gpu_sample(nvml, index) for index in range(nvml.count)]
        self._tick += 1
        duty_s = self._clock() - began_s
        readings["duty_pct"] = self._measure_duty(began_s, duty_s)
        missing = self._changed_reasons("host", readings)
        fields = _values(readings) | {"duty_s": duty_s, "tick_s": self.tick_s}
        fields.pop("gpu", None)
        return [Sample(kind="host", fields=fields, absent=missing), *gpus]

    def news(self) -> str | None:
        """Return a message about the sampler itself, once per event; None when there is none."""
        news, self._news = self._news, None
        return news

    def _measure_duty(self, began_s: float, spent_s: float) -> Reading:
        """Return the share of the time that ticks take; halve the rate when it is too high."""
        duty_pct = self._duty.after(began_s, spent_s)
        if duty_pct is None:
            # The first tick of a series gives no result: the previous series' result still holds.
            return self._last_duty
        if self._duty.ticks >= DUTY_TICKS:
            self._duty = _Duty()
            if duty_pct > DUTY_LIMIT_PCT and self.tick_s < LONGEST_TICK_S:
                self.tick_s *= 2
                self._news = (
                    f"reading the machine took {duty_pct:.2g} % of the time, more than "
                    f"{DUTY_LIMIT_PCT} %: from now on every {self.tick_s:g} s"
                )
        self._last_duty = measured(duty_pct, "the sampler's clock")
        return self._last_duty

    def _gpu_sample(self, nvml: Nvml, index: int) -> Sample:
        if self._tick % self._slow_every == 0:
            self._slow[index] = nvml.slow(index) | self._processes(nvml, index)
        readings = nvml.fast(index) | self._slow[index]
        return Sample(
            kind="gpu",
            fields={"index": index, **_values(readings)},
            absent=self._changed_reasons(f"gpu{index}", readings),
        )

    def _processes(self, nvml: Nvml, index: int) -> dict[str, Reading]:
        pid = self._launched or self._family or self._pid_of_trainer()
        missing = absent("no trainer is running", "pid of the trainer")
        pids: list[int] = []
        try:
            pids = [] if pid is None else members(pid, self._host.proc)
        except OSError as error:
            missing = absent(f"not readable: {error.strerror}", f"{self._host.proc}/{pid}")
        used, listed = nvml.processes(index, pids, self._host.proc)
        return {"family_gpu_mem_bytes": used if pids else missing, "gpu_processes": listed}

    def _changed_reasons(self, subject: str, readings: Mapping[str, Reading]) -> dict[str, str]:
        changed: dict[str, str] = {}
        for name, reading in readings.items():
            key = (subject, name)
            if reading.absent is None:
                self._reasons.pop(key, None)
            elif self._reasons.get(key) != reading.absent:
                self._reasons[key] = changed[name] = reading.absent
        return changed

    def _host_readings(self) -> dict[str, Reading]:
        memory, pid = self._host.memory(), self._pid_of_trainer()
        if self._tick % self._slow_every == 0:
            self._slow_host = {
                "swap_free_bytes": memory.swap_free_bytes,
                **self._slow_readings(pid),
            }
        return {
            "host_available_bytes": memory.available_bytes,
            "host_total_bytes": memory.total_bytes,
            "load1": self._host.load1(),
            "psi_memory_full_avg10_pct": self._host.psi_pct("memory")[1],
            **self._slow_host,
            **self._trainer_readings(pid),
            **self._own_memory(),
        }

    def _slow_readings(self, pid: int | None) -> dict[str, Reading]:
        now_s = self._clock()
        oom_kills, faults = self._host.vmstat("oom_kill", "pgmajfault")
        return {
            "psi_cpu_some_avg10_pct": self._host.psi_pct("cpu")[0],
            "psi_io_full_avg10_pct": self._host.psi_pct("io")[1],
            "major_faults_per_s": self._rate("major_faults_per_s", faults, now_s),
            **self._family_readings(pid, now_s),
            "oom_kills": oom_kills,
        }

    def _family_readings(self, pid: int | None, now_s: float) -> dict[str, Reading]:
        if pid is None:
            missing = absent("no trainer is running", "pid of the trainer")
            return dict.fromkeys(_FAMILY_FIELDS, missing)
        family = read_family(self._family or pid, self._host.proc)
        cores = self._rate("family_cpu_pct", family.cpu_s, now_s)
        return {
            "family_cpu_pct": cores
            if cores.number is None
            else measured(100 * cores.number, cores.source),
            "family_io_bytes_per_s": self._rate("family_io_bytes_per_s", family.io_bytes, now_s),
            "family_rss_bytes": family.rss_bytes,
            "family_processes": family.processes,
        }

    def _rate(self, name: str, count: Reading, now_s: float) -> Reading:
        before = self._last_counts.pop(name, None)
        if count.number is None:
            return count
        self._last_counts[name] = now_s, count.number
        if before is None or now_s <= before[0] or count.number < before[1]:
            return absent(_NEEDS_TWO, count.source)
        return measured((count.number - before[1]) / (now_s - before[0]), count.source)

    def _trainer_readings(self, pid: int | None) -> dict[str, Reading]:
        if pid is None:
            self._last_trainer = None
            names = ("trainer_rss_bytes", "trainer_state", "trainer_cpu_pct")
            return dict.fromkeys(names, absent("no trainer is running", "pid of the trainer"))
        now_s = self._clock()
        process = self._host.process(pid)
        return {
            "trainer_rss_bytes": process.rss_bytes,
            "trainer_state": process.state,
            "trainer_cpu_pct": self._cpu_pct(pid, process.start_ticks, process.cpu_s, now_s),
        }

    def _cpu_pct(self, pid: int, start: Reading, cpu_s: Reading, now_s: float) -> Reading:
        before, self._last_trainer = self._last_trainer, None
        if start.number is None or cpu_s.number is None:
            return cpu_s if cpu_s.number is None else start
        self._last_trainer = (pid, start.number, cpu_s.number, now_s)
        if before is None or before[:2] != (pid, start.number) or now_s <= before[3]:
            return absent("needs two readings of the same process, some time apart", cpu_s.source)
        used_s = cpu_s.number - before[2]
        return measured(100 * used_s / (now_s - before[3]), cpu_s.source)


class _Duty:
    """The share of the time taken by a series of ticks."""

    def __init__(self) -> None:
        self.ticks = 0
        self._first_s: float | None = None
        self._spent_s = self._newest_s = 0.0

    def after(self, began_s: float, spent_s: float) -> float | None:
        """Return the share in percent once there were two ticks. The newest tick is left out, because the time
        until the next one, over which it counts, has not passed."""
        if self._first_s is None:
            self._first_s = began_s
        self._spent_s += self._newest_s
        self._newest_s = spent_s
        self.ticks += 1
        passed_s = began_s - self._first_s
        return 100 * self._spent_s / passed_s if passed_s > 0 else None


def _values(readings: Mapping[str, Reading]) -> dict[str, float | int | str | None]:
    return {name: reading.value for name, reading in readings.items()}
