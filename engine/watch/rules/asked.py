"""What was asked for against what is done: read back from the steps, not from the request."""

from __future__ import annotations

from engine.watch.rules.rule import ERROR, Alert, Case, Number, Rule, alert

STEPS = 20


def batch_not_as_set(case: Case) -> Alert | None:
    rows_set, seq_len = case.started.rows_per_step, case.started.seq_len
    rows = case.steps(STEPS, at_least=1)
    wrong: list[Number] = []
    for name, wanted, held in (
        ("rows", rows_set, "rows in a step"),
        ("tokens", rows_set * seq_len, "rows * length"),
    ):
        found = next((v for v in case.column(name, rows) if v != wanted), None)
        if found is not None:
            wrong.append((f"{name} of a step", found, f"{wanted} {held}"))
    for position, step in case.pairs("position", "step", rows):
        if position != step * rows_set:
            wrong.append(
                (f"rows read by step {int(step)}", position, f"{int(step) * rows_set} were due")
            )
            break
    if not wrong:
        return None
    name, value, held = wrong[0]
    return alert(
        "batch_not_as_set",
        ERROR,
        f"{name}: {value:g}, expected {held}",
        wrong,
        case.span(rows),
        meaning="fewer, more or other rows are trained than the loss, the schedule and the receipt speak of",
        no_flip="this is a fault of the engine or of a resume: no setting can cause it",
    )


def run_not_as_set(case: Case) -> Alert | None:
    started, spec = case.started, case.spec
    rows = spec.train.rows * spec.train.accumulation * spec.compute.gpus
    pairs = (
        ("train.steps", started.steps, spec.train.steps),
        ("loss.alpha", started.alpha, spec.loss.alpha),
        ("loss.temperature", started.temperature, spec.loss.temperature),
        ("train.lr", started.peak_lr, spec.train.lr),
        ("train.rows * accumulation", started.rows_per_step, rows),
        ("data.seq_len", started.seq_len, spec.data.seq_len),
    )  # fmt: skip
    wrong = [
        (name, float(found), f"set to {wanted:g}")
        for name, found, wanted in pairs
        if found != wanted
    ]
    if not wrong:
        return None
    return alert(
        "run_not_as_set",
        ERROR,
        f"{wrong[0][0]} is {wrong[0][1]:g} in the run, {wrong[0][2]}",
        wrong,
        case.recent(0.0),
        meaning="a setting did not reach the object that it is for: the run is another one than was asked for",
        no_flip="this is a fault of the engine: no setting can cause it",
    )


RULES = (
    Rule(
        id="batch_not_as_set",
        asks="Are the rows and tokens of a step, and the position in the data, what they should be?",
        reads=("rows", "tokens", "position", "rows_per_step", "seq_len"),
        threshold=f"one of {STEPS} steps differs",
        judge=batch_not_as_set,
    ),
    Rule(
        id="run_not_as_set",
        asks="Did every setting reach the run?",
        reads=("run_started", "effective.json"),
        threshold="one value differs",
        judge=run_not_as_set,
    ),
)
