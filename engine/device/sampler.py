"""One look at the machine per tick, as records that somebody else writes to a log.

    sampler = Sampler(pid_of_trainer, open_nvml(), Host())
    every TICK_S:  for sample in sampler.sample(): write(sample)

A tick gives one sample of kind `host` and one of kind `gpu` for each GPU. Its fields are flat; a
field without a value is None and must never be drawn as 0. `absent` says why. To keep the log small
a reason is given once, when it appears or changes, and again after the field has had a value in
between: a reader of the whole log always knows it. Without NVML there are no `gpu` samples and the
host sample has a reason for `gpu`.

Fast fields are read at every tick. Slow ones (temperature, power limit) are read at every tenth and
repeated in between, so that every record is whole; they are at most nine ticks old.

`trainer_cpu_pct` is 100 * (CPU seconds between two ticks) / (monotonic seconds between them): 100
is one core busy. The kernel counts CPU time in ticks of 10 ms, so at 1 Hz it is good to 1. It is
absent on the first tick of a process, and when the pid names another process than before. `duty_s`
is what the tick itself cost, GPU queries included, so that the observer's share can be shown, and
compared between two arms.

Which process is watched is asked every tick, because the trainer may start after the sampler and
may end before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.device.host import Host
from engine.device.nvml import Nvml
from engine.device.reading import Reading, absent, measured

TICK_S = 1.0
"""Seconds between two ticks that suit `slow_every`: 1 Hz fast, 0.1 Hz slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    kind: str
    """`host` or `gpu`."""
    fields: dict[str, float | int | str | None]
    """Names carry units. A GPU's sample has its number as `index`."""
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
        slow_every: int = 10,
    ) -> None:
        """`nvml` is what `open_nvml()` gave; `clock` is in seconds and never goes back."""
        self._pid_of_trainer = pid_of_trainer
        self._nvml = nvml
        self._host = host or Host()
        self._clock = clock
        self._slow_every = slow_every
        self._tick = 0
        self._slow: dict[int, dict[str, Reading]] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._before: tuple[int, float, float, float] | None = None
        """(pid, its start in ticks, its CPU seconds, the time) of the last look at the trainer."""

    def sample(self) -> list[Sample]:
        """One tick: the host's sample first, then one for each GPU."""
        began_s = self._clock()
        nvml, readings = self._nvml, self._host_readings()
        gpus: list[Sample] = []
        if isinstance(nvml, Reading):
            missing = self._changed_reasons("host", {**readings, "gpu": nvml})
        else:
            missing = self._changed_reasons("host", readings)
            gpus = [self._gpu_sample(nvml, index) for index in range(nvml.count)]
        self._tick += 1
        fields = _values(readings) | {"duty_s": self._clock() - began_s}
        return [Sample(kind="host", fields=fields, absent=missing), *gpus]

    def _gpu_sample(self, nvml: Nvml, index: int) -> Sample:
        if self._tick % self._slow_every == 0:
            self._slow[index] = nvml.slow(index)
        readings = nvml.fast(index) | self._slow[index]
        return Sample(
            kind="gpu",
            fields={"index": index, **_values(readings)},
            absent=self._changed_reasons(f"gpu{index}", readings),
        )

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
        memory = self._host.memory()
        return {
            "host_available_bytes": memory.available_bytes,
            "host_total_bytes": memory.total_bytes,
            "load1": self._host.load1(),
            "psi_memory_full_avg10_pct": self._host.psi_memory_pct()[1],
            **self._trainer_readings(),
        }

    def _trainer_readings(self) -> dict[str, Reading]:
        pid = self._pid_of_trainer()
        if pid is None:
            self._before = None
            names = ("trainer_rss_bytes", "trainer_threads", "trainer_cpu_pct")
            return dict.fromkeys(names, absent("no trainer is running", "pid of the trainer"))
        now_s = self._clock()
        process = self._host.process(pid)
        return {
            "trainer_rss_bytes": process.rss_bytes,
            "trainer_threads": process.threads,
            "trainer_cpu_pct": self._cpu_pct(pid, process.start_ticks, process.cpu_s, now_s),
        }

    def _cpu_pct(self, pid: int, start: Reading, cpu_s: Reading, now_s: float) -> Reading:
        before, self._before = self._before, None
        if start.number is None or cpu_s.number is None:
            return cpu_s if cpu_s.number is None else start
        self._before = (pid, start.number, cpu_s.number, now_s)
        if before is None or before[:2] != (pid, start.number) or now_s <= before[3]:
            return absent("needs two looks at the same process, some time apart", cpu_s.source)
        used_s = cpu_s.number - before[2]
        return measured(100 * used_s / (now_s - before[3]), cpu_s.source)


def _values(readings: Mapping[str, Reading]) -> dict[str, float | int | str | None]:
    return {name: reading.value for name, reading in readings.items()}
