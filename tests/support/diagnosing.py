"""Views for tests of the rules, folded from hand-made logs: a healthy run with one change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.log.events import (
    AnyEvent,
    Event,
    FactsRead,
    GpuSample,
    HostSample,
    Judged,
    ModelReady,
    Phase,
    RunStarted,
    StepDone,
    TrainerStarted,
)
from engine.log.view import RunView, Source
from engine.spec import RunSpec, build_spec
from engine.watch.rules import RULES
from engine.watch.rules.rule import Case, Unknown
from tests.support.judged import numbers_of
from tests.support.run_events import example_of, fold_events, opened, step

GIB = 2.0**30
START = 1_700_000_000.0
ROWS, SEQ = 4, 32
VOCABULARY = 300
LN_V = math.log(VOCABULARY)
BY_ID = {rule.id: rule for rule in RULES}


def spec(**changes: Any) -> RunSpec:
    """Settings of a run over 1000 steps; `changes` have `__` for the dot."""
    values = {
        "student.config": "s.json",
        "teacher.path": "t",
        "train.steps": 1000,
        "train.rows": ROWS,
        "train.lr": 1e-3,
        "train.warmup_steps": 20,
        "train.schedule": "constant",
        "loss.alpha": 0.3,
        "loss.temperature": 2.0,
        "data.seq_len": SEQ,
        "eval.every": 0,
        "checkpoint.every": 0,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return build_spec(tree, check_paths=False)


def at(event: Event, t_s: float) -> Event:
    return msgspec.structs.replace(event, t_s=t_s)


def healthy_step(number: int, **changes: Any) -> StepDone:
    """Make a step whose loss falls from ln V, at the learning rate of `spec()`."""
    ce = 1.5 + (LN_V - 1.5) * math.exp(-number / 60)
    values: dict[str, Any] = {
        "loss": 0.3 * ce + 0.7 * 0.8 * ce,
        "ce": ce,
        "kd": 0.8 * ce,
        "lr": 1e-3 * min(1.0, number / 20),
        "grad_norm": 0.5 + 0.1 * math.sin(number),
        "rows": ROWS,
        "tokens": ROWS * SEQ,
        "labelled": ROWS * SEQ,
        "position": number * ROWS,
        "step_s": 0.5 + 0.01 * math.sin(number * 1.7),
        "data_s": 0.005,
        "teacher_s": 0.1,
    }
    return step(number, **values | changes)


Change = Callable[[int], dict[str, Any]]


@dataclasses.dataclass
class Log:
    """The three logs of a run with one step per `every_s`, as a view and a case."""

    device: str = "cuda"
    count: int = 0
    every_s: float = 0.5
    change: Change = lambda _: {}
    start_changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: Sequence[tuple[float, Event]] = ()
    """Further trainer events with their times."""
    gpu: Callable[[float], dict[str, Any]] | None = None
    """Returns the GPU readings at a time in seconds."""
    host: Callable[[float], dict[str, Any]] | None = None
    seconds: float | None = None
    """Duration of the readings; until the last step when None."""
    settings: RunSpec | None = dataclasses.field(default_factory=spec)
    silent_s: float = 0.0
    """Seconds from the last line to now."""

    begun_s: float = 10.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further facts of the machine."""

    def trainer(self) -> list[Event]:
        fields = {
            "device": self.device,
            "steps": 1000,
            "alpha": 0.3,
            "temperature": 2.0,
            "peak_lr": 1e-3,
            "rows_per_step": ROWS,
            "seq_len": SEQ,
            "resumed_from": None,
        }
        begun = self.begun_s
        events: list[Event] = [
            at(opened(START), 0.0),
            at(Phase(name="making the student"), 5.0),
            at(example_of(ModelReady, role="student", vocab_size=VOCABULARY), 6.0),
            at(example_of(RunStarted, **fields | self.start_changes), begun - 1),
            at(Phase(name="training"), begun),
            *(
                at(healthy_step(n, **self.change(n)), begun + n * self.every_s)
                for n in range(1, self.count + 1)
            ),
            *(at(event, t_s) for t_s, event in self.extra),
        ]
        return sorted(events, key=lambda event: event.t_s)

    @property
    def last_s(self) -> float:
        steps_end = self.begun_s + self.count * self.every_s
        return max(steps_end, *(t for t, _ in self.extra)) if self.extra else steps_end

    def logs(self) -> dict[Source, list[AnyEvent]]:
        end = self.last_s + self.silent_s if self.seconds is None else self.seconds
        device: list[Event] = [at(opened(START), 0.0)]
        device.append(at(FactsRead(facts={"cuda0_nvml_index": 0} | self.facts), 0.1))
        for tick in range(1, int(end) + 1):
            if self.host is not None:
                device.append(at(HostSample(**self.host(float(tick))), tick))
            if self.gpu is not None:
                device.append(at(GpuSample(index=0, **self.gpu(float(tick))), tick))
        watch: list[Event] = [at(opened(START), 0.0)]
        watch.append(at(TrainerStarted(trainer_pid=5, supervisor_pid=4), 0.0))
        found: dict[Source, list[Event]] = {
            "events": self.trainer(),
            "device": device,
            "watch": watch,
        }
        return {
            source: [msgspec.structs.replace(e, seq=n) for n, e in enumerate(events)]  # type: ignore[misc]
            for source, events in found.items()
        }

    def view(self) -> RunView:
        view = RunView()
        for source, events in self.logs().items():
            view = fold_events(view, source, events)
        return view

    def case(self) -> Case:
        now = START + (self.last_s + self.silent_s if self.seconds is None else self.seconds)
        return Case(view=self.view(), settings=self.settings, now_unix_s=now)


def answer(rule: str, case: Case) -> Judged | Unknown | None:
    return BY_ID[rule].answer(case)


def raised(rule: str, case: Case) -> Judged:
    """Return the alert of a rule, asserting that the rule raised a complete one."""
    found = answer(rule, case)
    assert isinstance(found, Judged), f"{rule}: {found}"
    assert found.id == rule and found.level in ("suspicion", "fail")
    assert found.text and found.meaning and bool(found.flip) != bool(found.no_flip)
    assert found.numbers and all(held for _, _, held in numbers_of(found))
    assert found.from_unix_s <= found.to_unix_s <= case.now_unix_s
    return found


def quiet(rule: str, case: Case) -> None:
    """Assert that the rule judged and raised nothing."""
    assert answer(rule, case) is None, f"{rule}: {answer(rule, case)}"


def unknown(rule: str, case: Case, words: str) -> None:
    """Assert that the rule could not judge, for this reason."""
    found = answer(rule, case)
    assert isinstance(found, Unknown), f"{rule}: {found}"
    assert words in found.reason, found.reason
