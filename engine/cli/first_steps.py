"""Measure the first steps of a spec: its own trainer makes two of them in a temporary folder, and its log has their
time and memory.

The run is an ordinary one: the same supervisor, trainer, models, rows of the same shape, and choices. It differs in
what a user does not wait for here: of the first-minute checks only whether the teacher knows the text, one batch of
held-out rows, no checkpoint, and of a large corpus only as much text as the steps need. Nothing of it is left.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.catalogue import CHECKS, skipped_ids
from engine.cli.progress import exit_code
from engine.errors import BadInput
from engine.log.beats import log_of, read_lost_rank
from engine.log.events import DecisionMade, RunFinished
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run
from engine.log.read import LogReader
from engine.log.text import status_text
from engine.log.view import RunView
from engine.machine.reading import Reading, absent, measured
from engine.models.transformers_config import WARNS
from engine.plan.data_size import PIECE_BYTES, SAMPLED_BYTES, DataSize
from engine.plan.memory import EVAL_ROWS_AT_ONCE
from engine.signals import scratch_folder
from engine.spec import RunSpec, spec_to_toml
from engine.spec.sections import ChecksSection
from engine.teachers.store.manifest import uses_cache
from engine.terminal import StatusLine
from engine.units import format_bytes, format_seconds
from engine.version import VERSION
from engine.watch.start_and_stop import Launched, launch

DEVICE = "compute.device"
TEACHER_CHECK = "teacher_knows_text"
"""The check that depends on the data and the teacher together."""
STEPS = 2
"""The first step allocates optimizer state and compiles what was not compiled before; the second is the run's pace."""
TOKEN_BYTES = 8
"""Twice what a token of English or code has on average."""
POLL_S = 0.05
PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """Time and memory of the first steps; times in seconds."""

    device: str | None
    """None where the trainer came to none."""
    step_s: Reading
    total_s: Reading
    """All steps of the spec at that pace, without start, evaluations and checkpoints."""
    host_peak_bytes: Reading
    """Peak host memory of the trainer; with several ranks, of rank 0."""
    device_peak_bytes: Reading
    text_bytes: int | None
    """At most so much of the training text was read for it; None for all of it."""
    failed: str
    """Reason why the trainer did not finish its steps, in one line, or two with a hint; empty if it did."""
    exit_code: int
    """Exit code of the trainer."""
    teacher: str = ""
    """Result of the check of the teacher; empty if the check did not run."""
    teacher_fails: bool = False
    """Whether that check stops the run."""
    warnings: tuple[str, ...] = ()
    """Warnings of transformers in the trainer."""

    @property
    def asked_text(self) -> str:
        """The result of the check of the teacher, and whether it stops the run."""
        if not self.teacher:
            return f"teacher: not asked: {self.failed or f'checks leave out {TEACHER_CHECK}'}"
        return f"{self.teacher}{f'; {TEACHER_CHECK} stops the run' * self.teacher_fails}"

    def lines(self, steps: int) -> list[str]:
        """Format it for people."""
        if self.step_s.number is None:
            return [f"time and memory: unknown: {self.step_s.absent}"]
        where = f", on {self.device}"
        if self.text_bytes is not None:
            where += f", with the first {format_bytes(self.text_bytes)} of the text that fit"
        pace = _words(self.step_s, format_seconds)
        return [
            *([self.asked_text] if self.teacher else []),
            f"a step: {pace}{where}",
            f"all {steps:,} steps: {_words(self.total_s, format_seconds)}, without start, evaluations and checkpoints",
            f"memory at the peak, host: {_words(self.host_peak_bytes, format_bytes)}",
            f"memory at the peak, device: {_words(self.device_peak_bytes, format_bytes)}",
        ]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _words(reading: Reading, written: Callable[[float], str]) -> str:
    if reading.number is None:
        return f"unknown: {reading.absent}"
    return f"{written(reading.number)} ({reading.source})"


def measure_first_steps(spec: RunSpec, size: DataSize) -> FirstSteps:
    """Make the first steps of `spec`, whose inputs are sound and whose data has `size`, showing progress on stderr.
    A signal ends it at once."""
    with scratch_folder("apr-check-") as folder:
        text_bytes = _text_bytes(spec, size)
        short = _shortened(spec, folder, text_bytes)
        settings = {"engine": VERSION, "spec_file": "", "sets": [], "spec": short.to_dict()}
        run = create_run(
            folder / "run", spec_to_toml(short), settings | {"spec_sha256": short.sha256}
        )
        launched = launch(run)
        try:
            view = _follow(launched)
        finally:
            launched.end()
        code = exit_code(view, launched.process.returncode)
        return _read(spec, run, view, code, text_bytes)


