"""Logs of very long runs, as a writer would have written them, in seconds instead of days.

The mix is realistic: steps with their phases, some of them NaN or with an outlying loss; evaluations and
checkpoints; notes; compiles; a reading of the host and of one GPU each second; one resume that repeats some
steps. The numbers have as many digits as real ones, so a line is as long and as slow to read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.log.events import (
    IDLE,
    STEP_PHASES,
    CheckpointSaved,
    Compiled,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    Note,
    RunFinished,
    StepDone,
    TrainerStarted,
)
from engine.log.folder import create_run
from engine.log.write import encode
from tests.support.judged import number_event
from tests.support.run_events import example_of, opened
from tests.support.run_folders import decision, evaluated, model, started

START_UNIX_S = 1_750_000_000.0
STEP_S = 0.1
SAMPLES = 512
"""Number of different steps and readings; each line has its own number and time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A summary of what was written."""

    folder: Path
    events: Path
    steps: int
    lines: int
    """Lines of all logs together."""
    size_bytes: int
    spike: int
    """The only step with a loss of 90."""
    gap: int
    """The only step with a loss of NaN."""


def write_long_run(folder: Path, *, steps: int, resume: bool = True) -> Written:
    """Write a finished run of `steps` steps; with `resume` it was resumed once in its middle."""
    run = create_run(folder, "name = 'long'\n", {})
    spike, gap = steps // 3, steps // 5
    half = steps // 2 if resume else steps
    lines = 0
    with run.events.open("wb") as file:
        seq = _write(file, 0, _trainer(1, half, steps, None, spike, gap))
        if resume:
            # It died some steps after its last checkpoint.
            begin = half - 40
            seq = _write(file, seq, _trainer(begin + 1, steps, steps, begin, spike, gap, half))
        lines += seq
    with run.device.open("wb") as file:
        lines += _write(file, 0, _device(round(steps * STEP_S)))
    with run.watch.open("wb") as file:
        began = [
            (0.0, _line(opened(START_UNIX_S))),
            (0.1, _line(TrainerStarted(trainer_pid=2, supervisor_pid=1))),
        ]
        lines += _write(file, 0, iter(began))
    size = sum(path.stat().st_size for path in (run.events, run.device, run.watch))
    return Written(
        folder=folder,
        events=run.events,
        steps=steps,
        lines=lines,
        size_bytes=size,
        spike=spike,
        gap=gap,
    )


Timed = Iterator[tuple[float, bytes]]


def _line(event: Event) -> bytes:
    """Encode an event without its number and time, which `_write` adds."""
    head, _, tail = encode(event, 0, 0.0).partition(b'"seq":0,"t_s":0.0,')
    assert tail, head
    return tail


def _write(file: Any, seq: int, lines: Timed) -> int:
    """Write lines and return the number of the next one."""
    gathered = []
    for t_s, line in lines:
        gathered.append(b'{"v":1,"seq":%d,"t_s":%.6f,' % (seq, t_s) + line)
        seq += 1
        if len(gathered) == 4096:
            file.writelines(gathered)
            gathered.clear()
    file.writelines(gathered)
    return seq


def _steps() -> list[bytes]:
    """Return steps whose numbers are MARK, to be replaced as text, because a million are written."""
    found, rng = [], random.Random(1)
    for _ in range(SAMPLES):
        ce, kd, step_s = (
            2 + rng.gauss(0, 0.05),
            abs(rng.gauss(0.4, 0.05)),
            STEP_S + rng.random() / 99,
        )
        event = StepDone(
            step=0,
            loss=(ce + kd) / 2,
            ce=ce,
            kd=kd,
            agreement=rng.random(),
            lr=3e-4 * rng.random(),
            grad_norm=abs(rng.gauss(0.7, 0.2)),
            rows=32,
            tokens=8192,
            labelled=8192 - rng.randrange(10),
            step_s=step_s,
            data_s=rng.random() * 1e-4,
            teacher_s=0.008 + rng.random() * 1e-3,
            position=0,
            lowest_kl=rng.random() * 1e-3,
            largest_dz_sum=rng.random() * 1e-6,
            phases={name: step_s * rng.random() for name in (*STEP_PHASES, IDLE)},
        )
        line = _line(event).replace(b"%", b"%%")
        line = line.replace(b'"step":0,', b'"step":%d,').replace(
            b'"position":0,', b'"position":%d,'
        )
        found.append(line)
    return found


def _trainer(
    first: int, last: int, total: int, resumed: int | None, spike: int, gap: int, before: int = 0
) -> Timed:
    """Return one session of the trainer: steps first..last; `before` is how far an earlier session came."""
    origin = START_UNIX_S + (STEP_S * before + 60 if resumed else 0)
    yield 0.0, _line(opened(origin))
    for event in (
        decision("teacher.backend", "dequantized", "it fits"),
        model("student"),
        started("long", total, resumed),
    ):
        yield 0.5, _line(event)
    yield 0.6, _line(example_of(Compiled))
    samples = _steps()
    for number in range(first, last + 1):
        t_s = 1.0 + STEP_S * (number - first)
        line = samples[number % SAMPLES] % (number, 32 * number)
        if number in (spike, gap):
            fields = msgspec.json.decode(b"{" + line)
            del fields["kind"]
            loss = 90.0 if number == spike else float("nan")
            line = _line(StepDone(**(fields | {"loss": loss})))
        if number == gap:
            yield t_s, _line(number_event(step=number, field="loss", value="nan"))
        yield t_s, line
        if number % 500 == 0:
            yield t_s, _line(evaluated(number, "student", 2.0 + 1 / number))
        if number % 5000 == 0:
            yield (
                t_s,
                _line(
                    example_of(CheckpointSaved, step=number, path=f"checkpoints/step-{number:08d}")
                ),
            )
        if number % 20_000 == 0:
            yield t_s, _line(Note(level="info", text=f"{number} steps done"))
    if last == total:
        end = RunFinished(state="completed", reason="all steps done", exit_code=0, step=total)
        yield 1.0 + STEP_S * (last - first + 1), _line(end)


def _device(seconds: int) -> Timed:
    """Return readings once a second."""
    rng = random.Random(2)
    yield 0.0, _line(opened(START_UNIX_S))
    yield 0.1, _line(FactsRead(facts={"gpu0_name": "a GPU"}))
    fields = [
        field.name
        for field in msgspec.structs.fields(HostSample)
        if field.type == float | None and field.name != "t_s"
    ]
    hosts, gpus = [], []
    for _ in range(SAMPLES):
        numbers = {name: 1e9 * rng.random() for name in fields}
        hosts.append(
            _line(
                HostSample(
                    **numbers | {"trainer_rss_bytes": None}, absent={"trainer_rss_bytes": "gone"}
                )
            )
        )
        gpus.append(
            _line(
                GpuSample(
                    index=0,
                    gpu_util_pct=float(rng.randrange(101)),
                    gpu_mem_used_bytes=rng.randrange(1 << 36),
                    gpu_power_w=700 * rng.random(),
                    gpu_power_limit_w=700.0,
                    gpu_temperature_c=40.0,
                    sm_clock_mhz=1980,
                    sm_util_pct=100 * rng.random(),
                    tensor_util_pct=100 * rng.random(),
                    dram_util_pct=100 * rng.random(),
                    clock_event_reasons="none",
                )
            )
        )
    for second in range(1, seconds + 1):
        yield float(second), hosts[second % SAMPLES]
        yield second + 0.001, gpus[second % SAMPLES]
