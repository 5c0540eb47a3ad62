"""Compare the recorded steps with those of a replay, stage by stage, and report the first stage that differs.

On a CPU with the same versions, threads and decisions a replay must give the same bits. On a GPU, or with another
torch, sums are computed in another order and later steps train on the result: numbers may differ by a rounding error
that grows with each step since run and replay had the same weights. Numbers without rounding (rows, labels, tokens,
learning rate) must always be equal.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import RunLogError
from engine.files import read_json_object
from engine.limits import RUN_FILE
from engine.log.events import Evaluated
from engine.log.folder import RunFolder
from engine.log.rows import path_of, read_ranks, read_rows
from engine.verdict import Level, Verdict
from engine.verify.sessions import NO_STEP_SECTIONS, Session, Stretch

MAX_ROUNDING_STEPS = 30
"""Number of steps over which the tolerance for rounding grows."""
BUILT_FIELDS = (
    "steps",
    "rows_per_step",
    "seq_len",
    "alpha",
    "temperature",
    "peak_lr",
    "trainable_parameters",
)
"""Names of the compared fields of run_started. The trainer logs the values of the objects that it built."""
DATA_FIELDS = ("train_sha256", "train_tokens", "heldout_sha256", "heldout_tokens")
"""Names of the compared fields of data_ready."""


class Field(NamedTuple):
    """A number or vector that must agree between a recorded step and its replay."""

    stage: str
    name: str
    relative: float = 0.0
    """Relative tolerance for each step since the weights were the same; 0 if the field has no rounding."""
    absolute: float = 0.0
    """Absolute tolerance for each step since the weights were the same."""
    of_recorded: bool = False
    """Whether the field is a vector of the event `Recorded`, compared by the norm of the difference."""
    first: bool = False
    """Whether rounding allows comparing the field only in the first step after the weights were the same. AdamW moves
    a weight by about its gradient's sign, even if the gradient is tiny, so later steps depend on rounding."""
    exact: bool = False
    """Whether the field is compared only if every bit must be equal, because rounding may change it by a large
    amount."""


