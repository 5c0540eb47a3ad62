"""Run folders for tests of what watches runs, written by the same writer that a run uses."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from engine.log.events import (
    CheckpointSaved,
    DecisionMade,
    Evaluated,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    ModelReady,
    Note,
    RunFinished,
    RunStarted,
    StepDone,
    TrainerExited,
    TrainerStarted,
)
from engine.log.folder import RunFolder, create_run
from engine.log.write import LogWriter
from tests.support.judged import number_event

STEP_S = 0.5
START_UNIX_S = 1_750_000_000.0


class Unknown(Event, frozen=True, kw_only=True, tag="sampled_tea"):
    """An event of another version."""

    cups: int


class Scene:
    """A run being written: its folder, its clock, and its open writers."""

    def __init__(self, path: Path, *, start_unix_s: float = START_UNIX_S) -> None:
        self.now_s, self.start_unix_s = 0.0, start_unix_s
        self.run: RunFolder = create_run(path, "name = 'scene'\n", {})
        self.writers: dict[str, LogWriter] = {}

    def open(self) -> Scene:
        """Begin a session: the three writers open their logs."""
        for name, writer in (
            ("watch", "supervisor"),
            ("device", "supervisor"),
            ("events", "trainer"),
        ):
            self.writers[name] = LogWriter(
                getattr(self.run, name),
                writer=writer,
                monotonic=lambda: self.now_s,
                wall=lambda: self.start_unix_s + self.now_s,
            )
        self.watch(TrainerStarted(trainer_pid=4242, supervisor_pid=4241))
        return self

    def events(self, *events: Event) -> Scene:
        for event in events:
            self.writers["events"].write(event)
        return self

    def device(self, *events: Event) -> Scene:
        for event in events:
            self.writers["device"].write(event)
        return self

    def watch(self, *events: Event) -> Scene:
        for event in events:
            self.writers["watch"].write(event)
        return self

    def close(self, *names: str) -> Scene:
        """Close the named writers, or all of them."""
        for name in names or tuple(self.writers):
            self.writers.pop(name).close()
        return self

    def begin(self, total: int, *, resumed_from: int | None = None) -> Scene:
        """Write everything that a run logs before its first step."""
        self.device(
            FactsRead(facts={"nvml_absent": "no NVIDIA driver is loaded"}),
            HostSample(
                host_available_bytes=61.0 * 2**30,
                host_total_bytes=120.0 * 2**30,
                load1=3.2,
                trainer_cpu_pct=132.0,
                absent={"trainer_rss_bytes": "the process has ended"},
            ),
        )
        return self.events(
            decision("teacher.backend", "dequantized", "26.1 GiB fit in 119.7 GiB"),
            model("teacher"),
            model("student"),
            started(self.run.name, total, resumed_from),
            evaluated(0, "untrained", 6.95),
            evaluated(0, "teacher", 2.2011),
        )

    def steps(self, first: int, last: int, *, nan: Collection[int] = ()) -> Scene:
        """Write steps of a falling loss."""
        for number in range(first, last + 1):
            self.now_s += STEP_S
            loss = math.nan if number in nan else loss_at(number)
            if number in nan:
                self.events(number_event(step=number, field="loss", value="nan"))
            self.events(step(number, loss))
        return self


def loss_at(number: int) -> float:
    return 2.0 + 4.0 * math.exp(-number / 20)


def step(number: int, loss: float | None, **changes: object) -> StepDone:
    fields: dict[str, object] = {
        "step": number,
        "loss": loss,
        "ce": loss_at(number) + 0.5,
        "kd": loss_at(number) - 0.5,
        "agreement": 0.25,
        "lr": 3e-4,
        "grad_norm": 1.0,
        "rows": 16,
        "tokens": 2048,
        "labelled": 2032,
        "step_s": STEP_S,
        "data_s": 0.01,
        "teacher_s": 0.1,
        "position": number * 16,
    }
    return StepDone(**(fields | changes))  # type: ignore[arg-type]


def decision(knob: str, choice: str, reason: str, *, overridden: bool = False) -> DecisionMade:
    return DecisionMade(
        knob=knob,
        choice=choice,
        reason=reason,
        rejected=[("none", "a teacher was given")],
        override=f"--set {knob}=none",
        overridden=overridden,
    )


def model(role: str) -> ModelReady:
    return ModelReady(
        role=role,
        source=f"{role}.safetensors",
        parameters=821_248,
        layers=2,
        hidden_size=128,
        vocab_size=1024,
        precision="float32",
        sha256="ab" * 32,
    )


def started(name: str, steps: int, resumed_from: int | None = None) -> RunStarted:
    return RunStarted(
        name=name,
        device="cpu",
        steps=steps,
        resumed_from=resumed_from,
        alpha=0.5,
        temperature=2.0,
        peak_lr=3e-4,
        rows_per_step=16,
        seq_len=128,
        trainable_parameters=821_248,
        spec_sha256="cd" * 32,
        engine="0.1.0",
        python="3.11.7",
        torch="2.13.0",
    )


def evaluated(number: int, subject: str, loss: float) -> Evaluated:
    return Evaluated(step=number, subject=subject, loss=loss, labelled=4096, eval_s=0.5)


def checkpoint(number: int) -> CheckpointSaved:
    return CheckpointSaved(
        step=number,
        path=f"checkpoints/step-{number:06}",
        size_bytes=9_876_543,
        save_s=0.1,
        manifest_sha256="ef" * 32,
        best=True,
    )


def gpu(util_pct: float) -> GpuSample:
    return GpuSample(
        index=0,
        gpu_util_pct=util_pct,
        gpu_power_w=38.0,
        absent={"gpu_mem_used_bytes": "unified memory"},
    )


def running(path: Path, *, done: int = 30, total: int = 60) -> Scene:
    """Make a run in progress, with open writers; the caller must close it."""
    return Scene(path).open().begin(total).steps(1, done)


def completed(path: Path, *, total: int = 60, nan: Collection[int] = ()) -> RunFolder:
    scene = Scene(path).open().begin(total).steps(1, total, nan=nan)
    scene.events(
        evaluated(total, "student", 2.6290),
        Note(level="warning", text="the disk is nearly full"),
        RunFinished(state="completed", reason="all steps done", exit_code=0, step=total),
    )
    return scene.close().run


def killed(path: Path, *, done: int = 30, total: int = 60) -> RunFolder:
    scene = running(path, done=done, total=total)
    scene.events(checkpoint(done // 10 * 10))
    scene.watch(
        TrainerExited(
            trainer_pid=4242,
            returncode=-9,
            state="killed",
            signal="SIGKILL",
            cause="unknown",
            certainty="none",
            sentence="killed by SIGKILL, sender not known",
        )
    )
    return scene.close().run


def vanished(path: Path, *, done: int = 30) -> RunFolder:
    return running(path, done=done).close().run


def empty(path: Path) -> RunFolder:
    """Make a folder to which no process ever wrote."""
    return Scene(path).run


def torn(path: Path) -> RunFolder:
    """Make a run whose killed writer left half a line."""
    run = vanished(path)
    with run.events.open("ab") as file:
        file.write(b'{"v":1,"seq":99,"t_s":9.')
    return run


def resumed(path: Path) -> RunFolder:
    """Make a run that was killed at step 30, continued from step 20, and completed."""
    run = killed(path)
    scene = Scene.__new__(Scene)
    scene.run, scene.now_s, scene.start_unix_s, scene.writers = run, 0.0, START_UNIX_S + 900, {}
    scene.open().begin(60, resumed_from=20).steps(21, 60)
    scene.events(
        evaluated(60, "student", 2.5),
        RunFinished(state="completed", reason="all steps done", exit_code=0, step=60),
    )
    return scene.close().run


def corrupt(path: Path) -> RunFolder:
    """Make a completed run with one line of its events missing."""
    run = completed(path)
    lines = run.events.read_bytes().splitlines(keepends=True)
    del lines[20]
    run.events.write_bytes(b"".join(lines))
    return run
