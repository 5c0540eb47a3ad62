"""Report what this machine is, what a run can use and measure on it, and what cannot be measured.

engine doctor            for people: every number with its source, then what is missing and what
                         that rules out
engine doctor --json     the same as one JSON value

No torch is loaded and no CUDA context is made here. The CUDA driver and NVML are queried once for everything,
which takes some seconds on a machine with many GPUs. Another process measures one matmul and one copy, and the best
that was ever measured is kept in the user's cache: alerts compare with it what each part of a step takes.

Exit code: 0 the machine can be used and everything that a run reads can be read (a machine without
a GPU too), 2 something cannot be measured, 1 something is broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.cli.answers import answer
from engine.cli.arguments import add_json
from engine.terminal import columns_of, say

if TYPE_CHECKING:
    from engine.machine.doctor import Diagnosis
    from engine.machine.reading import Reading

NARROWEST, WIDEST = 40, 120
"""Minimum and maximum width of the report, in columns."""

HELP = "report what this machine can do, and what cannot be measured on it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.spec.environment import sets_from_environment

    wanted = dict(assignment.split("=", 1) for assignment in sets_from_environment(os.environ))
    diagnosis = _examine(wanted.get("memory.allocator", "auto"))
    # A pipe has no width: then COLUMNS, or 100.
    width = min(max(columns_of(sys.stdout, 100), NARROWEST), WIDEST)
    lines = report_lines(diagnosis, width)
    return answer(arguments, "doctor", diagnosis.as_json(), lines, diagnosis.verdict.exit_code)


def _examine(wanted_allocator: str) -> Diagnosis:
    from engine.machine.cuda_driver import ask_in_child
    from engine.machine.doctor import diagnose
    from engine.machine.facts import read_facts
    from engine.machine.nvml import open_nvml
    from engine.machine.rates import measure_in_child
    from engine.machine.reading import Reading, absent, measured
    from engine.machine.surroundings import read_surroundings
    from engine.runtime.c_library import COMPILERS
    from engine.watch.exit_cause import find_kernel_line

    _say("asking the CUDA driver")
    cuda = ask_in_child()
    nvml = open_nvml()
    facts = read_facts(nvml=nvml, cuda=cuda)
    gpu_readings = []
    if not isinstance(nvml, Reading):
        _say(f"asking NVML about {nvml.count} GPUs")
        for gpu in range(nvml.count):
            nvml.fast(gpu)
        # The performance counters are means between two calls.
        time.sleep(0.1)
        gpu_readings = [nvml.fast(gpu) | nvml.slow(gpu) for gpu in range(nvml.count)]
        nvml.close()
    _say("reading the kernel's log")
    # No process has the number 0, so this only tests whether the log can be read.
    _, unreadable = find_kernel_line(0)
    kernel_log = (
        measured("readable", "dmesg") if unreadable is None else absent(unreadable, "dmesg")
    )
    _say("measuring a matmul and a copy")
    matmul, copy = measure_in_child()
    surroundings = replace(
        read_surroundings(kernel_log, COMPILERS), matmul_flops_per_s=matmul, copy_bytes_per_s=copy
    )
    return diagnose(facts, gpu_readings, surroundings, wanted_allocator)


def _say(text: str) -> None:
    say(f"engine doctor: {text}")


def report_lines(diagnosis: Diagnosis, width: int) -> list[str]:
    """Render the diagnosis for people, wrapped at `width`; only longer words exceed it."""
    out: list[str] = []

    def section(title: str, lines: Iterator[str]) -> None:
        body = list(lines)
        if not body:
            return
        out.extend(["", title] if out else [title])
        for line in body:
            indent = len(line) - len(line.lstrip()) + 2
            out.extend(
                textwrap.wrap(
                    f"  {line}",
                    width,
                    subsequent_indent=" " * (indent + 2),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )

    surroundings = diagnosis.surroundings
    section("Machine", iter(diagnosis.facts.lines()))
    section("Versions", (f"{name}: {_value(r)}" for name, r in surroundings.versions.items()))
    section("Around a run", _surroundings(diagnosis))
    section("Memory allocator", iter(diagnosis.allocator.lines()))
    for gpu, readings in enumerate(diagnosis.gpu_readings):
        section(
            f"Readings of a run, GPU {gpu}",
            (f"{name}: {_value(r)}" for name, r in readings.items()),
        )
    section("Broken", iter(diagnosis.broken))
    for counts, title in (
        (True, "Cannot be measured here"),
        (False, "Not here, and not needed by a run"),
    ):
        section(
            title,
            (
                f"{m.what}: {m.reason}. Rules out: {m.rules_out}."
                for m in diagnosis.missing
                if m.counts == counts
            ),
        )
    section("Verdict", iter([str(diagnosis.verdict)]))
    return out


def _value(reading: Reading) -> str:
    return f"{reading.absent}" if reading.value is None else f"{reading.value} ({reading.source})"


def _surroundings(diagnosis: Diagnosis) -> Iterator[str]:
    surroundings = diagnosis.surroundings
    for name, reading in (
        ("C compiler", surroundings.c_compiler),
        ("kernel log", surroundings.kernel_log),
        ("attaching to a trainer", surroundings.attach),
        ("py-spy", surroundings.py_spy),
        ("memory pressure, all tasks, %", surroundings.memory_pressure_pct),
        ("OOM kills since boot", surroundings.vmstat_oom_kill),
        ("OOM kills of the control group", surroundings.memcg_oom_kill),
        ("NVIDIA GPUs on the PCI bus", surroundings.pci_gpus),
        ("matmul, FLOP/s", surroundings.matmul_flops_per_s),
        ("copy, bytes/s", surroundings.copy_bytes_per_s),
    ):
        yield f"{name}: {_value(reading)}"
