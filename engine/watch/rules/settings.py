"""Compare the settings with what the steps actually used, as the log records it.

The learning-rate schedule is computed here a second time, from the settings alone, and compared with the rate
the trainer used, so that an argument that never reached the optimizer is found.
"""

from __future__ import annotations

import math

import msgspec

from engine.spec import TrainSection
from engine.watch.rules.rule import CannotJudge, Case, Number, Symptom, rule

VERSIONS = ("engine", "python", "torch", "device")
INPUT_SECTIONS = ("model", "teacher", "student", "vocab", "data", "compute")
"""Sections of the settings that determine models and data."""
NOT_COMPARED = {"v", "seq", "t_s", "nf", "resumed_from"}
"""Fields of a start event that differ from session to session."""
STEPS = 20
RATE_TOLERANCE = 1e-4
"""Maximum relative difference; the logged rate is the optimizer's own float64."""


def expected_rate(step: int, train: TrainSection) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1: linear warm-up, then cosine or
    constant."""
    if step <= train.warmup:
        return train.lr * step / train.warmup
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup) / (train.steps - train.warmup))
    floor = train.lr * train.final_lr_ratio
    return floor + (train.lr - floor) * (1 + math.cos(math.pi * done)) / 2


@rule(
    reads=("lr", "[train]"),
    threshold=f"a relative difference of {RATE_TOLERANCE:g} in one of {STEPS} steps",
)
def learning_rate(case: Case) -> Symptom | None:
    train = case.spec.train
    rows = case.steps(STEPS, at_least=1)
    for rate, step in reversed(case.pairs("lr", "step", rows)):
        wanted = expected_rate(int(step), train)
        # The last step of a cosine schedule is 0 on purpose; there rounding is relative to the peak.
        if abs(rate - wanted) <= RATE_TOLERANCE * max(wanted, 1e-3 * train.lr):
            continue
        zero = rate == 0
        return Symptom(
            f"the learning rate of step {int(step)} was {rate:.4g}; the settings say {wanted:.4g}",
            [("lr", rate, f"{wanted:.6g} by train.schedule={train.schedule}")],
            case.span(rows),
            meaning="nothing is trained: the learning rate is 0"
            if zero
            else "the learning rate of the settings never reached the optimizer",
            flip="--set train.schedule=constant" if train.schedule != "constant" else "",
            no_flip="the schedule is constant already",
        )
    return None


@rule(
    reads=("rows", "tokens", "position", "rows_per_step", "seq_len"),
    threshold=f"one of {STEPS} steps differs",
)
def batch_not_as_set(case: Case) -> Symptom | None:
    rows_set, seq_len = case.started.rows_per_step, case.started.seq_len
    rows = case.steps(STEPS, at_least=1)
    wrong: list[Number] = []
    for name, wanted, formula in (
        ("rows", rows_set, "rows in a step"),
        ("tokens", rows_set * seq_len, "rows * length"),
    ):
        different = next((v for v in case.column(name, rows) if v != wanted), None)
        if different is not None:
            wrong.append((f"{name} of a step", different, f"{wanted} {formula}"))
    for position, step in case.pairs("position", "step", rows):
        if position != step * rows_set:
            wrong.append(
                (f"rows read by step {int(step)}", position, f"{int(step) * rows_set} were due")
            )
            break
    if not wrong:
        return None
    name, value, formula = wrong[0]
    return Symptom(
        f"{name}: {value:g}, expected {formula}",
        wrong,
        case.span(rows),
        meaning="the run trains on fewer, more or other rows than the loss, the schedule and the receipt assume",
        part=name.split(" by ")[0],
        no_flip="this is a fault of the engine or of a resume: no setting can cause it",
    )


@rule(
    reads=("run_started", "effective.json"),
    threshold="one value differs",
)
def run_not_as_set(case: Case) -> Symptom | None:
    started, spec = case.started, case.spec
    pairs = (
        ("train.steps", started.steps, spec.train.steps),
        ("loss.alpha", started.alpha, spec.loss.alpha),
        ("loss.temperature", started.temperature, spec.loss.temperature),
        ("train.lr", started.peak_lr, spec.train.lr),
        ("train.rows * accumulation", started.rows_per_step, spec.rows_per_step),
        ("data.seq_len", started.seq_len, spec.data.seq_len),
    )  # fmt: skip
    wrong = [
        (name, float(used), f"set to {setting:g}")
        for name, used, setting in pairs
        if used != setting
    ]
    if not wrong:
        return None
    return Symptom(
        f"{wrong[0][0]} is {wrong[0][1]:g} in the run, {wrong[0][2]}",
        wrong,
        case.recent(0.0),
        meaning="a setting did not take effect: the run is not the one that was configured",
        part=wrong[0][0],
        no_flip="this is a fault of the engine: no setting can cause it",
    )


@rule(
    reads=("eval", "checkpoint", "run_finished", "effective.json"),
    threshold="one step differs",
)
def schedule_not_as_set(case: Case) -> Symptom | None:
    view, train, checkpoint = case.view, case.spec.train, case.spec.checkpoint
    rows = case.steps(STEPS, at_least=1)
    begun, done, ended = case.started.resumed_from or 0, view.last_step, view.finished
    asked, is_over = view.stop_requested is not None, ended is not None and ended.state != "failed"
    last = min(begun + (train.stop_after or train.steps), train.steps)

    def multiples(every: int) -> set[int]:
        return set(range(begun - begun % every + every, done + 1, every)) if every else set()

    saves = multiples(checkpoint.every)
    evaluations = saves | multiples(case.spec.eval.every) | {train.steps}
    # The end of a session saves a checkpoint at any step.
    saves |= ({last} if checkpoint.at_end else set()) | ({done} if asked else set())
    evaluated = {e.step for e in view.evals if e.subject == "student" and not e.saved}
    saved = {c.step for c in view.checkpoints}
    # A resume drops the events after its step, and those of the newest step may not be logged yet.
    known = range(begun + 1, done + is_over)
    wrong: list[Number] = []
    for action, setting, expected, made in (
        ("evaluated", "eval.every", evaluations, evaluated),
        ("saved", "checkpoint.every", saves, saved),
    ):
        for step in sorted((expected ^ made) & {*known})[:1]:
            state, by = ("is not", "due") if step in expected else ("is", "not due")
            wrong.append((f"step {step} {state} {action}", step, f"{by} by {setting} and the end"))
    if done > last:
        wrong.append((f"step {done} is trained", done, f"the session was to end after {last}"))
    elif is_over and not asked and done < last:
        wrong.append((f"the session ends after step {done}", done, f"it was to end after {last}"))
    if not wrong:
        return None
    return Symptom(
        f"{wrong[0][0]}: {wrong[0][2]}",
        wrong,
        case.span(rows),
        meaning="the run was evaluated, saved or ended at other steps than it was asked to be",
        no_flip="this is a fault of the engine: no setting can cause it",
    )


@rule(
    reads=("run_started", "data", "model"),
    threshold="one value differs, though settings and versions do not",
)
def resumed_as_another(case: Case) -> Symptom | None:
    started, before, now = case.started, case.view.before, case.view.start_events
    if "run" not in before or started.resumed_from is None:
        return None
    run_before = msgspec.structs.asdict(before["run"])
    old, new = case.earlier.get(run_before["spec_sha256"], case.spec), case.spec
    inputs_changed = any(getattr(old, part) != getattr(new, part) for part in INPUT_SECTIONS)
    if inputs_changed or any(run_before[name] != getattr(started, name) for name in VERSIONS):
        raise CannotJudge(
            "the settings of the models or the data, the versions or the device have changed"
        )
    wrong = []
    for event_name in before.keys() & now.keys() - ({"run"} if old != new else set()):
        was, is_ = (
            msgspec.structs.asdict(event) for event in (before[event_name], now[event_name])
        )
        wrong += [
            f"{event_name}.{name} is {is_[name]!s:.24}, {was[name]!s:.24} before"
            for name in was.keys() - NOT_COMPARED
            if was[name] != is_[name]
        ]
    if not wrong:
        return None
    return Symptom(
        "; ".join(sorted(wrong)[:3]),
        [("values that differ", len(wrong), "from the session before; expected 0")],
        case.recent(0.0),
        meaning="the run continues from another state, on other data or with another model than it began with",
        no_flip="this is a fault of the engine or of files that were changed: no setting can cause it",
    )
