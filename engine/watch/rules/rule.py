"""Define what a rule is: a function that judges a run at one moment. It returns a Symptom or None, or raises
CannotJudge.

    @rule(reads=..., threshold=...)
    def its_id(case: Case) -> Symptom | None: ...              or raises CannotJudge

The row of the rule's id in `engine/catalogue.py` has its question and its level. The rules of a family are the
decorated functions in one file of this package. `RULES` lists them all, for `engine diagnose`, the supervisor,
`--list` and the tests.

A rule is pure: the same view, settings and moment give the same result, so the supervisor that watches a run
and `engine diagnose RUN` a year later agree. It uses a window of the newest steps or readings, never the
whole log, so its cost does not grow with the run.

An alert has its numbers with the limit or reference of each, the steps and the time that they come from, its meaning,
and the flip that would test the suspicion: a diagnosis that no flip can refute is a guess. A rule whose inputs are
missing raises CannotJudge; None means that it found nothing wrong.

Rules do not raise or clear alerts: `active_alerts` does.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from engine.catalogue import BY_ID, About
from engine.errors import BadInput
from engine.log.events import ALERT, TRAINING, Judged, RunStarted, by_name
from engine.log.folder import COMMAND, RunFolder
from engine.log.view import RunView, Table
from engine.spec import RunSpec, spec_from_dict

Number: TypeAlias = tuple[str, float, str]
"""A number of an alert: name with its unit, value, and the limit or reference of the value."""

NO_SETTINGS = "the settings are the script's own"
"""Reason why a rule that needs settings cannot judge a watched script."""


CPU_WAIT_PCT = 20.0
"""Share of the time in which some process waited for a CPU, in percent; short waits at a wake-up are far below it."""
CLASSES_FROM = 500
"""Steps after which a loss over the classes of any model is compared with that of guessing; a hard task takes longer
than the next token of a text."""
OTHERS_SHARE = 0.2
"""Share of the machine's cores, 0 to 1, from which other processes that use them slow a run down noticeably."""


MEANT_TO_RISE = re.compile(
    r"reward|return|advantage|policy|actor|critic|value|entropy|episode|kl|discriminator|generator|gan|loss_[dg]|[dg]_loss",
    re.IGNORECASE,
)
"""Logged names of trainings whose loss may be intended to rise: reinforcement learning, GANs, an annealed term."""


