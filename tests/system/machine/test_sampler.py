"""The sampler on the real /proc, and on a recorded process for what cannot be caused here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.log.events import HostSample
from engine.machine.facts import read_facts
from engine.machine.host import Host
from engine.machine.nvml import Nvml, open_nvml
from engine.machine.reading import Reading, absent
from engine.machine.sampler import DUTY_LIMIT_PCT, DUTY_TICKS, LONGEST_TICK_S, Sample, Sampler

NO_NVML = absent("no NVIDIA driver library on this machine", "nvmlInit")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def burn_cpu(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def number_of(sample: Sample, name: str) -> float:
    value = sample.fields[name]
    assert isinstance(value, int | float), f"{name}: {value}, {sample.absent.get(name)}"
    return value


def test_the_own_process_is_sampled_from_the_real_proc() -> None:
    sampler = Sampler(os.getpid, NO_NVML)
    first = sampler.sample()
    assert [sample.kind for sample in first] == ["host"]
    fields, reasons = first[0].fields, first[0].absent
    assert fields["trainer_cpu_pct"] is None
    assert "two readings" in reasons["trainer_cpu_pct"]
    assert reasons["gpu"] == NO_NVML.absent
    for name in ("host_available_bytes", "host_total_bytes", "trainer_rss_bytes"):
        assert number_of(first[0], name) > 1 << 20
    assert fields["load1"] is not None
    assert 0 < number_of(first[0], "duty_s") < 1
    burn_cpu(0.2)
    second = sampler.sample()[0]
    # One busy thread is at most one core; the kernel counts CPU time in ticks of 10 ms, so 5 % of
    # 0.2 s, and a loaded machine may give this thread far less than a core.
    assert 1 < number_of(second, "trainer_cpu_pct") <= 115
    assert "gpu" not in second.absent and "trainer_cpu_pct" not in second.absent


def test_samples_are_flat_and_can_be_written_as_json() -> None:
    for sample in Sampler(os.getpid, NO_NVML).sample():
        for name, value in sample.fields.items():
            assert value is None or isinstance(value, int | float | str), name
        json.dumps({**sample.fields, "absent": sample.absent}, allow_nan=False)


def test_the_log_has_a_place_for_every_field_of_a_sample() -> None:
    sample = Sampler(os.getpid, NO_NVML).sample()[0]
    event = HostSample(**sample.fields, absent=sample.absent)  # type: ignore[arg-type]
    assert event.trainer_rss_bytes == sample.fields["trainer_rss_bytes"]


def test_without_a_trainer_its_fields_are_absent_and_the_reason_is_given_once() -> None:
    sampler = Sampler(lambda: None, NO_NVML)
    first, second = sampler.sample()[0], sampler.sample()[0]
    for name in ("trainer_rss_bytes", "trainer_cpu_pct"):
        assert first.fields[name] is None
        assert first.absent[name] == "no trainer is running"
    assert second.absent == {}


def test_a_process_that_ended_without_being_waited_for_has_no_memory_and_no_zero() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Host().process(child.pid).state.value == "Z"
    sample = Sampler(lambda: child.pid, NO_NVML).sample()[0]
    assert sample.fields["trainer_rss_bytes"] is None
    assert "VmRSS" in sample.absent["trainer_rss_bytes"]
    child.wait()
    assert Sampler(lambda: child.pid, NO_NVML).sample()[0].fields["trainer_state"] is None


class Recorded:
    """One process in a folder that stands in for /proc, and a clock that is set by hand."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s, self.pid = root, 100.0, 7
        self.sampler = Sampler(lambda: self.pid, NO_NVML, Host(proc=root), lambda: self.now_s)

    def tick(self, now_s: float, cpu_s: float, start: int = 500) -> tuple[object, dict[str, str]]:
        self.now_s = now_s
        folder = self.root / str(self.pid)
        folder.mkdir(exist_ok=True)
        ticks = round(cpu_s * TICKS_PER_S)
        counters = " ".join(["0"] * 10)
        (folder / "stat").write_text(
            f"{self.pid} (python) R {counters} {ticks} 0 0 0 20 0 1 0 {start} 1 1\n"
        )
        sample = self.sampler.sample()[0]
        return sample.fields["trainer_cpu_pct"], sample.absent


def test_cpu_percent_is_cpu_seconds_over_the_time_between_two_ticks(tmp_path: Path) -> None:
    machine = Recorded(tmp_path)
    assert machine.tick(100.0, 10.0)[0] is None
    assert machine.tick(102.0, 15.0)[0] == pytest.approx(250.0)
    assert machine.tick(106.0, 15.0)[0] == 0


def test_cpu_percent_starts_again_for_another_process_with_the_same_pid(tmp_path: Path) -> None:
    machine = Recorded(tmp_path)
    machine.tick(100.0, 10.0)
    assert machine.tick(101.0, 12.0)[0] == pytest.approx(200.0)
    value, reasons = machine.tick(102.0, 0.5, start=900)
    assert value is None and "same process" in reasons["trainer_cpu_pct"]
    assert machine.tick(103.0, 1.5, start=900)[0] == pytest.approx(100.0)


def test_cpu_percent_needs_time_to_pass(tmp_path: Path) -> None:
    machine = Recorded(tmp_path)
    machine.tick(100.0, 10.0)
    assert machine.tick(100.0, 10.0)[0] is None


def test_an_empty_machine_has_no_number_at_all(tmp_path: Path) -> None:
    sample = Sampler(lambda: 7, NO_NVML, Host(proc=tmp_path, cgroups=tmp_path)).sample()[0]
    numbers = {n: v for n, v in sample.fields.items() if v is not None}
    assert set(numbers) == {"duty_s", "tick_s"}
    assert set(sample.absent) == set(sample.fields) - {"duty_s", "tick_s"} | {"gpu"}


