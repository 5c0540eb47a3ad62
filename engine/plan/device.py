"""The device of a run: its precision, threads, allocator and available memory.

The allocator is chosen from facts that need no CUDA context, because it cannot be changed once the process
holds one. The available memory is read once, before the run allocates anything, and every plan is
compared with that reading.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
"""Host memory left to other processes and to the interpreter when a run computes on the CPU, in bytes."""
CONTEXT_BYTES = 768 * 2**20
"""Device memory of a process outside torch's allocator, in bytes: CUDA's context and the code of kernels. On an H100 it
was 0.5 GiB before the first kernel, and up to 0.7 GiB at the end of a run."""
FRAGMENTS_SHARE = 0.03
"""Share of the allocator's limit that a plan leaves for fragmentation, 0 to 1; up to 0.025 was measured."""
DEVICE_SHARE = 0.95
"""Largest share of a GPU's total memory that a plan uses, 0 to 1; the rest is for fragmentation and for later
allocations of the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDevice:
    device: torch.device
    memory: MemoryScope
    """The allocator scope in which weights are allocated."""
    available: Reading
    """Bytes of the device's memory that this run may use."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None


def set_up_device(
    spec: RunSpec, log: Callable[[Decision | CompiledLibrary], None]
) -> tuple[RunSpec, ComputeDevice]:
    """Choose and set up device, allocator, precision and threads. Log each decision as it is made, and return the spec
    with the decisions."""
    chosen = choose_device(spec.compute.device)
    log(chosen)
    device = torch.device(chosen.choice)
    # Only a process that will compute on the GPU queries CUDA itself.
    facts = read_facts(cuda=ask_here()) if device.type == "cuda" else read_facts()
    allocator = choose_allocator(spec.memory.allocator, facts, device.type)
    log(allocator)
    memory = memory_scope(allocator.choice, device)
    if memory.compiled is not None:
        log(memory.compiled)
    limit_bytes = round(spec.memory.limit_gib * 2**30)
    if limit_bytes and device.type == "cuda" and allocator.choice == "native":
        limit_allocator(limit_bytes)
    precision = choose_precision("student.precision", spec.student.precision, device.type)
    log(precision)
    threads = choose_threads(spec.compute.threads)
    log(threads)
    torch.set_num_threads(int(threads.choice))
    # Only logged here: the supervisor sets it in the environment, which OpenMP has read before this line runs.
    wait = choose_thread_wait(spec.compute.thread_wait, os.environ)
    log(wait)
    # This call makes torch import its compiler, which takes more than a second, so it is made only if the
    # setting changes.
    if spec.compute.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(spec.compute.deterministic)
    torch.manual_seed(spec.train.seed)
    decided = {d.knob: d.choice for d in (chosen, allocator, precision, threads, wait)}
    return spec.with_values(decided), ComputeDevice(
        device=device,
        memory=memory,
        available=limited(_available(device, facts), limit_bytes, on_gpu=device.type == "cuda"),
    )


def _available(device: torch.device, facts: DeviceFacts) -> Reading:
    """Return the device memory that is available to this run now."""
    if device.type != "cuda":
        pools = [facts.memory.available_bytes, facts.cgroup_memory.headroom_bytes]
        known = [pool for pool in pools if pool.number is not None]
        if not known:
            return absent(str(pools[0].absent), pools[0].source)
        smallest = min(known, key=lambda pool: pool.number or 0)
        usable_bytes = max(0, int(smallest.number or 0) - HOST_RESERVE_BYTES)
        return measured(usable_bytes, f"{smallest.source} less {format_bytes(HOST_RESERVE_BYTES)}")
    if facts.has_integrated_gpu:
        return facts.memories[0].usable_bytes
    free, total = torch.cuda.mem_get_info(device)
    return measured(
        min(free, round(DEVICE_SHARE * total)),
        f"cudaMemGetInfo free, at most {DEVICE_SHARE:.0%} of total",
    )


def limit_allocator(limit_bytes: int) -> None:
    """Limit what torch's allocator reserves on the current GPU, including its cache, to `limit_bytes` less the memory
    of CUDA's context and kernels (CONTEXT_BYTES)."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, max(0, limit_bytes - CONTEXT_BYTES) / total)
    )


def limited(available: Reading, limit_bytes: int, *, on_gpu: bool) -> Reading:
    """Return the memory to plan with: at most `limit_bytes`, of which a process on a GPU also needs some for CUDA's
    context and for fragmentation. 0 means no limit."""
    if not limit_bytes:
        return available
    planned, source = limit_bytes, "memory.limit_gib"
    if on_gpu:
        planned = round((1 - FRAGMENTS_SHARE) * max(0, limit_bytes - CONTEXT_BYTES))
        source += f" less {format_bytes(limit_bytes - planned)} for CUDA's context and fragments"
    available_bytes = available.number
    return (
        available
        if available_bytes is not None and available_bytes <= planned
        else measured(planned, source)
    )