class CannotJudge(Exception):
    """An input of a rule is missing or too short; the message names it."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The result of a rule that could not judge."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The steps and the time range that the evidence comes from."""

    first_step: int
    last_step: int
    from_unix_s: float
    to_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run at one moment."""

    view: RunView
    settings: RunSpec | None
    """The settings of the run (its effective.json); None if they cannot be read."""
    now_unix_s: float

    # Properties of the run.

    @property
    def started(self) -> RunStarted:
        if self.view.started is None or self.view.started_unix_s is None:
            why = (
                "the run has not logged its configuration"
                if not self.view.is_foreign
                else NO_SETTINGS
            )
            raise CannotJudge(why)
        return self.view.started

    def lower_learning_rate(self, times: float) -> dict[str, str]:
        """Return the flip to a learning rate `times` lower; for a watched script, the advice to change it there."""
        if self.view.is_foreign:
            return {"no_flip": f"set a learning rate {times:g} times lower in the script"}
        return {"flip": f"--set train.lr={self.started.peak_lr / times:g}"}

    @property
    def cross_entropy(self) -> str:
        """Column of the cross entropy; `loss` in a watched script whose loss is a cross entropy."""
        if not self.view.is_foreign:
            return "ce"
        self._script_vocabulary()
        return "loss"

    def _script_vocabulary(self) -> float:
        """Return the number of classes of a watched script's loss: of a language model, or after CLASSES_FROM steps of
        any model. Raises CannotJudge if the loss is not known to be a single cross entropy."""
        sizes = {seen.id: seen.numbers for seen in self.view.identities}
        size = sizes.get("label_coverage", {}).get("vocabulary") or 0.0
        if size < 2 and self.view.last_step >= CLASSES_FROM:
            size = sizes.get("one_class", {}).get("classes") or 0.0
        if size < 2:
            raise CannotJudge("the loss is not known to be one cross entropy")
        return size

    def require_loss_should_fall(self) -> None:
        """Raise CannotJudge if the loss of a watched script may be intended to rise."""
        if risers := sorted(filter(MEANT_TO_RISE.search, self.view.logged)):
            raise CannotJudge(f"it logs {risers[0]}: its loss may be intended to rise")

    @property
    def vocabulary_nats(self) -> float:
        """ln V of the student: the loss of a uniform guess, in nats."""
        if self.view.is_foreign:
            return math.log(self._script_vocabulary())
        student = self.view.models.get("student")
        if student is None or student.vocab_size < 2:
            raise CannotJudge("the size of the student's vocabulary is not logged")
        return math.log(student.vocab_size)

    @property
    def is_over(self) -> bool:
        view = self.view
        return any(end is not None for end in (view.finished, view.exit, view.script_ended))

    def require_watched(self) -> None:
        if self.view.imported is not None:
            raise CannotJudge("the run was imported, not watched")

    def require_running(self) -> None:
        if self.is_over:
            raise CannotJudge("the run has ended")

    # Steps

    def steps(self, newest: int, *, at_least: int, session: bool = True) -> range:
        """Return the rows of the newest steps, of this session unless `session` is False."""
        begin = self.view.session_row if session else 0
        end = len(self.view.steps)
        if end - begin < at_least:
            raise CannotJudge(f"needs {at_least} steps, {max(0, end - begin)} are done")
        return range(max(begin, end - newest), end)

    def column(self, name: str, rows: range) -> list[float]:
        """Return the finite numbers of a column. Raises CannotJudge if there are none."""
        finite = self.view.steps.finite(name, rows.start, rows.stop)
        if not finite:
            raise CannotJudge(f"{name} is not logged")
        return finite

    def pairs(self, left: str, right: str, rows: range) -> list[tuple[float, float]]:
        """Return the pairs of values of two columns in the rows where both are finite."""
        columns = (
            self.view.steps.column(name, rows.start, rows.stop).tolist() for name in (left, right)
        )
        # An absent entry is NaN.
        pairs = [pair for pair in zip(*columns, strict=True) if all(map(math.isfinite, pair))]
        if not pairs:
            raise CannotJudge(f"{left} and {right} are not logged")
        return pairs

    def span(self, rows: range) -> Span:
        """Return the span of some steps."""
        steps = self.view.steps
        return Span(
            first_step=int(steps.value("step", rows.start) or 0),
            last_step=int(steps.value("step", rows.stop - 1) or 0),
            from_unix_s=steps.value("unix_s", rows.start) or 0.0,
            to_unix_s=steps.value("unix_s", rows.stop - 1) or 0.0,
        )

    # Readings

    def reading_rows(self, table: Table, seconds: float) -> range:
        """Return the rows of this session's readings in the last `seconds`."""
        begin_s = max(self.now_unix_s - seconds, self.view.session_unix_s or 0.0)
        end_s = math.nextafter(self.now_unix_s, math.inf)
        return range(*table.find_each("unix_s", (begin_s, end_s)))

    def readings(
        self, table: Table, name: str, seconds: float, *, at_least: int, subject: str
    ) -> list[float]:
        """Return the finite readings of the last `seconds`. Raises CannotJudge, with the reason in the log, if there
        are too few."""
        rows = self.reading_rows(table, seconds)
        finite = table.finite(name, rows.start, rows.stop)
        if len(finite) >= at_least:
            return finite
        # `slowed` is computed from another reading, whose reason for being absent applies.
        source = "clock_event_reasons" if name == "slowed" else name
        key = f"{subject}.{source}" if subject else source
        if key in self.view.absent:
            raise CannotJudge(f"{key}: {self.view.absent[key]}")
        raise CannotJudge(f"needs {at_least} readings of {key}, {len(finite)} were taken")

    def recent(self, seconds: float) -> Span:
        """Return the span of the last `seconds` of readings."""
        return Span(
            first_step=self.view.last_step,
            last_step=self.view.last_step,
            from_unix_s=self.now_unix_s - seconds,
            to_unix_s=self.now_unix_s,
        )

    @property
    def gpu(self) -> int:
        """Return NVML's index of the GPU that the run computes on."""
        # The device is decided before the models are loaded, and logged again when the run begins.
        decided = self.choice("compute.device") if self.view.started is None else None
        device = decided or self.started.device
        if not device.startswith("cuda"):
            raise CannotJudge(f"the run computes on {device}")
        facts = self.view.facts or {}
        ordinal = device.partition(":")[2] or "0"
        known = facts.get(f"cuda{ordinal}_nvml_index")
        tables = self.view.gpu_tables
        if isinstance(known, int) and known in tables:
            return known
        if len(tables) == 1:
            return next(iter(tables))
        if not tables:
            why = self.view.absent.get("gpu") or facts.get("nvml_absent") or "none was taken"
            raise CannotJudge(f"no GPU reading: {why}")
        raise CannotJudge(f"which of {len(tables)} GPUs the run uses is not known")

    def gpu_readings(self, name: str, seconds: float, *, at_least: int) -> list[float]:
        gpu = self.gpu
        return self.readings(
            self.view.gpu_tables[gpu], name, seconds, at_least=at_least, subject=f"gpu{gpu}"
        )

    def host_readings(self, name: str, seconds: float, *, at_least: int) -> list[float]:
        return self.readings(self.view.hosts, name, seconds, at_least=at_least, subject="")

    def require_cpu_available(self, steps: Sequence[int]) -> None:
        """Raise CannotJudge if other processes took CPU time during most of the steps in these rows.

        While processes wait for a CPU no core is idle, so other processes used the CPU time that the run and its
        children did not.
        """
        hosts, facts = self.view.hosts, self.view.facts or {}
        cores = facts.get("cpu_count")
        usable = facts.get("cpu_effective", cores)
        if not isinstance(cores, int | float) or not isinstance(usable, int | float):
            return
        if not len(hosts) or not steps:
            return
        ends = [self.view.steps.value("unix_s", row) or 0.0 for row in steps]
        # A reading covers the time since the reading before it.
        rows = [min(row, len(hosts) - 1) for row in hosts.find_each("unix_s", ends)]
        others: list[float] = []
        for row in rows:
            load, waits, family = (
                hosts.value(name, row)
                for name in ("load1", "psi_cpu_some_avg10_pct", "family_cpu_pct")
            )
            is_full = (load or 0.0) >= cores or (waits or 0.0) >= CPU_WAIT_PCT
            if family is not None and is_full:
                others.append(usable - family / 100)
        crowded = [cores_used for cores_used in others if cores_used >= OTHERS_SHARE * usable]
        if 2 * len(crowded) >= len(steps):
            raise CannotJudge(
                f"other processes had {mean(crowded):.2g} of {usable:g} cores while these steps were slow"
            )

    # The run's activity.

    def choice(self, knob: str) -> str | None:
        """Return the logged choice for a setting."""
        return next((d.choice for d in reversed(self.view.decisions) if d.knob == knob), None)

    @property
    def is_computing(self) -> bool:
        """Whether a model should be computing now, as opposed to reading, loading or saving."""
        view = self.view
        if self.is_over:
            return False
        if self.phase.startswith(COMPUTING):
            return True
        # The evaluations before the first step are logged without a phase.
        began = view.started_unix_s
        return began is not None and (view.phase_unix_s or 0.0) <= began

    @property
    def phase(self) -> str:
        """Return the trainer's phase: the newest logged one, or `training` if a step has finished since, as after a
        checkpoint."""
        view = self.view
        if view.phase is None:
            return "starting"
        stepped_s = view.steps.last("unix_s") if len(view.steps) > view.session_row else None
        return TRAINING if (stepped_s or 0.0) > (view.phase_unix_s or 0.0) else view.phase.name