def test_nvml_on_this_machine_is_open_or_absent_with_a_reason_and_never_zero() -> None:
    nvml = open_nvml()
    facts = read_facts(nvml=nvml)
    fields = facts.as_event_fields()
    if isinstance(nvml, Nvml):
        assert fields["gpu_count"] == nvml.count > 0
        nvml.close()
        return
    assert isinstance(nvml, Reading) and nvml.absent
    assert fields["gpu_count"] is None
    assert fields["nvml_absent"] == nvml.absent
    assert f"GPU readings: not measured ({nvml.absent})" in facts.lines()
    assert Sampler(os.getpid, nvml).sample()[0].absent["gpu"] == nvml.absent
    assert not any(name.startswith("gpu0") for name in fields)


def test_reading_the_machine_costs_little() -> None:
    sampler = Sampler(os.getpid, NO_NVML)
    costs_s = sorted(number_of(sampler.sample()[0], "duty_s") for _ in range(20))
    # About 0.5 ms; 10 ms is 1 % of a core at 1 Hz. The least of 20 does not see other processes.
    assert costs_s[0] < 0.010


class Clock:
    """Time that passes by a cost at each look at it, and otherwise when it is told to."""

    def __init__(self, cost_s: float) -> None:
        self.now_s, self.cost_s = 100.0, cost_s

    def __call__(self) -> float:
        self.now_s += self.cost_s
        return self.now_s


def ticks(sampler: Sampler, clock: Clock, count: int) -> list[Sample]:
    """Ticks at the pace that the sampler asks for."""
    taken = []
    for _ in range(count):
        begun_s = clock.now_s
        taken.append(sampler.sample()[0])
        clock.now_s = max(clock.now_s, begun_s + sampler.tick_s)
    return taken


def test_a_sampler_that_costs_too_much_halves_its_pace_and_says_so() -> None:
    # A tick takes 6 ms, a slow one 12: 0.66 % at 1 Hz, half of that at 0.5 Hz.
    clock = Clock(0.006)
    sampler = Sampler(lambda: None, NO_NVML, Host(proc=Path("/nowhere")), clock)
    samples = ticks(sampler, clock, DUTY_TICKS + 1)
    assert sampler.tick_s == 2.0
    news = sampler.news()
    assert news is not None and "every 2 s" in news and sampler.news() is None
    assert number_of(samples[DUTY_TICKS - 1], "duty_pct") > DUTY_LIMIT_PCT
    later = ticks(sampler, clock, 3 * DUTY_TICKS)
    assert sampler.tick_s == 2.0 and sampler.news() is None
    assert number_of(later[-1], "duty_pct") < DUTY_LIMIT_PCT
    assert number_of(later[-1], "tick_s") == 2.0


def test_a_sampler_within_its_limit_keeps_its_pace() -> None:
    clock = Clock(0.004)  # 0.44 %
    sampler = Sampler(lambda: None, NO_NVML, Host(proc=Path("/nowhere")), clock)
    ticks(sampler, clock, 4 * DUTY_TICKS)
    assert sampler.tick_s == 1.0 and sampler.news() is None


def test_the_pace_has_an_end() -> None:
    clock = Clock(1.0)
    sampler = Sampler(lambda: None, NO_NVML, Host(proc=Path("/nowhere")), clock)
    ticks(sampler, clock, 20 * DUTY_TICKS)
    assert sampler.tick_s == LONGEST_TICK_S


def test_rates_are_counts_over_the_time_between_two_slow_ticks(tmp_path: Path) -> None:
    clock = Clock(0.0)
    sampler = Sampler(lambda: None, NO_NVML, Host(proc=tmp_path), clock, slow_every=2)

    def tick(faults: int) -> Sample:
        text = f"pgmajfault {faults}\npswpin 0\npswpout 8\noom_kill 3\n"
        (tmp_path / "vmstat").write_text(text)
        sample = sampler.sample()[0]
        clock.now_s += 1.0
        return sample

    first = tick(100)
    assert first.fields["major_faults_per_s"] is None
    assert "two readings" in first.absent["major_faults_per_s"]
    assert first.fields["oom_kills"] == 3
    tick(500)
    assert tick(120).fields["major_faults_per_s"] == pytest.approx(10.0)
    assert tick(900).fields["major_faults_per_s"] == pytest.approx(10.0)
    gone_back = tick(0)
    assert gone_back.fields["major_faults_per_s"] is None


def test_pressure_swap_and_paging_of_this_machine_are_read() -> None:
    fields = Sampler(os.getpid, NO_NVML).sample()[0].fields
    for name in ("psi_memory_full_avg10_pct", "psi_cpu_some_avg10_pct", "psi_io_full_avg10_pct"):
        assert name in fields
    assert fields["oom_kills"] is None or number_is_count(fields["oom_kills"])


def number_is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


MODULES = (
    *("engine.machine.reading", "engine.machine.host", "engine.machine.nvml"),
    *("engine.machine.facts", "engine.machine.sampler", "engine.watch.exit_cause"),
)


@pytest.mark.parametrize("module", MODULES)
def test_the_device_side_loads_without_torch_or_the_gpu_binding(module: str) -> None:
    heavy = "torch", "numpy", "pynvml", "textual", "engine.runtime"
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_look_at_the_machine_does_not_load_torch() -> None:
    code = (
        "import os, sys\n"
        "from engine.machine.facts import read_facts\n"
        "from engine.machine.nvml import open_nvml\n"
        "from engine.machine.sampler import Sampler\n"
        "read_facts().lines()\n"
        "Sampler(os.getpid, open_nvml()).sample()\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
