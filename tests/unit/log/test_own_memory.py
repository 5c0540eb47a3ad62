"""What a trainer says of its own memory: said, read, sampled, shown, and judged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.log.events import HostSample, MemoryPlanned
from engine.log.folder import RunFolder
from engine.log.held import (
    ALLOCATOR,
    PROCESS,
    SPACING_S,
    Held,
    MemoryWriter,
    forget_held,
    held_readings,
    read_held,
)
from engine.log.text import device_lines
from engine.log.view import RunView
from engine.machine.reading import absent
from engine.machine.sampler import Sampler
from engine.train.to_events import trainer_memory
from tests.support.diagnosing import GIB, Log, at, quiet, raised
from tests.support.judged import numbers_of
from tests.support.run_events import example_of, fold_events, numbered, opened

NO_NVML = absent("no NVIDIA driver library on this machine", "nvmlInit")
ON_GPU = Held(source=ALLOCATOR, held_bytes=3 * GIB, reserved_bytes=5 * GIB, peak_bytes=4 * GIB)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_said_is_what_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert read_held(run) is None
    MemoryWriter(run, lambda: ON_GPU).record(7)
    found = read_held(run)
    assert found is not None and found.step == 7
    assert (found.held_bytes, found.reserved_bytes, found.peak_bytes) == (3 * GIB, 5 * GIB, 4 * GIB)
    forget_held(run)
    assert read_held(run) is None


def test_it_is_said_once_a_second_and_asked_no_more_often(tmp_path: Path) -> None:
    asked: list[int] = []
    clock = Clock()

    def measure() -> Held:
        asked.append(1)
        return ON_GPU

    writer = MemoryWriter(RunFolder(tmp_path), measure, clock=clock)
    for step in range(1, 101):
        writer.record(step)
        clock.now_s += SPACING_S / 10
    assert len(asked) == 10
    found = read_held(RunFolder(tmp_path))
    assert found is not None and found.step > 85


def test_a_file_that_is_torn_or_of_another_version_is_not_known(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    MemoryWriter(run, lambda: ON_GPU).record(1)
    data = (tmp_path / "memory.held").read_bytes()
    for spoilt in (data[:-1], b"", data[:8] + b"\x09" + data[9:]):
        (tmp_path / "memory.held").write_bytes(spoilt)
        assert read_held(run) is None
        reasons = {reading.absent for reading in held_readings(run).values()}
        assert reasons == {"the trainer has recorded no step yet"}


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    MemoryWriter(RunFolder(tmp_path / "gone"), lambda: ON_GPU).record(1)
    assert read_held(RunFolder(tmp_path / "gone")) is None


def test_on_a_cpu_it_is_the_resident_set_of_the_process() -> None:
    before = trainer_memory(torch.device("cpu"))
    assert before.source == PROCESS and before.reserved_bytes is None
    kept = torch.ones(16 << 20)
    after = trainer_memory(torch.device("cpu"))
    assert after.held_bytes - before.held_bytes > 0.9 * kept.nbytes
    assert after.peak_bytes >= after.held_bytes


def test_on_a_gpu_it_is_what_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {
        "allocated_bytes": {"all": {"current": 3, "peak": 8}, "small_pool": {"current": 1}},
        "reserved_bytes": {"all": {"current": 5, "peak": 9}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: counts)
    found = trainer_memory(torch.device("cuda"))
    assert (found.held_bytes, found.reserved_bytes, found.peak_bytes) == (3.0, 5.0, 8.0)
    assert found.source == ALLOCATOR


def test_a_sample_has_it_beside_the_readings_of_others(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    sampler = Sampler(lambda: None, NO_NVML, own_memory=lambda: held_readings(run))
    first = sampler.sample()[0]
    assert first.fields["memory_held_bytes"] is None and "no step" in first.absent["memory_source"]
    MemoryWriter(run, lambda: trainer_memory(torch.device("cpu"))).record(3)
    second = sampler.sample()[0]
    event = HostSample(**second.fields, absent=second.absent)  # type: ignore[arg-type]
    assert event.memory_source == PROCESS and (event.memory_held_bytes or 0) > 1 << 20
    assert second.absent["memory_reserved_bytes"] == "torch reserves no memory on a CPU"


def view_of(**readings: Any) -> RunView:
    sample = HostSample(host_available_bytes=GIB, host_total_bytes=GIB, **readings)
    return fold_events(RunView(), "device", numbered([opened(1.0), sample]))


def test_it_is_shown_with_who_counted_it() -> None:
    said = view_of(
        memory_held_bytes=3 * GIB,
        memory_reserved_bytes=5 * GIB,
        memory_peak_bytes=4 * GIB,
        memory_source=ALLOCATOR,
    )
    assert said.hosts.values("memory_reserved_bytes") == [5 * GIB]
    text = "job holds 3.0 GiB, 5.0 GiB reserved, 4.0 GiB at its peak (torch.cuda.memory_stats)"
    assert text in "\n".join(device_lines(said))
    on_cpu = view_of(memory_held_bytes=GIB, memory_peak_bytes=GIB, memory_source=PROCESS)
    assert "reserved" not in "\n".join(device_lines(on_cpu))
    # A log of before has no such line, and not a word of it.
    assert "job" not in "\n".join(device_lines(view_of()))


# The rule


def filling(
    held: float, reserved: float, used: float, *, begin: float = 40.0, nvml: bool = True
) -> Log:
    """GiB a minute of each, on a GPU of 141 GiB."""

    def gpu(t: float) -> dict[str, Any]:
        known = {
            "gpu_mem_used_bytes": (begin + 10 + used * t / 60) * GIB,
            "gpu_mem_total_bytes": 141 * GIB,
        }
        return known if nvml else {"absent": {"gpu_mem_used_bytes": "Not Supported"}}

    plan = example_of(MemoryPlanned, available_bytes=119 * GIB, predicted_bytes=60 * GIB)
    return Log(
        count=600,
        gpu=gpu,
        host=lambda t: {
            "memory_held_bytes": (begin + held * t / 60) * GIB,
            "memory_reserved_bytes": (begin + 5 + reserved * t / 60) * GIB,
        },
        extra=[(4.0, at(plan, 4.0))],
    )


@pytest.mark.parametrize(
    ("held", "reserved", "words"),
    [
        (2.0, 2.0, "something is kept from step to step"),
        (0.0, 2.0, "the allocator's memory is fragmented"),
        (0.0, 0.0, "not in torch's allocator"),
        (0.6, 2.0, "the allocator's memory is fragmented"),
    ],
    ids=["leak", "fragments", "others", "mostly fragments"],
)
def test_whose_memory_grows_is_said(held: float, reserved: float, words: str) -> None:
    alert = raised("memory_ceiling", filling(held, reserved, 2.0).case())
    assert words in alert.meaning
    numbers = {name: value for name, value, _ in numbers_of(alert)}
    # Two thirds of five minutes.
    assert numbers["held by tensors, GiB more"] == pytest.approx(held * 310 / 60 * 2 / 3, rel=0.1)
    assert numbers["reserved by the allocator, GiB more"] == pytest.approx(
        reserved * 310 / 60 * 2 / 3, rel=0.1
    )


def test_without_counts_of_the_gpu_the_allocator_is_held_against_the_plan() -> None:
    alert = raised("memory_ceiling", filling(2.0, 2.0, 2.0, nvml=False).case())
    assert "memory that the allocator may take fills up: 119.0 GiB" in alert.text
    fragments = raised("memory_ceiling", filling(0.0, 2.0, 2.0, nvml=False).case())
    assert "expandable_segments" in fragments.no_flip


def test_an_allocator_that_stays_as_it_is_is_quiet() -> None:
    quiet("memory_ceiling", filling(0.0, 0.0, 0.0).case())
    quiet("memory_ceiling", filling(0.0, 0.0, 0.0, nvml=False).case())
    # Rows of changing length: held goes up and down, and nothing more is reserved.
    saw = filling(0.0, 0.0, 0.0)
    saw.host = lambda t: {
        "memory_held_bytes": (40 + 10 * math.sin(t)) * GIB,
        "memory_reserved_bytes": 60 * GIB,
    }
    quiet("memory_ceiling", saw.case())
