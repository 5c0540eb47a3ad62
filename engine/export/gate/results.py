"""Judge the gates that are read from a finished run and from evaluations of its student.

    heldout   loss(student) <= gate.heldout_loss, and
              (loss(untrained) - loss(student)) / (loss(untrained) - loss(teacher)) >= gate.heldout_share
    eval      the lower end of Wilson's 95 % interval of pass@1 >= gate.pass_at_1

The run logged three held-out losses on the same rows: of the saved student, read back from its files; of the student
before its first step; and of the teacher. The result is unknown if the run did not complete, if it saves no student, or
if the student's files have changed since. A loss that differs from the receipt fails. An evaluation is accepted if it
is of the run's own weights and each of its programs was judged.
"""

from __future__ import annotations

import shlex

from engine.errors import BadInput
from engine.evaluate.model import weights_sha256
from engine.evaluate.report import report_of_file
from engine.export.gate.gate import Subject, does_not_apply
from engine.export.outcome import Outcome, answered, unknown
from engine.log.folder import RunFolder
from engine.receipts.receipt import check_student_files
from engine.verdict import Level

HELDOUT, EVAL = "heldout", "eval"


# contract: phase-gates-v1
def heldout_target(subject: Subject) -> Outcome:
    run, view, gate = subject.run, subject.view, subject.spec.gate
    if run is None or view is None:
        text = "a spec has no student yet: `engine distill SPEC`, then `engine gate RUN`"
        return unknown(HELDOUT, text)
    state = view.state(run.liveness())
    if state != "completed":
        text = f"the run is {state}: finish it with `engine distill --resume {shlex.quote(str(run.path))}`"
        return unknown(HELDOUT, text)
    losses = {
        event.subject: event.loss
        for event in view.evals
        if event.subject != "student" or event.saved
    }
    loss, untrained, teacher = (losses.get(name) for name in ("student", "untrained", "teacher"))
    numbers = {
        f"{name}_loss": value
        for name, value in (("student", loss), ("untrained", untrained), ("teacher", teacher))
        if value is not None
    }
    if loss is None or untrained is None:
        absent = "the saved student" if loss is None else "the untrained student"
        return unknown(HELDOUT, f"no held-out loss of {absent} in the log", **numbers)
    if changed := changed_since(run):
        return unknown(
            HELDOUT,
            f"the student's files have changed since its held-out loss was measured: {changed}",
            **numbers,
        )
    # The receipt has the losses too, so that a changed log is detected.
    reported = (run.read_receipt() or {}).get("heldout_loss_nats") or {}
    for name, value in losses.items():
        if name in reported and value != reported[name]:
            text = f"the held-out loss of the {name} is {value!r} here, {reported[name]!r} in {run.receipt.name}"
            return answered(HELDOUT, Level.FAIL, text, **numbers)
    texts = [f"loss {loss:.4f}, untrained {untrained:.4f}"]
    levels = []
    if gate.heldout_loss:
        texts.append(f"target at most {gate.heldout_loss:g}")
        levels.append(Level.PASS if loss <= gate.heldout_loss else Level.FAIL)
    if gate.heldout_share == 0:
        levels.append(Level.PASS if loss < untrained else Level.FAIL)
    elif teacher is None or not teacher < untrained:
        texts.append("share of the way unknown: no teacher loss below the untrained student's")
        levels.append(Level.UNKNOWN)
    else:
        numbers["share"] = share = (untrained - loss) / (untrained - teacher)
        texts.append(
            f"{share:.1%} of the way to the teacher's {teacher:.4f}, target at least {gate.heldout_share:.1%}"
        )
        levels.append(Level.PASS if share >= gate.heldout_share else Level.FAIL)
    return answered(HELDOUT, min(levels), ", ".join(texts), **numbers)


def changed_since(run: RunFolder) -> str:
    """Return the name of a file of the student that differs from the receipt; empty if none does."""
    verdicts = check_student_files(run, run.read_receipt() or {})
    return next((v.reason for v in verdicts.values() if v.level is not Level.PASS), "") or (
        "" if verdicts else "the run has no receipt with their hashes"
    )


# contract: phase-gates-v1
def eval_threshold(subject: Subject) -> Outcome:
    threshold = subject.spec.gate.pass_at_1
    if threshold == 0:
        return does_not_apply(EVAL, "no threshold is set (gate.pass_at_1)")
    if subject.run is None:
        return unknown(EVAL, "a spec has no student yet: gate the run")
    if not subject.run.student.is_dir():
        return unknown(EVAL, "the run has no student yet")
    if not subject.evaluations:
        run = shlex.quote(str(subject.run.path))
        text = (
            f"not evaluated: `engine eval humaneval {run} --data FILE --results R.jsonl`, then "
            "`engine gate RUN --eval R.jsonl`"
        )
        return unknown(EVAL, text)
    weights = weights_sha256(subject.run.student)
    gates = []
    for path in subject.evaluations:
        try:
            report, about = report_of_file(path)
        except BadInput as error:
            gates.append(unknown(EVAL, error.message))
            continue
        if about.get("weights_sha256") != weights:
            gates.append(unknown(EVAL, f"{path} evaluates other weights than the run's student"))
        elif not report.known or report.interval is None:
            every = report.problems * report.samples
            text = f"{path}: {every - report.attempts} of {every} programs were not judged"
            gates.append(unknown(EVAL, text))
        else:
            low, high = report.interval
            text = (
                f"{report.benchmark} pass@1 {report.pass_at_k[1]:.1%} [{low:.1%}, {high:.1%}], target of "
                f"its lower end at least {threshold:.1%}"
            )
            if left_out := about.get("without"):
                text += f" (without {', '.join(left_out)})"
            level = Level.PASS if low >= threshold else Level.FAIL
            numbers = {
                "pass_at_1": report.pass_at_k[1],
                "low": low,
                "high": high,
                "limit": threshold,
            }
            gates.append(answered(EVAL, level, text, **numbers))
    worst = min(gates, key=lambda gate: gate.verdict.level if gate.verdict else Level.PASS)
    text = "; ".join(gate.reason for gate in gates)
    return Outcome(id=EVAL, verdict=worst.verdict, reason=text, numbers=worst.numbers)
