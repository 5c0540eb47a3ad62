"""Readings from recorded kernel texts: memory, pressure, control groups v1 and v2, processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.machine.host import Cgroup, Host
from engine.machine.kill_counters import read_kill_counters
from engine.machine.reading import Reading, absent, event_fields, measured
from tests.support.host_trees import GIB, KIB, MACHINE, write_tree


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return write_tree(tmp_path, MACHINE)


@pytest.mark.parametrize(
    ("value", "source", "reason"),
    [
        (None, "somewhere", None),
        (1, "somewhere", "broken"),
        (1, "", None),
        (None, "somewhere", ""),
        (float("nan"), "somewhere", None),
        (float("inf"), "somewhere", None),
    ],
)
def test_a_reading_without_exactly_one_of_value_and_reason_is_refused(
    value: float | None, source: str, reason: str | None
) -> None:
    with pytest.raises(AssertionError):
        Reading(value=value, source=source, absent=reason)


def test_a_reading_of_zero_is_a_value() -> None:
    assert measured(0, "/proc/meminfo SwapFree").number == 0


def test_an_absent_reading_has_no_number_and_says_why() -> None:
    missing = absent("not supported", "nvmlDeviceGetMemoryInfo")
    assert missing.number is None
    assert str(missing) == "not measured (not supported)"
    assert event_fields("used", missing) == {
        "used": None,
        "used_source": "nvmlDeviceGetMemoryInfo",
        "used_absent": "not supported",
    }


def test_a_text_reading_has_no_number() -> None:
    with pytest.raises(AssertionError, match="NVIDIA"):
        _ = measured("NVIDIA GB10", "nvmlDeviceGetName").number


def test_meminfo_is_read_in_bytes_with_its_source(host: Host) -> None:
    memory = host.memory()
    assert memory.total_bytes.value == 24684092 * KIB
    assert memory.available_bytes.value == 24174216 * KIB
    assert memory.free_bytes.value == 24066372 * KIB
    assert memory.swap_free_bytes.value == 2090000 * KIB
    assert memory.available_bytes.source == f"{host.proc}/meminfo MemAvailable"


def test_available_memory_does_not_fall_when_the_page_cache_grows(tmp_path: Path) -> None:
    # Published series of a unified-memory machine while a 60 GiB file is written and dropped.
    readings = []
    for free_gib in (103.25, 41.52, 103.30):
        text = f"MemFree: {int(free_gib * 2**20)} kB\nMemAvailable: {int(115.7 * 2**20)} kB\n"
        memory = write_tree(tmp_path, {"proc/meminfo": text}).memory()
        readings.append((memory.free_bytes.value, memory.available_bytes.value))
    assert len({free for free, _ in readings}) == 3
    assert len({available for _, available in readings}) == 1


def test_the_rest_of_the_host_is_read(host: Host) -> None:
    some, full = host.psi_pct("memory")
    assert (some.value, full.value) == (12.34, 3.10)
    assert host.load1().value == 1.25
    assert host.vmstat_oom_kill().value == 3
    assert host.boot_id().value == "8300c0b7-2146-4700-9edc-62838ce80617"
    assert host.cpu_count().value == 3


def test_process_fields_are_counted_after_a_name_with_brackets_and_spaces(host: Host) -> None:
    process = host.process(4242)
    assert process.state.value == "D"
    assert process.rss_bytes.value == 401004 * KIB
    assert process.cpu_s.value == (1234 + 66) / os.sysconf("SC_CLK_TCK")
    assert process.start_ticks.value == 108877
    assert process.oom_score_adj.value == 200


def test_effective_cpus_are_the_tightest_of_affinity_and_every_quota_above(
    host: Host, tmp_path: Path
) -> None:
    assert host.cpu_effective().value == 1.5
    assert host.cpu_effective().source.endswith("user.slice/cpu.max")
    (tmp_path / "cgroup/user.slice/cpu.max").write_text("max 100000\n")
    assert host.cpu_effective().value == 12


def test_a_group_without_a_limit_has_the_limit_of_the_group_above(host: Host) -> None:
    memory = host.cgroup_memory(host.find_cgroup("memory"))
    assert memory.limit_bytes.value == 8 * GIB
    assert memory.limit_bytes.source.endswith("user.slice/memory.max")
    assert memory.current_bytes.value == 3 * GIB
    assert memory.peak_bytes.value == 5 * GIB
    assert memory.headroom_bytes.value == 2 * GIB


def test_no_limit_is_a_reason_and_not_a_huge_number(host: Host, tmp_path: Path) -> None:
    (tmp_path / "cgroup/user.slice/memory.max").write_text("max\n")
    memory = host.cgroup_memory(host.find_cgroup("memory"))
    assert memory.limit_bytes.absent == "no limit is set"
    assert memory.headroom_bytes.value is None


def test_kill_counters_of_v2_are_read_hierarchically_and_locally(host: Host) -> None:
    counters = read_kill_counters(host, pid=4242)
    assert counters.cgroup == Cgroup(
        version=2, directory=host.cgroups / "user.slice/run.scope", mount=host.cgroups
    )
    assert counters.memcg_oom_kill.value == 4
    assert counters.memcg_oom_kill_local.value == 2
    assert counters.memcg_oom.value == 5
    assert counters.memcg_oom_group_kill.value == 1
    assert counters.vmstat_oom_kill.value == 3
    assert counters.oom_score_adj.value == 200


def test_the_group_of_an_ended_process_is_still_read_when_it_is_given(
    host: Host, tmp_path: Path
) -> None:
    before = read_kill_counters(host, pid=4242)
    (tmp_path / "proc/4242/cgroup").unlink()
    assert read_kill_counters(host, pid=4242).memcg_oom_kill.value is None
    assert read_kill_counters(host, pid=4242, cgroup=before.cgroup).memcg_oom_kill.value == 4


V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n",
    "proc/self/mountinfo": (
        "7 1 0:31 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "8 1 0:32 /docker/abc /sys/fs/cgroup/memory ro master:15 - cgroup cgroup rw,memory\n"
    ),
    "cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}\n",
    "cgroup/memory/memory.max_usage_in_bytes": f"{2 * GIB}\n",
    "cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
    "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
    "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}


def test_a_container_on_v1_reads_the_group_that_is_its_root(tmp_path: Path) -> None:
    host = write_tree(tmp_path, MACHINE | V1)
    memory = host.cgroup_memory(host.find_cgroup("memory"))
    assert memory.limit_bytes.value == 4 * GIB
    assert memory.headroom_bytes.value == 3 * GIB
    assert memory.peak_bytes.value == 2 * GIB
    assert host.cpu_effective().value == 2.5
    counters = read_kill_counters(host)
    assert counters.memcg_oom_kill.value == 7
    assert counters.memcg_oom.absent == "cgroup v1 has no such counter"


@pytest.mark.parametrize("limit", ["9223372036854771712", "9223372036854710272"])
def test_the_unlimited_number_of_v1_is_no_limit_for_any_page_size(
    tmp_path: Path, limit: str
) -> None:
    host = write_tree(
        tmp_path, MACHINE | V1 | {"cgroup/memory/memory.limit_in_bytes": f"{limit}\n"}
    )
    assert host.cgroup_memory(host.find_cgroup("memory")).limit_bytes.value is None


def test_a_group_outside_every_mount_is_absent_and_not_read_from_another_group(
    tmp_path: Path,
) -> None:
    host = write_tree(tmp_path, MACHINE | V1 | {"proc/self/cgroup": "4:memory:/elsewhere\n"})
    group = host.find_cgroup("memory")
    assert isinstance(group, Reading)
    assert "/elsewhere" in (group.absent or "")
    assert read_kill_counters(host).memcg_oom_kill.absent == group.absent


def test_a_group_above_the_namespace_is_absent(tmp_path: Path) -> None:
    host = write_tree(tmp_path, MACHINE | {"proc/self/cgroup": "0::/../other\n"})
    assert isinstance(host.find_cgroup("memory"), Reading)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("proc/vmstat", "nr_free_pages 5\n"),
        ("proc/vmstat", ""),
        ("proc/vmstat", "oom_kill\n"),
        ("proc/vmstat", "oom_kill -\n"),
        ("proc/vmstat", "\x00\x00\n"),
    ],
)
def test_a_file_without_the_counter_is_a_reason(tmp_path: Path, name: str, text: str) -> None:
    host = write_tree(tmp_path, MACHINE | {name: text})
    assert host.vmstat_oom_kill().value is None
    assert host.vmstat_oom_kill().absent


def every_reading(host: Host) -> dict[str, Reading]:
    group = host.find_cgroup("memory", 4242)
    records = {
        "memory": host.memory(),
        "group": host.cgroup_memory(group),
        "process": host.process(4242),
        "kill": read_kill_counters(host, pid=4242),
    }
    readings = {
        f"{prefix}.{name}": getattr(record, name)
        for prefix, record in records.items()
        for name in dir(record)
        if not name.startswith("_")
    }
    some, full = host.psi_pct("memory")
    readings |= {"some": some, "full": full, "load1": host.load1()}
    readings |= {"count": host.cpu_count(), "effective": host.cpu_effective()}
    return {name: r for name, r in readings.items() if isinstance(r, Reading)}


def test_every_reading_of_the_complete_recording_is_there_and_none_is_zero(host: Host) -> None:
    readings = every_reading(host)
    assert len(readings) > 25
    assert {name: r.absent for name, r in readings.items() if r.absent} == {}
    assert all(r.value != 0 for r in readings.values())


@given(missing=st.sets(st.sampled_from(sorted(MACHINE))))
def test_no_reading_is_zero_because_a_file_was_missing(
    tmp_path_factory: pytest.TempPathFactory, missing: set[str]
) -> None:
    root = tmp_path_factory.mktemp("machine")
    host = write_tree(root, {name: t for name, t in MACHINE.items() if name not in missing})
    for name, reading in every_reading(host).items():
        assert reading.value != 0, name
        assert (reading.value is None) == bool(reading.absent), name


def test_this_machine_answers_for_this_process() -> None:
    host = Host()
    process = host.process(os.getpid())
    assert process.rss_bytes.number and process.rss_bytes.number > 1 << 20
    assert process.cpu_s.number is not None
    memory = host.memory()
    assert memory.total_bytes.number and memory.available_bytes.number
    assert memory.available_bytes.number <= memory.total_bytes.number
    effective, count = host.cpu_effective().number, host.cpu_count().number
    assert effective and count and 0 < effective <= count


def test_a_process_that_is_not_there_is_absent() -> None:
    # One above the largest pid that Linux gives out.
    process = Host().process(2**22 + 1)
    assert process.rss_bytes.value is None
    assert "No such file" in (process.cpu_s.absent or "")
