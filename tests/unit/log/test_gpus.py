"""The table of GPUs: what a cell says of readings that are missing, shared or slowed, and how it fits a terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.log.events import GpuSample, HostSample
from engine.log.gpus import (
    COLUMNS,
    UNKNOWN,
    GpuTable,
    Process,
    gpu_lines,
    gpu_table,
    read_processes,
)
from engine.log.view import RunView
from tests.support.run_events import fold_events, numbered, opened

GIB = 2**30
WORKING: dict[str, Any] = {
    "gpu_util_pct": 96.0,
    "gpu_mem_used_bytes": 60.0 * GIB,
    "gpu_mem_total_bytes": 80.0 * GIB,
    "family_gpu_mem_bytes": 40.0 * GIB,
    "gpu_power_w": 350.0,
    "gpu_power_limit_w": 700.0,
    "gpu_temperature_c": 61.0,
    "sm_clock_mhz": 1980.0,
    "clock_event_reasons": "none",
    "gpu_processes": f"41 {40 * GIB} python;900 {20 * GIB} ollama",
}


def seen(*samples: dict[str, Any], host: HostSample | None = None) -> RunView:
    readings = [GpuSample(**{"index": at, **sample}) for at, sample in enumerate(samples)]
    events = [opened(1.0), *([host] if host else []), *readings]
    return fold_events(RunView(), "device", numbered(events))


def row(table: GpuTable, at: int = 0) -> dict[str, str]:
    return {c.title: cell.text for c, cell in zip(table.columns, table.rows[at], strict=True)}


def test_a_row_has_the_readings_of_a_gpu() -> None:
    table = gpu_table(seen(WORKING))
    assert row(table) == {
        "GPU": "0",
        "util %": "96",
        "memory GiB": "60.0/80.0",
        "trainer": "40.0",
        "others": "20.0",
        "power W": "350/700",
        "temp C": "61",
        "SM MHz": "1980",
        "low clocks": "",
        "processes": "python 41 40.0 GiB, ollama 900 20.0 GiB",
    }
    shares = {c.title: cell.shares for c, cell in zip(table.columns, table.rows[0], strict=True)}
    assert shares["memory GiB"] == (0.5, 0.25) and shares["power W"] == (0.5,)


def test_a_missing_reading_is_unknown_and_never_zero() -> None:
    lost = {"absent": {"gpu_power_w": "NVML: GPU is lost", "sm_clock_mhz": "NVML: GPU is lost"}}
    table = gpu_table(seen(WORKING, lost))
    found = row(table, 1)
    assert {text for title, text in found.items() if title != "GPU"} == {UNKNOWN}
    assert not any(cell.shares for cell in table.rows[1])
    assert table.reasons == ("GPU 1: power W, SM MHz unknown: NVML: GPU is lost",)
    assert gpu_lines(seen(WORKING, lost), 76)[2].split() == ["1", *[UNKNOWN] * 7]


@pytest.mark.parametrize(
    ("reasons", "words", "is_bad"),
    [
        ("none", "", False),
        ("sw_power_cap", "at the power limit (sw_power_cap)", False),
        ("hw_thermal_slowdown", "slowed down by heat (hw_thermal_slowdown)", True),
        ("bit_40", "bit_40", False),
    ],
)
def test_low_clocks_have_their_reason_and_a_sign_where_a_healthy_gpu_has_none(
    reasons: str, words: str, is_bad: bool
) -> None:
    table = gpu_table(seen(WORKING | {"clock_event_reasons": reasons}))
    assert row(table)["low clocks"] == words
    assert row(table)["SM MHz"] == "1980" + "!" * is_bad


def test_of_one_gpu_the_allocator_bounds_the_memory_of_others_and_of_several_it_does_not() -> None:
    without = {**WORKING, "family_gpu_mem_bytes": None}
    host = HostSample(memory_reserved_bytes=50.0 * GIB)
    one = row(gpu_table(seen(without, host=host)))
    assert (one["trainer"], one["others"]) == ("50.0", "<=10.0")
    two = row(gpu_table(seen(without, without, host=host)))
    assert (two["trainer"], two["others"]) == (UNKNOWN, UNKNOWN)


def test_over_the_whole_run_the_row_has_medians_and_peaks() -> None:
    hot = {"clock_event_reasons": "hw_slowdown", "gpu_temperature_c": 90.0}
    busy = {"gpu_mem_used_bytes": 70.0 * GIB}
    samples = [WORKING, WORKING | hot, WORKING | busy, WORKING | {"gpu_util_pct": 0.0}]
    view = seen(*({**sample, "index": 0} for sample in samples))
    found = row(gpu_table(view, whole_run=True))
    assert found["util %"] == "96" and found["temp C"] == "90" and found["SM MHz"] == "1980!"
    assert found["memory GiB"] == "70.0/80.0" and found["others"] == "30.0"
    assert found["low clocks"] == "heat or power, in 25% of the readings"
    assert "processes" not in found
    assert gpu_table(RunView(), whole_run=True).rows == ()


@pytest.mark.parametrize("width", [20, 38, 56, 76, 100, 118, 160])
def test_eight_gpus_have_a_line_each_at_every_width(width: int) -> None:
    counters = {"sm_util_pct": 80.0, "tensor_util_pct": 40.0, "dram_util_pct": 30.0}
    lines = gpu_lines(seen(*[WORKING | counters] * 8), width)
    assert all(len(line) <= width for line in lines[:9])
    assert [line.split()[0] for line in lines[:9]] == ["GPU", *"01234567"]
    text = "\n".join(lines)
    assert text.isascii()
    assert ("power W" in text) == (width >= 38) and ("tensor %" in text) == (width >= 76)
    # What all of them have in common is said once.
    same = "GPU 0, 1, 2, 3, 4, 5, 6, 7: processes: python 41 40.0 GiB, ollama 900 20.0 GiB"
    assert text.count(same) == 1


def test_columns_have_titles_and_processes_the_form_in_which_they_were_written() -> None:
    assert len({column.title for column in COLUMNS}) == len(COLUMNS)
    assert read_processes("41 - a b;x 1 y;5;") == [Process(41, None, "a b")]
    assert read_processes("9" * 5000 + " 1 y") == []


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "NaN"), (math.inf, "+inf"), (-math.inf, "-inf")]
)
def test_a_reading_that_is_no_number_is_written_out(value: float, words: str) -> None:
    names = ("gpu_util_pct", "gpu_mem_used_bytes", "gpu_power_w", "sm_clock_mhz")
    assert " ".join(gpu_lines(seen(dict.fromkeys(names, value)))).count(words) == 4
