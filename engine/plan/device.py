"""What a run computes with: device, precision, threads, allocator, and how much memory there is for it.

The allocator is chosen from facts that need no CUDA: once a process holds a CUDA context, its allocator
can no longer be another. What the run may take is read once, before anything of it is made, and is what
every plan is held against.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass

import torch

from engine.decision import Decision
from engine.machine.allocator import choose_allocator
from engine.machine.cuda_driver import ask_here
from engine.machine.facts import DeviceFacts, read_facts
from engine.machine.reading import Reading, absent, measured
from engine.machine.threads import choose_thread_wait
from engine.runtime.c_library import CompiledLibrary
from engine.runtime.device import choose_device, choose_precision, choose_threads
from engine.runtime.managed import MemoryScope, memory_scope
from engine.spec import RunSpec
from engine.units import format_bytes

HOST_RESERVE_BYTES = 512 * 2**20
"""Left to everything else when a run computes on the CPU."""
DEVICE_SHARE = 0.95
"""Of a GPU's own memory; the rest goes to fragments and to what the driver takes later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    device: torch.device
    precision: str
    """Of the student's products."""
    memory: MemoryScope
    """Where weights are made."""
    available: Reading
    """Bytes of the device's memory that this run may take."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None


def set_up_device(
    spec: RunSpec,
) -> Generator[Decision | CompiledLibrary, None, ComputeDevice]:
    """Device, allocator, precision and threads, set up; yields each decision as it is made."""
    chosen = choose_device(spec.compute.device)
    yield chosen
    device = torch.device(chosen.choice)
    # A process that will compute on the GPU may ask CUDA itself; another leaves it alone.
    facts = read_facts(cuda=ask_here()) if device.type == "cuda" else read_facts()
    allocator = choose_allocator(spec.memory.allocator, facts, device.type)
    yield allocator
    memory = memory_scope(allocator.choice, device)
    if memory.compiled is not None:
        yield memory.compiled
    limit_bytes = round(spec.memory.limit_gib * 2**30)
    if limit_bytes and device.type == "cuda" and allocator.choice == "native":
        limit_allocator(limit_bytes)
    precision = choose_precision("student.precision", spec.student.precision, device.type)
    yield precision
    threads = choose_threads(spec.compute.threads)
    yield threads
    torch.set_num_threads(int(threads.choice))
    # Set by the supervisor: OpenMP has read its environment before this line can run.
    yield choose_thread_wait(spec.compute.thread_wait, os.environ)
    # torch loads its compiler to set this, for more than a second: only where something changes.
    if spec.compute.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(spec.compute.deterministic)
    torch.manual_seed(spec.train.seed)
    return ComputeDevice(
        device=device,
        precision=precision.choice,
        memory=memory,
        available=limited(_available(device, facts), limit_bytes),
    )


def _available(device: torch.device, facts: DeviceFacts) -> Reading:
    """What this run may take of the memory that it computes in, now."""
    if device.type != "cuda":
        pools = [facts.memory.available_bytes, facts.cgroup_memory.headroom_bytes]
        known = [pool for pool in pools if pool.number is not None]
        if not known:
            return absent(str(pools[0].absent), pools[0].source)
        least = min(known, key=lambda pool: pool.number or 0)
        room = max(0, int(least.number or 0) - HOST_RESERVE_BYTES)
        return measured(room, f"{least.source} less {format_bytes(HOST_RESERVE_BYTES)}")
    if facts.has_integrated_gpu:
        return facts.memories[0].usable_bytes
    free, total = torch.cuda.mem_get_info(device)
    return measured(min(free, round(DEVICE_SHARE * total)), "cuMemGetInfo")


def limit_allocator(limit_bytes: int) -> None:
    """Has torch's allocator take no more than this of the current GPU, what it keeps for later included."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))


def limited(available: Reading, limit_bytes: int) -> Reading:
    """What is there, and no more than memory.limit_gib; 0 is no limit."""
    there = available.number
    if not limit_bytes or (there is not None and there <= limit_bytes):
        return available
    return measured(limit_bytes, "memory.limit_gib")
