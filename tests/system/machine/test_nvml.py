"""NVML through recorded machines: each stands in for the module `pynvml`, with its real exceptions.

A `Machine` answers every call with a value or a return code of nvml.h, and counts the calls.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.log.events import GpuSample
from engine.machine.cuda_driver import ask_in_child
from engine.machine.facts import read_facts
from engine.machine.gpu_facts import clock_event_words
from engine.machine.host import Host
from engine.machine.nvml import find_binding, open_nvml
from engine.machine.reading import Reading
from engine.machine.sampler import Sampler
from tests.support.nvml_machines import (
    CALLS,
    FUNCTION_NOT_FOUND,
    GB10,
    GIB,
    GPM,
    H200,
    NO_PERMISSION,
    NOT_SUPPORTED,
    ORIN,
    TOTAL_ZERO,
    Code,
    Machine,
    memory,
    opened,
    pynvml,
)

LOST, UNKNOWN = Code(15), Code(999)


def values(readings: dict[str, Reading]) -> dict[str, float | int | str | None]:
    return {name: reading.value for name, reading in readings.items()}


def test_a_discrete_gpu_gives_every_reading_in_its_unit() -> None:
    nvml = opened(Machine(H200))
    assert values(nvml.fast(0)) == {
        "gpu_util_pct": 96,
        "gpu_mem_util_pct": 31,
        "gpu_mem_used_bytes": 3 * GIB,
        "gpu_mem_total_bytes": 141 * GIB,
        "gpu_power_w": 345.678,
        "sm_clock_mhz": 1755,
        "clock_event_reasons": "sw_power_cap",
        **dict.fromkeys(("sm_util_pct", "sm_occupancy_pct", "tensor_util_pct", "dram_util_pct")),
    }
    assert values(nvml.slow(0)) == {
        "gpu_temperature_c": 41,
        "gpu_power_limit_w": 600.0,
        "gpu_energy_j": 5000.5,
    }
    facts = nvml.facts(0)
    assert facts.compute_capability.value == "9.0"
    assert facts.memory_total_bytes.value == 141 * GIB
    assert facts.memory_used_bytes.value == 3 * GIB
    assert facts.memory_status.value == "supported"
    assert facts.utilisation_status.value == "supported"
    assert facts.pci_address.value == "00000000:3B:00.0"
    assert facts.addressing_mode.value == "hmm"
    assert facts.power_set_limit_w.value == 650.0
    assert nvml.driver_version().value == "580.159.03"
    assert nvml.cuda_driver_version().value == "13.0"


def test_no_process_list_pcie_or_fan_call_is_ever_made() -> None:
    machine = Machine(H200)
    nvml = opened(machine)
    nvml.facts(0)
    machine.asked.clear()
    nvml.fast(0)
    assert dict(machine.asked) == {
        "nvmlDeviceGetUtilizationRates": 1,
        "nvmlDeviceGetMemoryInfo": 1,
        "nvmlDeviceGetPowerUsage": 1,
        "nvmlDeviceGetClockInfo": 1,
        "nvmlDeviceGetCurrentClocksEventReasons": 1,
        "nvmlGpmSampleGet": 1,
    }
    # The stand-in has no other function: a call of one would have been an absent reading above.


def test_memory_of_a_unified_gpu_is_absent_with_the_reason_and_its_status_says_so() -> None:
    nvml = opened(Machine(GB10))
    fast = nvml.fast(0)
    assert fast["gpu_mem_used_bytes"].absent == "NVML: Not Supported"
    assert fast["gpu_mem_total_bytes"].absent == "NVML: Not Supported"
    assert fast["gpu_power_w"].value == 11.17
    assert fast["gpu_util_pct"].value == 13
    facts = nvml.facts(0)
    assert facts.memory_total_bytes.value is None
    assert facts.memory_status.value == "not supported"
    assert facts.addressing_mode.value == "ats"


@pytest.mark.parametrize("recording", [GB10, TOTAL_ZERO])
def test_memory_utilisation_stuck_at_zero_is_not_a_reading(recording: dict[str, Any]) -> None:
    reading = opened(Machine(recording)).fast(0)["gpu_mem_util_pct"]
    assert reading.value is None
    assert "stuck at 0" in (reading.absent or "")


def test_memory_utilisation_of_zero_is_a_reading_on_a_discrete_gpu() -> None:
    idle = H200 | {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0, memory=0)}
    fast = opened(Machine(idle)).fast(0)
    assert (fast["gpu_util_pct"].value, fast["gpu_mem_util_pct"].value) == (0, 0)


def test_a_total_of_zero_is_no_reading() -> None:
    nvml = opened(Machine(TOTAL_ZERO))
    assert nvml.fast(0)["gpu_mem_used_bytes"].value is None
    assert "total of 0" in (nvml.fast(0)["gpu_mem_total_bytes"].absent or "")
    assert nvml.facts(0).memory_status.value == "total is zero"


def test_a_gpu_that_supports_almost_nothing_has_its_name_and_reasons_for_the_rest() -> None:
    nvml = opened(Machine(ORIN))
    facts = nvml.facts(0)
    assert facts.name.value == "Orin (nvgpu)"
    assert facts.compute_capability.value == "8.7"
    assert facts.utilisation_status.value == "not supported"
    readings = nvml.fast(0) | nvml.slow(0)
    assert {r.absent for r in readings.values()} == {"NVML: Not Supported"}


def test_not_supported_is_asked_once() -> None:
    machine = Machine(ORIN)
    nvml = opened(machine)
    for _ in range(50):
        nvml.fast(0)
    # Memory and clock events have an older form, which is tried before giving up.
    assert machine.asked["nvmlDeviceGetUtilizationRates"] == 1
    assert machine.asked["nvmlDeviceGetPowerUsage"] == 1
    assert machine.asked["nvmlDeviceGetMemoryInfo"] == 2


def test_a_missing_permission_is_asked_once() -> None:
    machine = Machine(H200 | {"nvmlDeviceGetPowerUsage": NO_PERMISSION})
    nvml = opened(machine)
    reasons = {nvml.fast(0)["gpu_power_w"].absent for _ in range(5)}
    assert reasons == {"NVML: Insufficient Permissions"}
    assert machine.asked["nvmlDeviceGetPowerUsage"] == 1


@pytest.mark.parametrize("code", [LOST, UNKNOWN])
def test_a_passing_error_is_asked_again_after_twice_as_many_ticks(code: Code) -> None:
    machine = Machine(H200 | {"nvmlDeviceGetPowerUsage": code})
    nvml = opened(machine)
    asked_at = []
    for tick in range(300):
        before = machine.asked["nvmlDeviceGetPowerUsage"]
        assert nvml.fast(0)["gpu_power_w"].value is None
        if machine.asked["nvmlDeviceGetPowerUsage"] > before:
            asked_at.append(tick)
    gaps = [b - a - 1 for a, b in pairwise(asked_at)]
    assert gaps == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_a_gpu_lost_in_mid_run_is_absent_and_comes_back_with_a_short_memory() -> None:
    machine = Machine(H200)
    nvml = opened(machine)
    nvml.fast(0)
    healthy = machine.gpus[0].copy()
    machine.gpus[0] = dict.fromkeys(healthy, LOST)
    lost = [nvml.fast(0) for _ in range(3)]
    assert {r.absent for readings in lost for r in readings.values()} == {"NVML: GPU is lost"}
    machine.gpus[0] = healthy
    back = [nvml.fast(0)["gpu_power_w"].value for _ in range(3)]
    assert back == [None, None, 345.678]
    machine.gpus[0] = healthy | {"nvmlDeviceGetPowerUsage": UNKNOWN}
    asked = machine.asked["nvmlDeviceGetPowerUsage"]
    for _ in range(3):
        nvml.fast(0)
    assert machine.asked["nvmlDeviceGetPowerUsage"] == asked + 2


def test_a_lost_gpu_is_told_from_one_that_says_nothing() -> None:
    lost = dict.fromkeys(H200, LOST)
    for recording in (lost, H200 | {"nvmlDeviceGetHandleByIndex": LOST}):
        assert opened(Machine(recording)).facts(0).memory_status.value == "lost"
    status = opened(Machine(H200 | {"nvmlDeviceGetMemoryInfo": UNKNOWN})).facts(0).memory_status
    assert status.absent == "NVML: Unknown Error"
    machine = Machine(lost)
    nvml = opened(machine)
    assert nvml.facts(0).memory_status.value == "lost"
    machine.gpus[0] = H200
    assert [nvml.facts(0).memory_status.value for _ in range(2)] == ["lost", "supported"]


def test_an_older_driver_answers_through_the_older_names() -> None:
    old = H200 | {
        "nvmlDeviceGetCurrentClocksEventReasons": FUNCTION_NOT_FOUND,
        "nvmlDeviceGetTemperatureV": FUNCTION_NOT_FOUND,
        "nvmlDeviceGetEnforcedPowerLimit": NOT_SUPPORTED,
    }
    machine = Machine(old)
    name = "nvmlDeviceGetCurrentClocksThrottleReasons"
    machine.gpus[0][name] = 0
    setattr(machine.module, name, machine.call(name))
    nvml = opened(machine)
    reasons = [nvml.fast(0)["clock_event_reasons"] for _ in range(2)]
    assert [r.value for r in reasons] == ["none", "none"]
    assert reasons[0].source == name
    assert machine.asked["nvmlDeviceGetCurrentClocksEventReasons"] == 1
    slow = nvml.slow(0)
    assert slow["gpu_temperature_c"].value == 42
    assert slow["gpu_power_limit_w"].source == "nvmlDeviceGetPowerManagementLimit"


def test_a_binding_without_a_function_is_a_reason() -> None:
    machine = Machine(H200)
    del machine.module.nvmlDeviceGetAddressingMode
    assert "has no such function" in (opened(machine).facts(0).addressing_mode.absent or "")


def test_a_gpu_that_cannot_be_opened_leaves_the_others_alone() -> None:
    broken = H200 | {"nvmlDeviceGetHandleByIndex": NO_PERMISSION}
    nvml = opened(Machine(broken, H200))
    assert nvml.count == 2
    assert {r.value for r in nvml.fast(0).values()} == {None}
    assert nvml.fast(1)["gpu_util_pct"].value == 96


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (12, "no NVIDIA driver library"),
        (9, "driver is not loaded"),
        (18, "differ in version"),
        (999, "Unknown Error"),
    ],
)
def test_nvml_that_does_not_start_is_absent_with_the_reason(code: int, words: str) -> None:
    answer = open_nvml(Machine(H200, init=code).module)
    assert isinstance(answer, Reading)
    assert words in (answer.absent or "")


@pytest.mark.parametrize("count", [0, UNKNOWN])
def test_nvml_without_a_gpu_is_absent_and_closed_again(count: int) -> None:
    machine = Machine(count=count)
    assert isinstance(open_nvml(machine.module), Reading)
    assert not machine.open


def test_a_module_that_is_not_nvidias_is_refused_by_name() -> None:
    answer = open_nvml(ModuleType("pynvml"))
    assert isinstance(answer, Reading)
    assert "not NVIDIA's" in (answer.absent or "")


@pytest.mark.parametrize(
    ("installed", "binding", "warns"),
    [
        ({"nvidia-ml-py": "13.615.71"}, "nvidia-ml-py 13.615.71", False),
        ({"nvidia-ml-py": "13.615.71", "pynvml": "13.0.1"}, "nvidia-ml-py 13.615.71", True),
        ({"pynvml": "8.0.4"}, None, True),
        ({}, None, False),
    ],
)
def test_the_deprecated_distribution_is_named(
    installed: dict[str, str], binding: str | None, warns: bool
) -> None:
    reading, warning = find_binding(installed.get)
    assert reading.value == binding
    assert (warning is not None and "pip uninstall pynvml" in warning) == warns


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, "none"),
        (1, "gpu_idle"),
        (0x24, "sw_power_cap,sw_thermal_slowdown"),
        (0x1FF, None),
        (0x8400, "bit_10,bit_15"),
    ],
)
def test_clock_event_reasons_are_words(mask: int, words: str | None) -> None:
    said = clock_event_words(mask)
    assert said == words if words else said.count(",") == 8


def test_clock_event_words_match_the_bits_of_the_binding() -> None:
    bits = {
        "gpu_idle": pynvml.nvmlClocksEventReasonGpuIdle,
        "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hw_thermal_slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "display_clock_setting": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    }
    assert {name: clock_event_words(bit) for name, bit in bits.items()} == {n: n for n in bits}


@given(
    failing=st.dictionaries(
        st.sampled_from(sorted(CALLS)), st.sampled_from([1, 2, 3, 4, 10, 13, 15, 20, 25, 999])
    ),
    ticks=st.integers(1, 4),
)
def test_no_reading_is_zero_because_a_call_failed(failing: dict[str, int], ticks: int) -> None:
    machine = Machine(H200 | {name: Code(code) for name, code in failing.items()})
    nvml = opened(machine)
    facts = nvml.facts(0)
    readings = {name: getattr(facts, name) for name in facts.__slots__ if name != "index"}
    for _ in range(ticks):
        readings |= nvml.fast(0) | nvml.slow(0)
        for name, reading in readings.items():
            assert reading.value != 0, name
            assert (reading.value is None) == bool(reading.absent), name


def test_facts_of_a_gpu_machine_read_well_and_are_flat(tmp_path: Path) -> None:
    host = Host(proc=tmp_path, cgroups=tmp_path)
    no_cuda = ask_in_child(os.environ | {"CUDA_VISIBLE_DEVICES": "-1"})
    facts = read_facts(host, opened(Machine(H200, GB10)), no_cuda)
    text = "\n".join(facts.lines())
    assert "GPU 0: NVIDIA H200 (nvmlDeviceGetName)" in text
    assert "GPU 0 memory: 141.0 GiB (nvmlDeviceGetMemoryInfo)" in text
    assert "GPU 1 memory: not measured (NVML: Not Supported)" in text
    assert "memory: not measured (not readable: No such file or directory)" in text
    fields = facts.as_event_fields()
    assert fields["gpu_count"] == 2
    assert fields["gpu0_memory_total_bytes"] == 141 * GIB
    assert fields["gpu1_memory_total_bytes"] is None
    assert fields["gpu1_memory_total_bytes_absent"] == "NVML: Not Supported"
    assert all(isinstance(v, str | int | float | None) for v in fields.values())
    assert all(v != 0 for v in fields.values())


def test_the_sampler_gives_one_sample_for_each_gpu_and_repeats_slow_fields() -> None:
    machine = Machine(H200, GB10)
    sampler = Sampler(lambda: None, opened(machine), slow_every=10)
    ticks = [sampler.sample() for _ in range(21)]
    assert {len(samples) for samples in ticks} == {3}
    assert [(s.kind, s.fields.get("index")) for s in ticks[0]] == [
        ("host", None),
        ("gpu", 0),
        ("gpu", 1),
    ]
    assert {samples[1].fields["gpu_temperature_c"] for samples in ticks} == {41}
    for sample in ticks[0][1:]:
        event = GpuSample(**sample.fields, absent=sample.absent)  # type: ignore[arg-type]
        assert event.gpu_temperature_c == 41
    # Three slow ticks (0, 10, 20) of two GPUs.
    assert machine.asked["nvmlDeviceGetTemperatureV"] == 6
    assert machine.asked["nvmlDeviceGetUtilizationRates"] == 42


def test_the_sampler_gives_a_reason_when_it_appears_and_again_when_it_returns() -> None:
    machine = Machine(H200)
    sampler = Sampler(lambda: None, opened(machine))
    sampler.sample()  # the counters have no value before the second tick
    healthy = machine.gpus[0].copy()
    broken = healthy | {"nvmlDeviceGetPowerUsage": UNKNOWN}
    seen = []
    for gpu in (healthy, broken, broken, broken, healthy, healthy, healthy, broken, broken):
        machine.gpus[0] = gpu
        sample = sampler.sample()[1]
        seen.append((sample.fields["gpu_power_w"], sample.absent))
    reason = {"gpu_power_w": "NVML: Unknown Error"}
    assert seen[:3] == [(345.678, {}), (None, reason), (None, {})]
    values_after = [value for value, _ in seen]
    assert values_after.index(345.678, 3) < 7
    assert seen[7] == (None, reason)
    assert seen[8] == (None, {})


def test_performance_counters_are_the_means_between_two_ticks() -> None:
    machine = Machine(H200)
    nvml = opened(machine)
    first = nvml.fast(0)
    assert "two samples" in (first["tensor_util_pct"].absent or "")
    second = values(nvml.fast(0))
    names = ("sm_util_pct", "sm_occupancy_pct", "tensor_util_pct", "dram_util_pct")
    assert [second[name] for name in names] == list(GPM.values())
    assert len(machine.buffers) == 2
    nvml.close()
    assert machine.buffers == [] and not machine.open


def test_the_numbers_of_the_counters_are_those_of_the_binding() -> None:
    from engine.machine.gpm import METRICS

    assert METRICS == {
        "sm_util_pct": pynvml.NVML_GPM_METRIC_SM_UTIL,
        "sm_occupancy_pct": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
        "tensor_util_pct": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        "dram_util_pct": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    }
    question = pynvml.c_nvmlGpmMetricsGet_t()
    question.metrics[len(METRICS) - 1].metricId = 1  # there is room for all of them


@pytest.mark.parametrize(
    ("recording", "words"),
    [
        (GB10, "this GPU has no GPM counters"),
        (H200 | {"nvmlGpmQueryDeviceSupport": FUNCTION_NOT_FOUND}, "Function Not Found"),
        (H200 | {"nvmlDeviceGetHandleByIndex": NO_PERMISSION}, "cannot open GPU 0"),
    ],
)
def test_a_gpu_without_counters_says_so_once_and_takes_no_sample(
    recording: dict[str, Any], words: str
) -> None:
    machine = Machine(recording)
    nvml = opened(machine)
    for _ in range(5):
        assert words in (nvml.fast(0)["tensor_util_pct"].absent or "")
    assert machine.asked["nvmlGpmSampleGet"] == 0
    assert machine.asked["nvmlGpmQueryDeviceSupport"] <= 1


def test_a_binding_without_the_counters_is_a_reason() -> None:
    machine = Machine(H200)
    del machine.module.nvmlGpmQueryDeviceSupport
    assert "no GPM functions" in (opened(machine).fast(0)["sm_util_pct"].absent or "")


def test_one_counter_that_fails_or_is_no_number_leaves_the_others_alone() -> None:
    machine = Machine(H200)
    machine.gpm |= {5: NOT_SUPPORTED, 10: float("nan")}
    nvml = opened(machine)
    nvml.fast(0)
    fast = nvml.fast(0)
    assert fast["tensor_util_pct"].absent == "NVML: Not Supported"
    assert fast["dram_util_pct"].absent == "NVML gave no number"
    assert fast["sm_util_pct"].value == 61.5


def test_a_sample_that_fails_is_never_compared_with() -> None:
    machine = Machine(H200)
    nvml = opened(machine)
    nvml.fast(0)
    machine.gpus[0] = H200 | {"nvmlGpmSampleGet": UNKNOWN}
    assert nvml.fast(0)["sm_util_pct"].absent == "NVML: Unknown Error"
    machine.gpus[0] = H200
    said = [nvml.fast(0)["sm_util_pct"] for _ in range(3)]
    assert [r.value for r in said] == [None, 61.5, 61.5]
    assert "two samples" in (said[0].absent or "")


UNDER_REPORTS = GB10 | {"nvmlDeviceGetMemoryInfo": memory(8128 << 20, 199 << 20)}
HOST_TOTAL = GB10 | {"nvmlDeviceGetMemoryInfo": memory(119 * GIB, 30 * GIB)}
THOR = ORIN | {
    "nvmlDeviceGetName": "NVIDIA Thor",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=7, memory=0),
    "nvmlDeviceGetTemperatureV": 38,
}
PART_OF_A_GPU = H200 | {
    "nvmlDeviceGetUtilizationRates": NOT_SUPPORTED,
    "nvmlDeviceGetPowerUsage": NO_PERMISSION,
    "nvmlGpmQueryDeviceSupport": Code(3),
}
NUMA = H200 | {"nvmlDeviceGetAddressingMode": 2, "nvmlDeviceGetNumaNodeId": 1}


@pytest.mark.parametrize(
    ("recording", "known", "unknown"),
    [
        (UNDER_REPORTS, {"gpu_mem_total_bytes": 8128 << 20, "gpu_util_pct": 13}, "tensor_util_pct"),
        (HOST_TOTAL, {"gpu_mem_total_bytes": 119 * GIB}, "sm_util_pct"),
        (THOR, {"gpu_util_pct": 7}, "gpu_mem_used_bytes"),
        (PART_OF_A_GPU, {"gpu_mem_used_bytes": 3 * GIB}, "gpu_util_pct"),
        (NUMA, {"gpu_util_pct": 96, "gpu_mem_used_bytes": 3 * GIB}, ""),
    ],
    ids=["n1x", "host-total", "thor", "mig", "numa-fb"],
)
def test_a_kind_of_machine_gives_what_it_knows_and_a_reason_for_the_rest(
    recording: dict[str, Any], known: dict[str, object], unknown: str
) -> None:
    sampler = Sampler(lambda: None, opened(Machine(recording)))
    sampler.sample()
    first = sampler.sample()[1]
    assert {name: first.fields[name] for name in known} == known
    for name, value in first.fields.items():
        assert value is None or name in ("index", "gpu_mem_util_pct") or value != 0, name
    if unknown:
        assert first.fields[unknown] is None


@pytest.mark.gpu
def test_a_real_gpu_gives_every_fast_reading() -> None:
    nvml = open_nvml()
    if isinstance(nvml, Reading):
        pytest.skip(str(nvml.absent))
    facts = nvml.facts(0)
    assert str(facts.uuid.value).startswith("GPU-")
    assert nvml.fast(0)["gpu_util_pct"].value is not None
    counters = nvml.fast(0)
    print({name: str(reading) for name, reading in counters.items()})
    for name in ("sm_util_pct", "sm_occupancy_pct", "tensor_util_pct", "dram_util_pct"):
        value = counters[name].number
        assert counters[name].absent or (value is not None and 0 <= value <= 100), name
    nvml.close()


def test_the_memory_of_a_process_and_its_children_is_theirs_alone_or_unknown(
    tmp_path: Path,
) -> None:
    nvml, ours = opened(Machine(H200)), tmp_path / "proc"
    (ours / "41").mkdir(parents=True)
    (ours / "41/cmdline").write_bytes(b"/usr/bin/python3.12\0train.py\0")
    own, listed = nvml.processes(0, {41, 42}, ours)
    assert own.value == 3 * GIB
    assert str(listed.value).startswith(f"41 {2 * GIB} python3.12;42 ")
    assert str(listed.value).endswith("43 - ?")
    assert "does not say how much" in (nvml.processes(0, {41, 43}, ours)[0].absent or "")
    # Elsewhere than in the first namespace of the kernel, NVML's numbers are of other processes.
    for reading in nvml.processes(0, {7}, tmp_path):
        assert "by the host's ids" in (reading.absent or "")
    refused = opened(Machine(H200 | {"nvmlDeviceGetComputeRunningProcesses": NOT_SUPPORTED}))
    assert all(reading.absent for reading in refused.processes(0, {41}, ours))
