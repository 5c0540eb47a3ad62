"""CUDA's view of the GPUs that a program would see, as values and as one line of JSON. The JSON line carries
them from the process that queried the driver (`engine.machine.cuda_driver`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum

from engine.machine.reading import Reading

YES, NO = "yes", "no"


class CudaState(StrEnum):
    WORKS = "works"
    NO_LIBRARY = "no_library"
    NO_DEVICE = "no_device"
    """CUDA finds no GPU, and `CUDA_VISIBLE_DEVICES` is not the reason."""
    NONE_VISIBLE = "none_visible"
    """CUDA finds no GPU among those that `CUDA_VISIBLE_DEVICES` shows."""
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One GPU, or one MIG instance. Booleans are stored as words, so that they cannot be mistaken for the numbers 0
    and 1."""

    index: int
    """CUDA's index, as in torch's `cuda:0`."""
    name: Reading
    uuid: Reading
    """Hexadecimal with dashes and without NVML's `GPU-` or `MIG-`."""
    pci_address: Reading
    """PCI address, such as `00000000:3b:00.0`."""
    total_bytes: Reading
    """Memory CUDA may allocate from, used or not. On an integrated GPU it is the host's."""
    compute_capability: Reading
    """Compute capability, such as `9.0`."""
    multiprocessors: Reading
    l2_bytes: Reading
    integrated: Reading
    """Whether the GPU has no memory of its own and uses the host's: the only test for a unified-memory machine."""
    managed_memory: Reading
    concurrent_managed_access: Reading
    """Whether the CPU may touch managed memory while a kernel runs."""
    pageable_memory_access: Reading
    """Whether kernels may read any memory of the process."""
    uses_host_page_tables: Reading
    host_native_atomics: Reading
    unified_addressing: Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    state: CudaState
    count: Reading
    """Number of visible GPUs, or why there are none."""
    driver: Reading
    """The newest CUDA version that the driver supports, as `13.0`."""
    visible: str | None
    """`CUDA_VISIBLE_DEVICES`; None when it is not set."""
    devices: tuple[CudaDevice, ...] = field(default=())


def to_json(facts: CudaFacts) -> str:
    return json.dumps(asdict(facts), allow_nan=False)


def from_json(line: str) -> CudaFacts:
    """Parse the output of `to_json`."""
    record = json.loads(line)
    devices = (
        CudaDevice(
            index=int(device["index"]),
            **{f.name: Reading(**device[f.name]) for f in fields(CudaDevice)[1:]},
        )
        for device in record["devices"]
    )
    return CudaFacts(
        state=CudaState(record["state"]),
        count=Reading(**record["count"]),
        driver=Reading(**record["driver"]),
        visible=record["visible"],
        devices=tuple(devices),
    )