FIELDS = (
    Field("rows", "position"),
    Field("rows", "rows"),
    Field("rows", "tokens"),
    Field("rows", "rows_digest"),
    Field("rows", "labelled"),
    Field("step_teacher", "teacher", 2e-2, 1e-6, of_recorded=True),
    Field("step_student", "student", 2e-2, 1e-6, of_recorded=True, first=True),
    Field("step_loss", "ce", 1e-3, 1e-6),
    Field("step_loss", "kd", 1e-3, 1e-6),
    Field("step_loss", "agreement", 0.0, 1e-2),
    Field("step_loss", "loss", 1e-3, 1e-6),
    Field("step_gradients", "gradient", of_recorded=True, exact=True),
    Field("step_gradients", "grad_norm", 1e-2, 1e-6, first=True),
    Field("step_weights", "mean", of_recorded=True, exact=True),
    Field("step_weights", "square", of_recorded=True, exact=True),
    Field("step_weights", "lr"),
    Field("step_weights", "weight", of_recorded=True, exact=True),
)
"""Compared fields in the order in which a step computes them, so that the first difference shows the stage."""
ROUNDING = (
    f"losses may differ by 0.1 % for each step since run and replay had the same weights, up to {MAX_ROUNDING_STEPS} "
    "steps, and the teacher's hidden states by 2 %; the student's hidden states and the norm of the gradients are "
    "compared in the first of these steps alone"
)
HELDOUT = Field("", "loss", 1e-3, 1e-6)


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first recorded step that differs from the replay."""

    step: int
    stage: str
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        recorded, replayed = (
            # Nine digits distinguish all fp32 numbers.
            ", ".join(f"{number:.9g}" for number in value) if isinstance(value, list) else value
            for value in (self.recorded, self.replayed)
        )
        place = f"step {self.step}: {self.stage}: {self.field}"
        return f"{place}: recorded {recorded}, replayed {replayed}"


@dataclass(frozen=True)
class Compared:
    """Result of comparing the steps of a stretch."""

    steps: int
    """Number of steps that agree before the first that differs."""
    difference: FirstDifference | None
    lacking: Counter[str]
    """Number of compared steps whose record lacks a field, by field."""
    ended: str = ""
    """Reason why the replay ended early; empty if it has all steps."""


def compare_steps(record: Stretch, replay: Session, *, rounded: bool) -> Compared:
    """Compare the steps of a stretch in order, up to the first difference."""
    lacking: Counter[str] = Counter()
    for step in range(record.begin + 1, record.end + 1):
        recorded, replayed, done = (
            record.steps.get(step),
            replay.steps.get(step),
            step - record.begin - 1,
        )
        if recorded is None:
            missing = FirstDifference(
                step=step, stage="rows", field="step", recorded=None, replayed=step
            )
            return Compared(done, missing, lacking)
        if replayed is None:
            return Compared(done, None, lacking, _reason_for_end(replay))
        lacking.update(
            field.name
            for field in FIELDS
            if not field.of_recorded
            and getattr(recorded, field.name) is None
            and getattr(replayed, field.name) is not None
        )
        difference = next(differences(record, replay, step, rounded=rounded), None)
        if difference is not None:
            return Compared(done, difference, lacking)
    return Compared(record.end - record.begin, None, lacking)


def differences(
    record: Stretch, replay: Session, step: int, *, rounded: bool
) -> Iterator[FirstDifference]:
    """Yield the differences in one step, in the order in which a step computes the fields."""
    of_step = record.steps[step], replay.steps[step]
    of_recorded = record.recorded.get(step), replay.recorded.get(step)
    since = min(step - record.begin, MAX_ROUNDING_STEPS)
    for field in FIELDS:
        pair = of_recorded if field.of_recorded else of_step
        recorded, replayed = (getattr(event, field.name, None) for event in pair)
        # `rows_digest` is cumulative: a replay from a checkpoint begins a new one.
        if (
            recorded in (None, [])
            or replayed in (None, [])
            or (field.name == "rows_digest" and record.begin)
        ):
            continue
        if rounded and (field.exact or (field.first and step > record.begin + 1)):
            continue
        # The teacher's rounding error does not grow with the steps, because its weights do not change.
        rounding_steps = (1 if field.name == "teacher" else since) if rounded else 0
        if not agrees(field, recorded, replayed, rounding_steps):
            yield FirstDifference(
                step=step, stage=field.stage, field=field.name, recorded=recorded, replayed=replayed
            )


def _reason_for_end(replay: Session) -> str:
    ended = replay.finished
    if ended is None:
        return "its log ends without run_finished"
    if ended.state == "completed":
        return f"the settings end at step {replay.last_step}"
    return ended.reason or ended.state


def agrees(field: Field, recorded: Any, replayed: Any, rounding_steps: int) -> bool:
    """Return whether a recorded number or vector differs from the replayed one by at most `rounding_steps` times the
    field's tolerance. With 0 they must be equal, where NaN equals NaN."""
    recorded_values, replayed_values = (
        value if isinstance(value, list) else [value] for value in (recorded, replayed)
    )
    if len(recorded_values) == len(replayed_values) and all(
        map(_same_number, recorded_values, replayed_values)
    ):
        return True
    if (
        not rounding_steps
        or not field.relative + field.absolute
        or len(recorded_values) != len(replayed_values)
    ):
        return False
    if not all(
        isinstance(x, float) and math.isfinite(x) for x in (*recorded_values, *replayed_values)
    ):
        return False
    apart, length = (
        math.dist(recorded_values, replayed_values),
        max(math.hypot(*recorded_values), math.hypot(*replayed_values)),
    )
    return apart <= rounding_steps * (field.relative * length + field.absolute)


def _same_number(recorded: Any, replayed: Any) -> bool:
    return bool(recorded == replayed or (recorded != recorded and replayed != replayed))


def compare_rows(run: RunFolder, replay: RunFolder, record: Stretch) -> Verdict | None:
    """Compare the rows of every rank by content; None if the run did not record them."""
    try:
        ranks = read_ranks(path_of(run, 0))
        if ranks != read_ranks(path_of(replay, 0)):
            return Verdict(
                Level.UNKNOWN,
                f"the run recorded {ranks} ranks, the replay has a different number",
            )
        for rank in range(ranks):
            for (step, recorded), (_, replayed) in zip(
                _rows(run, rank, record), _rows(replay, rank, record), strict=True
            ):
                if recorded != replayed:
                    text = f"step {step}: rank {rank} trained on different rows than the replay"
                    return Verdict(Level.FAIL, text)
    except (RunLogError, ValueError):
        return None
    return Verdict(Level.PASS, "the rows of each rank have the same content")


