"""Carry out one drill: the run, the observation, the verdict.

PASS      the incident was named as required
FAIL      the run ended, or its time was over, without that
UNKNOWN   the drill cannot be carried out here, with the reason

The delay is counted from the first effect that could be seen: the first step that was computed with the
incident, the silence of a hang, or the death of the trainer. An incident that is named before the first step had
no effect yet.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

from engine.drills.catalogue import Drill, Need
from engine.drills.naming import ALERT, EXIT, Naming, named_as, names_of
from engine.drills.runs import (
    DEMO,
    Attended,
    copy_inputs,
    memory_group,
    start,
    store_outputs,
    why_no_memory_group,
    write_spec,
)
from engine.errors import EngineError
from engine.log.folder import RunFolder
from engine.machine.cuda_driver import ask_in_child
from engine.machine.kill_counters import read_kill_counters
from engine.verdict import Level, Verdict

LIMIT_S = 90.0
"""Seconds within which a run reaches BEGUN_STEPS, or its second session."""
ENDING_S = 20.0
"""Seconds within which a run must end by itself after its incident was named."""
BEGUN_STEPS = 3
"""Steps of a run before it is killed, or stopped to be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    drill: Drill
    verdict: Verdict
    named: Naming | None = None
    others: tuple[str, ...] = ()
    """Other names that the log gives, in order of time."""
    after_s: float | None = None
    """Seconds from the first effect to the name; None when it was named before any effect."""
    after_start_s: float | None = None
    """Seconds from the start of the trainer to the name."""
    steps: int = 0
    """Number of steps done when the incident was named."""
    state: str = ""
    """State of the run at its end."""
    cost_s: float = 0.0


def carry_out(drill: Drill, folder: Path, *, device: str = "cpu") -> Drilled:
    """Carry out `drill` in the run folder `folder`/ID, on `device` (cpu or cuda)."""
    missing = why_not(drill)
    if missing:
        return Drilled(drill=drill, verdict=Verdict(Level.UNKNOWN, missing))
    begun_s = time.monotonic()
    run = Attended(RunFolder(folder / drill.id))
    device = "cuda" if "gpu" in drill.needs else device
    inputs = folder / f"{drill.id}-inputs"
    sets = copy_inputs(inputs) if drill.altered else {}
    sets |= {"compute.device": device, **drill.sets}
    if drill.stored:
        sets["teacher.cache"] = str(folder / f"{drill.id}-store")
    spec = write_spec(folder / f"{drill.id}.toml", sets, inputs)
    try:
        if drill.stored:
            store_outputs(spec)
        with memory_group(drill.memory_limit_bytes) as group:
            try:
                effect_unix_s = _run(drill, run, spec, inputs, group)
            finally:
                run.end()
    except (EngineError, OSError) as error:
        failed = Verdict(Level.FAIL, _plain(str(error), folder))
        return Drilled(drill=drill, verdict=failed, cost_s=time.monotonic() - begun_s)
    return judged(drill, run, effect_unix_s, folder, time.monotonic() - begun_s)


def _run(drill: Drill, run: Attended, spec: Path, inputs: Path, group: Path | None) -> float | None:
    """Run until the incident is named or the run ends. Return the time at which the trainer was killed; None if it was
    not."""
    plant = drill.id if drill.planted else ""
    effect_unix_s = None
    new = [str(spec), "--out", str(run.run.path)]
    if drill.act == "resume":
        start(new, run.run)
        if run.wait(lambda view: view.last_step >= BEGUN_STEPS, LIMIT_S):
            run.stop()
        _alter(drill, inputs, run)
        start(["--resume", str(run.run.path)], run.run, plant=plant)
        run.wait(lambda view: view.sessions == 2, LIMIT_S)
    else:
        _alter(drill, inputs, run)
        start(new, run.run, plant=plant, group=group)
    if drill.act == "kill" and run.wait(lambda view: view.last_step >= BEGUN_STEPS, LIMIT_S):
        effect_unix_s = run.kill()
    run.wait(lambda view: named_as(names_of(view), drill.expected) is not None, drill.limit_s)
    named = named_as(names_of(run.view), drill.expected)
    if named is not None and named.kind != ALERT:
        # A run whose incident is named ends by itself; one that hangs does not.
        run.wait(lambda view: view.exit is not None, ENDING_S)
    return effect_unix_s


def _alter(drill: Drill, inputs: Path, run: Attended) -> None:
    if drill.altered:
        from engine.drills.inputs import alter

        alter(drill.id, run.run.path if drill.act == "resume" else inputs)


def judged(
    drill: Drill, run: Attended, effect_unix_s: float | None, folder: Path, cost_s: float
) -> Drilled:
    """Judge the drill by the logs of a run that has ended."""
    view = run.view
    namings = [naming for naming in names_of(view) if naming.unix_s < run.ended_unix_s]
    named = named_as(namings, drill.expected)
    others = tuple(dict.fromkeys(n.name for n in namings if n is not named))
    state = run.follower.state
    if named is None:
        expected = " or ".join(accepted.name for accepted in drill.expected)
        others_text = ", ".join(others) or "nothing"
        text = f"expected {expected}, found {others_text}; the run: {state}"
        failed = Verdict(Level.FAIL, text)
        return Drilled(drill=drill, verdict=failed, others=others, state=state, cost_s=cost_s)
    rows = range(view.session_row, len(view.steps))
    done_unix_s = [view.steps.value("unix_s", row) for row in rows]
    first_unix_s = next(iter(done_unix_s), None)
    if named.kind == ALERT:
        effect_unix_s = named.since_unix_s
    elif named.kind == EXIT:
        effect_unix_s = effect_unix_s or run.died_unix_s or view.exit_unix_s
    elif first_unix_s is not None and first_unix_s < named.unix_s:
        effect_unix_s = first_unix_s
    started_unix_s = view.trainer_started_unix_s or named.unix_s
    return Drilled(
        drill=drill,
        verdict=Verdict(Level.PASS, _plain(named.text, folder)),
        others=others,
        state=state,
        cost_s=cost_s,
        named=named,
        after_s=None if effect_unix_s is None else max(0.0, named.unix_s - effect_unix_s),
        after_start_s=named.unix_s - started_unix_s,
        steps=sum((unix_s or 0.0) <= named.unix_s for unix_s in done_unix_s),
    )


def _plain(text: str, folder: Path) -> str:
    """Remove the paths of this machine from a text."""
    package = str(DEMO.parents[1])
    return text.replace(f"{folder}/", "").replace(f"{package}/", "")


def why_not(drill: Drill) -> str:
    """Return the reason why a drill cannot be carried out here; empty if it can."""
    return next(filter(None, map(_missing, drill.needs)), "")


def _missing(need: Need) -> str:
    match need:
        case "gpu":
            facts = ask_in_child()
            return "" if facts.devices else f"no CUDA GPU: {facts.state}"
        case "triton":
            return "" if importlib.util.find_spec("triton") else "triton is not installed"
        case "memory group":
            return why_no_memory_group()
        case "kill counters":
            counter = read_kill_counters().vmstat_oom_kill
            return "" if counter.number is not None else f"{counter.source}: {counter.absent}"
