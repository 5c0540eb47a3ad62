"""What a flip could test about a run, most urgent first: one suspicion for each alert that names a flip, then
one for each automatic choice that has an alternative.

What cannot be tested on this run comes last, with the reason: a flip would refuse it, or would compare a run
with itself. The reasons here are derived only from settings, decisions and device facts; before a start
`engine flip --dry-run` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import BadInput
from engine.flips.proof import as_choice
from engine.log.events import AlertRaised
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.spec import KEYS

_SET = "--set "
NO_BLOCKS = "no quantized blocks"
"""Part of the reason in a Decision that rejects quantized weights."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One setting to change, and the hypothesis that this would test."""

    assignment: str
    """`knob=value`, as after --set."""
    hypothesis: str
    source: str
    """The alert or the decision that raised it, as text."""
    impossible: str = ""
    """Why it cannot be tested on this run; empty where it can."""

    @property
    def knob(self) -> str:
        return self.assignment.partition("=")[0]

    @property
    def value(self) -> str:
        return self.assignment.partition("=")[2]


def suspicions(view: RunView, settings: Mapping[str, Any] | None = None) -> tuple[Suspicion, ...]:
    """Return each assignment once, from the first source that names it; what cannot be tested comes last.
    `settings` are those of the run by dotted key, if they could be read."""
    found: dict[str, Suspicion] = {}
    for suspicion in (*_of_alerts(view), *_of_decisions(view)):
        found.setdefault(suspicion.assignment, suspicion)
    judged = [
        replace(one, impossible=why_impossible(one, view, settings or {})) for one in found.values()
    ]
    # A stable sort: the order within both halves stays.
    return tuple(sorted(judged, key=lambda one: bool(one.impossible)))


def of_alert(alert: AlertRaised) -> Suspicion:
    """Return the flip that an alert names."""
    assignment = alert.flip.removeprefix(_SET)
    words = f"{assignment} ends this: {alert.title}"
    return Suspicion(assignment, words, f"alert {alert.id}: {alert.title}")


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the settings of a run after defaults, by dotted key; empty if they cannot be read."""
    try:
        tree = run.read_effective()["spec"]
        return {f"{s}.{key}": value for s, part in tree.items() for key, value in part.items()}
    except BadInput:
        return {}


def why_impossible(one: Suspicion, view: RunView, settings: Mapping[str, Any]) -> str:
    """Return why a flip of this cannot show anything about this run; empty if it can."""
    if one.knob not in KEYS or not one.value:
        return f"{one.knob} is not a setting"
    if one.knob in settings and as_choice(settings[one.knob]) == one.value:
        return f"it is {one.value} already"
    chosen = {decision.knob: decision for decision in view.decisions}
    decision = chosen.get(one.knob)
    if decision is not None and decision.choice == one.value:
        return f"the run chose {one.value} by itself: both arms would do the same"
    device = chosen["compute.device"].choice if "compute.device" in chosen else ""
    on_cpu = "cpu" in (device, settings.get("compute.device"))
    match one.knob, one.value:
        case "memory.allocator", "managed":
            if on_cpu:
                return "managed memory needs a GPU, and the run computes on the CPU"
            if _has_no_gpu(view):
                return "managed memory needs a GPU, and none was found on this machine"
        case "compute.device", "cuda":
            if _has_no_gpu(view):
                return "no GPU was found on this machine"
        case ("teacher.kernel" | "loss.kernel", "fused") | (
            "student.attention" | "teacher.attention",
            "packed",
        ):
            if on_cpu:
                return "its kernels need a GPU, and the run computes on the CPU"
        case "teacher.backend", "quantized" | "dequantized" | "cached":
            if settings.get("teacher.path") == "":
                return "the run has no teacher"
            if one.value == "quantized" and _teacher_has_no_blocks(one.knob, view, settings):
                return "the teacher's file holds dense weights: it has no quantized blocks"
    return ""


def _has_no_gpu(view: RunView) -> bool:
    """Whether the logged device facts show no GPU; False without facts."""
    if view.facts is None:
        return False
    return not (view.facts.get("cuda_count") or view.facts.get("gpu_count"))


def _teacher_has_no_blocks(knob: str, view: RunView, settings: Mapping[str, Any]) -> bool:
    for decision in view.decisions:
        if decision.knob == knob and any(
            value == "quantized" and NO_BLOCKS in why for value, why in decision.rejected
        ):
            return True
    return str(settings.get("teacher.path", "")).endswith(".safetensors")


def _of_alerts(view: RunView) -> Iterator[Suspicion]:
    # Errors before warnings; newest first among equals.
    alerts = sorted(view.alerts.values(), key=lambda a: (a.severity != "error", -a.to_unix_s))
    for alert in alerts:
        if alert.flip.startswith(_SET):
            yield of_alert(alert)


def _of_decisions(view: RunView) -> Iterator[Suspicion]:
    for decision in view.decisions:
        if decision.knob not in KEYS:
            continue
        for value, why in decision.rejected:
            yield Suspicion(
                f"{decision.knob}={value}",
                f"{decision.knob}: {value} is better here than {decision.choice}",
                f"decision {decision.knob} = {decision.choice}; not {value}: {why}",
            )