def _text_bytes(spec: RunSpec, size: DataSize) -> int | None:
    """Return how much training text the steps are given; None for all of it."""
    if size.exact or uses_cache(spec):
        # Stored teacher outputs are of the rows of the whole text.
        return None
    heldout_tokens = (
        EVAL_ROWS_AT_ONCE * spec.compute.gpus * spec.data.seq_len / spec.data.heldout_fraction
    )
    tokens = STEPS * size.tokens_per_step + heldout_tokens
    # No document is cut: at least half of them have at most twice the mean.
    document = PIECE_BYTES
    if size.documents and size.text_bytes is not None:
        document = 2 * size.text_bytes // size.documents
    wanted = max(SAMPLED_BYTES, document, round(tokens) * TOKEN_BYTES)
    available = min(spec.data.max_bytes or wanted, size.text_bytes or wanted)
    return None if available < wanted else wanted


def _shortened(spec: RunSpec, folder: Path, text_bytes: int | None) -> RunSpec:
    data = spec.data
    if text_bytes is not None:
        data = dataclasses.replace(data, max_bytes=text_bytes)
    rows = min(spec.eval.rows, EVAL_ROWS_AT_ONCE)
    skip = ",".join(about.id for about in CHECKS if about.id != TEACHER_CHECK)
    has_check = (
        spec.has_teacher
        and spec.checks.enabled
        and TEACHER_CHECK not in skipped_ids(spec.checks.skip)
    )
    checks = ChecksSection(enabled=has_check, skip=skip, on_fail="report", every=-1)
    return dataclasses.replace(
        spec.without_receivers,
        run=dataclasses.replace(spec.run, name="run", out=str(folder)),
        data=data,
        train=dataclasses.replace(spec.train, stop_after=STEPS),
        # A whole batch of held-out rows, whose memory may be the peak.
        eval=dataclasses.replace(spec.eval, every=0, rows=rows),
        checkpoint=dataclasses.replace(spec.checkpoint, every=0, at_end=False),
        checks=checks,
    )


def _follow(launched: Launched) -> RunView:
    follower = Follower(launched.run)
    line = StatusLine(plain_every_s=PLAIN_EVERY_S, plain_at_once=False)
    while launched.process.poll() is None:
        follower.poll()
        line.show(f"the first {STEPS} steps: {status_text(follower.view, follower.alive)}")
        time.sleep(POLL_S)
    line.clear()
    return follower.read_all()


def _why_failed(run: RunFolder, view: RunView) -> tuple[str, bool]:
    """Return why the trainer failed, of several the first that did, and whether that was for lack of a device."""
    lost = read_lost_rank(run)
    events = LogReader(run.events if lost is None else log_of(run, lost.rank)).poll()
    ended = next((event for event in reversed(events) if isinstance(event, RunFinished)), None)
    reason = ended.reason if ended is not None else ""
    if not reason:
        reason = view.exit.sentence if view.exit is not None else "no process recorded how it ended"
    # A table that explains the error, as of memory, would hide it here.
    first, *rest = reason.splitlines()
    has_device = any(isinstance(event, DecisionMade) and event.knob == DEVICE for event in events)
    lacks_device = ended is not None and ended.exit_code == BadInput.exit_code and not has_device
    return "\n".join([first, *(line for line in rest if line.startswith("hint: "))]), lacks_device


def _read(
    spec: RunSpec, run: RunFolder, view: RunView, code: int, text_bytes: int | None
) -> FirstSteps:
    device = next((d.choice for d in view.decisions if d.knob == DEVICE), None)
    check = view.checks.get(TEACHER_CHECK)
    if check is not None and check.text.startswith("skipped by"):
        check = None
    wanted = min(STEPS, spec.train.steps)
    failed, lacks = "", False
    if code or view.last_step < wanted:
        failed, lacks = _why_failed(run, view)
        lacks = lacks and "cuda" in (spec.compute.device, device)
    why = f"step {view.last_step + 1} was not finished" if failed else ""
    if lacks:
        why, failed = failed.partition("\n")[0], ""
    log = "the trainer's log"
    step_s = absent(why or "the log has no time", log)
    total_s = absent(why or "the log has no time", log)
    seconds = view.steps.last("step_s")
    if seconds is not None and not why:
        warm = ", which warms up" if wanted == 1 else ", after one that warms up"
        step_s = measured(seconds, f"step {wanted}{warm}")
        total_s = measured(seconds * spec.train.steps, f"{spec.train.steps:,} x step {wanted}")
    peak = view.memory_peak
    host = device_peak = absent(why or "the log has no peak", log)
    if peak is not None:
        if peak.host_peak_bytes is not None:
            host = measured(peak.host_peak_bytes, "VmHWM of the trainer")
        device_peak = (
            absent(peak.source, log)
            if peak.measured_bytes is None
            else measured(peak.measured_bytes, peak.source)
        )
    return FirstSteps(
        device=device,
        step_s=step_s,
        total_s=total_s,
        host_peak_bytes=host,
        device_peak_bytes=device_peak,
        text_bytes=text_bytes,
        failed=failed,
        exit_code=code,
        teacher="" if check is None else f"teacher: {check.text}",
        warnings=tuple(note.text for note in view.notes if note.text.startswith(WARNS)),
        teacher_fails=check is not None and check.level == "fail" and spec.checks.on_fail == "stop",
    )
