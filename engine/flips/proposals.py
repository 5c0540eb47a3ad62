"""Propose flips for a run, most urgent first.

For the engine's own run: one proposal for each alert that names a flip, then one for each automatic choice that has an
alternative. For a watched run: changes of one line that would end what its identities show (`fixes.py`), the IDEAS for
its alerts, then those that can be tried with any script.

Proposals that cannot be tested on this run come last, with the reason: a flip would refuse them, or compare a run with
itself. The reasons come from the run's settings and decisions, which record what is impossible on its machine; before a
start `engine flip --dry-run` decides.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.decision import as_choice
from engine.flips.fixes import fixes_of
from engine.flips.watched import options_for, options_of
from engine.log.events import FAIL, Judged
from engine.log.folder import WatchedCommand
from engine.log.observed import STALLS
from engine.log.view import RunView
from engine.spec import KEYS
from engine.watch.rules.pace import MORE_WORKERS

_SET = "--set "


@dataclass(frozen=True, slots=True)
class Proposal:
    """One thing to change, and the hypothesis that this would test."""

    assignment: str
    """`knob=value`, as after --set; of a watched run also `NAME=VALUE` of its environment, or `--option value`."""
    hypothesis: str
    source: str
    """The alert or the decision that raised it, as text."""
    impossible: str = ""
    """Reason why it cannot be tested on this run; empty where it can."""
    seen: bool = True
    """Whether something in this run suggests it; else it may be tried with any script."""
    ends: str = ""
    """The observation that it would end, as `identity kept_gradients`; empty where it changes a metric."""

    @property
    def knob(self) -> str:
        return self.assignment.partition("=")[0]

    @property
    def value(self) -> str:
        return self.assignment.partition("=")[2]

    @property
    def options(self) -> list[str]:
        """The options of `engine flip` that test it."""
        return [*(["--ends", self.ends] if self.ends else []), *options_for(self.assignment)]


def proposals(
    view: RunView,
    settings: Mapping[str, Any] | None = None,
    command: WatchedCommand | None = None,
) -> tuple[Proposal, ...]:
    """Return each assignment once, from the first source that names it; what cannot be tested comes last.
    `settings` are those of the run by dotted key, if they could be read; `command` is that of a watched run. An
    imported log has no proposals: its command is not on record, so it cannot be started again."""
    if command is not None:
        return _script_proposals(view, command) if command.arguments else ()
    found: dict[str, Proposal] = {}
    for proposal in (*_alert_proposals(view), *_decision_proposals(view)):
        found.setdefault(proposal.assignment, proposal)
    judged = [
        replace(proposal, impossible=why_impossible(proposal, view, settings or {}))
        for proposal in found.values()
    ]
    # A stable sort: the order within both halves stays.
    return tuple(sorted(judged, key=lambda proposal: bool(proposal.impossible)))


def of_alert(alert: Judged) -> Proposal:
    """Return the flip that an alert names."""
    assignment = alert.flip.removeprefix(_SET)
    words = f"{assignment} ends this: {alert.text}"
    return Proposal(assignment, words, f"alert {alert.id}: {alert.text}")


def why_impossible(proposal: Proposal, view: RunView, settings: Mapping[str, Any]) -> str:
    """Return why a flip of this proposal cannot show anything about this run; empty if it can."""
    if proposal.knob not in KEYS or not proposal.value:
        return f"{proposal.knob} is not a setting"
    if proposal.knob in settings and as_choice(settings[proposal.knob]) == proposal.value:
        return f"it is {proposal.value} already"
    chosen = {decision.knob: decision for decision in view.decisions}
    decision = chosen.get(proposal.knob)
    if decision is not None and decision.choice == proposal.value:
        return f"the run chose {proposal.value} by itself: both arms would do the same"
    if decision is not None and proposal.value in decision.impossible:
        return dict(decision.rejected).get(proposal.value, "it is not possible on this machine")
    if proposal.knob == "teacher.backend" and settings.get("teacher.path") == "":
        return "the run has no teacher"
    return ""


def _active(view: RunView) -> list[Judged]:
    """Return the active alerts: errors before warnings; newest first among equals."""
    return sorted(view.alerts.values(), key=lambda a: (a.level != FAIL, -a.to_unix_s))


def _alert_proposals(view: RunView) -> Iterator[Proposal]:
    for alert in _active(view):
        if alert.flip.startswith(_SET):
            yield of_alert(alert)


def _decision_proposals(view: RunView) -> Iterator[Proposal]:
    for decision in view.decisions:
        if decision.knob not in KEYS:
            continue
        for value, why in decision.rejected:
            yield Proposal(
                f"{decision.knob}={value}",
                f"{decision.knob}: {value} is better here than {decision.choice}",
                f"decision {decision.knob} = {decision.choice}; not {value}: {why}",
            )


# Watched scripts.

GPU, RANKS, COMPILES, LOADER = "gpu", "ranks", "compiles", "loader"
WORKERS = ("--num-workers", "--workers", "--n-workers", "--num-data-workers", "--loader-workers")


class Idea(NamedTuple):
    """A change that can be tried in any script."""

    assignment: str
    hypothesis: str
    alerts: tuple[str, ...] = ()
    """Alerts for which it is proposed first; without such an alert it is only listed as one that may be tried."""
    needs: tuple[str, ...] = ()
    """Requirements of the test: a GPU, several ranks, something compiled, a DataLoader."""
    options: tuple[str, ...] = ()
    """Options of a script with the same effect, with `-` for `_`; the first is that of TrainingArguments."""
    value: str = ""
    """Value for such an option; if empty, that of the assignment."""
    only_alert: bool = False
    """Whether it is proposed only with one of its alerts."""


IDEAS: tuple[Idea, ...] = (
    Idea(
        MORE_WORKERS,
        "batches are read and prepared in parallel to the step",
        ("data_wait",),
        (LOADER,),
        options=("--dataloader-num-workers", *WORKERS),
    ),
    Idea(
        "loader.pin_memory=on",
        "batches reach the GPU sooner from page-locked memory",
        ("data_wait",),
        (GPU, LOADER),
        ("--dataloader-pin-memory", "--pin-memory"),
        "True",
    ),
    Idea(
        "loader.workers=0",
        "a worker process of the loader hangs",
        STALLS,
        (LOADER,),
        only_alert=True,
    ),
    Idea(
        "TORCH_COMPILE_DISABLE=1",
        "without torch.compile no step waits for a compiler",
        ("compile_after_warm_up",),
        (COMPILES,),
    ),
    Idea(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "expandable segments reduce memory fragmentation",
        ("memory_ceiling", "memory_pressure", "step_time_drift"),
        (GPU,),
    ),
    Idea(
        "NCCL_P2P_DISABLE=1",
        "a collective hangs in direct transfers between GPUs",
        STALLS,
        (GPU, RANKS),
    ),
    Idea(
        "NCCL_IB_DISABLE=1",
        "a collective hangs in InfiniBand or RoCE",
        STALLS,
        (GPU, RANKS),
    ),
    Idea(
        "CUDA_LAUNCH_BLOCKING=1",
        "synchronous kernels name the line that fails",
        (*STALLS, "non_finite"),
        (GPU,),
    ),
    Idea(
        "attention.backend=math",
        "the fused attention kernels cause it",
        ("non_finite",),
        (GPU,),
    ),
    Idea("matmul.precision=high", "TF32 makes float32 matmuls faster", needs=(GPU,)),
    Idea(
        "--torch_compile True",
        "compiled layers launch fewer kernels",
        needs=(GPU,),
        options=("--torch-compile",),
        value="True",
    ),
    Idea("OMP_NUM_THREADS=1", "threads of CPU operations block each other", STALLS),
    Idea("torch.deterministic=on", "deterministic algorithms cost time here", ("loss_spike",)),
)
TRAINING_ARGUMENTS = frozenset({"--per-device-train-batch-size", "--num-train-epochs"})
"""Options that identify a script with transformers' TrainingArguments, which takes all of their options."""
_MISSING = {
    GPU: "it needs a GPU, and the run computes on {device}",
    RANKS: "the run has one rank",
    COMPILES: "torch.compile compiled nothing in the run",
    LOADER: "no DataLoader was seen in the run",
}


