"""Which kind of memory each machine has, and what may be used of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.machine.cuda_facts import YES
from engine.machine.gpu_facts import NOT_SUPPORTED
from engine.machine.host import usable_host_bytes
from engine.machine.memory_class import (
    MemoryClass,
    classify,
    match_gpus,
    usable_own_bytes,
)
from engine.machine.reading import absent, measured
from tests.support.machines import (
    GIB,
    MACHINES,
    UNSUPPORTED,
    cgroup_memory,
    cuda,
    cuda_facts,
    device_facts,
    gpu,
    host_memory,
    uuid_of,
)


@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_has_its_class(name: str) -> None:
    machine = MACHINES[name]
    assert tuple(memory.kind for memory in machine.facts.memories) == machine.kinds
    assert all(memory.reason for memory in machine.facts.memories)


@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_has_its_usable_memory_or_a_reason(name: str) -> None:
    machine = MACHINES[name]
    usable = machine.facts.memories[0].usable_bytes
    if machine.usable_gib is None:
        assert usable.value is None and usable.absent
    else:
        assert (usable.number or 0) / GIB == pytest.approx(machine.usable_gib, abs=0.01)
        assert usable.source


def test_every_class_is_met_by_a_machine() -> None:
    assert {kind for machine in MACHINES.values() for kind in machine.kinds} == set(MemoryClass)


@pytest.mark.parametrize("name", MACHINES)
def test_the_facts_of_every_machine_are_flat_and_give_class_and_reason(name: str) -> None:
    facts = MACHINES[name].facts
    fields = facts.as_event_fields()
    for memory in facts.memories:
        subject = memory.subject
        assert fields[f"{subject}_memory_class"] == memory.kind.value
        assert fields[f"{subject}_usable_bytes"] == memory.usable_bytes.value
    assert all(v is None or isinstance(v, str | int | float) for v in fields.values())
    for key, value in fields.items():
        if value is None and f"{key}_source" in fields:
            assert fields[f"{key}_absent"], key
    assert all(line.strip() for line in facts.lines())


@pytest.mark.parametrize(
    ("name", "integrated"),
    [("gb10", True), ("h200", False), ("gh200", False), ("no_gpu", None), ("hidden", None)],
)
def test_whether_memory_may_be_the_hosts_is_known_or_none(
    name: str, integrated: bool | None
) -> None:
    assert MACHINES[name].facts.has_integrated_gpu is integrated


def test_not_supported_alone_does_not_make_a_gpu_unified() -> None:
    card, memory = gpu("some card", memory=NOT_SUPPORTED), host_memory(64 * GIB, 60 * GIB)
    for integrated, kind in (
        (measured("no", "cuda"), MemoryClass.UNKNOWN),
        (absent("CUDA_ERROR_INVALID_VALUE", "cuda"), MemoryClass.UNKNOWN),
        (measured(YES, "cuda"), MemoryClass.UNIFIED_NO_FRAMEBUFFER),
    ):
        device = replace(cuda("some card"), integrated=integrated)
        assert classify(card, device, memory, cgroup_memory(), by="uuid").kind is kind
    assert classify(card, None, memory, cgroup_memory(), by="hidden").kind is MemoryClass.UNKNOWN


def test_a_large_card_in_a_small_host_is_discrete() -> None:
    small = host_memory(64 * GIB, 60 * GIB)
    for total_mib in (64 * 1024, 143771):
        card = gpu("NVIDIA H200", total_mib=total_mib)
        found = classify(card, cuda("NVIDIA H200"), small, cgroup_memory(), by="uuid")
        assert found.kind is MemoryClass.DISCRETE


def test_an_integrated_gpu_whose_host_is_not_known_is_not_judged() -> None:
    host = replace(host_memory(GIB, GIB), total_bytes=absent("not readable", "/proc/meminfo"))
    device = cuda("N1X", integrated=YES)
    found = classify(gpu("N1X", total_mib=8128), device, host, cgroup_memory(), by="uuid")
    assert found.kind is MemoryClass.UNKNOWN and "not readable" in found.reason
    assert found.usable_bytes.value is None


GB = st.integers(0, 2**42)


@given(total=GB, share=st.floats(0, 1), room=st.none() | GB, swap=GB)
def test_usable_host_memory_keeps_the_reserve_and_never_counts_swap(
    total: int, share: float, room: int | None, swap: int
) -> None:
    available = int(share * total)
    usable = usable_host_bytes(host_memory(total, available, swap), cgroup_memory(room)).number
    assert usable is not None and usable >= 0
    assert usable == usable_host_bytes(host_memory(total, available), cgroup_memory(room)).number
    reserve = max(8 * GIB, int(0.08 * total))
    bounds = [max(0, available - reserve)] + ([] if room is None else [room])
    assert usable == min(bounds)


MIBS = st.integers(1, 200_000)


@given(total=MIBS, used=MIBS, cuda_total=MIBS)
def test_usable_memory_of_a_card_is_free_and_leaves_a_margin(
    total: int, used: int, cuda_total: int
) -> None:
    card = gpu("card", total_mib=total, used_mib=used)
    usable = usable_own_bytes(card, cuda("card", total_bytes=cuda_total * 1024**2)).number
    assert usable is not None
    whole = min(total, cuda_total)
    free = max(0, whole - used) * 1024**2
    assert usable == min(free, int(0.95 * whole * 1024**2))


def test_the_source_names_the_bound_that_counted() -> None:
    memory = host_memory(64 * GIB, 60 * GIB)
    assert "MemAvailable - max(8 GiB, 8%" in usable_host_bytes(memory, cgroup_memory()).source
    assert "memory.max" in usable_host_bytes(memory, cgroup_memory(GIB)).source
    device = cuda("card", total_bytes=99 * 1024**2)
    half, little = (gpu("card", total_mib=100, used_mib=used) for used in (50, 1))
    assert usable_own_bytes(half, device).source.startswith("cuDeviceTotalMem - used by nvml")
    assert usable_own_bytes(little, device).source == "95% of cuDeviceTotalMem"


def test_usable_memory_needs_both_parts() -> None:
    no_available = replace(
        host_memory(GIB, GIB), available_bytes=absent("not readable", "/proc/meminfo")
    )
    assert usable_host_bytes(no_available, cgroup_memory(GIB)).absent == "not readable"
    unused = gpu("card", total_mib=100, used_mib=None)
    assert usable_own_bytes(unused, cuda("card")).absent == UNSUPPORTED


def many(order: list[int], shown: list[int]) -> tuple[list[int | None], list[int]]:
    """GPUs `order` in NVML, of which CUDA shows `shown`: (NVML number per CUDA number, the rest)."""
    gpus = [
        gpu(f"GPU {g}", index=i, uuid=uuid_of(g), pci=f"00000000:{g:02X}:00.0")
        for i, g in enumerate(order)
    ]
    devices = [
        cuda(f"GPU {g}", index=i, uuid=uuid_of(g), pci=f"0000:{g:02x}:00.0")
        for i, g in enumerate(shown)
    ]
    matches = match_gpus(gpus, devices)
    assert all(m.by == "uuid" for m in matches if m.gpu and m.cuda)
    assert all(m.gpu.name.value == m.cuda.name.value for m in matches if m.gpu and m.cuda)
    pairs = [m.gpu.index if m.gpu else None for m in matches if m.cuda]
    return pairs, [m.gpu.index for m in matches if m.gpu and not m.cuda]


@given(order=st.permutations(range(8)), shown=st.permutations(range(8)), count=st.integers(0, 8))
def test_gpus_meet_at_their_uuid_whatever_the_numbers(
    order: list[int], shown: list[int], count: int
) -> None:
    pairs, rest = many(order, shown[:count])
    assert pairs == [order.index(g) for g in shown[:count]]
    assert sorted(rest) == sorted(set(range(8)) - set(pairs))


def test_two_parts_of_one_divided_gpu_meet_the_whole_by_pci_address() -> None:
    whole = gpu("NVIDIA H200", total_mib=143771)
    parts = [cuda("1g.18gb", index=i, uuid=uuid_of(70 + i)) for i in range(2)]
    matches = match_gpus([whole], parts)
    assert [(m.gpu, m.by) for m in matches] == [(whole, "PCI address")] * 2
    facts = device_facts((whole,), cuda_facts(*parts), host_memory(GIB, GIB), cgroup_memory())
    assert [memory.subject for memory in facts.memories] == ["cuda0", "cuda1"]
    assert all("MIG" in str(memory.usable_bytes.absent) for memory in facts.memories)


def test_gpus_without_anything_to_compare_meet_only_when_there_is_one_of_each() -> None:
    def nameless(index: int) -> object:
        return gpu("Orin (nvgpu)", index=index, uuid=None, pci=None)

    (only,) = match_gpus([nameless(0)], [cuda("Orin")])  # type: ignore[list-item]
    assert only.gpu is not None and only.cuda is not None and "only GPU" in only.by
    two = match_gpus([nameless(0), nameless(1)], [cuda("Orin")])  # type: ignore[list-item]
    assert [(m.gpu is None, m.cuda is None) for m in two] == [
        (True, False),
        (False, True),
        (False, True),
    ]


def test_two_gpus_with_different_uuids_and_places_are_two() -> None:
    other = cuda("card", uuid=uuid_of(9), pci="0000:99:00.0")
    matches = match_gpus([gpu("card")], [other])
    assert [(m.gpu is None, m.cuda is None) for m in matches] == [(True, False), (False, True)]
    assert {m.by for m in matches} == {"NVML does not list it", "CUDA does not show it"}