COMPUTING = (TRAINING, "evaluating", "measuring")
"""Phases in which a model is computing."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """The alert of a rule, without the rule's name."""

    title: str
    numbers: Sequence[Number]
    span: Span
    _: KW_ONLY
    meaning: str
    flip: str = ""
    """The change of a setting that would test the suspicion."""
    no_flip: str = ""
    """If there is no flip: the reason, or advice."""
    part: str = ""
    """Subject, if the rule judges several; it is the same word in every run with the symptom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    about: About
    reads: tuple[str, ...]
    """Inputs without which the rule cannot judge."""
    threshold: str
    """Condition under which the rule raises an alert, in words with numbers."""
    judge: Callable[[Case], Symptom | None]
    clear_after_s: float = 30.0
    """Seconds without a symptom after which the rule's alert is cleared."""

    @property
    def id(self) -> str:
        return self.about.id

    def answer(self, case: Case) -> Judged | Unknown | None:
        try:
            symptom = self.judge(case)
        except CannotJudge as missing:
            return Unknown(str(missing))
        if symptom is None:
            return None
        assert symptom.flip or symptom.no_flip, f"{self.id}: a flip or why there is none"
        numbers, compared = by_name(symptom.numbers)
        return Judged(
            by=ALERT,
            id=self.id,
            level=self.about.level,
            text=symptom.title,
            numbers=numbers,
            compared=compared,
            first_step=symptom.span.first_step,
            step=symptom.span.last_step,
            from_unix_s=symptom.span.from_unix_s,
            to_unix_s=symptom.span.to_unix_s,
            meaning=symptom.meaning,
            flip=symptom.flip,
            no_flip="" if symptom.flip else symptom.no_flip,
            part=symptom.part,
        )


def rule(
    *, reads: tuple[str, ...], threshold: str, clear_after_s: float = 30.0
) -> Callable[[Callable[[Case], Symptom | None]], Rule]:
    """Turn a function into a rule; the function's name is the rule's id in the catalogue."""

    def make_rule(judge: Callable[[Case], Symptom | None]) -> Rule:
        return Rule(
            about=BY_ID[ALERT][judge.__name__],
            reads=reads,
            threshold=threshold,
            judge=judge,
            clear_after_s=clear_after_s,
        )

    return make_rule


def mean(values: Sequence[float]) -> float:
    # Not fsum, which raises an error when finite numbers have an infinite sum.
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""


def sigma(values: Sequence[float]) -> float:
    """Return a robust standard deviation, computed from the median absolute deviation."""
    centre = median(values)
    return MAD_TO_SIGMA * median([abs(value - centre) for value in values])


def read_settings(run: RunFolder) -> RunSpec | None:
    """Read the settings of a run; None if they are missing or of another version: rules that need them then cannot
    judge."""
    try:
        effective = run.read_effective()
        return None if COMMAND in effective else spec_from_dict(effective["spec"])
    except BadInput:
        return None