def _script_proposals(view: RunView, command: WatchedCommand) -> tuple[Proposal, ...]:
    active = _active(view)
    found: list[tuple[bool, int, Proposal]] = []
    for idea in IDEAS:
        urgency = next((at for at, one in enumerate(active) if one.id in idea.alerts), len(active))
        alert, missing = active[urgency : urgency + 1], _missing_requirement(idea, view)
        if not alert and (idea.only_alert or missing):
            continue
        source = (
            f"alert {alert[0].id}: {alert[0].text}" if alert else "can be tried with any script"
        )
        assignment, impossible = _as_option(idea, options_of(command.arguments))
        impossible = missing or impossible or _why_unchanged(assignment, view)
        one = Proposal(assignment, idea.hypothesis, source, impossible, bool(alert))
        found.append((bool(impossible), urgency, one))
    fixes = [
        Proposal(fix.assignment, fix.change, f"{fix.ends}: {fix.seen}", ends=fix.ends)
        for fix in fixes_of(view, command)
    ]
    # A stable sort: the order of the table stays among equals.
    return (*fixes, *(one for *_, one in sorted(found, key=lambda each: each[:2])))


def _as_option(idea: Idea, given: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Return the change for a command with these options, by its own option where it has one, and why it is impossible;
    the reason is empty if it is possible."""
    name = next((option for option in idea.options if option in given), None)
    takes_all = not TRAINING_ARGUMENTS.isdisjoint(given)
    if name is None and takes_all and idea.options:
        name = idea.options[0]
    if name is None:
        by_option = idea.assignment.startswith("-")
        return (
            idea.assignment,
            "the command has no such option: give the script one" if by_option else "",
        )
    value = idea.value or idea.assignment.partition("=")[2]
    spelt, old = given.get(name, (f"--{name[2:].replace('-', '_')}", None))
    if old == "":
        return spelt, "the command already has this option"
    if old is not None and old.isdecimal() and value.isdecimal() and int(old) >= int(value):
        value = str(2 * int(old))
    return f"{spelt} {value}", f"it is {value} already" if old == value else ""


def _missing_requirement(idea: Idea, view: RunView) -> str:
    watched = view.watched
    device = watched.device if watched is not None else "an unknown device"
    available = {
        GPU: device.startswith("cuda"),
        RANKS: watched is not None and watched.world > 1,
        COMPILES: bool(view.compiles),
        # Unknown before the first step.
        LOADER: not len(view.steps) or any(view.steps.values("data_s")),
    }
    return next(
        (_MISSING[need].format(device=device) for need in idea.needs if not available[need]), ""
    )


def _why_unchanged(assignment: str, view: RunView) -> str:
    name, _, value = assignment.partition("=")
    is_so = any((decision.knob, decision.choice) == (name, value) for decision in view.decisions)
    # Arms have the environment that the flip is started in.
    return f"it is {value} already" if is_so or os.environ.get(name) == value else ""


def proposal_fields(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal's fields for JSON."""
    return dataclasses.asdict(proposal) | {"options": proposal.options}


def proposal_lines(found: Sequence[Proposal], source: str) -> list[str]:
    """Return each proposal with its reason and the command that tests it."""
    lines = []
    for proposal in found:
        if proposal.impossible:
            lines += [f"{proposal.assignment}: cannot be tested: {proposal.impossible}"]
            continue
        line = shlex.join(["engine", "flip", source, *proposal.options])
        lines += [
            proposal.assignment,
            f"  {proposal.hypothesis}",
            f"  {proposal.source}",
            f"  test it: {line}",
        ]
    none = (
        "nothing to propose: no alert names a flip, and no choice has an alternative; an imported log has no command "
        "to start again"
    )
    return lines or [none]
