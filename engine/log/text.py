"""A RunView in words. Every surface prints these, so that a terminal, a pipe and a notebook say the
same.

What is not known reads "not measured" or gives its reason; a non-finite number reads `NaN` or
`+inf`.
"""

from __future__ import annotations

import math

from engine.log.device_text import device_lines as device_lines
from engine.log.event_text import alert_lines as alert_lines
from engine.log.event_text import check_text as check_text
from engine.log.event_text import decision_lines as decision_lines
from engine.log.event_text import event_text as event_text
from engine.log.event_text import sample_text as sample_text
from engine.log.event_text import step_text as step_text
from engine.log.events import Evaluated
from engine.log.phrases import clock_text as clock_text
from engine.log.phrases import nats_text
from engine.log.phrases import one_line as one_line
from engine.log.read import Liveness
from engine.log.view import GOING_ON, LogLine, RunView
from engine.units import format_count, format_seconds, format_value


def has_ended(state: str) -> bool:
    """Whether a state is one that a run does not leave by itself."""
    return state not in GOING_ON


def alerts_text(view: RunView) -> str:
    """The alerts that stand, in a word: `2 alerts: data_wait, gpu_idle`; empty when none does."""
    names = sorted(view.alerts)
    if not names:
        return ""
    return f"{len(names)} alert{'s' if len(names) > 1 else ''}: {', '.join(names)}"


def checks_failed_text(view: RunView) -> str:
    """The checks that failed, in a word: `2 checks failed: shift_proof, loss_gradient`; empty when
    none did."""
    names = [name for name, check in view.checks.items() if check.level == "fail"]
    if not names:
        return ""
    return f"{len(names)} check{'s' if len(names) > 1 else ''} failed: {', '.join(names)}"


def line_text(line: LogLine) -> str:
    """A log line with its local wall time."""
    return f"{clock_text(line.unix_s)} {event_text(line.event)}"


def status_text(view: RunView, alive: Liveness) -> str:
    """The run in one line: state, progress, loss, pace, time left; how it ended when it has."""
    state = view.state(alive)
    parts = [state.upper()]
    if view.total_steps is not None:
        parts.append(f"step {view.last_step}/{view.total_steps}")
    if state == "starting" and view.phase is not None:
        parts.append(event_text(view.phase))
    if failed := checks_failed_text(view):
        parts.append(failed)
    if view.alerts:
        parts.append(alerts_text(view))
    if len(view.steps):
        parts.append(f"loss {format_value(view.steps.last('loss'))}")
    student = view.eval_of("student")
    if student is not None:
        parts.append(f"held-out {format_value(student.loss)}")
    parts += _ending(view, state) if has_ended(state) else _pace(view, state, alive)
    return one_line(" | ".join(parts))


def _pace(view: RunView, state: str, alive: Liveness) -> list[str]:
    parts = []
    eta_s = view.eta_s()
    if view.tokens_per_second() is not None:
        parts.append(_pace_text(view))
    if eta_s and state == "running":
        parts.append(f"{format_seconds(eta_s)} left")
    if alive.trainer and not alive.supervisor:
        parts.append("UNWATCHED: the supervisor is gone")
    return parts


def share_of_peak(view: RunView) -> float | None:
    """How much of the device's dense bf16 rate the run's own arithmetic uses, 0 to 1; None where the
    pace or the rate is not known."""
    started, pace = view.started, view.tokens_per_second()
    if started is None or not started.flops_per_token or not started.peak_flops_per_s or not pace:
        return None
    return pace * started.flops_per_token / started.peak_flops_per_s


def _pace_text(view: RunView) -> str:
    pace, share = view.tokens_per_second(), share_of_peak(view)
    return f"{format_count(pace)} tok/s" + (f" ({share:.0%} of peak bf16)" if share else "")


def _ending(view: RunView, state: str) -> list[str]:
    if view.finished is not None:
        return [view.finished.reason] if view.finished.state != "completed" else []
    if view.exit is not None:
        return [view.exit.sentence]
    if state == "host_lost":
        return [host_lost_text(view)]
    return ["no process of it exists and nobody recorded its end"] if state == "vanished" else []


def host_lost_text(view: RunView) -> str:
    """What is known of a run that neither it nor its supervisor could write the end of."""
    words = (
        "the machine stopped or restarted while it ran (its boot id is not this one's; a run copied from "
        "another machine looks the same)"
    )
    if (view.facts or {}).get("cuda0_integrated") == "yes":
        words += "; where GPU and host share memory, running out of it is possible and not proved"
    return f"{words}; continue it with `engine distill --resume`"


def result_lines(view: RunView) -> list[str]:
    """How the student compares, once there is something to compare."""
    names = {"untrained": "student before training", "student": "student", "teacher": "teacher"}
    lines = []
    for subject, words in names.items():
        done = view.eval_of(subject)
        if done is not None:
            at = f" at step {done.step}" if subject == "student" else ""
            lines.append(
                f"held-out loss of the {words}{at}: {nats_text(done.loss)}{_perplexity(done)}"
            )
    if view.student is not None:
        lines.append(f"student saved in {view.student.path}")
    return [one_line(line) for line in lines]


def _perplexity(done: Evaluated) -> str:
    # A float holds exp(x) up to x = 709.78; a loss above that, or none, has no perplexity to show.
    if done.loss is None or not done.loss < 709:
        return ""
    return f", perplexity {format_value(math.exp(done.loss), 2)}"


def ledger_line(view: RunView) -> str:
    """Where the newest step spent its time; empty where nobody measured."""
    total = sum(view.phases.values())
    if not total:
        return ""
    shares = sorted(view.phases.items(), key=lambda item: -item[1])
    words = ", ".join(
        f"{name} {format_seconds(s)} ({s / total:.0%})" for name, s in shares if s > 0
    )
    return f"step   {format_seconds(total)}: {words}"


def speed_lines(view: RunView) -> list[str]:
    """How fast the last steps were, as a share of what the device could, and where the newest one went."""
    pace = [] if view.tokens_per_second() is None else [f"speed  {_pace_text(view)}"]
    return [*pace, *filter(None, [ledger_line(view)])]