def _rows(run: RunFolder, rank: int, record: Stretch) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the hashes of the rows of each step of a stretch."""
    rows = (row for row in read_rows(path_of(run, rank)) if record.begin < row.step <= record.end)
    for step, of_step in itertools.groupby(rows, key=lambda row: row.step):
        yield step, [row.hash for row in of_step]


def compare_losses(record: Sequence[Evaluated], replay: Session, steps: int) -> Verdict | None:
    """Compare the held-out losses that both runs logged. The tolerance is that of `steps` steps since both had the
    same weights; with 0 the losses must be equal."""
    recorded_losses = {(event.subject, event.step, event.saved): event for event in record}
    compared = []
    for replayed in replay.evaluated:
        if (
            recorded := recorded_losses.get((replayed.subject, replayed.step, replayed.saved))
        ) is None:
            continue
        name = f"{'saved ' if replayed.saved else ''}{replayed.subject} at step {replayed.step}"
        same_loss = agrees(HELDOUT, recorded.loss, replayed.loss, min(steps, MAX_ROUNDING_STEPS))
        if recorded.labelled != replayed.labelled or not same_loss:
            return Verdict(
                Level.FAIL,
                f"{name}: recorded {recorded.loss!r} over {recorded.labelled} tokens, "
                f"replayed {replayed.loss!r} over {replayed.labelled}",
            )
        compared.append(name)
    if not compared:
        return None
    return Verdict(Level.PASS, f"equal for the {', '.join(compared)}")


def same(names: Sequence[str], recorded: object, replayed: object) -> Verdict:
    """Compare the named fields of two events. None is an event that was not logged."""
    if recorded is None or replayed is None:
        lacks = "the run did not record it" if recorded is None else "the replay did not record it"
        return Verdict(Level.UNKNOWN, lacks)
    for name in names:
        recorded_value, replayed_value = getattr(recorded, name), getattr(replayed, name)
        if recorded_value != replayed_value:
            return Verdict(
                Level.FAIL, f"{name}: recorded {recorded_value}, replayed {replayed_value}"
            )
    lacking = [name for name in names if getattr(recorded, name) in ("", None)]
    if lacking:
        return Verdict(Level.UNKNOWN, f"the log lacks {', '.join(lacking)}")
    return Verdict(Level.PASS, f"equal: {', '.join(names)}")


def why_rounded(run: RunFolder, record: Stretch, replay: RunFolder, fresh: Session) -> list[str]:
    """Return the reasons why a replay's numbers may differ from the recorded ones by rounding; empty if every bit must
    be equal."""
    replayed = fresh.started
    assert replayed is not None
    why: dict[str, None] = {}
    for session in record.sessions:
        recorded = session.started
        assert recorded is not None
        if recorded.device != "cpu" or replayed.device != "cpu":
            why[f"device {recorded.device}, replayed on {replayed.device}"] = None
        if recorded.torch != replayed.torch:
            why[f"torch {recorded.torch}, replayed with {replayed.torch}"] = None
        if recorded.machine != replayed.machine:
            why[f"machine {recorded.machine or 'not logged'}, replayed on {replayed.machine}"] = (
                None
            )
    return [*why, *_changed_decisions(run, record, replay)]


def _changed_decisions(run: RunFolder, record: Stretch, replay: RunFolder) -> list[str]:
    """Describe the automatic settings that the replay decided differently."""
    specs = []
    for path in (run.resolved, replay.resolved):
        try:
            specs.append(read_json_object(path, "settings", RUN_FILE, error=RunLogError)["spec"])
        except (RunLogError, KeyError):
            return [f"the decisions in {path.name} cannot be read"]
    recorded, replayed = specs
    return [
        f"{section}.{name} = {recorded.get(section, {}).get(name)}, replayed with {value}"
        for section, values in replayed.items()
        if section not in NO_STEP_SECTIONS
        for name, value in values.items()
        if f"{section}.{name}" != "train.stop_after"
        and record.settings.get(section, {}).get(name) != value
        and recorded.get(section, {}).get(name, value) != value
    ]
